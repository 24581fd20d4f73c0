"""The record of what a rank has run on global tensors, to compare it with the other ranks.

Handlers call `record`. The comparison is in distributed/divergence.py. A function that one rank may
call alone records nothing: `identify_copy` gives its result a serial.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..distributed.world import world
from .global_tensor import GlobalTensor

__all__ = [
    "COPY", "GRADIENT", "detached_serial", "identify_copy", "identify_results", "record",
    "record_together",
]  # fmt: skip

# The serial of a gradient or copy is the hash of its tensor's serial and one of these numbers.
GRADIENT = 1
COPY = 2


def detached_serial(x: GlobalTensor) -> int:
    """Return the serial of ``x.detach()``. It is another one if ``x`` requires grad.

    One rank may detach alone. But an operation on the result has other gradients than the same
    operation on ``x``."""
    return -x._serial if x._local.requires_grad else x._serial


def identify_copy(out: GlobalTensor, source: GlobalTensor, kind: int = COPY) -> GlobalTensor:
    """Give ``out`` a serial that follows from the one of ``source`` alone, and return ``out``.

    The history of operations remains as it is, so one rank may make ``out`` alone. ``kind`` is a
    number that is the same on every rank."""
    out._serial = hash((source._serial, kind))
    return out


def identify_results(results: Sequence[GlobalTensor]) -> None:
    """Give each result of the call recorded last a serial of its own."""
    for i, result in enumerate(results):
        history = world().history((result._spec.shown.placement,))
        result._serial = hash((history.serial, i))


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
