"""Tests that a plan's claims are true.

No plan called optimal is beaten by an alternative that its own report prices, or by any other
choice of the search. Strategies lost to an error are reported. Rounding decides nothing. Sentences
are unambiguous. The report names the source of the seconds it shows.

Models, machines and meshes are drawn (support/drawn.py). A few of them always run, many more with
the slow tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.drawn import Case, TooLarge, cheaper, drawn, everything_tried, tiny
from support.paths import import_script
from support.plans import layered, pipelined
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor._ops.rules import RULES
from globaltensor.auto.api import recipes_of
from globaltensor.auto.apply.eager import plan_of
from globaltensor.auto.cost import strategies as candidates
from globaltensor.auto.cost.meshes import meshes
from globaltensor.auto.inter_op.search import SearchSpace, search_pipelines
from globaltensor.auto.intra_op.alternatives import least_larger
from globaltensor.auto.intra_op.search import (
    SearchResult,
    binding_formulation,
    compare,
    data_parallel,
    search,
)
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.auto.plan.html import data
from globaltensor.auto.plan.plan import Lost, Plan
from globaltensor.auto.plan.report import headline, proof
from globaltensor.auto.profile import this_machine
from globaltensor.auto.solver import EXACT, STOP, Solution, proven
from globaltensor.cluster import Cluster, use_cluster
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import FormError
from globaltensor.sharding.placement import Placement

#: A plan's claim in its report.
PROVEN = "optimal: no plan in the space of the search costs less"
CLOSE = 1e-8  # relative tolerance between two ways to add up a cost
#: In 6 an alternative looked cheaper than a plan called optimal. In 37 the spent figures did not
#: add up to the cost. 8 and 10 were not optimal because of rounding.
QUICK = (*range(12), 37)
#: The seeds of QUICK that only `make test-extended` runs.
EXTENDED = (2, 3, 4, 7, 9, 11)
MANY = [seed for seed in range(400) if seed not in QUICK]


def seeds() -> list[Any]:
    """Return the seeds as parameters. Those that once failed always run."""
    quick = [pytest.param(s, marks=[pytest.mark.extended] if s in EXTENDED else []) for s in QUICK]
    return [*quick, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)]


def found(case: Case, **options: Any) -> SearchResult:
    """Run the search, with a few seconds where memory is limited. A plan not proven by then claims
    nothing."""
    seconds = 3.0 if options else None
    return search(
        case.calls,
        case.cluster,
        case.mesh,
        Options(**options),
        seconds,
        recipes_of(case.model, case.calls, case.mesh),
    )


def within_a_limit(case: Case, free: SearchResult) -> SearchResult:
    """Search with a limit between the minimum memory and the memory of the best plan."""
    least = free.formulation.least_memory()
    assert least is not None
    limit = int(least + (free.plan.memory - least) * case.draw.choice((0.0, 0.2, 0.5, 0.9)))
    return found(case, memory=limit)


def cost(f: SearchResult, changed: dict[int, int] | None = None) -> float:
    """Return the cost of the choice, with some strategies changed: the larger of the two sums."""
    choice = list(f.choice)
    for node, k in (changed or {}).items():
        choice[node] = k
    return float(binding_formulation(f.formulation, choice).problem.evaluate(choice))


# -------------------------------------------------------------------------------- prices and proofs


def check_prices(f: SearchResult) -> None:
    """Check that the plan's own figures add up to its cost. If the plan is called optimal, no
    alternative that it prices costs less."""
    plan = f.plan
    assert plan.cost == pytest.approx(cost(f), rel=CLOSE)
    assert sum(plan.cost_breakdown.values()) - 2 * plan.cost_breakdown["hidden"] == pytest.approx(
        plan.cost, rel=CLOSE
    )
    if plan.optimal:
        for thing in (*plan.calls, *plan.placed):
            for other in thing.others:
                fits = plan.limit is None or plan.memory + other.memory <= plan.limit
                assert other.extra >= 0 or not fits, (thing.name, other)
        for name, other in plan.alternatives.items():
            assert not other.fits or other.cost >= plan.cost * (1 - CLOSE), name
        assert "not complete" not in "".join(
            plan.explain(name)
            for name in {g.name for g in plan.placed} | {c.name for c in plan.calls}
        )


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.sweep(2)
def test_no_other_way_that_a_plan_prices_beats_it(seed: int) -> None:
    case = drawn(seed)
    free = found(case)
    check_prices(free)
    if seed % 2:
        with contextlib.suppress(flow.auto.PlanError):  # the limit may be below the minimum memory
            check_prices(
                found(case, memory=int(free.plan.memory * case.draw.choice((0.8, 0.9, 1.0))))
            )


@pytest.mark.parametrize("rows", [4, 8, 64, 512, 4096])
@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "pcie-a100"])
@pytest.mark.sweep(4)
def test_the_showcase_says_one_thing(name: str, rows: int) -> None:
    """The report agrees with itself. With 4, 8 and 4096 rows, another layout of the first weight
    was once reported as better. With 512 rows, rounding kept the plan from being optimal."""
    with torch.device("meta"):
        model, x = (
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)),
            torch.empty(rows, 512),
        )
    plan = flow.auto.plan(model, x, name, mesh=(8,))
    assert plan.optimal
    assert plan.gap == 0.0, "the same claim: with 512 rows the gap was once 1.0000000075e-09"
    assert PROVEN in str(plan)
    assert min(o.extra for thing in (*plan.calls, *plan.placed) for o in thing.others) >= 0
    assert "not complete" not in plan.explain("0.weight")


def printed_by(page: str, start: str) -> str:
    """Return what the block of a page that contains this text prints."""
    text = (Path(__file__).parents[2] / page).read_text()
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if start in b)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(f"import torch\nimport globaltensor as flow\n{block}", {"__name__": page})
    return printed.getvalue()


def test_the_showcase_of_the_readme_prints_what_its_comments_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it writes a page
    printed = printed_by(
        "README.md", '"dgx-h100", mesh=(8,))   # one batch of all ranks, 8192 rows; 8 GPUs'
    )
    assert (tmp_path / "plan.html").exists()
    assert printed.startswith("plan for 8 devices of dgx-h100, one axis, training, 3 calls\n")
    assert f"cost       431 us a step, {PROVEN}\n" in printed
    for promised in (
        "\n  bound      431 us a step\n",
        "\n  memory ",
        "\nalternatives: ",
        "why B\n",
    ):
        assert promised in printed, promised
    assert "input_0    [8192, 512]" in printed


def test_the_report_on_the_page_of_plans_is_the_one_that_is_printed() -> None:
    printed = printed_by("docs/auto.md", "class Block")
    page = (Path(__file__).parents[2] / "docs/auto.md").read_text()
    shown = page.split("```text\n")[1].split("```")[0].splitlines()
    assert PROVEN in shown[1]
    assert printed.splitlines()[: len(shown)] == shown


@pytest.mark.parametrize(
    "seed", [9, 10, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(11, 120))]
)
def test_another_way_costs_what_it_does_with_all_else_at_its_best(seed: int) -> None:
    """An alternative of a call is priced with the best layouts of the adjacent tensors. All layouts
    are tried: the price is the larger sum with the alternative, minus the plan's cost."""
    f = found(tiny(seed))
    now, formulation = cost(f), f.formulation
    for call in f.plan.calls:
        node, ways = formulation.node_of_call[call.number], formulation.candidates[call.number]
        beside = [
            n
            for edge in formulation.problem.edges
            if node in edge
            for n in edge
            if n != node and n in formulation.layouts
        ]
        if math.prod(len(formulation.layouts[n]) for n in beside) * len(ways) > 20_000:
            continue
        least: dict[Any, float] = {}
        for k in range(len(ways)):
            gives = tuple(tuple(e.short for e in out[k]) for out in ways.outs)
            for strategies in itertools.product(
                *(range(len(formulation.layouts[n])) for n in beside)
            ):
                changed = {node: k, **dict(zip(beside, strategies, strict=True))}
                least[gives] = min(least.get(gives, math.inf), cost(f, changed) - now)
        del least[call.results]
        finite = sorted(extra for extra in least.values() if math.isfinite(extra))
        assert [o.extra for o in call.others] == pytest.approx(
            finite[:3], rel=1e-9, abs=3 * EXACT * now
        ), call.name
        assert all(
            o.extra == pytest.approx(least[o.gives], abs=3 * EXACT * now) for o in call.others
        )


