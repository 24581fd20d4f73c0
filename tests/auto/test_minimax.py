"""Tests of minimizing the larger of two costs. The tests cover choices that take one end up to some
call and the other end after it, and the weights with the highest bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from test_search import layers, mesh

from globaltensor.auto.intra_op.search import search
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.solver import MinimaxSolver, Problem, solve
from globaltensor.auto.solver.joint_presolve import JointPresolve
from globaltensor.auto.solver.min_marginals import marginals
from globaltensor.auto.solver.path_relinking import crossing, relink, weighted
from globaltensor.auto.solver.presolve import core_of
from globaltensor.auto.solver.variable_elimination import Elimination
from globaltensor.cluster import Cluster


def drawn(seed: int, limit: int | None) -> tuple[tuple[Problem, Problem], list[int]]:
    """Draw two problems that differ in costs, and the order of the calls. Some entries are
    forbidden in both problems, but not all. Other nodes have only calls as neighbors."""
    draw = np.random.default_rng(seed)
    calls, others = int(draw.integers(1, 6)), int(draw.integers(0, 4))
    sizes = draw.integers(1, 4, calls + others)
    both = Problem("plain", limit), Problem("other", limit)
    usage = [draw.integers(0, 5, size) for size in sizes]
    for size, amounts in zip(sizes, usage, strict=True):
        for problem in both:
            problem.node(draw.integers(0, 9, size).astype(float), [((0, 1), amounts)])
    order = draw.permutation(calls + others)[:calls].tolist()
    for i, j in itertools.permutations(range(calls + others), 2):
        if (i in order or j in order) and draw.random() < 0.3:
            forbidden = draw.random((sizes[i], sizes[j])) < 0.1
            forbidden[0, 0] = False
            for problem in both:
                problem.edge(
                    i, j, np.where(forbidden, np.inf, draw.integers(0, 9, (sizes[i], sizes[j])))
                )
    return both, order


def limited(seed: int) -> bool:
    """Return True if the problems of a seed have a limit of memory."""
    return seed % 2 == 1


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sweep(2, kind=limited)
def test_it_is_the_best_of_all_there_are(seed: int) -> None:
    """The relinked choice is the best for any number of calls taken from the first end. The other
    nodes take the strategies that suit the weight at which the two ends cost the same."""
    both, order = drawn(seed, limit=12 if limited(seed) else None)
    sizes = [len(c) for c in both[0].costs]
    every = [
        c for c in itertools.product(*map(range, sizes)) if np.isfinite(float(both[0].evaluate(c)))
    ]
    costs = {c: tuple(float(p.evaluate(c)) for p in both) for c in every}
    before, after = (min(every, key=lambda c, k=k: (costs[c][k], c)) for k in (0, 1))  # type: ignore[misc]
    at = min(max(crossing(costs[before], costs[after]), 1e-9), 1 - 1e-9)  # type: ignore[arg-type]
    least = []
    for many in range(len(order) + 1):
        ends = {node: (before if k < many else after)[node] for k, node in enumerate(order)}
        those = [c for c in every if all(c[node] == s for node, s in ends.items())]
        if those:
            suits = min((1 - at) * costs[c][0] + at * costs[c][1] for c in those)
            least.append(
                [c for c in those if (1 - at) * costs[c][0] + at * costs[c][1] <= suits + 1e-9]
            )
    fitting = [c for ties in least for c in ties if both[0].fits(c)]
    found = relink(both, before, after, order)
    if found is None:
        assert both[0].usage_limit is not None, "before and after are allowed themselves"
        return
    assert both[0].fits(found)
    assert (
        max(costs[tuple(found)]) <= min(max(max(costs[c]) for c in ties) for ties in least) + 1e-9
        or both[0].usage_limit is not None
    )
    assert any(list(c) == found for c in fitting)


@pytest.mark.parametrize("how", ["program", "parts", "weights"])
@pytest.mark.parametrize("seed", range(100))
@pytest.mark.sweep(4, kind=lambda seed, how: (how, limited(seed)))
def test_the_least_larger_cost_is_found_and_proven(seed: int, how: str) -> None:
    """The minimum of the larger cost is found and proven against all choices, by an integer program
    and by branch and bound. Weights alone give a valid bound."""
    both, order = drawn(seed, limit=12 if limited(seed) else None)
    first = solve(both[0])
    every = [
        c for c in itertools.product(*(range(len(c)) for c in both[0].costs)) if both[0].fits(c)
    ]
    if not every:
        assert first.infeasible
        return
    larger = MinimaxSolver(
        both,
        order,
        first,
        1e-9,
        500,
        proving=how != "weights",
        program=10**6 if how == "program" else -1,
    )
    larger.run()
    least = min(max(float(p.evaluate(c)) for p in both) for c in every)
    assert both[0].fits(larger.best.whole)
    assert larger.best.cost == max(float(p.evaluate(larger.best.whole)) for p in both)
    assert larger.bound <= least * (1 + 1e-9) <= larger.best.cost * (1 + 2e-9)
    if how != "weights":
        assert larger.best.cost == pytest.approx(least, rel=1e-9)
        assert larger.bound == pytest.approx(least, rel=1e-8)


@pytest.mark.parametrize("share", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sweep(2, kind=lambda seed, share: (share, limited(seed)))
def test_only_what_costs_less_is_looked_for(seed: int, share: float) -> None:
    """`MinimaxSolver` and `solve` return the best choice if it costs less than the given value.
    Otherwise they return a bound of that value."""
    both, order = drawn(seed, limit=12 if limited(seed) else None)
    every = [
        c for c in itertools.product(*(range(len(c)) for c in both[0].costs)) if both[0].fits(c)
    ]
    if not every:
        return
    least = min(float(both[0].evaluate(c)) for c in every)
    below = least * share + 0.01
    found = solve(both[0], below=below)
    assert found.feasible == (least < below)
    assert not found.infeasible
    assert found.cost == least if found.feasible else found.bound == below
    least, first = min(max(float(p.evaluate(c)) for p in both) for c in every), solve(both[0])
    larger = MinimaxSolver(both, order, first, 1e-9, 500, below=least * share + 0.01)
    larger.run()
    assert larger.bound <= least * (1 + 1e-9)
    assert larger.bound >= min(least, least * share + 0.01) * (1 - 1e-8)
    assert share < 1 or larger.best.cost == pytest.approx(least)


@pytest.mark.parametrize("program", [10**6, -1])
def test_it_ends_where_it_may_solve_no_more(program: int) -> None:
    both, order = drawn(1, limit=None)
    first = solve(both[0])
    for most, seconds in ((0, 9.0), (1, 9.0), (500, 0.0), (2, 9.0)):
        larger = MinimaxSolver(both, order, first, 1e-9, most, seconds, program=program)
        larger.run()
        assert larger.left >= 0
        assert larger.bound <= larger.best.cost


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sweep(2, kind=limited)
def test_what_a_pair_leaves_out_is_no_loss_for_either(seed: int) -> None:
    """A joint presolve keeps the minimum cost of both problems, and of every weighting between
    them."""
    both, _ = drawn(seed, limit=12 if limited(seed) else None)
    every = [
        c for c in itertools.product(*(range(len(c)) for c in both[0].costs)) if both[0].fits(c)
    ]
    pair = JointPresolve(both)
    assert pair.feasible == bool(every)
    for at in (0.0, 0.3, 0.7, 1.0) if every else ():
        least = min(
            (1 - at) * float(both[0].evaluate(c)) + at * float(both[1].evaluate(c)) for c in every
        )
        found = solve(weighted(pair.problems, at))
        assert found.cost == pytest.approx(least)
        choice = pair.expand(found.choice or ())
        assert both[0].fits(choice)
        for problem, smaller in zip(both, pair.problems, strict=True):
            assert float(problem.evaluate(choice)) == pytest.approx(
                float(smaller.evaluate(found.choice or ()))
            )


@pytest.mark.parametrize("seed", range(40))
def test_marginals_are_what_each_strategy_and_pair_costs_at_best(seed: int) -> None:
    problem, core = drawn(seed, limit=None)[0][0], core_of(drawn(seed, limit=None)[0][0])
    every = {
        c: float(problem.evaluate(c))
        for c in itertools.product(*(range(len(c)) for c in problem.costs))
    }
    elimination = Elimination.of(core)
    found = marginals(elimination, core.costs)
    assert found is not None
    assert found.least == pytest.approx(min(every.values()))
    for node, costs in found.nodes.items():
        for k, cost in enumerate(costs):
            assert cost == pytest.approx(min(v for c, v in every.items() if c[node] == k))
    for (i, j, _), table in zip(elimination.edges, found.edges, strict=True):
        for pair in np.ndindex(table.shape):
            assert table[pair] == pytest.approx(
                min(v for c, v in every.items() if (c[i], c[j]) == pair)
            )


@pytest.mark.parametrize("at", [0.0, 0.3, 1.0])
def test_weights_are_of_all_costs(at: float) -> None:
    both, _ = drawn(3, limit=None)
    sizes = [len(c) for c in both[0].costs]
    one = weighted(both, at)
    for choice in itertools.product(*map(range, sizes)):
        plain, other = (float(p.evaluate(choice)) for p in both)
        wanted = (1 - at) * plain + at * other if np.isfinite(plain) else np.inf
        assert float(one.evaluate(choice)) == pytest.approx(wanted)


@pytest.mark.long
def test_layers_that_are_alike_are_laid_out_in_two_ways() -> None:
    """Equal layers get two different layouts where one layout for all computes, or sums gradients,
    for too long."""
    calls, cluster = layers(2048, 24)(512), Cluster.preset("dgx-h100", nodes=4)
    plan = search(calls, cluster, mesh((4, 8)), Options(), compared=False).plan
    assert plan.gap < 0.03, "8.7 % with all layers alike"
    ways = {tuple(plan.parameters[path]) for path in plan.parameters if path.endswith("weight")}
    assert len(ways) > 1
