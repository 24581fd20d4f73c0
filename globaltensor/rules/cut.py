"""Runs of a split dim: slices, and what split and chunk give. A run that has something for every rank lies split in its own size: ranks hand each other what
they hold of each other's parts, which is little where it is most of the dim (labels that are shifted by one) and a share where there are several (queries,
keys and values from one projection). A shorter one is taken from the whole dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..boxing.halo import Interval, Reach, fetch
from ..cluster import current_cluster
from ..spec import Spec
from .halo import fibers, is_spread
from .notation import Arg, Op, Split

__all__ = ["cut", "stays_split", "takes"]

#: For each result, where in the operand its elements stand.
Runs = Sequence[range]


def stays_split(x: Arg, dim: int, runs: Runs) -> bool:
    """Whether results that are runs of ``dim`` are split as that is."""
    spec = x.spec
    return x.is_split(dim) and all(len(run) >= len(fibers(spec, spec.placement.flat[0], dim)) for run in runs)


def takes(op: Op, dims: dict[int, tuple[int, Runs]]) -> None:
    """Operand 0 is cut along ``dims``: dim of it -> (the same dim of the results, what each takes). Its factors there are the numbers of the dims, as named
    by the caller in ``op.exchanges``. Says what that costs."""

    def seconds(choice: Any) -> float:
        spec, found = choice.ins[0], 0.0
        for d, (out_dim, runs) in dims.items():
            if op.dims[0][d] in choice.factors:
                ranks = fibers(spec, spec.placement.flat[0], d)
                held, wanted = _places(spec, choice.outs, ranks, d, out_dim, runs)
                most = max(sum(Reach(ranks, r, held, wanted).taken().values()) for r in ranks)
                each = spec.local_numel() // max(1, spec.local_shape(spec.placement.flat[0])[d])
                found += current_cluster().seconds("exchange", most * each * spec.dtype.itemsize, ranks) if most else 0.0
        return found

    op.traffic = seconds


def cut(split: Split, dim: int, out_dim: int, runs: Runs) -> Callable[[Tensor], Sequence[Tensor]] | None:
    """The function that gives a rank its parts of the results. None where it has all of ``dim``."""
    if not is_spread(split, dim):
        return None
    src, rank = split.ins[0], split.rank
    ranks = fibers(src, rank, dim)
    held, wanted = _places(src, split.outs, ranks, dim, out_dim, runs)
    reach = Reach(ranks, rank, held, wanted)
    mine = [_interval(out, rank, out_dim) for out in split.outs]
    sizes = [sum(b - a for a, b in _covered(run, part)) for run, part in zip(runs, mine, strict=True)]
    strides = [(*[slice(None)] * dim, slice(None, None, run.step)) if run.step > 1 else None for run in runs]

    def parts(x: Tensor) -> Sequence[Tensor]:
        x = fetch(x, dim, reach)
        found = x.split(sizes, dim) if len(sizes) > 1 else (x,)
        return [part if stride is None else part[stride] for part, stride in zip(found, strides, strict=True)]

    return parts


def _places(
    src: Spec, outs: Sequence[Spec], ranks: Sequence[int], dim: int, out_dim: int, runs: Runs
) -> tuple[list[Interval], list[list[Interval]]]:
    """What of ``dim`` each rank holds, and what it wants."""
    wanted = [[i for run, out in zip(runs, outs, strict=True) for i in _covered(run, _interval(out, r, out_dim))] for r in ranks]
    return [_interval(src, r, dim) for r in ranks], wanted


def _covered(run: range, part: Interval) -> Iterator[Interval]:
    """The elements of the operand from the first to the last of a part of a run."""
    a, b = part
    if a < b:
        yield run[a], run[b - 1] + 1


def _interval(spec: Spec, rank: int, dim: int) -> Interval:
    offsets, lengths = spec.box(rank)
    return offsets[dim], offsets[dim] + lengths[dim]
