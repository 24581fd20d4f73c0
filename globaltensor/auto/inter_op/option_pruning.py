"""Ways to shrink tables that would be too wide.

`segment_cost` either drops options, or decouples values from calls, so that the result is a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .min_plus_elimination import Factor

__all__ = ["Pairs", "apart", "cheapest", "some", "spread"]


class Pairs(NamedTuple):
    """A node whose options are pairs of layouts.

    ``alone`` has, for each option, the option with the same first layout and no second one.
    ``takers`` is the number of calls that take the value, ``small`` is whether the value is small.
    """

    alone: tuple[int, ...]
    takers: int
    small: bool


def some(factor: Factor, options_of: Mapping[int, Sequence[int]], ends: Sequence[int]) -> Factor:
    """Restrict a table to these options.

    A node with a single option couples nothing, so it is no longer a variable of the table.
    """
    nodes, table = factor
    for axis, n in enumerate(nodes):
        if n in options_of:
            table = table.take(options_of[n], axis)
    single = tuple(
        axis
        for axis, n in enumerate(nodes)
        if n not in ends and len(options_of.get(n, nodes + nodes)) == 1
    )
    return tuple(n for axis, n in enumerate(nodes) if axis not in single), table.squeeze(single)


def apart(factor: Factor, values: Sequence[int]) -> Factor:
    """Decouple a call from some values: each value has the layout that suits the call."""
    nodes, table = factor
    if len(nodes) < 2 or not set(nodes) & set(values):
        return factor
    axis = 0 if nodes[0] in values else 1
    return (nodes[1 - axis],), table.min(axis)


def spread(factor: Factor, factors: Sequence[Factor], single: Mapping[int, Pairs]) -> Factor:
    """Let each call pay an even share of the second layout that is best for it.

    The table is one from a value to a call that takes it. The cost is never higher than with the
    second layouts that exist.
    """
    nodes, table = factor
    if len(nodes) < 2 or nodes[0] not in single:
        return factor
    alone, takers, _ = single[nodes[0]]
    own = sum((t for n, t in factors if n == nodes[:1]), np.zeros(len(alone)))
    least = table.copy()
    np.minimum.at(least, list(alone), table + ((own - own[list(alone)]) / takers)[:, None])
    return nodes, least


def cheapest(
    node: int, factors: Sequence[Factor], most: int, options: Sequence[int] | None = None
) -> list[int]:
    """Select the first of the kept options and the cheapest others, whatever the neighbours do."""
    total: Any = 0.0
    for nodes, table in factors:
        if node in nodes:
            total = total + (table if len(nodes) == 1 else table.min(1 - nodes.index(node)))
    by_cost = [
        int(k) for k in np.argsort(total, kind="stable") if options is None or int(k) in options
    ]
    return sorted({0 if options is None else options[0], *by_cost[: most - 1]})
