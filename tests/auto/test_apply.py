"""Tests of applying a plan to a model: `flow.parallelize(model, placement, plan)` and
`config.use_auto_plan(plan)` with a plan that was found elsewhere. Plans with stages are
included."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_search import GPT, only
from torch import Tensor

import globaltensor as flow
from globaltensor.auto.inter_op.search import SearchSpace, search_pipelines
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.auto.plan.plan import Plan
from globaltensor.cluster import Cluster
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import PlanError

B, S = flow.sbp.broadcast, flow.sbp.split
ROWS, TIME, WORDS, WIDTH = 8, 6, 20, 16
CLUSTER = Cluster.preset("dgx-h100")


def made(layers: int = 4, tied: bool = False) -> nn.Module:
    """Return a model with the same weights on every rank. Ranks are threads that share torch's
    generator."""
    with torch.device("meta"):
        model = GPT(layers, WIDTH, 2, WORDS, TIME, tied).double()
    model = model.to_empty(device="cpu")
    if tied:
        model.head.weight = model.words.weight
    gen = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64) * 0.3)
    return model


def drawn(step: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(70 + step)
    ids = torch.randint(0, WORDS, (ROWS, TIME + 1), generator=gen)
    return ids[:, :-1], ids[:, 1:]


def searched(
    n: int,
    space: SearchSpace | None,
    memory: int | None = None,
    tied: bool = False,
    layers: int = 4,
) -> Plan:
    """Return the plan of the search over everything for ``n`` devices."""
    with torch.device("meta"):
        model = GPT(layers, WIDTH, 2, WORDS, TIME, tied).double()

    def of(rows: int) -> Any:
        return calls_of_model(
            model, tuple(torch.empty(rows, TIME, dtype=torch.long, device="meta") for _ in range(2))
        )

    return search_pipelines(of, ROWS, CLUSTER.with_size(n), n, Options(memory=memory), space)


def number(loss: Tensor) -> float:
    if isinstance(loss, flow.GlobalTensor):  # bring it to every rank, from any stage
        loss = loss.detach().to_global(flow.placement.all("cpu"), B).to_local()  # type: ignore[attr-defined]
    return loss.item()


def trained(
    step_of: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    given: Callable[[Tensor], Any],
    steps: int,
) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = step_of(*map(given, drawn(step)))
        loss.backward()
        optimizer.step()
        losses.append(number(loss))
    return losses


def plainly(tied: bool, layers: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = made(layers, tied)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return trained(model, optimizer, lambda t: t, steps), {
        path: p.detach() for path, p in model.named_parameters()
    }


class Training(flow.nn.Graph):
    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        self.config.use_auto_plan(plan)

    def build(self, *inputs: Any) -> Any:
        loss = self.model(*inputs)
        loss.backward()
        return loss


def same(model: nn.Module, losses: list[float], tied: bool, layers: int) -> None:
    want, parameters = plainly(tied, layers, len(losses))
    assert losses == pytest.approx(want, rel=1e-9)
    for path, p in model.named_parameters():
        everywhere = p.detach().to_global(flow.placement.all("cpu"), B)._local  # type: ignore[attr-defined]
        torch.testing.assert_close(
            everywhere,
            parameters[path],
            rtol=1e-7,
            atol=1e-9,
            msg=lambda m, path=path: f"{path}: {m}",
        )


def carried(
    plan: Plan, n: int, where: Callable[[], flow.placement], tied: bool = False, layers: int = 4
) -> list[Any]:
    """Train by the plan, in a graph and in eager mode, on ``n`` simulated ranks. Return each rank's
    plan of the graph."""

    def given(t: Tensor) -> Any:
        everyone = where()
        return t.to_global(everyone, [B] * everyone.axes, check_meta=False)  # type: ignore[attr-defined]

    def run() -> Any:
        model = flow.parallelize(made(layers, tied), where(), plan)
        assert flow.auto.plan_of(model) is not None
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        same(model, trained(model, optimizer, given, 2), tied, layers)
        model = flow.parallelize(made(layers, tied), where(), plan)
        graph = Training(model, plan)
        same(model, [number(graph(*map(given, drawn(step)))) for step in range(2)], tied, layers)
        laid = {path: tuple(e.short for e in p.sbp) for path, p in model.named_parameters()}
        assert laid == {path: layout for path, layout in plan.parameters.items() if path in laid}
        return graph.plan()

    return simulate(n, run)


def line(n: int) -> Callable[[], flow.placement]:
    return lambda: flow.placement("cpu", np.arange(n))


@pytest.mark.long
@pytest.mark.parametrize("layers", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_a_plan_on_one_mesh(layers: int, tmp_path: Path) -> None:
    plan = searched(2, only((2,)), layers=layers)
    plan.save(tmp_path / "plan.json")
    carried(flow.auto.load_plan(tmp_path / "plan.json"), 2, line(2), layers=layers)


class Recurrent(nn.Module):
    """A model with a recurrent layer, which keeps its weights in a list of its own too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_a_plan_of_a_model_with_a_recurrent_layer(kind: str, tmp_path: Path) -> None:
    """The plan had the layer's weights twice, so it could not be applied to the model."""
    model = Recurrent(kind).double()
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    want = model(x)
    plan = flow.auto.plan(model, x, CLUSTER, mesh=(2,))
    assert list(plan.parameters) == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)  # the search has left it as it was
    plan.save(tmp_path / "plan.json")
    loaded, copies = (
        flow.auto.load_plan(tmp_path / "plan.json"),
        [copy.deepcopy(model) for _ in range(2)],
    )

    def run() -> Tensor:
        own = flow.parallelize(copies[flow.env.get_rank()], line(2)(), loaded)
        return own(x).to_global(sbp=B).to_local().detach()  # type: ignore[attr-defined, no-any-return]

    for got in simulate(2, run):
        torch.testing.assert_close(got, want.detach())


