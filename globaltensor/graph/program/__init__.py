"""The program of one rank: a torch.fx GraphModule and the calls of ours in it."""
