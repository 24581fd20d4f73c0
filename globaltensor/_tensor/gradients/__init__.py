"""Gradients of leaves: pending sums, buckets, flat memory, and the gathers of sharded
parameters."""
