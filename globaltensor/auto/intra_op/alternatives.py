"""What other ways would cost: each other strategy of one call, or of one thing given, the rest of
the plan as it is.

The tensors beside a call follow it: each takes the layout that suits the new strategy best, as far
as its other takers, which stay, let it. A call and the tensors around it are a star, so that is
exact: the tensors do not touch one another.

Where the traffic of gradients hides behind the backward pass, the cost of a plan is the larger one
of two sums (search.py), and another way may be where the other sum is the larger one. So both
count: what a way costs is the larger sum with it, less the larger sum without. By one of the sums
alone, a way that makes that one smaller and the other larger looked better than a plan that is the
best.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...boxing.moves import Layout, show_bytes
from ..ir.op_graph import Value
from ..plan.plan import LayoutChange, OtherChoice
from ..solver import EXACT
from .formulate import Formulation, hidden
from .layout_changes import Changes, Kind, short

__all__ = ["Responses", "least_larger", "moved"]

Array = np.ndarray[Any, np.dtype[Any]]
Way = tuple[
    float, dict[int, int]
]  # seconds more than the plan, and the strategies of the nodes that change
_LISTED = 3
_NOTHING = 1e-12  # seconds
_MOST = 1 << 14  # pairs of sums that are looked into at a time


class Star(NamedTuple):
    """Costs of a call's strategies, and, of each value beside it, by the call's strategies (rows)
    and its own."""

    own: Array
    leaves: dict[int, Array]

    def least(self) -> tuple[Array, dict[int, Array]]:
        """(cost of each strategy of the call, what each value beside it takes then) where all that
        follows is at its best."""
        best = {leaf: matrix.argmin(1) for leaf, matrix in self.leaves.items()}
        total = self.own.copy()
        for leaf, picks in best.items():
            total += self.leaves[leaf][np.arange(len(picks)), picks]
        return total, best

    def at(self, k: int, picks: Mapping[int, int]) -> float:
        """The cost where the call takes strategy ``k`` and the values beside it ``picks``."""
        return float(self.own[k]) + sum(
            float(matrix[k, picks[leaf]]) for leaf, matrix in self.leaves.items()
        )


class Sums:
    """One of the two sums that a plan's cost is the larger one of, around a choice."""

    def __init__(self, f: Formulation, choice: list[int]) -> None:
        self.f, self.choice = f, choice
        self.values = set(f.node_of_value.values())
        self.beside: dict[
            int, dict[int, Array]
        ] = {}  # node -> neighbour -> table, its own strategies along the rows
        self.marks: dict[
            int, dict[int, tuple[int, ...]]
        ] = {}  # the same for each table: equal marks, equal tables
        for (i, j), table in zip(f.problem.edges, f.problem.tables, strict=True):
            for a, b, t, way in ((i, j, table, 0), (j, i, table.T, 1)):
                there, marks = self.beside.setdefault(a, {}), self.marks.setdefault(a, {})
                there[b] = there[b] + t if b in there else t
                marks[b] = *marks.get(b, ()), id(table), way

    def alone(self, node: int, without: Iterable[int] = ()) -> Array:
        """Cost of each strategy of a node with its edges to all neighbours but ``without``, as
        these have chosen."""
        cost = self.f.problem.costs[node].astype(float)
        for other, table in self.beside.get(node, {}).items():
            if other not in without:
                cost = cost + table[:, self.choice[other]]
        return cost

    def star(self, node: int) -> Star:
        """A call's node with the values beside it."""
        beside = self.beside.get(node, {})
        leaves = {
            leaf: table + self.alone(leaf, (node,))[None, :]
            for leaf, table in beside.items()
            if leaf in self.values
        }
        return Star(self.alone(node, leaves), leaves)


class _Place(NamedTuple):
    """Where other ways are looked at: the nodes that may change, the values whose changes of layout
    do, and the calls that run otherwise."""

    nodes: list[int]
    values: list[int]
    calls: tuple[int, ...]


class _Told(NamedTuple):
    """An `OtherChoice` without names. ``changed``: (place among the nodes, strategy); ``kind``: the
    change of layout that makes the difference, if one does, of the value at that place."""

    takes: tuple[tuple[str, ...], ...]
    gives: tuple[tuple[str, ...], ...]
    extra: float
    changed: list[tuple[int, int]]
    because: str
    kind: Kind | None
    value: int


