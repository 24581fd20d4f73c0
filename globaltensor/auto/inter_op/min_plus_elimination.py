"""Exact min-plus elimination: minimise a sum of tables over all but some of their variables.

`segment_cost` calls it, and reads the minimising options back. The arrays are NumPy's; nothing here
knows about tensors.

A variable is a number with a number of options. A factor is a table over a few variables.
Eliminating a variable joins the tables that contain it, and stores the minimum of each row and its
position (Bertele & Brioschi, Nonserial Dynamic Programming, 1972).

`solver.variable_elimination` does the same for another purpose. Its tables join two nodes each, it
eliminates every node, and it reuses one order for many costs. Here factors have any number of
variables, and every call finds its own order. Some variables remain, so the result is a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = ["Eliminated", "Factor", "TooWide", "eliminate"]

Array = np.ndarray[Any, np.dtype[Any]]
Factor = tuple[tuple[int, ...], Array]
# maximum entries of a table that is stored until options are asked for: finding the minimum is
# quick, finding its position is not
_LATER: Final = 1 << 18


class TooWide(Exception):
    """An error where a joined table would be larger than allowed."""


@dataclass(frozen=True)
class Eliminated:
    """The result of an elimination.

    ``values`` is the minimum sum for each combination of the variables in ``keep``, in their order.
    ``records`` has an entry for each eliminated variable, in order: the variable, the variables
    that its best option depends on, and a table. The table has the minimised sum for each option of
    the variable (first axis) and of the others. For a wide table only the best option is stored.
    """

    keep: tuple[int, ...]
    values: Array
    records: tuple[tuple[int, tuple[int, ...], Array], ...]

    def choices(self) -> dict[int, Array]:
        """Map each variable to its best option for each combination of the kept variables.

        Each entry is an array of the shape of ``values``.
        """
        grid = np.indices(self.values.shape)
        option_of: dict[int, Array] = {v: grid[k] for k, v in enumerate(self.keep)}
        for variable, others, table in reversed(self.records):
            where = tuple(option_of[v] for v in others)
            if table.ndim == len(others):
                best = table[where]
            elif others and self.values.size * len(table) < table.size:
                best = table[(slice(None), *where)].argmin(0)
            else:
                best = table.argmin(0)[where]
            option_of[variable] = np.broadcast_to(best, self.values.shape)
        return option_of


def eliminate(
    sizes: Mapping[int, int], factors: Sequence[Factor], keep: Sequence[int], most: int = 1 << 26
) -> Eliminated:
    """Minimise the sum of ``factors`` over all variables of ``sizes`` except ``keep``.

    Raises TooWide if a joined table would have more than ``most`` entries.
    """
    order = _order(
        tuple(variables for variables, _ in factors), tuple(sorted(sizes.items())), tuple(keep)
    )
    widest = max((math.prod(join.shape) for join in order[:-1]), default=0)
    if widest > most:
        raise TooWide(f"a table of {widest} entries")
    tables, records = [table for _, table in factors], []
    for join in order[:-1]:
        joined = _join(tables, join)
        tables.append(joined.min(0))
        records.append(
            (
                join.variables[0],
                join.variables[1:],
                joined if joined.size <= _LATER else np.asarray(joined.argmin(0)),
            )
        )
    return Eliminated(tuple(keep), _join(tables, order[-1]), tuple(records))


class _Join(NamedTuple):
    """A sum of tables: its variables, its shape, and the tables.

    Each table is its number, the order in which its dims have to come, and its shape among these
    variables.
    """

    variables: tuple[int, ...]
    shape: tuple[int, ...]
    tables: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


@lru_cache(maxsize=1 << 10)
def _order(
    stands: tuple[tuple[int, ...], ...], of: tuple[tuple[int, int], ...], keep: tuple[int, ...]
) -> tuple[_Join, ...]:
    """Find the elimination order: a join for each variable in turn, and one for the kept variables.

    The eliminated variable comes first among the variables of its join. Each join makes one more
    table, over all of its variables except the first. The next variable is always the one with the
    smallest join.
    """
    sizes, tables = dict(of), list(stands)
    inside: dict[int, set[int]] = {v: set() for v in sizes}
    for number, variables in enumerate(tables):
        for v in variables:
            inside[v].add(number)

    def around(v: int) -> set[int]:
        return {u for number in inside[v] for u in tables[number]} - {v}

    def entries(v: int) -> int:
        return math.prod(sizes[u] for u in near[v]) * sizes[v]

    def join(variables: tuple[int, ...], numbers: Iterable[int]) -> _Join:
        operands = []
        for number in sorted(numbers, key=lambda n: (math.prod(sizes[v] for v in tables[n]), n)):
            have = tables[number]
            places = sorted(range(len(have)), key=lambda k: variables.index(have[k]))
            operands.append(
                (number, tuple(places), tuple(sizes[v] if v in have else 1 for v in variables))
            )
        return _Join(variables, tuple(sizes[v] for v in variables), tuple(operands))

    left = set(sizes) - set(keep)
    near = {v: around(v) for v in left}
    weight = {v: entries(v) for v in left}
    steps, standing = [], set(range(len(tables)))
    while left:
        v = min(left, key=lambda u: (weight[u], u))
        others = tuple(sorted(near[v]))
        gone = inside.pop(v)
        steps.append(join((v, *others), gone))
        standing = standing - gone | {len(tables)}
        left.discard(v)
        for u in others:
            inside[u] = inside[u] - gone | {len(tables)}
        tables.append(others)
        for u in others:
            if u in left:
                near[u] = around(u)
                weight[u] = entries(u)
    return *steps, join(keep, standing)


def _join(tables: Sequence[Array], join: _Join) -> Array:
    """Return the sum of the tables. Small tables are added to each other before the wide ones."""
    total: Array = np.zeros([1] * len(join.shape))
    for number, places, shape in join.tables:
        total = np.add(total, tables[number].transpose(places).reshape(shape), order="C")
    return total if total.shape == join.shape else np.broadcast_to(total, join.shape)
