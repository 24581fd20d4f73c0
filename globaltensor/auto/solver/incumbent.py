"""What is known so far about a problem while it is searched."""

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
    """The best choice, the best bound, and what was done."""

    problem: Problem
    began: float
    deadline: float
    seed: int = 0
    threads: int = 1
    choice: list[int] | None = None
    cost: Number = math.inf
    bound: float = -math.inf
    exhausted: bool = False  # it is proven that there is nothing better
    least_usage: tuple[Number, Number] | None = None
    gap: float = 0.0  # a smaller gap is good enough
    first: bool = False  # any feasible choice will do
    below: float = math.inf  # what costs as much is of no use
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
        """A bound above this proves that there is nothing better than the best choice: one less
        among integers, 1e-9 of it among floats."""
        if self.cost == math.inf:
            return math.inf
        slack = rounding(float(self.cost), 10**6)
        return float(self.cost) - (
            max(1.0 - slack, slack) if self.problem.integral else 5e-10 * abs(self.cost)
        )

    @property
    def near(self) -> float:
        """A gap, relatively, at which a core is at its end: `late` or above the `goal`, whatever
        rounding adds. Among integers that is none."""
        return max(0.99 * self.gap, 0.0 if self.problem.integral else 4e-10)

    @property
    def affordable(self) -> float:
        """The entries of tables that one elimination may work through in the time left."""
        return min(3e9, 5e7 * max(self.deadline - time.monotonic(), 1.0))

    def exhaust(self) -> bool:
        self.exhausted = True
        return True

    def widths(self, width: int, table: int) -> None:
        """Keep the most of these in the log."""
        self.log["width"], self.log["largest_table"] = (
            max(width, self.widest),
            max(table, self.largest),
        )
        self.widest, self.largest = max(width, self.widest), max(table, self.largest)

    def reduced(self, core: PresolvedProblem) -> None:
        """Note how wide the eliminations were that the reductions made."""
        near = [(step.table.size, len(step.near)) for step in core.steps]
        if near:
            self.widths(max(width for _, width in near), max(size for size, _ in near))

    def offer(self, core: PresolvedProblem, nodes: Sequence[int], chosen: Array) -> None:
        """Take a choice of the core's live nodes if it is feasible, and better than what is known;
        costs and memory are counted anew, exactly."""
        choice = core.expand(dict(zip(nodes, chosen.tolist(), strict=True)))
        cost = self.problem.evaluate(choice)
        if cost < self.cost and self.problem.fits(choice):
            self.choice, self.cost = choice, cost

    def offer_something(self, core: PresolvedProblem, flat: FlatProblem, deadline: float) -> None:
        """Where there was no time to search: what changing one node after another finds."""
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
        """Take a lower bound of everything that is not proven worse, summed up from this many
        floats: less what rounding may have added."""
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
    """What rounding may have added to a sum of so many floats, generously."""
    return abs(value) * 2.0**-53 * (200 + 4 * math.sqrt(terms))
