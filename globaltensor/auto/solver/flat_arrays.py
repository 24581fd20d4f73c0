"""The core as flat arrays: strategies of all nodes in a row, tables in a row, usages over
compressed time. What the vectorised stages work on."""

from __future__ import annotations

import numpy as np

from .presolve import PresolvedProblem
from .problem import Array


def ranges(starts: Array, counts: Array) -> Array:
    """The numbers starts[0], starts[0] + 1, ... (counts[0] of them), starts[1], ... in one
    array."""
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(total) + np.repeat(starts - before, counts))


class FlatProblem:
    """Nodes 0..n-1 stand for the live nodes of a core, in order; strategy k of node i is position
    `first[i] + k`; `cost` lists their costs.

    Edge e joins head[e] < tail[e]; its table (row-major) stands in `table` from `at[e]`. What is
    forbidden costs more than `never`. Memory: at moment t there is `room[t]`. Item m takes its
    amounts at begin[m] <= t < end[m]: entries (position, item, amount) where amount > 0.
    """

    def __init__(self, core: PresolvedProblem, most: float = np.inf) -> None:
        """`most` is a cost that is known to be reached: what is forbidden costs ten times as much
        instead of inf, so that sums stay numbers."""
        self.nodes = sorted(core.live)
        index = {i: n for n, i in enumerate(self.nodes)}
        self.size = np.array([len(core.costs[i]) for i in self.nodes], dtype=np.int64)
        self.first = np.concatenate([[0], np.cumsum(self.size)])
        self.owner = np.repeat(np.arange(len(self.nodes)), self.size)
        self.k = (
            np.arange(len(self.owner)) - self.first[self.owner]
        )  # the strategy that each position stands for
        self.cost: Array = (
            np.concatenate([core.costs[i] for i in self.nodes]) if self.nodes else np.zeros(0)
        )
        edges = [(i, j) for i in self.nodes for j in sorted(core.near[i]) if i < j]
        self.head = np.array([index[i] for i, _ in edges], dtype=np.int64)
        self.tail = np.array([index[j] for _, j in edges], dtype=np.int64)
        self.shape = self.size[self.head] * self.size[self.tail]
        self.at = np.concatenate([[0], np.cumsum(self.shape)])
        self.table: Array = (
            np.concatenate([core.near[i][j].ravel() for i, j in edges]) if edges else np.zeros(0)
        )
        self.constant = float(core.constant)
        low = (
            -float(np.minimum(np.minimum.reduceat(self.cost, self.first[:-1]), 0).sum())
            if self.nodes
            else 0.0
        )
        low -= (
            float(np.minimum(np.minimum.reduceat(self.table, self.at[:-1]), 0).sum())
            if edges
            else 0.0
        )
        wide = (
            sum(
                float(np.abs(part[np.isfinite(part)]).max(initial=0.0))
                for part in np.split(self.table, self.at[1:-1])
            )
            if edges
            else 0.0
        )
        wide += float(np.abs(self.cost[np.isfinite(self.cost)]).sum())
        #: an entry that costs this much is part of no choice that costs less than `most`
        self.never = min(abs(most) + abs(core.constant), wide) + low + (1e-6 * (wide + low) or 1.0)
        #: no choice that is allowed costs more, rounding included
        self.most = (core.constant + wide) * (1 + 1e-9) + 1e-9 * (abs(core.constant) + wide) + 1.0
        self.table[np.isinf(self.table)] = 2 * self.never
        self.cost[np.isinf(self.cost)] = 2 * self.never
        self.memory(core)

    def memory(self, core: PresolvedProblem) -> None:
        self.room = core.room
        blocks = [(n, block) for n, i in enumerate(self.nodes) for block in core.uses[i]]
        none = np.zeros(0, np.int64)
        self.begin = np.concatenate([none, *(block.starts for _, block in blocks)])
        self.end = np.concatenate([none, *(block.ends for _, block in blocks)])
        self.item_node = np.concatenate(
            [none, *(np.full(len(block.starts), n) for n, block in blocks)]
        )
        amount = np.concatenate([np.zeros(0), *(block.amounts.ravel() for _, block in blocks)])
        counts = self.size[self.item_node]
        #: dense over (item, strategy of its node): amount of item m under strategy k at
        #: item_first[m] + k
        self.item_first, self.item_amount = np.concatenate([[0], np.cumsum(counts)]), amount
        some = amount > 0
        self.position = ranges(self.first[self.item_node], counts)[some]
        self.item, self.amount = np.repeat(np.arange(len(counts)), counts)[some], amount[some]

    def profile(self, choice: Array) -> Array:
        """The usage at each moment."""
        taken = self.item_amount[self.item_first[:-1] + choice[self.item_node]]
        return self.spread(taken)

    def spread(self, taken: Array) -> Array:
        """The usage at each moment where each item takes this much."""
        length = len(self.room) + 1
        return np.cumsum(
            np.bincount(self.begin, taken, length) - np.bincount(self.end, taken, length)
        )[:-1]

    def prices(self, price: Array) -> Array:
        """What each strategy's usage costs at these prices of the moments."""
        total = np.concatenate([[0.0], np.cumsum(price)])
        return np.bincount(
            self.position,
            self.amount * (total[self.end] - total[self.begin])[self.item],
            len(self.cost),
        )

    def value(self, choice: Array) -> float:
        """The cost of a choice, rounding aside."""
        chosen = self.first[:-1] + choice
        pairs = self.at[:-1] + choice[self.head] * self.size[self.tail] + choice[self.tail]
        return self.constant + float(self.cost[chosen].sum()) + float(self.table[pairs].sum())
