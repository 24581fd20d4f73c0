"""What the solver solves: nodes with strategies, costs of nodes and edges, memory over time and its
limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from globaltensor.errors import GlobalTensorError

Array: TypeAlias = npt.NDArray[Any]
Number: TypeAlias = "int | float"
#: An integer cost from here on says "never", as inf does among floats.
FORBIDDEN = 10**18


class ProblemError(GlobalTensorError):
    """A problem that contradicts itself, or a file that holds none."""


class Usage(NamedTuple):
    """Memory a node takes while it lives: one amount a strategy, at the times start <= t < end; at
    all times where both are None."""

    start: int | None
    end: int | None
    amounts: Array


@dataclass(eq=False)
class Problem:
    """Choose one strategy a node so that the sum of node and edge costs is least and memory never
    exceeds the limit.

    Build it with `node` and `edge`:

    >>> p = Problem("two", usage_limit=6)
    >>> a = p.node([1, 10], usage=[((0, 2), [5, 1])])
    >>> b = p.node([2, 20, 0], usage=[((1, 3), [5, 1, 9])])
    >>> p.edge(a, b, [[0, 100, 1000], [3, 200, 2000]])
    >>> p.evaluate([1, 0]), p.peak([1, 0]), p.fits([0, 0])
    (15, 6, False)

    Costs are integers (int64; 10**18 or more is forbidden) or floats (inf is forbidden). Several
    edges between the same nodes add up. Arrays that are given are kept as they are: do not write to
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
    #: Arrays that have been looked through, by their identity: as numbers, and as amounts of
    #: memory. Many nodes and edges share theirs.
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

        `costs` has one entry a strategy. `usage` lists ((start, end), amounts): amounts (one a
        strategy, at least 0) are taken at start <= t < end, or always where None stands instead of
        the interval; intervals of one node may overlap, their amounts add up. Raises ProblemError
        where lengths differ, a node has no strategy, or a number is not one.
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
        """Add `table[k][l]` to the cost where node i has strategy k and node j has strategy l. The
        same array object may serve many edges.

        Raises ProblemError where a node is unknown, i is j, or the table has another shape.
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
        """Whether all costs are integers, so that every sum is exact."""
        return all(row.dtype.kind == "i" for row in self.costs) and all(
            table.dtype.kind == "i" for table in self.tables
        )

    def evaluate(self, choice: Sequence[int]) -> Number:
        """The cost of a choice, exact: an int where all costs are integers, else the float nearest
        to the sum; inf where a forbidden entry is chosen."""
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
        """The limit as it is kept: a billionth more where usages are broken numbers, for sums of
        such are not exact."""
        if self.usage_limit is None or all(
            np.array_equal(use.amounts, np.rint(use.amounts))
            for uses in self.usages
            for use in uses
        ):
            return self.usage_limit
        return self.usage_limit * (1 + 1e-9)

    def usage(self, choice: Sequence[int]) -> list[tuple[int | None, Number]]:
        """(time, usage from then until the next time), exact. The first time is None where usage is
        only ever constant."""
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
        """The highest usage at any time, exact."""
        return max(level for _, level in self.usage(choice))

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether the usage of this choice stays within the limit (to a billionth, where usages are
        no whole numbers) and it takes no forbidden entry."""
        limit = self.ceiling
        return (limit is None or self.peak(choice) <= limit) and self.evaluate(choice) < math.inf

    def check(self, choice: Sequence[int]) -> None:
        """Raises ProblemError unless this is one existing strategy a node."""
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
    """An int64 or float64 array, the same one where it is such. Raises ProblemError where a value
    is no number or does not fit."""
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
    if (
        row.dtype.kind == "f" and row.size and not row.min() > -math.inf
    ):  # the least of what has a nan is nan
        raise ProblemError(f"{what} contain nan or minus infinity")
    return row


def is_forbidden(cost: Number) -> bool:
    return cost >= FORBIDDEN if type(cost) is int else cost == math.inf


def exact(amount: Number) -> Number | Fraction:
    """For sums without rounding."""
    return (
        amount
        if type(amount) is int
        else int(amount)
        if float(amount).is_integer()
        else Fraction(amount)
    )
