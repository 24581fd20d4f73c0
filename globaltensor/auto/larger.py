"""The least of the larger one of two costs: weights between them give bounds, and where no weight gives a higher one the choices are parted.

For any weight w of the second cost, and the rest of one of the first, the least of the sum is no more than the least larger cost (Lagrange); the best weight is
found by cutting planes (Kelley 1960). What is left open is closed by branch and bound: of a node for which the best choices on either side of that weight
differ, the strategies that have more of the one cost and those that have more of the other are looked at apart.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .between import SLIGHT, between, crossing, weighted
from .solver import Problem, Solution

__all__ = ["Larger", "Point"]

Array = np.ndarray[Any, np.dtype[Any]]


class Point(NamedTuple):
    """A choice with both of its costs."""

    first: float
    second: float
    choice: Sequence[int]

    @property
    def cost(self) -> float:
        return max(self.first, self.second)


@dataclass(frozen=True)
class _Part:
    """Of all choices those with allowed strategies only: a bound of their larger cost, the weight that gives it, and the best choices known on either side, of
    which ``low`` has more of the second cost."""

    bound: float
    at: float = 1.0
    low: Point | None = None
    high: Point | None = None
    allowed: Mapping[int, Array] = field(default_factory=dict)


class Larger:
    """The best choice found and a bound of all, after `run`.

    ``problems`` differ in costs only. ``order``: nodes one after another; no two others are neighbours. ``solve``: the best choice for a problem, and whether
    time is up. ``first``: the best for the first cost alone. ``near``: a gap at which to stop, in parts of the cost. ``most``: problems that may be solved.
    ``parting``: whether choices may be parted; else the best weight is all that is looked for.
    """

    def __init__(
        self, problems: tuple[Problem, Problem], order: Sequence[int], solve: Callable[[Problem], tuple[Solution, bool]], first: Solution, near: float,
        most: int, parting: bool = True,
    ) -> None:  # fmt: skip
        self.problems, self.order, self.solve, self.near, self.left, self.parting = problems, order, solve, near, most, parting
        self.best, self.bound = self._point(first.choice or ()), float(first.bound)
        self._edges: dict[int, list[tuple[int, int, Array]]] = {}  # of a node: number, neighbour, and by how much the second cost is more

    def run(self) -> None:
        if self.best.second <= self.best.first or not self.left:
            return
        parts, number, done = [_Part(self.bound, low=self.best)], 0, math.inf
        waiting: list[tuple[float, int, _Part]] = []
        while parts:
            for part in map(self._raised, parts):
                if part.bound < self._enough:
                    number += 1
                    heapq.heappush(waiting, (part.bound, number, part))
                else:
                    done = min(done, part.bound)
            parts = []
            if self.parting and self.left > 0 and waiting and waiting[0][0] < self._enough:
                parts = self._parted(waiting[0][2])
                if parts:
                    heapq.heappop(waiting)
        self.bound = min([self.best.cost, done, *(bound for bound, _, _ in waiting)])

    @property
    def _enough(self) -> float:
        """A bound at which nothing is left to find."""
        return self.best.cost * (1 - self.near)

    def _point(self, choice: Sequence[int]) -> Point:
        first, second = (float(problem.evaluate(choice)) for problem in self.problems)
        return Point(first, second, choice)

    def _raised(self, part: _Part) -> _Part:
        """A part with the best weight's bound; the best choices on the way are kept."""
        problems = _restricted(self.problems[0], part.allowed), _restricted(self.problems[1], part.allowed)
        low, high, at, bound = part.low, part.high, part.at, part.bound
        while self.left > 0 and bound < self._enough:
            found, late = self.solve(weighted(problems, at))
            self.left = 0 if late else self.left - 1
            if not found.feasible:
                bound = math.inf if found.infeasible else bound
                break
            bound, here = max(bound, float(found.bound)), self._point(found.choice or ())
            self.best = min(self.best, here, key=lambda point: point.cost)
            low, high = (here, high) if here.second > here.first else (low, here)
            if low is None or high is None:
                end = 0.0 if low is None else 1.0
                if at == end:
                    break  # one of the costs is larger even where it is least
                at = end
                continue
            before, at = at, min(max(crossing(low[:2], high[:2]), 0.0), 1.0)
            hoped = low.first + at * (low.second - low.first)  # no weight gives a higher bound
            if hoped - bound <= self.near * hoped or math.isclose(at, before, rel_tol=1e-12):
                break
        if low is not None and high is not None:
            mixed = [between(self.problems, one.choice, other.choice, self.order) for one, other in ((low, high), (high, low))]
            self.best = min([self.best, *(self._point(choice) for choice in mixed if choice is not None)], key=lambda point: point.cost)
        return dataclasses.replace(part, bound=bound, at=at, low=low, high=high)

    def _parted(self, part: _Part) -> list[_Part]:
        """Two parts of a part; none where its best choices are the same on either side."""
        if part.low is None or part.high is None:
            return []
        ends = part.low.choice, part.high.choice
        apart = {node: abs(self._more(node, ends[0]) - self._more(node, ends[1])) for node in range(len(ends[0])) if ends[0][node] != ends[1][node]}
        if not apart:
            return []
        node = max(apart, key=lambda n: (apart[n], -n))
        more = self._tendency(node, part.at)
        this = more > (more[ends[0][node]] + more[ends[1][node]]) / 2
        if this[ends[0][node]] == this[ends[1][node]]:
            this = np.arange(len(more)) == ends[0][node]
        before = part.allowed.get(node, np.ones(len(more), dtype=bool))
        smaller = [dataclasses.replace(part, allowed={**part.allowed, node: before & ok}) for ok in (this, ~this)]
        return [dataclasses.replace(p, low=_allowed(p, part.low), high=_allowed(p, part.high)) for p in smaller]

    def _near(self, node: int) -> list[tuple[int, int, Array]]:
        if not self._edges:
            self._edges = {n: [] for n in range(len(self.problems[0].costs))}
            for e, (i, j) in enumerate(self.problems[0].edges):
                more = _less(self.problems[1].tables[e], self.problems[0].tables[e])
                self._edges[i].append((e, j, more))
                self._edges[j].append((e, i, more.T))
        return self._edges[node]

    def _more(self, node: int, choice: Sequence[int]) -> float:
        """How much more the second cost is than the first for a node's strategy among its neighbours'."""
        own = float(self.problems[1].costs[node][choice[node]] - self.problems[0].costs[node][choice[node]])
        return own + sum(float(more[choice[node], choice[other]]) for _, other, more in self._near(node))

    def _tendency(self, node: int, at: float) -> Array:
        """The same of each strategy, with neighbours that suit it."""
        total = _less(self.problems[1].costs[node], self.problems[0].costs[node])
        for e, _, more in self._near(node):
            first, second = ((p.tables[e] if p.edges[e][0] == node else p.tables[e].T) for p in self.problems)
            weight = min(max(at, SLIGHT), 1 - SLIGHT)
            suits = ((1 - weight) * first + weight * second).argmin(1)
            total = total + more[np.arange(len(more)), suits]
        return total


def _restricted(problem: Problem, allowed: Mapping[int, Array]) -> Problem:
    if not allowed:
        return problem
    return dataclasses.replace(problem, costs=[np.where(allowed[n], c, np.inf) if n in allowed else c for n, c in enumerate(problem.costs)])


def _allowed(part: _Part, point: Point | None) -> Point | None:
    return point if point is not None and all(ok[point.choice[node]] for node, ok in part.allowed.items()) else None


def _less(second: Array, first: Array) -> Array:
    """By how much one is more than the other; nothing where both are forbidden."""
    return np.asarray(np.where(np.isfinite(first), second, 0.0) - np.where(np.isfinite(first), first, 0.0))
