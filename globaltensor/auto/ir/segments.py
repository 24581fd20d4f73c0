"""Where a graph of calls may be cut: into segments that hand on a single activation, those that are
alike told apart from those that are not.

What crosses many cuts and is no such activation (tables of positions, masks, an encoder's output,
tied parameters) is a hub: it has one layout for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .op_graph import Calls, Value

__all__ = ["Chain", "Segment", "cut"]

_LEAST, _LONG, _MOST = (
    6,
    40,
    100,
)  # calls of a segment, of a block that is cut itself, of a segment that is cut somewhere
_HUBS = 10


@dataclass(frozen=True)
class Segment:
    """Consecutive calls. ``takes`` and ``gives``: the values (by number) that cross its two ends,
    -1 for none; ``given``: the parameters, buffers and inputs that only it takes; ``hubs``: those
    hubs that it makes or takes. Segments of one ``kind`` differ only in the numbers of calls and
    values."""

    calls: tuple[int, ...]
    takes: int
    gives: int
    given: tuple[int, ...]
    hubs: tuple[int, ...]
    kind: int
    name: str


@dataclass(frozen=True)
class Chain:
    """All calls that take part, in order. ``hubs``: values that cross cuts beside the activations.
    ``first``: number of the first segment of each kind."""

    segments: tuple[Segment, ...]
    hubs: tuple[int, ...]
    first: tuple[int, ...]

    @property
    def kinds(self) -> tuple[int, ...]:
        """Of each segment."""
        return tuple(s.kind for s in self.segments)


def cut(calls: Calls, fixed: Mapping[str, Any] | None = None) -> Chain:
    """The segments of a graph. ``fixed``: layouts asked for, by path, which tell calls apart that
    are alike otherwise."""
    order = [c.number for c in calls.calls if not c.wild]
    where = {number: k for k, number in enumerate(order)}
    lives = _lives(calls, where)
    blocks = _Blocks(calls, order)
    hubs = _hubs(lives, blocks)
    ends = [0, *_cuts(lives, blocks, hubs), len(order)]
    return _chain(
        calls, order, [order[a:b] for a, b in itertools.pairwise(ends)], hubs, fixed or {}
    )


class _Blocks:
    """The positions in the order of calls where another block begins: a numbered module, or within
    a long one the numbered modules of that."""

    def __init__(self, calls: Calls, order: Sequence[int]) -> None:
        outer = [_block(calls.calls[c].module) for c in order]
        inner = [_block(calls.calls[c].module, 2) for c in order]
        long = {name for name in set(outer) if outer.count(name) > _LONG}
        self.size = len(order)
        self.begin = [
            k
            for k in range(1, len(order))
            if outer[k] != outer[k - 1] or (outer[k] in long and inner[k] != inner[k - 1])
        ]
        self.numbered = [
            k for k in self.begin if any(part.isdecimal() for part in outer[k].split("."))
        ]


def _hubs(lives: Mapping[int, tuple[int, int]], blocks: _Blocks) -> set[int]:
    """Values that stand in the way of a cut between blocks and live across several such places;
    those that live longest first."""
    hubs: set[int] = set()

    def crossed(v: int) -> int:
        a, b = lives[v]
        return sum(a < k <= b for k in blocks.numbered)

    for k in blocks.begin:
        there = [v for v, (a, b) in lives.items() if a < k <= b and v not in hubs]
        several = sorted((v for v in there if crossed(v) > 1), key=lambda v: (-crossed(v), v))
        if len(there) > 1 and len(there) - len(several) <= 1:
            hubs.update(several[: len(there) - 1])
    return hubs if len(hubs) <= _HUBS else set()


def _lives(calls: Calls, where: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Value -> positions of its maker and its last taker, of those that a cut between them would
    sever. What is plain is on every rank anyhow."""
    found = {}
    for v in calls.values:
        takers = [where[t] for t in v.takers if t in where]
        if v.maker in where and takers and not v.plain:
            found[v.number] = where[v.maker], max(takers)
    return found


