"""Plain tensors into which global ones were written, so that every rank holds the full result.

A sum over ranks would count such a result once for each rank. The functions that write into plain
tensors record them here (_ops/dispatch.py, _ops/custom_ops.py). The collectives of
torch.distributed check the record before they begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ReplicatedError

__all__ = ["ADDING", "note_replicated", "noted", "refuse_replicated"]

# Plain tensor -> its version when a global value was written into it.
_noted: Final = WeakIdKeyDictionary()
#: The entries, to see quickly whether there are any.
noted: Final = _noted.data

#: The collectives that add up local tensors, or gather them for that: name -> the argument that
#: they read.
ADDING: Final = {
    "all_reduce": "tensor", "reduce": "tensor", "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input", "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor",
    "gather": "tensor", "gather_into_tensor": "tensor", "gather_single": "tensor",
}  # fmt: skip
# Reductions that leave equal values unchanged.
_HARMLESS: Final = (
    "AVG",
    "MIN",
    "MAX",
    "BAND",
    "BOR",
)


def note_replicated(plain: torch.Tensor) -> None:
    """Record that a plain tensor now holds a value that all ranks have computed together."""
    # An inference tensor has no version that would show a later write.
    if not plain.is_inference():
        _noted[plain] = plain._version


def _refuse(name: str, tensors: Iterable[Any], size: int) -> None:
    for t in tensors:
        if (
            isinstance(t, torch.Tensor)
            and t in _noted
            and not t.is_inference()
            and _noted[t] == t._version
        ):
            raise ReplicatedError(
                f"torch.distributed.{name}: this tensor of shape {list(t.shape)} was written by "
                f"operations on global tensors, so each rank already holds the "
                f"result for the whole batch, and adding it up over {size} ranks would count it "
                f"{size} times. Use the value as it is. If a metric "
                "sums over ranks, switch that off when you feed it global tensors (torchmetrics: "
                "sync_on_compute=False). To sum the copies of the "
                "ranks on purpose, pass tensor.clone()"
            )


def refuse_replicated(name: str, read: Any, op: Any, group: Any) -> None:
    """Raise ReplicatedError if a collective would add up a value that every rank holds in full.

    ``read`` is the tensor, or the list of tensors, that the collective reads.
    """
    if not _noted.data or name not in ADDING or getattr(op, "name", str(op)) in _HARMLESS:
        return
    size = dist.get_world_size(group)
    if size > 1:
        _refuse(name, read if isinstance(read, (list, tuple)) else (read,), size)
