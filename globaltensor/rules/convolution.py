"""Convolution, pooling and resampling: parallel over batch and channels, whole in space. Input channels of a convolution are contracted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .matmul import product
from .notation import Arg, Dims, Op, Split
from .parts import register, unless_empty, zeros_connected
from .registry import RULES

__all__: list[str] = []

_Bound = Callable[..., dict[str, Any]]


def _conv(space: int, transposed: bool) -> None:
    function = getattr(torch, f"conv{'_transpose' if transposed else ''}{space}d")

    def bind(input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> dict[str, Any]:
        return locals()

    def bind_transposed(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
    ) -> dict[str, Any]:
        return locals()

    read = bind_transposed if transposed else bind

    def describe(op: Op, *args: Any, **kwargs: Any) -> None:
        call = read(*args, **kwargs)
        x, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
        lead: Dims = ("n",) if x.ndim == space + 2 else ()
        room: Dims = (None,) * space
        if groups == 1:
            kernel: Dims = ("i", "o") if transposed else ("o", "i")
            product(op, [(*lead, "i", *room), (*kernel, *room)], [x, weight], (*lead, "o", *room))
            if bias is not None:
                op.set(bias, ("o",))
                op.addends = frozenset([bias.index])
                op.linear = [g | {bias.index} for g in op.linear]
            op.local = _unless_empty(function, read)
        else:
            _grouped(op, call, lead, room, transposed)
            op.local = _local_groups(function, read, x.shape[len(lead)] // groups, len(lead))

    register(function, describe)


def _grouped(op: Op, call: dict[str, Any], lead: Dims, room: Dims, transposed: bool) -> None:
    """Whole groups of channels may be split; the dims of one group may not."""
    x, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    op.set(x, (*lead, "g", *room))
    op.set(weight, ("g", None, *room))
    op.out = [(*lead, "g", *room)]
    outputs = weight.shape[1] if transposed else weight.shape[0] // groups
    op.scale = {(x.index, len(lead)): x.shape[len(lead)] // groups, (weight.index, 0): weight.shape[0] // groups, (~0, len(lead)): outputs}
    op.linear = [frozenset([x.index]), frozenset([weight.index])]
    if bias is not None:
        op.set(bias, ("g",))
        op.scale[bias.index, 0] = outputs
        op.linear = [g | {bias.index} for g in op.linear]


def _unless_empty(function: Any, read: _Bound) -> Callable[[Split], Callable[..., Any]]:
    def local(split: Split) -> Callable[..., Any]:
        if all(0 not in spec.local_shape(split.rank) for spec in split.ins):
            return function  # type: ignore[no-any-return]
        shape, dtype = split.out_shape(), split.outs[0].dtype

        def empty(*args: Any, **kwargs: Any) -> Tensor:
            call = read(*args, **kwargs)
            bias = call["bias"]
            out = zeros_connected(shape, dtype, [t for t in (call["input"], call["weight"], bias) if t is not None])
            space = call["weight"].ndim - 2
            return out if bias is None else out + bias.reshape(-1, *[1] * space)  # of no input channels, the bias remains

        return empty

    return local


def _local_groups(function: Any, read: _Bound, channels: int, at: int) -> Callable[[Split], Callable[..., Any]]:
    def local(split: Split) -> Callable[..., Any]:
        shape = split.ins[0].local_shape(split.rank)
        if 0 in shape or not split.is_split("g"):
            return _unless_empty(function, read)(split)
        groups = shape[at] // channels
        return lambda *args, **kwargs: function(**{**read(*args, **kwargs), "groups": groups})

    return local


for _space in (1, 2, 3):
    _conv(_space, False)
    _conv(_space, True)


# ---------------------------------------------------------------------------------------------------------------- pooling, resampling


def _spatial(function: Any, space: int, random: bool = False) -> None:
    """Every operand: leading dims parallel, the last ``space`` whole (further operands may be shorter: their leading dims count)."""

    def describe(op: Op, *args: Any, **kwargs: Any) -> None:
        lead = op.args[0].ndim - space
        if lead < 0:
            raise ValueError(f"an operand of {op.args[0].ndim} dims")
        for a in op.args:
            op.set(a, (*range(min(lead, a.ndim)), *[None] * (a.ndim - lead)))
        op.out = [(*range(lead), *[None] * space)]
        op.random = random and len(op.args) == 1
        op.local = unless_empty(op, function)

    if function not in RULES:
        register(function, describe)


for _space in (1, 2, 3):
    for _name in (
        f"max_pool{_space}d", f"max_pool{_space}d_with_indices", f"avg_pool{_space}d", f"lp_pool{_space}d",
        f"adaptive_max_pool{_space}d", f"adaptive_max_pool{_space}d_with_indices", f"adaptive_avg_pool{_space}d",
    ):  # fmt: skip
        for _where in (F, torch):
            if callable(_f := getattr(_where, _name, None)):
                _spatial(_f, _space)
    for _name in (f"fractional_max_pool{_space}d", f"fractional_max_pool{_space}d_with_indices"):
        if callable(_f := getattr(F, _name, None)):
            _spatial(_f, _space, random=True)


def _unpool(op: Op, input: Arg, indices: Arg, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None) -> None:
    space = len(kernel_size) if isinstance(kernel_size, (tuple, list)) else input.ndim - 2
    if output_size is not None and len(output_size) > space:
        raise ValueError("an output_size with batch and channels")
    dims = (*range(input.ndim - space), *[None] * space)
    op.set(input, dims)
    op.set(indices, dims)
    op.out = [dims]


for _f in (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d):
    register(_f, _unpool)


def _resample(op: Op, *args: Any, **kwargs: Any) -> None:
    x = op.args[0]
    op.set(x, ("n", "c", *[None] * (x.ndim - 2)))
    op.out = [op.dims[0]]
    op.local = unless_empty(op, F.interpolate)


register(F.interpolate, _resample)


def _grid_sample(op: Op, input: Arg, grid: Arg, *args: Any, **kwargs: Any) -> None:
    points = tuple(range(grid.ndim - 2))
    op.set(input, ("n", "c", *[None] * (input.ndim - 2)))
    op.set(grid, ("n", *points, None))
    op.out = [("n", "c", *points)]
    op.local = unless_empty(op, F.grid_sample)


register(F.grid_sample, _grid_sample)


def _affine_grid(op: Op, theta: Arg, size: Any, align_corners: bool | None = None) -> None:
    op.set(theta, ("n", None, None))
    op.out = [("n", *[None] * (len(size) - 1))]

    def local(split: Split) -> Callable[..., Any]:
        here = [split.box("n")[1], *size[1:]]
        return lambda theta, size, align_corners=None: F.affine_grid(theta, here, align_corners)

    op.local = local
    op.local = unless_empty(op)


register(F.affine_grid, _affine_grid)


def _area(kernel: Any) -> int:
    return int(kernel) ** 2 if isinstance(kernel, int) else int(kernel[0]) * int(kernel[-1])


def _unfold(op: Op, input: Arg, kernel_size: Any, *args: Any, **kwargs: Any) -> None:
    lead: Dims = ("n",) if input.ndim == 4 else ()
    op.set(input, (*lead, "c", None, None))
    op.out = [(*lead, "c", None)]
    op.scale[~0, len(lead)] = _area(kernel_size)
    op.linear = [frozenset([0])]
    op.local = unless_empty(op, F.unfold)


def _fold(op: Op, input: Arg, output_size: Any, kernel_size: Any, *args: Any, **kwargs: Any) -> None:
    lead: Dims = ("n",) if input.ndim == 3 else ()
    op.set(input, (*lead, "c", None))
    op.out = [(*lead, "c", None, None)]
    op.scale[input.index, len(lead)] = _area(kernel_size)
    op.linear = [frozenset([0])]
    op.local = unless_empty(op, F.fold)


register(F.unfold, _unfold)
register(F.fold, _fold)
