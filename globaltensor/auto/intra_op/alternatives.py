"""The costs of alternatives: other strategies of one call or given tensor, the plan unchanged.

The neighbouring tensors of a call follow it. Each takes the layout that suits the new strategy
best, as far as its other calls, which do not change, allow. A call and the tensors around it form a
star, so this is exact: the tensors have no edges among themselves. `read_solution.py` calls it.

Where gradient traffic hides behind the backward pass, the cost of a plan is the larger of two sums
(search.py). An alternative may make the other sum the larger one, so both sums count. The extra
cost of an alternative is the larger sum with it minus the larger sum without it. By one of the sums
alone, an alternative that lowers that sum and raises the other would look better than an optimal
plan.
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
from .layout_changes import ChangeClass, Changes, short

__all__ = ["Responses", "least_larger", "moved"]

Array = np.ndarray[Any, np.dtype[Any]]
# Extra seconds compared with the plan, and the strategies of the nodes that change.
Way = tuple[float, dict[int, int]]
_MAX_LISTED = 3
_NEGLIGIBLE_SECONDS = 1e-12  # seconds
_MAX_PAIRS = 1 << 14  # the maximum number of pairs of sums that are compared at a time


class Star(NamedTuple):
    """The costs of a call's strategies and of its neighbouring values.

    `own` are the costs of the call's strategies. `leaves` has a table for each neighbouring value:
    the call's strategies (rows) by the value's own.
    """

    own: Array
    leaves: dict[int, Array]

    def least(self) -> tuple[Array, dict[int, Array]]:
        """Return the minimum cost with each strategy of the call, and the neighbours' picks."""
        best = {leaf: matrix.argmin(1) for leaf, matrix in self.leaves.items()}
        total = self.own.copy()
        for leaf, picks in best.items():
            total += self.leaves[leaf][np.arange(len(picks)), picks]
        return total, best

    def at(self, k: int, picks: Mapping[int, int]) -> float:
        """Return the cost where the call has strategy ``k`` and the neighbours have ``picks``."""
        return float(self.own[k]) + sum(
            float(matrix[k, picks[leaf]]) for leaf, matrix in self.leaves.items()
        )


class Sums:
    """One of the two sums whose maximum is a plan's cost, around a choice."""

    def __init__(self, f: Formulation, choice: list[int]) -> None:
        self.f, self.choice = f, choice
        self.values = set(f.node_of_value.values())
        # node -> neighbour -> table, with the node's own strategies as rows
        self.beside: dict[int, dict[int, Array]] = {}
        # node -> neighbour -> marks of its tables: equal marks mean equal tables
        self.marks: dict[int, dict[int, tuple[int, ...]]] = {}
        for (i, j), table in zip(f.problem.edges, f.problem.tables, strict=True):
            for a, b, t, way in ((i, j, table, 0), (j, i, table.T, 1)):
                there, marks = self.beside.setdefault(a, {}), self.marks.setdefault(a, {})
                there[b] = there[b] + t if b in there else t
                marks[b] = *marks.get(b, ()), id(table), way

    def alone(self, node: int, without: Iterable[int] = ()) -> Array:
        """Return the cost of each strategy of a node, edges included.

        Neighbours keep their current strategies. Edges to the neighbours ``without`` are left out.
        """
        cost = self.f.problem.costs[node].astype(float)
        for other, table in self.beside.get(node, {}).items():
            if other not in without:
                cost = cost + table[:, self.choice[other]]
        return cost

    def star(self, node: int) -> Star:
        """Return the star of a call's node and its neighbouring values."""
        beside = self.beside.get(node, {})
        leaves = {
            leaf: table + self.alone(leaf, (node,))[None, :]
            for leaf, table in beside.items()
            if leaf in self.values
        }
        return Star(self.alone(node, leaves), leaves)


class _Neighborhood(NamedTuple):
    """A place in the plan where alternatives are priced.

    It has the nodes that may change, the values whose changes of layout may change, and the calls
    that run differently.
    """

    nodes: list[int]
    values: list[int]
    calls: tuple[int, ...]


