"""Placeholders for results on ranks outside the placement.

A placeholder is an empty tensor that is part of the autograd graph. The plans of calls make it.
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
    """A shape and dtype of a tensor, which its owner sends to ranks outside the placement."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype


def materialised(header: Any, locals_: list[torch.Tensor]) -> Any:
    """Return a pytree of results with a placeholder for each `ShapeHeader` in ``header``.

    ``locals_``: the operands' local tensors, to which the placeholders are linked in the autograd
    graph."""
    if isinstance(header, ShapeHeader):
        out = nonmember_outputs([None], locals_, header.dtype)[0]
        out._shape = header.shape  # type: ignore[attr-defined]
        return out
    if isinstance(header, (tuple, list)):
        parts = [materialised(v, locals_) for v in header]
        if type(header) in (tuple, list):
            return type(header)(parts)
        return rebuilt_tuple(header, parts)  # type: ignore[arg-type]
    return header


class _NonMember(torch.autograd.Function):
    """An autograd placeholder on a rank outside the placement, which computes nothing.

    Its backward joins the same boxings in the same order as that of the other ranks."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, device: torch.device, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.inputs = [(t.shape, t.dtype, t.device) for t in inputs]
        # Saving a tensor makes a checkpoint recompute its region on this rank when the ranks of the
        # placement recompute it.
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

    The placeholders are empty. Where gradients are recorded, the autograd graph links them to the
    operands."""
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