@pytest.mark.parametrize(
    "seed", [32, 75, 104, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100))]
)
def test_a_known_way_is_told_at_its_best(seed: int) -> None:
    """A known strategy is priced at its best. Gradients may take longer than the backward pass.
    Their exposed time was once added to the best of the other sum. That made tensor parallelism a
    quarter too expensive with seed 32, and by half with 104."""
    case = drawn(seed)
    ways = {
        "data parallel": data_parallel(case.calls, case.mesh),
        **recipes_of(case.model, case.calls, case.mesh),
    }
    for name, told in compare(found(case).formulation, ways).items():
        if math.isfinite(told.cost):
            best = search(
                case.calls, case.cluster, case.mesh, Options(fixed=dict(ways[name])), compared=False
            ).plan
            assert told.cost >= best.bound * (1 - CLOSE), name
            assert told.cost <= best.cost * 1.01 or told.why.startswith("at most"), name


@pytest.mark.parametrize("seed", range(20))
def test_the_least_larger_sum(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = [
        tuple(draw.integers(0, 30, (2, draw.integers(1, 5))).astype(float))
        for _ in range(draw.integers(0, 5))
    ]
    rows = [
        (x, np.where(draw.random(len(x)) < 0.2, np.inf, y))
        if len(x) > 1 and np.isfinite(y).all()
        else (x, y)
        for x, y in rows
    ]
    rows = [(np.where(np.isinf(y), np.inf, x), y) for x, y in rows]
    every = [
        (
            max(
                2.0 + sum(x[k] for (x, _), k in zip(rows, c, strict=True)),
                5.0 + sum(y[k] for (_, y), k in zip(rows, c, strict=True)),
            ),
            list(c),
        )
        for c in itertools.product(*(range(len(x)) for x, _ in rows))
    ]
    if not math.isfinite(min(every)[0]):
        return
    least, picks = least_larger(2.0, 5.0, rows)
    assert least == min(every)[0]
    assert (least, picks) in every


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.sweep(2)
def test_no_plan_called_optimal_is_beaten_by_any_choice(seed: int) -> None:
    case = drawn(seed)
    f = search(case.calls, case.cluster, case.mesh, Options(), compared=False)
    if f.plan.optimal:
        try:
            assert not cheaper(f.formulation, f.plan.cost * (1 - CLOSE))
            assert cheaper(
                f.formulation, f.plan.cost * (1 + 100 * CLOSE)
            )  # the plan itself is such a choice
        except TooLarge:
            assert seed not in QUICK


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.sweep(2)
def test_no_plan_within_memory_is_beaten_by_any_that_fits(seed: int) -> None:
    case = tiny(seed)
    f = within_a_limit(case, found(case))
    tried = [
        everything_tried(f.formulation.under(freed=freed), f.plan.limit) for freed in (False, True)
    ]
    if None in tried:
        assert seed not in QUICK or seed in (3, 6), "these have too many"
        return
    least = min(x for x in tried if x is not None)
    assert f.plan.bound <= least * (1 + CLOSE)
    assert least <= f.plan.cost * (1 + CLOSE)
    if f.plan.optimal:
        assert least >= f.plan.cost * (1 - CLOSE)


#: 121, 129, 399: a plan on one axis was called optimal, although one on 2 x 2 cost less.
@pytest.mark.parametrize(
    "seed",
    [0, 3, 121, 129, 399, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 100))],
)
@pytest.mark.sweep(4)
def test_no_plan_called_optimal_is_beaten_on_another_mesh(seed: int) -> None:
    """An optimal plan of a search over meshes is beaten neither by the plan on any one mesh nor by
    a pipeline."""
    case = drawn(seed)
    cluster = dataclasses.replace(case.cluster, size=case.draw.choice((4, 4, 8)))
    plan = flow.auto.plan(case.model, case.x, cluster)
    rows, options = len(case.x), Options(memory=cluster.memory or None)
    if not plan.optimal:
        return
    for mesh in meshes(cluster.size, cluster, 2):
        assert search(case.calls, cluster, mesh, options, compared=False).plan.cost >= plan.cost * (
            1 - CLOSE
        ), mesh.shape
    for stages, micros in ((2, 2), (2, 4), (4, 4)):
        if rows % micros == 0:
            with contextlib.suppress(flow.auto.PlanError):  # too few segments
                space = SearchSpace(stages=[stages], micro_batches=[micros])
                calls_at = (  # noqa: E731
                    lambda n: calls_of_model(
                        case.model,
                        (torch.empty(n, *case.x.shape[1:], device="meta"),),
                        None,
                        cluster.device,
                    )
                )
                assert search_pipelines(
                    calls_at, rows, cluster, None, options, space
                ).cost >= plan.cost * (1 - CLOSE), (stages, micros)


