"""The planner: the cheapest moves from one spec to another. Pure, memoised, and the same on every rank.

A shortest-path search over layouts, first on the source's placement, then on the destination's: partials are reduced in the source, `exchange`
carries the pieces over, and what remains (gather, mask) happens in the destination.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from functools import lru_cache

from ..cluster import Cluster, current_cluster
from ..errors import BoxingError
from ..sbp import Sbp, broadcast
from ..spec import Spec
from .moves import Layout, Move, neighbours, price, settled, show_bytes, split_everywhere

__all__ = ["Plan", "plan"]

_STATES = 4096  # beyond this many layouts the search no longer looks at dims that neither side mentions


class Plan:
    """How a tensor gets from ``src`` to ``dst``: ``moves`` in order. Printing it shows one line for each move."""

    __slots__ = ("bytes", "dst", "moves", "programs", "seconds", "src")

    def __init__(self, src: Spec, dst: Spec, moves: tuple[Move, ...]) -> None:
        self.src, self.dst, self.moves = src, dst, moves
        self.bytes: int = sum(m.bytes for m in moves)
        self.seconds: float = sum(m.seconds for m in moves)
        self.programs: dict[int, object] = {}  # what `execute` compiled, by rank

    @property
    def is_noop(self) -> bool:
        """Whether every local tensor stays as it is."""
        return all(m.kind == "keep" for m in self.moves)

    def __str__(self) -> str:
        return "\n".join(map(str, self.moves)) or "nothing moves"

    def __repr__(self) -> str:
        return f"<plan {self.src!r} -> {self.dst!r}: {', '.join(m.kind for m in self.moves) or 'nothing'}, {show_bytes(self.bytes)}>"


def plan(src: Spec, dst: Spec) -> Plan:
    """The cheapest route under the current cluster. Raises BoxingError where shape or dtype differ, or no route exists.

    >>> from globaltensor.placement import placement
    >>> from globaltensor.sbp import split, broadcast
    >>> import torch
    >>> p = placement("cpu", [0, 1])
    >>> [m.kind for m in plan(Spec.make((4, 4), torch.float32, p, split(0)), Spec.make((4, 4), torch.float32, p, broadcast)).moves]
    ['all_gather']
    """
    return _plan(src, dst, current_cluster())


@lru_cache(maxsize=1 << 14)
def _plan(src: Spec, dst: Spec, cluster: Cluster) -> Plan:
    if src is dst:
        return Plan(src, dst, ())
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise BoxingError(f"boxing keeps shape and dtype, but goes from {src!r} to {dst!r}: convert (to, reshape) before or after it")
    if not src.numel:
        return Plan(src, dst, (Move("slice", src, dst, (), 0, 0.0),))
    return Plan(src, dst, _search(src.plain, dst.plain, cluster))


def _menu(spec: Spec, other: Layout, more: list[Sbp]) -> list[list[Sbp]]:
    """The entries worth trying on each axis of a placement: those of either end, anywhere, and broadcast."""
    splits = [e for e in (*spec.layout, *other) if e.kind == "split"]
    same = len(other) == len(spec.layout)
    return [list(dict.fromkeys((entry, *((other[a],) if same else ()), broadcast, *splits, *more))) for a, entry in enumerate(spec.layout)]


def _menus(src: Spec, dst: Spec) -> dict[bool, list[list[Sbp]]]:
    """The menu of each side, False being the source's. Reducing goes best through a scatter, so dims that nobody mentions may help there."""
    out = {}
    for there, spec, other in ((False, src, dst), (True, dst, src)):
        more = split_everywhere(spec.ndim) if any(e.kind == "partial" for e in spec.layout) or spec.placement is not other.placement else []
        layout = other.layout if other.placement is spec.placement else tuple(e for e in other.layout if e.kind == "split")
        found = _menu(spec, layout, more)
        states = 1
        for m in found:
            states *= len(m)
        out[there] = found if states <= _STATES else _menu(spec, layout, [])
    return out


def _landings(src: Spec, dst: Spec) -> list[Spec]:
    """Layouts of the destination's placement that an exchange may go to: the one asked for, partials as broadcast; and on other placements, pieces
    that are gathered there."""
    core = settled(dst.layout)
    out = [dst.replace(layout=core)]
    if dst.ndim and src.placement is not dst.placement:
        longest = max(range(dst.ndim), key=lambda d: dst.box(dst.placement.flat[0])[1][d])
        scattered = tuple(e if e.kind == "split" else Sbp("split", longest) for e in core)
        out.append(dst.replace(layout=scattered))
    return list(dict.fromkeys(out))


def _steps(here: Spec, src: Spec, dst: Spec, menus: dict[bool, list[list[Sbp]]]) -> Iterator[tuple[str, tuple[int, ...], Spec]]:
    there = here.placement is dst.placement
    for kind, axes, layout in neighbours(here.layout, here.placement.shape, menus[there]):
        yield kind, axes, here.replace(layout=layout)
    if here.placement is src.placement:
        a, b = here.placement, dst.placement
        if a is not b and a.flat == b.flat and a.shape == b.shape:
            yield "copy", (), here.replace(placement=b)
        if not any(e.kind == "partial" for e in here.layout):
            for landing in _landings(src, dst):
                if landing is not here:
                    yield "exchange", (), landing


def _search(src: Spec, dst: Spec, cluster: Cluster) -> tuple[Move, ...]:
    menus, order = _menus(src, dst), itertools.count()
    queue: list[tuple[float, int, int, Spec]] = [(0.0, 0, next(order), src)]
    came: dict[Spec, tuple[float, int, Move | None]] = {src: (0.0, 0, None)}
    done: set[Spec] = set()
    while queue:
        seconds, length, _, here = heapq.heappop(queue)
        if here in done:
            continue
        done.add(here)
        if here is dst:
            return _trace(dst, came)
        for kind, axes, after in _steps(here, src, dst, menus):
            if after in done:
                continue
            nbytes, cost = price(kind, here, after, axes, cluster)
            if kind == "exchange" and not nbytes:
                kind = "slice"  # every rank has what it needs
            found = came.get(after)
            # Ties go to the fewest moves, then to what was found first: the order of search is fixed.
            if found is None or (seconds + cost, length + 1) < found[:2]:
                came[after] = seconds + cost, length + 1, Move(kind, here, after, axes, nbytes, cost)
                heapq.heappush(queue, (seconds + cost, length + 1, next(order), after))
    raise BoxingError(f"no way to box {src!r} on {src.placement} into {dst!r} on {dst.placement}: go through broadcast")


def _trace(dst: Spec, came: dict[Spec, tuple[float, int, Move | None]]) -> tuple[Move, ...]:
    moves: list[Move] = []
    move = came[dst][2]
    while move is not None:
        moves.append(move)
        move = came[move.src][2]
    return tuple(reversed(moves))