class Responses:
    """Other ways around one choice. ``cost``: of the plan. ``behind``: seconds by which the sum
    that is not ``f``'s is less than that."""

    def __init__(
        self, f: Formulation, choice: Sequence[int], changes: Changes, cost: float, behind: float
    ) -> None:
        self.f, self.choice, self.changes, self.behind = f, list(choice), changes, behind
        self.sums = Sums(f, self.choice)
        self.hides = hidden(f.prices.cluster, f.options) if f.calls.training else 0.0
        self.nothing = max(
            _NOTHING, EXACT * cost
        )  # so little is within what is known of the plan's own cost
        self.value_at = {node: f.calls.values[v] for v, node in f.node_of_value.items()}
        self._known: dict[Hashable, list[_Told]] = {}
        self.level, self.start = self._levels()
        self.peak = float(self.level.max()) if len(self.level) else 0.0

    @cached_property
    def other(self) -> Sums:
        """The sum that is not ``f``'s. Mostly it is so far behind that nobody asks for it."""
        return Sums(self.f.turned(), self.choice)

    def of_call(self, number: int) -> tuple[OtherChoice, ...]:
        """Other ways to run a call, the cheapest first, of each way its results may lie no more
        than one."""
        f, call, node = self.f, self.f.calls.calls[number], self.f.node_of_call[number]
        found = f.candidates[number]
        place = _Place(
            [node, *self.sums.beside.get(node, ())],
            list(dict.fromkeys((*call.operands, *call.outs))),
            (number,),
        )

        def make() -> Iterator[_Told]:
            around = _Around(self, node)
            seen = {tuple(out[self.choice[node]] for out in found.outs)}
            for k, (extra, changed) in _cheapest(around.lower, around.way):
                outs = tuple(out[k] for out in found.outs)
                if outs not in seen:
                    seen.add(outs)
                    yield self._told(tuple(x[k] for x in found.ins), outs, extra, changed, place)

        return self._others(
            (
                "call",
                id(found),
                tuple(map(place.values.index, (*call.operands, *call.outs))),
                self._star_of(node),
            ),
            make,
            place,
        )

    def of_value(self, value: Value) -> tuple[OtherChoice, ...]:
        """Other ways for something given to lie, the cheapest first. Where one call takes it, that
        call follows."""
        f, node = self.f, self.f.node_of_value[value.number]
        takers = list(self.sums.beside.get(node, ()))
        pairs, call = f.layouts[node], f.calls.calls[value.takers[0]]
        follows = len(takers) == 1 and f.node_of_call.get(call.number) == takers[0]
        if follows:
            place = _Place(
                [takers[0], *self.sums.beside[takers[0]]],
                list(dict.fromkeys((*call.operands, *call.outs))),
                (call.number,),
            )
            key: Hashable = (
                "led",
                id(f.candidates[call.number]),
                place.nodes.index(node),
                self._star_of(takers[0]),
            )
        else:
            place = _Place([node], [value.number], ())
            key = "alone", self._leaf(node, -1)

        def make() -> Iterator[_Told]:
            lower, way = _Around(self, takers[0]).led_by(node) if follows else self._by_itself(node)
            seen = {pairs[self.choice[node]][0]}
            for s, (extra, changed) in _cheapest(lower, way):
                if pairs[s][0] not in seen:
                    seen.add(pairs[s][0])
                    yield self._told((), (pairs[s][0],), extra, changed, place)

        return self._others(key, make, place)

    # Calls that are alike

    def _star_of(self, node: int) -> Hashable:
        """Equal for calls around which all costs and choices are."""
        costs, marks = self.f.problem.costs, self.sums.marks.get(node, {})
        beside = [self._leaf(b, node) if b in self.value_at else self.choice[b] for b in marks]
        return id(costs[node]), self.choice[node], tuple(marks.values()), tuple(beside)

    def _leaf(self, node: int, without: int) -> Hashable:
        """The same of a value, but for the call that it is looked at from."""
        marks = self.sums.marks.get(node, {})
        others = tuple((mark, self.choice[b]) for b, mark in marks.items() if b != without)
        return (
            id(self.f.problem.costs[node]),
            id(self.f.layouts[node]),
            self.choice[node],
            self.changes.situation(self.value_at[node]),
            others,
        )

    def _others(
        self, key: Hashable, make: Callable[[], Iterator[_Told]], place: _Place
    ) -> tuple[OtherChoice, ...]:
        """The first few of what ``make`` tells, with the names of this place. Of places that are
        alike (``key``) the first is asked."""
        key = key, tuple(self.changes.situation(self.f.calls.values[v]) for v in place.values)
        if key not in self._known:
            self._known[key] = list(itertools.islice(make(), _LISTED))
        return tuple(self._named(told, place) for told in self._known[key])

    def _named(self, told: _Told, place: _Place) -> OtherChoice:
        because = told.because
        if told.kind is not None:
            because = moved(
                self.changes.named(told.kind, self.f.calls.values[place.values[told.value]])
            )
        grown = self._growth({place.nodes[i]: k for i, k in told.changed})
        return OtherChoice(told.takes, told.gives, told.extra, grown, because)

    # Costs

    def _by_itself(self, node: int) -> tuple[Array, Callable[[int], Way]]:
        """Of a node that changes alone: what its strategies cost more at least, and each in
        full."""
        cost, k = self.sums.alone(node), self.choice[node]

        def way(s: int) -> Way:
            extra = float(cost[s] - cost[k])
            if not self.stays_behind(float(cost[k]), float(cost[s])):
                other = self.other.alone(node)
                extra = max(extra, float(other[s] - other[k]) - self.behind)
            return extra, {node: s}

        return cost - cost[k], way

    def stays_behind(self, before: float, after: float) -> bool:
        """Return True if the sum that is not ``f``'s surely stays less than ``f``'s where ``after``
        takes the place of ``before`` in this.

        The sums weigh the traffic of gradients and the backward pass by 1 in the one and by 1 -
        ``hides`` in the other. So of what is new they differ by at most hides / (1 - hides) times
        its cost, and of what goes by at most hides times that.
        """
        return self.behind >= self.hides * (after / (1.0 - self.hides) + before)

    # Memory

    def _levels(self) -> tuple[Array, int]:
        """Bytes at each moment, and the first moment."""
        spans = [
            (u.start, u.end)
            for uses in self.f.problem.usages
            for u in uses
            if u.start is not None and u.end is not None
        ]
        first, last = min((a for a, _ in spans), default=0), max((b for _, b in spans), default=1)
        level = np.zeros(last - first + 1)
        for node, k in enumerate(self.choice):
            self._add(level, first, node, k, 1.0)
        return level[:-1].cumsum() if len(level) > 1 else level, first

    def _add(self, steps: Array, first: int, node: int, k: int, sign: float) -> None:
        for start, end, amounts in self.f.problem.usages[node]:
            steps[0 if start is None else start - first] += sign * amounts[k]
            steps[-1 if end is None else end - first] -= sign * amounts[k]

    def _growth(self, changed: dict[int, int]) -> int:
        """Bytes that the peak grows."""
        steps = np.zeros(len(self.level) + 1)
        for node, k in changed.items():
            if k != self.choice[node]:
                self._add(steps, self.start, node, k, 1.0)
                self._add(steps, self.start, node, self.choice[node], -1.0)
        return round(float((self.level + steps[:-1].cumsum()).max()) - self.peak)

    # Words

    def _told(
        self,
        takes: tuple[Layout, ...],
        gives: tuple[Layout, ...],
        extra: float,
        changed: dict[int, int],
        place: _Place,
    ) -> _Told:
        values = [self.f.calls.values[v] for v in place.values]
        now = [self.changes.kinds(value, self.choice) for value in values]
        kept = {node: self.choice[node] for node in changed}
        for node, k in changed.items():
            self.choice[node] = k
        after = [self.changes.kinds(value, self.choice) for value in values]
        parts = [part for number in place.calls for part in self._computing(number, kept)]
        for node, k in kept.items():
            self.choice[node] = k
        more, what = max(parts, key=lambda part: part[0], default=(0.0, ""))
        moving = [
            (*_moving(a, b), i)
            for i, (a, b) in enumerate(zip(now, after, strict=True))
            if a is not b
        ]
        grown, kind, value = max(moving, key=lambda part: part[0], default=(0.0, None, -1))
        if grown > more and kind is not None:
            more, what = grown, ""
        else:
            kind = None
        if more <= max(_NOTHING, 0.05 * abs(extra)):
            kind, what = None, ""
        extra = extra if abs(extra) > self.nothing else 0.0
        return _Told(
            tuple(map(short, takes)),
            tuple(map(short, gives)),
            extra,
            [(place.nodes.index(n), k) for n, k in changed.items()],
            what,
            kind,
            value,
        )

    def _computing(self, number: int, kept: dict[int, int]) -> list[tuple[float, str]]:
        """What the call itself adds under the present choice, against the one it had."""
        found, node = self.f.candidates[number], self.f.node_of_call[number]
        new, old = self.choice[node], kept.get(node, self.choice[node])
        weight = self.f.options.computation
        computing = weight * float(
            found.forward[new] + found.backward[new] - found.forward[old] - found.backward[old]
        )
        moving = float(found.moving[new] - found.moving[old])
        parts, before = _part(found.share[new]), _part(found.share[old])
        slower = (
            f"each rank computes {parts} of it, not {before}"
            if parts != before
            else "its kernels take longer"
        )
        return [(computing, slower), (moving, "what the call itself communicates")]


