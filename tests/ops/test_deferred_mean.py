"""Tests of a mean whose count is still being reduced. The loss and the gradients are those of one
device, whenever user code reads them, and the forward pass does not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import globaltensor as flow
from globaltensor._ops.rules.deferred_mean import DeferredMean
from globaltensor._tensor.gradients.reducer import no_sync, reducer
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate

B, S = flow.sbp.broadcast, flow.sbp.split
IGNORED = -100
Uses = Callable[[Tensor, Tensor, Tensor], Any]


def data(kept: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return samples [9, 7], targets [9] and a weight [7, 5]."""
    draw = torch.Generator().manual_seed(1)
    target = torch.randint(0, 5, (9,), generator=draw)
    if kept == "some":  # more samples are ignored on the first rank
        target[[0, 1, 3, 8]] = IGNORED
    if kept == "none":
        target[:] = IGNORED
    return (
        torch.randn(9, 7, dtype=torch.float64, generator=draw),
        target,
        torch.randn(7, 5, dtype=torch.float64, generator=draw),
    )


def backward(x: Tensor, target: Tensor, weight: Tensor) -> None:
    F.cross_entropy(x @ weight, target).backward()


def scaled(x: Tensor, target: Tensor, weight: Tensor) -> None:
    (F.cross_entropy(x @ weight, target) * 3).backward()


def read_first(x: Tensor, target: Tensor, weight: Tensor) -> float:
    loss = F.cross_entropy(x @ weight, target)
    value = loss.item()
    loss.backward()
    return value


def read_without_gradients(x: Tensor, target: Tensor, weight: Tensor) -> float:
    """Read the loss as a meter does, which sums losses under no_grad."""
    loss = F.cross_entropy(x @ weight, target)
    with torch.no_grad():
        meter = loss * 2 + torch.zeros_like(loss)
    loss.backward()
    return meter.item()


def read_detached_without_gradients(x: Tensor, target: Tensor, weight: Tensor) -> None:
    loss = F.cross_entropy(x @ weight, target)
    with torch.inference_mode():
        torch.isnan(loss.detach()).any().item()
    (loss + 1).backward()


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


def divided(x: Tensor, target: Tensor, weight: Tensor) -> tuple[float, float]:
    loss = 2 * F.cross_entropy(x @ weight, target) / 5
    loss.backward()
    return loss.item(), (loss / 2).item()


def looked_at_anew(x: Tensor, target: Tensor, weight: Tensor) -> list[float]:
    """Read the loss before backward in some steps, after it in some, and not at all in others. The
    earlier reads determine when the reduction of the count starts."""
    values = []
    for first, later in (
        (False, False),
        (True, False),
        (True, True),
        (False, True),
        (False, False),
        (True, False),
    ):
        loss = F.cross_entropy(x @ weight, target)
        if first:
            values.append(loss.item())
        loss.backward()
        if later:
            values.append(loss.item())
    return values


def hooked_from_now_on(x: Tensor, target: Tensor, weight: Tensor) -> list[float]:
    seen: list[Tensor] = []
    backward(x, target, weight)
    loss = F.cross_entropy(x @ weight, target)
    weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    loss.backward()
    backward(x, target, weight)
    return [float(s) for grad in seen for s in grad.sum(1)]


def detached(x: Tensor, target: Tensor, weight: Tensor) -> list[float]:
    """Check that a loss and its detached tensor share one value: a write into one shows in the
    other."""
    values = []
    for order in range(4):
        loss = F.cross_entropy(x @ weight, target)
        alone = loss.detach()
        assert (
            [t.requires_grad for t in (loss, alone)]
            == [t.is_leaf for t in (alone, loss)]
            == [True, False]
        )
        if order == 0:
            values.append(alone.item())
        loss.backward()
        if order == 1:
            values.append(loss.item())
        if order == 2:
            alone.mul_(2)
            values.append(loss.item())
        if order == 3:
            del loss
        values.append(alone.item())
    return values


def recomputed(x: Tensor, target: Tensor, weight: Tensor) -> None:
    """Run a reentrant checkpoint, whose backward pass runs within the backward pass. Layers before
    the checkpoint get their gradients afterwards."""
    from torch.utils.checkpoint import checkpoint

    h = x * weight.sum(1)
    F.cross_entropy(
        checkpoint(lambda h: h.tanh() @ weight, h, use_reentrant=True), target
    ).backward()


