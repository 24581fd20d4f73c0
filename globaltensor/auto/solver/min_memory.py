"""Which limit would do, where no choice fits: the least peak usage of any choice that takes no
forbidden entry."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .problem import FORBIDDEN, Array, Number, Problem
from .solution import Solution

#: Problems of at most so many nodes get the least peak itself.
EXACT = 100

Solve = Callable[[Problem, float], Solution]


def minimum_memory(problem: Problem, solve: Solve, deadline: float) -> tuple[Number, Number] | None:
    """(The least peak found, a lower bound of the least peak), equal where there was time enough;
    None where every choice takes a forbidden entry.

    By bisection over limits, for large problems to a thousandth; `solve(problem, seconds)` answers
    whether one can be kept.
    """
    thrifty = replace(problem, costs=[], tables=[], usage_limit=None)
    shared: dict[int, Array] = {}
    thrifty.tables = [
        shared.setdefault(id(table), forbidden_only(table)) for table in problem.tables
    ]
    for costs, uses in zip(problem.costs, problem.usages, strict=True):
        # what a strategy takes stands in for its cost, so that the first choice found is a thrifty
        # one
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
    """The peak of the least that the nodes' strategies take, each for itself."""
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