class _Around:
    """A call that takes another strategy, and the values beside it, which follow. ``lower``: what
    each strategy costs more at least."""

    def __init__(self, responses: Responses, node: int) -> None:
        self.responses, self.node = responses, node
        self.picks = {
            leaf: responses.choice[leaf]
            for leaf in responses.sums.beside.get(node, {})
            if leaf in responses.value_at
        }
        self.star = responses.sums.star(node)
        self.total, self.best = self.star.least()
        self.now = self.star.at(responses.choice[node], self.picks)
        self.lower = self.total - self.now
        # Where no strategy can bring the other sum to the fore, it is not looked at.
        self.both = not responses.stays_behind(self.now, float(self.total.min()))
        if self.both:
            self.lower = np.maximum(self.lower, self.other.least()[0] - self.ahead)

    @cached_property
    def other(self) -> Star:
        return self.responses.other.star(self.node)

    @cached_property
    def ahead(self) -> float:
        """Return what the star costs in the other sum, and what that is behind: where it costs as
        much, both sums are as large as the plan's cost."""
        return self.other.at(self.responses.choice[self.node], self.picks) + self.responses.behind

    def way(self, k: int, held: Mapping[int, int] | None = None) -> Way:
        """Strategy ``k`` of the call, in full. ``held``: strategies of values that do not
        follow."""
        held = held or {}
        picks = {leaf: held.get(leaf, int(best[k])) for leaf, best in self.best.items()}
        cost = self.star.at(k, picks)
        extra = cost - self.now
        if (
            not self.responses.stays_behind(self.now, cost)
            and self.other.at(k, picks) - self.ahead > extra
        ):
            rows = {
                leaf: (matrix[k], self.other.leaves[leaf][k])
                for leaf, matrix in self.star.leaves.items()
            }
            rows = {
                leaf: (x[held[leaf], None], y[held[leaf], None]) if leaf in held else (x, y)
                for leaf, (x, y) in rows.items()
            }
            extra, chosen = least_larger(
                float(self.star.own[k]) - self.now,
                float(self.other.own[k]) - self.ahead,
                list(rows.values()),
            )
            picks = dict(zip(rows, chosen, strict=True)) | dict(held)
        changed = {self.node: k, **picks}
        return extra, {node: s for node, s in changed.items() if s != self.responses.choice[node]}

    def led_by(self, leaf: int) -> tuple[Array, Callable[[int], Way]]:
        """Of a value beside the call, which the call follows: what its strategies cost more at
        least, and each in full."""

        def least(star: Star) -> Array:
            total, best = star.least()
            matrix = star.leaves[leaf]
            return (total - matrix[np.arange(len(total)), best[leaf]])[:, None] + matrix

        lower = least(self.star) - self.now
        if self.both:
            lower = np.maximum(lower, least(self.other) - self.ahead)
        return lower.min(0), lambda s: next(
            _cheapest(lower[:, s], lambda k: self.way(k, {leaf: s}))
        )[1]


