"""Moves: the steps of a boxing, and the legal moves from a layout.

Moves are pure: a move is a description, and `execute` runs it. The planner searches over them.

A move changes the entries of one placement axis, or of several axes flattened into one. Axis 0 is
outermost: later axes split the pieces of earlier ones, and reduce first. So a move may change a
split of dim d only where no later axis splits d too. It may reduce a partial only where no later
axis is partial in another way (a max of sums is no sum of maxima). `exchange` has no such
condition. It moves any split or broadcast layout on any placement to any other: each rank fetches
the boxes that it needs from ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Final

from .._base.byte_size import show_bytes
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, broadcast, split
from ..sharding.spec import Spec

__all__ = [
    "LOCAL",
    "MOVES",
    "Box",
    "Layout",
    "Move",
    "box_owners",
    "gathers",
    "legal_moves",
    "recv_slices",
    "send_slices",
    "show_bytes",
    "show_placement",
    "source_rank",
    "split_everywhere",
    "without_partials",
]

Layout = tuple[Sbp, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and lengths

#: The move from one kind of entry to another. Partial to partial goes through broadcast.
MOVES: Final = {
    ("partial", "broadcast"): "all_reduce",
    ("partial", "split"): "reduce_scatter",
    ("split", "broadcast"): "all_gather",
    ("split", "split"): "all_to_all",
    ("broadcast", "split"): "slice",
    ("broadcast", "partial"): "mask",
    ("split", "partial"): "pad",
}
#: The moves for which no rank needs another one.
LOCAL: Final = frozenset(("slice", "mask", "pad", "keep", "copy"))
_SHOWN_RANKS: Final = 16
_FUSED_AXES: Final = 4  # more partial axes than this are fused all together or not at all


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """One move. ``axes``: placement axes, outermost first; none for exchange and copy.

    ``bytes``: the traffic of the busiest rank; 0: none at all.
    """

    kind: str
    src: Spec
    dst: Spec
    axes: tuple[int, ...]
    bytes: int
    seconds: float

    def __str__(self) -> str:
        """Return the move as a line: ``P->S(0)@axis0  reduce_scatter  16.0 MiB  0.21 ms``."""
        axes = self.axes or range(len(self.src.layout))
        before = ",".join(self.src.layout[a].short for a in axes)
        after = ",".join(self.dst.layout[a].short for a in self.axes or range(len(self.dst.layout)))
        if self.src.placement is not self.dst.placement:
            before, after = (
                f"{text} on {show_placement(s.placement)}"
                for text, s in ((before, self.src), (after, self.dst))
            )
        where = "@" + "+".join(f"axis{a}" for a in self.axes) if self.axes else ""
        return (
            f"{before}->{after}{where}  {self.kind}  {show_bytes(self.bytes)}  "
            f"{self.seconds * 1e3:.3g} ms"
        )


def gathers(src: Layout, dst: Layout) -> tuple[int, ...]:
    """Return the axes along which src -> dst only gathers, () where it does anything else.

    >>> gathers((split(0), split(1)), (broadcast, split(1)))
    (0,)
    """
    axes = []
    for a, (x, y) in enumerate(zip(src, dst, strict=True)):
        if x is not y:
            if not (x.is_split and y.is_broadcast):
                return ()
            axes.append(a)
    # A dim that another axis still splits is not complete afterwards.
    if any(src[a].dim == e.dim for a in axes for b, e in enumerate(dst) if e.is_split and b != a):
        return ()
    return tuple(axes)


def show_placement(placement: Placement) -> str:
    """Return a placement as text: ``cpu[0, 1]``; with many ranks ``cuda[0 ... 511] 64x8``."""
    if placement.size <= _SHOWN_RANKS:
        return f"{placement.type}{placement.ranks.tolist()}"
    return (
        f"{placement.type}[{placement.flat[0]} ... {placement.flat[-1]}] "
        f"{'x'.join(map(str, placement.shape))}"
    )


def _split_may_change(layout: Layout, axes: Sequence[int], dim: int) -> bool:
    """Return True if a split of ``dim`` on these axes may be made or undone.

    No later axis, outside them, may split it.
    """
    return not any(
        e.kind == "split" and e.dim == dim
        for a in range(min(axes) + 1, len(layout))
        if a not in axes
        for e in (layout[a],)
    )


def _is_legal(layout: Layout, axes: Sequence[int], entry: Sbp) -> bool:
    now = layout[axes[0]]
    if now.kind == "split" and not _split_may_change(layout, axes, now.dim):
        return False
    if entry.kind == "split" and not _split_may_change(layout, axes, entry.dim):
        return False
    if now.kind == "partial" and any(
        e.kind == "partial" and e.reduce != now.reduce for e in layout[min(axes) + 1 :]
    ):
        return False
    # A block of zeros is the identity of a sum (and of a norm), not of a max or min.
    return not (now.kind == "split" and entry.kind == "partial" and entry.reduce in ("max", "min"))


def legal_moves(
    layout: Layout, sizes: Sequence[int], menu: Sequence[Sequence[Sbp]]
) -> Iterator[tuple[str, tuple[int, ...], Layout]]:
    """Yield (kind, axes, layout after) of each move from ``layout``.

    ``menu``: the entries of interest for each axis. ``sizes``: the number of ranks of each axis.
    """
    sizes = tuple(sizes)
    for axis in range(len(layout)):
        for entry in menu[axis]:
            found = _single_axis_move(layout, axis, entry, sizes[axis] == 1)
            if found is not None:
                yield found
    for axes in _fusible_axes(layout, sizes):
        now = layout[axes[0]]
        for entry in menu[axes[0]]:
            kind = MOVES.get((now.kind, entry.kind), "") if entry is not now else ""
            if kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
                entries = tuple(_fusible_entry(entry, menu[a]) for a in axes)
                if None not in entries and _is_legal(layout, axes, entry):
                    yield kind, axes, _with_entries(layout, axes, entries)  # type: ignore[arg-type]


@lru_cache(maxsize=1 << 13)
def _single_axis_move(
    layout: Layout, axis: int, entry: Sbp, alone: bool
) -> tuple[str, tuple[int, ...], Layout] | None:
    """Return the move of one axis to an entry, or None. ``alone``: the axis has one rank."""
    now = layout[axis]
    if entry is now:
        return None
    if alone:
        return "keep", (axis,), _with_entries(layout, (axis,), (entry,))
    if (now.kind, entry.kind) in MOVES and _is_legal(layout, (axis,), entry):
        return MOVES[now.kind, entry.kind], (axis,), _with_entries(layout, (axis,), (entry,))
    return None


def _fusible_entry(entry: Sbp, menu: Sequence[Sbp]) -> Sbp | None:
    """Return the entry that a fused move may set on another axis with this menu.

    It is the same entry, or a split of that dim with another unit. Return None where there is
    neither.
    """
    if entry in menu:
        return entry
    return next((e for e in menu if e.kind == entry.kind == "split" and e.dim == entry.dim), None)


@lru_cache(maxsize=1 << 12)
def _fusible_axes(layout: Layout, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return sets of axes of equal layout: partials of one reduction, innermost splits of a dim."""
    out: list[tuple[int, ...]] = []
    wide = [a for a in range(len(layout)) if sizes[a] > 1]
    for reduce in sorted({layout[a].reduce for a in wide if layout[a].kind == "partial"}):
        axes = tuple(a for a in wide if layout[a].reduce == reduce)
        for n in range(2, len(axes) + 1):
            if n == len(axes) or len(axes) <= _FUSED_AXES:
                out += combinations(axes, n)
    for dim in sorted({layout[a].dim for a in wide if layout[a].kind == "split"}):
        chain = tuple(a for a in wide if layout[a].kind == "split" and layout[a].dim == dim)
        out += (chain[i:] for i in range(len(chain) - 1))
    return tuple(out)


