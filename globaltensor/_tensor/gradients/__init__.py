"""Gradients of leaves: pending sums, buckets, flat buffers, and gathers of sharded parameters.

The tensor, dispatch and sharded optimizers use this package.
"""
