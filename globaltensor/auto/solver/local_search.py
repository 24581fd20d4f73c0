"""Local search that changes one node at a time, with exact memory accounting.

It makes choices feasible (`repair`) and better (`descend`). `dual_ascent`, `neighborhood_search`,
`recombine` and `incumbent` use it.
"""

from __future__ import annotations

import time

import numpy as np

from .flat_arrays import FlatProblem, ranges
from .problem import Array


class LocalSearch:
    """A choice, the cost of changing each node, and the memory left.

    `conditional_costs` are the costs of strategies while the neighbours keep theirs. `slack` is the
    room left at each moment.
    """

    def __init__(self, flat: FlatProblem) -> None:
        self.flat = flat
        count = len(flat.nodes)
        heads, tails = flat.size[flat.head], flat.size[flat.tail]
        # both orientations of each table, with the near node's strategies as rows
        total = len(flat.table)
        turned = ranges(np.zeros(len(flat.head), np.int64), flat.shape)
        row, column = np.divmod(turned, np.repeat(heads, flat.shape)) if total else (turned, turned)
        base = np.repeat(flat.at[:-1], flat.shape)
        self.tables = np.concatenate(
            [flat.table, flat.table[base + column * np.repeat(tails, flat.shape) + row]]
        )
        near, far = np.concatenate([flat.head, flat.tail]), np.concatenate([flat.tail, flat.head])
        at = np.concatenate([flat.at[:-1], flat.at[:-1] + total])
        order = np.argsort(near, kind="stable")
        near, far, at = near[order], far[order], at[order]
        columns = flat.size[far]
        #: Entries (edge, strategy of the far node), by near node: their positions in
        #: `conditional_costs`, and in `tables` for strategy 0. The next strategy is `stride`
        #: further.
        self.theirs = ranges(flat.first[far], columns)
        self.at = ranges(at, columns)
        self.stride = np.repeat(columns, columns)
        cuts = np.concatenate([[0], np.cumsum(columns)])
        self.cut = cuts[np.searchsorted(near, np.arange(count + 1))]
        by_node = np.argsort(flat.item_node, kind="stable")
        self.items = by_node
        self.item_cut = np.searchsorted(flat.item_node[by_node], np.arange(count + 1))
        self.tolerance = 0.0
        self.choice = np.zeros(count, dtype=np.int64)
        self.conditional_costs = flat.cost.copy()
        self.slack = flat.room.copy()
        self.value = 0.0

    def set(self, choice: Array) -> None:
        """Start from this choice."""
        flat = self.flat
        self.choice = choice.astype(np.int64, copy=True)
        k = np.repeat(self.choice, np.diff(self.cut))
        self.conditional_costs = flat.cost + np.bincount(
            self.theirs, self.tables[self.at + k * self.stride], len(flat.cost)
        )
        self.slack = flat.room - flat.profile(self.choice)
        self.value = flat.value(self.choice)

    @property
    def feasible(self) -> bool:
        return not len(self.slack) or bool(self.slack.min() >= 0)

    def change(self, i: int, k: int) -> list[tuple[int, int, float]]:
        """Return (start, end, additional usage) per interval if node i took strategy k."""
        flat = self.flat
        items = self.items[self.item_cut[i] : self.item_cut[i + 1]]
        first = flat.item_first[items]
        more = flat.item_amount[first + k] - flat.item_amount[first + self.choice[i]]
        some = np.flatnonzero(more)
        return list(
            zip(
                flat.begin[items[some]].tolist(),
                flat.end[items[some]].tolist(),
                more[some].tolist(),
                strict=True,
            )
        )

    def fits(self, change: list[tuple[int, int, float]]) -> bool:
        """Return True if there is room for all usage that this change adds."""
        return all(more <= 0 or self.slack[start:end].min() >= more for start, end, more in change)

    def move(self, i: int, k: int, change: list[tuple[int, int, float]]) -> None:
        flat = self.flat
        old = int(self.choice[i])
        lo, hi = int(self.cut[i]), int(self.cut[i + 1])
        at, stride = self.at[lo:hi], self.stride[lo:hi]
        self.value += float(
            self.conditional_costs[flat.first[i] + k] - self.conditional_costs[flat.first[i] + old]
        )
        self.conditional_costs[self.theirs[lo:hi]] += (
            self.tables[at + k * stride] - self.tables[at + old * stride]
        )
        for start, end, more in change:
            self.slack[start:end] -= more
        self.choice[i] = k

    def descend(self, deadline: float = np.inf, rounds: int = 50) -> None:
        """Apply the changes of one node that gain most and fit, until no change gains anything."""
        flat = self.flat
        for _ in range(rounds):
            now = self.conditional_costs[flat.first[:-1] + self.choice]
            gain = now[flat.owner] - self.conditional_costs
            better = np.flatnonzero(gain > 1e-12 * np.abs(self.value) + 1e-300)
            if not len(better):
                return
            moved = False
            for position in better[np.argsort(-gain[better], kind="stable")].tolist():
                i = int(flat.owner[position])
                # the neighbours may have moved since
                chosen_cost = self.conditional_costs[flat.first[i] + self.choice[i]]
                if self.conditional_costs[position] < chosen_cost - 1e-12 * abs(self.value):
                    change = self.change(i, position - int(flat.first[i]))
                    if self.fits(change):
                        self.move(i, position - int(flat.first[i]), change)
                        moved = True
                if time.monotonic() > deadline:
                    return
            if not moved:
                return

    def repair(self, deadline: float = np.inf) -> bool:
        """Make the choice feasible, the moment with the largest overflow first.

        It applies the changes that cost least per unit of freed memory. Returns True if the choice
        is feasible afterwards.
        """
        flat = self.flat
        for _ in range(4 * len(flat.nodes) + 10):
            if self.feasible:
                return True
            if time.monotonic() > deadline:
                return False
            t = int(self.slack.argmin())
            items = np.flatnonzero((flat.begin <= t) & (t < flat.end))
            counts = flat.size[flat.item_node[items]]
            position = ranges(flat.first[flat.item_node[items]], counts)
            amount = flat.item_amount[ranges(flat.item_first[items], counts)]
            mine = flat.item_amount[flat.item_first[items] + self.choice[flat.item_node[items]]]
            freed = np.repeat(mine, counts) - amount
            some = np.flatnonzero(freed > 0)
            if not len(some):
                return False
            position, freed = position[some], np.minimum(freed[some], -self.slack[t])
            owner = flat.owner[position]
            extra = (
                self.conditional_costs[position]
                - self.conditional_costs[flat.first[owner] + self.choice[owner]]
            )
            ratio = np.where(extra > 0, extra / freed, extra * freed)
            moved: set[int] = set()
            for n in np.argsort(ratio, kind="stable")[:400].tolist():
                i = int(owner[n])
                if i in moved:
                    continue
                change = self.change(i, int(position[n] - flat.first[i]))
                if self.fits(change):
                    self.move(i, int(position[n] - flat.first[i]), change)
                    moved.add(i)
                    if self.slack[t] >= 0 or len(moved) >= 30:
                        break
            if not moved:
                return False
        return False
