"""Rules of reductions over dims; `rules` imports them.

Sums and their like give partial results, and maxima give exact ones. A function that needs all of a
dim does not let it be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._base import torch_private
from ...errors import FormError
from .helpers import canonical, dims_of, operands, reduced, skip_when_empty, split_in
from .notation import Arg, LocalContext, OpDescription
from .partial_extrema import extremum_with_gradient, reduce_partials
from .registry import composite, rule

__all__ = ["amax", "has_split"]

_HALF = (torch.float16, torch.bfloat16)


# --------------------------------------------------------------------------------------------- sums


def _sum(names: str, kind: str, linear: bool = False) -> None:
    def describe(
        op: OpDescription, input: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any
    ) -> None:
        reduced(op, input, dims_of(input, dim), keepdim, kind)
        if linear:
            op.linear = [frozenset([0])]

    rule(names.split())(lambda op, *args, **kwargs: describe(op, *args, **canonical(kwargs)))


_sum("sum", "sum", linear=True)
_sum("nansum count_nonzero", "sum")
# Over no elements, `any` is false and `all` is true. An empty local tensor must contribute these.
_sum("any", "max")
_sum("all", "min")
rule(torch_private.is_any_true)(
    lambda op, input: reduced(op, input, dims_of(input, None), False, "max")
)
rule(torch_private.is_all_true)(
    lambda op, input: reduced(op, input, dims_of(input, None), False, "min")
)


@rule("mean")
def _mean(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    def describe(
        input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> None:
        dims = dims_of(input, dim)
        reduced(op, input, dims, keepdim, "sum")
        op.linear = [frozenset([0])]
        count = math.prod(input.shape[d] for d in dims if d < input.ndim)
        kind = dtype or input.dtype

        def local(split: LocalContext) -> Callable[..., Tensor]:
            if not any(split.is_split(d) for d in dims):
                return torch.mean
            # The sum of many small numbers may be too large for the dtype, but their mean is not.
            if kind in _HALF:
                return lambda *a, **k: (
                    operands(a, k)[0].sum(dims, keepdim, dtype=torch.float32) / count
                ).to(kind)
            return lambda *a, **k: operands(a, k)[0].sum(dims, keepdim, dtype=dtype) / count

        op.local = local

    describe(*args, **canonical(kwargs))


@rule("trace")
def _trace(op: OpDescription, input: Arg) -> None:
    op.set(input, ("i", "j"))
    op.out, op.linear, op.reduce = [()], [frozenset([0])], {"i": "sum", "j": "sum"}

    def local(split: LocalContext) -> Callable[..., Tensor]:
        shift = split.box("i")[0] - split.box("j")[0]
        return lambda input: input.diagonal(shift).sum()

    op.local = local


@rule("nanmean prod".split())
def _whole_dims(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    def describe(input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> None:
        reduced(op, input, dims_of(input, dim), keepdim, None)

    describe(*args, **canonical(kwargs))


@composite("nanmean", lambda *a, **k: _over_split(*a, **canonical(k)))
def _nanmean(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = dims_of(input, dim)
    return input.nansum(dims, keepdim, dtype=dtype) / input.isnan().logical_not().sum(dims, keepdim)


def _over_split(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    return split_in(input, dims_of(input, dim))


# ----------------------------------------------------------------------------------------- variance


def _moments(name: str, results: int) -> None:
    def describe(
        op: OpDescription,
        input: Arg,
        dim: Any = None,
        unbiased: Any = True,
        keepdim: bool = False,
        **kwargs: Any,
    ) -> None:
        # The second argument of the form without dims is `unbiased`.
        dim = None if isinstance(dim, bool) else dim
        reduced(op, input, dims_of(input, dim), keepdim, None, results)
        # torch warns about the variance of an empty tensor
        op.local = skip_when_empty(op, getattr(torch, name))

    rule(name)(lambda op, *args, **kwargs: describe(op, *args, **canonical(kwargs)))


for _name, _results in (("var", 1), ("std", 1), ("var_mean", 2), ("std_mean", 2)):
    _moments(_name, _results)


def _split_variance(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    dim = canonical(kwargs).get("dim", dim)
    return split_in(input, dims_of(input, None if isinstance(dim, bool) else dim))


def _variance(
    input: Tensor, dim: Any, unbiased: bool, keepdim: bool, correction: float | None
) -> tuple[Tensor, Tensor]:
    """Return (variance, mean), exact on local tensors of any size.

    The mean is computed first, and then the squares of the deviations from it.
    """
    input, dims = reduce_partials(input), dims_of(input, dim)
    count = math.prod(input.shape[d] for d in dims)
    less = correction if correction is not None else float(bool(unbiased))
    mean = reduce_partials(input.mean(dims, keepdim=True))
    off = input - mean
    squares = (off * off.conj()).real if input.is_complex() else off * off
    variance = squares.sum(dims, keepdim) / max(0.0, count - less)
    return variance, mean if keepdim else mean.sum(dims)


def _variance_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    def bind(
        input: Tensor,
        dim: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        return _variance(input, dim, unbiased, keepdim, correction)

    return bind(*args, **canonical(kwargs))


def _std_from_variance(variance: Tensor) -> Tensor:
    # Where the variance is zero, torch's std has a gradient of zero, not of infinity.
    flat = reduce_partials(variance)
    zero = flat == 0
    return (
        torch.where(zero, flat, torch.where(zero, 1.0, flat).sqrt())
        if variance.requires_grad
        else flat.sqrt()
    )


composite("var", _split_variance)(lambda *a, **k: _variance_of(a, k)[0])
composite("std", _split_variance)(lambda *a, **k: _std_from_variance(_variance_of(a, k)[0]))
composite("var_mean", _split_variance)(lambda *a, **k: _variance_of(a, k))


@composite("std_mean", _split_variance)
def _std_mean(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    variance, mean = _variance_of(args, kwargs)
    return _std_from_variance(variance), mean


# ------------------------------------------------------------------------------------------- maxima


def _extremes(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    def describe(input: Arg, dim: Any = None, keepdim: bool = False) -> None:
        reduced(op, input, dims_of(input, dim), keepdim, None)

    describe(*args, **canonical(kwargs))


def has_split(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    dims = dims_of(input, canonical(kwargs).get("dim", dim))
    return split_in(input, dims) and all(input.shape[d] for d in dims)


def amax(largest: bool) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        def bind(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
            return extremum_with_gradient(input, dims_of(input, dim), keepdim, largest)

        return bind(*args, **canonical(kwargs))

    return run


rule(["amax", "amin"])(_extremes)
composite("amax", has_split)(amax(True))
composite("amin", has_split)(amax(False))


@rule("aminmax")
def _aminmax(
    op: OpDescription, input: Arg, *, dim: int | None = None, keepdim: bool = False
) -> None:
    reduced(op, input, dims_of(input, dim), keepdim, None, results=2)


@composite("aminmax", has_split)
def _aminmax_split(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    return torch.return_types.aminmax(
        (input.amin(dims_of(input, dim), keepdim), input.amax(dims_of(input, dim), keepdim))
    )


# -------------------------------------------------------------------------- functions along one dim


def _declare_along_dim(
    names: str, results: int = 1, default: int | None = None, reduces: bool = False, at: int = 1
) -> None:
    """Declare functions that work along one dim, which must not be split.

    ``at``: the position of `dim` among the arguments. ``reduces``: the dim is removed. ``default``:
    the dim where none is given; None stands for all elements at once, with one result.
    """

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        kwargs = canonical(kwargs)
        x = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[at] if len(args) > at else default)
        if isinstance(dim, bool):  # torch.sort(x, True) and the like: a flag in the position of dim
            dim = default
        dims = dims_of(x, dim)
        keepdim = bool(kwargs.get("keepdim", args[at + 1] if len(args) > at + 1 else False))
        if reduces:
            reduced(op, x, dims, keepdim, None, results if dim is not None else 1)
        else:
            reduced(op, x, dims, True, None, results)

    rule(names.split())(describe)


_declare_along_dim("mode", results=2, default=-1, reduces=True)


def _quantile(
    op: OpDescription,
    function: Any,
    input: Arg,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    **kwargs: Any,
) -> None:
    reduced(op, input, dims_of(input, dim), keepdim, None)
    if isinstance(q, Arg) and q.ndim:  # one result for each q, in front
        op.out = [(None, *op.out[0])]
    op.local = skip_when_empty(op, function)


rule("quantile")(
    lambda op, *args, **kwargs: _quantile(op, torch.quantile, *args, **canonical(kwargs))
)
rule("nanquantile")(
    lambda op, *args, **kwargs: _quantile(op, torch.nanquantile, *args, **canonical(kwargs))
)


rule(["trapezoid", "trapz"])(
    lambda op, y, x=None, *, dx=None, dim=-1: _trapezoid(op, y, x, dim, False)
)
rule("cumulative_trapezoid")(
    lambda op, y, x=None, *, dx=None, dim=-1: _trapezoid(op, y, x, dim, True)
)


def _trapezoid(op: OpDescription, y: Arg, x: Arg | None, dim: int, keepdim: bool) -> None:
    reduced(op, y, dims_of(y, dim), keepdim, None)
    if isinstance(x, Arg):
        op.set(x, op.dims[y.index] if x.ndim == y.ndim else (None,) * x.ndim)
        if x.ndim not in (1, y.ndim):
            raise FormError("x must have one dim, or as many dims as y")
        if x.ndim == y.ndim and x.shape != y.shape:
            op.set(
                x,
                [
                    f if a == b else None
                    for f, a, b in zip(op.dims[y.index], x.shape, y.shape, strict=True)
                ],
            )


@rule("gradient")
def _gradient(
    op: OpDescription, input: Arg, *, spacing: Any = None, dim: Any = None, edge_order: int = 1
) -> None:
    reduced(op, input, dims_of(input, dim), True, None)
    op.out = [op.dims[input.index]]


@rule("renorm")
def _renorm(op: OpDescription, input: Arg, p: float, dim: int, maxnorm: float) -> None:
    reduced(op, input, [d for d in range(input.ndim) if d != input.dim(dim)], True, None)
    op.out = [op.dims[input.index]]


@rule("isin")
def _isin(op: OpDescription, elements: Any, test_elements: Any, **kwargs: Any) -> None:
    if isinstance(elements, Arg):
        op.set(elements, tuple(range(elements.ndim)))
        op.out = [op.dims[elements.index]]


@rule("sum_to_size")
def _sum_to_size(op: OpDescription, input: Arg, *size: Any) -> None:
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    lead = input.ndim - len(shape)
    over = [d for d in range(input.ndim) if d < lead or shape[d - lead] != input.shape[d]]
    reduced(op, input, over, True, "sum")
    op.out = [op.out[0][lead:]]
    op.linear = [frozenset([0])]

    def local(split: LocalContext) -> Callable[..., Tensor]:
        here = split.out_shape()
        return lambda input, *size: input.sum_to_size(here)

    op.local = local
