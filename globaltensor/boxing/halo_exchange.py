"""Exchanges of native ops over a split dim: intervals of it, or a little data from every rank.

Intervals are halos, and elements that change places. The little data are totals of local tensors.
Rules of native ops call these functions.

The intervals that ranks need may overlap, so no layout describes them. The backward of a fetch
returns every element's gradient to its holder, which sums them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..distributed.world import world
from . import log

__all__ = ["HaloPlan", "Interval", "all_gather_small", "fetch_halo", "most_fetched"]

Interval = tuple[int, int]  # start, stop


class HaloPlan:
    """The intervals of a dim that each rank holds, and the intervals that each rank needs.

    The plan is pure. Every rank of ``ranks`` makes the same one, from its own point of view.

    ``held``: the interval of each rank, disjoint. ``wanted``: for each rank, any intervals, in the
    order in which they are concatenated.
    """

    __slots__ = ("chunks", "index", "length", "outgoing", "quiet", "ranks")

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        held: Sequence[Interval],
        wanted: Sequence[Sequence[Interval]],
    ) -> None:
        self.ranks, self.index = tuple(ranks), list(ranks).index(rank)
        every = _source_chunks(held, wanted)
        #: (index of the holder, offset in its shard, length), in the order of the fetched tensor
        self.chunks = every[self.index]
        self.length = sum(n for _, _, n in self.chunks)
        #: index of a rank -> (offset in the shard here, length) of each piece that it gets from
        #: here
        self.outgoing = {
            i: pieces
            for i, chunks in enumerate(every)
            if (pieces := [(a, n) for q, a, n in chunks if q == self.index])
        }
        # True if no rank needs what another one holds.
        self.quiet = all(q == i for i, chunks in enumerate(every) for q, _, _ in chunks)

    def taken(self) -> dict[int, int]:
        """Return the length that is fetched from each other rank, by the rank's index."""
        lengths: dict[int, int] = {}
        for q, _, n in self.chunks:
            if q != self.index:
                lengths[q] = lengths.get(q, 0) + n
        return lengths


def most_fetched(held: Sequence[Interval], wanted: Sequence[Sequence[Interval]]) -> int:
    """Return the largest length of the dim that a rank fetches from others.

    ``held``, ``wanted``: as in `HaloPlan`.
    """
    return max(
        sum(n for q, _, n in chunks if q != i)
        for i, chunks in enumerate(_source_chunks(held, wanted))
    )


def _source_chunks(
    held: Sequence[Interval], wanted: Sequence[Sequence[Interval]]
) -> list[list[tuple[int, int, int]]]:
    """Return the pieces of each rank: (index of the holder, offset in its shard, length)."""
    order = sorted((a, b, q) for q, (a, b) in enumerate(held) if a < b)
    ends = [b for _, b, _ in order]
    return [
        [chunk for interval in intervals for chunk in _interval_chunks(order, ends, interval)]
        for intervals in wanted
    ]


def _interval_chunks(
    order: Sequence[tuple[int, int, int]], ends: Sequence[int], interval: Interval
) -> Iterator[tuple[int, int, int]]:
    start, stop = interval
    for k in range(bisect.bisect_right(ends, start), len(order)):
        a, b, q = order[k]
        low, high = max(start, a), min(stop, b)
        if low >= high:
            return
        yield q, low - a, high - low


def fetch_halo(local: Tensor, dim: int, reach: HaloPlan) -> Tensor:
    """Return the intervals of ``dim`` that this rank needs, concatenated.

    The result is differentiable any number of times. Every rank of the reach must call this
    function. All other dims of the local tensors must have equal sizes on these ranks. There is no
    traffic where no rank needs what another one holds.
    """
    if reach.quiet:
        if [(0, local.shape[dim])] == [(a, n) for _, a, n in reach.chunks]:
            return local
        parts = [local.narrow(dim, a, n) for _, a, n in reach.chunks]
        return (
            parts[0]
            if len(parts) == 1
            else torch.cat(parts, dim)
            if parts
            else local.narrow(dim, 0, 0)
        )
    log.exchange(
        f"halo along dim {dim}",
        sum(reach.taken().values())
        * torch.Size(_shape_with(local, dim, 1)).numel()
        * local.itemsize,
    )
    with log.exchanges(f"halo along dim {dim}"):
        return _Fetch.apply(local, dim, reach)  # type: ignore[no-any-return, no-untyped-call]


def _shape_with(like: Tensor, dim: int, n: int) -> list[int]:
    return [*like.shape[:dim], n, *like.shape[dim + 1 :]]


