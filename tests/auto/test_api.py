"""Tests of the inputs that ``flow.auto.plan`` accepts and rejects: batches in any argument, invalid
arguments, time limits."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import globaltensor as flow
from globaltensor.auto import api
from globaltensor.auto.cost.meshes import meshes
from globaltensor.auto.inter_op.predict import predict
from globaltensor.auto.intra_op import formulate
from globaltensor.auto.intra_op import search as search_module
from globaltensor.auto.intra_op.formulate import FormulationCache, _Builder
from globaltensor.auto.intra_op.search import price_layouts, search
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.auto.plan.plan import Plan
from globaltensor.auto.solver import Solution, solve
from globaltensor.cluster import Cluster
from globaltensor.errors import GraphError, PlanError
from globaltensor.graph.sharding_plan import ShardingPlan as GraphPlan
from globaltensor.sbp import split as S
from globaltensor.sharding.placement import Placement

X = torch.empty(4, 8)
MESH = Placement("cpu", [0, 1])


class Scaled(nn.Module):
    """A model that accepts its batch nested or by name, with a table that has no batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)

    def forward(
        self, pair: Any, *, more: torch.Tensor | None = None, table: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = pair["x"] if isinstance(pair, dict) else pair
        x = x if more is None else x * more
        return self.inner(x if table is None else x @ table)  # type: ignore[no-any-return]


def shapes(plan: Plan) -> list[tuple[int, ...]]:
    return [g.shape for g in plan.placed if g.kind == "input"]


def test_a_batch_is_set_wherever_it_stands() -> None:
    table = torch.empty(8, 8)
    for inputs, kwargs in (
        (({"x": X},), {"table": table}),
        ((X,), {"more": X, "table": table}),
        ((), {"pair": X, "table": table}),
    ):
        plan = flow.auto.plan(Scaled(), inputs, "dgx-h100", batch=32, mesh=(2,), kwargs=kwargs)
        assert set(shapes(plan)) == {(32, 8), (8, 8)}, "the table is as it was"
    with pytest.raises(PlanError, match="none of the inputs is a tensor with rows"):
        flow.auto.plan(Scaled(), (torch.empty(()),), "dgx-h100", batch=32, mesh=(2,))


def test_inputs_that_want_a_gradient_want_it_with_another_batch() -> None:
    model = nn.Linear(8, 16).requires_grad_(False)
    for wants in (False, True):
        plan = flow.auto.plan(
            model, (torch.empty(4, 8, requires_grad=wants),), "dgx-h100", batch=32, mesh=(2,)
        )
        assert bool(plan.calls[0].backward) == wants


def test_a_graph_takes_another_batch() -> None:
    one = flow.placement("cpu", [0])

    class Step(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(8, 16).to_global(one, flow.sbp.broadcast)

        def build(self, x: Any) -> Any:
            return self.model(x)

    plan = flow.auto.plan(
        Step(),
        (torch.randn(4, 8).to_global(one, flow.sbp.broadcast),),
        "dgx-h100",
        batch=32,
        mesh=(2,),
    )  # type: ignore[attr-defined]
    assert shapes(plan) == [(32, 8)]


def test_micro_batches_follow_inputs_by_name() -> None:
    """Inputs passed by name are cut into micro-batches too. Such inputs were once left uncut while
    other inputs were cut."""
    plan = flow.auto.plan(Scaled(), (X,), Cluster(size=4), kwargs={"more": X})
    assert plan.choices["batch"] == 4
    assert "left_out" not in plan.search


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": 4}, "mesh is a placement or a shape"),
        ({"mesh": (-1, -2)}, "mesh is a placement or a shape"),
        ({"mesh": ()}, "mesh is a placement or a shape"),
        (
            {"mesh": Placement("cpu", list(range(8))), "cluster": Cluster(size=2)},
            r"a mesh of 8 has 8 devices, the cluster 2: cluster.with_size\(8\)",
        ),
        ({"optimizer_state_ratio": -1}, "optimizer_state_ratio is a number of at least 0, got -1"),
        ({"optimizer_state_ratio": math.nan}, "optimizer_state_ratio is a number of at least 0"),
        ({"seconds": -1}, "seconds is a number of at least 0"),
        ({"batch": True}, "batch is a number of rows"),
        ({"batch": 0}, "batch is a number of rows"),
        ({"cluster": 3}, "cluster is a Cluster, the name of a preset or a file, got 3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        flow.auto.plan(nn.Linear(8, 16), (X,), **{"cluster": Cluster(size=4), **given})


def test_a_preset_that_names_no_size_is_this_world() -> None:
    assert flow.auto.plan(nn.Linear(8, 16), (X,), "generic").mesh == (1,)


# --------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize("mesh", [(2,), None], ids=str)
def test_all_that_is_solved_keeps_within_the_seconds(
    objective: str, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def noted(problem: Any, seconds: float | None = None, **more: Any) -> Solution:
        asked.append(math.inf if seconds is None else seconds)
        time.sleep(0.01)
        return solve(problem, seconds=seconds, **more)

    monkeypatch.setattr(search_module, "solve", noted)
    monkeypatch.setattr(formulate, "solve", noted)
    flow.auto.plan(
        nn.Linear(8, 16), (X,), Cluster(size=4), objective=objective, mesh=mesh, seconds=30
    )
    assert len(asked) > 2
    assert all(
        later <= earlier
        for earlier, later in zip(
            [30.0, *asked[: 1 + (objective == "memory")]], asked, strict=False
        )
    )
    assert max(asked) < 30


def test_the_least_memory_is_not_sought_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        formulate, "solve", lambda problem, seconds=None: asked.append(seconds) or out_of_time()
    )
    found = search(calls_of_model(nn.Linear(8, 16), (X,)), Cluster(), MESH, Options())
    assert found.formulation.least_memory() is None
    assert asked == [120.0]


def out_of_time(infeasible: bool = False) -> Solution:
    return Solution(None, math.inf, -math.inf, False, infeasible, seconds=3.0)


@pytest.mark.parametrize(
    ("infeasible", "memory"), [(False, None), (False, 64), (True, None), (True, 64)]
)
def test_out_of_time_is_not_told_as_impossible(
    infeasible: bool, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of_model(nn.Linear(8, 16), (X,))
    known = search(calls, Cluster(), MESH, Options()).formulation
    monkeypatch.setattr(search_module, "solve", lambda *args, **kwargs: out_of_time(infeasible))
    with pytest.raises(PlanError) as error:
        search(calls, Cluster(), MESH, Options(memory=memory))
    told = str(error.value)
    assert ("was found in the 3 s" in told) != infeasible
    assert ("contradict" in told) == (infeasible and memory is None)
    assert ("memory=64 bytes" in told) == (memory == 64)
    assert "0 bytes" not in told
    assert ("time" in price_layouts(known, {}).why) != infeasible


def test_a_plan_that_fits_is_kept_where_the_other_search_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*args: Any, **kwargs: Any) -> Any:
        raise PlanError("no plan fits")

    monkeypatch.setattr(api, "search", none)
    plan = flow.auto.plan(nn.Linear(8, 16), (X,), Cluster(size=4))
    assert plan.choices["micro_batches"] == 1
    assert len(plan.choices["stages"]) == 1
    assert "data parallel" in plan.alternatives


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "width", "rows"),
    [
        ("dgx-h100", 128, 256),
        ("dgx-h100", 512, 32),
        ("ethernet-10g", 256, 64),
        ("pcie-a100", 256, 1024),
    ],
)
@pytest.mark.sweep(4)
def test_no_mesh_has_a_plan_that_is_better(name: str, width: int, rows: int) -> None:
    """No single mesh has a better plan than the search over all meshes. The solver plans each mesh
    that may be the best."""
    with torch.device("meta"):
        layers = [
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(2)
        ]
        model, x = nn.Sequential(*layers), torch.empty(rows, width)
    cluster = Cluster.preset(name).with_size(8)
    plan, calls = flow.auto.plan(model, (x,), cluster), calls_of_model(model, (x,))
    assert plan.bound <= plan.cost
    for where in meshes(8, cluster, 2):
        one = search(
            calls, cluster, where, Options(memory=cluster.memory or None), compared=False
        ).plan
        assert min(plan.cost, plan.seconds) <= one.cost * (1 + 1e-3), where.shape
        assert plan.bound <= one.cost * (1 + 1e-9), where.shape


def test_the_solvers_plan_on_one_mesh_is_what_is_simulated_and_shown() -> None:
    with torch.device("meta"):
        model, x = (
            nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]),
            torch.empty(1 << 14, 512),
        )
    cluster = Cluster.preset("dgx-h100").with_size(4)
    plan = flow.auto.plan(model, (x,), cluster)
    (stage,) = plan.choices["stages"]
    assert (stage["lane"], stage["ranks"], tuple(stage["mesh"]), stage["memory"]) == (
        0,
        [0, 4],
        plan.mesh,
        plan.memory,
    )
    assert plan.seconds == pytest.approx(plan.cost, rel=0.05)
    slower = dataclasses.replace(
        cluster, name="slower", flops={kind: rate / 8 for kind, rate in cluster.flops.items()}
    )
    calls = calls_of_model(model, (x,))
    assert predict(plan, cluster, calls).seconds == pytest.approx(plan.seconds, rel=0.02)
    assert predict(plan, slower, calls).seconds > 2 * plan.seconds
    assert max(level for _, level in plan.over_time) == plan.memory
    assert plan.timeline["traceEvents"]