# ------------------------------------------------------------------------------ limits of exactness


def test_rounding_does_not_decide_whether_a_plan_is_optimal() -> None:
    def plan(cost: float, bound: float) -> Plan:
        return Plan("generic", (2,), cost, bound, cost, 0, None, True, (), (), ())

    assert plan(0.00013224317375109087, 0.0001322431736188477).optimal, (
        "the showcase with 512 rows: 1.0000000075e-09 apart"
    )
    for scale in (1e-9, 1.0, 3e7):
        assert plan(scale, scale).optimal
        assert plan(scale, scale * (1 - STOP)).optimal
        assert plan(scale, scale * (1 - STOP) * (1 - 1e-15)).optimal
        assert not plan(scale, scale * (1 - 1e-8)).optimal
        assert not plan(scale, scale * (1 - 1e-6)).optimal
    assert plan(0.0, 0.0).optimal
    assert STOP < EXACT < 1e-8
    assert proven(3, 3)
    assert not proven(10**18, 10**18 - 1), "whole numbers are exact"
    assert Solution([0], 1.0, 1.0 - STOP, True).optimal
    assert not Solution([0], 1.0, 1.0 - 1e-8, True).optimal


# ------------------------------------------------------------------------ strategies lost to errors


@contextlib.contextmanager
def ruled(function: Any, describe: Callable[..., None]) -> Iterator[None]:
    """Replace a function's rule and clear the cached answers of rules."""
    before = RULES[function]
    candidates._known.clear()
    RULES[function] = dataclasses.replace(before, describe=describe)
    try:
        yield
    finally:
        RULES[function] = before
        candidates._known.clear()