def test_a_wrapped_forward_may_take_other_arguments_than_it_says() -> None:
    class Scaled(nn.Linear):
        @functools.wraps(nn.Bilinear.forward)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = Scaled(4, 4)
    assert list(flow.auto.plan(model, torch.empty(8, 4), CLUSTER, mesh=(2,)).parameters)


def test_inputs_that_forward_does_not_take_are_told() -> None:
    with torch.device("meta"):
        layer = nn.Bilinear(2, 3, 4)
    with pytest.raises(
        PlanError,
        match=r"Bilinear\.forward\(.* does not take .*: missing a .*'input2'\. Pass several",
    ):
        flow.auto.plan(layer, torch.empty(4, 2), CLUSTER, mesh=(2,))
    both = torch.empty(4, 2), torch.empty(4, 3)
    assert list(flow.auto.plan(layer, both, CLUSTER, mesh=(2,)).parameters)


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [line(4), lambda: flow.placement("cpu", np.arange(4).reshape(2, 2))],
    ids=["one", "two"],
)
@pytest.mark.parametrize("layers", [2, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.sweep(2, kind=lambda where, layers: layers)
def test_a_plan_of_a_mesh_with_two_axes_on_a_placement_with_one(
    where: Callable[[], flow.placement], layers: int
) -> None:
    with torch.device("meta"):
        model = GPT(layers, WIDTH, 2, WORDS, TIME, False).double()
    inputs = tuple(torch.empty(ROWS, TIME, dtype=torch.long, device="meta") for _ in range(2))
    plan = flow.auto.plan(model, inputs, CLUSTER.with_size(4), mesh=(2, 2))
    assert plan.mesh == (2, 2)
    carried(plan, 4, where, layers=layers)


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.sweep(2)
def test_a_plan_in_stages_and_micro_batches(tied: bool) -> None:
    plan = searched(4, only((2,), 2, 4, schedules=("1f1b",)), tied=tied)
    stages = plan.choices["stages"]
    assert len(stages) == 2
    seen = carried(plan, 4, line(4), tied)[0]
    placed = {op.name: op.stage for op in seen}
    planned = {name: k for k, stage in enumerate(stages) for name in _names(plan, stage)}
    assert {placed[name] for name in placed} >= {0, 1}
    layers = [
        {op.stage for op in seen if op.module.startswith(f"model.blocks.{k}")} for k in range(4)
    ]
    wanted = [
        {planned[c.name] for c in plan.calls if c.module.startswith(f"blocks.{k}")}
        for k in range(4)
    ]
    assert layers == wanted, "blocks are where the plan has them"


def _names(plan: Plan, stage: dict[str, Any]) -> list[str]:
    names = [c.name for c in plan.calls]
    first, last = stage["calls"]
    return names[names.index(first) : names.index(last) + 1]


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
@pytest.mark.sweep(3)
def test_a_plan_with_a_schedule(schedule: str) -> None:
    plan = searched(2, only((1,), 2, 4, schedules=(schedule,)))
    assert plan.choices["schedule"] == schedule
    model_stages = len(plan.choices["stages"])
    assert model_stages == (2 if schedule == "zb-h1" else 4)
    carried(plan, 2, line(2))


@pytest.mark.long
@pytest.mark.parametrize("layers", [3, pytest.param(4, marks=pytest.mark.extended)])
def test_what_a_plan_recomputes_and_shares_is_taken(layers: int) -> None:
    free = searched(2, only((2,), 1, 2), layers=layers)
    tight = searched(2, only((2,), 1, 2), memory=int(free.memory * 0.55), layers=layers)
    assert tight.choices["recompute"] or tight.choices["zero"], (
        "memory is short enough for something to be done"
    )
    carried(tight, 2, line(2), layers=layers)

    def settings() -> Any:
        model = flow.parallelize(made(layers), line(2)(), tight)
        graph = Training(model, tight)
        again = {
            path
            for path, m in model.named_modules()
            if "_stage" in m.__dict__ and m.__dict__["_stage"].activation_checkpointing
        }
        return graph.config.zero, graph.config.accumulation, again

    zero, accumulation, again = simulate(2, settings)[0]
    assert accumulation == 2
    assert bool(zero) == bool(tight.choices["zero"])
    assert bool(again) == any(c.again for c in tight.calls)
    for path in again:
        assert all(
            c.again for c in tight.calls if c.module == path or c.module.startswith(f"{path}.")
        )


@pytest.mark.long
def test_recomputed_modules_are_those_wholly_recomputed() -> None:
    plan = searched(2, only((2,)))
    again = dataclasses.replace(
        plan,
        calls=tuple(
            dataclasses.replace(c, again=c.module.startswith(("blocks.1", "blocks.2.up")))
            for c in plan.calls
        ),
    )

    def run() -> Any:
        model = flow.parallelize(made(), line(2)(), again)
        return {path for path, m in model.named_modules() if "_stage" in m.__dict__}

    assert simulate(2, run)[0] == {"blocks.1", "blocks.2.up"}
    carried(again, 2, line(2))


@pytest.mark.long
def test_a_plan_made_for_a_graph_is_one_for_its_model() -> None:
    def run() -> Any:
        model = made().to_global(line(2)(), B)

        class Step(flow.nn.Graph):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.add_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))

            def build(self, *inputs: Any) -> Any:
                loss = self.model(*inputs)
                loss.backward()
                return loss

        inputs = tuple(t.to_global(line(2)(), B, check_meta=False) for t in drawn(0))
        return flow.auto.plan(Step(), inputs, CLUSTER.with_size(2), mesh=(2,))

    plan = simulate(2, run)[0]
    assert all(path.startswith("model.") for path in plan.parameters)

    def laid() -> Any:
        model = flow.parallelize(made(), line(2)(), plan)
        return {
            f"model.{path}": tuple(e.short for e in p.sbp) for path, p in model.named_parameters()
        }

    assert simulate(2, laid)[0] == plan.parameters