def _with_entries(layout: Layout, axes: Sequence[int], entries: Sequence[Sbp]) -> Layout:
    out = list(layout)
    for a, e in zip(axes, entries, strict=True):
        out[a] = e
    return tuple(out)


@lru_cache(maxsize=256)
def box_owners(spec: Spec) -> tuple[dict[int, int], list[list[int]], list[Box]]:
    """Return (rank -> number of its box, box -> ranks that hold it, boxes) of a layout.

    Boxes without elements are left out.
    """
    numbers: dict[Box, int] = {}
    holders: list[list[int]] = []
    ranks: dict[int, int] = {}
    for rank in spec.placement.flat:
        box = spec.box(rank)
        if 0 not in box[1]:
            number = numbers.setdefault(box, len(holders))
            if number == len(holders):
                holders.append([])
            holders[number].append(rank)
            ranks[rank] = number
    return ranks, holders, list(numbers)


def source_rank(src: Spec, number: int, rank: int, turn: int) -> int:
    """Return the rank that sends box ``number`` of ``src`` to ``rank``.

    A rank that has the box uses its own. Otherwise the holders take turns: ``rank`` is the
    ``turn``-th of the receiving ranks.
    """
    own, holders, _ = box_owners(src)
    return (
        rank if own.get(rank) == number else holders[number][(turn + number) % len(holders[number])]
    )


def _overlap(a: Box, b: Box) -> tuple[list[int], list[int]] | None:
    """Return (starts, stops) of the intersection of two boxes, None if they are disjoint."""
    low = [max(x, y) for x, y in zip(a[0], b[0], strict=True)]
    high = [min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True)]
    return (low, high) if all(x < y for x, y in zip(low, high, strict=True)) else None


def recv_slices(
    src: Spec, dst: Spec, rank: int
) -> list[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """Return the pieces that ``rank`` fetches in an exchange.

    Each is (source rank, slices there, slices here). The rank's own piece is first where it has
    one.
    """
    if rank not in dst.placement._coordinates:
        return []
    own_box, turn, out = dst.box(rank), dst.placement.flat.index(rank), []
    for number, src_box in enumerate(box_owners(src)[2]):
        common = _overlap(own_box, src_box)
        if common is not None:
            out.append(
                (
                    source_rank(src, number, rank, turn),
                    _slices(*common, src_box[0]),
                    _slices(*common, own_box[0]),
                )
            )
    return sorted(out, key=lambda piece: piece[0] != rank)


def send_slices(src: Spec, dst: Spec, rank: int) -> list[tuple[int, tuple[slice, ...]]]:
    """Return the pieces that ``rank`` sends in an exchange: (destination rank, slices here)."""
    number, out = box_owners(src)[0].get(rank), []
    if number is None:
        return []
    own_box = src.box(rank)
    for turn, other in enumerate(dst.placement.flat):
        if other != rank and source_rank(src, number, other, turn) == rank:
            common = _overlap(own_box, dst.box(other))
            if common is not None:
                out.append((other, _slices(*common, own_box[0])))
    return out


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def split_everywhere(ndim: int) -> list[Sbp]:
    """Return each split that a tensor of ``ndim`` dims can have."""
    return [split(d) for d in range(ndim)]


def without_partials(layout: Layout) -> Layout:
    """Return the layout with each partial replaced by broadcast."""
    return tuple(broadcast if e.kind == "partial" else e for e in layout)
