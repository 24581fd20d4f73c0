"""Dual ascent on memory prices and messages between nodes, which are raised in turn.

It yields a lower bound that grows, and choices decoded from it, which are made feasible and better.
The prices are Lagrange multipliers of the moments, moved along a smoothed subgradient. Only moments
that were seen to overflow get a price. Where the graph is narrow enough, variable elimination finds
the minimum at given prices exactly, and messages are not needed. `solve` and `minimax` call it.
"""

from __future__ import annotations

import time
from functools import cached_property

import numpy as np

from .cutting_planes import CuttingPlanes
from .flat_arrays import FlatProblem
from .local_search import LocalSearch
from .problem import Array
from .recombine import mix
from .trws import Messages
from .variable_elimination import Elimination

#: Rounds of messages before prices move for the first time.
FIRST_ROUNDS = 6
#: Rounds without a better bound after which the step size is halved.
ROUNDS_BEFORE_HALVING = 10
#: Overflow below which a moment gets no price, relative to the largest room of any moment.
NEGLIGIBLE_OVERFLOW = 0.001
#: Table entries up to which the very first choice is repaired and improved too.
MAX_REPAIRED_ENTRIES = 300_000
#: The maximum work of elimination, in table entries, for which it replaces the messages.
MAX_ELIMINATION_WORK = 2e8


