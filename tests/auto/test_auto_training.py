"""Tests that automatic parallelism changes no number. Graphs and eager models with a searched
layout train as one device does."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_strategies import Attention, Pictures, whole
from torch import nn

import globaltensor as flow
from globaltensor.auto.apply import graphs
from globaltensor.auto.apply.eager import plan_of
from globaltensor.auto.intra_op import search as search_module
from globaltensor.auto.intra_op.search import search
from globaltensor.auto.plan.plan import Alternative
from globaltensor.cluster import Cluster, use_cluster
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GraphError
from globaltensor.graph.graph import Graph
from globaltensor.sbp import broadcast as B
from globaltensor.sbp import split as S
from globaltensor.sharding.placement import Placement

GRIDS = [((2,), "usual"), ((2,), "joined"), ((2,), "apart"), ((3,), "usual"), ((2, 2), "usual")]


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), x)


class Recurrent(nn.Module):
    """A model of layers that are compositions: an LSTM, and torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.lstm(x)[0]).pow(2).mean()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mlp": (Mlp, lambda: (numbers(6, 8),)),
    "attention": (Attention, lambda: (torch.randint(0, 12, (6, 8)), torch.randint(0, 12, (6, 8)))),
    "pictures": (Pictures, lambda: (numbers(5, 4, 8, 8),)),
    "recurrent": (Recurrent, lambda: (numbers(4, 5, 8),)),
}
#: Machines that call for different plans: the usual one, one where moving data costs almost
#: nothing, and one where moving data costs nearly all of the time.
CLUSTERS = {
    "usual": Cluster(),
    "joined": Cluster(launch=0, latency=0, bandwidth=1e15, kernel=0.0, flops={"float32": 1e6}),
    "apart": Cluster(bandwidth=1e3),
}

CASES = [
    pytest.param(
        name,
        grid,
        cluster,
        id=f"{name}-{grid}-{cluster}",
        marks=[pytest.mark.slow] if name == "recurrent" and grid == (2, 2) else [],
    )
    for name in MODELS
    for grid, cluster in GRIDS
]


_drawing = threading.Lock()  # simulated ranks share torch's generator


def made(name: str) -> nn.Module:
    with _drawing:
        torch.manual_seed(3)
        return MODELS[name][0]().double()


def drawn(name: str, step: int) -> tuple[torch.Tensor, ...]:
    with _drawing:
        torch.manual_seed(70 + step)
        return MODELS[name][1]()


