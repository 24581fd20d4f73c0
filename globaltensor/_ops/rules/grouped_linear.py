"""Linear layers of many experts at once, on local tensors: rows sorted by expert, each by its own
matrix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._base import torch_private

__all__ = ["gated", "grouped_linear"]

_ALIGNED: Final = 16  # bytes: what the kernel wants of rows and of where they begin


def grouped_linear(
    rows: Tensor, counts: Sequence[int], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``F.linear`` of the rows of each expert with its own weight: rows [n, in], weight [experts,
    out, in], bias [experts, out] -> [n, out].

    Rows are sorted by expert, ``counts`` says how many each has, and n is their sum. By torch's
    grouped matmul where it has one for the device and dtype, else expert by expert. For the
    functions of `experts`: on local tensors.

    >>> import torch
    >>> grouped_linear(torch.ones(3, 2), [1, 2], torch.tensor([[[1.0, 1.0]], [[2.0, 2.0]]]))
    tensor([[2.],
            [4.],
            [4.]])
    """
    if (
        not rows.is_meta
        and torch.is_autocast_enabled(rows.device.type)
        and rows.dtype is not torch.float64
    ):  # the kernel is none of those that autocast knows
        kind = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    out = (
        _Grouped.apply(rows, weight, tuple(counts))
        if _has_kernel(rows, weight)
        else _one_by_one(rows, counts, weight)
    )  # type: ignore[no-untyped-call]
    if bias is not None:
        out = out + torch.cat(
            [b.expand(n, -1) for b, n in zip(bias.unbind(0), counts, strict=True)]
        )
    return out


def gated(rows: Tensor, counts: Sequence[int], gate_up: Tensor, down: Tensor) -> Tensor:
    """``down(silu(gate) * up)`` (Shazeer 2020, "GLU variants improve transformer"): gate_up
    [experts, 2 * inner, hidden], down [experts, hidden, inner]."""
    gate, up = grouped_linear(rows, counts, gate_up).chunk(2, -1)
    return grouped_linear(F.silu(gate) * up, counts, down)


def _one_by_one(rows: Tensor, counts: Sequence[int], weight: Tensor) -> Tensor:
    # unbind: the gradient of all the matrices is put together once, where that of weight[e] would
    # be as large as weight.
    parts = [
        part @ w.t()
        for part, w in zip(rows.split_with_sizes(list(counts)), weight.unbind(0), strict=True)
    ]
    return torch.cat(parts) if parts else rows @ weight.new_zeros(rows.shape[1], weight.shape[1])


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    if not torch_private.grouped_mm or not weight.shape[0] or rows.dtype is not weight.dtype:
        return False
    if rows.device.type == "cpu":
        known = rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    else:
        known = (
            rows.device.type == "cuda"
            and rows.dtype is torch.bfloat16
            and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        )
    return (
        known
        and not any(n * rows.itemsize % _ALIGNED for n in weight.shape[1:])
        and not (rows.data_ptr() | weight.data_ptr()) % _ALIGNED
    )


class _Grouped(torch.autograd.Function):
    """torch's kernel. Its own backward refuses gradients that are expanded, as those of a sum are,
    so it is written out here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        rows, weight = rows.contiguous(), weight.contiguous()
        ctx.counts = counts
        ctx.ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(
            rows.device, non_blocking=True
        )
        ctx.save_for_backward(rows, weight)
        return torch_private.grouped_mm[-1](rows, weight.transpose(-2, -1), offs=ctx.ends)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        if torch.is_grad_enabled():  # to be differentiated again: by ordinary products
            split = [t.split_with_sizes(list(ctx.counts)) for t in (grad, rows)]
            return (
                _one_by_one(grad, ctx.counts, weight.transpose(-2, -1)),
                torch.stack([g.t() @ r for g, r in zip(*split, strict=True)]),
                None,
            )
        kernel = torch_private.grouped_mm[-1]
        of_rows = kernel(grad, weight, offs=ctx.ends) if ctx.needs_input_grad[0] else None
        of_weight = (
            kernel(grad.transpose(-2, -1), rows, offs=ctx.ends) if ctx.needs_input_grad[1] else None
        )
        return of_rows, of_weight, None
