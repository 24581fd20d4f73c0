"""The problem that the solver solves: nodes with strategies, node and edge costs, memory over time.

`auto/intra_op/formulate.py` builds problems, and `problem_io` reads and writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import ProblemError

Array: TypeAlias = npt.NDArray[Any]
Number: TypeAlias = "int | float"
#: An integer cost of at least this is forbidden, like inf among floats.
FORBIDDEN = 10**18


class Usage(NamedTuple):
    """The memory that a node uses while it is live: one amount per strategy.

    It is in use at start <= t < end, or at all times where both are None.
    """

    start: int | None
    end: int | None
    amounts: Array


@dataclass(eq=False)
class Problem:
    """A problem to choose one strategy per node, at minimum cost and within a memory limit.

    The cost is the sum of node and edge costs. Memory usage must never exceed `usage_limit`.

    Build it with `node` and `edge`:

    >>> p = Problem("two", usage_limit=6)
    >>> a = p.node([1, 10], usage=[((0, 2), [5, 1])])
    >>> b = p.node([2, 20, 0], usage=[((1, 3), [5, 1, 9])])
    >>> p.edge(a, b, [[0, 100, 1000], [3, 200, 2000]])
    >>> p.evaluate([1, 0]), p.peak([1, 0]), p.fits([0, 0])
    (15, 6, False)

    Costs are integers (int64; 10**18 or more is forbidden) or floats (inf is forbidden). Several
    edges between the same nodes add up. Arrays that are passed in are not copied: do not write to
    them afterwards.
    """

    name: str = ""
    usage_limit: Number | None = None
    costs: list[Array] = field(default_factory=list)
    usages: list[list[Usage]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    tables: list[Array] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    labels: list[list[str] | None] = field(default_factory=list)
    #: Arrays that were already checked, by identity: as numbers, and as amounts of memory. Many
    #: nodes and edges share theirs.
    _sound: dict[int, Array] = field(default_factory=dict, init=False, repr=False)
    _amounts: dict[int, Array] = field(default_factory=dict, init=False, repr=False)

    def node(
        self,
        costs: Sequence[Number] | Array,
        usage: Iterable[tuple[tuple[int, int] | None, Sequence[Number] | Array]] = (),
        name: str | None = None,
        labels: Sequence[str] | None = None,
    ) -> int:
        """Add a node and return its number.

        `costs` has one entry per strategy. `usage` lists ((start, end), amounts). The amounts (one
        per strategy, at least 0) are in use at start <= t < end, or always where the interval is
        None. Intervals of one node may overlap; their amounts add up. Raises ProblemError where
        lengths differ, a node has no strategy, or a value is not a valid number.
        """
        where = f"node {len(self.costs)}" + (f" ({name})" if name else "")
        row = self._numbers(costs, "the costs of", where)
        if row.ndim != 1 or not len(row):
            raise ProblemError(
                f"{where} needs a flat list of at least one cost, one a strategy; it has shape "
                f"{row.shape}"
            )
        if labels is not None and len(labels) != len(row):
            raise ProblemError(
                f"{where} has {len(row)} costs and {len(labels)} labels: give one label a strategy"
            )
        uses = []
        for interval, amounts in usage:
            taken = self._numbers(amounts, "the usage of", where)
            if taken.shape != row.shape:
                raise ProblemError(
                    f"{where} has {len(row)} costs and usages of shape {taken.shape}: give one "
                    f"usage a strategy"
                )
            if self._amounts.get(id(taken)) is not taken:
                if not np.isfinite(taken).all() or (taken < 0).any():
                    raise ProblemError(
                        f"the usage of {where} must be finite and at least 0; forbid a strategy "
                        f"by its cost"
                    )
                if taken is amounts:
                    self._amounts[id(taken)] = taken
            start, end = interval or (None, None)
            uses.append(Usage(start, end, taken))
        self.costs.append(row)
        self.usages.append(uses)
        self.names.append(name)
        self.labels.append(None if labels is None else list(labels))
        return len(self.costs) - 1

    def edge(self, i: int, j: int, table: Sequence[Sequence[Number]] | Array) -> None:
        """Add `table[k][l]` to the cost where node i has strategy k and node j has strategy l.

        The same array object may serve many edges. Raises ProblemError where a node is unknown, i
        is j, or the table has another shape.
        """
        for end in (i, j):
            if not 0 <= end < len(self.costs):
                raise ProblemError(
                    f"edge ({i}, {j}): there is no node {end}; the nodes are 0 to "
                    f"{len(self.costs) - 1}"
                )
        if i == j:
            raise ProblemError(
                f"edge ({i}, {j}) joins a node with itself: add it to the costs of the node"
            )
        costs = self._numbers(table, "the table of edge", (i, j))
        if costs.shape != (len(self.costs[i]), len(self.costs[j])):
            raise ProblemError(
                f"edge ({i}, {j}) needs a table of {len(self.costs[i])} x {len(self.costs[j])} "
                f"costs, it has shape {costs.shape}"
            )
        self.edges.append((i, j))
        self.tables.append(costs)

    def _numbers(self, values: Any, what: str, where: Any) -> Array:
        known = self._sound.get(id(values))
        if known is not None and known is values:
            return known
        row = numbers(values, f"{what} {where}")
        if row is values:
            self._sound[id(row)] = row
        return row

    @property
    def integral(self) -> bool:
        """True if all costs are integers, so that every sum is exact."""
        return all(row.dtype.kind == "i" for row in self.costs) and all(
            table.dtype.kind == "i" for table in self.tables
        )

    def evaluate(self, choice: Sequence[int]) -> Number:
        """Return the exact cost of a choice, or inf where it takes a forbidden entry.

        The result is an int where all costs are integers, else the float nearest to the sum. Raises
        ProblemError where the choice is invalid.
        """
        self.check(choice)
        picked = [row[k].item() for row, k in zip(self.costs, choice, strict=True)]
        picked += [
            table[choice[i], choice[j]].item()
            for (i, j), table in zip(self.edges, self.tables, strict=True)
        ]
        if any(is_forbidden(cost) for cost in picked):
            return math.inf
        return sum(picked) if all(type(cost) is int for cost in picked) else math.fsum(picked)

    @property
    def ceiling(self) -> Number | None:
        """The memory limit that is enforced.

        It is a relative 1e-9 above `usage_limit` where usages are not whole numbers, because their
        sums are not exact.
        """
        if self.usage_limit is None or all(
            np.array_equal(use.amounts, np.rint(use.amounts))
            for uses in self.usages
            for use in uses
        ):
            return self.usage_limit
        return self.usage_limit * (1 + 1e-9)

    def usage(self, choice: Sequence[int]) -> list[tuple[int | None, Number]]:
        """Return the exact usage over time as (time, usage from then until the next time).

        The first time is None where all usage is constant. Raises ProblemError where the choice is
        invalid.
        """
        self.check(choice)
        always: Number | Fraction = 0
        floats = any(use.amounts.dtype.kind == "f" for uses in self.usages for use in uses)
        change: dict[int, Number | Fraction] = {}
        for uses, k in zip(self.usages, choice, strict=True):
            for start, end, amounts in uses:
                amount = exact(amounts[k].item())
                if start is None or end is None:
                    always += amount
                elif start < end:
                    change[start] = change.get(start, 0) + amount
                    change[end] = change.get(end, 0) - amount
        if not change:
            return [(None, float(always) if floats else int(always))]
        rows: list[tuple[int | None, Number]] = []
        for moment in sorted(change):
            always += change[moment]
            rows.append((moment, float(always) if floats else int(always)))
        return rows

    def peak(self, choice: Sequence[int]) -> Number:
        """Return the highest usage at any time, exact."""
        return max(level for _, level in self.usage(choice))

    def fits(self, choice: Sequence[int]) -> bool:
        """Return True if a choice stays within the limit and takes no forbidden entry.

        Where usages are not whole numbers, the limit may be exceeded by a relative 1e-9
        (`ceiling`).
        """
        limit = self.ceiling
        return (limit is None or self.peak(choice) <= limit) and self.evaluate(choice) < math.inf

    def check(self, choice: Sequence[int]) -> None:
        """Raise ProblemError unless the choice has exactly one existing strategy per node."""
        if len(choice) != len(self.costs):
            raise ProblemError(
                f"the choice has {len(choice)} strategies for {len(self.costs)} nodes"
            )
        for i, k in enumerate(choice):
            if not 0 <= k < len(self.costs[i]):
                raise ProblemError(
                    f"node {i} has no strategy {k}; it has 0 to {len(self.costs[i]) - 1}"
                )


def numbers(values: Any, what: str) -> Array:
    """Return the values as an int64 or float64 array, without a copy where they are one already.

    Raises ProblemError where a value is not a number, is nan or minus infinity, or does not fit.
    """
    try:
        row = np.asarray(values)
        if row.dtype.kind not in "iuf":
            raise TypeError
        if row.dtype.kind == "u" and row.size and row.max() > np.iinfo(np.int64).max:
            raise OverflowError
        row = row.astype(np.float64 if row.dtype.kind == "f" else np.int64, copy=False)
    except (TypeError, ValueError, OverflowError):
        raise ProblemError(
            f"{what} must be numbers that fit 64 bits, all integers or floats: {str(values)[:80]}"
        ) from None
    # The minimum of an array with a nan is nan.
    if row.dtype.kind == "f" and row.size and not row.min() > -math.inf:
        raise ProblemError(f"{what} contain nan or minus infinity")
    return row


def is_forbidden(cost: Number) -> bool:
    return cost >= FORBIDDEN if type(cost) is int else cost == math.inf


def exact(amount: Number) -> Number | Fraction:
    """Return an int or a Fraction equal to the amount, for sums without rounding."""
    return (
        amount
        if type(amount) is int
        else int(amount)
        if float(amount).is_integer()
        else Fraction(amount)
    )
