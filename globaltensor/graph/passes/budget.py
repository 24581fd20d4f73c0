"""A memory limit: which parts of a program to recompute."""

from torch import fx

__all__ = ["choose"]


def choose(graph: fx.Graph, limit: int) -> None:
    """Mark parts to be recomputed."""
