"""The program of one rank: a torch.fx GraphModule and this package's calls in it."""
