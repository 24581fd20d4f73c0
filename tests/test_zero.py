"""ZeRO: training in shares gives the numbers of one device, users see what they saw, and each rank keeps its share of the bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.bodies import Bodies
from torch import nn, optim

import globaltensor as flow
from globaltensor import sharded
from globaltensor.distributed.simulate import simulate
from globaltensor.graph.zero import Zero

B, S = flow.sbp.broadcast, flow.sbp.split
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05),
}
bodies = Bodies()


class Net(nn.Module):
    """A tied embedding, sizes that no number of ranks divides, a number, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up, self.down, self.norm = nn.Linear(6, 13), nn.Linear(13, 6), nn.LayerNorm(6)
        self.frozen = nn.Parameter(torch.ones(6, 7), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        h = self.embedding(x)
        h = h + self.down(torch.tanh(self.up(self.norm(h)))) * self.scale
        h = torch.tanh(h @ self.frozen) @ self.frozen.t()
        return h @ self.embedding.weight.t()


def net(make: Callable[[], Any] = Net) -> Any:
    """The same on every rank. Ranks are threads that share torch's generator, so it draws from its own."""
    model, gen = make().double(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64) * 0.4)
    return model


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (12, 3), generator=gen), torch.randint(0, 11, (12, 3), generator=gen)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def groups(model: Net, maker: str) -> list[optim.Optimizer]:
    """Two optimizers, and two groups with different settings in one."""
    biases = [p for n, p in model.named_parameters() if n.endswith("bias") or p.dim() == 0]
    rest = [p for p in (*model.up.parameters(), *model.down.parameters()) if p.dim() > 1]
    other = [model.embedding.weight, model.norm.weight, model.frozen]
    first = OPTIMIZERS[maker]([{"params": rest, "lr": 0.02}, {"params": biases}])
    return [first, OPTIMIZERS[maker](other)]


def whole(x: Any) -> torch.Tensor:
    return x.detach().to_global(x.placement, [B] * x.placement.axes).to_local() if x.is_global else x


def reference(maker: str, steps: int) -> tuple[Net, list[optim.Optimizer]]:
    model = net()
    optimizers = groups(model, maker)
    for seed in range(steps):
        loss_of(model, *batch(seed)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def tensor_parallel(path: str, tensor: torch.Tensor) -> list[Any]:
    """Rows or columns of the two layers are split over the second axis."""
    return [B, {"up.weight": S(0), "up.bias": S(0), "down.weight": S(1)}.get(path, B)]


def placed(ranks: Sequence[Any]) -> tuple[Any, Net, list[Any]]:
    p = flow.placement("cpu", ranks)
    model = net()
    model.to_global(p, tensor_parallel if p.axes == 2 else B)  # type: ignore[operator]
    return p, model, [S(0)] + [B] * (p.axes - 1)


def train(model: Net, optimizers: Sequence[optim.Optimizer], place: Any, sbp: Any, seeds: Sequence[int], freed: bool) -> None:
    for seed in seeds:
        x, y = (t.to_global(place, [B] * place.axes).to_global(sbp=sbp) for t in batch(seed))  # type: ignore[attr-defined]
        with sharded.freed() if freed else contextlib.nullcontext():
            loss = loss_of(model, x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same(model: Net, optimizers: Sequence[optim.Optimizer], want: tuple[Net, list[optim.Optimizer]]) -> None:
    close = {"rtol": 1e-9, "atol": 1e-9}
    pairs = dict(zip(model.parameters(), want[0].parameters(), strict=True))
    for (name, p), q in zip(model.named_parameters(), pairs.values(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), **close, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[arg-type]
    for ours, theirs in zip(optimizers, want[1], strict=True):
        for group in ours.param_groups:
            for p in group["params"]:
                mine, its = ours.state.get(p, {}), theirs.state.get(pairs[p], {})
                assert {k for k, v in mine.items() if v is not None} == {k for k, v in its.items() if v is not None}
                for key, value in its.items():
                    if isinstance(value, torch.Tensor):
                        assert mine[key].shape == value.shape
                        torch.testing.assert_close(whole(mine[key]).to(value.dtype), value, **close)  # type: ignore[arg-type]


def _equal(maker: str, ranks: Any, stage: int) -> None:
    place, model, sbp = placed(ranks)
    before = {n: (p.sbp, p.placement, p.shape) for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    optimizers = groups(model, maker)
    train(model, optimizers, place, sbp, [0], False)  # it has state when ZeRO comes
    zero = Zero(optimizers, stage, shard_min_size=1).attach()
    assert zero.shared
    train(model, optimizers, place, sbp, [1], False)
    train(model, optimizers, place, sbp, [2, 3], True)
    assert {n: (p.sbp, p.placement, p.shape) for n, p in model.named_parameters()} == before  # type: ignore[attr-defined]
    same(model, optimizers, reference(maker, 4))
    zero.detach()
    for p in model.parameters():
        assert p._spec.shown is p._spec
        assert p._local.shape == p.spec.local_shape(flow.env.get_rank())
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step" and value.dim():
                    assert value._local.shape == p._local.shape
                    assert value.sbp == p.sbp
    train(model, optimizers, place, sbp, [4], False)
    same(model, optimizers, reference(maker, 5))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2], [0, 1, 2, 3], [[0, 1], [2, 3]]], ids=str)
@pytest.mark.parametrize("maker", OPTIMIZERS)
def test_training_equals_one_device(maker: str, ranks: Any, stage: int) -> None:
    simulate(torch.tensor(ranks).numel(), _equal, maker, ranks, stage, timeout=20.0)
