"""Min-marginals: the minimum cost with each strategy and each pair, over all other choices.

Elimination computes them in one pass up and one pass down (Shenoy and Shafer 1990, in the min-plus
semiring). `solve.dear` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .problem import Array
from .variable_elimination import Elimination

#: The maximum number of table entries, eliminated node included, that are worked through.
MAX_ENTRIES = 5e8


class Marginals(NamedTuple):
    """The min-marginals of a problem.

    `least` is the minimum cost. `nodes` has the minimum cost with each strategy of each node.
    `edges` has the minimum cost with each pair of each edge, in the elimination's order of edges.
    """

    least: float
    nodes: dict[int, Array]
    edges: list[Array]


def marginals(elimination: Elimination, costs: Sequence[Array]) -> Marginals | None:
    """Compute the min-marginals, or return None where the tables would be too large."""
    sizes, order = elimination.sizes, elimination.order
    widest = max((math.prod(sizes[n] for n in near) * sizes[i] for i, near in order), default=0)
    if not elimination.fits or elimination.work > MAX_ENTRIES or widest > MAX_ENTRIES / 20:
        return None
    rank = {i: n for n, (i, _) in enumerate(order)}
    held: dict[int, list[tuple[tuple[int, ...], Array]]] = {i: [] for i, _ in order}
    edges: dict[int, list[int]] = {i: [] for i, _ in order}
    for e, (i, j, table) in enumerate(elimination.edges):
        first = i if rank[i] < rank[j] else j
        held[first].append(((i, j), table))
        edges[first].append(e)
    up: dict[int, Array] = {}
    children: dict[int, list[int]] = {i: [] for i, _ in order}
    least = 0.0
    for i, near in order:
        up[i] = elimination.minimised(i, near, costs[i], held[i])
        if near:
            parent = min(near, key=rank.__getitem__)
            held[parent].append((near, up[i]))
            children[parent].append(i)
        else:
            least += float(up[i])
    scopes = dict(order)
    down: dict[int, Array] = {}
    of_nodes: dict[int, Array] = {}
    of_edges: list[Array] = [np.zeros(0)] * len(elimination.edges)
    for i, near in reversed(order):
        scope = (i, *near)
        belief = _spread((i,), costs[i], scope, sizes)
        for those, table in held[i]:
            belief = belief + _spread(those, table, scope, sizes)
        # costs outside this scope: on the neighbours' side of this connected component, and in the
        # other components
        belief = belief + (down[i][None] if near else least - float(up[i]))
        for child in children[i]:
            theirs = _min_over_others(belief, scope, scopes[child])
            with np.errstate(invalid="ignore"):
                down[child] = np.where(np.isfinite(theirs), theirs - up[child], np.inf)
        for e in edges[i]:
            a, b, _ = elimination.edges[e]
            of_edges[e] = _min_over_others(belief, scope, (a, b))
        of_nodes[i] = _min_over_others(belief, scope, (i,))
    return Marginals(least, of_nodes, of_edges)


def _spread(
    those: tuple[int, ...], table: Array, scope: tuple[int, ...], sizes: Sequence[int]
) -> Array:
    """Reshape a table with axes for ``those`` nodes to one with axes for all nodes of a scope."""
    order = sorted(range(len(those)), key=lambda k: scope.index(those[k]))
    return table.transpose(order).reshape([sizes[n] if n in those else 1 for n in scope])


def _min_over_others(belief: Array, scope: tuple[int, ...], those: tuple[int, ...]) -> Array:
    """Return the minimum over all nodes of a scope except ``those``, with axes in their order."""
    left = belief.min(tuple(k for k, n in enumerate(scope) if n not in those))
    kept = [n for n in scope if n in those]
    return np.asarray(left.transpose([kept.index(n) for n in those]))
