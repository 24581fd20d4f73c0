"""Sums of tables over common variables, minimised over all but some of them: exact min-plus elimination, with the way back. Pure arrays.

Variables are numbers with a number of options each; a factor is a table over a few of them. Eliminating a variable joins the tables that it stands in and
keeps the least of each row, and where it was (Bertele & Brioschi, Nonserial Dynamic Programming, 1972).

`solver.eliminate` does the same to another end: its tables join two nodes each, it leaves none standing, and its order is found once and run for many costs.
Here factors are of any number of variables, some variables are kept, so that the answer is a table, and every call finds its own order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Eliminated", "Factor", "TooWide", "eliminate"]

Array = np.ndarray[Any, np.dtype[Any]]
Factor = tuple[tuple[int, ...], Array]


class TooWide(Exception):
    """A joined table would be larger than allowed."""


@dataclass(frozen=True)
class Eliminated:
    """``values``: the least sum for each combination of the variables kept, in their order. ``records``: what was eliminated, in order, with the variables
    that its best option depends on."""

    keep: tuple[int, ...]
    values: Array
    records: tuple[tuple[int, tuple[int, ...], Array], ...]

    def choices(self) -> dict[int, Array]:
        """variable -> its best option for each combination of those kept (arrays of the shape of ``values``)."""
        grid = np.indices(self.values.shape)
        found: dict[int, Array] = {v: grid[k] for k, v in enumerate(self.keep)}
        for variable, others, best in reversed(self.records):
            found[variable] = best[tuple(found[v] for v in others)] if others else np.broadcast_to(best, self.values.shape)
        return found


def eliminate(sizes: Mapping[int, int], factors: Sequence[Factor], keep: Sequence[int], most: int = 1 << 26) -> Eliminated:
    """Minimise the sum of ``factors`` over all variables of ``sizes`` but ``keep``. Raises TooWide beyond ``most`` entries of a joined table."""
    tables: dict[int, Factor] = dict(enumerate(factors))
    inside: dict[int, set[int]] = {v: set() for v in sizes}
    for number, (variables, _) in tables.items():
        for v in variables:
            inside[v].add(number)
    next_number, records = len(tables), []
    left = set(sizes) - set(keep)
    near = {v: _near(v, inside, tables) for v in left}
    weight = {v: math.prod(sizes[n] for n in near[v]) * sizes[v] for v in left}
    while left:
        v = min(left, key=lambda u: (weight[u], u))
        if weight[v] > most:
            raise TooWide(f"a table of {weight[v]} entries")
        others = tuple(sorted(near[v]))
        joined = _join([tables.pop(n) for n in sorted(inside[v])], (*others, v), sizes)
        best = joined.argmin(-1)
        least = np.take_along_axis(joined, best[..., None], -1)[..., 0]
        records.append((v, others, best))
        left.discard(v)
        gone = inside.pop(v)
        tables[next_number] = (others, least)
        for u in others:
            inside[u] -= gone
            inside[u].add(next_number)
        next_number += 1
        for u in others:
            if u in left:
                near[u] = _near(u, inside, tables)
                weight[u] = math.prod(sizes[n] for n in near[u]) * sizes[u]
    return Eliminated(tuple(keep), _join(list(tables.values()), tuple(keep), sizes), tuple(records))


def _near(v: int, inside: Mapping[int, set[int]], tables: Mapping[int, Factor]) -> set[int]:
    return {u for number in inside[v] for u in tables[number][0]} - {v}


def _join(factors: Sequence[Factor], variables: tuple[int, ...], sizes: Mapping[int, int]) -> Array:
    """The sum of tables, over these variables."""
    total = np.zeros([sizes[v] for v in variables])
    for have, table in sorted(factors, key=lambda f: f[1].size):
        order = sorted(range(len(have)), key=lambda k: variables.index(have[k]))
        shape = [sizes[v] if v in have else 1 for v in variables]
        total += table.transpose(order).reshape(shape)
    return total
