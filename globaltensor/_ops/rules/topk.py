"""Rules of the largest elements and their positions: max and min, argmax and argmin, topk.

`rules` imports this module. Along a split dim each rank sends only its own candidates, and the best
of them are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...boxing.halo_exchange import HaloPlan, all_gather_small, fetch_halo
from .helpers import canonical, dims_of, reduced, split_in
from .notation import Arg, LocalContext, OpDescription, align
from .reduction import amax, has_split
from .registry import rule
from .scan import SplitPosition

__all__: list[str] = []


def _describe_reduction(
    op: OpDescription, x: Arg, dims: tuple[int, ...], keepdim: bool, results: int
) -> None:
    """Describe a reduction of ``dims``.

    Dims that are split may stay so, and every rank has the result.
    """
    reduced(op, x, dims, keepdim, None, results)
    op.exchanges = {d for d in dims if split_in(x, [d])}
    op.whole -= op.exchanges


# ----------------------------------------------------------------------------- the best along a dim


def _local_best(
    split: LocalContext, d: int, largest: bool, keepdim: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the local function for the largest (smallest) along a split dim, and its position.

    Of equal elements the first is taken. NaNs count as the best, and of these the first is taken
    too.
    """
    place = SplitPosition.of(split, d)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        if place.length:
            value, at = x.max(d, keepdim=True) if largest else x.min(d, keepdim=True)
            at = at + place.offset
        else:
            value = x.sum(d, keepdim=True).to(x.dtype)
            at = torch.zeros_like(value, dtype=torch.int64)
        values, places = (
            all_gather_small(value, place.ranks)[place.present],
            all_gather_small(at, place.ranks)[place.present],
        )
        best, which = values.max(0) if largest else values.min(0)
        at = places.gather(0, which.unsqueeze(0))[0]
        return (best, at) if keepdim else (best.squeeze(d), at.squeeze(d))

    return run


def _max_or_min(name: str) -> None:
    """Declare ``max`` or ``min``, each of which is three functions.

    The three work on all elements, along a dim with indices, and on two tensors element by element.
    """

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        kwargs = canonical(kwargs)
        if len(op.args) == 2:
            op.dims, result = align([a.shape for a in op.args])
            op.out = [result]
            return

        def bind(input: Arg, dim: int | None = None, keepdim: bool = False) -> None:
            if dim is None and has_split(input):
                op.compose(amax(name == "max"))
            elif dim is None:
                reduced(op, input, dims_of(input, None), False, None)
            else:
                dims = dims_of(input, dim)
                _describe_reduction(op, input, dims, keepdim, 2)
                if op.exchanges:
                    op.local = lambda split: _local_max_or_min(name, split, dims[0], keepdim)

        bind(*args, **kwargs)

    rule(name)(describe)


def _local_max_or_min(name: str, split: LocalContext, d: int, keepdim: bool) -> Callable[..., Any]:
    if not split.is_split(d):
        return getattr(torch, name)  # type: ignore[no-any-return]
    run, kind = _local_best(split, d, name == "max", keepdim), getattr(torch.return_types, name)
    return lambda input, *args, **kwargs: kind(run(input))


_max_or_min("max")
_max_or_min("min")


def _declare_arg(name: str) -> None:
    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        def bind(input: Arg, dim: int | None = None, keepdim: bool = False) -> None:
            dims = dims_of(input, dim)
            _describe_reduction(op, input, dims, keepdim, 1)
            if op.exchanges:
                op.local = lambda split: _local_arg(
                    name, split, None if dim is None else dims[0], keepdim
                )

        bind(*args, **canonical(kwargs))

    rule(name)(describe)


def _local_arg(
    name: str, split: LocalContext, d: int | None, keepdim: bool
) -> Callable[..., Tensor]:
    over = [f for f in split.op.exchanges if split.is_split(f)]
    if not over:
        return getattr(torch, name)  # type: ignore[no-any-return]
    if d is not None:
        best = _local_best(split, d, name == "argmax", keepdim)
        return lambda input, *args, **kwargs: best(input.detach())[1]
    return lambda input, *args, **kwargs: _flat_position(
        name == "argmax", split, over, input.detach()
    )


def _flat_position(largest: bool, split: LocalContext, over: list[Any], x: Tensor) -> Tensor:
    """Return the position of the first element that is the best, in the flattened global tensor."""
    spec = split.ins[0]
    ranks = spec.placement.fiber(split.rank, sorted(a for f in over for a in split.factors[f]))
    offsets, shape = spec.box(split.rank)[0], spec.shape
    flat = x.flatten()
    if len(flat):
        at = flat.argmax() if largest else flat.argmin()
        # here[at] would read the index and wait for the device.
        value, rest, place, step = (
            flat.gather(0, at.reshape(1)).squeeze(0),
            at,
            torch.zeros_like(at),
            1,
        )
        for n, whole, offset in zip(
            reversed(x.shape), reversed(shape), reversed(offsets), strict=True
        ):
            place = place + (rest % n + offset) * step
            rest, step = rest // n, step * whole
    else:
        value, place = x.new_zeros(()), torch.zeros((), dtype=torch.int64, device=x.device)
    present = [i for i, r in enumerate(ranks) if 0 not in spec.local_shape(r)]
    values, places = (
        all_gather_small(value, ranks)[present],
        all_gather_small(place, ranks)[present],
    )
    best = values.max() if largest else values.min()
    # A NaN is the best, where there is one.
    equal = torch.where(best.isnan(), values.isnan(), values == best)
    position = torch.where(equal, places, spec.numel).min()
    return position.reshape(split.out_shape())


_declare_arg("argmax")
_declare_arg("argmin")


# --------------------------------------------------------------------------------------- the best k


@rule("topk")
def _topk(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    def bind(input: Arg, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> None:
        dims = dims_of(input, dim)
        _describe_reduction(op, input, dims, True, 2)
        if op.exchanges:
            op.local = lambda split: (
                _best_k(split, dims[0], k, largest, sorted)
                if split.is_split(dims[0])
                else torch.topk
            )

    bind(*args, **canonical(kwargs))


def _best_k(
    split: LocalContext, d: int, k: int, largest: bool, in_order: bool
) -> Callable[..., Any]:
    place = SplitPosition.of(split, d)
    sent = [min(k, n) for n in place.lengths]
    ends = [0, *accumulate(sent)]
    reach = HaloPlan(place.ranks, split.rank, list(pairwise(ends)), [[(0, ends[-1])]] * len(sent))

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        values, at = input.topk(sent[place.index], d, largest)
        values, at = fetch_halo(values, d, reach), fetch_halo(at + place.offset, d, reach)
        best, which = values.topk(k, d, largest, in_order)
        return torch.return_types.topk((best, at.gather(d, which)))

    return run
