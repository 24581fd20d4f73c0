"""Sums of tables over common variables, minimised over all but some of them: exact min-plus
elimination, with the way back. Pure arrays.

Variables are numbers with a number of options each; a factor is a table over a few of them.
Eliminating a variable joins the tables that it stands in and keeps the least of each row, and where
it was (Bertele & Brioschi, Nonserial Dynamic Programming, 1972).

`solver.eliminate` does the same to another end: its tables join two nodes each, it leaves none
standing, and its order is found once and run for many costs. Here factors are of any number of
variables, some variables are kept, so that the answer is a table, and every call finds its own
order.
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
# entries of a table that is kept until options are asked for: finding the least entry is quick,
# finding where it stands is not
_LATER: Final = 1 << 18


class TooWide(Exception):
    """A joined table would be larger than allowed."""


@dataclass(frozen=True)
class Eliminated:
    """``values``: the least sum for each combination of the variables kept, in their order.
    ``records``: what was eliminated, in order, the variables that its best option depends on, and
    for each of its options (first axis) and theirs the sum that is minimised, or of wide ones the
    best option alone."""

    keep: tuple[int, ...]
    values: Array
    records: tuple[tuple[int, tuple[int, ...], Array], ...]

    def choices(self) -> dict[int, Array]:
        """variable -> its best option for each combination of those kept (arrays of the shape of
        ``values``)."""
        grid = np.indices(self.values.shape)
        found: dict[int, Array] = {v: grid[k] for k, v in enumerate(self.keep)}
        for variable, others, table in reversed(self.records):
            where = tuple(found[v] for v in others)
            if table.ndim == len(others):
                best = table[where]
            elif others and self.values.size * len(table) < table.size:
                best = table[(slice(None), *where)].argmin(0)
            else:
                best = table.argmin(0)[where]
            found[variable] = np.broadcast_to(best, self.values.shape)
        return found


def eliminate(
    sizes: Mapping[int, int], factors: Sequence[Factor], keep: Sequence[int], most: int = 1 << 26
) -> Eliminated:
    """Minimise the sum of ``factors`` over all variables of ``sizes`` but ``keep``. Raises TooWide
    beyond ``most`` entries of a joined table."""
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
    """Tables that are added up: their numbers, the order that their dims are to come in, and the
    shape that they then have among these variables."""

    variables: tuple[int, ...]
    shape: tuple[int, ...]
    tables: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


@lru_cache(maxsize=1 << 10)
def _order(
    stands: tuple[tuple[int, ...], ...], of: tuple[tuple[int, int], ...], keep: tuple[int, ...]
) -> tuple[_Join, ...]:
    """What is joined for each variable in turn, it first among the variables of the join, and at
    the end for those kept. Each join makes one more table, of all its variables but the first. Next
    is always the variable whose join is smallest."""
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
        found = []
        for number in sorted(numbers, key=lambda n: (math.prod(sizes[v] for v in tables[n]), n)):
            have = tables[number]
            places = sorted(range(len(have)), key=lambda k: variables.index(have[k]))
            found.append(
                (number, tuple(places), tuple(sizes[v] if v in have else 1 for v in variables))
            )
        return _Join(variables, tuple(sizes[v] for v in variables), tuple(found))

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
    """Their sum. The small ones are added up among themselves before they meet the wide ones."""
    total: Array = np.zeros([1] * len(join.shape))
    for number, places, shape in join.tables:
        total = np.add(total, tables[number].transpose(places).reshape(shape), order="C")
    return total if total.shape == join.shape else np.broadcast_to(total, join.shape)