def _cheapest(lower: Array, way: Callable[[int], Way]) -> Iterator[tuple[int, Way]]:
    """Strategies and what they cost more, the cheapest first. Only those are asked for in full
    (``way``) that by what they cost at least may be next."""
    order = [k for k in np.argsort(lower, kind="stable").tolist() if np.isfinite(lower[k])]
    waiting: list[tuple[float, int, dict[int, int]]] = []
    for place, k in enumerate(order):
        extra, changed = way(k)
        heapq.heappush(waiting, (extra, k, changed))
        following = lower[order[place + 1]] if place + 1 < len(order) else np.inf
        while waiting and waiting[0][0] < following:
            extra, k, changed = heapq.heappop(waiting)
            yield k, (extra, changed)


def least_larger(
    first: float, second: float, rows: Sequence[tuple[Array, Array]]
) -> tuple[float, list[int]]:
    """The least larger one of two sums, which begin with these numbers and have an entry of each
    row, of the same place in both; and the places.

    What is larger than others in both sums is left out row by row. Of more than some thousand pairs
    of sums that are left evenly many are.

    >>> least_larger(0.0, 1.0, [(np.array([0.0, 3.0]), np.array([4.0, 0.0])), (np.array([1.0, 2.0]), np.array([1.0, 0.0]))])
    (4.0, [1, 0])
    """  # noqa: E501
    a, b = np.array([first]), np.array([second])
    steps = []
    for x, y in rows:
        kept = _front(x, y)
        firsts, seconds = (a[:, None] + x[kept]).ravel(), (b[:, None] + y[kept]).ravel()
        at = _front(firsts, seconds)
        if len(at) > _MOST:
            at = at[np.linspace(0, len(at) - 1, _MOST).astype(int)]
        steps.append((at // len(kept), kept[at % len(kept)]))
        a, b = firsts[at], seconds[at]
    best = place = int(np.maximum(a, b).argmin())
    picks = []
    for before, entry in reversed(steps):
        picks.append(int(entry[place]))
        place = int(before[place])
    return float(max(a[best], b[best])), picks[::-1]


def _front(a: Array, b: Array) -> Array:
    """The places of pairs of which no other is less in both, by the first."""
    order = np.lexsort((b, a))
    order = order[np.isfinite(a[order])]
    least = np.minimum.accumulate(b[order])
    return order[np.append(True, least[1:] < least[:-1])]


def _moving(before: Sequence[Kind], after: Sequence[Kind]) -> tuple[float, Kind | None]:
    """(seconds more, the dearest of the new ones) of a value's changes of layout."""
    known = {(k.change.src, k.change.dst) for k in before}
    new = [k for k in after if (k.change.src, k.change.dst) not in known]
    more = sum(k.seconds for k in after) - sum(k.seconds for k in before)
    return (more, max(new, key=lambda k: k.seconds)) if new else (0.0, None)


def moved(change: LayoutChange) -> str:
    """What a change of layout moves, in words.

    >>> moved(LayoutChange("x", "matmul", ("S(0)",), ("B",), 1e-3, 2e-3, 1 << 24, "all_gather", "reduce_scatter"))
    'all_gather of x, reduce_scatter of its gradient (16.0 MiB, S(0) -> B)'
    """  # noqa: E501
    there, back = change.forward and change.there, change.backward and change.back
    if there == back:
        what = f"{there} of {change.value} and of its gradient" if there else change.value
    elif there and back:
        what = f"{there} of {change.value}, {back} of its gradient"
    else:
        what = (
            f"{there} of {change.value}" if there else f"{back} of the gradient of {change.value}"
        )
    how = (
        f"{' '.join(change.src)} -> {' '.join(change.dst)}"
        if change.src != change.dst
        else " ".join(change.src)
    )
    return f"{what} ({show_bytes(change.bytes)}, {how})"


def _part(share: float) -> str:
    return "all" if share >= 1 else f"1/{1 / share:.3g}"
