"""A mean whose count is still on its way: the quotient is taken when somebody looks at it.

A cross-entropy over a split batch divides by the targets that count on *all* ranks. Were that number awaited in the forward pass, every rank would wait for the
slowest in the middle of each step. Backward does not need it there: gradients are linear in what it starts from, so a pass may start from
``1 / bound`` and pay the factor ``bound / divisor`` when the gradients of leaves leave the rank to be summed (reducer.py), where ranks meet anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from .. import _torch
from ..wrapper import GlobalTensor

__all__ = ["Quotient"]


class Quotient(GlobalTensor):
    """``total / divisor()``. Becomes an ordinary GlobalTensor as soon as its local part is asked for."""

    __slots__ = ()

    @staticmethod
    def of(total: GlobalTensor, divisor: Callable[[], torch.Tensor], bound: int) -> GlobalTensor:
        """``divisor`` waits for a scalar; ``bound``: what it is most likely, the same on all ranks."""
        out = _torch.make_wrapper(Quotient, total._spec.shape, dtype=total._spec.dtype, device=total._local.device)
        out._spec = total._spec
        out.__dict__["_parts"] = (total, divisor, bound)
        return cast(GlobalTensor, out)

    @property
    def _local(self) -> torch.Tensor:  # type: ignore[override]
        return settle(self)._local

    @_local.setter
    def _local(self, value: torch.Tensor) -> None:
        settle(self)._local = value

    def owed(self) -> tuple[GlobalTensor, float, Callable[[], float]]:
        """(the total, what backward may start from instead, what the gradients have to be multiplied by)."""
        total, divisor, bound = self.__dict__["_parts"]
        return total, 1 / bound, lambda: bound / (float(divisor()._local) or bound)  # where nothing counts, nothing has a gradient


def settle(x: GlobalTensor) -> GlobalTensor:
    """Take the quotient: in place, since others may hold the tensor."""
    if isinstance(x, Quotient):
        total, divisor, _ = x.__dict__.pop("_parts")
        found: Any = total / divisor()
        x.__class__ = GlobalTensor
        x._local, x._spec = found._local, found._spec
    return x