def model_of_gelus() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())


def planned(**options: Any) -> Plan:
    return flow.auto.plan(model_of_gelus(), torch.empty(64, 64), "dgx-h100", **options)


def found_by(function: Any, describe: Callable[..., None]) -> Plan:
    """Return the plan on two devices with this rule for a function. The capture uses the real
    rule."""
    calls = calls_of_model(model_of_gelus(), (torch.empty(64, 64),))
    with ruled(function, describe):
        return search(calls, Cluster.preset("dgx-h100"), Placement("cpu", [0, 1]), Options()).plan


def failing(error: Exception, when: Callable[..., bool]) -> Callable[..., None]:
    """Return the rule of gelu with a fault."""
    real = RULES[F.gelu].describe

    def describe(op: Any, *args: Any, **kwargs: Any) -> None:
        if when(op):
            raise error
        real(op, *args, **kwargs)

    return describe


def splits(op: Any) -> bool:
    return any(e.is_split for a in op.args for e in a.spec.layout)


@pytest.mark.parametrize("mesh", [(2,), (2, 2), None], ids=["2", "2x2", "any"])
@pytest.mark.parametrize(
    "error",
    [
        TypeError("no operand"),
        ValueError("few values"),
        IndexError("tuple index"),
        KeyError("k"),
        RuntimeError("x"),
    ],
)
@pytest.mark.sweep(4)
def test_strategies_lost_to_a_fault_of_a_rule_are_counted(
    error: Exception, mesh: tuple[int, ...] | None
) -> None:
    with ruled(F.gelu, failing(error, splits)):
        plan = planned(mesh=mesh)
        assert plan.lost
        assert not plan.optimal
        (lost,) = {(x.function, x.error.partition(" (")[0], x.calls) for x in plan.lost}
        assert lost == ("gelu", f"{type(error).__name__}: {error}", 2)
        assert sum(x.ways for x in plan.lost) >= 4
        text = plan.report()
        assert (
            f"layouts of the operands of gelu (2 calls): its rule failed with "
            f"{type(error).__name__}: {error} (" in text
        )
        assert "optimal:" not in text
        assert (
            "open: no plan in the search costs less, but errors have excluded other plans from the "
            "search, see below" in text
        )
        assert data(plan)["plan"]["optimal"] is False
        assert any(name == "lost" and "gelu" in told for name, told in data(plan)["texts"]["rest"])
        assert Plan(**{**vars(plan), "lost": ()}).optimal == proven(plan.cost, plan.bound)


