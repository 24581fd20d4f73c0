"""States of models and graphs on their way through files and through other placements."""

from __future__ import annotations

import io
from typing import Any

import torch
from support.bodies import values
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

LINE, ONE = flow.placement("cpu", [0, 1]), flow.placement("cpu", [0])
B, S = flow.sbp.broadcast, flow.sbp.split


def model_of() -> Any:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(values(*p.shape, seed=i))
    return model.to_global(LINE, S(0))  # type: ignore[operator]


def loss_of(model: nn.Module, step: int) -> Tensor:
    x: Any = values(6, 4, seed=step)
    return model(x.to_global(LINE, B).to_global(sbp=S(0))).square().mean()  # type: ignore[no-any-return]


class Training(flow.nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def step(self, number: int) -> Tensor:
        x: Any = values(6, 4, seed=number)
        return torch.from_numpy(self(x.to_global(LINE, B).to_global(sbp=S(0))).numpy())


def test_files_are_read_as_torch_reads_them_by_default() -> None:
    def on_ranks() -> None:
        graph, file = Training(model_of()), io.BytesIO()
        graph.step(0)
        torch.save(graph.state_dict(), file)
        want = graph.step(1)
        file.seek(0)
        other = Training(model_of())
        other.load_state_dict(torch.load(file))  # weights only
        torch.testing.assert_close(other.step(1), want)

    simulate(2, on_ranks)


def test_a_graph_takes_back_a_state_that_lies_on_one_rank() -> None:
    def on_ranks() -> None:
        graph = Training(model_of())
        graph.step(0)
        saved = flow.to_global(graph.state_dict(), placement=ONE, sbp=B, copy=True)
        want = graph.step(1)
        other = Training(model_of())
        other.load_state_dict(saved)
        torch.testing.assert_close(other.step(1), want)

    simulate(2, on_ranks)


def test_an_optimizer_takes_back_a_state_that_lies_on_one_rank() -> None:
    def on_ranks() -> None:
        losses: list[float] = []
        saved: Any = None
        for _ in range(2):
            model = model_of()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            for step in range(2 if saved is None else 1):
                optimizer.zero_grad()
                loss = loss_of(model, step if saved is None else 1)
                loss.backward()
                optimizer.step()
                if step == 0 and saved is None:
                    saved = flow.to_global((model.state_dict(), optimizer.state_dict()), placement=ONE, sbp=B, copy=True)
            losses.append(loss_of(model, 2).item())
        assert abs(losses[0] - losses[1]) < 1e-12

    simulate(2, on_ranks)
