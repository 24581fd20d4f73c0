"""The state of one search: the incumbent, the best bound, and the limits of the search.

`solve` and the stages that it calls update this state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .flat_arrays import FlatProblem
from .local_search import LocalSearch
from .presolve import PresolvedProblem
from .problem import Array, Number, Problem
from .solution import Solution


@dataclass
class SearchState:
    """The incumbent (best choice), the best bound, the limits, and the log of a search."""

    problem: Problem
    began: float
    deadline: float
    seed: int = 0
    threads: int = 1
    choice: list[int] | None = None
    cost: Number = math.inf
    bound: float = -math.inf
    exhausted: bool = False  # it is proven that no better choice exists
    least_usage: tuple[Number, Number] | None = None
    gap: float = 0.0  # a smaller gap is good enough
    first: bool = False  # any feasible choice will do
    below: float = math.inf  # only choices that cost less are wanted
    widest: int = 0
    largest: int = 0
    log: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cost = self.below

    @property
    def late(self) -> bool:
        enough = (self.first and self.choice is not None) or (
            self.gap > 0
            and self.cost < math.inf
            and self.cost - self.bound <= self.gap * abs(self.cost)
        )
        return enough or time.monotonic() >= self.deadline

    @property
    def goal(self) -> float:
        """The bound above which it is proven that nothing is better than the incumbent.

        It is the incumbent's cost less one among integers, and less a relative 5e-10 among floats.
        """
        if self.cost == math.inf:
            return math.inf
        slack = rounding(float(self.cost), 10**6)
        return float(self.cost) - (
            max(1.0 - slack, slack) if self.problem.integral else 5e-10 * abs(self.cost)
        )

    @property
    def near(self) -> float:
        """The relative gap at which a core is finished.

        At this gap the search is `late`, or the bound is above the `goal`, even with rounding
        errors. Among integers it is 0 unless a `gap` was asked for.
        """
        return max(0.99 * self.gap, 0.0 if self.problem.integral else 4e-10)

    @property
    def affordable(self) -> float:
        """The table entries that one elimination may work through in the time left."""
        return min(3e9, 5e7 * max(self.deadline - time.monotonic(), 1.0))

    def exhaust(self) -> bool:
        self.exhausted = True
        return True

    def widths(self, width: int, table: int) -> None:
        """Log the largest elimination width and table size seen so far."""
        self.log["width"], self.log["largest_table"] = (
            max(width, self.widest),
            max(table, self.largest),
        )
        self.widest, self.largest = max(width, self.widest), max(table, self.largest)

    def reduced(self, core: PresolvedProblem) -> None:
        """Log the widths of the eliminations that the presolve made."""
        near = [(step.table.size, len(step.near)) for step in core.steps]
        if near:
            self.widths(max(width for _, width in near), max(size for size, _ in near))

    def offer(self, core: PresolvedProblem, nodes: Sequence[int], chosen: Array) -> None:
        """Make a choice of the core's live nodes the incumbent if it is feasible and better.

        Its cost and memory are computed again on the original problem, exactly.
        """
        choice = core.expand(dict(zip(nodes, chosen.tolist(), strict=True)))
        cost = self.problem.evaluate(choice)
        if cost < self.cost and self.problem.fits(choice):
            self.choice, self.cost = choice, cost

    def offer_something(self, core: PresolvedProblem, flat: FlatProblem, deadline: float) -> None:
        """Offer the result of a local search that changes one node at a time.

        It is for searches that have no time for anything else.
        """
        local = LocalSearch(flat)
        local.set(
            np.minimum.reduceat(
                np.where(
                    flat.cost == np.minimum.reduceat(flat.cost, flat.first[:-1])[flat.owner],
                    flat.k,
                    10**9,
                ),
                flat.first[:-1],
            )
        )
        if local.repair(deadline):
            local.descend(deadline)
            self.offer(core, flat.nodes, local.choice)

    def proves(self, bound: float, terms: int) -> None:
        """Raise the bound to `bound` less the rounding error of a sum of `terms` floats.

        `bound` holds for every choice that is not proven worse.
        """
        if math.isfinite(bound):
            self.bound = max(self.bound, bound - rounding(bound, terms))

    def answer(self) -> Solution:
        seconds = time.monotonic() - self.began
        if self.choice is None:
            most = self.below if self.exhausted else min(self.bound, self.below)
            return Solution(
                None,
                math.inf,
                most,
                False,
                self.exhausted and self.below == math.inf,
                None,
                self.least_usage,
                seconds,
                self.log,
            )
        bound: Number = self.cost
        if not self.exhausted and self.bound < self.cost:
            bound = (
                math.ceil(self.bound)
                if self.problem.integral and math.isfinite(self.bound)
                else self.bound
            )
        return Solution(
            self.choice,
            self.cost,
            min(bound, self.cost),
            True,
            False,
            self.problem.peak(self.choice),
            None,
            seconds,
            self.log,
        )


def rounding(value: float, terms: int) -> float:
    """Return a generous estimate of the rounding error of a sum of `terms` floats."""
    return abs(value) * 2.0**-53 * (200 + 4 * math.sqrt(terms))