def failing(x: Tensor, target: Tensor, weight: Tensor) -> float:
    """Run a backward pass that raises an error, then one of the same loss that succeeds."""

    class Once(torch.autograd.Function):
        broken = False

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            Once.broken = not Once.broken
            if Once.broken:
                raise ArithmeticError
            return grads[0]

    loss = F.cross_entropy((x * Once.apply(weight.sum(1))) @ weight, target)
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    weight.grad = None
    loss.backward()
    return loss.item()


USES: list[Uses] = [
    backward, scaled, read_first, read_without_gradients, read_detached_without_gradients,
    read_later, twice, accumulated, second_order, with_hook, kept_gradient, two_losses, divided,
    looked_at_anew,
    hooked_from_now_on, detached, recomputed, failing,
]  # fmt: skip


def run(use: Uses, kept: str, shape: tuple[int, ...], rides: bool) -> None:
    flow.fuse_loss_count(rides)
    everyone = flow.placement("cpu", torch.arange(4).reshape(shape).tolist())
    x, target, weight = data(kept)
    plain = weight.clone().requires_grad_()
    want = use(x, target, plain)
    ours = weight.to_global(everyone, B if len(shape) == 1 else [B, B]).requires_grad_()  # type: ignore[attr-defined]
    split = [S(0)] if len(shape) == 1 else [S(0), B]
    got = use(
        *(t.to_global(everyone, [B] * len(shape)).to_global(sbp=split) for t in (x, target)), ours
    )  # type: ignore[attr-defined]
    assert (want is None) == (got is None)
    if want is not None:
        torch.testing.assert_close(
            torch.tensor(got), torch.tensor(want), rtol=1e-12, atol=1e-13, equal_nan=True
        )
    assert plain.grad is not None
    torch.testing.assert_close(
        torch.tensor(ours.grad.tolist(), dtype=torch.float64),
        plain.grad,
        rtol=1e-12,
        atol=1e-13,
        equal_nan=True,
    )


@pytest.mark.parametrize("kept", ["all", "some", "none"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.sweep(12)
def test_as_on_one_device(use: Uses, kept: str) -> None:
    for shape in ((4,), (2, 2)):
        for rides in (False, True):
            simulate(4, run, use, kept, shape, rides)


def one_rank_looks() -> None:
    """Check that a rank's reads without communication do not change the sums over ranks."""
    everyone = flow.placement.all("cpu")
    x, target, weight = data("some")
    plain = weight.clone().requires_grad_()
    ours = weight.to_global(everyone, B).requires_grad_()  # type: ignore[attr-defined]
    for _ in range(3):
        backward(x, target, plain)
        loss = F.cross_entropy(*ours_of(x, ours, target))
        if flow.env.get_rank() == 0:
            ours.to_local()
            assert (loss.requires_grad, loss.device.type, loss.detach().shape) == (True, "cpu", ())
            loss.to_local()
        loss.backward()
        if flow.env.get_rank() == 1:
            loss.detach().to_local()
            reducer().watched = True  # as this rank's own hook would set it
    assert plain.grad is not None
    torch.testing.assert_close(torch.tensor(ours.grad.tolist(), dtype=torch.float64), plain.grad)


def ours_of(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logits, targets), split over the samples."""
    everyone = flow.placement.all("cpu")
    return x.to_global(everyone, B).to_global(sbp=S(0)) @ weight, target.to_global(
        everyone, B
    ).to_global(sbp=S(0))  # type: ignore[attr-defined]


def test_ranks_may_differ_in_who_looks() -> None:
    simulate(2, one_rank_looks)


def traffic() -> list[str]:
    """Return the cases, named by how the loss is read, in which a step has unexpected
    collectives."""
    flow.fuse_loss_count()
    everyone = flow.placement.all("cpu")
    x, target, weight = data("some")
    ours = weight.to_global(everyone, B).requires_grad_()  # type: ignore[attr-defined]
    samples, targets = (t.to_global(everyone, B).to_global(sbp=S(0)) for t in (x, target))  # type: ignore[attr-defined]

    def step(read: str) -> list[str]:
        with record_collectives() as log:
            loss = F.cross_entropy(samples @ ours, targets)
            if read == "before":
                loss.item()
            loss.backward()
            if read == "after":
                loss.item()
        return [f"{t.kind} {t.bytes}" for t in log]

    numbers, loss = weight.numel() * 8, "all_reduce 8"
    found = {
        "not read": step("")
        == [
            f"all_reduce {numbers + 8}"
        ],  # between two ranks, an all-reduce sends exactly the tensor's bytes
        "after": step("after") == [f"all_reduce {numbers + 8}", loss],
        "before": step("before") == [loss, loss, f"all_reduce {numbers}"],
        "before, again": step("before") == [loss, loss, f"all_reduce {numbers}"],
        # the count's reduction was started needlessly
        "no longer": step("") == [loss, f"all_reduce {numbers}"],
        "any more": step("") == [f"all_reduce {numbers + 8}"],
    }
    return [what for what, right in found.items() if not right]


def test_the_count_rides_with_the_gradients() -> None:
    assert simulate(2, traffic) == [[]] * 2


def narrow() -> None:
    """Check that a count that a bucket's dtype cannot represent is not sent in that bucket."""
    flow.fuse_loss_count()
    everyone, draw = flow.placement.all("cpu"), torch.Generator().manual_seed(2)
    x, weight = (
        torch.randn(700, 3, generator=draw).bfloat16(),
        torch.randn(3, 4, generator=draw).bfloat16(),
    )
    target = torch.randint(0, 4, (700,), generator=draw)
    target[:301] = IGNORED
    plain, ours = weight.clone().requires_grad_(), weight.to_global(everyone, B).requires_grad_()  # type: ignore[attr-defined]
    backward(x, target, plain)
    logits, targets = ours_of(x, ours, target)
    with record_collectives() as log:
        F.cross_entropy(logits, targets).backward()
    assert [t.bytes for t in log] in ([8, 24], [24, 8])
    torch.testing.assert_close(
        ours.grad.float().to_local(), plain.grad.float(), rtol=0.02, atol=1e-3
    )  # type: ignore[union-attr]


def test_what_a_dtype_cannot_hold_does_not_ride() -> None:
    simulate(2, narrow)


def stages() -> None:
    """Check a loss that is placed on half of the ranks. The other ranks have leaves too, and do not
    know the count."""
    first, second = flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])
    x, target, weight = data("some")
    other = torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    plain, plain_other = weight.clone().requires_grad_(), other.clone().requires_grad_()
    F.cross_entropy((x @ plain_other).tanh() @ plain, target).backward()
    ours, ours_other = (
        weight.to_global(second, B).requires_grad_(),
        other.to_global(first, B).requires_grad_(),
    )  # type: ignore[attr-defined]
    h = (x.to_global(first, B).to_global(sbp=S(0)) @ ours_other).tanh().to_global(second, S(0))  # type: ignore[attr-defined]
    F.cross_entropy(h @ ours, target.to_global(second, B).to_global(sbp=S(0))).backward()  # type: ignore[attr-defined]
    everyone = flow.placement.all("cpu")
    for mine, want in ((ours, plain), (ours_other, plain_other)):
        assert want.grad is not None
        torch.testing.assert_close(
            mine.grad.to_global(everyone, B).to_local(), want.grad, rtol=1e-12, atol=1e-13
        )


