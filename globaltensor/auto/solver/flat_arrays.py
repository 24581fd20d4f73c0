"""The core as flat arrays: strategies of all nodes, edge tables, and usages over compressed time.

The vectorised stages (`trws`, `dual_ascent`, `local_search`, `mip` and others) work on these
arrays.
"""

from __future__ import annotations

import numpy as np

from .presolve import PresolvedProblem
from .problem import Array


def ranges(starts: Array, counts: Array) -> Array:
    """Return the ranges starts[k] ... starts[k] + counts[k] - 1 for all k, as one array."""
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(total) + np.repeat(starts - before, counts))


class FlatProblem:
    """A core as flat arrays.

    Nodes 0..n-1 stand for the live nodes of a core, in order. Strategy k of node i is at position
    `first[i] + k`, and `cost` lists the costs by position.

    Edge e joins head[e] < tail[e]. Its row-major table is in `table` from `at[e]`. Forbidden
    entries cost more than `never`.

    Memory: moment t has the capacity `room[t]`. Item m uses its amounts at begin[m] <= t < end[m].
    Its entries are (position, item, amount) where amount > 0.
    """

    def __init__(self, core: PresolvedProblem, most: float = np.inf) -> None:
        """Build the arrays of a core.

        `most` is a cost that is known to be reachable. It sets the finite costs that replace inf
        for forbidden entries, so that sums stay numbers.
        """
        self.nodes = sorted(core.live)
        index = {i: n for n, i in enumerate(self.nodes)}
        self.size = np.array([len(core.costs[i]) for i in self.nodes], dtype=np.int64)
        self.first = np.concatenate([[0], np.cumsum(self.size)])
        self.owner = np.repeat(np.arange(len(self.nodes)), self.size)
        # The strategy that each position stands for.
        self.k = np.arange(len(self.owner)) - self.first[self.owner]
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
        #: An entry that costs this much is part of no choice that costs less than `most`.
        self.never = min(abs(most) + abs(core.constant), wide) + low + (1e-6 * (wide + low) or 1.0)
        #: No allowed choice costs more than this, rounding included.
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
        #: Dense over (item, strategy of its node): the amount of item m under strategy k is at
        #: `item_first[m] + k`.
        self.item_first, self.item_amount = np.concatenate([[0], np.cumsum(counts)]), amount
        some = amount > 0
        self.position = ranges(self.first[self.item_node], counts)[some]
        self.item, self.amount = np.repeat(np.arange(len(counts)), counts)[some], amount[some]

    def profile(self, choice: Array) -> Array:
        """Return the memory usage at each moment for a choice."""
        taken = self.item_amount[self.item_first[:-1] + choice[self.item_node]]
        return self.spread(taken)

    def spread(self, taken: Array) -> Array:
        """Return the memory usage at each moment where item m uses `taken[m]`."""
        length = len(self.room) + 1
        return np.cumsum(
            np.bincount(self.begin, taken, length) - np.bincount(self.end, taken, length)
        )[:-1]

    def prices(self, price: Array) -> Array:
        """Return the cost of each strategy's memory usage at these prices of the moments."""
        total = np.concatenate([[0.0], np.cumsum(price)])
        return np.bincount(
            self.position,
            self.amount * (total[self.end] - total[self.begin])[self.item],
            len(self.cost),
        )

    def value(self, choice: Array) -> float:
        """Return the cost of a choice, up to rounding."""
        chosen = self.first[:-1] + choice
        pairs = self.at[:-1] + choice[self.head] * self.size[self.tail] + choice[self.tail]
        return self.constant + float(self.cost[chosen].sum()) + float(self.table[pairs].sum())
