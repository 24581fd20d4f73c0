"""Rules of pooling, which is parallel over batch and channels; `rules` imports them.

A split dim of space needs a halo, which is small for pools without overlap.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....errors import FormError
from ..helpers import register, skip_when_empty, zeros_connected
from ..notation import Arg, LocalContext, OpDescription
from ..registry import RULES
from .halo import Geometry, Window, laid_out, pair_up, settle_windows, split_room

__all__: list[str] = []

#: Computes a pool of an extended local tensor: (tensor, arguments, windows, geometry) -> result
_Pool = Callable[[Tensor, dict[str, Any], dict[int, Window], Sequence[Geometry]], Any]


def _argument_reader(names: str, **defaults: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that reads the arguments of a call by name.

    Arguments without a default come first.
    """
    every = {**dict.fromkeys(names.split(), inspect.Parameter.empty), **defaults}
    signature = inspect.Signature(
        [
            inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=v)
            for n, v in every.items()
        ]
    )

    def read(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    return read


_read_max = _argument_reader(
    "input kernel_size", stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
)
_read_average = _argument_reader(
    "input kernel_size",
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
)
_read_adaptive = _argument_reader("input output_size", return_indices=False)
_read_power = _argument_reader("input norm_type kernel_size", stride=None, ceil_mode=False)


def _describe_space(op: OpDescription, space: int) -> int:
    """Describe leading dims as parallel and the last ``space`` dims as not split.

    Return the number of leading dims. Further operands may have fewer dims; their leading dims
    match.
    """
    lead = op.args[0].ndim - space
    if lead < 0:
        raise FormError(f"an operand of {op.args[0].ndim} dims")
    for a in op.args:
        op.set(a, (*range(min(lead, a.ndim)), *[None] * (a.ndim - lead)))
    op.out = [(*range(lead), *[None] * space)]
    return lead


def _keep_split(op: OpDescription, x: Arg, dims: Sequence[int]) -> None:
    """Let dims of space that are split stay split."""
    op.exchanges = {d for d in dims if x.is_split(d)}
    op.set(x, tuple(d if d in op.exchanges else f for d, f in enumerate(op.dims[x.index])))
    op.out = [op.dims[x.index]]


def _windows(call: dict[str, Any], shape: Sequence[int], lead: int) -> dict[int, Window]:
    space = len(shape) - lead
    kernel = pair_up(call["kernel_size"], space)
    stride = (
        kernel
        if call["stride"] is None or call["stride"] in ((), [])
        else pair_up(call["stride"], space)
    )
    padding, dilation = pair_up(call["padding"], space), pair_up(call.get("dilation", 1), space)
    return {
        lead + k: Window(shape[lead + k], kernel[k], stride[k], padding[k], dilation[k])
        for k in range(space)
    }


def _declare_windowed(
    function: Any,
    space: int,
    read: Callable[..., dict[str, Any]],
    pool: _Pool,
    lowest: bool = False,
) -> None:
    """Declare a pool whose windows have a constant stride.

    ``lowest``: pad with the lowest value of the dtype, which never is the largest element, instead
    of 0.
    """

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        lead = _describe_space(op, space)
        op.local = skip_when_empty(op, function)
        whole = op.local
        x = op.args[0]
        _keep_split(op, x, range(lead, x.ndim))
        windows = _windows(read(*args, **kwargs), x.shape, lead) if op.exchanges else {}
        pad = (
            0.0
            if not lowest
            else float("-inf")
            if x.dtype.is_floating_point
            else torch.iinfo(x.dtype).min
        )

        def local(split: LocalContext) -> Callable[..., Any]:
            over = split_room(split)
            if not over:
                return whole(split)
            geometry = settle_windows(split, windows, over)

            def run(*args: Any, **kwargs: Any) -> Any:
                call = read(*args, **kwargs)
                part = laid_out(call["input"], geometry, pad)
                return (
                    pool(part, call, windows, geometry)
                    if 0 not in split.out_shape()
                    else _empty_result(split, part)
                )

            return run

        op.local = local

    register(function, describe)


def _empty_result(split: LocalContext, x: Tensor) -> Any:
    made = [
        zeros_connected(split.out_shape(i), spec.dtype, [x]) for i, spec in enumerate(split.outs)
    ]
    return made[0] if len(made) == 1 else tuple(made)


# ------------------------------------------------------------------------------------------- maxima


def _local_max_pool(space: int, indices: bool) -> _Pool:
    function = getattr(F, f"max_pool{space}d")

    def pool(
        x: Tensor, call: dict[str, Any], windows: dict[int, Window], geometry: Sequence[Geometry]
    ) -> Any:
        kernel, stride, dilation = (
            [getattr(w, n) for w in windows.values()] for n in ("kernel", "stride", "dilation")
        )
        if not (indices or call["return_indices"]):
            return function(x, kernel, stride, 0, dilation)
        values, at = function(x, kernel, stride, 0, dilation, False, True)
        return values, _global_indices(
            at, x.shape[-space:], [g.start for g in geometry], [w.size for w in windows.values()]
        )

    return pool


def _global_indices(
    local: Tensor, extents: Sequence[int], starts: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """Convert indices into a local tensor to indices into the global space of ``sizes``.

    The local tensor starts at ``starts``.
    """
    whole, rest, step = torch.zeros_like(local), local, 1
    for extent, start, size in zip(
        reversed(extents), reversed(starts), reversed(sizes), strict=True
    ):
        # In a window where no element is larger than the padding, torch returns the first element
        # that is not padding.
        whole = whole + (rest % extent + start).clamp(0, size - 1) * step
        rest, step = rest // extent, step * size
    return whole


# ----------------------------------------------------------------------------------------- averages


def _local_avg_pool(space: int) -> _Pool:
    function = getattr(F, f"avg_pool{space}d")

    def pool(
        x: Tensor, call: dict[str, Any], windows: dict[int, Window], geometry: Sequence[Geometry]
    ) -> Tensor:
        kernel = [w.kernel for w in windows.values()]
        mean = function(x, kernel, [w.stride for w in windows.values()])
        full = math.prod(kernel)
        if call["divisor_override"]:
            return mean * (full / call["divisor_override"])  # type: ignore[no-any-return]
        counts = [
            _local_divisors(g, w, call["count_include_pad"])
            for g, w in zip(geometry, windows.values(), strict=True)
        ]
        if all(n == w.kernel for per, w in zip(counts, windows.values(), strict=True) for n in per):
            return mean  # type: ignore[no-any-return]
        more = torch.ones((), dtype=torch.float64)
        for per, w in zip(counts, windows.values(), strict=True):
            more = more.unsqueeze(-1) * (w.kernel / torch.tensor(per, dtype=torch.float64))
        return mean * more.to(x)  # type: ignore[no-any-return]

    return pool


def _local_divisors(g: Geometry, w: Window, padding: bool) -> list[int]:
    """Return the number of elements by which each local window divides, along one dim.

    With ``padding`` the padding counts. Positions beyond the padding never count.
    """
    first, last = (-w.left, w.size + w.left) if padding else (0, w.size)
    starts = [o * w.stride - w.left for o in range(*g.out_interval)]
    return [min(s + w.kernel, last) - max(s, first) for s in starts]


# ------------------------------------------------------------------------------------------- others


def _declare_lp_pool(function: Any, space: int) -> None:
    average = getattr(F, f"avg_pool{space}d")

    def run(*args: Any, **kwargs: Any) -> Tensor:
        call = _read_power(*args, **kwargs)
        p, kernel = float(call["norm_type"]), pair_up(call["kernel_size"], space)
        mean = average(call["input"].pow(p), kernel, call["stride"], 0, call["ceil_mode"])
        return (mean.sign() * mean.abs().relu() * math.prod(kernel)).pow(1.0 / p)  # type: ignore[no-any-return]

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        lead = _describe_space(op, space)
        x = op.args[0]
        if any(map(x.is_split, range(lead, x.ndim))):
            op.compose(run)
        op.local = skip_when_empty(op, function)

    register(function, describe)


def _declare_adaptive(function: Any, space: int) -> None:
    """Declare an adaptive pool.

    Where the windows divide a split dim evenly, each rank's windows are a pool of the same kind.
    Otherwise the dim is replicated.
    """

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        lead = _describe_space(op, space)
        op.local = skip_when_empty(op, function)
        whole, x, call = op.local, op.args[0], _read_adaptive(*args, **kwargs)
        asked = (
            call["output_size"]
            if isinstance(call["output_size"], (tuple, list))
            else [call["output_size"]]
        )
        wanted = dict(
            zip(range(lead, x.ndim), asked * space if len(asked) == 1 else asked, strict=True)
        )
        sizes = {d: x.shape[d] if n is None else int(n) for d, n in wanted.items()}
        even = [d for d, n in sizes.items() if n and x.shape[d] % n == 0]
        _keep_split(op, x, even)
        windows = {
            d: Window(x.shape[d], x.shape[d] // sizes[d], x.shape[d] // sizes[d], 0) for d in even
        }

        def local(split: LocalContext) -> Callable[..., Any]:
            over = split_room(split)
            if not over:
                return whole(split)
            geometry = settle_windows(split, {d: w for d, w in windows.items() if d in over}, over)
            starts = {g.dim: g.start for g in geometry}
            out_shape = split.out_shape()

            def run(*args: Any, **kwargs: Any) -> Any:
                call = _read_adaptive(*args, **kwargs)
                x = laid_out(call["input"], geometry)
                if 0 in out_shape:
                    return _empty_result(split, x)
                if len(split.outs) == 1:
                    return function(x, out_shape[lead:])
                values, at = function(x, out_shape[lead:], *[True] * bool(call["return_indices"]))
                return values, _global_indices(
                    at, x.shape[lead:], [starts.get(d, 0) for d in sizes], split.ins[0].shape[lead:]
                )

            return run

        op.local = local

    register(function, describe)


def _declare_fractional(function: Any, space: int) -> None:
    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        lead = _describe_space(op, space)
        op.random = len(op.args) == 1
        # Samples are given for each channel of each element of the batch. There may be more of them
        # than the batch has elements. Without a batch the first ones count.
        for samples in op.args[1:]:
            op.set(
                samples,
                (
                    0 if lead > 1 and samples.shape[0] == op.args[0].shape[0] else None,
                    lead - 1,
                    None,
                ),
            )
            op.whole = {d for d in range(lead) if d not in op.dims[samples.index]}
        op.local = skip_when_empty(op, function)

    register(function, describe)


def _declare() -> None:
    for space in (1, 2, 3):
        for where in (F, torch):
            for kind, declare in (
                ("max_pool{}d", lambda f,
                    n: _declare_windowed(f, n, _read_max, _local_max_pool(n, False), lowest=True)),
                ("max_pool{}d_with_indices", lambda f,
                    n: _declare_windowed(f, n, _read_max, _local_max_pool(n, True), lowest=True)),
                ("avg_pool{}d", lambda f,
                    n: _declare_windowed(f, n, _read_average, _local_avg_pool(n))),
                ("lp_pool{}d", _declare_lp_pool), ("adaptive_avg_pool{}d", _declare_adaptive),
                ("adaptive_max_pool{}d", _declare_adaptive),
                ("adaptive_max_pool{}d_with_indices", _declare_adaptive),
                ("fractional_max_pool{}d", _declare_fractional),
                ("fractional_max_pool{}d_with_indices", _declare_fractional),
            ):  # fmt: skip
                function = getattr(where, kind.format(space), None)
                if callable(function) and function not in RULES:
                    declare(function, space)


_declare()
