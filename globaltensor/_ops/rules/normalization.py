"""Rules of normalisation: layer, rms, group, instance, batch and local response norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .helpers import dummy_like, reduced, register, skip_when_empty, split_in
from .notation import Arg, Factor, LocalContext, OpDescription
from .partial_extrema import reduce_partials
from .registry import rule

__all__: list[str] = []

_HALF = (torch.float16, torch.bfloat16)


def _normalize(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x normalised over ``dims``, mean, biased variance), with any dims split.

    Narrow dtypes are computed in single precision.
    """
    x = reduce_partials(x.float() if x.dtype in _HALF else x)
    mean = reduce_partials(x.mean(dims, keepdim=True))
    off = x - mean
    variance = reduce_partials((off * off).mean(dims, keepdim=True))
    return off * (variance + eps).rsqrt(), mean, variance


def _scale_and_shift(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], dtype: torch.dtype
) -> Tensor:
    if weight is not None:
        x = x * weight.reshape(shape)
    if bias is not None:
        x = x + bias.reshape(shape)
    return x.to(dtype)


# ------------------------------------------------------------------------------- layer and rms norm


def _describe_last_dims(
    op: OpDescription, input: Arg, shape: Any, split: Callable[..., Tensor], *params: Any
) -> None:
    """Describe normalisation over the last dims.

    Where one of these dims is split, the call is composed of global ops.
    """
    dims = tuple(range(input.ndim - len(shape), input.ndim))
    reduced(op, input, dims, True, None)
    op.out = [op.dims[input.index]]
    for p in params:
        if p is not None:
            op.set(p, dims)
    if split_in(input, dims):
        op.compose(split)


