"""Prices for memory and messages between nodes, raised in turn: a lower bound that grows, and
choices read off it that are made feasible and better.

The prices are Lagrange multipliers of the moments, moved along a smoothed subgradient; only moments
that were seen to overflow get one. Where the graph is narrow enough, elimination answers what is
best at given prices exactly, and messages are not needed.
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
FIRST = 6
#: Rounds without a better bound until steps are taken to be too long.
PATIENCE = 10
#: Of an overflow, what is too little to open a moment for (relative to the room at the widest).
LITTLE = 0.001
#: Entries of tables up to which the very first choice is made feasible too.
QUICK = 300_000
#: The most entries of all tables together for which elimination takes the messages' place.
WORK = 2e8


class Ascent:
    """The state of the search on one core: messages, prices, the best bound and the best choice of
    its nodes."""

    def __init__(
        self,
        flat: FlatProblem,
        price: Array | None = None,
        value: float = np.inf,
        elimination: Elimination | None = None,
    ) -> None:
        """`price` to start from; `value` is the cost of the best choice known, which may not be
        among this core's any more."""
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
        self.reached, self.idle = (
            -np.inf,
            0,
        )  # the best bound when prices moved last, and how often it did not rise since
        self.cuts: CuttingPlanes | None = None
        self.settled = False  # no prices are better
        self.straddled = False
        self.elimination = (
            elimination
            if elimination is not None and elimination.fits and elimination.work <= WORK
            else None
        )

    @cached_property
    def messages(self) -> Messages:
        return Messages(self.flat)

    @cached_property
    def local(self) -> LocalSearch:
        return LocalSearch(self.flat)

    def closed(self, gap: float) -> bool:
        """Whether the best choice is so near the bound, relatively."""
        return self.choice is not None and self.value - self.bound <= gap * abs(self.value)

    def round(self, polish: bool, deadline: float, gap: float) -> None:
        """A pass of messages each way or an elimination, a choice read off, the prices moved."""
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
        """Make the choice feasible and better, and keep it where it is the best."""
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
        """Let the moments that overflow most have prices, one of a neighbourhood."""
        left, near = over.copy(), max(1, len(over) // 100)
        for _ in range(5):
            worst = int(left.argmax())
            if left[worst] <= LITTLE:
                break
            around = slice(max(0, worst - near), worst + near + 1)
            if not self.active[around].any() or self.rounds % 10 == 0:
                self.active[worst] = True
            left[around] = -1

    @property
    def scale(self) -> float:
        """About what the best choice costs: choices that were found early may cost many times as
        much."""
        best = min(self.value, self.known)
        if not np.isfinite(best):
            return max(abs(self.bound), 1e-300)
        return min(abs(best), 2 * self.bound) if self.bound > 0 else abs(best)

    def move(self, over: Array) -> None:
        """Move the prices along what overflows, smoothed: the choices that messages give jump from
        round to round."""
        if self.rounds < FIRST:
            return
        self.open(over)
        self.drift = 0.7 * self.drift + 0.3 * over
        if self.bound > self.reached:
            self.reached, self.idle = self.bound, 0
            self.step = min(self.step * 1.05, 0.2)
        else:
            self.idle += 1
            if self.idle >= PATIENCE:  # the steps are too long
                self.step, self.idle, self.price = self.step * 0.5, 0, self.best_price.copy()
                self.drift[:] = 0
        pace = self.step * self.scale / self.limit
        self.price = np.where(
            self.active, np.maximum(0.0, self.price + pace * np.clip(self.drift, -0.2, 1.0)), 0.0
        )

    def follow(self, over: Array, bound: float) -> None:
        """Move the prices where exact evaluations suggest."""
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
        """So many rounds, or until time is up, the bound exceeds the goal, or a choice is found
        that is near enough to it."""
        last = self.rounds + rounds
        while (
            time.monotonic() < deadline
            and self.rounds < last
            and self.bound <= goal
            and not self.settled
            and not self.closed(gap)
        ):
            early = (
                self.rounds == 0 and len(self.flat.table) > QUICK
            )  # before prices say something, choices are far from fitting
            self.round(self.rounds % polish_every == 0 and not early, deadline, gap)
        if self.settled and not self.straddled and time.monotonic() < deadline:
            self.straddle(deadline)

    def straddle(self, deadline: float) -> None:
        """Read choices off prices a little below and above the best, where equal parts of the graph
        change all at once, and mix them."""
        self.straddled = True
        for factor in (1.001, 0.999, 1.03, 0.97):
            if self.elimination is not None:
                _, found = self.elimination.run(
                    np.split(
                        self.flat.cost + self.flat.prices(self.best_price * factor),
                        self.flat.first[1:-1],
                    )
                )
                self.polish(np.array([found[n] for n in range(len(self.flat.nodes))]), deadline)
