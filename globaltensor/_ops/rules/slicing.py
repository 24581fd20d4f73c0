"""Runs of a split dim: slices, what split and chunk give, and what cat puts side by side.

A run that has something for every rank lies split in its own size: ranks hand each other what they
hold of each other's parts, which is little where it is most of the dim (labels shifted by one) and
a share where there are several (queries, keys and values of one projection). A shorter one is taken
from the whole dim.
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

#: For each result, where in the operand its elements stand.
Runs = Sequence[range]


def stays_split(x: Arg, dim: int, runs: Runs) -> bool:
    """Whether results that are runs of ``dim`` are split as that is."""
    spec = x.spec
    return x.is_split(dim) and all(
        len(run) >= len(fibers(spec, spec.placement.flat[0], dim)) for run in runs
    )


def takes(op: OpDescription, dims: dict[int, tuple[int, Runs]]) -> None:
    """Operand 0 is cut along ``dims``, which ``op.exchanges`` names: dim of it -> (the same dim of
    the results, what each takes). Says what that costs."""

    def seconds(choice: Any) -> float:
        spec = choice.ins[0]
        return sum(
            _seconds(spec, d, *_places(spec, choice.outs, _ranks(spec, d), d, out_dim, runs))
            for d, (out_dim, runs) in dims.items() if op.dims[0][d] in choice.factors
        )  # fmt: skip

    op.traffic = seconds


def _ranks(spec: Spec, dim: int) -> tuple[int, ...]:
    return fibers(spec, spec.placement.flat[0], dim)


def _seconds(spec: Spec, dim: int, held: list[Interval], wanted: list[list[Interval]]) -> float:
    """What it costs that the ranks of a dim of ``spec``, of which they hold ``held``, fetch what
    they want."""
    most = most_fetched(held, wanted)
    each = spec.local_numel() // max(1, spec.local_shape(spec.placement.flat[0])[dim])
    return (
        current_cluster().seconds("exchange", most * each * spec.dtype.itemsize, _ranks(spec, dim))
        if most
        else 0.0
    )


def cut(
    split: LocalContext, dim: int, out_dim: int, runs: Runs
) -> Callable[[Tensor], Sequence[Tensor]] | None:
    """The function that gives a rank its parts of the results. None where it has all of ``dim``."""
    if not is_spread(split, dim):
        return None
    src, rank = split.ins[0], split.rank
    ranks = fibers(src, rank, dim)
    held, wanted = _places(src, split.outs, ranks, dim, out_dim, runs)
    reach = HaloPlan(ranks, rank, held, wanted)
    mine = [interval(out, rank, out_dim) for out in split.outs]
    sizes = [
        sum(b - a for a, b in _covered(run, part)) for run, part in zip(runs, mine, strict=True)
    ]
    strides = [
        (*[slice(None)] * dim, slice(None, None, run.step)) if run.step > 1 else None
        for run in runs
    ]

    def parts(x: Tensor) -> Sequence[Tensor]:
        x = fetch_halo(x, dim, reach)
        found = x.split(sizes, dim) if len(sizes) > 1 else (x,)
        return [
            part if stride is None else part[stride]
            for part, stride in zip(found, strides, strict=True)
        ]

    return parts


def _places(
    src: Spec, outs: Sequence[Spec], ranks: Sequence[int], dim: int, out_dim: int, runs: Runs
) -> tuple[list[Interval], list[list[Interval]]]:
    """What of ``dim`` each rank holds, and what it wants."""
    wanted = [
        [
            i
            for run, out in zip(runs, outs, strict=True)
            for i in _covered(run, interval(out, r, out_dim))
        ]
        for r in ranks
    ]
    return [interval(src, r, dim) for r in ranks], wanted


def _covered(run: range, part: Interval) -> Iterator[Interval]:
    """The elements of the operand from the first to the last of a part of a run."""
    a, b = part
    if a < b:
        yield run[a], run[b - 1] + 1


# ------------------------------------------------------------------------------------- joined again


def joins(op: OpDescription, operands: Sequence[Arg], dim: int, factor: Any) -> None:
    """The result, ``operands`` side by side along ``dim``, is split there as those are that are:
    ranks hand each other what falls into each other's parts of it. What lies whole on all ranks is
    cut where it lies. Names the dim ``factor`` of those that are split."""
    ends = list(itertools.accumulate(a.shape[dim] for a in operands))
    starts = [end - a.shape[dim] for end, a in zip(ends, operands, strict=True)]
    spread = [a for a in operands if a.is_split(dim)]
    for a in spread:
        op.set(a, [factor if d == dim else f for d, f in enumerate(op.dims[a.index])])
    op.out = [tuple(factor if d == dim else f for d, f in enumerate(op.out[0]))]
    op.exchanges = {factor}

    def wanted(out: Spec, ranks: Sequence[int], i: int) -> list[list[Interval]]:
        """What each rank wants of operand ``i``."""
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
        found, out = 0.0, choice.outs[0]
        for i, a in enumerate(operands):
            if a in spread:
                spec = choice.ins[a.index]
                held = [interval(spec, r, dim) for r in _ranks(spec, dim)]
                found += _seconds(spec, dim, held, wanted(out, _ranks(spec, dim), i))
        return found

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
