"""What the moves of one tensor cost, remembered: a search asks for the same ones over and over. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ..cluster import Cluster
from ..placement import Placement
from ..spec import Spec
from .moves import LOCAL, Layout, giver, holders_of

__all__ = ["RELAID", "Prices", "prices_of"]

_MOST_TENSORS: Final = 256
#: What handles pieces along a dim: they may have to be laid in another order, which counts where copies were measured.
RELAID: Final = frozenset(("all_gather", "reduce_scatter", "all_to_all", "slice"))

Price = tuple[int, float]  # (traffic in bytes of the busiest rank, seconds)


class Prices:
    """Of tensors of one shape and dtype on one placement, whatever their layout."""

    __slots__ = ("_bytes", "_costs", "_fibers", "_landings", "cluster", "dtype", "placement", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement, cluster: Cluster) -> None:
        self.shape, self.dtype, self.placement, self.cluster = shape, dtype, placement, cluster
        self._bytes: dict[Layout, int] = {}
        self._costs: dict[tuple[tuple[int, ...], Layout, Layout], tuple[Layout, int, float]] = {}
        self._fibers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._landings: dict[tuple[Layout, int], float] = {}

    def spec(self, layout: Layout) -> Spec:
        """The tensor in this layout."""
        return Spec.make(self.shape, self.dtype, self.placement, layout)

    def nbytes(self, layout: Layout) -> int:
        """Bytes of the largest local tensor."""
        found = self._bytes.get(layout)
        if found is None:
            found = self._bytes[layout] = self.dtype.itemsize * self.spec(layout).local_numel()
        return found

    def move(self, kind: str, axes: tuple[int, ...], before: Layout, after: Layout) -> tuple[Layout, int, float]:
        """(where it leads: ``after`` without units that change nothing, traffic, seconds) of a move on axes of the placement."""
        key = axes, before, after
        found = self._costs.get(key)
        if found is None:
            to = after if all(e.unit == 1 for e in after) else self.spec(after).layout
            nbytes, seconds = self.price(kind, axes, self.nbytes(before), self.nbytes(to))
            if kind in RELAID and self.cluster.measured:
                seconds = self._relaid(kind, axes, before, to, seconds)
            found = self._costs[key] = to, nbytes, seconds
        return found

    def _relaid(self, kind: str, axes: tuple[int, ...], before: Layout, after: Layout, seconds: float) -> float:
        """With the copies that pieces along any dim but the first need, before they are sent and after they have come; a slice along the first needs none."""
        sent, came = ((layout[axes[0]], self.nbytes(other)) for layout, other in ((after, before), (before, after)))
        for entry, nbytes in (sent, came):
            more = self.cluster.relaid(nbytes) if entry.kind == "split" else None
            if more is not None and kind != "slice":
                seconds += 0.0 if _first(entry.dim, self.spec(before)) else more
            elif more is not None and _first(entry.dim, self.spec(before)):
                seconds = self.cluster.memory_latency
        return seconds

    def price(self, kind: str, axes: tuple[int, ...], before: int, after: int) -> Price:
        """Of a move between local tensors of so many bytes, whatever their shape; without what relaying them costs."""
        if kind == "keep":
            return 0, 0.0
        if kind in LOCAL:
            # A slice is a view; what it costs is the strided reading later.
            return 0, self.cluster.seconds(kind, after if kind == "slice" else before + after, 1)
        ranks = self._fibers.get(axes)
        if ranks is None:
            ranks = self._fibers[axes] = self.placement.fiber(self.placement.flat[0], axes)
        nbytes = after if kind == "all_gather" else before
        sent = (2 if kind == "all_reduce" else 1) * (nbytes - nbytes // len(ranks))
        return sent, self.cluster.seconds(kind, nbytes, ranks) + self.cluster.skew

    def exchange_at_least(self, before: Layout, there: Prices, after: Layout) -> float:
        """Seconds that an exchange into a layout of ``there`` takes at least, known without looking at who holds what."""
        arriving = there.nbytes(after)
        missing = max(0, arriving - self.nbytes(before))
        found = there._landings.get((after, missing))
        if found is None:
            cluster = self.cluster
            sent = cluster.seconds("exchange", missing or 1, 2)
            # Where every rank has what it needs, nothing is sent.
            found = sent if missing else min(sent, cluster.memory_latency)
            if not cluster.measured:
                found += cluster.seconds("copy", 2 * arriving, 1)
            there._landings[after, missing] = found
        return found

    def exchange(self, before: Layout, there: Prices, after: Layout) -> Price:
        """Of an exchange into a layout of ``there``, neither side with partials."""
        return _exchange(self.spec(before), there.spec(after), self.cluster)


@lru_cache(maxsize=_MOST_TENSORS)
def prices_of(shape: tuple[int, ...], dtype: torch.dtype, placement: Placement, cluster: Cluster) -> Prices:
    """The same object for equal arguments, as long as it is used now and then."""
    return Prices(shape, dtype, placement, cluster)


@lru_cache(maxsize=1 << 13)
def _exchange(src: Spec, dst: Spec, cluster: Cluster) -> Price:
    nbytes, peers, pair = _traffic(src, dst, cluster.node_size)
    copied = _copied(src, dst, nbytes, cluster)
    if not nbytes:
        return 0, cluster.memory_latency + copied
    # One of the peers on another node is enough for the slower links.
    return nbytes, cluster.seconds("exchange", nbytes, peers + 1 if pair is None else (pair[0], *(pair[1],) * peers)) + copied + cluster.skew


def _copied(src: Spec, dst: Spec, nbytes: int, cluster: Cluster) -> float:
    """Seconds for the copies of an exchange of ``nbytes``: of all of the result by the formulas. What was measured has new memory for what arrives, so there
    it is what more memory costs, and what isn't straight on either side."""
    whole = cluster.seconds("copy", 2 * src.dtype.itemsize * dst.local_numel(), 1)
    if not cluster.measured:
        return whole
    arrived = cluster.seconds("copy", 2 * nbytes, 1)
    arriving, leaving = (any(e.kind == "split" and not _first(e.dim, at) for e in other.layout) for other, at in ((src, dst), (dst, src)))
    return (whole if arriving else max(0.0, whole - arrived)) + (arrived if leaving else 0.0)


