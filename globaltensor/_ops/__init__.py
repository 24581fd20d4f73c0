"""The implementation of torch functions on global tensors."""
