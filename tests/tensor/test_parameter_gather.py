"""Tests of which parameters are gathered together: all ranks of a placement decide alike, whatever
one of them does alone or elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split


def layers(count: int = 6) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]).double()


def rows(placement: Any) -> torch.Tensor:
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.to_global(placement, B).to_global(sbp=S(0))  # type: ignore[attr-defined,no-any-return]


def own_step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def own_gradient(model: nn.Module, x: torch.Tensor) -> None:
    torch.autograd.grad(model(x).sum(), list(model.parameters()))


def own_data(model: nn.Module, x: torch.Tensor) -> None:
    for p in model.parameters():
        p.data = p.data + 1


def own_dtype(model: nn.Module, x: torch.Tensor) -> None:
    model.float()


def own_layout(model: nn.Module, x: torch.Tensor) -> None:
    for p in model.parameters():
        p.data = p.to_global(sbp=S(0)).data


ALONE: dict[str, Callable[[nn.Module, torch.Tensor], None]] = {
    "a backward pass": own_step,
    "gradients": own_gradient,
    "data": own_data,
    "dtype": own_dtype,
    "layout": own_layout,
}


def parted(what: str) -> None:
    """Train a sharded model after rank 0 alone has done something to a model of its own, or has
    moved the sharded one to where it is."""
    rank, everyone, alone = (
        flow.env.get_rank(),
        flow.placement.all("cpu"),
        flow.placement("cpu", [0]),
    )
    want, model = layers(), flow.parallelize(layers(), everyone, "fsdp")
    own, x = layers(2).to_global(alone, B), rows(alone)
    fed, given = rows(everyone), torch.from_numpy(rows(everyone).numpy())
    with torch.no_grad():
        model(fed)  # the next pass does not begin where the first one began
    if rank == 0:
        if what == "nothing moves":
            model.cpu()
        else:
            ALONE[what](own, x)
    for _ in range(3):
        for each, data in ((model, fed), (want, given)):
            each.zero_grad()
            each(data).square().mean().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(torch.from_numpy(p.grad.numpy()), q.grad)


@pytest.mark.parametrize("what", ["nothing moves", *ALONE])
@pytest.mark.sweep(2)
def test_what_one_rank_does_alone_does_not_part_the_gathers(what: str) -> None:
    run_on(2, parted, what)


def with_a_plain_layer() -> None:
    everyone = flow.placement.all("cpu")
    want, model = layers(), flow.parallelize(layers(), everyone, "fsdp")
    fed, given = rows(everyone), torch.from_numpy(rows(everyone).numpy())
    for k in range(3):
        if k == 1:
            whole = {
                name: torch.from_numpy(p.detach().numpy())
                for name, p in model[3].named_parameters()
            }
            for name, p in model[3].to_local().named_parameters():
                p.data = whole[name]
        model(fed).square().mean().backward()
        want(given).square().mean().backward()
    weight = model[0].weight.grad
    torch.testing.assert_close(torch.from_numpy(weight.numpy()), want[0].weight.grad)


def test_a_layer_that_becomes_plain_is_expected_no_more() -> None:
    run_on(2, with_a_plain_layer)


def averaged() -> None:
    """Run a model with other weights, then with its own again, as with averages of weights."""
    everyone = flow.placement.all("cpu")
    model, x = flow.parallelize(layers(), everyone, "fsdp"), rows(everyone)

    def outputs() -> torch.Tensor:
        return torch.from_numpy(model(x).detach().numpy())

    with torch.no_grad():
        first = outputs()
        kept = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data * 2
        other = outputs()
        for p, data in zip(model.parameters(), kept, strict=True):
            p.data = data
        again = outputs()
    assert not torch.equal(first, other)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_weights_that_are_set_back_are_gathered_again() -> None:
    run_on(2, averaged)


def learning_from_a_target(where: Any) -> list[float]:
    """Train a network towards a target that is copied from it by `.data`, as in deep Q-learning."""
    torch.manual_seed(0)
    online, target = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    if where is not None:
        online, target = (flow.parallelize(m, where, "fsdp") for m in (online, target))
        x = x.to_global(where, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    optimizer, losses = torch.optim.SGD(online.parameters(), 0.1), []
    for step in range(6):
        with torch.no_grad():
            online(x)  # acts; here the target's weights are gathered beforehand
        if step % 2:
            for old, new in zip(target.parameters(), online.parameters(), strict=True):
                old.data.copy_(new.data)
        loss = (online(x) - target(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    online.weight.data += online.weight.data  # type: ignore[operator]
    return [*losses, online(x).sum().item(), (online(x) - target(x)).abs().sum().item()]


def learning_on_ranks(freed: bool) -> list[float]:
    if not freed:
        return learning_from_a_target(flow.placement.all("cpu"))
    with flow.reshard_after_forward():
        return learning_from_a_target(flow.placement.all("cpu"))


@pytest.mark.parametrize("freed", [False, True])
def test_writes_by_data_reach_weights_that_were_gathered_beforehand(freed: bool) -> None:
    want = learning_from_a_target(None)
    for found in run_on(2, learning_on_ranks, freed):
        assert found == pytest.approx(want, rel=1e-9, abs=1e-12)