def test_what_a_rule_refuses_is_no_loss() -> None:
    """A call form that the rule does not describe runs replicated, at run time as in the plan.
    Nothing is reported as lost."""

    def other_arguments(op: Any, input: Any) -> None:
        raise AssertionError("gelu is called with approximate=")

    for describe in (failing(FormError("not so"), lambda op: True), other_arguments):
        plan = found_by(F.gelu, describe)
        assert plan.lost == ()
        assert plan.optimal
        assert {call.results for call in plan.calls if call.function == "gelu"} == {(("B",),)}


def test_a_composition_that_fails_is_counted_and_one_that_refuses_is_not() -> None:
    def composed(failure: Exception) -> Callable[..., None]:
        def run(input: Any, approximate: str = "none") -> Any:
            if input.sbp[0] == flow.sbp.split(1):
                raise failure
            return input * 1.0

        def describe(op: Any, *args: Any, **kwargs: Any) -> None:
            op.composite = run

        return describe

    with ruled(F.gelu, composed(ZeroDivisionError("division by zero"))):
        plan = planned(mesh=(2,))
    assert [(x.function, x.error.partition(" (")[0], x.ways, x.calls) for x in plan.lost] == [
        ("gelu", "ZeroDivisionError: division by zero", 2, 2)
    ]
    with ruled(F.gelu, composed(flow.auto.PlanError("it cannot be split there"))):
        assert planned(mesh=(2,)).lost == ()


def test_work_that_cannot_be_counted_is_said() -> None:
    def describe(op: Any, *args: Any, **kwargs: Any) -> None:
        if op.args[0].spec.placement.size == 1:
            raise ArithmeticError("no work")
        real(op, *args, **kwargs)

    real = RULES[F.linear].describe
    plan = found_by(F.linear, describe)
    assert [(x.function, x.ways, x.calls) for x in plan.lost] == [("linear", 0, 2)]
    assert "the work of linear (2 calls): its rule failed with ArithmeticError: no work" in str(
        plan
    )
    assert not plan.optimal


def test_losses_are_kept_with_a_plan(tmp_path: Path) -> None:
    plan = dataclasses.replace(
        layered(1),
        bound=layered(1).cost,
        lost=(Lost("linear", "KeyError: 'k' (_ops/rules/matmul.py:9)", 6, 2),),
        source="as given",
    )
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert proven(again.cost, again.bound)
    assert not again.optimal
    old = json.loads((tmp_path / "plan.json").read_text())
    del old["lost"], old["source"]  # fields with a default may be missing
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert Plan.load(tmp_path / "old.json") == dataclasses.replace(plan, lost=(), source="")


