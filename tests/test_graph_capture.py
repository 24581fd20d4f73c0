"""Capture: what build() is on one device, on split data and on split models; what it must not keep, run or take; what it refuses, and where.

The first test of a captured graph is that it runs on one device (`Graph.on_one_device`) with the numbers of plain torch; then each rank's program does.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_parallelize import FAMILIES
from test_parallelize import build as family
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import globaltensor as flow
from globaltensor import _torch
from globaltensor.distributed.simulate import simulate
from globaltensor.graph.errors import GraphError

B, S = flow.sbp.broadcast, flow.sbp.split
FILE = __file__.rsplit("/", 1)[-1]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(x: Any) -> Tensor:
    return x.detach().to_global(sbp=[B] * x.placement.axes).to_local() if x.is_global else x.detach()  # type: ignore[no-any-return]


def same(got: Any, want: Tensor, what: str = "", within: float = 1e-9) -> None:
    torch.testing.assert_close(whole(got), want.detach(), rtol=within, atol=within, msg=lambda m: f"{what}: {m}")


def graph_of(module: nn.Module, build: Callable[..., Any], *optimizers: torch.optim.Optimizer) -> flow.nn.Graph:
    class Built(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = module
            for optimizer in optimizers:
                self.add_optimizer(optimizer)

        def build(self, *args: Any, **kwargs: Any) -> Any:
            return build(self.model, *args, **kwargs)

    return Built()


def trained(model: nn.Module, *inputs: Tensor, **named: Tensor) -> Tensor:
    out = model(*inputs, **named)
    loss: Tensor = out.loss if hasattr(out, "loss") else out.square().mean()
    loss.backward()
    return loss


# ---------------------------------------------------------------------------------------------------------------- models


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.body, self.head = kind(4, 6, 2, batch_first=True), nn.Linear(6, 1)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0])  # type: ignore[no-any-return]


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """As a ResNet: convolutions, batch norms with running statistics, in-place activations and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        z = self.norm2(self.conv2(y))
        z += y
        return self.head(F.adaptive_avg_pool2d(F.relu_(z), 1).flatten(1))  # type: ignore[no-any-return]


class Writes(nn.Module):
    """In-place ops, views that are written into, buffers in several ways, parts without gradients, constants."""

    seen: Tensor
    steps: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        y[:, 1] = 1.0
        y[:, 2].mul_(2)
        y.t()[0].add_(1)
        self.seen.mul_(0.9).add_(x.mean(0) * 0.1)
        self.steps += 1
        self.average = 0.5 * self.average + 0.5 * x.detach().mean(0)
        with torch.no_grad():
            self.seen += self.linear.weight.sum(0)
            gate = self.linear(x).softmax(-1)
        mask = torch.tril(torch.ones(4, 4, dtype=torch.bool))
        if not mask.all() and mask[0, 0]:  # follows from the code alone
            y = y.masked_fill(~mask[2], 0.5)
        return y * self.seen.detach() * gate + torch.full((4,), 3.0) * torch.arange(4) + y.new_ones(4) + self.average


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))  # type: ignore[no-any-return]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
            assert y.dtype is torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                z = self.b(x)
        return y.to(x.dtype) + z


def ids(seed: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 8, (4, 3), generator=torch.Generator().manual_seed(seed)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "lstm": (lambda: Recurrent(nn.LSTM), lambda seed: (values(4, 5, 4, seed=seed),)),
    "gru": (lambda: Recurrent(nn.GRU), lambda seed: (values(4, 5, 4, seed=seed),)),
    "transformer": (Seq2Seq, lambda seed: (values(4, 5, 8, seed=seed),)),
    "residual": (Residual, lambda seed: (values(4, 3, 6, 6, seed=seed),)),
    "writes": (Writes, lambda seed: (values(4, 4, seed=seed),)),
    "tied": (Tied, ids),
    "mixed": (Mixed, lambda seed: (values(4, 4, seed=seed).float(),)),
}


seeding = threading.Lock()  # simulated ranks share one generator


def made(name: str) -> nn.Module:
    with seeding:
        torch.manual_seed(0)
        model = MODELS[name][0]()
    return model if name == "mixed" else model.double()


