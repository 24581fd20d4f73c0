"""The record of what a rank has run on global tensors, to compare it with the other ranks.

Handlers call `record`. The comparison is in distributed/divergence.py.
"""

from __future__ import annotations

from ..distributed.world import world
from .global_tensor import GlobalTensor

__all__ = ["record"]


def record(what: str, *tensors: GlobalTensor) -> None:
    """Add a call to the record of what this rank has run on global tensors.

    It is for handlers. Other calls are recorded by their plan.
    """
    for t in tensors:
        spec = t._spec
        world().history((spec.shown.placement,)).record(what.encode() + spec.text)
