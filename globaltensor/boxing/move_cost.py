"""Costs of the moves of one tensor, cached: a search asks for the same ones again and again.

The costs are pure. The planner and auto parallelism call `move_costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..cluster import Cluster
from ..sharding.placement import Placement
from ..sharding.spec import Spec
from .moves import LOCAL, Box, Layout, box_owners, source_rank

__all__ = ["RELAID", "MoveCosts", "move_costs"]

_MAX_TENSORS: Final = 256
#: Moves of pieces along a dim. The pieces may have to be copied into another order, which counts
#: where copies were measured.
RELAID: Final = frozenset(("all_gather", "reduce_scatter", "all_to_all", "slice"))

Table: TypeAlias = NDArray[np.int64]
Price = tuple[int, float]  # (traffic in bytes of the busiest rank, seconds)


class MoveCosts:
    """The costs of moves of tensors of one shape and dtype on one placement, in any layout."""

    __slots__ = (
        "_costs",
        "_fibers",
        "_landings",
        "_largest",
        "cluster",
        "dtype",
        "placement",
        "shape",
    )

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement, cluster: Cluster
    ) -> None:
        self.shape, self.dtype, self.placement, self.cluster = shape, dtype, placement, cluster
        self._largest: dict[Layout, tuple[int, tuple[int, ...]]] = {}
        self._costs: dict[tuple[tuple[int, ...], Layout, Layout], tuple[Layout, int, float]] = {}
        self._fibers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._landings: dict[tuple[Layout, int], float] = {}

    def spec(self, layout: Layout) -> Spec:
        """Return the tensor's spec in this layout."""
        return Spec.make(self.shape, self.dtype, self.placement, layout)

    def nbytes(self, layout: Layout) -> int:
        """Return the bytes of the largest local tensor."""
        return self.largest(layout)[0]

    def largest(self, layout: Layout) -> tuple[int, tuple[int, ...]]:
        """Return (bytes, shape) of the largest local tensor."""
        found = self._largest.get(layout)
        if found is None:
            shape = self.spec(layout).largest_shape()
            found = self._largest[layout] = self.dtype.itemsize * prod(shape), shape
        return found

    def move(
        self, kind: str, axes: tuple[int, ...], before: Layout, after: Layout
    ) -> tuple[Layout, int, float]:
        """Return (layout after it, traffic, seconds) of a move on axes of the placement.

        The layout is ``after`` without units that change nothing.
        """
        key = axes, before, after
        priced_move = self._costs.get(key)
        if priced_move is None:
            to = after if all(e.unit == 1 for e in after) else self.spec(after).layout
            nbytes, seconds = self.price(kind, axes, self.nbytes(before), self.nbytes(to))
            if kind in RELAID and self.cluster.measured:
                seconds = self._add_copy_seconds(kind, axes, before, to, seconds)
            priced_move = self._costs[key] = to, nbytes, seconds
        return priced_move

    def _add_copy_seconds(
        self, kind: str, axes: tuple[int, ...], before: Layout, after: Layout, seconds: float
    ) -> float:
        """Return the seconds of a move with the copies that its pieces need.

        Pieces along any dim but the first are copied before they are sent and after they have
        arrived. A slice along the first dim needs no copy.
        """
        sent, came = (
            (layout[axes[0]], self.nbytes(other))
            for layout, other in ((after, before), (before, after))
        )
        for entry, nbytes in (sent, came):
            more = self.cluster.relayout_seconds(nbytes) if entry.kind == "split" else None
            if more is not None and kind != "slice":
                seconds += 0.0 if _pieces_are_contiguous(entry.dim, self.spec(before)) else more
            elif more is not None and _pieces_are_contiguous(entry.dim, self.spec(before)):
                seconds = self.cluster.memory_latency
        return seconds

    def price(self, kind: str, axes: tuple[int, ...], before: int, after: int) -> Price:
        """Return the price of a move between local tensors of so many bytes, in any shape.

        The copies that reorder pieces are left out.
        """
        if kind == "keep":
            return 0, 0.0
        if kind in LOCAL:
            # A slice is a view: its cost is the strided reading later.
            return 0, self.cluster.seconds(kind, after if kind == "slice" else before + after, 1)
        ranks = self._fibers.get(axes)
        if ranks is None:
            ranks = self._fibers[axes] = self.placement.fiber(self.placement.flat[0], axes)
        nbytes = after if kind == "all_gather" else before
        sent = (2 if kind == "all_reduce" else 1) * (nbytes - nbytes // len(ranks))
        return sent, self.cluster.seconds(kind, nbytes, ranks) + self.cluster.rank_skew

    def exchange_at_least(self, before: Layout, dst_costs: MoveCosts, after: Layout) -> float:
        """Return a lower bound for the seconds of an exchange into a layout of ``dst_costs``.

        It does not need to know which rank holds what.
        """
        (_, mine), (arriving, theirs) = self.largest(before), dst_costs.largest(after)
        # In each dim the two have at most the shorter length in common.
        missing = arriving - self.dtype.itemsize * prod(map(min, mine, theirs))
        lower_bound = dst_costs._landings.get((after, missing))
        if lower_bound is None:
            cluster = self.cluster
            sent = cluster.exchange_at_least(missing or 1)
            # Where every rank has the elements that it needs, nothing is sent.
            lower_bound = sent if missing else min(sent, cluster.memory_latency)
            if not cluster.measured:
                lower_bound += cluster.seconds("copy", 2 * arriving, 1)
            dst_costs._landings[after, missing] = lower_bound
        return lower_bound

    def exchange(self, before: Layout, dst_costs: MoveCosts, after: Layout) -> Price:
        """Return the price of an exchange into a layout of ``dst_costs``.

        Neither side has partials.
        """
        return _exchange(self.spec(before), dst_costs.spec(after), self.cluster)


@lru_cache(maxsize=_MAX_TENSORS)
def move_costs(
    shape: tuple[int, ...], dtype: torch.dtype, placement: Placement, cluster: Cluster
) -> MoveCosts:
    """Return the costs of these tensors: the same object for equal arguments, while cached."""
    return MoveCosts(shape, dtype, placement, cluster)


@lru_cache(maxsize=1 << 13)
def _exchange(src: Spec, dst: Spec, cluster: Cluster) -> Price:
    nbytes, peers, pair = _traffic(src, dst, cluster.node_size)
    copied = _copy_seconds(src, dst, nbytes, cluster)
    if not nbytes:
        return 0, cluster.memory_latency + copied
    # One peer on another node is enough for the slower links.
    return nbytes, cluster.seconds(
        "exchange", nbytes, peers + 1 if pair is None else (pair[0], *(pair[1],) * peers)
    ) + copied + cluster.rank_skew


def _copy_seconds(src: Spec, dst: Spec, nbytes: int, cluster: Cluster) -> float:
    """Return seconds for the copies of an exchange of ``nbytes``.

    By the formulas the full result is copied. A measured exchange already writes what arrives into
    new memory. So with measurements the copies are those of the rest of the result, of arriving
    pieces that are not contiguous, and of leaving ones.
    """
    whole = cluster.seconds("copy", 2 * src.dtype.itemsize * dst.local_numel(), 1)
    if not cluster.measured:
        return whole
    arrived = cluster.seconds("copy", 2 * nbytes, 1)
    arriving, leaving = (
        any(e.kind == "split" and not _pieces_are_contiguous(e.dim, at) for e in other.layout)
        for other, at in ((src, dst), (dst, src))
    )
    return (whole if arriving else max(0.0, whole - arrived)) + (arrived if leaving else 0.0)


def _pieces_are_contiguous(dim: int, spec: Spec) -> bool:
    """Return True if pieces along ``dim`` are contiguous in memory, one after the other."""
    return all(n == 1 for n in spec.local_shape(spec.placement.flat[0])[:dim])


class _BoxTable(NamedTuple):
    """The boxes of a layout in tables [boxes, dims].

    ``low`` and ``high`` have the boxes of all ranks of the placement. ``once_low`` and
    ``once_high`` have each box that is not empty once. ``first``, ``last``: for each dim the
    different intervals of it that some rank has. The boxes are all combinations of one interval for
    each dim.
    """

    low: Table
    high: Table
    once_low: Table
    once_high: Table
    first: tuple[Table, ...]
    last: tuple[Table, ...]

    @property
    def sizes(self) -> Table:
        return _box_sizes(self.low, self.high)


@lru_cache(maxsize=1 << 10)
def _box_table(spec: Spec) -> _BoxTable:
    def both(boxes: Sequence[Box]) -> tuple[Table, Table]:
        table = np.array(boxes, dtype=np.int64).reshape(len(boxes), 2, spec.ndim)
        return table[:, 0], table[:, 0] + table[:, 1]

    once = both(box_owners(spec)[2])
    first, last = (tuple(np.unique(table[:, d]) for d in range(spec.ndim)) for table in once)
    return _BoxTable(*both([spec.box(r) for r in spec.placement.flat]), *once, first, last)


def _box_sizes(low: Table, high: Table) -> Table:
    """Return the number of elements of each box, 0 where it ends before it begins."""
    return np.asarray(np.maximum(high - low, 0).prod(-1, dtype=np.int64))


def _count_overlaps(boxes: _BoxTable, low: Table, high: Table) -> Table:
    """Return how many different boxes of a layout each of these boxes, none empty, overlaps."""
    counts = np.ones(len(low), dtype=np.int64)
    for d, (first, last) in enumerate(zip(boxes.first, boxes.last, strict=True)):
        counts *= np.searchsorted(first, high[:, d], "left") - np.searchsorted(
            last, low[:, d], "right"
        )
    return counts


def _traffic(src: Spec, dst: Spec, node_size: int) -> tuple[int, int, tuple[int, int] | None]:
    """Return (bytes of the busiest rank, most peers of a rank, a pair of ranks on different nodes).

    The figures are those of an exchange without partials. The pair is None if no ranks on different
    nodes exchange anything. Every element is on equally many ranks of a placement, so sums give the
    same figures as pairs of boxes would.
    """
    number, holders, _ = box_owners(src)
    src_boxes, dst_boxes, wanted = _box_table(src), _box_table(dst), dst.placement.flat
    own = np.zeros(len(wanted), dtype=np.int64)  # elements that a rank has already
    both = [(column, number[r]) for column, r in enumerate(wanted) if r in number]
    at, of = (
        np.array(those, dtype=np.int64) for those in (zip(*both, strict=True) if both else ((), ()))
    )
    own[at] = _box_sizes(
        np.maximum(src_boxes.once_low[of], dst_boxes.low[at]),
        np.minimum(src_boxes.once_high[of], dst_boxes.high[at]),
    )
    received, filled = dst_boxes.sizes - own, dst_boxes.sizes > 0
    if not received.any():
        return 0, 0, None
    copies, takers, meets = len(holders[0]), len(box_owners(dst)[1][0]), np.minimum(own, 1)
    sent = _box_sizes(src_boxes.once_low, src_boxes.once_high) * takers - np.bincount(
        of, own[at], len(holders)
    ).astype(np.int64)
    givers = (
        _count_overlaps(src_boxes, dst_boxes.low[filled], dst_boxes.high[filled]) - meets[filled]
    )
    takes = _count_overlaps(
        dst_boxes, src_boxes.once_low, src_boxes.once_high
    ) * takers - np.bincount(of, meets[at], len(holders)).astype(np.int64)
    peers = max(int(givers.max()), -(-int(takes.max()) // copies))
    pair = _far_pair(src, dst, node_size) if node_size else None
    return max(int(received.max()), -(-int(sent.max()) // copies)) * src.dtype.itemsize, peers, pair


def _far_pair(src: Spec, dst: Spec, node_size: int) -> tuple[int, int] | None:
    wanted = dst.placement.flat
    if len({r // node_size for r in (*src.placement.flat, *wanted)}) == 1:
        return None
    src_boxes, dst_boxes = _box_table(src), _box_table(dst)
    for number, (low, high) in enumerate(zip(src_boxes.once_low, src_boxes.once_high, strict=True)):
        for turn in np.flatnonzero(
            (np.maximum(low, dst_boxes.low) < np.minimum(high, dst_boxes.high)).all(-1)
        ).tolist():
            other = source_rank(src, number, wanted[turn], turn)
            if other // node_size != wanted[turn] // node_size:
                return wanted[turn], other
    return None
