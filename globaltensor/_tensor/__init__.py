"""The tensor: GlobalTensor, its views, its gradients and its files. Dispatch and users use it."""