def test_what_does_not_go_with_a_plan_is_told() -> None:
    plan = searched(4, only((2,), 2, 4, schedules=("1f1b",)))

    def run() -> None:
        with pytest.raises(
            PlanError,
            match=r"the plan is for 4 ranks \(2 times a mesh of 2\), .* has 2: plan for as many",
        ):
            flow.parallelize(made(), line(2)(), plan)
        with pytest.raises(
            PlanError,
            match=(
                r"of another model than this Linear: parameter .* which has none of that name "
                r"\(but weight, bias"
            ),
        ):
            flow.parallelize(nn.Linear(2, 2), line(2)(), plan)
        with pytest.raises(
            PlanError,
            match=r"parameter blocks.0.down.bias is \[16\] in the plan, it is \[8\] there",
        ):
            flow.parallelize(GPT(4, 8, 2, WORDS, TIME, False), line(2)(), plan)

    simulate(2, run)


class Late(nn.Module):
    """A model that defines last the module that runs first. One norm serves all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head, self.first, self.norm = nn.Linear(8, 3), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(self.norm(x)))
        return F.cross_entropy(self.head(x), target)


def test_modules_are_where_the_plan_has_them_in_whatever_order_they_are_defined() -> None:
    with torch.device("meta"):
        meta = Late()
    plan = flow.auto.plan(
        meta, (torch.empty(8, 8), torch.empty(8, dtype=torch.long)), CLUSTER.with_size(1), mesh=(1,)
    )
    names = [c.name for c in plan.calls]
    cut = (
        names.index(next(c.name for c in plan.calls if c.module == "blocks.2")) - 1
    )  # and the norm before it
    halves = [
        {"lane": k, "calls": [part[0], part[-1]]}
        for k, part in enumerate((names[:cut], names[cut:]))
    ]
    plan = dataclasses.replace(plan, choices={**plan.choices, "stages": halves})

    def run() -> None:
        torch.manual_seed(0)
        gen = torch.Generator().manual_seed(1)
        model = Late().double()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64))
        x, y = (
            torch.randn(8, 8, generator=gen, dtype=torch.float64),
            torch.randint(0, 3, (8,), generator=gen),
        )
        want = model(x, y).item()
        model = flow.parallelize(model, line(2)(), plan)
        assert {path: p.placement.flat for path,
            p in model.named_parameters() if path.endswith("weight")} == {
            "blocks.0.weight": (0,), "blocks.1.weight": (0,), "blocks.2.weight": (1,),
            "blocks.3.weight": (1,), "head.weight": (1,), "first.weight": (0,),
            "norm.weight": (0,),
        }  # fmt: skip
        given = [t.to_global(line(2)(), B, check_meta=False) for t in (x, y)]
        assert number(model(*given)) == pytest.approx(want, rel=1e-12)

    simulate(2, run)


class Plain(nn.Module):
    """A model in which functions do all the work: no submodule runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(8, 8)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = F.gelu(F.layer_norm(F.relu(x @ w) + x, (8,)))
        return x.square().mean()