def plainly(name: str, steps: int = 2) -> tuple[list[float], list[torch.Tensor]]:
    model = made(name)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*drawn(name, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def mesh(grid: tuple[int, ...]) -> Placement:
    return Placement("cpu", np.arange(np.prod(grid)).reshape(grid))


def spread(t: torch.Tensor, where: Placement, sbp: Any = B) -> Any:
    return t.to_global(where, [B] * where.axes, check_meta=False).to_global(sbp=[sbp] * where.axes)  # type: ignore[attr-defined]


class Training(flow.nn.Graph):
    def __init__(
        self, model: nn.Module, settings: Callable[[Any], Any] = lambda config: None
    ) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        self.config.enable_auto_parallel()
        settings(self.config)

    def build(self, *inputs: Any) -> Any:
        loss = self.model(*inputs)
        loss.backward()
        return loss


def same(name: str, model: nn.Module, losses: list[Any]) -> None:
    want, parameters = plainly(name, len(losses))
    assert [whole(x).item() for x in losses] == pytest.approx(want, rel=1e-9)
    for (path, ours), theirs in zip(model.named_parameters(), parameters, strict=True):
        torch.testing.assert_close(
            whole(ours.detach()),
            theirs,
            rtol=1e-9,
            atol=1e-9,
            msg=lambda m, path=path: f"{path}: {m}",
        )


@pytest.mark.long
@pytest.mark.parametrize(("name", "grid", "cluster"), CASES)
@pytest.mark.sweep(12)
def test_a_graph_trains_as_one_device_does(name: str, grid: tuple[int, ...], cluster: str) -> None:
    def run() -> str:
        with use_cluster(CLUSTERS[cluster]):
            where = mesh(grid)
            model = made(name).to_global(where, [B] * where.axes)
            graph = Training(model)
            losses = [
                graph(*(spread(t, where, S(0) if step else B) for t in drawn(name, step)))
                for step in range(2)
            ]
            same(name, model, losses)
            return repr(graph.auto_plan().parameters)

    laid = simulate(int(np.prod(grid)), run)
    assert len(set(laid)) == 1  # the same on every rank


@pytest.mark.long
@pytest.mark.parametrize(("name", "grid", "cluster"), CASES)
@pytest.mark.sweep(12)
def test_an_eager_model_trains_as_one_device_does(
    name: str, grid: tuple[int, ...], cluster: str
) -> None:
    def run() -> None:
        with use_cluster(CLUSTERS[cluster]):
            where = mesh(grid)
            model = flow.parallelize(made(name), where, "auto")
            assert plan_of(model) is None
            optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
            for step in range(2):
                optimizer.zero_grad()
                loss = model(*(spread(t, where) for t in drawn(name, step)))
                loss.backward()
                optimizer.step()
                losses.append(loss)
            same(name, model, losses)
            assert plan_of(model) is not None

    simulate(int(np.prod(grid)), run)


def test_machines_call_for_different_plans() -> None:
    def run(cluster: Cluster) -> Any:
        with use_cluster(cluster):
            where = mesh((2,))
            model = Mlp(256).double().to_global(where, [B])
            graph = Training(model)
            graph(spread(torch.ones(2, 256, dtype=torch.float64), where))
            return graph.auto_plan()

    joined, apart = (simulate(2, run, CLUSTERS[name])[0] for name in ("joined", "apart"))
    assert sum(c.bytes for c in apart.changes) < sum(
        c.bytes for c in joined.changes
    )  # a machine with slow transfers moves less
    assert apart.cost <= min(a.cost for a in apart.alternatives.values())


def test_explicit_layouts_stay_unless_ignored() -> None:
    class Explicit(nn.Module):
        def __init__(
            self, inner: nn.Module
        ) -> None:  # the model is from `made`, so nothing else may draw during the call
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            seen = x.to_global(sbp=[S(1)]) * 2.0
            return self.inner(seen / 2.0), seen

    class Twice(Training):
        def build(self, x: Any) -> Any:
            loss, seen = self.model(x)
            loss.backward()
            return loss, seen

    def run(ignore: bool) -> Any:
        with use_cluster(CLUSTERS["apart"]):
            where = mesh((2,))
            model = Explicit(made("mlp"))
            model.to_global(where, [B])  # type: ignore[operator]
            graph = Twice(
                model, lambda config: config.enable_auto_parallel_ignore_user_sbp_config(ignore)
            )
            loss, seen = graph(spread(drawn("mlp", 0)[0], where))
            assert whole(loss).item() == pytest.approx(plainly("mlp", 1)[0][0], rel=1e-9)
            return seen.sbp

    assert simulate(2, run, False)[0] == (S(1),)
    assert simulate(2, run, True)[0] != (S(1),)


@pytest.mark.long
def test_another_graph_takes_the_parameters_as_they_lie() -> None:
    """An evaluating graph that shares a training graph's parameters changes neither that graph's
    plan nor its numbers (OneFlow issue 9140)."""

    class Evaluating(flow.nn.Graph):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.config.enable_auto_parallel()

        def build(self, *inputs: Any) -> Any:
            return self.model(*inputs)

    def run() -> None:
        where = mesh((2,))
        model = made("attention").to_global(where, [B])
        training, evaluating = Training(model), Evaluating(model)
        losses = []
        for step in range(3):
            inputs = [spread(t, where) for t in drawn("attention", step)]
            before = evaluating(*inputs)
            if step == 1:
                layouts = [p.sbp for p in model.parameters()]  # type: ignore[attr-defined]
            losses.append(training(*inputs))
            assert whole(before).item() == pytest.approx(whole(losses[-1]).item(), rel=1e-9)
        assert layouts == [p.sbp for p in model.parameters()]  # type: ignore[attr-defined]
        same("attention", model, losses)
        assert training._captures == 2  # once to search, once to follow

    simulate(2, run)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        lambda c: c.enable_zero(True, stage=3, shard_min_size=1),
        lambda c: c.set_gradient_accumulation_steps(2),
        lambda c: c.enable_auto_memory("HeavyMemoryDown"),
        lambda c: c.enable_auto_memory("SlightMemoryDown"),
        lambda c: c.enable_auto_parallel_sbp_collector(False),
        lambda c: c.enable_auto_parallel_trunk_algo(False),
    ],
    ids=["zero", "accumulation", "least memory", "less memory", "no collector", "no trunk"],
)
@pytest.mark.sweep(4)
def test_with_other_settings(settings: Callable[[Any], Any]) -> None:
    def run() -> None:
        where = mesh((2,))
        model = made("attention").to_global(where, [B])
        graph = Training(model, settings)
        losses = [
            graph(*(spread(t, where, S(0)) for t in drawn("attention", step))) for step in range(2)
        ]
        same("attention", model, losses)

    simulate(2, run)


