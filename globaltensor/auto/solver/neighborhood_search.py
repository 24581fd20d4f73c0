"""Better choices by solving large parts of a core exactly while the rest stays: what stays is drawn
so that the parts are narrow enough to eliminate."""

from __future__ import annotations

import heapq
import math

import numpy as np

from .flat_arrays import FlatProblem
from .local_search import LocalSearch
from .problem import Array
from .recombine import mix
from .variable_elimination import Elimination

#: Entries of a table in the elimination of a part.
CAP = 20_000


class NeighborhoodSearch:
    """Moves of many nodes of a core at once, from a feasible choice to a feasible and better
    one."""

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
        """Nodes whose part of the graph can be eliminated with tables of `cap` entries; drawn anew
        each time."""
        around = {i: set(near) for i, near in enumerate(self.around)}
        limit = math.log(cap)
        logs = self.logs
        heap = [(sum(logs[j] for j in near), i) for i, near in around.items()]
        heapq.heapify(heap)
        taken = []
        while around:
            while heap:
                size, i = heapq.heappop(heap)
                near = around.get(i)
                if near is None:
                    continue
                now = sum(logs[j] for j in near)
                if now > size + 1e-9:
                    if now <= limit:
                        heapq.heappush(heap, (now, i))
                    continue
                if now > limit:
                    continue
                del around[i]
                taken.append(i)
                for j in near:
                    around[j] |= near
                    around[j] -= {i, j}
                for j in near:
                    now = sum(logs[n] for n in around[j])
                    if now <= limit:
                        heapq.heappush(heap, (now, j))
            if not around:
                break
            # some of what is left stays as it is: drawn, the well connected more often
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
                near = around.pop(i)
                for j in near:
                    around[j].discard(i)
                for j in near:
                    now = sum(logs[n] for n in around[j])
                    if now <= limit:
                        heapq.heappush(heap, (now, j))
        return taken

    def given(self, free: Array) -> Array:
        """What the strategies of free nodes cost next to the nodes that stay."""
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
        """The choice that is best at these prices with some nodes left as `local` has them; memory
        is not looked at."""
        flat = self.flat
        nodes = self.free(cap)
        free = np.zeros(len(flat.nodes), dtype=bool)
        free[nodes] = True
        inside = [edge for edge in self.edges if free[edge[0]] and free[edge[1]]]
        elimination = Elimination(flat.size.tolist(), inside, nodes, cap * 50)
        costs = np.split(self.given(free) + flat.prices(price), flat.first[1:-1])
        _, found = elimination.run(costs)
        choice = self.local.choice.copy()
        for i, k in found.items():
            choice[i] = k
        return choice

    def improve(self, start: Array, price: Array, deadline: float, cap: int = CAP) -> Array:
        """One move from a feasible choice, made feasible again as a whole or part by part: a choice
        that is feasible and no worse."""
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
