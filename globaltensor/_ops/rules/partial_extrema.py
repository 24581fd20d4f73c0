"""Small global functions for composites: exact extrema, reduced partial sums, borrowed gradients.

The rules of softmax, losses, layers, statistics and reductions call them. `with_gradient_of`
combines one tensor's value with another's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..._base import torch_private
from ..._tensor.global_tensor import GlobalTensor
from ...boxing import log, plan_boxing
from ...distributed.world import world
from ...sharding.sbp import broadcast, partial_sum
from .notation import Arg, OpDescription
from .registry import rule

__all__ = [
    "AHEAD",
    "extremum",
    "extremum_with_gradient",
    "reduce_partials",
    "reduce_partials_async",
    "with_gradient_of",
]

#: The reason that boxing_log() gives for a sum that starts before it is needed.
AHEAD: Final = "sum of partial values, started before it is needed"


def reduce_partials(x: Tensor) -> Tensor:
    """Return the same tensor with its partial sums reduced and every split kept.

    Call it once where a value is used several times.
    """
    if has_torch_function((x,)):
        return handle_torch_function(reduce_partials, (x,), x)
    return x


@rule(reduce_partials)
def _describe_reduce_partials(op: OpDescription, x: Arg) -> None:
    op.set(x, tuple(range(x.ndim)))
    op.out = [tuple(range(x.ndim))]
    op.whole = {d for d in range(x.ndim) if not x.is_split(d)}


def reduce_partials_async(x: Tensor) -> Callable[[], Tensor]:
    """Start ``reduce_partials`` of a tensor without a gradient, for a value that is needed later.

    The function returned waits for the reduction and returns the result.
    """
    this_world = world()
    # While a recorder is active, start nothing here. A program starts such reductions early
    # automatically.
    if torch_private.function_mode_on():
        return lambda: reduce_partials(x)
    if not isinstance(x, GlobalTensor) or this_world.rank not in x._spec.placement._coordinates:
        return lambda: reduce_partials(x)
    spec = x._spec
    axes = [a for a, e in enumerate(spec.layout) if e is partial_sum]
    whole = spec.replace(layout=[broadcast if a in axes else e for a, e in enumerate(spec.layout)])
    route = plan_boxing(spec, whole)
    if not route.bytes:
        # No operation on global tensors: each rank calls the function at a time of its own, and
        # operations are compared between ranks.
        return lambda: GlobalTensor.wrap(x._local.detach(), whole)
    local = x._local.detach().clone(memory_format=torch.contiguous_format)
    with log.boxing_sent_here(route, AHEAD):
        handle = this_world.comm(spec.placement.fiber(this_world.rank, axes)).all_reduce_async(
            local.view(-1), "sum"
        )

    def wait() -> Tensor:
        handle.wait()
        return GlobalTensor.wrap(local, whole)

    return wait


def extremum(x: Tensor, dims: tuple[int, ...], keepdim: bool, largest: bool) -> Tensor:
    """Return the largest or smallest element over ``dims``, without a gradient.

    Over no elements, return the identity of the reduction.
    """
    if has_torch_function((x,)):
        return handle_torch_function(extremum, (x,), x, dims, keepdim, largest)
    x = x.detach()
    if all(x.shape[d] for d in dims):
        if not dims:
            return x.clone()
        return (x.amax if largest else x.amin)(dims, keepdim)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    return torch.full(shape, identity(x.dtype, largest), dtype=x.dtype, device=x.device)


def identity(dtype: torch.dtype, largest: bool) -> float | int | bool:
    """Return the number of this type that does not change a maximum (minimum)."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return float("-inf" if largest else "inf")
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


@rule(extremum)
def _extremum(
    op: OpDescription, x: Arg, dims: tuple[int, ...], keepdim: bool, largest: bool
) -> None:
    names = tuple(range(x.ndim))
    op.set(x, names)
    op.out = [tuple(None if d in dims else d for d in names if keepdim or d not in dims)]
    op.reduce = dict.fromkeys(dims, "max" if largest else "min")


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, x: Tensor, weight: Tensor, dims: tuple[int, ...], keepdim: bool
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dims, ctx.keepdim = dims, keepdim
        return (
            value.clone()
            if keepdim
            else value.reshape([n for d, n in enumerate(value.shape) if d not in dims]).clone()
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        grad = grads[0]
        if not ctx.keepdim:
            for d in ctx.dims:
                grad = grad.unsqueeze(d)
        return None, grad * weight, None, None, None


def with_gradient_of(
    value: Tensor, x: Tensor, weight: Tensor, dims: tuple[int, ...], keepdim: bool
) -> Tensor:
    """Return ``value`` with the gradient of ``(x * weight).sum(dims)``.

    ``value`` has ``dims`` with size 1. Its numbers stay exact, as no arithmetic touches them.
    """
    if has_torch_function((value, x, weight)):
        return handle_torch_function(
            with_gradient_of, (value, x, weight), value, x, weight, dims, keepdim
        )
    return _WithGradientOf.apply(value, x, weight, dims, keepdim)  # type: ignore[no-any-return,no-untyped-call]


@rule(with_gradient_of)
def _describe_with_gradient_of(
    op: OpDescription, value: Arg, x: Arg, weight: Arg, dims: tuple[int, ...], keepdim: bool
) -> None:
    names = tuple(range(x.ndim))
    op.set(x, names)
    op.set(weight, names)
    op.set(value, [None if d in dims else d for d in names])
    op.out = [tuple(None if d in dims else d for d in names if keepdim or d not in dims)]
    op.reduce = dict.fromkeys(dims, "sum")
    op.addends = frozenset([value.index])
    op.whole = {d for d in range(x.ndim) if not x.is_split(d)}


def extremum_with_gradient(
    x: Tensor, dims: tuple[int, ...], keepdim: bool, largest: bool
) -> Tensor:
    """Return the largest (smallest) element over ``dims``, exact wherever they are split.

    Its gradient is shared evenly among equal elements, as in torch.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return extremum(x, dims, keepdim, largest)
    x = reduce_partials(x)
    value = reduce_partials(extremum(x, dims, True, largest))
    mask = (x.detach() == value).to(x.dtype)
    return with_gradient_of(value, x, mask / mask.sum(dims, True), dims, keepdim)
