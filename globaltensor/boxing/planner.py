"""The planner: the cheapest moves from one spec to another.

It is pure, memoised, and the same on every rank. `box`, rules of ops and graph passes call it.

It is a shortest-path search over layouts, first on the source's placement, then on the
destination's. Partials are reduced in the source, `exchange` moves the pieces over, and the
remaining moves (gather, mask) happen in the destination.
"""

from __future__ import annotations

import heapq
import itertools
from functools import lru_cache
from math import inf

from ..cluster import Cluster, current_cluster
from ..distributed.divergence import digest_of
from ..errors import BoxingError
from ..sharding.sbp import Sbp, broadcast
from ..sharding.spec import Spec
from .move_cost import move_costs
from .moves import Layout, Move, legal_moves, show_bytes, split_everywhere, without_partials

__all__ = ["BoxingPlan", "plan_boxing"]

# Above this many layouts the search ignores dims that neither side mentions.
_STATES = 4096

# (True on the destination's placement, where that is another one; the layout there)
_State = tuple[bool, Layout]
# (from, to, kind, axes, traffic, seconds)
_Hop = tuple[_State, _State, str, tuple[int, ...], int, float]


class BoxingPlan:
    """The plan by which a tensor gets from ``src`` to ``dst``: ``moves`` in order.

    Printing a plan shows one line for each move.
    """

    __slots__ = (
        "bytes",
        "cached_digest",
        "dst",
        "moves",
        "on_meta",
        "places",
        "programs",
        "seconds",
        "src",
    )

    def __init__(self, src: Spec, dst: Spec, moves: tuple[Move, ...]) -> None:
        self.src, self.dst, self.moves = src, dst, moves
        self.bytes: int = sum(m.bytes for m in moves)
        self.seconds: float = sum(m.seconds for m in moves)
        self.places = (
            (src.placement,) if src.placement is dst.placement else (src.placement, dst.placement)
        )
        self.on_meta = src.placement.type == "meta"
        self.cached_digest = b""
        # Programs that `execute` compiled, by rank, and by ~rank where nothing is sent.
        self.programs: dict[int, object] = {}

    @property
    def digest(self) -> bytes:
        """The digest that ranks record and compare."""
        if not self.cached_digest:
            self.cached_digest = digest_of(
                f"box {self.src!r} on {self.src.placement!r} to {self.dst!r} on "
                f"{self.dst.placement!r}"
            )
        return self.cached_digest

    @property
    def is_noop(self) -> bool:
        """True if every local tensor stays as it is."""
        return all(m.kind == "keep" for m in self.moves)

    def __str__(self) -> str:
        return "\n".join(map(str, self.moves)) or "nothing moves"

    def __repr__(self) -> str:
        return (
            f"<plan {self.src!r} -> {self.dst!r}: "
            f"{', '.join(m.kind for m in self.moves) or 'nothing'}, {show_bytes(self.bytes)}>"
        )


def plan_boxing(src: Spec, dst: Spec) -> BoxingPlan:
    """Return the cheapest route under the current cluster.

    Raises BoxingError where shape or dtype differ, or no route exists.

    >>> from globaltensor.sharding.placement import placement
    >>> from globaltensor.sbp import split, broadcast
    >>> import torch
    >>> p = placement("cpu", [0, 1])
    >>> [m.kind for m in plan_boxing(Spec.make((4, 4), torch.float32, p, split(0)), Spec.make((4, 4), torch.float32, p, broadcast)).moves]
    ['all_gather']
    """  # noqa: E501
    return _plan(src, dst, current_cluster())


@lru_cache(maxsize=1 << 14)
def _plan(src: Spec, dst: Spec, cluster: Cluster) -> BoxingPlan:
    if src is dst:
        return BoxingPlan(src, dst, ())
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise BoxingError(
            f"boxing keeps shape and dtype, but goes from {src!r} to {dst!r}: convert (to, "
            f"reshape) before or after it"
        )
    if not src.numel:
        return BoxingPlan(src, dst, (Move("slice", src, dst, (), 0, 0.0),))
    return BoxingPlan(src, dst, _Search(src.plain, dst.plain, cluster).run())


def _menu(spec: Spec, other: Layout, more: list[Sbp]) -> list[list[Sbp]]:
    """Return the entries worth trying on each axis of a placement.

    These are broadcast, and the entries of source and destination on any axis. Partials of another
    axis are included. A small tensor that is split on one axis and partial on the other is padded,
    then reduced over both axes at once.
    """
    same = len(other) == len(spec.layout)
    return [
        list(
            dict.fromkeys(
                (entry, *((other[a],) if same else ()), broadcast, *spec.layout, *other, *more)
            )
        )
        for a, entry in enumerate(spec.layout)
    ]


