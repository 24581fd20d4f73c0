"""The least of the larger one of two costs: weights between them give bounds, and what no weight
decides goes to an integer program, or is parted.

For any weight w of the second cost, and the rest of one of the first, the least of the sum is no
more than the least larger cost (Lagrange); the best weight is found by cutting planes (Kelley
1960). At that weight most strategies and pairs cost more than the best choice known, whatever else
is chosen: they are forbidden, and what is left is an integer program for HiGHS, with a row for each
of the costs. Where it is too large, or HiGHS missing, branch and bound: of a node for which the
best choices on either side of that weight differ, the strategies that have more of the one cost and
those that have more of the other are looked at apart.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .dual_ascent import Ascent
from .flat_arrays import FlatProblem
from .joint_presolve import JointPresolve
from .mip import close_larger, highspy
from .path_relinking import SLIGHT, crossing, relink, weighted
from .presolve import core_of
from .problem import Array, Problem
from .reduced_cost_fixing import ExactMarginals, Reparametrization
from .solution import Solution
from .solve import dear, solve
from .variable_elimination import Elimination

__all__ = ["MinimaxSolver"]

#: Pairs of strategies that an integer program may have, and the seconds that it may take at most.
PROGRAM, LONGEST = 60_000, 20.0
#: Of what lies between bound and best choice, how much is looked at first, and next.
SHARES = (0.1, 0.3, 1.0)
#: Rounds of prices of memory, before it is seen what costs too much.
ROUNDS = 60
#: Pairs up to which messages take the place of elimination.
MESSAGES = 500_000
#: A gap at which solutions with a limit of memory are near enough where an integer program follows.
ROUGH = 1e-3


class BiCostChoice(NamedTuple):
    """A choice for the problems that are left, as it is for the whole ones, and both of its
    costs."""

    first: float
    second: float
    whole: Sequence[int]
    choice: Sequence[int] = ()

    @property
    def cost(self) -> float:
        return max(self.first, self.second)


@dataclass(frozen=True)
class _Part:
    """Of all choices those with allowed strategies only: a bound of their larger cost, the weight
    that gives it, and the best choices known on either side, of which ``low`` has more of the
    second cost."""

    bound: float
    at: float = 1.0
    low: BiCostChoice | None = None
    high: BiCostChoice | None = None
    allowed: Mapping[int, Array] = field(default_factory=dict)


class MinimaxSolver:
    """``best``, the best choice found, and ``bound``, that of all, after `run`.

    ``problems`` differ in costs only. ``order``: nodes one after another; no two others are
    neighbours. ``first``: the best for the first cost alone. ``near``: a gap at which to stop, in
    parts of the cost. ``most``: problems that may be solved. ``seconds``: a limit of time.
    ``proving``: whether to close what the best weight leaves open. ``below``: only what costs less
    is looked for. ``program``: pairs that an integer program may have.
    """

    def __init__(
        self, problems: tuple[Problem, Problem], order: Sequence[int], first: Solution, near: float,
        most: int, seconds: float = math.inf,
        proving: bool = True, below: float = math.inf, program: int = PROGRAM,
    ) -> None:  # fmt: skip
        self.whole, self.order, self.near, self.left, self.proving, self.below = (
            problems,
            order,
            near,
            most,
            proving,
            below,
        )
        self.program = program if highspy() is not None else -1  # a program may be empty
        self.deadline = time.monotonic() + seconds
        self.best, self.bound = self._point(first.choice or ()), float(first.bound)
        self.log: dict[str, Any] = {}

    def run(self, worthwhile: Callable[[Sequence[int]], bool] = lambda choice: True) -> None:
        """``worthwhile``: asked of the best choice by weights alone; where it is not, nothing more
        is looked for."""
        if self.best.second <= self.best.first or not self.left:
            return
        self.pair = JointPresolve(self.whole, self.deadline)
        self.problems = self.pair.problems
        self.log |= {
            "left": len(self.problems[0].costs),
            "pairs": sum(table.size for table in self.problems[0].tables),
        }
        self._edges: dict[
            int, list[tuple[int, int, Array]]
        ] = {}  # of a node: number, neighbour, and by how much the second cost is more
        limited = self.problems[0].usage_limit is not None
        known = None if self.proving else self.best  # parts need it as a choice for what is left
        root = self._raised(
            _Part(self.bound, low=known),
            ROUGH if limited and self.proving and self.program > 0 else self.near / 2,
        )
        self.bound = min(self.best.cost, root.bound)
        self.log |= {"weight": round(root.at, 4), "rooted": self.bound}
        if (
            self.proving
            and self.bound < self._enough
            and worthwhile(self.best.whole)
            and not self._closed(root)
        ):
            self._divided(root)

    @property
    def _enough(self) -> float:
        """A bound at which nothing is left to find."""
        return min(self.best.cost, self.below) * (1 - self.near)

    @property
    def _seconds(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _point(self, whole: Sequence[int], choice: Sequence[int] = ()) -> BiCostChoice:
        first, second = (float(problem.evaluate(whole)) for problem in self.whole)
        return BiCostChoice(first, second, whole, choice)

    def _offered(self, point: BiCostChoice) -> None:
        """Take a choice if it is better than the best one known."""
        if point.cost < self.best.cost and self.whole[0].fits(point.whole):
            self.best = point

    def _raised(self, part: _Part, near: float) -> _Part:
        """A part with the best weight's bound; the best choices on the way are kept."""
        problems = (
            _restricted(self.problems[0], part.allowed),
            _restricted(self.problems[1], part.allowed),
        )
        low, high, at, bound = part.low, part.high, part.at, part.bound
        while self.left > 0 and bound < self._enough:
            found = solve(weighted(problems, at), seconds=self._seconds, gap=near, least=False)
            self.left = self.left - 1 if self._seconds else 0
            if not found.feasible:
                bound = math.inf if found.infeasible else bound
                break
            choice = found.choice or ()
            bound, here = (
                max(bound, float(found.bound)),
                self._point(self.pair.expand(choice), choice),
            )
            self._offered(here)
            low, high = (here, high) if here.second > here.first else (low, here)
            if low is None or high is None:
                end = 0.0 if low is None else 1.0
                if at == end:
                    break  # one of the costs is larger even where it is least
                at = end
                continue
            before, at = at, min(max(crossing(low[:2], high[:2]), 0.0), 1.0)
            hoped = low.first + at * (low.second - low.first)  # no weight gives a higher bound
            if hoped - bound <= 2 * near * hoped or math.isclose(at, before, rel_tol=1e-12):
                break
        if low is not None and high is not None:
            for one, other in ((low, high), (high, low)):
                mixed = relink(self.whole, one.whole, other.whole, self.order)
                if mixed is not None:
                    self._offered(self._point(mixed))
        return dataclasses.replace(part, bound=bound, at=at, low=low, high=high)

    # By an integer program

    def _closed(self, root: _Part) -> bool:
        """Forbid what costs too much at the best weight, and have HiGHS close the rest; whether it
        did.

        First what costs little more than the bound at least: what is found there is mostly the
        best, and the less of all others is left by it.
        """
        end = min(self.deadline, time.monotonic() + LONGEST)
        known = self._known(root, end) if self.program >= 0 else None
        if known is None:
            return False
        for share in SHARES:
            high = self._enough
            reach = self.bound + share * (high - self.bound)
            left = JointPresolve(self._without(known, reach), end)
            pairs = (
                sum(int(np.isfinite(table).sum()) for table in left.problems[0].tables)
                if left.feasible
                else 0
            )
            self.log["programs"] = [*self.log.get("programs", []), pairs]
            if pairs > self.program or time.monotonic() >= end:
                return False
            done, least = True, high
            if left.feasible:
                first, second = (FlatProblem(core_of(problem)) for problem in left.problems)
                found = close_larger(
                    (first, second),
                    np.zeros(len(first.room)),
                    self.bound,
                    high,
                    0.5 * self.near * abs(high),
                    end,
                    1,
                    0,
                )
                if found.choice is not None:
                    self._offered(self._point(self.pair.expand(left.expand(found.choice.tolist()))))
                done, least = found.done, min(high, found.bound)
            self.bound = min(self.best.cost, max(self.bound, min(least, reach)))
            if not done or self.bound >= self._enough:
                return done
        return True

    def _known(self, root: _Part, end: float) -> ExactMarginals | Reparametrization | None:
        """What strategies and pairs cost at least, at the best weight and the best prices of memory
        that are found; None where messages only would say it, of tables that are large: their
        bounds are too low to leave little."""
        core = core_of(weighted(self.problems, min(max(root.at, SLIGHT), 1 - SLIGHT)))
        elimination = Elimination.of(core)
        flat = FlatProblem(core)
        ascent = Ascent(flat, None, min(self.best.cost, self.below), elimination)
        if ascent.elimination is None and len(flat.table) > MESSAGES:
            return None
        if len(flat.room) or ascent.elimination is None:
            ascent.run(end, ROUNDS)
        return dear(flat, ascent, False)

    def _without(
        self, known: ExactMarginals | Reparametrization, reach: float
    ) -> tuple[Problem, Problem]:
        """The problems without what costs more."""
        flat = known.flat
        never, pairs = known.never(reach + 1e-9 * abs(reach))
        strategies = np.split(never, flat.first[1:-1])
        tables = {}
        for e, (i, j) in enumerate(zip(flat.head.tolist(), flat.tail.tolist(), strict=True)):
            tables[flat.nodes[i], flat.nodes[j]] = pairs[flat.at[e] : flat.at[e + 1]].reshape(
                flat.size[i], flat.size[j]
            )
        return _without(self.problems[0], strategies, tables), _without(
            self.problems[1], strategies, tables
        )

    # By branch and bound

    def _divided(self, root: _Part) -> None:
        parts, number, done = [root], 0, math.inf
        waiting: list[tuple[float, int, _Part]] = []
        while parts:
            for part in parts:
                if part.bound < self._enough:
                    number += 1
                    heapq.heappush(waiting, (part.bound, number, part))
                else:
                    done = min(done, part.bound)
            parts = []
            if self.left > 0 and waiting and waiting[0][0] < self._enough:
                parts = [self._raised(part, self.near / 2) for part in self._parted(waiting[0][2])]
                if parts:
                    heapq.heappop(waiting)
        self.bound = min(
            self.best.cost, max(self.bound, min([done, *(bound for bound, _, _ in waiting)]))
        )

    def _parted(self, part: _Part) -> list[_Part]:
        """Two parts of a part; none where its best choices are the same on either side."""
        if part.low is None or part.high is None:
            return []
        ends = part.low.choice, part.high.choice
        apart = {
            node: abs(self._more(node, ends[0]) - self._more(node, ends[1]))
            for node in range(len(ends[0]))
            if ends[0][node] != ends[1][node]
        }
        if not apart:
            return []
        node = max(apart, key=lambda n: (apart[n], -n))
        more = self._tendency(node, part.at)
        this = more > (more[ends[0][node]] + more[ends[1][node]]) / 2
        if this[ends[0][node]] == this[ends[1][node]]:
            this = np.arange(len(more)) == ends[0][node]
        before = part.allowed.get(node, np.ones(len(more), dtype=bool))
        smaller = [
            dataclasses.replace(part, allowed={**part.allowed, node: before & ok})
            for ok in (this, ~this)
        ]
        return [
            dataclasses.replace(p, low=_allowed(p, part.low), high=_allowed(p, part.high))
            for p in smaller
        ]

    def _near(self, node: int) -> list[tuple[int, int, Array]]:
        if not self._edges:
            self._edges = {n: [] for n in range(len(self.problems[0].costs))}
            for e, (i, j) in enumerate(self.problems[0].edges):
                more = _less(self.problems[1].tables[e], self.problems[0].tables[e])
                self._edges[i].append((e, j, more))
                self._edges[j].append((e, i, more.T))
        return self._edges[node]

    def _more(self, node: int, choice: Sequence[int]) -> float:
        """How much more the second cost is than the first for a node's strategy among its
        neighbours'."""
        own = float(
            self.problems[1].costs[node][choice[node]] - self.problems[0].costs[node][choice[node]]
        )
        return own + sum(
            float(more[choice[node], choice[other]]) for _, other, more in self._near(node)
        )

    def _tendency(self, node: int, at: float) -> Array:
        """The same of each strategy, with neighbours that suit it."""
        total = _less(self.problems[1].costs[node], self.problems[0].costs[node])
        for e, _, more in self._near(node):
            first, second = (
                (p.tables[e] if p.edges[e][0] == node else p.tables[e].T) for p in self.problems
            )
            weight = min(max(at, SLIGHT), 1 - SLIGHT)
            suits = ((1 - weight) * first + weight * second).argmin(1)
            total = total + more[np.arange(len(more)), suits]
        return total