def test_ways_that_are_too_many_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_MAX_CANDIDATES", 8)
    assert "strategies left out, too many for one call" in planned(mesh=(2, 2)).report()
    monkeypatch.undo()
    assert "left out" not in planned(mesh=(2, 2)).report()


# ---------------------------------------------------------------------------------------- sentences


def staged(lanes: list[int], mesh: tuple[int, ...]) -> Plan:
    size = math.prod(mesh)
    stages = [
        {
            "lane": lane,
            "ranks": [lane * size, (lane + 1) * size],
            "mesh": list(mesh),
            "segments": [f"blocks.{k}"],
        }
        for k, lane in enumerate(lanes)
    ]
    return dataclasses.replace(
        layered(4), mesh=mesh, choices={"stages": stages, "micro_batches": 4, "schedule": "1f1b"}
    )


@pytest.mark.parametrize(
    ("lanes", "mesh", "words"),
    [
        (
            [0, 1],
            (4,),
            (
                "plan for 8 devices of dgx-h100, 2 pipeline stages of 4 devices each, training, 17 "
                "calls"
            ),
        ),
        (
            [0, 1, 0, 1],
            (4,),
            (
                "plan for 8 devices of dgx-h100, 4 pipeline stages on 2 groups of 4 devices each, "
                "training, 17 calls"
            ),
        ),
        (
            [0, 1, 1, 0],
            (2, 2),
            (
                "plan for 8 devices of dgx-h100, 4 pipeline stages on 2 groups of 4 devices each "
                "(a "
                "mesh of 2 x 2), training, 17 calls"
            ),
        ),
        (
            [0, 1, 2],
            (1,),
            (
                "plan for 3 devices of dgx-h100, 3 pipeline stages of 1 device each, training, 17 "
                "calls"
            ),
        ),
    ],
)
def test_stages_and_devices_are_not_mixed_up(
    lanes: list[int], mesh: tuple[int, ...], words: str
) -> None:
    plan = staged(lanes, mesh)
    assert headline(plan) == words
    assert data(plan)["texts"]["arrangement"] == words.split(", ", 1)[1].removesuffix(
        ", training, 17 calls"
    )


HEAD = """\
plan for 2 devices of {name}, one axis, training, 1 call
  cost       {cost} a step, optimal: no plan in the space of the search costs less
             {spent}
  bound      {cost} a step
  step time  {cost} predicted, overlap included
  memory     {memory}
  figures    of {name}: {figures}"""
ASSUMED = """\
assumed, of no machine in particular: seconds are no prediction for this one
             `globaltensor profile --out cluster.json` measures it, and a block `with flow.use_cluster(flow.Cluster.load("cluster.json")):` plans for it"""  # noqa: E501


def test_whose_figures_a_plan_tells(tmp_path: Path) -> None:
    def told(cluster: Any) -> list[str]:
        with torch.device("meta"):
            lines = str(
                flow.auto.plan(
                    nn.Linear(64, 64, bias=False), torch.empty(16, 64), cluster, mesh=(2,)
                )
            ).splitlines()
        first = next(k for k, line in enumerate(lines) if line.startswith("  figures"))
        *figures, assumed = lines[first:]
        assert assumed.startswith("  assumes    ")
        return figures

    made = Cluster(name="ours", latency=1e-5, size=2)
    assert "\n".join(told(Cluster(size=2))) == f"  figures    of generic: {ASSUMED}"
    assert told("dgx-h100") == [
        "  figures    of dgx-h100: a preset, from data sheets and what others have measured"
    ]
    assert told(Cluster.preset("cpu", latency=1e-3)) == [
        (
            "  figures    of cpu: a preset, from data sheets and what others have measured; "
            "latency "
            "as given"
        )
    ]
    assert told(made) == ["  figures    of ours: as given"]
    assert told(made.with_ops({"f()": (1.0, 1.0)})) == [
        "  figures    of ours: as given; 1 calls by measured times"
    ]
    made.save(tmp_path / "ours.json")
    assert told(str(tmp_path / "ours.json")) == [
        f"  figures    of ours: from {tmp_path / 'ours.json'}"
    ]
    dataclasses.replace(made, source="measured in the lab").save(tmp_path / "ours.json")
    assert told(str(tmp_path / "ours.json")) == ["  figures    of ours: measured in the lab"]
    assert Cluster.load(tmp_path / "ours.json") == made, "where figures come from is no difference"
    assert hash(Cluster.load(tmp_path / "ours.json")) == hash(made)


