"""Path relinking: the first nodes as in one choice, the other nodes as in another choice.

It is for the minimum of the larger of two costs (`minimax`). One choice is too expensive in the
first cost, the other in the second. In a model of equal layers, an optimum for one weighted cost
has all layers alike. So have the two optima on either side of the weight at which both costs are
equal. The minimum of the larger cost has some layers sharded as in one optimum, and the rest as in
the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .problem import Problem

__all__ = ["SLIGHT", "crossing", "relink", "weighted"]

Array = np.ndarray[Any, np.dtype[Any]]
Pair = tuple[float, float]
SLIGHT = 1e-9  # a weight at which forbidden entries of either problem stay forbidden
_TRIED = 8  # the number of candidates that are checked against the memory limit


def relink(
    costs: tuple[Problem, Problem],
    before: Sequence[int],
    after: Sequence[int],
    order: Sequence[int],
) -> list[int] | None:
    """Return the best choice that is ``before`` in its first nodes and ``after`` in the others.

    The best is the one with the smallest larger cost of the two problems, which differ only in
    their costs. The result is None where none of the best candidates is allowed.

    ``order`` is the sequence of nodes. Every other node has neighbours in ``order`` only, and takes
    the strategy that suits them.

    >>> both = Problem(), Problem()
    >>> for problem, here in zip(both, ([3, 0], [0, 2]), strict=True):
    ...     nodes = [problem.node(here) for _ in range(5)]
    >>> relink(both, [0] * 5, [1] * 5, nodes)
    [0, 0, 1, 1, 1]
    """
    ends = np.array([before, after])
    low, high = (
        (float(costs[0].evaluate(choice)), float(costs[1].evaluate(choice)))
        for choice in (before, after)
    )
    weight = min(max(crossing(low, high), SLIGHT), 1 - SLIGHT)
    sums, others = [_CostByCut(len(order)) for _ in costs], {}
    rank = {node: k for k, node in enumerate(order)}
    near: dict[int, list[tuple[int, int, bool]]] = {
        node: [] for node in range(len(ends[0])) if node not in rank
    }
    for e, (i, j) in enumerate(costs[0].edges):
        if i in rank and j in rank:
            flipped = rank[i] > rank[j]
            first, last = (j, i) if flipped else (i, j)
            for problem, total in zip(costs, sums, strict=True):
                table = problem.tables[e].T if flipped else problem.tables[e]
                total.add(
                    [rank[first], rank[last]],
                    [table[ends[int(k < 1), first], ends[int(k < 2), last]] for k in range(3)],
                )
        else:
            node, call = (j, i) if i in rank else (i, j)
            near[node].append((rank[call], e, node == j))
    for node, k in rank.items():
        for problem, total in zip(costs, sums, strict=True):
            total.add([k], [problem.costs[node][ends[1, node]], problem.costs[node][ends[0, node]]])
    for node, edges in near.items():
        edges.sort()
        strategy_costs = [list(_costs_along_path(problem, node, edges, ends)) for problem in costs]
        picked = [
            int(((1 - weight) * p + weight * q).argmin())
            for p, q in zip(*strategy_costs, strict=True)
        ]
        others[node] = [k for k, _, _ in edges], picked
        for rows, total in zip(strategy_costs, sums, strict=True):
            total.add(others[node][0], [row[s] for row, s in zip(rows, picked, strict=True)])
    larger = np.maximum(sums[0].all(), sums[1].all())
    for cut in np.argsort(larger, kind="stable")[:_TRIED].tolist():
        choice = np.where(
            np.array([rank.get(node, 0) for node in range(len(ends[0]))]) < cut, ends[0], ends[1]
        )
        for node, (ranks, picked) in others.items():
            choice[node] = picked[int(np.searchsorted(ranks, cut))]
        if np.isfinite(larger[cut]) and costs[0].fits(choice.tolist()):
            return choice.tolist()  # type: ignore[no-any-return]
    return None


def crossing(low: Pair, high: Pair) -> float:
    """Return the weight of the second cost at which two choices cost the same.

    The weight of the first cost is the rest of 1. Each choice is (first cost, second cost).

    >>> crossing((1.0, 5.0), (3.0, 2.0))
    0.4
    """
    slope = (low[1] - low[0]) - (high[1] - high[0])
    return (high[0] - low[0]) / slope if slope else 0.5


def weighted(costs: tuple[Problem, Problem], at: float) -> Problem:
    """Return a problem with the weighted sums of both problems' costs.

    The second problem's costs have the weight ``at``, the first problem's 1 - ``at``.
    """
    if at in (0.0, 1.0):
        return costs[int(at)]
    known: dict[tuple[int, int], Array] = {}

    def mixed(pair: tuple[Array, Array]) -> Array:
        key = id(pair[0]), id(pair[1])
        if key not in known:  # an array shared by many edges stays shared
            known[key] = pair[0] if pair[0] is pair[1] else (1 - at) * pair[0] + at * pair[1]
        return known[key]

    nodes, edges = (
        list(map(mixed, zip(*those, strict=True)))
        for those in zip(*((p.costs, p.tables) for p in costs), strict=True)
    )
    return dataclasses.replace(costs[0], costs=nodes, tables=edges)


class _CostByCut:
    """The costs by cut, where a cut is the number of nodes, from none to all, that are as before.

    An added value holds for a range of cuts.
    """

    def __init__(self, nodes: int) -> None:
        self.steps, self.forbidden = np.zeros(nodes + 2), np.zeros(nodes + 2, dtype=int)

    def add(self, ranks: Sequence[int], values: Sequence[float]) -> None:
        """Add ``values[t]`` where t of the nodes with these increasing ranks are as before."""
        for start, end, value in zip(
            [0, *(k + 1 for k in ranks)],
            [*(k + 1 for k in ranks), len(self.steps) - 1],
            values,
            strict=True,
        ):
            into, amount = (self.steps, value) if np.isfinite(value) else (self.forbidden, 1)
            into[start] += amount
            into[end] -= amount

    def all(self) -> Array:
        return np.where(np.cumsum(self.forbidden) > 0, np.inf, np.cumsum(self.steps))[:-1]


def _costs_along_path(
    problem: Problem, node: int, edges: Sequence[tuple[int, int, bool]], ends: Array
) -> Iterator[Array]:
    """Yield a node's strategy costs with none, one, two, ... of its first neighbours as before."""
    rows = []
    for _, e, last in edges:
        i, j = problem.edges[e]
        table = problem.tables[e]
        rows.append([table[ends[s, i], :] if last else table[:, ends[s, j]] for s in (0, 1)])
    for many in range(len(edges) + 1):
        yield problem.costs[node] + sum(
            (row[int(k >= many)] for k, row in enumerate(rows)),
            start=np.zeros(len(problem.costs[node])),
        )
