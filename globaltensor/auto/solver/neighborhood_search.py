"""Large neighbourhood search: solve large parts of a core exactly while the rest is fixed.

The fixed nodes are drawn at random until the free parts are narrow enough to eliminate.
`solve.ascend` calls it.
"""

from __future__ import annotations

import math

import numpy as np

from .flat_arrays import FlatProblem
from .local_search import LocalSearch
from .problem import Array
from .recombine import mix
from .variable_elimination import Elimination, EliminationGraph

#: The maximum number of table entries in the elimination of the free nodes.
CAP = 20_000


class NeighborhoodSearch:
    """A search whose moves change many nodes at once, from a feasible choice to a better one."""

    def __init__(self, flat: FlatProblem, local: LocalSearch, seed: int) -> None:
        self.flat, self.local = flat, local
        self.random = np.random.default_rng(seed)
        self.logs = [math.log(size) for size in flat.size.tolist()]
        self.around: list[set[int]] = [set() for _ in flat.nodes]
        for i, j in zip(flat.head.tolist(), flat.tail.tolist(), strict=True):
            self.around[i].add(j)
            self.around[j].add(i)
        cuts = list(
            zip(
                flat.at[:-1].tolist(),
                flat.at[1:].tolist(),
                flat.head.tolist(),
                flat.tail.tolist(),
                strict=True,
            )
        )
        self.edges = [
            (i, j, flat.table[a:b].reshape(flat.size[i], flat.size[j])) for a, b, i, j in cuts
        ]

    def free(self, cap: int) -> list[int]:
        """Return nodes whose subgraph can be eliminated with tables of at most `cap` entries.

        The result is drawn again at each call.
        """
        around = {i: set(near) for i, near in enumerate(self.around)}
        graph = EliminationGraph(around, self.logs, math.log(cap))
        taken: list[int] = []
        while True:
            taken.extend(i for i, _, _ in graph.eliminate())
            if not around:
                return taken
            # fix some of the remaining nodes, drawn with a higher probability if they have more
            # neighbours
            left = np.array(sorted(around))
            weight = np.array([len(around[i]) for i in left.tolist()], dtype=np.float64)
            weight /= weight.sum()
            count = max(1, len(left) // 10)
            for i in self.random.choice(
                left,
                size=min(count, int((weight > 0).sum()) or 1),
                replace=False,
                p=weight if weight.all() else None,
            ).tolist():
                graph.remove(i)

    def conditional_costs(self, free: Array) -> Array:
        """Return the costs of free nodes' strategies, edges to the fixed nodes included."""
        flat, local = self.flat, self.local
        lengths = np.diff(local.cut)
        stays = np.repeat(~free, lengths)
        k = np.repeat(local.choice, lengths)[stays]
        return flat.cost + np.bincount(
            local.theirs[stays],
            local.tables[local.at[stays] + k * local.stride[stays]],
            len(flat.cost),
        )

    def move(self, price: Array, cap: int = CAP) -> Array:
        """Return the choice that is best at these prices with some nodes fixed as in `local`.

        The memory limit is not enforced.
        """
        flat = self.flat
        nodes = self.free(cap)
        free = np.zeros(len(flat.nodes), dtype=bool)
        free[nodes] = True
        inside = [edge for edge in self.edges if free[edge[0]] and free[edge[1]]]
        elimination = Elimination(flat.size.tolist(), inside, nodes, cap * 50)
        costs = np.split(self.conditional_costs(free) + flat.prices(price), flat.first[1:-1])
        _, found = elimination.run(costs)
        choice = self.local.choice.copy()
        for i, k in found.items():
            choice[i] = k
        return choice

    def improve(self, start: Array, price: Array, deadline: float, cap: int = CAP) -> Array:
        """Make one move from a feasible choice, and return a choice that is feasible and no worse.

        The move is made feasible again in full, or applied part by part.
        """
        local = self.local
        local.set(start)
        before = local.value
        target = self.move(price, cap)
        local.set(target)
        if local.repair(deadline):
            local.descend(deadline)
            if local.value < before - 1e-12 * abs(before):
                return local.choice.copy()
        local.set(start)
        mix(local, target, deadline)
        local.descend(deadline)
        return local.choice.copy()
