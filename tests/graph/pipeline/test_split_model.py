"""Tests of models in stages outside a graph. Values that their forward computes between stages are
computed in the stage that ran last. The numbers are those of one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import PlacementError

B, S = flow.sbp.broadcast, flow.sbp.split
WIDTH, ROWS = 4, 6


class Skips(nn.Module):
    """A model with skip connections from stage to stage, a mask and a scale parameter of its own.
    Its loss compares an input with the last stage's output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            x = torch.tanh(block(x)) * mask + x
            kept.append(x)
        x = torch.cat([kept[0], x], 1)[:, WIDTH:] + kept[1] * self.scale
        return F.cross_entropy(self.head(x), target)


def made() -> nn.Module:
    return initialised(Skips())


def drawn(step: int) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=gen, dtype=torch.float64)
    return (
        x,
        (torch.rand(ROWS, 1, generator=gen) > 0.3).double(),
        torch.randint(0, 3, (ROWS,), generator=gen),
    )


def trained(model: nn.Module, given: Any) -> tuple[list[float], list[Tensor]]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*map(given, drawn(step)))
        loss.backward()
        optimizer.step()
        losses.append(everywhere(loss).item())
    return losses, [everywhere(p) for p in model.parameters()]


def everywhere(t: Any) -> Tensor:
    return (
        t.detach().to_global(flow.placement.all("cpu"), B)._local
        if isinstance(t, flow.GlobalTensor)
        else t.detach()
    ).clone()


@pytest.mark.parametrize(
    ("stages", "at"),
    [
        pytest.param(([0], [1]), ["blocks.2"], id="two"),
        pytest.param(([0], [1], [2]), ["blocks.1", "blocks.3"], id="three"),
        pytest.param(([0], [1, 2]), ["blocks.2"], id="of 1 and 2 ranks"),
        pytest.param(([0], [1], [0]), ["blocks.1", "head"], id="there and back"),
        pytest.param(([[0, 1], [2, 3]], [4, 5]), ["blocks.2"], id="a grid and a row"),
    ],
)
@pytest.mark.parametrize("sbp", [B, S(0)], ids=["whole", "rows"])
@pytest.mark.sweep(2)
def test_stages_outside_a_graph(stages: Any, at: list[str], sbp: Any) -> None:
    ranks = 1 + max(np.concatenate([np.ravel(each) for each in stages]))
    want = trained(made(), lambda t: t)

    def run() -> None:
        lie = [flow.placement("cpu", each) for each in stages]
        model = flow.pipeline.cut(made(), lie, at)
        axes = lie[0].axes
        losses, parameters = trained(
            model,
            lambda t: t.to_global(lie[0], [B] * axes, check_meta=False).to_global(sbp=[sbp] * axes),
        )
        assert losses == pytest.approx(want[0], rel=1e-12)
        for ours, theirs in zip(parameters, want[1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)

    simulate(ranks, run)


def test_elsewhere_operands_must_lie_together() -> None:
    """Operands elsewhere must share a placement. Before and after the model, and for writes into a
    tensor of another stage, there is no common placement."""

    class Writes(Skips):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            first = self.blocks[0](x)
            second = self.blocks[3](first)
            return first.add_(second)

    def run() -> None:
        lie = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
        x = drawn(0)[0].to_global(lie[0], B, check_meta=False)  # type: ignore[attr-defined]
        model = flow.pipeline.cut(Writes().double(), lie, ["blocks.2"])
        with pytest.raises(PlacementError, match="different placements"):
            model(x)
        model = flow.pipeline.cut(made(), lie, ["blocks.2"])
        loss = model(*(t.to_global(lie[0], B, check_meta=False) for t in drawn(0)))
        with pytest.raises(PlacementError, match="different placements"):
            loss.unsqueeze(0) + x

    simulate(2, run)


def test_what_a_stage_writes_into_its_own_takes_from_those_before() -> None:
    class Residual(Skips):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            for block in self.blocks:
                out = block(x)
                out += x
                x = out.tanh_() * self.scale
            return x.square().mean()

    want = trained(initialised(Residual()), lambda t: t)

    def run() -> None:
        lie = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
        losses, _ = trained(
            flow.pipeline.cut(initialised(Residual()), lie, ["blocks.2"]),
            lambda t: t.to_global(lie[0], B, check_meta=False),
        )
        assert losses == pytest.approx(want[0], rel=1e-12)

    simulate(2, run)


def test_a_model_in_stages_within_another() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = made(), nn.Linear(1, 1).double()

        def forward(self, *given: Any) -> Tensor:
            loss = self.inner(*given)
            return loss * loss

    def run() -> None:
        lie = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
        outer = Outer()
        flow.pipeline.cut(outer.inner, lie, ["blocks.2"])
        given = [t.to_global(lie[0], B, check_meta=False) for t in drawn(0)]
        got = everywhere(outer(*given)).item()
        assert got == pytest.approx(made()(*drawn(0)).item() ** 2, rel=1e-12)

    simulate(2, run)


def test_a_shared_norm_does_not_draw_the_rest_of_a_stage_with_it() -> None:
    class Block(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm, self.up, self.down = norm, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return self.down(self.norm(y) + y)  # type: ignore[no-any-return]

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.blocks = nn.ModuleList(Block(self.norm) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def run() -> None:
        lie = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
        model = flow.pipeline.cut(Shared().double(), lie, ["blocks.1"])
        out = model(drawn(0)[0].to_global(lie[0], B, check_meta=False))  # type: ignore[attr-defined]
        assert out.placement is lie[1]

    simulate(2, run)


def test_a_stage_that_is_called_alone_leaves_nothing_behind() -> None:
    def run() -> None:
        lie = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
        model = flow.pipeline.cut(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), lie, ["1"]
        )
        x = drawn(0)[0].to_global(lie[0], B, check_meta=False)  # type: ignore[attr-defined]
        model[0](x)
        y = model(x)
        with pytest.raises(PlacementError, match="different placements"):
            y + x

    simulate(2, run)


def test_what_is_written_into_a_shared_buffer_stays() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                [
                    nn.Sequential(nn.Linear(4, 4), norm := nn.BatchNorm1d(4)),
                    nn.Sequential(nn.Linear(4, 4), norm),
                ]
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def run() -> None:
        plain, model = (initialised(Counts()) for _ in range(2))
        lie = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
        flow.pipeline.cut(model, lie, ["blocks.1"])
        for step in range(2):
            x = drawn(step)[0]
            want, got = plain(x), model(x.to_global(lie[0], B, check_meta=False))  # type: ignore[attr-defined]
            torch.testing.assert_close(everywhere(got), want.detach())
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(
                everywhere(dict(model.named_buffers())[name]),
                buffer,
                msg=lambda m, name=name: f"{name}: {m}",
            )

    simulate(2, run)


def initialised(model: nn.Module) -> nn.Module:
    gen = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64))
    return model


