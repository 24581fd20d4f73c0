"""Rules of convolution, unpooling and sampling; `rules` imports them.

These functions are parallel over batch and channels. Input channels of a convolution are
contracted. A split dim of space needs a halo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....boxing.halo_exchange import fetch_halo
from ..helpers import connected_zeros, dummy_like, register, skip_when_empty
from ..matmul import product
from ..notation import Arg, Dims, LocalContext, OpDescription
from .halo import Window, laid_out, padded, pair_up, reach_of, settle_windows, split_room

__all__: list[str] = []

_Bound = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class _ConvParameters:
    """The parameters of one kind of convolution call.

    ``windows``: the window of each dim of space. ``channels``: input channels of a group, or None
    without groups. ``lopsided``: torch pads one side more than the other, which no single number
    for both sides expresses.
    """

    function: Any
    read: _Bound
    windows: dict[int, Window]
    channels: int | None
    lopsided: bool


def _conv(space: int, transposed: bool) -> None:
    function = getattr(torch, f"conv{'_transpose' if transposed else ''}{space}d")

    def bind(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> dict[str, Any]:
        return locals()

    def bind_transposed(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> dict[str, Any]:
        return locals()

    read = bind_transposed if transposed else bind

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        call = read(*args, **kwargs)
        x, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
        if bias is not None and weight.ndim == space + 2:
            _check_bias(
                weight.shape,
                bias.shape,
                weight.shape[1] * groups if transposed else weight.shape[0],
                transposed,
            )
        lead: Dims = ("n",) if x.ndim == space + 2 else ()
        at = len(lead)
        space_dims = _space_dims(op, x, at + 1)
        if groups == 1:
            kernel: Dims = ("i", "o") if transposed else ("o", "i")
            product(
                op,
                [(*lead, "i", *space_dims), (*kernel, *[None] * space)],
                [x, weight],
                (*lead, "o", *space_dims),
            )
            if bias is not None:
                op.set(bias, ("o",))
                op.addends = frozenset([bias.index])
                op.linear = [g | {bias.index} for g in op.linear]
        else:
            _describe_grouped(op, call, lead, space_dims, transposed)
        windows = {at + 1 + k: _window(call, at + 1 + k, k, space) for k in range(space)}
        lopsided = call["padding"] == "same" and any(
            2 * w.left != w.dilation * (w.kernel - 1) for w in windows.values()
        )
        form = _ConvParameters(
            function, read, windows, x.shape[at] // groups if groups > 1 else None, lopsided
        )
        op.local = _local_conv(form, _local_transposed_conv if transposed else _local_direct_conv)

    register(function, describe)


def _space_dims(op: OpDescription, x: Arg, first: int) -> Dims:
    """Return the names of the dims of space, from ``first`` on, and set ``op.exchanges``.

    A dim that is split may stay so, at the price of a halo.
    """
    space_dims: Dims = tuple(d if x.is_split(d) else None for d in range(first, x.ndim))
    op.exchanges = {f for f in space_dims if f is not None}
    return space_dims


def _window(call: dict[str, Any], d: int, k: int, space: int) -> Window:
    """Return the window along dim ``d`` of the input, the ``k``-th of its dims of space."""
    x, weight, padding = call["input"], call["weight"], call["padding"]
    kernel, stride, dilation = (
        weight.shape[weight.ndim - space + k],
        pair_up(call["stride"], space)[k],
        pair_up(call["dilation"], space)[k],
    )
    if padding == "same":  # of an odd total, the larger half pads the end
        return Window(x.shape[d], kernel, stride, dilation * (kernel - 1) // 2, dilation)
    return Window(
        x.shape[d],
        kernel,
        stride,
        0 if padding == "valid" else pair_up(padding, space)[k],
        dilation,
    )


def _describe_grouped(
    op: OpDescription, call: dict[str, Any], lead: Dims, space_dims: Dims, transposed: bool
) -> None:
    """Describe a grouped convolution.

    A split may separate groups of channels, but not cut the dims of one group.
    """
    x, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    op.set(x, (*lead, "g", *space_dims))
    op.set(weight, ("g", *[None] * (weight.ndim - 1)))
    op.out = [(*lead, "g", *space_dims)]
    outputs = weight.shape[1] if transposed else weight.shape[0] // groups
    op.scale = {
        (x.index, len(lead)): x.shape[len(lead)] // groups,
        (weight.index, 0): weight.shape[0] // groups,
        (~0, len(lead)): outputs,
    }
    op.linear = [frozenset([x.index]), frozenset([weight.index])]
    if bias is not None:
        op.set(bias, ("g",))
        op.scale[bias.index, 0] = outputs
        op.linear = [g | {bias.index} for g in op.linear]


def _local_conv(
    form: _ConvParameters, over_space: Callable[..., Callable[..., Tensor]]
) -> Callable[[LocalContext], Callable[..., Any]]:
    """Build the ``local`` of a convolution.

    A rank runs torch's own function with the groups that it has. Where space is split, a halo is
    fetched first. Without elements, the result is zeros that stay in the graph.
    """

    def local(split: LocalContext) -> Callable[..., Any]:
        over, first, shape = (
            split_room(split),
            min(form.windows),
            split.ins[0].local_shape(split.rank),
        )
        lacking = 0 in shape[:first] or any(
            0 in spec.local_shape(split.rank) for spec in split.ins[1:]
        )
        groups = (
            {}
            if form.channels is None or lacking
            else {"groups": shape[first - 1] // form.channels}
        )
        nothing = _empty_rank_function(form, split)
        if over:
            return over_space(
                form, split, over, groups, nothing if lacking or 0 in split.out_shape() else None
            )
        if lacking or 0 in shape:
            return nothing
        if not split.is_split("g"):
            return form.function  # type: ignore[no-any-return]
        return lambda *args, **kwargs: form.function(**{**form.read(*args, **kwargs), **groups})

    return local


def _empty_rank_function(form: _ConvParameters, split: LocalContext) -> Callable[..., Tensor]:
    """Return the function for a rank without elements.

    The function returns zeros that stay in the graph, plus the bias.
    """
    shape = split.out_shape()

    def run(*args: Any, **kwargs: Any) -> Tensor:
        call = form.read(*args, **kwargs)
        bias, one = call["bias"], (1,) * call["weight"].ndim
        out = connected_zeros(
            shape,
            form.function(
                dummy_like(call["input"], *one),
                dummy_like(call["weight"], *one),
                None if bias is None else dummy_like(bias, 1),
            ),
        )
        # without input channels, the bias remains
        return _add_bias(out, bias, call["weight"].ndim - 2)

    return run


def _local_direct_conv(
    form: _ConvParameters,
    split: LocalContext,
    over: list[int],
    groups: dict[str, int],
    nothing: Callable[..., Tensor] | None,
) -> Callable[..., Tensor]:
    """Return the local convolution: the kernel slides over the local tensor and its halo."""
    ours = {d: w for d, w in form.windows.items() if d in over or form.lopsided}
    geometry = settle_windows(split, ours, over)
    padding = [0 if d in ours else w.left for d, w in form.windows.items()]

    def run(*args: Any, **kwargs: Any) -> Tensor:
        call = {**form.read(*args, **kwargs), **groups}
        call["input"] = laid_out(call["input"], geometry)
        return (
            nothing(**call)
            if nothing is not None
            else form.function(**{**call, "padding": padding})
        )  # type: ignore[no-any-return]

    return run


def _local_transposed_conv(
    form: _ConvParameters,
    split: LocalContext,
    over: list[int],
    groups: dict[str, int],
    nothing: Callable[..., Tensor] | None,
) -> Callable[..., Tensor]:
    """Return the local transposed convolution, in which each element spreads over the kernel.

    A rank fetches the elements that reach its local results, and cuts off the rest.
    """
    reaches, sides = {}, {}
    offsets, lengths = split.outs[0].box(split.rank)
    for d in over:
        w = form.windows[d]
        reaches[d] = reach_of(split, d, d, lambda a, b, w=w: [w.sources(a, b)])  # type: ignore[misc]
        a, b = offsets[d], offsets[d] + lengths[d]
        low, high = w.sources(a, b)
        if low == high:
            nothing = nothing or _empty_rank_function(form, split)
        sides[d] = (
            low * w.stride - w.left - a,
            b - ((high - 1) * w.stride - w.left + w.dilation * (w.kernel - 1) + 1),
        )
    padding = [0 if d in over else w.left for d, w in form.windows.items()]

    def run(*args: Any, **kwargs: Any) -> Tensor:
        call = {**form.read(*args, **kwargs), **groups}
        for d, reach in reaches.items():
            call["input"] = fetch_halo(call["input"], d, reach)
        if nothing is not None:
            return nothing(**call)
        bias, more = call["bias"], pair_up(call["output_padding"], len(padding))
        more = tuple(0 if d in over else n for d, n in zip(form.windows, more, strict=True))
        out = padded(
            form.function(**{**call, "bias": None, "padding": padding, "output_padding": more}),
            sides,
        )
        return _add_bias(out, bias, len(padding))

    return run


def _check_bias(weight: Sequence[int], bias: Sequence[int], outputs: int, transposed: bool) -> None:
    """Raise the error that torch's kernels raise for a bias of another shape.

    torch's kernels for meta tensors accept such a bias.
    """
    if tuple(bias) != (outputs,):
        raise RuntimeError(
            f"Given {'transposed=1, ' if transposed else ''}weight of size {list(weight)}, "
            f"expected bias to be 1-dimensional with {outputs} elements, "
            f"but got bias of size {list(bias)} instead"
        )


def _add_bias(out: Tensor, bias: Tensor | None, space: int) -> Tensor:
    """Add the bias in the dtype of ``out``, which is narrower in mixed precision."""
    return out if bias is None else out + bias.to(out.dtype).reshape(-1, *[1] * space)


for _space in (1, 2, 3):
    _conv(_space, False)
    _conv(_space, True)


# --------------------------------------------------------------------------- unpooling and sampling


def _unpool(
    op: OpDescription,
    input: Arg,
    indices: Arg,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Any = None,
) -> None:
    space = len(kernel_size) if isinstance(kernel_size, (tuple, list)) else input.ndim - 2
    dims = (*range(input.ndim - space), *[None] * space)
    op.set(input, dims)
    op.set(indices, dims)
    op.out = [dims]
    # The size may include batch and channels, which differ for a local tensor.
    spatial_size = None if output_size is None else list(output_size)[-space:]
    op.local = lambda split: (
        lambda input, indices, *args, **kwargs: op.function(
            input, indices, kernel_size, stride, padding, spatial_size
        )
    )
    op.local = skip_when_empty(op)


for _f in (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d):
    register(_f, _unpool)


def _grid_sample(op: OpDescription, input: Arg, grid: Arg, *args: Any, **kwargs: Any) -> None:
    points = tuple(range(grid.ndim - 2))
    op.set(input, ("n", "c", *[None] * (input.ndim - 2)))
    op.set(grid, ("n", *points, None))
    op.out = [("n", "c", *points)]
    op.local = skip_when_empty(op, F.grid_sample)


register(F.grid_sample, _grid_sample)


def _affine_grid(
    op: OpDescription, theta: Arg, size: Any, align_corners: bool | None = None
) -> None:
    op.set(theta, ("n", None, None))
    op.out = [("n", *[None] * (len(size) - 1))]

    def local(split: LocalContext) -> Callable[..., Any]:
        here = [split.box("n")[1], *size[1:]]
        return lambda theta, size, align_corners=None: F.affine_grid(theta, here, align_corners)

    op.local = local
    op.local = skip_when_empty(op)


register(F.affine_grid, _affine_grid)


def _area(kernel: Any) -> int:
    return int(kernel) ** 2 if isinstance(kernel, int) else int(kernel[0]) * int(kernel[-1])


def _unfold(op: OpDescription, input: Arg, kernel_size: Any, *args: Any, **kwargs: Any) -> None:
    lead: Dims = ("n",) if input.ndim == 4 else ()
    op.set(input, (*lead, "c", None, None))
    op.out = [(*lead, "c", None)]
    op.scale[~0, len(lead)] = _area(kernel_size)
    op.linear = [frozenset([0])]
    op.local = skip_when_empty(op, F.unfold)


def _fold(
    op: OpDescription, input: Arg, output_size: Any, kernel_size: Any, *args: Any, **kwargs: Any
) -> None:
    lead: Dims = ("n",) if input.ndim == 3 else ()
    op.set(input, (*lead, "c", None))
    op.out = [(*lead, "c", None, None)]
    op.scale[input.index, len(lead)] = _area(kernel_size)
    op.linear = [frozenset([0])]
    op.local = skip_when_empty(op, F.fold)


register(F.unfold, _unfold)
register(F.fold, _fold)