@pytest.mark.long
def test_less_memory_is_less() -> None:
    def run(mode: str) -> int:
        where = mesh((2,))
        model = Mlp(64).double().to_global(where, [B])
        graph = Training(model, lambda c: c.enable_auto_memory(mode))
        graph(spread(torch.ones(64, 64, dtype=torch.float64), where))
        return graph.auto_plan().memory  # type: ignore[no-any-return]

    most, half, least = (
        simulate(2, run, mode)[0] for mode in ("Disable", "ModerateMemoryDown", "HeavyMemoryDown")
    )
    assert least <= half <= most
    assert least < most


def test_settings_are_checked() -> None:
    config = Training(Mlp()).config
    for name, value in (
        ("enable_auto_memory", "Sideways"),
        ("set_auto_parallel_wait_time", -1),
        ("set_auto_parallel_computation_cost_ratio", "much"),
    ):
        with pytest.raises(GraphError, match=f"{name}.*{value}"):
            getattr(config, name)(value)


def test_a_model_of_no_placement_is_told() -> None:
    with pytest.raises(GraphError, match="needs a model on a placement"):
        Training(Mlp())(torch.randn(2, 8))
    with pytest.raises(GraphError, match="no automatic plan"):
        Training(Mlp()).auto_plan()


def test_a_model_laid_out_can_be_copied() -> None:
    def run() -> None:
        where = mesh((2,))
        model = flow.parallelize(made("mlp"), where, "auto")
        early = copy.deepcopy(model)
        x = spread(drawn("mlp", 0)[0], where)
        want = whole(model(x)).item()
        assert whole(early(x)).item() == pytest.approx(want, rel=1e-12)
        assert whole(copy.deepcopy(model)(x)).item() == pytest.approx(want, rel=1e-12)

    simulate(2, run)


def test_inputs_beforehand() -> None:
    def run() -> None:
        where = mesh((2,))
        model = flow.parallelize(made("mlp"), where, "auto", inputs=drawn("mlp", 0))
        assert plan_of(model) is not None
        assert whole(model(spread(drawn("mlp", 0)[0], where))).item() == pytest.approx(
            plainly("mlp", 1)[0][0], rel=1e-9
        )

    simulate(2, run)


