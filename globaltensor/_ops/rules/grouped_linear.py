"""Linear layers of many experts at once, on local tensors: each row times its expert's matrix.

`experts` calls these functions, and users may call them in their own experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._base import torch_private

__all__ = ["gated", "grouped_linear"]

_ALIGNED: Final = 16  # bytes: the alignment that the kernel requires of rows and of their start


def grouped_linear(
    rows: Tensor, counts: Sequence[int], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Apply ``F.linear`` to the rows of each expert with its own weight.

    rows [n, in], weight [experts, out, in], bias [experts, out] -> [n, out]. Rows are sorted by
    expert. ``counts`` is the number of rows of each expert, and n is their sum. torch's grouped
    matmul is used where it exists for the device and dtype. Otherwise the experts are computed one
    by one. The tensors are local, as in the functions of `experts`.

    >>> import torch
    >>> grouped_linear(torch.ones(3, 2), [1, 2], torch.tensor([[[1.0, 1.0]], [[2.0, 2.0]]]))
    tensor([[2.],
            [4.],
            [4.]])
    """
    # Autocast does not know the kernel, so its casts are made here.
    if (
        not rows.is_meta
        and torch.is_autocast_enabled(rows.device.type)
        and rows.dtype is not torch.float64
    ):
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
    """Return ``down(silu(gate) * up)`` (Shazeer 2020, "GLU variants improve transformer").

    gate_up [experts, 2 * inner, hidden], down [experts, hidden, inner]; rows and counts as in
    `grouped_linear`.
    """
    gate, up = grouped_linear(rows, counts, gate_up).chunk(2, -1)
    return grouped_linear(F.silu(gate) * up, counts, down)


def _one_by_one(rows: Tensor, counts: Sequence[int], weight: Tensor) -> Tensor:
    # With unbind, the gradients of all matrices are assembled once. The gradient of each weight[e]
    # would be as large as weight.
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
    """The autograd function of torch's grouped matmul kernel.

    The kernel's own backward refuses expanded gradients, such as those of a sum. Therefore the
    backward is written out here.
    """

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
        if torch.is_grad_enabled():  # a second derivative is needed: use ordinary products
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