def test_stages_on_some_of_the_ranks() -> None:
    simulate(4, stages)


def plain_targets() -> None:
    x, target, weight = data("some")
    plain, ours = (
        weight.clone().requires_grad_(),
        weight.to_global(flow.placement.all("cpu"), B).requires_grad_(),
    )  # type: ignore[attr-defined]
    backward(x, target, plain)
    F.cross_entropy(ours_of(x, ours, target)[0], target).backward()
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad.to_local(), plain.grad, rtol=1e-12, atol=1e-13)


def test_targets_that_are_no_global_tensor() -> None:
    simulate(2, plain_targets)


def waits() -> tuple[bool, bool, bool]:
    everyone = flow.placement.all("cpu")
    x, target, weight = (t.to_global(everyone, B) for t in data("all"))  # type: ignore[attr-defined]
    weight.requires_grad_()
    loss = F.cross_entropy(x.to_global(sbp=S(0)) @ weight, target.to_global(sbp=S(0)))
    before = isinstance(loss, DeferredMean)
    loss.backward()
    after = isinstance(loss, DeferredMean)
    loss.item()
    return before, after, isinstance(loss, DeferredMean)


def test_backward_needs_no_quotient() -> None:
    assert simulate(2, waits) == [(True, True, False)] * 2


@pytest.mark.parametrize("name", ["is_meta", "layout", "is_sparse", "device", "is_leaf"])
def test_metadata_does_not_compute_the_mean(name: str) -> None:
    def on_ranks() -> None:
        place = flow.placement.all("cpu")
        x, target, weight = data("some")
        x = (x @ weight).requires_grad_().to_global(place, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
        target = target.to_global(place, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
        loss = F.cross_entropy(x, target)
        assert isinstance(loss, DeferredMean)
        got = getattr(loss, name)
        assert (loss.is_signed(), loss.is_conj(), loss.get_device()) == (True, False, -1)
        assert isinstance(loss, DeferredMean)
        float(loss)
        assert got == getattr(loss, name)

    simulate(2, on_ranks)
