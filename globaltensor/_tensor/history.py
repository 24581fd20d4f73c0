"""What a rank has run on global tensors, for the comparison with the other ranks
(distributed/divergence.py)."""

from __future__ import annotations

from ..distributed.world import world
from .global_tensor import GlobalTensor

__all__ = ["record"]


def record(what: str, *tensors: GlobalTensor) -> None:
    """Add to what this rank has run on global tensors: for handlers, which have no plan that
    does."""
    for t in tensors:
        spec = t._spec
        world().history((spec.shown.placement,)).record(what.encode() + spec.text)