@pytest.mark.long
def test_recurrent_layers_know_their_weights_after_a_capture() -> None:
    """Recurrent layers use their current weights after a second capture. Such layers hold a list of
    weights in addition to their parameters. A second capture, with the weights in another layout,
    once used the old list."""

    def run() -> None:
        where = mesh((2,))
        model = made("recurrent").to_global(where, [B])
        graph = Training(model, lambda c: c.enable_auto_parallel(False))
        losses = [
            graph(spread(drawn("recurrent", 0)[0], where)),
            graph(spread(drawn("recurrent", 1)[0], where, S(0))),
        ]
        same("recurrent", model, losses)
        assert all(
            a is b
            for a, b in zip(model.lstm._flat_weights, model.lstm._parameters.values(), strict=True)
        )

    simulate(2, run)


@pytest.mark.long
def test_a_model_with_experts() -> None:
    """A model with experts trains by its plan. Which tokens go to which experts depends on values,
    but the tokens' layout does not."""
    pytest.importorskip("transformers")
    from test_parallelize import FAMILIES, of_depth

    model, batch = of_depth("mixtral", 1), FAMILIES["mixtral"][3](4)
    plan = flow.auto.plan(model, (), "dgx-h100", kwargs=batch, mesh=(4,))
    assert any(call.function == "moe_experts" for call in plan.calls)
    assert not any("forward" in part.__dict__ for part in model.modules())  # the model is unchanged
    want = copy.deepcopy(model)(**batch).loss.item()

    class Loss(flow.nn.Graph):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.config.enable_auto_parallel()

        def build(self, **batch: Any) -> Any:
            return self.model(**batch).loss

    def run() -> float:
        where = mesh((2,))
        graph = Loss(copy.deepcopy(model).to_global(where, [B]))  # type: ignore[operator]
        return whole(graph(**{name: spread(t, where) for name, t in batch.items()})).item()

    assert simulate(2, run) == pytest.approx([want] * 2, rel=1e-9)


