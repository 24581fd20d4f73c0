"""Tests of the solver on hard numbers: limits that floats just reach, and proofs within another
solver's tolerance. Equal layers are reduced once."""

from __future__ import annotations

import itertools
import random
import sys
import time

import numpy as np
import pytest

from globaltensor.auto.solver import Problem, solve
from globaltensor.auto.solver.dual_ascent import Ascent
from globaltensor.auto.solver.flat_arrays import FlatProblem
from globaltensor.auto.solver.incumbent import SearchState
from globaltensor.auto.solver.presolve import core_of, presolve

MODULE = sys.modules[solve.__module__]


@pytest.mark.parametrize("seed", range(25))
def test_a_limit_of_broken_numbers_is_kept_where_it_is_just_reached(seed: int) -> None:
    """A limit equal to the minimum peak can be met, although floats do not add up the usages
    exactly."""
    draw = random.Random(seed)
    problem = Problem("broken")
    sizes = [draw.randint(1, 3) for _ in range(draw.randint(2, 5))]
    for size in sizes:
        uses = [
            ((draw.randint(0, 2), draw.randint(3, 5)), [draw.random() for _ in range(size)])
            for _ in range(2)
        ]
        problem.node([draw.randint(0, 9) for _ in range(size)], uses)
    every = list(itertools.product(*map(range, sizes)))
    problem.usage_limit = min(problem.peak(choice) for choice in every)
    found = solve(problem)
    assert found.optimal
    assert found.cost == min(problem.evaluate(choice) for choice in every if problem.fits(choice))


def test_what_highs_takes_for_feasible_is_no_proof() -> None:
    """A solution that HiGHS accepts as feasible is no proof. Two bytes above 80 GiB are within
    HiGHS's tolerance, but not within the limit."""
    limit = 80 << 30
    problem = Problem("close", usage_limit=limit)
    problem.node([0, 10], [((0, 1), [limit // 2 + 1, 0])])
    problem.node([0, 7], [((0, 1), [limit // 2, 0])])
    core = core_of(problem)
    search = SearchState(problem, time.monotonic(), time.monotonic() + 60)
    flat = FlatProblem(core)
    ascent = Ascent(flat)
    ascent.run(search.deadline, 1)
    assert MODULE.finish(search, core, flat, ascent)
    assert search.cost == 7


def test_equal_layers_are_reduced_once() -> None:
    """Equal layers are reduced once. Forty layers need the work of twenty, except for the chain of
    layers."""

    def asked(layers: int) -> int:
        draw, problem = np.random.default_rng(0), Problem("layers")
        costs, tables = draw.integers(0, 99, (5, 6)), draw.integers(0, 99, (4, 6, 6))
        last = problem.node(costs[0])
        for _ in range(layers):
            inner = [problem.node(c) for c in costs[1:4]]
            following = problem.node(costs[4])
            for i, j, k in (
                (last, inner[0], 0),
                (last, inner[1], 1),
                (inner[0], inner[2], 2),
                (inner[1], inner[2], 3),
                (inner[2], following, 0),
            ):
                problem.edge(i, j, tables[k])
            last = following
        core = presolve(core_of(problem))
        assert not core.live
        return core.shared.made

    few, many = asked(20), asked(40)
    assert many - few <= 8 * 20, (
        "a chain of layers adds a few steps for each; anew they would take thirty"
    )
