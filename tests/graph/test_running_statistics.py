"""Tests of split running statistics in graphs whose plan needs them replicated: a norm's writes
reach the module's buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bodies import values
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

LINE = flow.placement("cpu", [0, 1])
B, S = flow.sbp.broadcast, flow.sbp.split


class Training(flow.nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.config.enable_auto_parallel()

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def model_of(norm: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Conv1d(3, 6, 1), norm, nn.Tanh(), nn.Conv1d(6, 2, 1)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(values(*p.shape, seed=i))
    return model


NORMS = {
    "batch": lambda: nn.BatchNorm1d(6), "averaging": lambda: nn.BatchNorm1d(6, momentum=None),
    "instance": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.sweep(2)
def test_statistics_are_kept(norm: Any) -> None:
    plain = model_of(norm())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        plain(values(4, 3, 5, seed=step)).square().mean().backward()
        optimizer.step()

    def on_ranks() -> None:
        here = model_of(norm()).to_global(LINE, S(0))  # type: ignore[operator]
        graph = Training(here)
        for step in range(3):
            graph(values(4, 3, 5, seed=step).to_global(LINE, B).to_global(sbp=S(0)))  # type: ignore[attr-defined]
        for name, want in plain.state_dict().items():
            torch.testing.assert_close(
                torch.from_numpy(here.state_dict()[name].detach().numpy()),
                want,
                msg=lambda m, name=name: f"{name}: {m}",
            )

    simulate(2, on_ranks)