def test_the_whole_of_what_a_plan_says() -> None:
    """Compare the sentences of a staged plan's report with a snapshot. Each sentence must speak of
    one thing."""
    text = dataclasses.replace(pipelined(4), source="measured here").report()
    assert text.splitlines()[0] == (
        "plan for 8 devices of dgx-h100, 2 pipeline stages of 4 devices each (a mesh of 2 x "
        "2), training, 17 calls"
    )
    assert "  figures    of dgx-h100: measured here" in text
    assert (
        "             of all stages together: computing and communication 20 ms, parameters and "
        "gradients 4 ms, less 2 ms hidden behind computing" in text
    )
    assert "parameters and their layouts (12, 8.2 KiB a rank of each stage, together)" in text
    assert "  stage  lane  ranks  mesh  holds         recomputed  memory a rank" in text
    assert "  0      0     0-3    2x2   blocks.{0-1}  blocks.0    19.5 KiB" in text
    assert proof(layered(1)) == (
        "gap 10 %: no plan costs less than the bound; a plan that costs less than this one may "
        "exist"
    )


# ----------------------------------------------------------------------------------- measured ranks


def example() -> Any:
    """Return the example as a module."""
    return import_script("examples/train_gpt.py")


SMALL = [
    "--layers",
    "1",
    "--width",
    "32",
    "--context",
    "16",
    "--batch",
    "4",
    "--log-every",
    "1",
    "--sample",
    "0",
    "--steps",
    "1",
    "--no-progress",
]