def test_a_stage_that_begins_with_no_module_is_told() -> None:
    with torch.device("meta"):
        calls = calls_of_model(Plain(), (torch.empty(8, 8),)).calls
        model = Plain()
    plan = flow.auto.plan(model, torch.empty(8, 8, device="meta"), CLUSTER.with_size(2), mesh=(1,))
    names = [c.name for c in plan.calls]
    assert len(calls) >= len(names) > 8
    halves = [
        {"lane": k, "calls": [part[0], part[-1]]} for k, part in enumerate((names[:8], names[8:]))
    ]
    staged = dataclasses.replace(plan, choices={**plan.choices, "stages": halves})

    def run() -> None:
        with pytest.raises(
            PlanError,
            match=(
                rf"stage 1 of the plan begins at {names[8]}, and no module of the model starts "
                rf"to run in it"
            ),
        ):
            flow.parallelize(Plain(), line(2)(), staged)

    simulate(2, run)


def hugging(kind: str) -> nn.Module:
    hf = pytest.importorskip("transformers")
    few = {
        "vocab_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    }
    torch.manual_seed(0)
    if kind == "bert":
        return hf.BertForMaskedLM(
            hf.BertConfig(**few, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        ).double()  # type: ignore[no-any-return]
    if kind == "llama":
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(**few, num_key_value_heads=1, use_cache=False)
        ).double()  # type: ignore[no-any-return]
    t5 = hf.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return hf.T5ForConditionalGeneration(t5).double()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llama", "t5"])
@pytest.mark.parametrize(
    "lanes",
    [
        pytest.param(((2,), "1f1b"), id="two stages of two"),
        pytest.param(((1,), "zb-v"), id="there and back"),
    ],
)
def test_models_of_hugging_face(kind: str, lanes: tuple[tuple[int, ...], str]) -> None:
    model, (mesh, schedule) = hugging(kind), lanes
    n, ids = (
        2 * int(np.prod(mesh)),
        torch.randint(0, 40, (ROWS, 8), generator=torch.Generator().manual_seed(3)),
    )

    def calls(rows: int) -> Any:
        return calls_of_model(
            model,
            (),
            {
                name: torch.empty(rows, 8, dtype=torch.long, device="meta")
                for name in ("input_ids", "labels")
            },
        )

    plan = search_pipelines(
        calls, ROWS, CLUSTER.with_size(n), n, Options(), only(mesh, 2, 4, schedules=(schedule,))
    )

    class Step(Training):
        def build(self, given: Any) -> Any:
            loss = self.model(input_ids=given, labels=given).loss
            loss.backward()
            return loss

    def eagerly(model: nn.Module, given: Any) -> list[float]:
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(input_ids=given, labels=given).loss
            loss.backward()
            optimizer.step()
            losses.append(number(loss))
        return losses

    want = eagerly(copy.deepcopy(model), ids)

    def run() -> None:
        given = ids.to_global(line(n)(), B, check_meta=False)  # type: ignore[attr-defined]
        assert eagerly(
            flow.parallelize(copy.deepcopy(model), line(n)(), plan), given
        ) == pytest.approx(want, rel=1e-9)
        step = Step(flow.parallelize(copy.deepcopy(model), line(n)(), plan), plan)
        # Llama computes its loss in float32, in the graph once for each micro-batch.
        assert [number(step(given)) for _ in range(2)] == pytest.approx(
            want, rel=1e-6 if kind == "llama" else 1e-9
        )

    simulate(n, run)