# --------------------------------------------------------------------------------- prices and files


def test_waiting_counts_for_what_goes_on_from_a_second_layout() -> None:
    calls = calls_of_model(nn.Linear(8, 16), (torch.empty(4, 8, requires_grad=True),))
    value = next(v for v in calls.values if v.state == "input")
    plain, waiting = (
        _Builder(
            calls, MESH, Options(wait=wait), FormulationCache(Cluster(), MESH, True)
        )._boxing_seconds(value, [(S(0),)], [(S(0),), (S(1),)])
        for wait in (0, 1)
    )
    np.testing.assert_allclose(waiting - plain, [[0.0, 2.0]])
    assert plain[0, 1] > 0


def test_a_missing_plan_of_a_graph_is_told(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"none\.json is no plan: FileNotFoundError"):
        GraphPlan.load(tmp_path / "none.json")


def test_calls_have_the_line_of_the_user() -> None:
    """The frames between are torch's, ours, and those of the standard library."""
    plan = flow.auto.plan(nn.Sequential(nn.Linear(8, 16), nn.GELU()), X, "dgx-h100", mesh=(2,))
    assert {call.where.rpartition(":")[0] for call in plan.calls} == {__file__}


class Returning(nn.Module):
    """A model that returns tensors which none of its operations makes or uses."""

    def __init__(self, *returned: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(3))
        self.returned = returned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = {"weight": self.inner.weight, "table": self.table, "x": x, "sum": x + 1}
        return tuple(held[name] for name in self.returned)


@pytest.mark.parametrize(
    "returned", [("sum", "weight"), ("sum", "table"), ("sum", "x"), ("weight", "table", "sum")]
)
@pytest.mark.parametrize("options", [{}, {"mesh": (2, 2)}, {"objective": "memory"}])
def test_results_that_no_operation_makes(
    returned: tuple[str, ...], options: dict[str, Any]
) -> None:
    plan = flow.auto.plan(Returning(*returned), X, Cluster(size=4), **options)
    alone = flow.auto.plan(Returning("sum"), X, Cluster(size=4), **options)
    assert plan.cost == pytest.approx(alone.cost)
    assert plan.report()


@pytest.mark.parametrize("options", [{}, {"objective": "memory"}])
def test_a_model_without_operations_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"the model runs no operation on tensors"):
        flow.auto.plan(nn.Identity(), X, Cluster(size=4), **options)
