"""The memory limit that would be feasible, for problems where no choice fits.

It is the minimum peak usage over all choices without forbidden entries. `solve` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .problem import FORBIDDEN, Array, Number, Problem
from .solution import Solution

#: The exact minimum peak is searched for problems with at most this many nodes.
EXACT = 100

Solve = Callable[[Problem, float], Solution]


def minimum_memory(problem: Problem, solve: Solve, deadline: float) -> tuple[Number, Number] | None:
    """Return (the lowest peak found, a lower bound of the minimum peak).

    Both are equal where there was enough time. The result is None where every choice takes a
    forbidden entry. The search bisects over limits, for large problems to a relative 1e-3.
    `solve(problem, seconds)` decides whether a limit is feasible.
    """
    thrifty = replace(problem, costs=[], tables=[], usage_limit=None)
    shared: dict[int, Array] = {}
    thrifty.tables = [
        shared.setdefault(id(table), forbidden_only(table)) for table in problem.tables
    ]
    for costs, uses in zip(problem.costs, problem.usages, strict=True):
        # A strategy's cost is its memory usage here, so that the first choice found uses little
        # memory.
        taken = (
            np.sum(
                [use.amounts * span(use.start, use.end) for use in uses], axis=0, dtype=np.float64
            )
            if uses
            else np.zeros(len(costs))
        )
        thrifty.costs.append(np.where(np.isinf(as_costs(costs)), np.inf, taken))
    found = solve(thrifty, max(deadline - time.monotonic(), 0.1))
    if found.choice is None:
        return None
    high, low = problem.peak(found.choice), floor(problem)
    whole = isinstance(high, int)
    close = 1e-3 if len(problem.costs) > EXACT else 0.0 if whole else 1e-9
    while high - low > close * high and time.monotonic() < deadline:
        middle = (int(low) + int(high)) // 2 if whole else (low + high) / 2
        tried = solve(replace(thrifty, usage_limit=middle), deadline - time.monotonic())
        if tried.choice is not None:
            high = problem.peak(tried.choice)
        elif tried.infeasible:
            low = middle + 1 if whole else middle
        else:
            break
    return high, min(low, high)


def floor(problem: Problem) -> Number:
    """Return a lower bound of the peak: every usage at its minimum over the node's strategies."""
    best = [[int(use.amounts.argmin()) for use in uses] for uses in problem.usages]
    separate = Problem(problem.name)
    for uses, at in zip(problem.usages, best, strict=True):
        for use, k in zip(uses, at, strict=True):
            separate.node(
                [0],
                [
                    (
                        None if use.start is None or use.end is None else (use.start, use.end),
                        use.amounts[k : k + 1],
                    )
                ],
            )
    return separate.peak([0] * len(separate.costs))


def span(start: int | None, end: int | None) -> float:
    return 1.0 if start is None or end is None else float(max(end - start, 0))


def as_costs(costs: Array) -> Array:
    return costs if costs.dtype.kind == "f" else np.where(costs >= FORBIDDEN, np.inf, 0.0)


def forbidden_only(table: Array) -> Array:
    return np.where(np.isinf(as_costs(table)), np.inf, 0.0)
