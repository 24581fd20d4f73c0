"""The cutting of a graph of calls into segments that pass on a single activation.

Equal segments get the same kind. `inter_op` calls `cut`.

A value that crosses many cuts without being such an activation is a shared value (hub). It has one
layout everywhere. Examples are position tables, masks, an encoder's output and tied parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import PlanError
from .op_graph import NOTHING_TO_SEARCH, Calls, Value

__all__ = ["Chain", "Segment", "cut"]

# _LEAST is the minimum number of calls of a segment. A block of more than _LONG calls is itself
# cut. A segment of more than _MOST calls is cut at any place.
_LEAST, _LONG, _MOST = (
    6,
    40,
    100,
)
_HUBS = 10


@dataclass(frozen=True)
class Segment:
    """A segment of consecutive calls.

    ``takes`` and ``gives`` are the values (by number) that cross its two ends, or -1.
    ``own_states`` are the parameters, buffers and inputs that only this segment uses. ``hubs`` are
    the shared values that it makes or uses. Segments of one ``kind`` differ only in the numbers of
    calls and values.
    """

    calls: tuple[int, ...]
    takes: int
    gives: int
    own_states: tuple[int, ...]
    hubs: tuple[int, ...]
    kind: int
    name: str


@dataclass(frozen=True)
class Chain:
    """The chain of all segments, with every searched call in order.

    ``hubs`` are the values that cross cuts in addition to the activations. ``first`` is the number
    of the first segment of each kind.
    """

    segments: tuple[Segment, ...]
    hubs: tuple[int, ...]
    first: tuple[int, ...]

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each segment."""
        return tuple(s.kind for s in self.segments)


def cut(calls: Calls, fixed: Mapping[str, Any] | None = None) -> Chain:
    """Return the segments of a graph.

    ``fixed`` has layouts set by the user, by path. They distinguish calls that are otherwise equal.
    Raises PlanError for a graph without calls.
    """
    order = [c.number for c in calls.calls if not c.wild]
    if not order:
        raise PlanError(NOTHING_TO_SEARCH)
    where = {number: k for k, number in enumerate(order)}
    lives = _live_ranges(calls, where)
    blocks = _Blocks(calls, order)
    hubs = _hubs(lives, blocks)
    ends = [0, *_cuts(lives, blocks, hubs), len(order)]
    return _chain(
        calls, order, [order[a:b] for a, b in itertools.pairwise(ends)], hubs, fixed or {}
    )


class _Blocks:
    """The positions in the order of calls where a new block begins.

    A block is a numbered module. Within a long block, its own numbered modules are blocks.
    """

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
    """Return the values that prevent a cut between blocks and are live across several such places.

    Values that are live the longest are chosen first.
    """
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


def _live_ranges(calls: Calls, where: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return for each value that a cut would sever the positions of its maker and its last user.

    Plain values are left out, because every rank has all of them.
    """
    live_ranges = {}
    for v in calls.values:
        takers = [where[t] for t in v.takers if t in where]
        if v.maker in where and takers and not v.plain:
            live_ranges[v.number] = where[v.maker], max(takers)
    return live_ranges


def _cuts(lives: Mapping[int, tuple[int, int]], blocks: _Blocks, hubs: set[int]) -> list[int]:
    """Return the positions before which to cut.

    Exactly one value crosses there, and another block begins or the segment would be too long.
    """
    crossing = [0] * (blocks.size + 1)
    for v, (a, b) in lives.items():
        if v not in hubs:
            for position in range(a + 1, b + 1):
                crossing[position] += 1
    cuts, last, spare, begin = [], 0, 0, set(blocks.begin)
    for k in range(1, blocks.size):
        if crossing[k] != 1 or k - last < _LEAST:
            continue
        if k - last > _MOST and spare > last:
            cuts.append(spare)
            last = spare
        if k in begin and k - last >= _LEAST:
            cuts.append(k)
            last = k
        spare = k
    return cuts


def _block(module: str, depth: int = 1) -> str:
    """Return the path of the numbered block that a module belongs to, or its own first name.

    With ``depth`` 2 it is the path of the numbered module inside that block.
    """
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
        own_states = tuple(v for v in operands if calls.values[v].state and v not in hubs)
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
                own_states,
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
    """Return a key of everything that a segment's costs depend on.

    It has the segment's calls, their connections, and the use of their results.
    """
    names: dict[int, Hashable] = {h: ("hub", k) for k, h in enumerate(hubs)}

    def value_id(v: Value) -> Hashable:
        if v.number not in names:
            names[v.number] = (
                len(names),
                "takes" if v.number == takes else "gives" if v.number == gives else "",
            )
        return names[v.number]

    def value_key(v: Value) -> Hashable:
        # The segment that receives the passed value saves it.
        saved = v.saved and v.number != gives
        return (
            value_id(v),
            v.shape,
            v.dtype,
            v.grad,
            saved,
            v.state,
            v.plain,
            str(fixed.get(v.label, "") if v.state else ""),
        )

    rows = []
    for number in group:
        call = calls.calls[number]
        rows.append(
            (
                call.key,
                tuple(value_key(calls.values[v]) for v in call.operands),
                tuple(value_key(calls.values[v]) for v in call.outs),
            )
        )
    return tuple(rows), takes < 0, gives < 0, takes == gives