class _UnnamedChoice(NamedTuple):
    """An `OtherChoice` without names.

    ``changed`` is a list of (index among the place's nodes, strategy). ``kind`` is the change of
    layout that causes the difference, if one does; ``value`` is the index of its value.
    """

    takes: tuple[tuple[str, ...], ...]
    gives: tuple[tuple[str, ...], ...]
    extra: float
    changed: list[tuple[int, int]]
    because: str
    kind: ChangeClass | None
    value: int


class Responses:
    """The alternatives around one choice.

    ``cost`` is the plan's cost. ``behind`` is the seconds by which the other formulation's sum is
    smaller than ``f``'s.
    """

    def __init__(
        self, f: Formulation, choice: Sequence[int], changes: Changes, cost: float, behind: float
    ) -> None:
        self.f, self.choice, self.changes, self.behind = f, list(choice), changes, behind
        self.sums = Sums(f, self.choice)
        self.hides = hidden(f.prices.cluster, f.options) if f.calls.training else 0.0
        # Differences this small are within the uncertainty of the plan's own cost.
        self.nothing = max(_NEGLIGIBLE_SECONDS, EXACT * cost)
        self.value_at = {node: f.calls.values[v] for v, node in f.node_of_value.items()}
        self._known: dict[Hashable, list[_UnnamedChoice]] = {}
        self.level, self.start = self._levels()
        self.peak = float(self.level.max()) if len(self.level) else 0.0

    @cached_property
    def other(self) -> Sums:
        """The other sum, computed lazily: mostly it is so far behind that it is not needed."""
        return Sums(self.f.turned(), self.choice)

    def of_call(self, number: int) -> tuple[OtherChoice, ...]:
        """Return the cheapest alternatives for a call, at most one per layout of its results."""
        f, call, node = self.f, self.f.calls.calls[number], self.f.node_of_call[number]
        strategies = f.candidates[number]
        place = _Neighborhood(
            [node, *self.sums.beside.get(node, ())],
            list(dict.fromkeys((*call.operands, *call.outs))),
            (number,),
        )

        def make() -> Iterator[_UnnamedChoice]:
            around = _ChangedCall(self, node)
            seen = {tuple(out[self.choice[node]] for out in strategies.outs)}
            for k, (extra, changed) in _cheapest(around.lower, around.exact_alternative):
                outs = tuple(out[k] for out in strategies.outs)
                if outs not in seen:
                    seen.add(outs)
                    yield self._explain_choice(
                        tuple(x[k] for x in strategies.ins), outs, extra, changed, place
                    )

        return self._named_alternatives(
            (
                "call",
                id(strategies),
                tuple(map(place.values.index, (*call.operands, *call.outs))),
                self._call_key(node),
            ),
            make,
            place,
        )

    def of_value(self, value: Value) -> tuple[OtherChoice, ...]:
        """Return the cheapest alternative layouts of a given tensor.

        Where exactly one call uses the tensor, that call follows.
        """
        f, node = self.f, self.f.node_of_value[value.number]
        takers = list(self.sums.beside.get(node, ()))
        pairs, call = f.layouts[node], f.calls.calls[value.takers[0]]
        follows = len(takers) == 1 and f.node_of_call.get(call.number) == takers[0]
        if follows:
            place = _Neighborhood(
                [takers[0], *self.sums.beside[takers[0]]],
                list(dict.fromkeys((*call.operands, *call.outs))),
                (call.number,),
            )
            key: Hashable = (
                "led",
                id(f.candidates[call.number]),
                place.nodes.index(node),
                self._call_key(takers[0]),
            )
        else:
            place = _Neighborhood([node], [value.number], ())
            key = "alone", self._value_key(node, -1)

        def make() -> Iterator[_UnnamedChoice]:
            lower, way = (
                _ChangedCall(self, takers[0]).value_change_costs(node)
                if follows
                else self._single_change_costs(node)
            )
            seen = {pairs[self.choice[node]][0]}
            for s, (extra, changed) in _cheapest(lower, way):
                if pairs[s][0] not in seen:
                    seen.add(pairs[s][0])
                    yield self._explain_choice((), (pairs[s][0],), extra, changed, place)

        return self._named_alternatives(key, make, place)

    # Cache keys of equal places

    def _call_key(self, node: int) -> Hashable:
        """Return a key that is equal for calls whose surrounding costs and choices are equal."""
        costs, marks = self.f.problem.costs, self.sums.marks.get(node, {})
        beside = [self._value_key(b, node) if b in self.value_at else self.choice[b] for b in marks]
        return id(costs[node]), self.choice[node], tuple(marks.values()), tuple(beside)

    def _value_key(self, node: int, without: int) -> Hashable:
        """Return such a key for a value, ignoring its edge to the call ``without``."""
        marks = self.sums.marks.get(node, {})
        others = tuple((mark, self.choice[b]) for b, mark in marks.items() if b != without)
        return (
            id(self.f.problem.costs[node]),
            id(self.f.layouts[node]),
            self.choice[node],
            self.changes.situation(self.value_at[node]),
            others,
        )

    def _named_alternatives(
        self, key: Hashable, make: Callable[[], Iterator[_UnnamedChoice]], place: _Neighborhood
    ) -> tuple[OtherChoice, ...]:
        """Return the first few alternatives from ``make``, with the names of this place.

        Places with an equal ``key`` share the result of the first one.
        """
        key = key, tuple(self.changes.situation(self.f.calls.values[v]) for v in place.values)
        if key not in self._known:
            self._known[key] = list(itertools.islice(make(), _MAX_LISTED))
        return tuple(self._add_names(known, place) for known in self._known[key])

    def _add_names(self, unnamed: _UnnamedChoice, place: _Neighborhood) -> OtherChoice:
        because = unnamed.because
        if unnamed.kind is not None:
            because = moved(
                self.changes.named(unnamed.kind, self.f.calls.values[place.values[unnamed.value]])
            )
        grown = self._growth({place.nodes[i]: k for i, k in unnamed.changed})
        return OtherChoice(unnamed.takes, unnamed.gives, unnamed.extra, grown, because)

    # Costs

    def _single_change_costs(self, node: int) -> tuple[Array, Callable[[int], Way]]:
        """Return lower bounds of the extra costs for a node that changes alone, and a function.

        The function returns the exact alternative with one strategy.
        """
        cost, k = self.sums.alone(node), self.choice[node]

        def way(s: int) -> Way:
            extra = float(cost[s] - cost[k])
            if not self.stays_behind(float(cost[k]), float(cost[s])):
                other = self.other.alone(node)
                extra = max(extra, float(other[s] - other[k]) - self.behind)
            return extra, {node: s}

        return cost - cost[k], way

    def stays_behind(self, before: float, after: float) -> bool:
        """Return True if the other sum surely stays smaller than ``f``'s.

        In ``f``'s sum, terms of cost ``after`` replace terms of cost ``before``. One sum weighs the
        gradient traffic and the backward pass by 1, the other by 1 - ``hides``. The new terms
        therefore differ between the sums by at most hides / (1 - hides) times their cost. The old
        terms differ by at most hides times their cost.
        """
        return self.behind >= self.hides * (after / (1.0 - self.hides) + before)

    # Memory

    def _levels(self) -> tuple[Array, int]:
        """Return the bytes at each moment, and the first moment."""
        spans = [
            (u.start, u.end)
            for uses in self.f.problem.usages
            for u in uses
            if u.start is not None and u.end is not None
        ]
        first, last = min((a for a, _ in spans), default=0), max((b for _, b in spans), default=1)
        level = np.zeros(last - first + 1)
        for node, k in enumerate(self.choice):
            self._add_usage(level, first, node, k, 1.0)
        return level[:-1].cumsum() if len(level) > 1 else level, first

    def _add_usage(self, steps: Array, first: int, node: int, k: int, sign: float) -> None:
        for start, end, amounts in self.f.problem.usages[node]:
            steps[0 if start is None else start - first] += sign * amounts[k]
            steps[-1 if end is None else end - first] -= sign * amounts[k]

    def _growth(self, changed: dict[int, int]) -> int:
        """Return the bytes by which the memory peak grows."""
        steps = np.zeros(len(self.level) + 1)
        for node, k in changed.items():
            if k != self.choice[node]:
                self._add_usage(steps, self.start, node, k, 1.0)
                self._add_usage(steps, self.start, node, self.choice[node], -1.0)
        return round(float((self.level + steps[:-1].cumsum()).max()) - self.peak)

    # Explanations

    def _explain_choice(
        self,
        takes: tuple[Layout, ...],
        gives: tuple[Layout, ...],
        extra: float,
        changed: dict[int, int],
        place: _Neighborhood,
    ) -> _UnnamedChoice:
        values = [self.f.calls.values[v] for v in place.values]
        now = [self.changes.kinds(value, self.choice) for value in values]
        old_choice = {node: self.choice[node] for node in changed}
        for node, k in changed.items():
            self.choice[node] = k
        after = [self.changes.kinds(value, self.choice) for value in values]
        parts = [
            part for number in place.calls for part in self._added_call_costs(number, old_choice)
        ]
        for node, k in old_choice.items():
            self.choice[node] = k
        more, what = max(parts, key=lambda part: part[0], default=(0.0, ""))
        moving = [
            (*_added_change_cost(a, b), i)
            for i, (a, b) in enumerate(zip(now, after, strict=True))
            if a is not b
        ]
        grown, kind, value = max(moving, key=lambda part: part[0], default=(0.0, None, -1))
        if grown > more and kind is not None:
            more, what = grown, ""
        else:
            kind = None
        if more <= max(_NEGLIGIBLE_SECONDS, 0.05 * abs(extra)):
            kind, what = None, ""
        extra = extra if abs(extra) > self.nothing else 0.0
        return _UnnamedChoice(
            tuple(map(short, takes)),
            tuple(map(short, gives)),
            extra,
            [(place.nodes.index(n), k) for n, k in changed.items()],
            what,
            kind,
            value,
        )

    def _added_call_costs(self, number: int, old_choice: dict[int, int]) -> list[tuple[float, str]]:
        """Return what the call's new strategy adds in computing and in its own communication."""
        strategies, node = self.f.candidates[number], self.f.node_of_call[number]
        new, old = self.choice[node], old_choice.get(node, self.choice[node])
        weight = self.f.options.computation
        computing = weight * float(
            strategies.forward[new]
            + strategies.backward[new]
            - strategies.forward[old]
            - strategies.backward[old]
        )
        moving = float(strategies.moving[new] - strategies.moving[old])
        parts, before = _fraction_text(strategies.share[new]), _fraction_text(strategies.share[old])
        slower = (
            f"each rank computes {parts} of it, not {before}"
            if parts != before
            else "its kernels take longer"
        )
        return [(computing, slower), (moving, "the call's own communication")]


