"""Presolve of two problems that differ only in their costs.

A reduction is no loss for either problem, so it is none for the larger of both costs. Reductions
work on complex costs: one problem's costs are the real parts, the other's the imaginary parts
(`presolve.PresolvedProblem`). The result is two smaller problems. `minimax` calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .memory_presolve import tighten
from .presolve import as_floats, core_of
from .problem import Array, Problem, Usage

__all__ = ["JointPresolve"]


class JointPresolve:
    """A pair of problems that were reduced together.

    ``problems`` are the two reduced problems. Each has one extra node at the end, with one
    strategy: the cost that is always paid and the memory that is always used.

    >>> one, other = Problem(), Problem()
    >>> for problem, costs in ((one, [3, 0, 4]), (other, [0, 2, 1])):
    ...     _ = problem.node(costs)
    >>> pair = JointPresolve((one, other))
    >>> [problem.costs for problem in pair.problems]
    [[array([3., 0.]), array([0.])], [array([0., 2.]), array([0.])]]
    >>> pair.expand([1, 0])
    [1]
    """

    def __init__(self, problems: tuple[Problem, Problem], deadline: float = np.inf) -> None:
        """Reduce until nothing changes or the deadline (of `time.monotonic`) has passed."""
        joined = _ComplexPairs()
        costs, tables = (
            [joined(*both) for both in zip(*those, strict=True)]
            for those in ([p.costs for p in problems], [p.tables for p in problems])
        )
        self._core = tighten(
            core_of(dataclasses.replace(problems[0], costs=costs, tables=tables)), deadline
        )
        self._live = sorted(self._core.live)
        self.feasible = self._core.feasible
        self.problems = (
            (
                self._remaining_problem(problems[0].name, 0),
                self._remaining_problem(problems[1].name, 1),
            )
            if self.feasible
            else problems
        )

    def expand(self, choice: Sequence[int]) -> list[int]:
        """Return the choice for the original problems."""
        return self._core.expand(dict(zip(self._live, choice[: len(self._live)], strict=True)))

    def _remaining_problem(self, name: str, which: int) -> Problem:
        core, parted = self._core, _ComplexParts(which)
        place = {i: n for n, i in enumerate(self._live)}
        most = float(core.room.max(initial=0.0))
        whole = all(
            np.array_equal(amounts, np.rint(amounts))
            for amounts in [core.room, *(b.amounts for i in self._live for b in core.uses[i])]
        )
        left = Problem(name, (most if whole else most / (1 + 1e-9)) if len(core.room) else None)
        for i in self._live:
            left.costs.append(parted(core.costs[i]))
            left.usages.append([
                Usage(start, end, amounts)
                for block in core.uses[i]
                for start, end,
                amounts in zip(block.starts.tolist(), block.ends.tolist(), block.amounts,
                    strict=True)
            ])  # fmt: skip
        always = [
            ((t, t + 1), [taken])
            for t, taken in enumerate((most - core.room).tolist())
            if taken > 0
        ]
        left.names, left.labels = [None] * len(self._live), [None] * len(self._live)
        left.node([(core.constant.real, core.constant.imag)[which]], always)
        for i in self._live:
            for j, table in core.near[i].items():
                if i < j:
                    left.edges.append((place[i], place[j]))
                    left.tables.append(parted(table))
        return left


class _ComplexPairs:
    """A memo of pairs of arrays joined into one complex array.

    An entry is forbidden where it is forbidden in either array. The same two array objects always
    yield the same result object.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Array] = {}

    def __call__(self, first: Array, second: Array) -> Array:
        key = id(first), id(second)
        if key not in self._known:
            parts = as_floats(first), as_floats(second)
            never = ~(np.isfinite(parts[0]) & np.isfinite(parts[1]))
            both = np.empty(never.shape, dtype=complex)
            both.real, both.imag = (np.where(never, np.inf, part) for part in parts)
            self._known[key] = both
        return self._known[key]


class _ComplexParts:
    """A memo of one of the two parts of complex arrays, one result object per array object."""

    def __init__(self, which: int) -> None:
        self._which = which
        self._known: dict[int, Array] = {}

    def __call__(self, both: Array) -> Array:
        if id(both) not in self._known:
            self._known[id(both)] = np.ascontiguousarray(both.imag if self._which else both.real)
        return self._known[id(both)]
