"""Tests of a plan's reports, explanations and files. Prices of alternatives are compared with
trying them all."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.plans import layered, pipelined
from torch import nn

import globaltensor as flow
from globaltensor.auto.inter_op.search import SearchSpace, search_pipelines
from globaltensor.auto.intra_op.search import SearchResult, search
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.auto.plan.plan import Alternative, Plan
from globaltensor.cluster import Cluster
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import PlanError

REPORT = """\
plan for 8 devices of dgx-h100, a mesh of 2 x 4, training, 13 calls
  cost       21.8 ms a step, gap 10 %: no plan costs less than the bound; a plan that costs less than this one may exist
             computing 20.1 ms, communication 1.8 ms, optimizer 100 us, less 150 us hidden behind computing
  bound      19.7 ms a step
  step time  21.8 ms predicted, overlap included
  memory     35.8 KiB a rank at its peak, 50 % of the limit of 71.6 KiB
             parameters 6.2 KiB, gradients 6.2 KiB, optimizer 12.4 KiB, inputs and buffers 256 B, activations 10.8 KiB

alternatives: the best plan of each kind at the same prices, compared with this plan
  this plan               21.8 ms          35.8 KiB
  fully sharded (ZeRO-3)  19.7 ms  -10 %  143.2 KiB  does not fit: needs more than there is
  data parallel           27.3 ms  +25 %  107.4 KiB
  pipeline                  never                    input_0 [8, 16] has fewer rows than there are ranks
  not priced: tensor parallel. The search of graphs and of parallelize prices data parallel only; flow.auto.plan(model_or_graph, inputs) prices all

parameters and their layouts (9, 6.2 KiB a rank)
  blocks.*.norm.weight  3 x  [16]      float32  B B     64 B a rank each
  blocks.*.up.weight    3 x  [64, 16]  float32  B S(0)  1.0 KiB a rank each
  blocks.*.down.weight  3 x  [16, 64]  float32  B S(1)  1.0 KiB a rank each
inputs and buffers
  input_0    [8, 16]  float32  S(0) B  256 B a rank

most expensive layout changes (6, 1.8 ms in total)
       tensor                layout            forward     gradient      bytes   total  used by
  3 x  blocks.*.down linear  S(0) P -> S(0) B  all_reduce                512 B  1.5 ms  blocks.* add
  3 x  blocks.*.up.weight    B S(0)                        all_reduce  4.0 KiB  300 us  blocks.*.up linear

most expensive calls
       call                       total  share  inputs             outputs
  3 x  blocks.*.up linear          9 ms    1/8  S(0) B, B S(0)     S(0) S(1)
  3 x  blocks.*.down linear        9 ms    1/8  S(0) S(1), B S(1)  S(0) P
  3 x  blocks.*.norm layer_norm  900 us    1/8  S(0) B, B B        S(0) B
  3 x  blocks.* add              900 us    1/8  S(0) B, S(0) B     S(0) B
       mse_loss                  300 us    1/8  S(0) B             P B

other choices
  micro batches  4
  schedule       1f1b

in short
  cost     21.8 ms a step, 1.25 times as fast as data parallel
  memory   35.8 KiB a rank at its peak, 50 % of the limit of 71.6 KiB
  layouts  6 of 9 parameters split, 3 replicated
  apply    plan = flow.auto.load_plan("plan.json"); model = flow.parallelize(model, placement, plan)
           in a graph: self.config.use_auto_plan(plan)
           plan.save("plan.json") writes the file, as --save plan.json does"""  # noqa: E501

SEARCHED = "\n\nsearch: solving 250 ms, 99 nodes, width 2\n\nin short\n"

EXPLAINED = """\
blocks.1.up: 1 call and 1 tensor given; computing 3 ms, communication 100 us a step

blocks.1.up.weight  parameter float32[64, 16]  B S(0), 1.0 KiB a rank
    change  all_reduce of the gradient of blocks.1.up.weight (4.0 KiB, B S(0)): 100 us
    why B S(0)
      B B instead  +1 ms, 3.0 KiB a rank more

