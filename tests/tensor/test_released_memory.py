"""Tests that parameters, gradients and optimizers are freed when the model is dropped, however it
was trained."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.pool import run_on
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.up, x, use_reentrant=False) if self.again else self.up(x)
        return self.down(F.gelu(h)).square().mean()  # type: ignore[no-any-return]


class Training(flow.nn.Graph):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, change: Callable[[Any], object]
    ) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        change(self)

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x)
        loss.backward()
        return loss  # type: ignore[no-any-return]


def everyone() -> flow.placement:
    return flow.placement.all("cpu")


def rows(sbp: Any = B) -> Any:
    return torch.ones(8, 64).to_global(everyone(), B).to_global(sbp=sbp)  # type: ignore[attr-defined]


def _eager(
    model: nn.Module, sbp: Any = B, around: Callable[[], Any] = contextlib.nullcontext
) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with around():
            loss = model(rows(sbp))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return [optimizer]


def _graph(
    model: nn.Module, change: Callable[[Any], object] = lambda graph: None, sbp: Any = B
) -> list[Any]:
    graph = Training(model, optimizer := torch.optim.AdamW(model.parameters()), change)
    for _ in range(3):
        graph(rows(sbp)).to_global(everyone(), B)
    return [graph, optimizer]


def _recomputing() -> nn.Module:
    model = _of(B)
    model.again = True
    return model


def _add_one(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.add_(1)


def _hooked() -> nn.Module:
    model = _of(B)
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 2)
        p.register_post_accumulate_grad_hook(_add_one)
    model.down.register_full_backward_hook(lambda module, inputs, outputs: None)
    return model


def _of(sbp: Any) -> Model:
    return Model().to_global(everyone(), sbp)  # type: ignore[operator, no-any-return]


def _cut() -> nn.Module:
    return flow.pipeline.cut(
        Model(), [flow.placement("cpu", [0]), flow.placement("cpu", [1])], at=["down"]
    )


def _auto(memory: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        graph.config.enable_auto_parallel()
        graph.config.enable_auto_memory(memory)

    return change


TENSOR = {"up.*": S(0), "down.weight": S(1), "*": B}
WAYS: dict[str, Callable[[], Any]] = {
    "data": lambda: _eager(_of(B), S(0)),
    "shares": lambda: _eager(_of(S(0)), S(0)),
    "shares, freed": lambda: _eager(_of(S(0)), S(0), flow.reshard_after_forward),
    "tensor": lambda: _eager(_of(TENSOR)),
    "replicas": lambda: _eager(flow.nn.parallel.DistributedDataParallel(_of(B)), S(0)),
    "recomputing": lambda: _eager(_recomputing(), S(0)),
    "hooked": lambda: _eager(_hooked(), S(0)),
    "graph": lambda: _graph(_of(B), sbp=S(0)),
    "graph, tensor": lambda: _graph(_of(TENSOR)),
    "graph, accumulating": lambda: _graph(
        _of(B), lambda graph: graph.config.set_gradient_accumulation_steps(2), S(0)
    ),
    "graph, zero 1": lambda: _graph(_of(B), lambda graph: graph.config.enable_zero(stage=1), S(0)),
    "graph, zero 2": lambda: _graph(_of(B), lambda graph: graph.config.enable_zero(stage=2), S(0)),
    "graph, zero 3": lambda: _graph(_of(B), lambda graph: graph.config.enable_zero(stage=3), S(0)),
    "graph, recomputing": lambda: _graph(
        _of(B), lambda graph: graph.config.set_memory_limit(5120), S(0)
    ),
    "graph, in stages": lambda: _graph(_cut()),
    "graph, compiled": lambda: _graph(
        _of(B), lambda graph: graph.config.enable_compile(backend="aot_eager"), S(0)
    ),
    "graph, auto": lambda: _graph(_of(B), _auto("Disable")),
    "graph, auto, memory": lambda: _graph(_of(B), _auto("ModerateMemoryDown")),
}


def watched(held: list[Any]) -> list[tuple[str, weakref.ref[Any]]]:
    parameters = [p for group in held[-1].param_groups for p in group["params"]]
    assert len(parameters) == 4
    things = (
        [(type(x).__name__, x) for x in held]
        + [("parameter", p) for p in parameters]
        + [("its memory", p._local) for p in parameters]
    )
    return [(kind, weakref.ref(thing)) for kind, thing in things]


def left(name: str, times: int = 2) -> list[str]:
    """Return the objects that are still alive after models trained in this way were dropped."""
    kept: list[tuple[str, weakref.ref[Any]]] = []
    for _ in range(times):
        kept += watched(WAYS[name]())
    gc.collect()
    return [kind for kind, ref in kept if ref() is not None]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.sweep(9)
def test_a_model_that_is_dropped_goes(name: str) -> None:
    assert run_on(2, left, name) == [[], []]
