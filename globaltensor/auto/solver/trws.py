"""Lower bounds for graphs that are too wide to eliminate: sequential tree-reweighted messages.

The method is TRW-S (Kolmogorov, Convergent Tree-Reweighted Message Passing for Energy Minimization,
PAMI 2006), vectorised over nodes that do not depend on each other. `dual_ascent` runs it.

After each pass, an edge's table minus the messages along it is at least 0, with a 0 in each row or
column. The sum of the nodes' shares is therefore a lower bound on every choice's cost.
"""

from __future__ import annotations

import numpy as np

from .flat_arrays import FlatProblem, ranges
from .problem import Array

#: Tables with more entries than this are processed one by one.
LARGE = 4096


def table_of(flat: FlatProblem, edge: int, forward: bool) -> Array:
    """Return an edge's table as a view, with the near node's strategies as rows."""
    head, tail = flat.size[flat.head[edge]], flat.size[flat.tail[edge]]
    table = flat.table[flat.at[edge] : flat.at[edge + 1]].reshape(head, tail)
    return table if forward else table.T


class Level:
    """The nodes that can be processed together in one direction, and the edges that leave them."""

    def __init__(
        self,
        flat: FlatProblem,
        nodes: Array,
        edges: Array,
        forward: bool,
        into: Array,
        out_of: Array,
    ) -> None:
        near, far = (flat.head, flat.tail) if forward else (flat.tail, flat.head)
        self.nodes = nodes
        self.positions = ranges(flat.first[nodes], flat.size[nodes])
        self.starts = np.cumsum(flat.size[nodes]) - flat.size[nodes]
        self.edges = edges
        near_nodes, far_nodes = near[edges], far[edges]
        rows, columns = flat.size[near_nodes], flat.size[far_nodes]
        self.near, self.columns, self.forward = near_nodes, columns, forward
        self.base = flat.at[edges]
        # vectors of the edges, one entry per strategy of the near node
        self.near_strategies = ranges(flat.first[near_nodes], rows)
        # the positions of the messages towards the near nodes
        self.opposite = ranges(into[edges], rows)
        # the positions of the messages towards the far nodes
        self.target = ranges(out_of[edges], columns)
        self.far_strategies = ranges(flat.first[far_nodes], columns)
        row_at, column_at, count = (
            np.cumsum(rows) - rows,
            np.cumsum(columns) - columns,
            rows * columns,
        )
        # Large tables as views, with the positions of their vectors: (first row, last row, first
        # column, last column, table).
        self.large = [
            (
                row_at[e],
                row_at[e] + rows[e],
                column_at[e],
                column_at[e] + columns[e],
                table_of(flat, edges[e], forward),
            )
            for e in np.flatnonzero(count > LARGE)
        ]
        # Entries of the small tables, ordered (edge, far strategy, near strategy), for one
        # vectorised minimum.
        small = np.flatnonzero(count <= LARGE)
        rows, columns, count = rows[small], columns[small], count[small]
        self.small = ranges(column_at[small], columns)
        near_row = np.repeat(rows, columns)
        self.pick = ranges(np.repeat(row_at[small], columns), near_row).astype(np.int32)
        self.segments = np.cumsum(near_row) - near_row
        k = self.pick - np.repeat(row_at[small], count)
        line = np.repeat(ranges(np.zeros(len(small), np.int64), columns), near_row)
        base = np.repeat(self.base[small], count)
        self.table = flat.table[
            base
            + (
                k * np.repeat(columns, count) + line
                if forward
                else line * np.repeat(rows, count) + k
            )
        ]

    def passed(self, value: Array) -> Array:
        """Return the minimum over the near strategies of value plus table.

        The result has one entry per strategy of the far nodes.
        """
        new = np.empty(len(self.target))
        if len(self.small):
            new[self.small] = np.minimum.reduceat(value[self.pick] + self.table, self.segments)
        for start, end, first, last, table in self.large:
            new[first:last] = (value[start:end, None] + table).min(0)
        return new

    def table_at(self, flat: FlatProblem, chosen: Array) -> Array:
        """Return the rows of the edges' tables that the near nodes' choices select."""
        if self.forward:
            return flat.table[ranges(self.base + chosen * self.columns, self.columns)]
        wide = np.repeat(flat.size[self.near], self.columns)
        line = ranges(np.zeros(len(self.edges), np.int64), self.columns)
        return flat.table[np.repeat(self.base + chosen, self.columns) + line * wide]