linear_2 = linear(layer_norm_1 S(0) B, blocks.1.up.weight B S(0)) -> [8, 64] S(0) S(1)  in blocks.1.up  at model.py:7
    computes 1/8 of it on each rank: forward 1 ms, backward 2 ms
    before  all_reduce of the gradient of blocks.1.up.weight (4.0 KiB, B S(0)): 100 us
    why S(0) S(1)
      S(0) B instead  +2 ms, 1.0 KiB a rank more: all_gather of linear_2 (4.0 KiB, S(0) S(1) -> S(0) B)
      B B    instead  same cost"""  # noqa: E501


class MLP(nn.Module):
    """A model of two linears with a residual."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def found(mesh: tuple[int, ...], memory: int | None = None) -> SearchResult:
    """Return the plan of a small model with its problem and its choice."""
    calls = calls_of_model(MLP(), (torch.empty(16, 256),))
    placement = flow.placement("cpu", np.arange(math.prod(mesh)).reshape(mesh).tolist())
    return search(calls, Cluster.preset("dgx-h100"), placement, Options(memory=memory))


@pytest.fixture(scope="module", params=[(4,), (2, 2)], ids=["1-D", "2-D"])
def searched(request: pytest.FixtureRequest) -> SearchResult:
    return found(request.param)


def test_the_report_reads_so() -> None:
    assert layered(3).report() == REPORT


def test_only_a_verbose_report_has_the_internals_of_the_search() -> None:
    assert layered(3).report(verbose=True) == REPORT.replace("\n\nin short\n", SEARCHED)


def test_what_was_not_searched_is_in_every_report() -> None:
    told = {"left_out_ways": "7 strategies left out, too many for one call", "nodes": 99}
    text = dataclasses.replace(layered(3), search=told).report()
    assert "\n\nnot searched: 7 strategies left out, too many for one call\n\nin short" in text
    assert "99" not in text


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (None, "cost     21.8 ms a step"),
        (
            Alternative(3 * layered(3).cost, 1 << 20, True),
            "cost     21.8 ms a step, 3 times as fast as data parallel",
        ),
        (Alternative(layered(3).cost, 1 << 20, True), "cost     21.8 ms a step"),
        (Alternative(1.0, 1 << 20, False), "cost     21.8 ms a step; data parallel does not fit"),
        (
            Alternative(math.inf, 0, False, "too few rows"),
            "cost     21.8 ms a step; data parallel is not possible",
        ),
    ],
)
def test_the_end_compares_with_data_parallel(data: Alternative | None, line: str) -> None:
    given = {} if data is None else {"data parallel": data}
    text = dataclasses.replace(layered(3), alternatives=given).report()
    assert text.partition("\nin short\n  ")[2].splitlines()[0] == line


def test_the_end_has_the_cost_of_the_head() -> None:
    plan = dataclasses.replace(layered(3), seconds=0.5 * layered(3).cost)
    lines = plan.report().splitlines()
    assert lines[1].startswith("  cost       21.8 ms a step,")
    assert "  step time  10.9 ms predicted, overlap included" in lines
    assert "  cost     21.8 ms a step, 1.25 times as fast as data parallel" in lines


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("data parallel", "tensor parallel", "fully sharded (ZeRO-3)"), None),
        (
            ("data parallel",),
            (
                "  not priced: tensor parallel, fully sharded (ZeRO-3). The search of graphs and "
                "of parallelize prices data parallel only; "
                "flow.auto.plan(model_or_graph, inputs) prices all"
            ),
        ),
        ((), None),  # of a plan without prices of alternatives, there is no list
    ],
)
def test_named_plans_without_a_price_are_listed(names: tuple[str, ...], line: str | None) -> None:
    alternatives = {name: Alternative(1.0, 1 << 20, True) for name in names}
    text = dataclasses.replace(layered(3), alternatives=alternatives).report()
    lines = [x for x in text.splitlines() if x.startswith("  not priced")]
    assert lines == ([] if line is None else [line])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_search_prices_every_named_plan(ranks: int) -> None:
    cluster = Cluster.preset("dgx-h100").with_size(ranks)
    plan = flow.auto.plan(MLP(), (torch.empty(16, 256),), cluster)
    for name in ("data parallel", "tensor parallel", "fully sharded (ZeRO-3)"):
        assert re.search(rf"(?m)^  {re.escape(name)} .*\d", plan.report()), name
    assert "not priced" not in plan.report()


def test_layouts_in_short() -> None:
    plan = layered(3)
    whole = tuple(dataclasses.replace(g, layout=("B", "B")) for g in plan.placed)
    split = tuple(dataclasses.replace(g, layout=("B", "S(0)")) for g in plan.placed)
    for placed, text in (
        (whole, "all 9 parameters replicated\n"),
        (split, "9 of 9 parameters split\n"),
        ((), "no parameters\n"),
    ):
        report = dataclasses.replace(plan, placed=placed).report()
        assert f"\n  layouts  {text}" in report


