"""Minimise max(cost_a, cost_b) by weighted sums of both costs and an integer program.

Let the second cost have a weight w in [0, 1] and the first cost 1 - w. For any w, the minimum of
the weighted sum is at most the minimum of the larger cost (Lagrange). Cutting planes find the best
weight (Kelley 1960). At that weight most strategies and pairs cost more than the incumbent under
every choice of the rest. These are forbidden. The rest is an integer program for HiGHS, with one
row per cost.

Where the program is too large or HiGHS is missing, the solver branches. It takes a node where the
best choices on either side of that weight differ. One branch has the strategies with more of the
one cost, the other branch those with more of the other cost. `auto/intra_op/search.py` calls it.
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

#: The maximum number of pairs of strategies in an integer program, and its maximum time in seconds.
MAX_PROGRAM_PAIRS, MAX_PROGRAM_SECONDS = 60_000, 20.0
#: The fractions of the interval from bound to incumbent that are searched first, second and third.
INTERVAL_FRACTIONS = (0.1, 0.3, 1.0)
#: Rounds of memory prices before reduced-cost fixing.
ROUNDS = 60
#: The maximum number of pairs for which messages replace elimination.
MAX_ELIMINATION_PAIRS = 500_000
#: The gap at which solutions under a memory limit are accepted where an integer program follows.
ACCEPTED_GAP = 1e-3


class BiCostChoice(NamedTuple):
    """A choice with both of its costs.

    `choice` is the choice for the reduced problems, and `whole` the one for the original problems.
    """

    first: float
    second: float
    whole: Sequence[int]
    choice: Sequence[int] = ()

    @property
    def cost(self) -> float:
        return max(self.first, self.second)


@dataclass(frozen=True)
class _SearchBranch:
    """A subproblem: all choices with allowed strategies only.

    `bound` is a bound of their larger cost, and `at` the weight that gives it. `low` and `high` are
    the best choices known on either side of that weight; ``low`` has more of the second cost.
    """

    bound: float
    at: float = 1.0
    low: BiCostChoice | None = None
    high: BiCostChoice | None = None
    allowed: Mapping[int, Array] = field(default_factory=dict)


class MinimaxSolver:
    """A solver for the minimum of the larger of two costs.

    After `run`, ``best`` is the best choice found and ``bound`` a lower bound of all choices.

    ``problems`` differ only in their costs. ``order`` is a sequence of nodes such that no two nodes
    outside it are neighbours. ``first`` is the optimum for the first cost alone. ``near`` is the
    relative gap at which to stop. ``most`` limits the number of problems to solve, and ``seconds``
    the time. ``proving`` asks to close the gap that the best weight leaves. With ``below``, only
    choices that cost less are searched for. ``program`` is the maximum number of pairs in an
    integer program.
    """

    def __init__(
        self, problems: tuple[Problem, Problem], order: Sequence[int], first: Solution, near: float,
        most: int, seconds: float = math.inf,
        proving: bool = True, below: float = math.inf, program: int = MAX_PROGRAM_PAIRS,
    ) -> None:  # fmt: skip
        self.whole, self.order, self.near, self.left, self.proving, self.below = (
            problems,
            order,
            near,
            most,
            proving,
            below,
        )
        # a program may be empty, so 0 does not switch programs off
        self.program = program if highspy() is not None else -1
        self.deadline = time.monotonic() + seconds
        self.best, self.bound = self._point(first.choice or ()), float(first.bound)
        self.log: dict[str, Any] = {}

    def run(self, worthwhile: Callable[[Sequence[int]], bool] = lambda choice: True) -> None:
        """Search for the choice with the smallest larger cost.

        ``worthwhile`` receives the best choice that weights alone find. Where it returns False, the
        search ends there.
        """
        if self.best.second <= self.best.first or not self.left:
            return
        self.pair = JointPresolve(self.whole, self.deadline)
        self.problems = self.pair.problems
        self.log |= {
            "left": len(self.problems[0].costs),
            "pairs": sum(table.size for table in self.problems[0].tables),
        }
        # By node: (edge number, neighbour, second cost minus first cost).
        self._edges: dict[int, list[tuple[int, int, Array]]] = {}
        limited = self.problems[0].usage_limit is not None
        # the subproblems need it as a choice of the reduced problems
        known = None if self.proving else self.best
        root = self._bound_branch(
            _SearchBranch(self.bound, low=known),
            ACCEPTED_GAP if limited and self.proving and self.program > 0 else self.near / 2,
        )
        self.bound = min(self.best.cost, root.bound)
        self.log |= {"weight": round(root.at, 4), "rooted": self.bound}
        if (
            self.proving
            and self.bound < self._target_bound
            and worthwhile(self.best.whole)
            and not self._close_gap(root)
        ):
            self._branch_and_bound(root)

    @property
    def _target_bound(self) -> float:
        """The bound at which nothing is left to find."""
        return min(self.best.cost, self.below) * (1 - self.near)

    @property
    def _seconds(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _point(self, whole: Sequence[int], choice: Sequence[int] = ()) -> BiCostChoice:
        first, second = (float(problem.evaluate(whole)) for problem in self.whole)
        return BiCostChoice(first, second, whole, choice)

    def _offer_incumbent(self, point: BiCostChoice) -> None:
        """Make a choice the incumbent if it is better and fits."""
        if point.cost < self.best.cost and self.whole[0].fits(point.whole):
            self.best = point

    def _bound_branch(self, part: _SearchBranch, near: float) -> _SearchBranch:
        """Return the subproblem with the bound and the choices of its best weight.

        Choices that are found on the way are offered as incumbents.
        """
        problems = (
            _restricted(self.problems[0], part.allowed),
            _restricted(self.problems[1], part.allowed),
        )
        low, high, at, bound = part.low, part.high, part.at, part.bound
        while self.left > 0 and bound < self._target_bound:
            solution = solve(weighted(problems, at), seconds=self._seconds, gap=near, least=False)
            self.left = self.left - 1 if self._seconds else 0
            if not solution.feasible:
                bound = math.inf if solution.infeasible else bound
                break
            choice = solution.choice or ()
            bound, point = (
                max(bound, float(solution.bound)),
                self._point(self.pair.expand(choice), choice),
            )
            self._offer_incumbent(point)
            low, high = (point, high) if point.second > point.first else (low, point)
            if low is None or high is None:
                end = 0.0 if low is None else 1.0
                if at == end:
                    break  # one of the costs is the larger one even where it alone is minimised
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
                    self._offer_incumbent(self._point(mixed))
        return dataclasses.replace(part, bound=bound, at=at, low=low, high=high)

    # Integer program

    def _close_gap(self, root: _SearchBranch) -> bool:
        """Forbid what costs too much at the best weight, and close the gap with HiGHS.

        Returns True if the gap was closed. The first program has only the strategies and pairs
        whose bound is little above the root bound. The best choice is mostly among these. Once it
        is known, less of the rest is left for the next program.
        """
        end = min(self.deadline, time.monotonic() + MAX_PROGRAM_SECONDS)
        known = self._lower_bounds(root, end) if self.program >= 0 else None
        if known is None:
            return False
        for share in INTERVAL_FRACTIONS:
            high = self._target_bound
            reach = self.bound + share * (high - self.bound)
            left = JointPresolve(self._forbid_costly(known, reach), end)
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
                outcome = close_larger(
                    (first, second),
                    np.zeros(len(first.room)),
                    self.bound,
                    high,
                    0.5 * self.near * abs(high),
                    end,
                    1,
                    0,
                )
                if outcome.choice is not None:
                    self._offer_incumbent(
                        self._point(self.pair.expand(left.expand(outcome.choice.tolist())))
                    )
                done, least = outcome.done, min(high, outcome.bound)
            self.bound = min(self.best.cost, max(self.bound, min(least, reach)))
            if not done or self.bound >= self._target_bound:
                return done
        return True

    def _lower_bounds(
        self, root: _SearchBranch, end: float
    ) -> ExactMarginals | Reparametrization | None:
        """Return lower bounds of the cost with each strategy and pair.

        They hold at the best weight and at the best memory prices that are found. The result is
        None for large tables where only messages could provide the bounds: such bounds are too low
        to forbid much.
        """
        core = core_of(weighted(self.problems, min(max(root.at, SLIGHT), 1 - SLIGHT)))
        elimination = Elimination.of(core)
        flat = FlatProblem(core)
        ascent = Ascent(flat, None, min(self.best.cost, self.below), elimination)
        if ascent.elimination is None and len(flat.table) > MAX_ELIMINATION_PAIRS:
            return None
        if len(flat.room) or ascent.elimination is None:
            ascent.run(end, ROUNDS)
        return dear(flat, ascent, False)

    def _forbid_costly(
        self, known: ExactMarginals | Reparametrization, reach: float
    ) -> tuple[Problem, Problem]:
        """Return the problems without the strategies and pairs that cost more than `reach`."""
        flat = known.flat
        never, pairs = known.never(reach + 1e-9 * abs(reach))
        strategies = np.split(never, flat.first[1:-1])
        tables = {}
        for e, (i, j) in enumerate(zip(flat.head.tolist(), flat.tail.tolist(), strict=True)):
            tables[flat.nodes[i], flat.nodes[j]] = pairs[flat.at[e] : flat.at[e + 1]].reshape(
                flat.size[i], flat.size[j]
            )
        return _forbid_entries(self.problems[0], strategies, tables), _forbid_entries(
            self.problems[1], strategies, tables
        )

    # Branch and bound

    def _branch_and_bound(self, root: _SearchBranch) -> None:
        parts, number, done = [root], 0, math.inf
        waiting: list[tuple[float, int, _SearchBranch]] = []
        while parts:
            for part in parts:
                if part.bound < self._target_bound:
                    number += 1
                    heapq.heappush(waiting, (part.bound, number, part))
                else:
                    done = min(done, part.bound)
            parts = []
            if self.left > 0 and waiting and waiting[0][0] < self._target_bound:
                parts = [
                    self._bound_branch(part, self.near / 2)
                    for part in self._split_branch(waiting[0][2])
                ]
                if parts:
                    heapq.heappop(waiting)
        self.bound = min(
            self.best.cost, max(self.bound, min([done, *(bound for bound, _, _ in waiting)]))
        )

    def _split_branch(self, part: _SearchBranch) -> list[_SearchBranch]:
        """Return two subproblems of a subproblem.

        The result is empty where the best choices on either side of the weight are the same.
        """
        if part.low is None or part.high is None:
            return []
        ends = part.low.choice, part.high.choice
        apart = {
            node: abs(self._cost_difference(node, ends[0]) - self._cost_difference(node, ends[1]))
            for node in range(len(ends[0]))
            if ends[0][node] != ends[1][node]
        }
        if not apart:
            return []
        node = max(apart, key=lambda n: (apart[n], -n))
        more = self._strategy_differences(node, part.at)
        this = more > (more[ends[0][node]] + more[ends[1][node]]) / 2
        if this[ends[0][node]] == this[ends[1][node]]:
            this = np.arange(len(more)) == ends[0][node]
        before = part.allowed.get(node, np.ones(len(more), dtype=bool))
        smaller = [
            dataclasses.replace(part, allowed={**part.allowed, node: before & ok})
            for ok in (this, ~this)
        ]
        return [
            dataclasses.replace(
                p, low=_point_if_allowed(p, part.low), high=_point_if_allowed(p, part.high)
            )
            for p in smaller
        ]

    def _incident_edges(self, node: int) -> list[tuple[int, int, Array]]:
        if not self._edges:
            self._edges = {n: [] for n in range(len(self.problems[0].costs))}
            for e, (i, j) in enumerate(self.problems[0].edges):
                more = _finite_difference(self.problems[1].tables[e], self.problems[0].tables[e])
                self._edges[i].append((e, j, more))
                self._edges[j].append((e, i, more.T))
        return self._edges[node]

    def _cost_difference(self, node: int, choice: Sequence[int]) -> float:
        """Return the second cost minus the first cost of a node's strategy.

        The edges to the neighbours' strategies are included.
        """
        own = float(
            self.problems[1].costs[node][choice[node]] - self.problems[0].costs[node][choice[node]]
        )
        return own + sum(
            float(more[choice[node], choice[other]])
            for _, other, more in self._incident_edges(node)
        )

    def _strategy_differences(self, node: int, at: float) -> Array:
        """Return the second cost minus the first cost of each of a node's strategies.

        The neighbours take the strategies that suit it best.
        """
        total = _finite_difference(self.problems[1].costs[node], self.problems[0].costs[node])
        for e, _, more in self._incident_edges(node):
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


def _forbid_entries(
    problem: Problem, strategies: Sequence[Array], pairs: Mapping[tuple[int, int], Array]
) -> Problem:
    """Return a problem with these strategies and pairs forbidden."""
    costs = [
        np.where(never, np.inf, own) for own, never in zip(problem.costs, strategies, strict=True)
    ]
    tables = [
        np.where(pairs[edge], np.inf, table)
        for edge, table in zip(problem.edges, problem.tables, strict=True)
    ]
    return dataclasses.replace(problem, costs=costs, tables=tables)


def _point_if_allowed(part: _SearchBranch, point: BiCostChoice | None) -> BiCostChoice | None:
    return (
        point
        if point is not None and all(ok[point.choice[node]] for node, ok in part.allowed.items())
        else None
    )


def _finite_difference(second: Array, first: Array) -> Array:
    """Return second minus first, where a forbidden entry counts as 0."""
    return np.asarray(
        np.where(np.isfinite(first), second, 0.0) - np.where(np.isfinite(first), first, 0.0)
    )