class Messages:
    """The messages of a core, and the bound that they prove at given memory prices."""

    def __init__(self, flat: FlatProblem) -> None:
        self.flat = flat
        heads, tails = flat.size[flat.head], flat.size[flat.tail]
        self.to_head = np.cumsum(heads) - heads
        self.to_tail = int(heads.sum()) + np.cumsum(tails) - tails
        self.message = np.zeros(int(heads.sum() + tails.sum()))
        count = len(flat.nodes)
        ahead, behind = (
            np.bincount(flat.head, minlength=count),
            np.bincount(flat.tail, minlength=count),
        )
        self.share = 1.0 / np.maximum(1, np.maximum(ahead, behind))
        self.rest = {True: 1.0 - ahead * self.share, False: 1.0 - behind * self.share}
        # The sum of all messages towards each strategy.
        self.incoming = np.zeros(len(flat.cost))
        self.levels = {True: self.layered(True), False: self.layered(False)}

    def layered(self, forward: bool) -> list[Level]:
        flat = self.flat
        near, far = (flat.head, flat.tail) if forward else (flat.tail, flat.head)
        depth = [0] * len(flat.nodes)
        order = np.argsort(near if forward else -near, kind="stable")
        for here, there in zip(near[order].tolist(), far[order].tolist(), strict=True):
            if depth[there] <= depth[here]:
                depth[there] = depth[here] + 1
        deep = np.array(depth)
        nodes, edges = np.argsort(deep, kind="stable"), np.argsort(deep[near], kind="stable")
        most = int(deep.max(initial=0)) + 1
        node_cut = np.searchsorted(deep[nodes], np.arange(most + 1))
        edge_cut = np.searchsorted(deep[near][edges], np.arange(most + 1))
        into, out_of = (self.to_head, self.to_tail) if forward else (self.to_tail, self.to_head)
        return [
            Level(
                flat,
                nodes[node_cut[d] : node_cut[d + 1]],
                edges[edge_cut[d] : edge_cut[d + 1]],
                forward,
                into,
                out_of,
            )
            for d in range(most)
        ]

    def sweep(self, priced: Array, forward: bool) -> float:
        """Run one pass with these costs of the strategies, prices included.

        Returns the bound that it proves, without the constant and without the value of the room.
        """
        bound = 0.0
        share, rest, incoming, message = self.share, self.rest[forward], self.incoming, self.message
        owner = self.flat.owner
        for level in self.levels[forward]:
            if len(level.edges):
                near_strategies = level.near_strategies
                value = (priced[near_strategies] + incoming[near_strategies]) * share[
                    owner[near_strategies]
                ] - message[level.opposite]
                new = level.passed(value)
                np.add.at(incoming, level.far_strategies, new - message[level.target])
                message[level.target] = new
            total = priced[level.positions] + incoming[level.positions]
            bound += float(np.minimum.reduceat(total, level.starts) @ rest[level.nodes])
        return bound

    def decode(self, priced: Array, forward: bool) -> Array:
        """Return a choice, decoded node after node.

        Each node takes its best strategy under the earlier nodes' choices and the later nodes'
        messages.
        """
        flat = self.flat
        conditional_costs = priced + self.incoming
        choice = np.zeros(len(flat.nodes), dtype=np.int64)
        for level in self.levels[forward]:
            values = conditional_costs[level.positions]
            best = np.repeat(np.minimum.reduceat(values, level.starts), flat.size[level.nodes])
            k = level.positions - np.repeat(flat.first[level.nodes], flat.size[level.nodes])
            choice[level.nodes] = np.minimum.reduceat(
                np.where(values == best, k, np.iinfo(np.int64).max), level.starts
            )
            if len(level.edges):
                chosen = choice[level.near]
                row = level.table_at(flat, chosen)
                np.add.at(conditional_costs, level.far_strategies, row - self.message[level.target])
        return choice