def keys(value: object) -> list[str]:
    """Return the keys of all objects in a JSON value."""
    if isinstance(value, dict):
        return [*value, *(k for v in value.values() for k in keys(v))]
    return [k for v in value for k in keys(v)] if isinstance(value, list) else []


def in_stages() -> Plan:
    """Return a plan in two stages that the search has found."""
    model = nn.Sequential(*(MLP() for _ in range(4)))
    return search_pipelines(
        lambda rows: calls_of_model(model, (torch.empty(rows, 256),)),
        16,
        Cluster.preset("dgx-h100"),
        4,
        space=SearchSpace(stages=(2,)),
    )


@pytest.mark.parametrize(
    ("make", "spent"),
    [
        (
            lambda: flow.auto.plan(MLP(), (torch.empty(16, 256),), "dgx-h100", mesh=(2, 2)),
            "computing",
        ),
        (lambda: pipelined(3), "parameters_and_gradients"),
        (in_stages, "parameters_and_gradients"),
    ],
    ids=["one mesh", "stages by hand", "stages"],
)
def test_keys_of_the_json_are_identifiers_and_the_plan_is_read_again(
    make: Callable[[], Plan], spent: str, tmp_path: Path
) -> None:
    plan = make()
    written = json.loads(plan.to_json())
    paths = set(written["choices"].get("zero", ()))  # of parameters
    assert [key for key in keys(written) if not key.isidentifier() and key not in paths] == []
    assert spent in written["cost_breakdown"]
    assert written["version"] == 2
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    # The names that reports show are accepted as keys too.
    for name in ("alternatives", "cost_breakdown", "memory_breakdown"):
        shown = getattr(plan, name)
        records = written[name].values()
        written[name] = dict(zip(shown, records, strict=True))
    (tmp_path / "old.json").write_text(json.dumps(written))
    assert Plan.load(tmp_path / "old.json") == plan


def test_the_names_of_alternatives_and_of_the_terms_of_memory_have_keys_in_json() -> None:
    plan = flow.auto.plan(MLP(), (torch.empty(16, 256),), "dgx-h100", mesh=(2, 2))
    assert "fully sharded (ZeRO-3)" in plan.alternatives
    assert "inputs and buffers" in plan.memory_breakdown
    written = json.loads(plan.to_json())
    assert set(written["alternatives"]) == {"data_parallel", "tensor_parallel", "fully_sharded"}
    assert "inputs_and_buffers" in written["memory_breakdown"]
    assert "gradients_and_optimizer" in json.loads(in_stages().to_json())["memory_breakdown"]


def test_an_explanation_reads_so() -> None:
    assert layered(3).explain("blocks.1.up") == EXPLAINED


BESIDES = """\
other choices
  stages         2
  micro batches  8
  schedule       1f1b
  recompute      blocks.0
  zero           blocks.{0-3}.up.weight (stage 3, shares S(0), B)
  batch          64
stages
  stage  lane  ranks  mesh  holds         recomputed  memory a rank
  0      0     0-3    2x2   blocks.{0-1}  blocks.0    19.5 KiB
  1      1     4-7    2x2   blocks.{2-3}  nothing     18.6 KiB"""


def test_stages_and_what_else_was_chosen_read_so() -> None:
    plan = pipelined(4)
    text = plan.report()
    assert BESIDES in text
    assert (
        "of all stages together: computing and communication 20 ms, parameters and gradients 4 ms, "
        "less 2 ms hidden behind computing" in text
    )
    assert "other layouts have not been priced one by one" in plan.explain("blocks.0.up")


def test_printing_a_plan_is_the_head_of_its_report() -> None:
    plan = layered(2)
    assert plan.report().startswith(f"{plan}\n\n")
    assert "gap 10 %" in str(plan)


def test_a_real_report_says_what_it_must(searched: SearchResult) -> None:
    text = searched.plan.report()
    lines = [line.strip() for line in text.splitlines()]
    assert any(line.startswith("cost ") and "optimal" in line for line in lines), text
    for word in ("bound ", "memory ", "data parallel ", "up.weight "):
        assert any(line.startswith(word) and any(c.isdigit() for c in line) for line in lines), (
            f"no line begins with {word!r}:\n{text}"
        )


def test_costs_add_up(searched: SearchResult) -> None:
    spent = searched.plan.cost_breakdown
    assert searched.plan.cost == pytest.approx(
        spent["computing"] + spent["moving"] - spent["hidden"] + spent["updating"], rel=1e-9
    )
    assert all(x >= 0 for x in spent.values())
    assert spent["computing"] > 0
    assert spent["updating"] > 0