def _first(dim: int, spec: Spec) -> bool:
    """Whether pieces along ``dim`` lie one after the other in memory."""
    return all(n == 1 for n in spec.local_shape(spec.placement.flat[0])[:dim])


Corners = tuple[NDArray[np.int64], NDArray[np.int64]]


@lru_cache(maxsize=1 << 10)
def _corners(spec: Spec) -> tuple[Corners, Corners]:
    """(first elements, behind the last ones) of the different boxes of a layout, then of each rank's, one row for each."""

    def both(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Corners:
        table = np.array(boxes, dtype=np.int64).reshape(len(boxes), 2, spec.ndim)
        return table[:, 0], table[:, 0] + table[:, 1]

    return both(holders_of(spec)[2]), both([spec.box(r) for r in spec.placement.flat])


def _traffic(src: Spec, dst: Spec, node_size: int) -> tuple[int, int, tuple[int, int] | None]:
    """(bytes of the busiest rank, most peers of a rank, two ranks of different nodes that meet, if any do) of an exchange without partials."""
    ranks, holders, _ = holders_of(src)
    (low, high), (low_there, high_there) = _corners(src)[0], _corners(dst)[1]
    wanted = dst.placement.flat
    lengths = np.minimum(high[:, None], high_there[None]) - np.maximum(low[:, None], low_there[None])
    overlap = np.maximum(lengths, 0).prod(-1)
    for column, r in enumerate(wanted):
        if r in ranks:
            overlap[ranks[r], column] = 0  # what a rank has it need not fetch
    meeting = overlap > 0
    if not meeting.any():
        return 0, 0, None
    counts = np.array([len(h) for h in holders])
    received, sent = overlap.sum(0).max(), -(-overlap.sum(1) // counts)
    peers = max(int(meeting.sum(0).max()), int((-(-meeting.sum(1) // counts)).max()))
    pair = _far_pair(src, wanted, meeting, node_size) if node_size else None
    return int(max(received, sent.max())) * src.dtype.itemsize, peers, pair


def _far_pair(src: Spec, wanted: tuple[int, ...], meeting: NDArray[np.bool_], node_size: int) -> tuple[int, int] | None:
    if len({r // node_size for r in (*src.placement.flat, *wanted)}) == 1:
        return None
    for number, turn in zip(*np.nonzero(meeting), strict=True):
        taker = wanted[turn]
        other = giver(src, int(number), taker, int(turn))
        if other // node_size != taker // node_size:
            return taker, other
    return None