def _restricted(problem: Problem, allowed: Mapping[int, Array]) -> Problem:
    if not allowed:
        return problem
    return dataclasses.replace(
        problem,
        costs=[
            np.where(allowed[n], c, np.inf) if n in allowed else c
            for n, c in enumerate(problem.costs)
        ],
    )


def _without(
    problem: Problem, strategies: Sequence[Array], pairs: Mapping[tuple[int, int], Array]
) -> Problem:
    """A problem with these strategies and pairs forbidden."""
    costs = [
        np.where(never, np.inf, own) for own, never in zip(problem.costs, strategies, strict=True)
    ]
    tables = [
        np.where(pairs[edge], np.inf, table)
        for edge, table in zip(problem.edges, problem.tables, strict=True)
    ]
    return dataclasses.replace(problem, costs=costs, tables=tables)


def _allowed(part: _Part, point: BiCostChoice | None) -> BiCostChoice | None:
    return (
        point
        if point is not None and all(ok[point.choice[node]] for node, ok in part.allowed.items())
        else None
    )


def _less(second: Array, first: Array) -> Array:
    """By how much one is more than the other; nothing where both are forbidden."""
    return np.asarray(
        np.where(np.isfinite(first), second, 0.0) - np.where(np.isfinite(first), first, 0.0)
    )