class Shared(nn.Module):
    """A model with a tensor and a weight that several calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.q(x), self.k(x)
        x = self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ x)
        return torch.nn.functional.linear(x, self.q.weight).sum()


@pytest.mark.parametrize("cluster", ["dgx-h100", "ethernet-10g", "cpu"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"collect": False},
        {"wait": 1e-4},
        {"computation": 2.0, "hidden": 0.0},
        {"computation": 0.1},
    ],
    ids=lambda o: " ".join(o) or "plain",
)
@pytest.mark.sweep(4)
def test_costs_add_up_where_tensors_are_shared(cluster: str, options: dict[str, float]) -> None:
    calls = calls_of_model(Shared(), (torch.empty(16, 32, 64),))
    plan = search(
        calls, Cluster.preset(cluster), flow.placement("cpu", [[0, 1], [2, 3]]), Options(**options)
    ).plan  # type: ignore[arg-type]
    spent = plan.cost_breakdown
    found = (
        spent["computing"]
        + spent["moving"]
        - spent["hidden"]
        + spent["updating"]
        + spent.get("waiting", 0.0)
    )
    assert plan.cost == pytest.approx(found, rel=1e-9)
    assert ("waiting" in spent) == ("wait" in options)
    assert min(spent.values()) >= -1e-12
    if (
        "wait" in options
    ):  # one wait for each forward move and each gradient; those of parameters may hide
        assert (
            -1e-12
            <= spent["waiting"]
            <= options["wait"] * sum((c.forward > 0) + (c.backward > 0) for c in plan.changes)
            + 1e-12
        )


def test_memory_adds_up(searched: SearchResult) -> None:
    held, plan = searched.plan.memory_breakdown, searched.plan
    assert sum(held.values()) == plan.memory == max(level for _, level in plan.over_time)
    assert (
        held["gradients"]
        == held["parameters"]
        == sum(g.bytes for g in plan.placed if g.kind == "parameter")
    )
    assert held["optimizer"] == 2 * held["parameters"]
    assert plan.moments == 2 * (1 + max(c.number for c in plan.calls))


def test_gradients_that_are_summed_are_among_the_changes() -> None:
    """Summed gradients are listed among the changes. A parameter that every rank holds does not
    change, but its gradient is all-reduced."""
    calls = calls_of_model(MLP(), (torch.empty(16, 256),))
    whole = (flow.sbp.broadcast,)
    fixed = {
        v.path or v.name: ((flow.sbp.split(0),) if v.state == "input" else whole,)
        for v in calls.states()
    }
    plan = search(
        calls, Cluster.preset("dgx-h100"), flow.placement("cpu", [0, 1, 2, 3]), Options(fixed=fixed)
    ).plan
    summed = {
        c.value: c
        for c in plan.changes
        if c.backward_collectives == "all_reduce" and c.src == c.dst == ("B",)
    }
    assert set(summed) == {"up.weight", "up.bias", "down.weight"}
    assert all(c.forward == 0 < c.backward for c in summed.values())
    assert "all_reduce of the gradient of up.weight" in plan.explain("up")


# ------------------------------------------------------------------------------------- alternatives


def cheapest(f: SearchResult, node: int, k: int) -> tuple[float, set[int]]:
    """Return (minimum cost with strategy k for a node, changes of the peak at that cost), over all
    layouts of the adjacent tensors."""
    problem, base = f.formulation.problem, list(f.choice)
    beside = {b if a == node else a for a, b in problem.edges if node in (a, b)} & set(
        f.formulation.node_of_value.values()
    )
    peak, best, grown = problem.peak(base), math.inf, set[int]()
    for ways in itertools.product(*(range(len(problem.costs[n])) for n in beside)):
        choice = list(base)
        choice[node] = k
        for n, way in zip(beside, ways, strict=True):
            choice[n] = way
        cost = problem.evaluate(choice)
        if cost < best - 1e-15:
            best, grown = cost, set()
        if cost <= best + 1e-15 and math.isfinite(cost):
            grown.add(round(problem.peak(choice) - peak))
    return best, grown


def test_prices_of_other_ways_are_those_of_trying_them() -> None:
    f = found((4,))
    now, tried = f.formulation.problem.evaluate(f.choice), 0
    for call in f.plan.calls:
        node, candidates = (
            f.formulation.node_of_call[call.number],
            f.formulation.candidates[call.number],
        )
        told = {o.gives: o for o in call.others}
        assert call.results not in told
        by_result: dict[tuple[tuple[str, ...], ...], list[tuple[float, set[int]]]] = {}
        for k in range(len(candidates)):
            gives = tuple(tuple(e.short for e in out[k]) for out in candidates.outs)
            by_result.setdefault(gives, []).append(cheapest(f, node, k))
        least = {
            gives: min(ways, key=lambda way: way[0])
            for gives, ways in by_result.items()
            if gives != call.results
        }
        finite = sorted(cost for cost, _ in least.values() if math.isfinite(cost))
        assert [o.extra for o in call.others] == pytest.approx(
            [cost - now for cost in finite[:3]], abs=1e-12
        ), call.name
        for gives, other in told.items():
            cost = least[gives][0]
            assert other.memory in set().union(
                *(grown for c, grown in by_result[gives] if c <= cost + 1e-15)
            ), (call.name, gives)
            tried += 1
    assert tried >= 8


@pytest.mark.parametrize("hidden", [0.0, None])
def test_other_layouts_of_a_parameter_cost_what_a_search_that_must_take_them_finds(
    hidden: float | None,
) -> None:
    """The price of another parameter layout is the one of a search with that layout fixed. The
    model has one call, so best response and search agree. Where gradients would take longer than
    the backward pass, the real cost is above the reported one."""
    calls = calls_of_model(nn.Linear(64, 64, bias=False), (torch.empty(16, 64),))
    placement, cluster = flow.placement("cpu", [0, 1, 2, 3]), Cluster.preset("dgx-h100")
    best = search(calls, cluster, placement, Options(hidden=hidden))
    (weight,) = (g for g in best.plan.placed if g.kind == "parameter")
    assert len(weight.others) == 2
    by_name = {"B": flow.sbp.broadcast, "S(0)": flow.sbp.split(0), "S(1)": flow.sbp.split(1)}
    for other in weight.others:
        forced = search(
            calls,
            cluster,
            placement,
            Options(hidden=hidden, fixed={"weight": ((by_name[other.gives[0][0]],),)}),
        ).plan
        assert other.extra <= forced.cost - best.plan.cost + 1e-12
        assert hidden is None or other.extra == pytest.approx(
            forced.cost - best.plan.cost, abs=1e-12
        )


def test_no_other_way_is_cheaper_in_an_optimal_plan(searched: SearchResult) -> None:
    extras = [
        o.extra for thing in (*searched.plan.calls, *searched.plan.placed) for o in thing.others
    ]
    assert searched.plan.optimal
    assert len(extras) > 10
    assert min(extras) >= 0
    assert max(extras) > 0


# -------------------------------------------------------------------------------------------- paths


def test_a_module_is_explained_with_its_parameters_and_calls(searched: SearchResult) -> None:
    text = searched.plan.explain("up")
    for name in ("up.weight", "up.bias", "= linear(", "instead", "computes"):
        assert name in text
    assert "down" not in text.split("why")[0]


def test_calls_tensors_and_patterns_are_found() -> None:
    plan = layered(5)
    assert plan.explain("linear_3").count(" = linear(") == 1
    assert plan.explain("blocks.2.up.weight").count(" = linear(") == 1  # its consumer
    assert plan.explain("blocks.2").startswith("blocks.2: 4 calls and 3 tensors given")
    assert plan.explain("blocks").startswith("blocks: 20 calls and 15 tensors given")
    assert "(5 alike: linear_0, linear_2, linear_4, ...)" in plan.explain("blocks.*.up")
    assert plan.explain("*norm*").startswith("*norm*: 5 calls and 5 tensors given")
    assert plan.explain("mse_loss").startswith("mse_loss: 1 call;")
    assert plan.explain("layer_norm").startswith("layer_norm: 5 calls;")  # a function's name


def test_an_unknown_path_is_told_what_is_near() -> None:
    with pytest.raises(
        PlanError,
        match=(
            r"no module, parameter, call or tensor 'blocks\.1\.upp'; similar names: "
            r".*blocks\.1\.up"
        ),
    ):
        layered(2).explain("blocks.1.upp")
    with pytest.raises(PlanError, match=r"similar names: .*blocks"):
        layered(2).explain("zzz")


def test_what_does_not_fit_is_said() -> None:
    plan = layered(1)
    tight = dataclasses.replace(plan, limit=plan.memory + 512)
    assert "1.0 KiB a rank more, which does not fit" in tight.explain("linear_0")
    assert "does not fit" not in plan.explain("linear_0")


# -------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "make", [lambda: layered(2), lambda: found((2, 2)).plan], ids=["by hand", "searched"]
)
def test_a_plan_written_and_read_is_the_same(make: object, tmp_path: Path) -> None:
    plan: Plan = make()  # type: ignore[operator]
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.report() == plan.report()
    path = plan.calls[0].name
    assert again.explain(path) == plan.explain(path)
    json.loads(
        (tmp_path / "plan.json").read_text(),
        parse_constant=lambda text: pytest.fail(f"{text} is no JSON"),
    )


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"version": 2, "cost": 3}')
    with pytest.raises(PlanError, match=r"other\.json is no plan"):
        Plan.load(tmp_path / "other.json")
    with pytest.raises(PlanError, match=r"none\.json is no plan"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "old.json").write_text('{"version": 1, "cost": 3}')
    with pytest.raises(PlanError, match="a plan of another version; this version is 2"):
        Plan.load(tmp_path / "old.json")


def heads(plan: Plan) -> dict[str, str]:
    """Return the named lines of the head of a report."""
    return dict(re.findall(r"(?m)^  (\w+) +(.*)$", plan.report().partition("\n\n")[0]))


@pytest.mark.parametrize(
    ("ratio", "optimizer"),
    [(None, "Adam or another optimizer with 2"), (0.0, "SGD or another optimizer with 0")],
)
def test_the_plan_of_a_model_says_which_loss_and_optimizer_it_assumes(
    ratio: float | None, optimizer: str
) -> None:
    x = torch.empty(16, 256)
    plan = flow.auto.plan(MLP(), x, "dgx-h100", mesh=(2,), optimizer_state_ratio=ratio)
    said = heads(plan)["assumes"]
    assert "backward from every output of the model, no loss after it" in said
    assert f"{optimizer} bytes of state a byte of parameter" in said
    factor = 2 if ratio is None else ratio
    assert plan.memory_breakdown["optimizer"] == factor * plan.memory_breakdown["parameters"]


def test_the_plan_of_a_graph_assumes_nothing() -> None:
    class Step(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = MLP().to_global(flow.placement.all("cpu"), flow.sbp.broadcast)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    x = torch.ones(16, 256).to_global(flow.placement.all("cpu"), flow.sbp.broadcast)
    plan = flow.auto.plan(Step(), x, "dgx-h100", mesh=(2,))
    assert "assumes" not in heads(plan)
    assert not plan.memory_breakdown.get("optimizer")


def test_gradients_that_are_summed_without_need_for_data_have_a_reason() -> None:
    """Every rank computes all of this small step, and the runtime sums its gradients."""
    model = nn.Sequential(nn.Linear(8, 2), nn.Softmax(-1))
    full = flow.auto.plan(model, torch.empty(1, 8), "cpu", mesh=(2,))
    assert {c.share for c in full.calls} == {1}
    assert [c.backward_collectives for c in full.changes] == ["all_reduce"] * 2
    assert "summed also where every rank computes the complete call" in full.report()
    shared = flow.auto.plan(model, torch.empty(1 << 16, 8), "cpu", mesh=(2,))
    assert {c.share for c in shared.calls} == {0.5}
    assert any("all_reduce" in c.backward_collectives for c in shared.changes)
    assert "complete call" not in shared.report()


def test_the_runtime_sums_gradients_of_a_step_that_every_rank_computes() -> None:
    def body() -> list[str]:
        model = nn.Linear(8, 2).to_global(flow.placement.all("cpu"), flow.sbp.broadcast)
        loss: Any = model(torch.ones(4, 8)).square().mean()
        assert loss.sbp == (flow.sbp.broadcast,)
        with record_collectives() as collectives:
            loss.backward()
        return [t.kind for t in collectives]

    assert simulate(2, body) == [["all_reduce"]] * 2


def test_inputs_of_a_model_are_counted_from_zero() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * scale

    given = (torch.empty(16, 256), torch.empty(16, 1))
    plan = flow.auto.plan(Two(), given, "dgx-h100", mesh=(2,))
    placed = {g.name: g.shape for g in plan.placed if g.kind == "input"}
    assert placed == {"input_0": (16, 256), "input_1": (16, 1)}
    operands = {o for c in plan.calls for o in c.operands if o.startswith("input_")}
    assert operands == set(placed)
    assert "input_1" in plan.explain("input_1")