class _ChangedCall:
    """A call with a changed strategy, and its neighbouring values, which follow.

    ``lower`` is a lower bound of the extra cost of each strategy.
    """

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
        # Where no strategy can make the other sum the larger one, that sum is not computed.
        self.both = not responses.stays_behind(self.now, float(self.total.min()))
        if self.both:
            self.lower = np.maximum(self.lower, self.other.least()[0] - self.ahead)

    @cached_property
    def other(self) -> Star:
        return self.responses.other.star(self.node)

    @cached_property
    def ahead(self) -> float:
        """The star's cost in the other sum at which that sum equals the plan's cost."""
        return self.other.at(self.responses.choice[self.node], self.picks) + self.responses.behind

    def exact_alternative(self, k: int, held: Mapping[int, int] | None = None) -> Way:
        """Return the exact alternative with strategy ``k`` of the call.

        ``held`` has the strategies of neighbouring values that do not follow.
        """
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

    def value_change_costs(self, leaf: int) -> tuple[Array, Callable[[int], Way]]:
        """Return lower bounds of a neighbouring value's extra costs, and a function.

        The call follows the value here. The function returns the exact alternative with one
        strategy of the value.
        """

        def least(star: Star) -> Array:
            total, best = star.least()
            matrix = star.leaves[leaf]
            return (total - matrix[np.arange(len(total)), best[leaf]])[:, None] + matrix

        lower = least(self.star) - self.now
        if self.both:
            lower = np.maximum(lower, least(self.other) - self.ahead)
        return lower.min(0), lambda s: next(
            _cheapest(lower[:, s], lambda k: self.exact_alternative(k, {leaf: s}))
        )[1]