def check(model: nn.Module, plain: nn.Module, given: Callable[[Tensor], Tensor], batches: list[dict[str, Tensor] | tuple[Tensor, ...]], within: float) -> None:
    """Train ``model`` in a graph and ``plain`` without: the losses, all states, and what the captured graph does on one device."""
    graph = graph_of(model, trained, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    names = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    for step, batch in enumerate(batches):
        args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
        before = copy.deepcopy(plain)
        optimizer.zero_grad()
        want = trained(plain, *args, **kwargs)
        got = graph(*[given(t) for t in args], **{k: given(t) for k, t in kwargs.items()})
        same(got, want, f"loss of step {step}", within)
        if step == 0:  # the captured graph has the parameters of now: put the first ones in
            single = graph.on_one_device()
            state = {**dict(before.named_parameters()), **dict(before.named_buffers())}
            with torch.no_grad():
                for name, t in [*single.named_parameters(), *single.named_buffers()]:
                    if name.startswith("model."):
                        t.copy_(state[name.removeprefix("model.")])
            same(single(*args, *kwargs.values())[0], want, "loss on one device", within)
            theirs = dict(plain.named_parameters())
            for name, p in single.named_parameters():
                wanted = theirs[name.removeprefix("model.")].grad
                same(torch.zeros_like(p) if p.grad is None else p.grad, torch.zeros_like(p) if wanted is None else wanted, f"gradient of {name} on one device", within)
            for name, t in single.named_buffers():
                if name.startswith("model."):
                    same(t, plain.get_buffer(name.removeprefix("model.")), f"{name} on one device", within)
        optimizer.step()
        for (name, t), wanted in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            same(t, wanted, f"{name} after step {step}", within)
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == names, "parameters and buffers are no longer the same tensors"


@pytest.mark.parametrize("name", MODELS)
def test_models_of_torch_on_one_device(name: str) -> None:
    check(made(name), made(name), lambda t: t, [MODELS[name][1](seed) for seed in range(3)], 1e-6 if name == "mixed" else 1e-10)


def on_ranks(name: str, ranks: Any, plan: str, sbp: list[Any]) -> None:
    placement = flow.placement("cpu", ranks)
    model = flow.parallelize(made(name), placement, plan)
    spread = lambda t: t.to_global(placement, [B] * placement.axes).to_global(sbp=sbp)  # noqa: E731
    check(model, made(name), spread, [MODELS[name][1](seed) for seed in range(3)], 1e-2 if name == "mixed" else 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_torch_on_split_data(name: str) -> None:
    simulate(2, on_ranks, name, [0, 1], "data", [S(0)], timeout=60.0)


@pytest.mark.parametrize("name", ["transformer", "writes", "tied", "residual"])
def test_models_of_torch_on_a_grid(name: str) -> None:
    simulate(4, on_ranks, name, [[0, 1], [2, 3]], "data", [S(0), B], timeout=60.0)


# ---------------------------------------------------------------------------------------------------------------- models of transformers


def batches_of(name: str) -> list[Any]:
    torch.manual_seed(3)
    return [FAMILIES[name][3](4) for _ in range(2)]


@pytest.fixture(autouse=True)
def _one_form_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's plain form loops over the experts that data has hit, which no static graph can; `parallelize` puts its own in place of either."""
    model, config, settings, batch = FAMILIES["mixtral"]
    monkeypatch.setitem(FAMILIES, "mixtral", (model, config, {**settings, "experts_implementation": "batched_mm"}, batch))


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_transformers_on_one_device(name: str) -> None:
    check(family(name), family(name), lambda t: t, batches_of(name), 1e-6)


def family_on_ranks(base: nn.Module, batches: list[Any], ranks: Any, plan: Any, sbp: list[Any]) -> None:
    placement = flow.placement("cpu", ranks)
    model = flow.parallelize(copy.deepcopy(base), placement, plan)
    check(model, copy.deepcopy(base), lambda t: t.to_global(placement, [B] * placement.axes).to_global(sbp=sbp), batches, 1e-5)


@pytest.mark.parametrize("plan", ["data", "tensor"])
@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_transformers_on_two_ranks(name: str, plan: str) -> None:
    simulate(2, family_on_ranks, family(name), batches_of(name), [0, 1], plan, [S(0) if plan == "data" else B], timeout=60.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_transformers_on_a_grid(name: str) -> None:
    simulate(4, family_on_ranks, family(name), batches_of(name), [[0, 1], [2, 3]], "hybrid", [S(0), B], timeout=90.0)
