"""Rules of counting and covariance, composed of sums; `rules` imports them.

torch computes these functions from all observations at once.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .notation import Arg, OpDescription
from .partial_extrema import reduce_partials
from .registry import rule

__all__: list[str] = []

# --------------------------------------------------------------------------------------- covariance


def _cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    x = input.reshape(1, -1) if input.ndim < 2 else input
    weights = (
        fweights if aweights is None else aweights if fweights is None else fweights * aweights
    )
    total: Any = x.shape[1] if weights is None else reduce_partials(weights.sum())
    mean = (x if weights is None else x * weights).sum(1, keepdim=True) / total
    count = total - correction
    if aweights is not None and correction:
        count = total - correction * reduce_partials((weights * aweights).sum()) / total
    count = count.clamp(min=0) if isinstance(count, Tensor) else max(0, count)
    off = reduce_partials(x) - reduce_partials(mean)
    return ((off if weights is None else off * weights) @ off.mH / count).squeeze()


rule("cov")(lambda op, *args, **kwargs: op.compose(_cov))


@rule("corrcoef")
def _corrcoef(op: OpDescription, input: Arg) -> None:
    op.compose(_correlation)


def _correlation(input: Tensor) -> Tensor:
    found = reduce_partials(_cov(input))
    if found.ndim == 0:
        return found / found
    spread = reduce_partials(found.diagonal()).sqrt()
    out = found / spread.unsqueeze(1) / spread.unsqueeze(0)
    return (
        torch.complex(out.real.clamp(-1, 1), out.imag.clamp(-1, 1))
        if out.is_complex()
        else out.clamp(-1, 1)
    )


# --------------------------------------------------------------------------------------- histograms


def counted(x: Tensor, length: int, weights: Tensor | None = None) -> Tensor:
    """Return ``torch.bincount`` with a result of known length."""
    if has_torch_function((x, weights)):
        return handle_torch_function(counted, (x, weights), x, length, weights)
    if x.is_meta:  # torch has no such kernel
        kind = (
            torch.int64
            if weights is None
            else weights.dtype
            if weights.dtype == torch.float32
            else torch.float64
        )
        return x.new_empty(length, dtype=kind)
    return torch.bincount(x, weights, length)


@rule([counted])
def _counted(op: OpDescription, x: Arg, length: int, weights: Arg | None = None) -> None:
    for a in op.args:
        op.set(a, ("i",))
    op.out, op.reduce = [(None,)], {"i": "sum"}


@rule("bincount")
def _bincount(
    op: OpDescription, input: Arg, weights: Arg | None = None, minlength: int = 0
) -> None:
    op.composite = _bincount_of_all


def _bincount_of_all(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if (
        input.ndim != 1
        or input.is_floating_point()
        or minlength < 0
        or (weights is not None and weights.shape != input.shape)
    ):
        raise RuntimeError(
            "bincount only supports 1-d non-negative integral inputs, weights of the same shape, "
            "and a minlength of at least 0"
        )
    if not input.numel():
        return counted(input, minlength, weights)
    low, high = torch.aminmax(input)
    if int(low) < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    return counted(input, max(int(high) + 1, minlength), weights)


@rule("histc")
def _histc(op: OpDescription, input: Arg, bins: int = 100, min: float = 0, max: float = 0) -> None:
    if float(min) == float(max) and input.spec.numel:
        op.composite = _histc_of_range
        return
    op.set(input, tuple(range(input.ndim)))
    op.out, op.reduce = [(None,)], dict.fromkeys(range(input.ndim), "sum")


def _histc_of_range(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    low, high = (t.item() for t in torch.aminmax(input))
    if low == high:
        low, high = low - 1, high + 1
    return torch.histc(input, bins, low, high)


def tallied(input: Tensor, edges: Sequence[Tensor], weight: Tensor | None = None) -> Tensor:
    """Return the counts of ``torch.histogram`` or ``torch.histogramdd``.

    The former has one set of edges, the latter one for each column of ``input``.
    """
    if has_torch_function((input, *edges, weight)):
        return handle_torch_function(tallied, (input, *edges, weight), input, edges, weight)
    if input.is_meta:  # torch has no such kernel
        return input.new_empty([e.shape[0] - 1 for e in edges])
    if input.ndim == 1:
        return torch.histogram(input, edges[0], weight=weight).hist
    return torch.histogramdd(input, list(edges), weight=weight).hist


@rule([tallied])
def _tallied(
    op: OpDescription, input: Arg, edges: Sequence[Arg], weight: Arg | None = None
) -> None:
    op.set(input, ("i", *[None] * (input.ndim - 1)))
    if weight is not None:
        op.set(weight, ("i",))
    op.out, op.reduce = [(None,) * len(edges)], {"i": "sum"}


@rule("histogram")
def _histogram(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.compose(_histogram_by_counts)


def _histogram_by_counts(
    input: Tensor,
    bins: Any,
    *,
    range: Any = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Any:
    flat = input.flatten()
    edges = bins.clone() if isinstance(bins, Tensor) else _edges(flat, bins, range)
    counts = tallied(flat, [edges], weight if weight is None else weight.flatten())
    return torch.return_types.histogram(
        (_as_density(counts, [edges]) if density else counts, edges)
    )


@rule("histogramdd")
def _histogramdd(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.compose(_histogramdd_by_counts)


def _histogramdd_by_counts(
    input: Tensor, bins: Any, range: Any = None, weight: Tensor | None = None, density: bool = False
) -> Any:
    if input.ndim < 2:
        raise RuntimeError("torch.histogramdd: input tensor should have at least 2 dimensions")
    flat = input.reshape(-1, input.shape[-1])
    bins = [bins] * flat.shape[1] if isinstance(bins, int) else bins
    ranges = (
        [None] * len(bins) if range is None else list(zip(range[::2], range[1::2], strict=True))
    )
    edges = [
        b if isinstance(b, Tensor) else _edges(flat[:, d], b, r)
        for d, (b, r) in enumerate(zip(bins, ranges, strict=True))
    ]
    counts = tallied(flat, edges, weight if weight is None else weight.flatten())
    return torch.return_types.histogramdd(
        (_as_density(counts, edges) if density else counts, tuple(edges))
    )


def _edges(x: Tensor, bins: int, ends: Any) -> Tensor:
    """Return evenly spaced edges over ``ends``, else over the elements, as torch makes them.

    The edges are the same on all ranks.
    """
    low, high = (
        ends
        if ends is not None
        else (t.item() for t in torch.aminmax(x))
        if x.numel()
        else (0.0, 1.0)
    )
    if low == high:
        low, high = low - 0.5, high + 0.5
    return x.new_tensor(
        torch.histogram(torch.empty(0, dtype=x.dtype), bins, range=(low, high)).bin_edges.tolist()
    )


def _as_density(counts: Tensor, edges: Sequence[Tensor]) -> Tensor:
    counts = reduce_partials(counts)
    counts = counts / counts.sum()
    for d, e in enumerate(edges):
        counts = counts / e.diff().reshape(
            [-1 if k == d else 1 for k in builtins.range(counts.ndim)]
        )
    return counts