def _menus(src: Spec, dst: Spec, measured: bool) -> dict[bool, list[list[Sbp]]]:
    """Return the menu of each side, keyed by False for the source and True for the destination.

    Reducing is cheapest through a scatter, so dims that neither side mentions may help there. On
    one placement that is so only where moves were measured. By the formulas an all-reduce takes as
    long as its halves.
    """
    out = {}
    for on_dst, spec, other in ((False, src, dst), (True, dst, src)):
        partial = any(
            e.kind == "partial" for e in (*spec.layout, *(other.layout if measured else ()))
        )
        more = (
            split_everywhere(spec.ndim) if partial or spec.placement is not other.placement else []
        )
        layout = (
            other.layout
            if other.placement is spec.placement
            else tuple(e for e in other.layout if e.kind == "split")
        )
        menu = _menu(spec, layout, more)
        states = 1
        for m in menu:
            states *= len(m)
        out[on_dst] = menu if states <= _STATES else _menu(spec, layout, [])
    return out


def _landings(src: Spec, dst: Spec) -> list[Layout]:
    """Return the layouts of the destination's placement that an exchange may produce.

    These are the destination's layout with partials as broadcast and, on another placement, pieces
    that are gathered there.
    """
    core = without_partials(dst.layout)
    out = [core]
    if dst.ndim and src.placement is not dst.placement:
        longest = max(range(dst.ndim), key=lambda d: dst.box(dst.placement.flat[0])[1][d])
        scattered = tuple(e if e.kind == "split" else Sbp("split", longest) for e in core)
        out.append(dst.replace(layout=scattered).layout)
    return list(dict.fromkeys(out))


class _Search:
    """A run of Dijkstra's algorithm over layouts of the two placements."""

    def __init__(self, src: Spec, dst: Spec, cluster: Cluster) -> None:
        self.src, self.dst = src, dst
        self.src_costs, self.dst_costs = (
            move_costs(tuple(s.shape), s.dtype, s.placement, cluster) for s in (src, dst)
        )
        self.one_place = src.placement is dst.placement
        self.menus, self.landings = _menus(src, dst, bool(cluster.measured)), _landings(src, dst)
        a, b = src.placement, dst.placement
        self.copies = a is not b and a.flat == b.flat and a.shape == b.shape
        self.end = not self.one_place, dst.layout
        self.best = inf, 0  # (seconds, moves) of the best known route

    def run(self) -> tuple[Move, ...]:
        start = False, self.src.layout
        order, end = itertools.count(), self.end
        queue: list[tuple[float, int, int, _State]] = [(0.0, 0, next(order), start)]
        came: dict[_State, tuple[float, int, _Hop | None]] = {start: (0.0, 0, None)}
        done: set[_State] = set()
        while queue:
            seconds, length, _, at = heapq.heappop(queue)
            if at in done:
                continue
            done.add(at)
            if at == end:
                return self._trace(came)
            for hop in self._next_moves(at, seconds, length):
                to, best_known, reached = hop[0], came.get(hop[0]), (seconds + hop[-1], length + 1)
                # Ties go to the fewest moves, then to the route that was found first: the order of
                # the search is fixed.
                if (
                    to not in done
                    and (best_known is None or reached < best_known[:2])
                    and (reached < self.best or to == end)
                ):
                    came[to] = *reached, (at, *hop)
                    heapq.heappush(queue, (*reached, next(order), to))
        src, dst = self.src, self.dst
        raise BoxingError(
            f"no way to box {src!r} on {src.placement} into {dst!r} on {dst.placement}: go "
            f"through broadcast"
        )

    def _next_moves(
        self, at: _State, seconds: float, length: int
    ) -> list[tuple[_State, str, tuple[int, ...], int, float]]:
        """Return the moves from ``at`` that may be part of the cheapest route.

        Each is (next state, kind, axes, traffic, seconds).
        """
        on_dst, layout = at
        prices, end, out = self.dst_costs if on_dst else self.src_costs, self.end, []
        for kind, axes, after in legal_moves(
            layout, prices.placement.shape, self.menus[on_dst or self.one_place]
        ):
            after, nbytes, cost = prices.move(kind, axes, layout, after)
            if seconds + cost <= self.best[0]:
                to = on_dst, after
                out.append((to, kind, axes, nbytes, cost))
                if to == end:
                    self.best = min(self.best, (seconds + cost, length + 1))
        if on_dst:
            return out
        if self.copies:
            out.append(((True, layout), "copy", (), *prices.move("copy", (), layout, layout)[1:]))
        if not any(e.kind == "partial" for e in layout):
            for landing in self.landings:
                to = not self.one_place, landing
                if (
                    to != at
                    and (
                        seconds + prices.exchange_at_least(layout, self.dst_costs, landing),
                        length + 1,
                    )
                    <= self.best
                ):
                    nbytes, cost = prices.exchange(layout, self.dst_costs, landing)
                    # A slice, where every rank has the pieces that it needs.
                    out.append((to, "exchange" if nbytes else "slice", (), nbytes, cost))
        return out

    def _trace(self, came: dict[_State, tuple[float, int, _Hop | None]]) -> tuple[Move, ...]:
        moves: list[Move] = []
        hop = came[self.end][2]
        while hop is not None:
            at, to, kind, axes, nbytes, seconds = hop
            before, after = (
                (self.dst_costs if on_dst else self.src_costs).spec(layout)
                for on_dst, layout in (at, to)
            )
            moves.append(Move(kind, before, after, axes, nbytes, seconds))
            hop = came[at][2]
        return tuple(reversed(moves))