def _cat_intervals(t: Tensor, dim: int, places: Sequence[tuple[int, int]]) -> Tensor:
    parts = [t.narrow(dim, a, n) for a, n in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _exchange_halo(local: Tensor, dim: int, reach: HaloPlan) -> Tensor:
    rest = (
        local.numel() // local.shape[dim]
        if local.shape[dim]
        else torch.Size(_shape_with(local, dim, 1)).numel()
    )
    taken = reach.taken()
    sends = {
        i: _cat_intervals(local, dim, places)
        for i, places in reach.outgoing.items()
        if i != reach.index
    }
    came = world().comm(reach.ranks).exchange(sends, {q: n * rest for q, n in taken.items()}, local)
    whole = {q: flat.view(_shape_with(local, dim, taken[q])) for q, flat in came.items()}
    read = dict.fromkeys(taken, 0)
    parts = []
    for q, a, n in reach.chunks:
        if q == reach.index:
            parts.append(local.narrow(dim, a, n))
        else:
            parts.append(whole[q].narrow(dim, read[q], n))
            read[q] += n
    return torch.cat(parts, dim) if parts else local.new_empty(_shape_with(local, dim, 0))


def _return_gradients(fetched: Tensor, dim: int, reach: HaloPlan, length: int) -> Tensor:
    rest = (
        fetched.numel() // fetched.shape[dim]
        if fetched.shape[dim]
        else torch.Size(_shape_with(fetched, dim, 1)).numel()
    )
    places: dict[int, list[tuple[int, int]]] = {}
    at = 0
    for q, _, n in reach.chunks:
        places.setdefault(q, []).append((at, n))
        at += n
    back = {q: _cat_intervals(fetched, dim, pieces) for q, pieces in places.items()}
    own_part = back.pop(reach.index, None)
    expected = {
        i: sum(n for _, n in pieces) for i, pieces in reach.outgoing.items() if i != reach.index
    }
    came = (
        world()
        .comm(reach.ranks)
        .exchange(back, {i: n * rest for i, n in expected.items()}, fetched)
    )
    out = fetched.new_zeros(_shape_with(fetched, dim, length))
    # in the order of ranks, so that the sum is the same every time
    for i, pieces in sorted(reach.outgoing.items()):
        part, at = (
            own_part if i == reach.index else came[i].view(_shape_with(fetched, dim, expected[i])),
            0,
        )
        assert part is not None
        for a, n in pieces:
            out.narrow(dim, a, n).add_(part.narrow(dim, at, n))
            at += n
    return out


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, reach: HaloPlan) -> Tensor:
        ctx.dim, ctx.reach, ctx.length = dim, reach, local.shape[dim]
        return _exchange_halo(local.detach(), dim, reach)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with log.exchanges(f"backward of halo along dim {ctx.dim}"):
            return _Return.apply(grads[0], ctx.dim, ctx.reach, ctx.length), None, None  # type: ignore[no-untyped-call]


class _Return(torch.autograd.Function):
    """The transpose of a fetch."""

    @staticmethod
    def forward(ctx: Any, fetched: Tensor, dim: int, reach: HaloPlan, length: int) -> Tensor:
        ctx.dim, ctx.reach = dim, reach
        return _return_gradients(fetched.detach(), dim, reach, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with log.exchanges(f"backward of backward of halo along dim {ctx.dim}"):
            return _Fetch.apply(grads[0], ctx.dim, ctx.reach), None, None, None  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------ small gathers

_TOTALS: Final = "totals of the shards of a split dim"


def all_gather_small(t: Tensor, ranks: tuple[int, ...]) -> Tensor:
    """Gather every rank's tensor (of one shape), stacked in the order of ``ranks``.

    The result [ranks, ...] is on each rank, and is differentiable any number of times. Each rank
    does something else with it. So the backward sums, for each rank's tensor, the gradients of all
    ranks' results.
    """
    log.exchange(_TOTALS, (len(ranks) - 1) * t.nbytes)
    with log.exchanges(_TOTALS):
        return _AllGatherSmall.apply(t, ranks)  # type: ignore[no-any-return, no-untyped-call]


class _AllGatherSmall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, ranks: tuple[int, ...]) -> Tensor:
        ctx.ranks = ranks
        out = torch.empty((len(ranks), *t.shape), dtype=t.dtype, device=t.device)
        world().comm(ranks).all_gather_into(t, [t.numel()] * len(ranks), out.view(-1))
        if not (t.is_floating_point() or t.is_complex()):
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with log.exchanges(f"backward of {_TOTALS}"):
            return _ReduceScatterSmall.apply(grads[0], ctx.ranks), None  # type: ignore[no-untyped-call]


class _ReduceScatterSmall(torch.autograd.Function):
    """The transpose of a share."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, ranks: tuple[int, ...]) -> Tensor:
        ctx.ranks = ranks
        return world().comm(ranks).reduce_scatter(grad.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with log.exchanges(f"backward of backward of {_TOTALS}"):
            return _AllGatherSmall.apply(grads[0], ctx.ranks), None  # type: ignore[no-untyped-call]