@pytest.mark.parametrize("case", ["error", "code", "search", "eager error", "eager code"])
def test_ranks_that_differ_are_told_before_one_waits(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose model fails, whose model differs, or whose search fails raises an error on every
    rank."""

    class Odd(Mlp):
        def forward(self, x: Any) -> Any:
            if flow.env.get_rank() == 1 and "error" in case:
                raise ValueError("of its own")
            return (
                super().forward(x) * 2.0
                if flow.env.get_rank() == 1 and "code" in case
                else super().forward(x)
            )

    def searched(*args: Any, **kwargs: Any) -> Any:
        if flow.env.get_rank() == 1 and case == "search":
            raise ValueError("of its own")
        return search(*args, **kwargs)

    monkeypatch.setattr(graphs, "search", searched)

    def run() -> str:
        where = mesh((2,))
        model = Odd().double()
        made = (
            flow.parallelize(model, where, "auto")
            if "eager" in case
            else Training(model.to_global(where, [B]))
        )
        with pytest.raises(Exception) as error:
            made(spread(numbers(6, 8), where))
        return str(error.value)

    first, second = simulate(2, run)
    if "code" in case:
        assert all(
            "rank 1 has captured another graph than rank 0; the graphs differ from op" in told
            for told in (first, second)
        )
    else:
        assert "rank 1 could not" in first
        assert "of its own" in first
        assert "of its own" in second


def test_a_plan_is_that_of_the_inputs_last_seen() -> None:
    def run() -> None:
        where = mesh((2,))
        graph = Training(Mlp().double().to_global(where, [B]))
        few, many = (spread(torch.ones(n, 8, dtype=torch.float64), where) for n in (2, 6))
        found = {}
        for x in (few, many):
            graph(x)
            found[x] = graph.auto_plan()
        assert [
            next(g.shape for g in found[x].placed if g.kind == "input") for x in (few, many)
        ] == [(2, 8), (6, 8)]
        graph(few)
        assert graph.auto_plan() is found[few]
        graph.use_plan(graph.plan())
        graph(few)
        with pytest.raises(GraphError, match="no automatic plan of the inputs last seen"):
            graph.auto_plan()

    simulate(2, run)


def test_a_search_that_nothing_was_built_from_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    where = mesh((1,))
    graph = Training(Mlp().double().to_global(where, [B]))
    keys = iter([Graph._key])
    monkeypatch.setattr(Graph, "_key", lambda *given: next(keys)(*given))
    with pytest.raises(StopIteration):
        graph(spread(numbers(2, 8), where))
    assert graph._arranged is None


def test_a_first_call_that_fails_is_not_the_last_to_search() -> None:
    def run() -> None:
        where = mesh((2,))
        model = flow.parallelize(made("mlp"), where, "auto")
        with pytest.raises(RuntimeError):
            model(spread(numbers(2, 5), where))
        assert plan_of(model) is None
        model(spread(drawn("mlp", 0)[0], where))
        assert plan_of(model) is not None

    simulate(2, run)


class Steps(nn.Module):
    """A model that writes its results into a plain tensor, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs, h = torch.zeros(x.shape, dtype=x.dtype), x[:, 0]
        for t in range(1, x.shape[1]):
            h = self.cell(x[:, t], h)
            outs[:, t] = self.head(h)
        return outs.pow(2).mean()


def test_a_model_that_writes_into_a_plain_tensor() -> None:
    with _drawing:
        torch.manual_seed(3)
        plain, x = Steps().double(), numbers(4, 3, 8)

    def run() -> None:
        where = mesh((2,))
        model = flow.parallelize(copy.deepcopy(plain), where, "auto")
        loss = model(spread(x, where))
        assert loss.item() == pytest.approx(plain(x).item(), rel=1e-12)
        assert plan_of(model) is not None

    simulate(2, run)


class SharedEmbedding(nn.Module):
    """An encoder and a decoder that share one embedding module, whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"tokens": nn.Embedding(12, 8)})
        self.decoder = nn.ModuleDict({"tokens": self.encoder["tokens"]})
        self.head = nn.Linear(8, 12)
        self.head.weight = self.encoder["tokens"].weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder["tokens"](source).mean(1, keepdim=True)
        logits = self.head(encoded + self.decoder["tokens"](target))
        return F.cross_entropy(logits.flatten(0, 1), source.flatten())


def test_a_module_with_two_names_trains_as_on_one_device() -> None:
    """A search leaves the parameters of a module that has several names in the model."""
    with _drawing:
        torch.manual_seed(3)
        plain = SharedEmbedding().double()
        source, target = torch.randint(12, (4, 5)), torch.randint(12, (4, 5))
    want = copy.deepcopy(plain)
    loss = want(source, target)
    loss.backward()

    def run() -> None:
        where = mesh((2,))
        model = flow.parallelize(copy.deepcopy(plain), where, "auto")
        held = model.encoder["tokens"].weight
        found = model(spread(source, where), spread(target, where))
        found.backward()
        assert plan_of(model) is not None
        assert model.decoder["tokens"].weight is held
        assert model.head.weight is held
        torch.testing.assert_close(whole(found), loss.detach())
        for name, p in want.named_parameters():
            torch.testing.assert_close(whole(model.get_parameter(name).grad), p.grad)

    simulate(2, run)


class HeldTwice(nn.Module):
    """A module that keeps its parameter and its buffer in a container of its own, too."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(6, 8))
        self.register_buffer("shift", numbers(8))
        pair = self.weight, self.shift
        self.held: Any = {
            "tuple": pair,
            "list": list(pair),
            "dict in a list": [{"pair": pair}],
        }[container]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, shift = self.held[0]["pair"] if len(self.held) == 1 else self.held
        return torch.tanh(x @ weight + shift)


@pytest.mark.parametrize("container", ["tuple", "list", "dict in a list"])
def test_parameters_that_a_module_also_keeps_in_a_container(container: str) -> None:
    made = HeldTwice(container)
    models = [copy.deepcopy(made) for _ in range(3)]
    x = numbers(4, 6)

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def train_with_plan() -> list[float]:
        model = models[flow.env.get_rank()]
        return train(flow.parallelize(model, flow.placement.all("cpu"), "auto"))

    expected = train(models[2])
    for losses in simulate(2, train_with_plan):
        torch.testing.assert_close(losses, expected)


class CachedTable(nn.Module):
    """A layer that fills a table at its first call and notes in numbers how much of it is filled.

    Layers of rotary embeddings are made so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(16, 8), persistent=False)
        self.filled, self.cache, self.seen = 0, {"calls": 0}, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache["calls"] += 1
        self.seen.append(x.shape[1])
        if self.filled < x.shape[1]:
            self.table[: x.shape[1]] = torch.arange(8) + torch.arange(x.shape[1])[:, None]
            self.filled = x.shape[1]
            self.cache["size"] = self.filled
        return (self.linear(x) * self.table[: self.filled]).pow(2).mean()


def test_a_search_leaves_no_number_in_the_modules() -> None:
    with _drawing:
        torch.manual_seed(3)
        plain, x = CachedTable().double(), numbers(4, 3, 8)
    want = copy.deepcopy(plain)
    losses = [want(x).item() for _ in range(2)]

    def run() -> None:
        where = mesh((2,))
        model = flow.parallelize(copy.deepcopy(plain), where, "auto")
        assert [model(spread(x, where)).item() for _ in range(2)] == pytest.approx(losses)
        assert plan_of(model) is not None
        assert (model.filled, model.cache, model.seen) == (want.filled, want.cache, want.seen)
        captured = copy.deepcopy(plain).to_global(where, [B])
        graph = Training(captured, lambda c: c.enable_auto_parallel())
        assert graph(spread(x, where)).item() == pytest.approx(losses[0])
        assert captured.filled == want.filled
        torch.testing.assert_close(whole(captured.table), want.table)

    simulate(2, run)


def test_a_model_that_asks_for_values_is_told_of_other_plans() -> None:
    class Asking(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    def run() -> None:
        where = mesh((2,))
        with pytest.raises(GraphError, match=r"asks for the value of a tensor") as raised:
            flow.parallelize(Asking().double(), where, "auto")(spread(numbers(2, 8), where))
        said = "\n".join(
            [str(raised.value), *getattr(raised.value, "__notes__", [])]
        )  # notes exist since Python 3.11
        assert 'for a model that reads values of tensors, name a plan: "data"' in said

    simulate(2, run)


def test_a_first_call_inside_a_graph_is_too_late() -> None:
    def run() -> None:
        where = mesh((2,))
        inputs = spread(drawn("mlp", 0)[0], where)
        graph = Training(
            flow.parallelize(made("mlp"), where, "auto"), lambda c: c.enable_auto_parallel(False)
        )
        with pytest.raises(
            GraphError,
            match=r"Mlp gets its layouts at its first call .* pass parallelize example inputs=",
        ):
            graph(inputs)
        model = flow.parallelize(made("mlp"), where, "auto", inputs=drawn("mlp", 0))
        graph = Training(model, lambda c: c.enable_auto_parallel(False))
        same(
            "mlp",
            model,
            [graph(*(spread(t, where) for t in drawn("mlp", step))) for step in range(2)],
        )

    simulate(2, run)


def test_alternatives_are_priced_once_where_memory_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        search_module, "price_layouts", lambda *args: seen.append(args) or Alternative(1.0, 0, True)
    )
    where = mesh((1,))
    graph = Training(
        Mlp().double().to_global(where, [B]), lambda c: c.enable_auto_memory("HeavyMemoryDown")
    )
    graph(spread(numbers(2, 8), where))
    assert len(seen) == 1
    assert list(graph.auto_plan().alternatives) == ["data parallel"]
    line = "  not priced: tensor parallel, fully sharded (ZeRO-3). The search of graphs "
    assert line in graph.auto_plan().report()
