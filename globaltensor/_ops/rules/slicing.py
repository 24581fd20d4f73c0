"""Runs of a split dim: slices, the results of split and chunk, and the operands of cat.

The rules of views, indexing and cat call these helpers.

A run with at least one element for every rank stays split, in its own size. Ranks exchange the
elements that they hold of each other's local results. Few elements are exchanged where the run is
most of the dim (labels shifted by one). A share of the elements is exchanged where there are
several runs (queries, keys and values of one projection). A shorter run is cut from the replicated
dim.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...boxing.halo_exchange import HaloPlan, Interval, fetch_halo, most_fetched
from ...cluster import current_cluster
from ...sharding.spec import Spec
from .notation import Arg, LocalContext, OpDescription
from .spatial.halo import fibers, interval, is_spread

__all__ = ["cut", "joins", "stays_split", "takes"]

#: For each result, the positions of its elements in the operand.
Runs = Sequence[range]


def stays_split(x: Arg, dim: int, runs: Runs) -> bool:
    """Return True if results that are runs of ``dim`` are split as ``dim`` is."""
    spec = x.spec
    return x.is_split(dim) and all(
        len(run) >= len(fibers(spec, spec.placement.flat[0], dim)) for run in runs
    )


def takes(op: OpDescription, dims: dict[int, tuple[int, Runs]]) -> None:
    """Price the exchange by which operand 0 is cut along ``dims``, and set ``op.traffic``.

    ``dims`` maps a dim of operand 0 to (the same dim of the results, the run of each result).
    ``op.exchanges`` must name these dims.
    """

    def seconds(choice: Any) -> float:
        spec = choice.ins[0]
        return sum(
            _exchange_seconds(
                spec, d,
                *_held_and_wanted(spec, choice.outs, _ranks_along(spec, d), d, out_dim, runs),
            )
            for d, (out_dim, runs) in dims.items() if op.dims[0][d] in choice.factors
        )  # fmt: skip

    op.traffic = seconds


def _ranks_along(spec: Spec, dim: int) -> tuple[int, ...]:
    return fibers(spec, spec.placement.flat[0], dim)


def _exchange_seconds(
    spec: Spec, dim: int, held: list[Interval], wanted: list[list[Interval]]
) -> float:
    """Return the seconds in which the ranks of a dim of ``spec`` fetch what they want.

    ``held`` and ``wanted`` are intervals of that dim for each rank.
    """
    most = most_fetched(held, wanted)
    each = spec.local_numel() // max(1, spec.local_shape(spec.placement.flat[0])[dim])
    return (
        current_cluster().seconds(
            "exchange", most * each * spec.dtype.itemsize, _ranks_along(spec, dim)
        )
        if most
        else 0.0
    )


def cut(
    split: LocalContext, dim: int, out_dim: int, runs: Runs
) -> Callable[[Tensor], Sequence[Tensor]] | None:
    """Return the function that cuts a rank's local results out of its local operand.

    Return None where the rank has all of ``dim``.
    """
    if not is_spread(split, dim):
        return None
    src, rank = split.ins[0], split.rank
    ranks = fibers(src, rank, dim)
    held, wanted = _held_and_wanted(src, split.outs, ranks, dim, out_dim, runs)
    reach = HaloPlan(ranks, rank, held, wanted)
    mine = [interval(out, rank, out_dim) for out in split.outs]
    sizes = [
        sum(b - a for a, b in _covered_intervals(run, part))
        for run, part in zip(runs, mine, strict=True)
    ]
    strides = [
        (*[slice(None)] * dim, slice(None, None, run.step)) if run.step > 1 else None
        for run in runs
    ]

    def parts(x: Tensor) -> Sequence[Tensor]:
        fetched = fetch_halo(x, dim, reach)
        # A result is never the operand itself: a hook on it, for example, is not one on a leaf.
        whole = fetched.view_as(x) if fetched is x else fetched
        found = fetched.split(sizes, dim) if len(sizes) > 1 else (whole,)
        return [
            part if stride is None else part[stride]
            for part, stride in zip(found, strides, strict=True)
        ]

    return parts


def _held_and_wanted(
    src: Spec, outs: Sequence[Spec], ranks: Sequence[int], dim: int, out_dim: int, runs: Runs
) -> tuple[list[Interval], list[list[Interval]]]:
    """Return the interval of ``dim`` that each rank holds, and the intervals that it wants."""
    wanted = [
        [
            i
            for run, out in zip(runs, outs, strict=True)
            for i in _covered_intervals(run, interval(out, r, out_dim))
        ]
        for r in ranks
    ]
    return [interval(src, r, dim) for r in ranks], wanted


def _covered_intervals(run: range, part: Interval) -> Iterator[Interval]:
    """Yield the interval of the operand that an interval of a run covers, first to last element."""
    a, b = part
    if a < b:
        yield run[a], run[b - 1] + 1


# ------------------------------------------------------------------------------------ concatenation


def joins(op: OpDescription, operands: Sequence[Arg], dim: int, factor: Any) -> None:
    """Let the result of concatenating ``operands`` along ``dim`` stay split in ``dim`` as they are.

    Ranks exchange the elements that belong to each other's local results. An operand that is
    replicated is cut locally. The dim ``dim`` of the split operands is named ``factor``.
    """
    ends = list(itertools.accumulate(a.shape[dim] for a in operands))
    starts = [end - a.shape[dim] for end, a in zip(ends, operands, strict=True)]
    spread = [a for a in operands if a.is_split(dim)]
    for a in spread:
        op.set(a, [factor if d == dim else f for d, f in enumerate(op.dims[a.index])])
    op.out = [tuple(factor if d == dim else f for d, f in enumerate(op.out[0]))]
    op.exchanges = {factor}

    def wanted(out: Spec, ranks: Sequence[int], i: int) -> list[list[Interval]]:
        """Return the intervals of operand ``i`` that each rank wants."""
        parts = [interval(out, r, dim) for r in ranks]
        return [
            [(a, b)]
            if (a := max(low, starts[i]) - starts[i]) < (b := min(high, ends[i]) - starts[i])
            else []
            for low, high in parts
        ]

    def seconds(choice: Any) -> float:
        if factor not in choice.factors:
            return 0.0
        exchange_seconds, out = 0.0, choice.outs[0]
        for i, a in enumerate(operands):
            if a in spread:
                spec = choice.ins[a.index]
                held = [interval(spec, r, dim) for r in _ranks_along(spec, dim)]
                exchange_seconds += _exchange_seconds(
                    spec, dim, held, wanted(out, _ranks_along(spec, dim), i)
                )
        return exchange_seconds

    def local(split: LocalContext) -> Callable[..., Tensor] | None:
        out, rank = split.outs[0], split.rank
        ranks = fibers(out, rank, dim)
        if len(ranks) == 1:
            return None
        steps: dict[int, Callable[[Tensor], Tensor]] = {}
        for i, a in enumerate(operands):
            spec, wants = split.ins[a.index], wanted(out, ranks, i)
            if a in spread:
                reach = HaloPlan(ranks, rank, [interval(spec, r, dim) for r in ranks], wants)
                steps[a.index] = functools.partial(fetch_halo, dim=dim, reach=reach)
            else:
                start, stop = (wants[ranks.index(rank)] or [(0, 0)])[0]
                steps[a.index] = functools.partial(
                    torch.narrow, dim=dim, start=start, length=stop - start
                )

        def run(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
            return torch.cat([steps[i](t) if i in steps else t for i, t in enumerate(tensors)], dim)

        return run

    op.traffic, op.local = seconds, local