def _cheapest(lower: Array, way: Callable[[int], Way]) -> Iterator[tuple[int, Way]]:
    """Yield strategies with their exact alternatives, the cheapest first.

    ``way`` is only called for strategies that by their lower bound may be next.
    """
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
    """Return the minimum of the larger of two sums, and the index chosen in each row.

    The sums start with these two numbers. Each adds one entry of every row, at the same index in
    both. Pairs of sums that are dominated in both sums are dropped row by row. If more than
    `_MAX_PAIRS` pairs are left, an evenly spaced subset is kept.

    >>> least_larger(0.0, 1.0, [(np.array([0.0, 3.0]), np.array([4.0, 0.0])), (np.array([1.0, 2.0]), np.array([1.0, 0.0]))])
    (4.0, [1, 0])
    """  # noqa: E501
    a, b = np.array([first]), np.array([second])
    steps = []
    for x, y in rows:
        undominated = _pareto_front(x, y)
        firsts, seconds = (
            (a[:, None] + x[undominated]).ravel(),
            (b[:, None] + y[undominated]).ravel(),
        )
        at = _pareto_front(firsts, seconds)
        if len(at) > _MAX_PAIRS:
            at = at[np.linspace(0, len(at) - 1, _MAX_PAIRS).astype(int)]
        steps.append((at // len(undominated), undominated[at % len(undominated)]))
        a, b = firsts[at], seconds[at]
    best = place = int(np.maximum(a, b).argmin())
    picks = []
    for before, entry in reversed(steps):
        picks.append(int(entry[place]))
        place = int(before[place])
    return float(max(a[best], b[best])), picks[::-1]


def _pareto_front(a: Array, b: Array) -> Array:
    """Return the indices of the pairs that no other pair dominates, ordered by the first entry."""
    order = np.lexsort((b, a))
    order = order[np.isfinite(a[order])]
    least = np.minimum.accumulate(b[order])
    return order[np.append(True, least[1:] < least[:-1])]


def _added_change_cost(
    before: Sequence[ChangeClass], after: Sequence[ChangeClass]
) -> tuple[float, ChangeClass | None]:
    """Return (extra seconds of a value's changes of layout, the most expensive new one)."""
    known = {(k.change.src, k.change.dst) for k in before}
    new = [k for k in after if (k.change.src, k.change.dst) not in known]
    more = sum(k.seconds for k in after) - sum(k.seconds for k in before)
    return (more, max(new, key=lambda k: k.seconds)) if new else (0.0, None)


def moved(change: LayoutChange) -> str:
    """Describe the collectives and bytes of a change of layout in words.

    >>> moved(LayoutChange("x", "matmul", ("S(0)",), ("B",), 1e-3, 2e-3, 1 << 24, "all_gather", "reduce_scatter"))
    'all_gather of x, reduce_scatter of its gradient (16.0 MiB, S(0) -> B)'
    """  # noqa: E501
    forward_collectives, backward_collectives = (
        change.forward and change.forward_collectives,
        change.backward and change.backward_collectives,
    )
    if forward_collectives == backward_collectives:
        what = (
            f"{forward_collectives} of {change.value} and of its gradient"
            if forward_collectives
            else change.value
        )
    elif forward_collectives and backward_collectives:
        what = f"{forward_collectives} of {change.value}, {backward_collectives} of its gradient"
    else:
        what = (
            f"{forward_collectives} of {change.value}"
            if forward_collectives
            else f"{backward_collectives} of the gradient of {change.value}"
        )
    how = (
        f"{' '.join(change.src)} -> {' '.join(change.dst)}"
        if change.src != change.dst
        else " ".join(change.src)
    )
    return f"{what} ({show_bytes(change.bytes)}, {how})"


def _fraction_text(share: float) -> str:
    return "all" if share >= 1 else f"1/{1 / share:.3g}"