class Ascent:
    """The state of the dual ascent on one core: messages, prices, best bound, best choice."""

    def __init__(
        self,
        flat: FlatProblem,
        price: Array | None = None,
        value: float = np.inf,
        elimination: Elimination | None = None,
    ) -> None:
        """Start at `price`, or with all prices 0.

        `value` is the cost of the best choice known. That choice may no longer be in this core.
        `elimination` is used if it fits and its work is small enough.
        """
        self.flat = flat
        self.price = np.zeros(len(flat.room)) if price is None else price.copy()
        self.active = self.price > 0
        self.drift = np.zeros(len(flat.room))
        self.bound = -np.inf
        self.best_price = self.price.copy()
        self.known = value
        self.value = np.inf
        self.choice: Array | None = None
        self.rounds = 0
        self.limit = float(max(flat.room.max(initial=0.0), 1e-300))
        self.step = 0.05
        # The best bound at the last move of the prices, and the number of rounds since it last
        # rose.
        self.reached, self.idle = (
            -np.inf,
            0,
        )
        self.cuts: CuttingPlanes | None = None
        self.settled = False  # No other prices give a better bound.
        self.straddled = False
        self.elimination = (
            elimination
            if elimination is not None
            and elimination.fits
            and elimination.work <= MAX_ELIMINATION_WORK
            else None
        )

    @cached_property
    def messages(self) -> Messages:
        return Messages(self.flat)

    @cached_property
    def local(self) -> LocalSearch:
        return LocalSearch(self.flat)

    def closed(self, gap: float) -> bool:
        """Return True if the relative gap between best choice and bound is at most `gap`."""
        return self.choice is not None and self.value - self.bound <= gap * abs(self.value)

    def round(self, polish: bool, deadline: float, gap: float) -> None:
        """Run one round: update the bound, decode a choice, and move the prices.

        The bound comes from an elimination, or from a pass of messages in each direction.
        """
        flat = self.flat
        priced = flat.cost + flat.prices(self.price)
        paid = float(self.price @ flat.room)
        if self.elimination is not None:
            least, found = self.elimination.run(np.split(priced, flat.first[1:-1]))
            choice = np.array([found[n] for n in range(len(flat.nodes))])
        else:
            least = max(self.messages.sweep(priced, True), self.messages.sweep(priced, False))
            choice = self.messages.decode(priced, self.rounds % 2 == 0)
        bound = flat.constant + least - paid
        if bound > self.bound:
            self.bound, self.best_price = bound, self.price.copy()
        over = (flat.profile(choice) - flat.room) / self.limit
        if over.max(initial=0.0) <= 0:
            self.offer(choice)
        if polish and not self.closed(gap):
            self.polish(choice, deadline)
        if len(over):
            if self.elimination is not None:
                self.follow(over, bound)
            else:
                self.move(over)
        self.rounds += 1

    def polish(self, choice: Array, deadline: float) -> None:
        """Repair and improve a choice, and save it if it is the best.

        Parts of it are also mixed into the best choice so far.
        """
        local, best = self.local, self.choice
        local.set(choice)
        if local.repair(deadline):
            local.descend(deadline)
            self.offer(local.choice)
        if best is not None:
            local.set(best)
            mix(local, choice, deadline)
            local.descend(deadline)
            self.offer(local.choice)

    def offer(self, choice: Array) -> None:
        value = self.flat.value(choice)
        if value < self.value:
            self.value, self.choice = value, choice.copy()

    def open(self, over: Array) -> None:
        """Activate prices for the moments that overflow most, at most one per neighbourhood."""
        left, near = over.copy(), max(1, len(over) // 100)
        for _ in range(5):
            worst = int(left.argmax())
            if left[worst] <= NEGLIGIBLE_OVERFLOW:
                break
            around = slice(max(0, worst - near), worst + near + 1)
            if not self.active[around].any() or self.rounds % 10 == 0:
                self.active[worst] = True
            left[around] = -1

    @property
    def scale(self) -> float:
        """The order of magnitude of the optimal cost.

        The best known cost alone would not do, because choices found early may cost many times as
        much.
        """
        best = min(self.value, self.known)
        if not np.isfinite(best):
            return max(abs(self.bound), 1e-300)
        return min(abs(best), 2 * self.bound) if self.bound > 0 else abs(best)

    def move(self, over: Array) -> None:
        """Move the prices along the smoothed overflow.

        Smoothing is needed because choices decoded from messages jump from round to round.
        """
        if self.rounds < FIRST_ROUNDS:
            return
        self.open(over)
        self.drift = 0.7 * self.drift + 0.3 * over
        if self.bound > self.reached:
            self.reached, self.idle = self.bound, 0
            self.step = min(self.step * 1.05, 0.2)
        else:
            self.idle += 1
            if self.idle >= ROUNDS_BEFORE_HALVING:  # the steps are too long
                self.step, self.idle, self.price = self.step * 0.5, 0, self.best_price.copy()
                self.drift[:] = 0
        pace = self.step * self.scale / self.limit
        self.price = np.where(
            self.active, np.maximum(0.0, self.price + pace * np.clip(self.drift, -0.2, 1.0)), 0.0
        )

    def follow(self, over: Array, bound: float) -> None:
        """Move the prices to where the cutting planes of exact evaluations suggest."""
        if self.cuts is None:
            self.cuts = CuttingPlanes(0.1 * self.scale / self.limit)
        self.cuts.add(bound, self.price, over * self.limit)
        opened = self.active.sum()
        self.open(over)
        found = self.cuts.next(np.flatnonzero(self.active))
        if found is None:
            self.move(over)
            return
        self.price, promise = found
        best = min(self.value, self.known)
        left = max(best - self.bound, 0.0) if np.isfinite(best) else 0.0
        self.settled = (
            promise <= self.bound + max(1e-9 * self.scale, 1e-3 * left)
            and opened == self.active.sum()
        )

    def run(
        self,
        deadline: float,
        rounds: int,
        goal: float = np.inf,
        polish_every: int = 5,
        gap: float = 0.0,
    ) -> None:
        """Run up to `rounds` rounds.

        It stops earlier where time is up, the bound exceeds `goal`, no prices are better, or a
        choice is within `gap` of the bound.
        """
        last = self.rounds + rounds
        while (
            time.monotonic() < deadline
            and self.rounds < last
            and self.bound <= goal
            and not self.settled
            and not self.closed(gap)
        ):
            # Before prices carry information, choices are far from feasible.
            early = self.rounds == 0 and len(self.flat.table) > MAX_REPAIRED_ENTRIES
            self.round(self.rounds % polish_every == 0 and not early, deadline, gap)
        if self.settled and not self.straddled and time.monotonic() < deadline:
            self.straddle(deadline)

    def straddle(self, deadline: float) -> None:
        """Decode choices at prices slightly below and above the best ones, and mix them.

        Equal parts of the graph change their strategies all at once at the best prices, so choices
        on both sides differ.
        """
        self.straddled = True
        for factor in (1.001, 0.999, 1.03, 0.97):
            if self.elimination is not None:
                _, choice_of = self.elimination.run(
                    np.split(
                        self.flat.cost + self.flat.prices(self.best_price * factor),
                        self.flat.first[1:-1],
                    )
                )
                self.polish(np.array([choice_of[n] for n in range(len(self.flat.nodes))]), deadline)