@rule([F.layer_norm, torch.layer_norm])
def _layer_norm(
    op: OpDescription,
    input: Arg,
    normalized_shape: Any,
    weight: Arg | None = None,
    bias: Arg | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> None:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else normalized_shape
    _describe_last_dims(op, input, shape, _split_layer_norm, weight, bias)


def _split_layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Tensor:
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    out, _, _ = _normalize(input, dims, eps)
    return _scale_and_shift(out, weight, bias, list(normalized_shape), input.dtype)


@rule([F.rms_norm, torch.rms_norm])
def _rms_norm(
    op: OpDescription,
    input: Arg,
    normalized_shape: Any,
    weight: Arg | None = None,
    eps: float | None = None,
) -> None:
    _describe_last_dims(op, input, normalized_shape, _split_rms_norm, weight)


def _split_rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    x = reduce_partials(input.float() if input.dtype in _HALF else input)
    square = reduce_partials((x * x).mean(dims, keepdim=True))
    out = x * (square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return _scale_and_shift(out, weight, None, list(normalized_shape), input.dtype)


# -------------------------------------------------------------------------- group and instance norm


@rule([F.group_norm, torch.group_norm])
def _group_norm(
    op: OpDescription,
    input: Arg,
    num_groups: int,
    weight: Arg | None = None,
    bias: Arg | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> None:
    space = tuple(range(2, input.ndim))
    if split_in(input, space):
        op.compose(_split_group_norm)
        return
    op.set(input, ("n", "g", *[None] * len(space)))
    op.out = [op.dims[input.index]]
    size = input.shape[1] // num_groups
    op.scale = {(input.index, 1): size, (~0, 1): size}
    for p in (weight, bias):
        if p is not None:
            op.set(p, ("g",))
            op.scale[p.index, 0] = size

    def local(split: LocalContext) -> Callable[..., Any]:
        groups = (
            split.ins[input.index].local_shape(split.rank)[1] // size
            if split.is_split("g")
            else num_groups
        )

        def run(
            input: Tensor,
            num_groups: int,
            weight: Tensor | None = None,
            bias: Tensor | None = None,
            eps: float = 1e-5,
            *rest: Any,
        ) -> Tensor:
            # The other function refuses parts of one element per channel, which the whole may have.
            return torch.group_norm(
                input, groups, weight, bias, eps, *(rest or (torch.backends.cudnn.enabled,))
            )

        return run

    op.local = local
    op.local = skip_when_empty(op, alike=_group_norm_of_one)


def _group_norm_of_one(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Tensor:
    return F.group_norm(dummy_like(input, 1, 1, 2), 1, *_dummy_channels(weight, bias))


def _dummy_channels(*channels: Tensor | None) -> list[Tensor | None]:
    """Return dummy tensors of one element for the tensors with a number per channel."""
    return [None if t is None else dummy_like(t, 1) for t in channels]


def _split_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Tensor:
    n, c, *space = input.shape
    grouped = input.reshape(n, num_groups, c // num_groups, *space)
    out, _, _ = _normalize(grouped, tuple(range(2, grouped.ndim)), eps)
    return _scale_and_shift(
        out.reshape(n, c, *space), weight, bias, [1, c, *[1] * len(space)], input.dtype
    )


def _instance_norm(
    op: OpDescription, input: Arg, running_mean: Arg | None = None, running_var: Arg | None = None,
    weight: Arg | None = None, bias: Arg | None = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *rest: Any,
) -> None:  # fmt: skip
    # Buffers are written and must be equal on all ranks.
    tracked = running_mean is not None and use_input_stats
    space = tuple(range(2, input.ndim))
    if use_input_stats and (
        split_in(input, space)
        or (tracked and (split_in(input, (0, 1)) or _any_not_replicated(running_mean, running_var)))
    ):
        op.compose(_split_instance_norm)
        return
    op.set(input, (*("n", "c")[: input.ndim], *(("s", d) for d in space)))
    op.out = [op.dims[input.index]]
    for p in (running_mean, running_var, weight, bias):
        if p is not None:
            op.set(p, ("c",))
    op.whole = {"n", "c", *(("s", d) for d in space)} if tracked else {("s", d) for d in space}
    op.local = skip_when_empty(op, F.instance_norm, _instance_norm_of_one)


def _instance_norm_of_one(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None,
    use_input_stats: bool = True, *rest: Any, **more: Any,
) -> Tensor:  # fmt: skip
    return F.instance_norm(
        dummy_like(input, 1, 1, 2),
        *_dummy_channels(running_mean, running_var, weight, bias),
        use_input_stats,
    )


def _split_instance_norm(
    input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *rest: Any,
) -> Tensor:  # fmt: skip
    space = tuple(range(2, input.ndim))
    out, mean, variance = _normalize(input, space, eps)
    count = math.prod(input.shape[d] for d in space)
    if running_mean is not None and running_var is not None and count:
        with torch.no_grad():
            _update_running(running_mean, mean.detach().mean((0, *space)), momentum)
            _update_running(
                running_var,
                variance.detach().mean((0, *space)) * (count / max(1, count - 1)),
                momentum,
            )
    return _scale_and_shift(out, weight, bias, [1, -1, *[1] * (input.ndim - 2)], input.dtype)


def _any_not_replicated(*buffers: Arg | None) -> bool:
    """Return True if a buffer that is written is not replicated.

    A kernel would write into a gathered copy, and the update would be lost.
    """
    return any(not e.is_broadcast for b in buffers if b is not None for e in b.spec.layout)


register(F.instance_norm, _instance_norm)


# --------------------------------------------------------------------------------------- batch norm


def _batch_norm(
    op: OpDescription, input: Arg, running_mean: Arg | None = None, running_var: Arg | None = None,
    weight: Arg | None = None, bias: Arg | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> None:  # fmt: skip
    others = tuple(d for d in range(input.ndim) if d != 1)
    for name, p in (("running_mean", running_mean), ("running_var", running_var)):
        # torch's kernels raise this; those for meta tensors count elements instead.
        if p is not None and p.ndim != 1:
            raise RuntimeError(
                f"{name} should have one dim of {input.shape[1]} elements, not the shape "
                f"{list(p.shape)}"
            )
    if training and (
        split_in(input, others)
        or (running_mean is not None and input.is_split(1))
        or _any_not_replicated(running_mean, running_var)
    ):
        op.compose(_split_batch_norm)
        return
    names: list[Factor] = ["c" if d == 1 else d for d in range(input.ndim)]
    op.set(input, names)
    op.out = [tuple(names)]
    for p in (running_mean, running_var, weight, bias):
        if p is not None:
            op.set(p, ("c",))
    if training:
        # The running statistics are written in place, so each rank's copy must see every channel.
        op.whole = {*others, "c"} if running_mean is not None else set(others)
    op.local = skip_when_empty(op, F.batch_norm, _batch_norm_of_one)


def _batch_norm_of_one(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False, *rest: Any, **more: Any,
) -> Tensor:  # fmt: skip
    return F.batch_norm(
        dummy_like(input, 2, 1), *_dummy_channels(running_mean, running_var, weight, bias), training
    )


def _split_batch_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise by statistics of the global batch, wherever its samples are.

    The running statistics stay equal on all ranks.
    """
    others = tuple(d for d in range(input.ndim) if d != 1)
    count = math.prod(input.shape[d] for d in others)
    out, mean, variance = _normalize(input, others, eps)
    if running_mean is not None and running_var is not None and count:
        with torch.no_grad():
            _update_running(running_mean, mean.detach().reshape(-1), momentum)
            _update_running(
                running_var, variance.detach().reshape(-1) * (count / max(1, count - 1)), momentum
            )
    return _scale_and_shift(out, weight, bias, [1, -1, *[1] * (input.ndim - 2)], input.dtype)


def _update_running(running: Tensor, value: Tensor, momentum: float) -> None:
    running.mul_(1 - momentum).add_((value * momentum).to(running.dtype))


register(F.batch_norm, _batch_norm)


@rule([F.local_response_norm])
def _local_response_norm(op: OpDescription, input: Arg, *args: Any, **kwargs: Any) -> None:
    reduced(op, input, (1,), True, None)
    op.out = [op.dims[input.index]]
    op.local = skip_when_empty(op, F.local_response_norm)
