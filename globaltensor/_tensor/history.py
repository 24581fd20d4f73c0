"""The record of what a rank has run on global tensors, to compare it with the other ranks.

Handlers call `record`. The comparison is in distributed/divergence.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..distributed.world import world
from .global_tensor import GlobalTensor

__all__ = ["record", "record_together"]


def record_together(what: str, tensors: Sequence[GlobalTensor]) -> None:
    """Add a call on many tensors, with the layout of the first one, as one entry.

    Only tensors on the placement of the first one identify the call."""
    placement = tensors[0]._spec.shown.placement
    history = world().history((placement,))
    history.record(
        history.code_of(what, tensors[0]._spec),
        *[t._serial for t in tensors if t._spec.shown.placement is placement],
    )


def record(what: str, *tensors: GlobalTensor) -> None:
    """Add a call to the record of what this rank has run on global tensors.

    It is for handlers. Other calls are recorded by their plan. A tensor that has no serial yet gets
    the one of this record.
    """
    for t in tensors:
        spec = t._spec
        history = world().history((spec.shown.placement,))
        history.record(history.code_of(what, spec), t._serial)
        if not t._serial:
            t._serial = history.serial
