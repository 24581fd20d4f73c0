"""Results on ranks outside the placement: empty tensors that are still part of the autograd graph.

The plans of calls make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._base.pytree import rebuilt_tuple
from ..boxing.autograd import NOTHING
from ..distributed.world import world
from ..sharding.spec import Spec

__all__ = ["ShapeHeader", "materialised", "nonmember_outputs"]


class ShapeHeader:
    """A shape and dtype of a tensor, as sent to ranks outside a placement."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype


def materialised(told: Any, locals_: list[torch.Tensor]) -> Any:
    if isinstance(told, ShapeHeader):
        out = nonmember_outputs([None], locals_, told.dtype)[0]
        out._shape = told.shape  # type: ignore[attr-defined]
        return out
    if isinstance(told, (tuple, list)):
        parts = [materialised(v, locals_) for v in told]
        return type(told)(parts) if type(told) in (tuple, list) else rebuilt_tuple(told, parts)  # type: ignore[arg-type]
    return told


class _NonMember(torch.autograd.Function):
    """An autograd placeholder on a rank outside the placement, which computes nothing.

    Its backward joins the same boxings in the same order as that of the other ranks."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, device: torch.device, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.inputs = [(t.shape, t.dtype, t.device) for t in inputs]
        # a checkpoint recomputes its region here when the ranks that compute do
        ctx.save_for_backward(NOTHING)
        return torch.empty(0, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018
        return (
            None,
            None,
            *[
                torch.zeros(s, dtype=d, device=v) if d.is_floating_point or d.is_complex else None
                for s, d, v in ctx.inputs
            ],
        )


def nonmember_outputs(
    outs: Sequence[Spec | None], locals_: list[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the placeholders that a rank outside the placement holds for a call's results.

    They are empty, and linked to the operands in the autograd graph where gradients are
    recorded."""
    out = []
    for spec in outs:
        kind = spec.dtype if spec is not None else dtype
        grad = (
            torch.is_grad_enabled()
            and any(t.requires_grad for t in locals_)
            and (kind.is_floating_point or kind.is_complex)
        )  # type: ignore[union-attr]
        device = (
            world().outside(spec.placement.type)
            if spec is not None
            else next((t.device for t in locals_), torch.device("cpu"))
        )
        out.append(
            _NonMember.apply(kind, device, *locals_)
            if grad
            else torch.empty(0, dtype=kind, device=device)
        )
    return out
