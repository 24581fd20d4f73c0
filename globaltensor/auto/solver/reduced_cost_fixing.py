"""Reduced-cost fixing: forbid strategies and pairs that cannot be part of a better choice.

These are the ones whose lower bound reaches the incumbent's cost. Costs are first reparametrized
along the messages, which changes no choice's cost. The smaller core then starts from the bound that
was reached. `solve`, `minimax` and `mip` call it.
"""

from __future__ import annotations

import numpy as np

from .flat_arrays import FlatProblem, ranges
from .min_marginals import Marginals
from .presolve import PresolvedProblem
from .problem import Array
from .trws import Messages


class ExactMarginals:
    """The exact min-marginals of a core at given memory prices, found by elimination (`marginals`).

    A min-marginal is the minimum cost of a choice with a given strategy or pair.
    """

    def __init__(self, flat: FlatProblem, price: Array, min_marginals: Marginals) -> None:
        self.flat = flat
        always = flat.constant - float(price @ flat.room)
        self.strategies = (
            np.concatenate([min_marginals.nodes[n] for n in range(len(flat.nodes))]) + always
        )
        self.pairs = (
            np.concatenate([costs.ravel() for costs in min_marginals.edges]) + always
            if min_marginals.edges
            else np.zeros(0)
        )

    def never(self, above: float) -> tuple[Array, Array]:
        """Return masks of the strategies and of the pairs that cost more than `above`."""
        return self.strategies > above, self.pairs > above

    def share(self, above: float) -> float:
        """Return the fraction of the allowed entries that cost more than `above`."""
        return share(self.flat, *self.never(above))

    def apply(self, core: PresolvedProblem, above: float) -> None:
        """Forbid the strategies and pairs of the core whose min-marginal exceeds `above`."""
        write(self.flat, core, *self.never(above), self.flat.cost, self.flat.table)


class Reparametrization:
    """A core's costs reparametrized along messages.

    `cost` are the new costs of the strategies and `table` those of the pairs. `extra` is a lower
    bound of what each strategy adds to `bound`, and `pair` that of each pair. `other` is a second
    lower bound of the total cost with each strategy, from a sweep in the other direction.
    """

    def __init__(
        self, flat: FlatProblem, messages: Messages, price: Array, forward: bool, whole: bool
    ) -> None:
        """Reparametrize right after a sweep in this direction at these prices.

        `whole` rounds the amounts that are moved, so that integer costs stay integers.
        """
        self.flat, self.other = flat, np.full(len(flat.cost), -np.inf)
        priced = flat.cost + flat.prices(price)
        total = priced + messages.incoming
        heads, tails = flat.size[flat.head], flat.size[flat.tail]
        of_head, of_tail = (
            ranges(flat.first[flat.head], heads),
            ranges(flat.first[flat.tail], tails),
        )
        head_messages, tail_messages = np.split(messages.message, [len(of_head)])
        pushed = total * messages.share[flat.owner]
        if forward:
            head_messages = head_messages - pushed[of_head]
        else:
            tail_messages = tail_messages - pushed[of_tail]
        if whole:
            head_messages, tail_messages = np.rint(head_messages), np.rint(tail_messages)
        self.rows, self.columns = entries(flat)
        self.table = flat.table - head_messages[self.rows] - tail_messages[self.columns]
        moved = np.bincount(of_head, head_messages, len(flat.cost)) + np.bincount(
            of_tail, tail_messages, len(flat.cost)
        )
        self.cost = flat.cost + moved
        paid = priced + moved
        least = np.minimum.reduceat(paid, flat.first[:-1])
        below = np.minimum.reduceat(self.table, flat.at[:-1]) if len(flat.head) else np.zeros(0)
        self.bound = flat.constant + float(least.sum() + below.sum()) - float(price @ flat.room)
        over = self.table - np.repeat(below, flat.shape)
        of_row, of_column = np.full(len(of_head), np.inf), np.full(len(of_tail), np.inf)
        if len(over):
            row_starts = np.concatenate([[0], np.cumsum(np.repeat(tails, heads))[:-1]])
            of_row = np.minimum.reduceat(over, row_starts)
            turned = np.argsort(self.columns, kind="stable")
            of_column = np.minimum.reduceat(
                over[turned], np.searchsorted(self.columns[turned], np.arange(len(of_tail)))
            )
        self.extra = (
            paid
            - least[flat.owner]
            + np.bincount(of_head, of_row, len(flat.cost))
            + np.bincount(of_tail, of_column, len(flat.cost))
        )
        rest = self.extra[of_head] - of_row, self.extra[of_tail] - of_column
        self.pair = over + rest[0][self.rows] + rest[1][self.columns]

    def never(self, above: float) -> tuple[Array, Array]:
        """Return masks of the strategies and of the pairs that cost more than `above`."""
        return (self.bound + self.extra > above) | (
            self.other > above
        ), self.bound + self.pair > above

    def share(self, above: float) -> float:
        """Return the fraction of the allowed entries that cost more than `above`."""
        return share(self.flat, *self.never(above))

    def apply(self, core: PresolvedProblem, above: float) -> None:
        """Write the new costs into the core, and forbid what costs more than `above` in total."""
        write(self.flat, core, *self.never(above), self.cost, self.table)


def share(flat: FlatProblem, never: Array, pairs: Array) -> float:
    """Return the fraction of the allowed entries that these masks would forbid."""
    some, both = flat.cost < flat.never, flat.table < flat.never
    return float((some & never).sum() + (both & pairs).sum()) / max(
        1.0, float(some.sum() + both.sum())
    )


def write(
    flat: FlatProblem, core: PresolvedProblem, never: Array, pairs: Array, cost: Array, table: Array
) -> None:
    """Write costs and tables into a core, with these strategies and pairs forbidden."""
    cost, table = np.where(never, np.inf, cost), np.where(pairs, np.inf, table)
    for n, i in enumerate(flat.nodes):
        core.costs[i] = cost[flat.first[n] : flat.first[n + 1]]
    for e, (n, m) in enumerate(zip(flat.head.tolist(), flat.tail.tolist(), strict=True)):
        i, j = flat.nodes[n], flat.nodes[m]
        block = table[flat.at[e] : flat.at[e + 1]].reshape(flat.size[n], flat.size[m])
        core.near[i][j], core.near[j][i] = block, block.T


def entries(flat: FlatProblem) -> tuple[Array, Array]:
    """Return for each table entry its row number and its column number, counted through all edges.

    A row is an (edge, strategy of the head), a column is an (edge, strategy of the tail).
    """
    heads, tails = flat.size[flat.head], flat.size[flat.tail]
    within = ranges(np.zeros(len(heads), np.int64), flat.shape)
    row, column = np.divmod(within, np.repeat(tails, flat.shape))
    first_row, first_column = np.cumsum(heads) - heads, np.cumsum(tails) - tails
    return row + np.repeat(first_row, flat.shape), column + np.repeat(first_column, flat.shape)