class Stages(torch.nn.Module):
    def __init__(self, places: Sequence[Any], again: bool) -> None:
        super().__init__()
        self.stages = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)
            ).double()
            for _ in range(3)
        )
        self.places, self.again = places, again

    def forward(self, x: Any) -> Any:
        for stage, place in zip(self.stages, self.places, strict=True):

            def run(x: Any, stage: Any = stage, place: Any = place) -> Any:
                x = x if place is None else x.to_global(placement=place, sbp=x.sbp)
                return stage(x * 2) + x  # the last op saves no tensor

            x = checkpoint(run, x, use_reentrant=False) if self.again else run(x)
        return x


@pytest.mark.parametrize(
    "layout", [flow.sbp.broadcast, flow.sbp.split(0), flow.sbp.split(1)], ids=str
)
def test_checkpoints_around_whole_stages(layout: Any) -> None:
    """Ranks that compute nothing of a checkpointed stage still join its collectives when it runs
    again."""
    torch.manual_seed(0)
    plain = Stages([None] * 3, again=False)
    x = torch.randn(5, 4, dtype=torch.float64)
    plain(x).square().mean().backward()

    def on_ranks() -> None:
        places = [flow.placement("cpu", ranks) for ranks in ([0, 1], [2, 3], [1, 2])]
        model = Stages(places, again=True)
        model.load_state_dict(plain.state_dict())
        for stage, place in zip(model.stages, places, strict=True):
            stage.to_global(place, lambda path, t: layout if t.dim() > 1 else flow.sbp.broadcast)
        given = x.to_global(placement=places[0], sbp=flow.sbp.broadcast).to_global(
            sbp=flow.sbp.split(0)
        )
        for step in range(2):
            model(given).square().mean().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(torch.from_numpy(p.grad.numpy()), q.grad * (step + 1))

    simulate(4, on_ranks, timeout=20.0)