class Step(flow.nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.config.enable_auto_parallel()

    def build(self, x: Any) -> Any:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def ways(where: Placement) -> list[str]:
    """Return the source of the figures that the plans of an eager model and of a graph report."""
    eager = flow.parallelize(nn.Linear(8, 8), where, "auto", inputs=(torch.zeros(4, 8),))
    step = Step(nn.Linear(8, 8).to_global(where, flow.sbp.broadcast))  # type: ignore[operator]
    step(torch.zeros(4, 8).to_global(where, flow.sbp.broadcast, check_meta=False))  # type: ignore[attr-defined]
    plan = plan_of(eager)
    assert plan is not None
    return [f"{p.cluster}: {p.source}" for p in (plan, step.auto_plan())]


def measured_ranks(folder: str) -> dict[str, Any]:
    """Return one rank's results of measuring, saving and reading a cluster."""
    where, rank, seconds = flow.placement.all("cpu"), world().rank, this_machine._SECONDS
    before = {name: os.environ.get(name) for name in (this_machine.VARIABLE, "XDG_CACHE_HOME")}
    real, times, first = this_machine.measured, [0], list[Cluster]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        times[0] += 1
        first.append(real(*args, **kwargs) if not first else first[0])  # one measurement is enough
        return first[0]

    found: dict[str, Any] = {}
    this_machine.measured, this_machine._SECONDS = counted, 0.3
    logging.getLogger("globaltensor").setLevel(logging.CRITICAL)
    try:
        os.environ |= {this_machine.VARIABLE: "0", "XDG_CACHE_HOME": folder}
        found["off"] = ways(where), times[0]
        os.environ[this_machine.VARIABLE] = (
            "1" if rank == 0 else "0"
        )  # rank 0 decides for all ranks, so no rank waits for another
        found["on"] = ways(where), times[0]
        (file,) = this_machine.cache_folder().iterdir()
        world().state(this_machine.KnownClusters).clear()  # as in another process
        found["kept"] = this_machine.cluster_here("cpu") == Cluster.load(file), times[0], str(file)
        del os.environ[this_machine.VARIABLE]  # as users start, who set nothing
        world().state(this_machine.KnownClusters).clear()
        world().comm((0, 1)).barrier()
        if rank == 0:
            file.unlink()
        found["unset"] = ways(where), times[0], file.exists()
        with use_cluster(Cluster.preset("cpu")):
            found["named"] = ways(where), times[0]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            example().main(["--parallel", "auto", *SMALL])
        found["example"] = printed.getvalue(), times[0]
        world().comm((0, 1)).barrier()
        if rank == 0:
            file.write_text(file.read_text()[:100])
        world().state(this_machine.KnownClusters).clear()
        found["broken"] = (
            this_machine.cluster_here("cpu") == Cluster.load(file),
            times[0],
            [p.name for p in file.parent.iterdir()] == [file.name],
        )
        os.environ["XDG_CACHE_HOME"] = str(file)  # not a folder
        world().state(this_machine.KnownClusters).clear()
        found["nowhere"] = ways(where)[:1], times[0]
    finally:
        this_machine.measured, this_machine._SECONDS = real, seconds
        world().state(this_machine.KnownClusters).clear()
        logging.getLogger("globaltensor").setLevel(logging.NOTSET)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return found


def test_ranks_at_hand_are_measured_once_and_the_plan_says_so(tmp_path: Path) -> None:
    first, second = run_on(2, measured_ranks, str(tmp_path))
    for name in ("off", "on", "kept", "unset", "named", "broken", "nowhere"):
        assert first[name] == second[name], f"the same on every rank: {name}"
    told, times = first["off"]
    assert times == 0
    assert all(
        text.startswith("generic: assumed, of no machine in particular")
        and "globaltensor profile" in text
        for text in told
    )
    told, times = first["on"]
    assert times == 1, "for both ways"
    kept, times, file = first["kept"]
    assert kept
    assert times == 1
    assert all(
        text.startswith("this machine: measured on ")
        and text.endswith(f"Saved in {file}: delete the file to measure again")
        for text in told
    )
    assert "2 ranks of 1 thread over " in told[0]
    assert first["unset"] == (told, 2, True), "without the variable, it is measured and saved"
    assert first["named"] == (
        ["cpu: a preset, from data sheets and what others have measured"] * 2,
        2,
    )
    text, times = first["example"]
    assert times == 2
    assert "plan for 2 devices of this machine, one axis" in text
    assert "  figures    of this machine: measured on " in text
    assert "flow.auto.calibrate measures their calls" in text
    assert first["broken"] == (True, 3, True), "measured anew, and nothing else left in the folder"
    told, times = first["nowhere"]
    assert times == 4, "for both ways: what cannot be kept in a file is remembered"
    assert "Saved in" not in told[0]
    assert told[0].startswith("this machine: measured on ")


def test_ranks_that_are_threads_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(this_machine.VARIABLE, "1")
    monkeypatch.setattr(
        this_machine, "measured", lambda *args, **kwargs: pytest.fail("threads take turns")
    )
    for told in simulate(2, lambda: ways(flow.placement.all("cpu"))):
        assert all(text.startswith("generic: assumed") for text in told)
    assert this_machine.cluster_here("cpu") is None, "nor is a world of one"


def test_what_a_measurement_depends_on_names_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine() -> str:
        return json.dumps(this_machine._machine("cpu"), sort_keys=True)

    now = machine()
    assert machine() == now
    monkeypatch.setattr(this_machine.socket, "gethostname", lambda: "elsewhere")
    assert machine() != now
    monkeypatch.undo()
    monkeypatch.setenv("GLOBALTENSOR_SHARED_MEMORY", "0")
    assert machine() != now
    monkeypatch.undo()
    torch.set_num_threads(torch.get_num_threads() + 1)  # conftest resets it
    assert machine() != now
