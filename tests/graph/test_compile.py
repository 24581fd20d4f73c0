"""Tests of compiled graphs. Pure parts go to torch.compile, and the library's own steps stay
between them. Equal layers are compiled once, and the numbers stay the same."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import fx, nn

import globaltensor as flow
from globaltensor.graph.passes import compile
from globaltensor.graph.passes.compile import Compiled
from globaltensor.graph.passes.recompute import Recomputed
from globaltensor.graph.program.nodes import ProgramCall

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT, PARALLEL, loss_of, spread

B = flow.sbp.broadcast
LAYERS = 3


class Language(flow.nn.Graph):
    def __init__(self, model: nn.Module, backend: str | None) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if backend is not None:
            self.config.enable_compile(backend=backend)

    def build(self, rows: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, rows)
        loss.backward()
        return loss


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(LAYERS, 16, 2, 8).double()


def rows() -> torch.Tensor:
    return torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(3))


def parts(graph: Any, kind: type = Compiled) -> list[Any]:
    return [m for m in graph.program().modules() if isinstance(m, kind)]


def quietly(graph: Any, x: torch.Tensor, steps: int = 3) -> list[float]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torch's compiler itself
        return [graph(x).item() for _ in range(steps)]


def reference() -> list[float]:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, rows())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def calls(graph: Any) -> list[Any]:
    """Return the module of each call of the program, in order."""
    module: fx.GraphModule = graph.program()
    return [module.get_submodule(n.target) for n in module.graph.nodes if n.op == "call_module"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.sweep(2)
def test_layers_are_compiled_once_and_numbers_stay(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "_MAX_FUSED_CALLS", 1)
    graph = Language(gpt(), backend)
    assert quietly(graph, rows()) == pytest.approx(reference(), rel=1e-12)
    called = calls(graph)
    most = max(called.count(m) for m in called)
    assert most == LAYERS, "the layers are one module, called for each"
    assert len(parts(graph)) == len(called) - (LAYERS - 1)
    assert all(m.run is not None and m.run is not m.body for m in parts(graph)), "all were compiled"


@pytest.mark.long
@pytest.mark.parametrize(("together", "times"), [(10_000, 1), (50, 2), (30, 3)])
@pytest.mark.sweep(3)
def test_several_layers_are_compiled_together(
    together: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overhead of compiled code at each call is shared by as many layers as compile quickly."""
    monkeypatch.setattr(compile, "_MAX_FUSED_CALLS", together)
    torch.manual_seed(0)
    model = GPT(6, 16, 2, 8).double()
    graph = Language(copy.deepcopy(model), "eager")
    plain = torch.optim.SGD(model.parameters(), 0.1)
    for got in quietly(graph, rows()):
        plain.zero_grad()
        loss = loss_of(model, rows())
        loss.backward()
        plain.step()
        assert got == pytest.approx(loss.item(), rel=1e-12)
    called = calls(graph)
    assert max(called.count(m) for m in called) == times


@pytest.mark.slow
def test_inductor() -> None:
    graph = Language(gpt(), "inductor")
    assert quietly(graph, rows()) == pytest.approx(reference(), rel=1e-9)
    assert all(m.run is not m.body for m in parts(graph))


def spread_out(kind: str, marked: bool) -> tuple[list[float], int, int, int]:
    model, everyone = gpt(), flow.placement.all("cpu")
    spread(model, PARALLEL[kind], everyone)
    graph = Language(model, "eager")
    if marked:
        for block in graph.model.blocks:
            block.to(flow.nn.graph.GraphModule).activation_checkpointing = True
    x = rows().to_global(everyone, B, check_meta=False).to_global(sbp=PARALLEL[kind].batch)
    losses = quietly(graph, x)
    inside = sum(
        isinstance(n.target, ProgramCall) for m in parts(graph) for n in m.body.graph.nodes
    )
    return losses, len(parts(graph)), inside, len(parts(graph, Recomputed))


@pytest.mark.parametrize("kind", ["data", "tensor"])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.sweep(6)
def test_collectives_stay_between_the_parts(kind: str, marked: bool) -> None:
    want = reference()
    for losses, made, inside, again in run_on(2, spread_out, kind, marked):
        assert losses == pytest.approx(want, rel=1e-9)
        assert made
        assert not inside
        assert again == (LAYERS if marked else 0)


class Mixed(nn.Module):
    """A model with random numbers, a state that changes, and writes into its own intermediate
    values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.drop, self.relu = nn.BatchNorm1d(16), nn.Dropout(0.4), nn.ReLU(inplace=True)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.norm(self.up(x)))
        h = self.drop(h).sin() * 2
        return (self.down(h) + x).square().mean()


class Training(flow.nn.Graph):
    def __init__(self, model: nn.Module, backend: str | None) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if backend is not None:
            self.config.enable_compile(backend=backend)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x)
        loss.backward()
        return loss


def trained(backend: str | None) -> tuple[list[float], nn.Module, Any]:
    model, x = (
        Mixed(),
        torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )
    graph = Training(model, backend)
    torch.manual_seed(5)
    return quietly(graph, x), model, graph


@pytest.mark.long
def test_random_numbers_and_states_stay_outside() -> None:
    losses, model, _ = trained(None)
    got, compile, graph = trained("aot_eager")
    assert got == pytest.approx(losses, rel=1e-12)
    assert parts(graph)
    for a, b in zip(compile.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def failing(module: Any, inputs: Any) -> Any:
    raise ValueError("no such kernel")


def test_where_the_backend_fails_the_part_runs_as_it_is() -> None:
    graph: Any = Language(gpt(), None)
    graph.config.enable_compile(backend=failing)
    with pytest.warns(UserWarning, match="cannot compile") as told:
        losses = [graph(rows()).item() for _ in range(3)]
    assert losses == pytest.approx(reference(), rel=1e-12)
    assert len([w for w in told if "cannot compile" in str(w.message)]) == 1, "one warning"
    assert all(m.run is m.body for m in parts(graph))


def test_programs_without_compilation_have_no_such_parts() -> None:
    graph = Language(copy.deepcopy(gpt()), None)
    graph(rows())
    assert not parts(graph)