def _cuts(lives: Mapping[int, tuple[int, int]], blocks: _Blocks, hubs: set[int]) -> list[int]:
    """Positions before which to cut: one value crosses there and another block begins, or the
    segment would be too long."""
    crossing = [0] * (blocks.size + 1)
    for v, (a, b) in lives.items():
        if v not in hubs:
            for position in range(a + 1, b + 1):
                crossing[position] += 1
    found, last, spare, begin = [], 0, 0, set(blocks.begin)
    for k in range(1, blocks.size):
        if crossing[k] != 1 or k - last < _LEAST:
            continue
        if k - last > _MOST and spare > last:
            found.append(spare)
            last = spare
        if k in begin and k - last >= _LEAST:
            found.append(k)
            last = k
        spare = k
    return found


def _block(module: str, depth: int = 1) -> str:
    """The path of the numbered block that a module belongs to (``depth`` 2: of the numbered module
    in that), or its own first name."""
    parts, seen = module.split("."), 0
    last = 1
    for k, part in enumerate(parts):
        if part.isdecimal():
            seen, last = seen + 1, k + 1
            if seen == depth:
                break
    return ".".join(parts[:last])


def _chain(
    calls: Calls,
    order: Sequence[int],
    groups: Sequence[Sequence[int]],
    hubs: set[int],
    fixed: Mapping[str, Any],
) -> Chain:
    of = {number: k for k, group in enumerate(groups) for number in group}
    for v in calls.states():
        if len({of[t] for t in v.takers if t in of}) > 1:
            hubs.add(v.number)
    between = []
    for k in range(len(groups) - 1):
        crossing = [
            v.number for v in calls.values
            if v.number not in hubs and v.maker in of and not v.plain and of[v.maker] <= k and any(of.get(t, -1) > k for t in v.takers)  # noqa: E501
        ]  # fmt: skip
        between.append(crossing[0] if crossing else -1)
    kinds: dict[Hashable, int] = {}
    segments, first = [], []
    ordered = tuple(sorted(hubs))
    for k, group in enumerate(groups):
        takes, gives = between[k - 1] if k else -1, between[k] if k < len(between) else -1
        operands = dict.fromkeys(v for c in group for v in calls.calls[c].operands)
        touched = {*operands, *(v for c in group for v in calls.calls[c].outs)}
        given = tuple(v for v in operands if calls.values[v].state and v not in hubs)
        key = _key(calls, group, takes, gives, ordered, fixed)
        if key not in kinds:
            kinds[key] = len(kinds)
            first.append(k)
        name = _block(calls.calls[group[-1]].module)
        segments.append(
            Segment(
                tuple(group),
                takes,
                gives,
                given,
                tuple(h for h in ordered if h in touched),
                kinds[key],
                name,
            )
        )
    return Chain(tuple(segments), ordered, tuple(first))


def _key(
    calls: Calls,
    group: Sequence[int],
    takes: int,
    gives: int,
    hubs: Sequence[int],
    fixed: Mapping[str, Any],
) -> Hashable:
    """What a segment's costs depend on: its calls, how they hang together, and what becomes of
    their results."""
    names: dict[int, Hashable] = {h: ("hub", k) for k, h in enumerate(hubs)}

    def named(v: Value) -> Hashable:
        if v.number not in names:
            names[v.number] = (
                len(names),
                "takes" if v.number == takes else "gives" if v.number == gives else "",
            )
        return names[v.number]

    def about(v: Value) -> Hashable:
        saved = (
            v.saved and v.number != gives
        )  # what a segment hands on is kept by the one that takes it
        return (
            named(v),
            v.shape,
            v.dtype,
            v.grad,
            saved,
            v.state,
            v.plain,
            str(fixed.get(v.path or v.name, "") if v.state else ""),
        )

    rows = []
    for number in group:
        call = calls.calls[number]
        rows.append(
            (
                call.key,
                tuple(about(calls.values[v]) for v in call.operands),
                tuple(about(calls.values[v]) for v in call.outs),
            )
        )
    return tuple(rows), takes < 0, gives < 0, takes == gives
