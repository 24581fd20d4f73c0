"""A mean whose count is on its way: the same loss and gradients as on one device, whoever looks when, and no wait in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.reducer import no_sync, reducer
from globaltensor.rules.quotient import Quotient

B, S = flow.sbp.broadcast, flow.sbp.split
IGNORED = -100
Uses = Callable[[Tensor, Tensor, Tensor], Any]


def data(kept: str) -> tuple[Tensor, Tensor, Tensor]:
    """Samples [9, 7], targets [9], a weight [7, 5]."""
    draw = torch.Generator().manual_seed(1)
    target = torch.randint(0, 5, (9,), generator=draw)
    if kept == "some":  # more of them on the first rank
        target[[0, 1, 3, 8]] = IGNORED
    if kept == "none":
        target[:] = IGNORED
    return torch.randn(9, 7, dtype=torch.float64, generator=draw), target, torch.randn(7, 5, dtype=torch.float64, generator=draw)


def backward(x: Tensor, target: Tensor, weight: Tensor) -> None:
    F.cross_entropy(x @ weight, target).backward()


def scaled(x: Tensor, target: Tensor, weight: Tensor) -> None:
    (F.cross_entropy(x @ weight, target) * 3).backward()


def read_first(x: Tensor, target: Tensor, weight: Tensor) -> float:
    loss = F.cross_entropy(x @ weight, target)
    value = loss.item()
    loss.backward()
    return value


def read_later(x: Tensor, target: Tensor, weight: Tensor) -> tuple[float, float]:
    loss = F.nll_loss((x @ weight).log_softmax(1), target)
    loss.backward()
    return loss.item(), loss.detach().item()


def twice(x: Tensor, target: Tensor, weight: Tensor) -> None:
    loss = F.cross_entropy(x @ weight, target)
    loss.backward(retain_graph=True)
    loss.backward(gradient=torch.tensor(2.0, dtype=loss.dtype), retain_graph=True)
    loss.backward()


def accumulated(x: Tensor, target: Tensor, weight: Tensor) -> None:
    with no_sync():
        F.cross_entropy(x @ weight, target).backward()
    F.cross_entropy(x @ weight, target).backward()


def second_order(x: Tensor, target: Tensor, weight: Tensor) -> None:
    (first,) = torch.autograd.grad(F.cross_entropy(x @ weight, target), [weight], create_graph=True)
    first.square().sum().backward()


def with_hook(x: Tensor, target: Tensor, weight: Tensor) -> list[float]:
    seen: list[Tensor] = []
    logits = x @ weight
    logits.register_hook(seen.append)  # type: ignore[no-untyped-call]
    F.cross_entropy(logits, target).backward()
    return [float(s) for s in seen[0].sum(1)]


def kept_gradient(x: Tensor, target: Tensor, weight: Tensor) -> list[float]:
    logits = x @ weight
    logits.retain_grad()
    F.cross_entropy(logits, target).backward()
    assert logits.grad is not None
    return [float(s) for s in logits.grad.sum(0)]


def two_losses(x: Tensor, target: Tensor, weight: Tensor) -> float:
    loss = F.cross_entropy(x @ weight, target) + F.cross_entropy((x @ weight).tanh(), target)
    loss.backward()
    return loss.item()


USES: list[Uses] = [backward, scaled, read_first, read_later, twice, accumulated, second_order, with_hook, kept_gradient, two_losses]


def run(use: Uses, kept: str, shape: tuple[int, ...]) -> None:
    everyone = flow.placement("cpu", torch.arange(4).reshape(shape).tolist())
    x, target, weight = data(kept)
    plain = weight.clone().requires_grad_()
    want = use(x, target, plain)
    ours = weight.to_global(everyone, B if len(shape) == 1 else [B, B]).requires_grad_()  # type: ignore[attr-defined]
    split = [S(0)] if len(shape) == 1 else [S(0), B]
    got = use(*(t.to_global(everyone, [B] * len(shape)).to_global(sbp=split) for t in (x, target)), ours)  # type: ignore[attr-defined]
    assert (want is None) == (got is None)
    if want is not None:
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-12, atol=1e-13, equal_nan=True)
    assert plain.grad is not None
    torch.testing.assert_close(torch.tensor(ours.grad.tolist(), dtype=torch.float64), plain.grad, rtol=1e-12, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("kept", ["all", "some", "none"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_as_on_one_device(use: Uses, kept: str) -> None:
    for shape in ((4,), (2, 2)):
        simulate(4, run, use, kept, shape)


def one_rank_looks() -> None:
    """What a rank does for itself (look at a gradient on its way) must not change what the ranks sum."""
    everyone = flow.placement.all("cpu")
    x, target, weight = data("some")
    plain = weight.clone().requires_grad_()
    backward(x, target, plain)
    ours = weight.to_global(everyone, B).requires_grad_()  # type: ignore[attr-defined]
    if flow.env.get_rank() == 0:
        ours.to_local()
    assert reducer().watched == (flow.env.get_rank() == 0)
    backward(x.to_global(everyone, B).to_global(sbp=S(0)), target.to_global(everyone, B).to_global(sbp=S(0)), ours)  # type: ignore[attr-defined]
    assert plain.grad is not None
    torch.testing.assert_close(torch.tensor(ours.grad.tolist(), dtype=torch.float64), plain.grad)


def test_ranks_may_differ_in_who_looks() -> None:
    simulate(2, one_rank_looks)


def waits() -> tuple[bool, bool, bool]:
    everyone = flow.placement.all("cpu")
    x, target, weight = (t.to_global(everyone, B) for t in data("all"))  # type: ignore[attr-defined]
    weight.requires_grad_()
    loss = F.cross_entropy(x.to_global(sbp=S(0)) @ weight, target.to_global(sbp=S(0)))
    before = isinstance(loss, Quotient)
    loss.backward()
    after = isinstance(loss, Quotient)
    loss.item()
    return before, after, isinstance(loss, Quotient)


def test_backward_needs_no_quotient() -> None:
    assert simulate(2, waits) == [(True, True, False)] * 2
