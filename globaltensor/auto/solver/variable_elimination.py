"""Exact minimisation by min-plus variable elimination, smallest table first.

Dechter, Bucket elimination: a unifying framework for reasoning, Artificial Intelligence 113 (1999).
The cost is that of the tables, so it is linear in the depth of a network whose graph is
series-parallel.

`auto/inter_op/min_plus_elimination.py` is the same algorithm for another purpose. It keeps some
variables, returns a table over them, and accepts factors of any number of variables. Here each
table joins two nodes, and all nodes are minimised over. The order is found once and run for many
costs, such as changing memory prices (auto/solver/dual_ascent.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from .presolve import PresolvedProblem
from .problem import Array

#: The maximum number of entries of a table that is held.
CAP = 10_000_000
#: Tables up to this size are summed in one step. Larger ones are summed one strategy of the
#: eliminated node at a time, which needs less memory.
WHOLE = 2_000_000


class EliminationGraph:
    """A graph whose nodes are eliminated one after another, the one with the smallest table first.

    The table of a node has an entry for each combination of its neighbours' strategies. The
    elimination of a node joins its neighbours to each other. A node is only eliminated if the
    logarithm of the number of its table's entries is at most ``limit``.
    """

    def __init__(
        self, around: dict[int, set[int]], logs: Sequence[float] | Mapping[int, float], limit: float
    ) -> None:
        self.around, self._logs, self._limit = around, logs, limit
        self._heap: list[tuple[float, int]] = []
        self._push(around)

    def eliminate(self) -> Iterator[tuple[int, set[int], float]]:
        """Eliminate nodes as long as one has a table within the limit.

        Yield each node, its neighbours, and the logarithm of the number of its table's entries.
        """
        around, heap, logs = self.around, self._heap, self._logs
        while heap:
            size, i = heapq.heappop(heap)
            near = around.get(i)
            if near is None:
                continue
            now = sum([logs[j] for j in near])
            if abs(now - size) > 1e-9:  # the neighbours have changed since
                self._push((i,))
                continue
            del around[i]
            for j in near:
                around[j] |= near
                around[j] -= {i, j}
            self._push(near)
            yield i, near, now

    def remove(self, i: int) -> None:
        """Take a node out, without joining its neighbours."""
        near = self.around.pop(i)
        for j in near:
            self.around[j].discard(i)
        self._push(near)

    def _push(self, nodes: Iterable[int]) -> None:
        around, heap, logs, limit = self.around, self._heap, self._logs, self._limit
        for i in nodes:
            size = sum([logs[j] for j in around[i]])
            if size <= limit:
                heapq.heappush(heap, (size, i))


class Elimination:
    """An elimination order for the nodes `among` of a graph.

    The order is found once and run for many node costs. `fits` is True if no table exceeds `cap`
    entries; otherwise `left` are the nodes that remain when the next table would. `largest` is the
    size of the largest table held. `width` is the largest number of neighbours of a node at its
    elimination. `total` is the number of entries of all tables that are held, and `work` the number
    of entries that are read.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        edges: Iterable[tuple[int, int, Array]],
        among: Iterable[int],
        cap: int = CAP,
    ) -> None:
        self.sizes = sizes
        self.edges = list(edges)
        around: dict[int, set[int]] = {i: set() for i in among}
        for i, j, _ in self.edges:
            around[i].add(j)
            around[j].add(i)
        self.order: list[tuple[int, tuple[int, ...]]] = []  # (node, its neighbours at that time)
        self.largest, self.width, self.total, self.work = 0, 0, 0.0, 0.0
        logs = {i: math.log(sizes[i]) for i in around}
        graph = EliminationGraph(around, logs, math.log(cap) + 1e-9)
        for i, near, now in graph.eliminate():
            kept = round(math.exp(now))
            self.largest, self.width = max(self.largest, kept), max(self.width, len(near))
            self.total, self.work = self.total + kept, self.work + kept * sizes[i]
            self.order.append((i, tuple(sorted(near))))
        self.left = sorted(around)
        self.fits = not around

    @classmethod
    def of(cls, core: PresolvedProblem) -> Elimination:
        """Return the elimination of a core's live nodes, numbered in order."""
        nodes = sorted(core.live)
        index = {i: n for n, i in enumerate(nodes)}
        edges = [
            (index[i], index[j], core.near[i][j])
            for i in nodes
            for j in sorted(core.near[i])
            if i < j
        ]
        return cls([len(core.costs[i]) for i in nodes], edges, range(len(nodes)))

    def run(self, costs: Sequence[Array]) -> tuple[float, dict[int, int]]:
        """Return the minimum cost and a choice that attains it, for these costs by node.

        Returns (inf, {}) where no choice has a finite cost.
        """
        held: dict[int, list[tuple[tuple[int, ...], Array]]] = {i: [] for i, _ in self.order}
        rank = {i: n for n, (i, _) in enumerate(self.order)}
        for i, j, table in self.edges:
            held[i if rank[i] < rank[j] else j].append(((i, j), table))
        total = 0.0
        for i, near in self.order:
            table = self.minimised(i, near, costs[i], held[i])
            if near:
                held[min(near, key=rank.__getitem__)].append((near, table))
            else:
                total += float(table)
        if not math.isfinite(total):
            return math.inf, {}
        choice: dict[int, int] = {}
        for i, _ in reversed(self.order):
            row = costs[i]
            for scope, table in held[i]:
                row = row + table[tuple(slice(None) if n == i else choice[n] for n in scope)]
            choice[i] = int(row.argmin())
        return total, choice

    def minimised(
        self, i: int, near: tuple[int, ...], costs: Array, held: list[tuple[tuple[int, ...], Array]]
    ) -> Array:
        """Return the minimum over the strategies of node i, as a table over the nodes `near`.

        It minimises the sum of the node's costs and of the tables `held` that contain the node.
        """
        axis = {n: k + 1 for k, n in enumerate(near)}
        axis[i] = 0
        parts = []
        for scope, table in held:
            order = sorted(range(len(scope)), key=lambda k: axis[scope[k]])
            shape = [1] * (len(near) + 1)
            for n in scope:
                shape[axis[n]] = self.sizes[n]
            parts.append(table.transpose(order).reshape(shape))
        shape = [self.sizes[n] for n in near]
        parts.sort(key=lambda part: part.size)
        if math.prod(shape) * len(costs) <= WHOLE:
            whole = costs.reshape([-1] + [1] * len(near))
            for part in parts:
                whole = whole + part
            least: Array = whole.min(0)
            return np.broadcast_to(least, shape) if list(least.shape) != shape else least
        least = np.full(shape, np.inf)
        for k in range(len(costs)):
            layer = costs[k] + np.zeros([1] * len(near))
            for part in parts:
                layer = layer + part[k]
            np.minimum(least, layer, out=least)
        return least
