"""Tests of the parts of flow.optim that torch lacks: OneFlow's optimizer and schedulers, against
their formulas, on one device and on ranks, in loops and in graphs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.optim import LAMB, lr_scheduler
from globaltensor.optim.lr_scheduler import CosineDecayLR, PolynomialLR, StepLR, WarmUpLR, WarmupLR

B, S = flow.sbp.broadcast, flow.sbp.split
OPTIONS: list[dict[str, Any]] = [
    {}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "adam_w_mode": False},
    {"do_bias_correction": False}, {"betas": (0.99, 0.9), "eps": 1e-6},
]  # fmt: skip


def test_torchs_own_are_there() -> None:
    assert flow.optim.SGD is torch.optim.SGD
    assert StepLR is flow.optim.lr_scheduler.StepLR is torch.optim.lr_scheduler.StepLR
    assert flow.optim.LAMB is LAMB
    assert flow.optim.lr_scheduler is lr_scheduler
    with pytest.raises(
        AttributeError, match=r"neither globaltensor\.optim nor torch\.optim has 'LAMP'"
    ):
        flow.optim.LAMP  # noqa: B018


# --------------------------------------------------------------------------------------------- LAMB


def by_formula(
    x: Any,
    grads: list[Any],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    beside: bool,
    corrected: bool,
) -> Any:
    m, v = np.zeros_like(x), np.zeros_like(x)
    for step, grad in enumerate(grads, 1):
        grad = grad if beside else grad + decay * x
        m, v = betas[0] * m + (1 - betas[0]) * grad, betas[1] * v + (1 - betas[1]) * grad * grad
        first, second = (1 - betas[0] ** step, 1 - betas[1] ** step) if corrected else (1, 1)
        change = m / first / (np.sqrt(v / second) + eps)
        size, length = np.linalg.norm(x), np.linalg.norm(change)
        trust = size / length if size > 0 and length > 0 else 1.0
        x = x - lr * trust * (change + (decay * x if beside else 0))
    return x


@pytest.mark.parametrize("start", [1.0, 0.0], ids=["", "from nothing"])
@pytest.mark.parametrize("number", range(len(OPTIONS)))
@pytest.mark.sweep(3)
def test_lamb(number: int, start: float) -> None:
    options, draw = OPTIONS[number], np.random.default_rng(0)
    value, grads = (
        start * draw.uniform(size=(5, 3)),
        [draw.uniform(-1, 1, size=(5, 3)) for _ in range(6)],
    )
    how = {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "adam_w_mode": True,
        "do_bias_correction": True,
        **options,
    }
    want = by_formula(value, grads, *how.values())

    def trained(place: Callable[[Tensor], Any]) -> Any:
        w = place(torch.from_numpy(value)).requires_grad_()
        optimizer = flow.optim.LAMB([w], lr=0.1, **options)
        for grad in grads:
            (w * place(torch.from_numpy(grad))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return w.detach().numpy()

    np.testing.assert_allclose(trained(torch.clone), want, rtol=1e-10)

    def on_ranks() -> None:
        pair = flow.placement("cpu", [0, 1])
        for sbp in (B, S(0), S(1)):
            got = trained(
                lambda t, sbp=sbp: t.to_global(pair, B).to_global(sbp=sbp).detach().clone()
            )
            np.testing.assert_allclose(got, want, rtol=1e-10)

    simulate(2, on_ranks)


class Trained(flow.nn.Graph):
    def __init__(self, model: nn.Module, schedule: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        optimizer = flow.optim.LAMB(model.parameters(), lr=0.1, weight_decay=0.01)
        self.add_optimizer(optimizer, lr_sch=schedule(optimizer))

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def test_lamb_and_a_warm_up_in_a_graph() -> None:
    base, x = (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(),
        torch.randn(8, 4, dtype=torch.float64),
    )

    def schedule(optimizer: Any) -> WarmupLR:
        return WarmupLR(CosineDecayLR(optimizer, 6, alpha=0.1), warmup_factor=0.25, warmup_iters=3)

    plain = copy.deepcopy(base)
    optimizer = flow.optim.LAMB(plain.parameters(), lr=0.1, weight_decay=0.01)
    rates, want = schedule(optimizer), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        optimizer.step()
        rates.step()
        want.append(loss.item())

    def on_ranks() -> None:
        pair = flow.placement("cpu", [0, 1])
        for sbp in (B, S(0)):
            model = copy.deepcopy(base).to_global(pair, sbp)  # type: ignore[operator]
            graph = Trained(model, schedule)
            assert [
                graph(x.to_global(pair, B).to_global(sbp=S(0))).item() for _ in want
            ] == pytest.approx(want, rel=1e-9)  # type: ignore[attr-defined]

    simulate(2, on_ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\)"),
        ({"amsgrad": True}, "no amsgrad variant"),
    ],
)
def test_lambs_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flow.optim.LAMB([torch.zeros(2, requires_grad=True)], **options)


# --------------------------------------------------------------------------------------- schedulers


def rates_of(make: Callable[[Any], Any], steps: int, lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    schedule, found = make(optimizer), []
    for _ in range(steps):
        assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def exponential(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def test_cosine_decay() -> None:
    want = [(0.5 * 0.5 * (1 + math.cos(math.pi * min(i, 10) / 10)) + 0.5) * 0.1 for i in range(15)]
    assert rates_of(lambda o: CosineDecayLR(o, decay_steps=10, alpha=0.5), 15) == pytest.approx(
        want
    )
    with pytest.raises(ValueError, match="decay_steps must be positive, got 0"):
        rates_of(lambda o: CosineDecayLR(o, 0), 1)


def test_a_polynomial_in_the_words_of_both() -> None:
    for words in ({}, {"total_iters": 4, "power": 2.0}):
        theirs = rates_of(lambda o, w=words: torch.optim.lr_scheduler.PolynomialLR(o, **w), 8)  # type: ignore[misc]
        assert rates_of(lambda o, w=words: PolynomialLR(o, **w), 8) == pytest.approx(theirs)  # type: ignore[misc]
    once = [0.08 * (1 - min(i, 4) / 4) ** 2 + 0.02 for i in range(8)]
    assert rates_of(
        lambda o: PolynomialLR(o, decay_batch=4, end_learning_rate=0.02, power=2.0), 8
    ) == pytest.approx(once)
    assert rates_of(lambda o: PolynomialLR(o, steps=2), 4) == pytest.approx(
        [0.1, 0.05005, 0.0001, 0.0001]
    )
    again = [
        0.08 * (1 - i / over) + 0.02
        for i, over in ((0, 3), (1, 3), (2, 3), (3, 3), (4, 6), (5, 6), (6, 6), (7, 9))
    ]
    assert rates_of(
        lambda o: PolynomialLR(o, decay_batch=3, end_learning_rate=0.02, cycle=True), 8
    ) == pytest.approx(again)
    with pytest.raises(ValueError, match="decay_batch must be positive, got 0"):
        rates_of(lambda o: PolynomialLR(o, decay_batch=0), 1)
    for words in (
        {"total_iters": 4, "decay_batch": 4},
        {"cycle": True},
        {"total_iters": 3, "end_learning_rate": 0.1},
    ):
        with pytest.raises(TypeError, match=r"give total_iters .as torch has it., or decay_batch"):
            rates_of(lambda o, w=words: PolynomialLR(o, **w), 1)  # type: ignore[misc]


#: The figures come from OneFlow's documentation and from its definition of each case.
WARM: list[tuple[Callable[[Any], Any], list[float]]] = [
    (
        lambda o: WarmUpLR(o, warmup_factor=0.5, warmup_iters=5, warmup_method="constant"),
        [0.05] * 5 + [0.1] * 2,
    ),
    (
        lambda o: WarmUpLR(o, warmup_factor=0.5, warmup_iters=5),
        [0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.1],
    ),
    (
        lambda o: WarmupLR(exponential(o), 0.5, 5),
        [0.05, 0.0518098, 0.0536196, 0.0554294, 0.0572392, 0.059049, 0.0531441, 0.04782969],
    ),
    (
        lambda o: WarmupLR(exponential(o), 0.5, 5, warmup_prefix=True),
        [0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.09, 0.081],
    ),
    (lambda o: WarmupLR(exponential(o), 0.5, 5, "constant"), [0.05] * 5 + [0.059049, 0.0531441]),
    (lambda o: WarmupLR(exponential(o), 0.5, 0), [0.1, 0.09, 0.081]),
    (
        lambda o: WarmupLR(PolynomialLR(o, decay_batch=4, end_learning_rate=0.02), 0.5, 2),
        [0.05, 0.055, 0.06, 0.04, 0.02, 0.02],
    ),
    (
        lambda o: WarmUpLR(CosineDecayLR(o, 5, alpha=0.1), 0.5, 2),
        [0.05, 0.0594529, 0.0689058, 0.0410942],
    ),
    (
        lambda o: WarmupLR(
            torch.optim.lr_scheduler.SequentialLR(o, [StepLR(o, 2, 0.5), exponential(o)], [3]),
            0.5,
            2,
        ),
        [0.05, 0.05, 0.05, 0.1, 0.09],
    ),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch's SequentialLR
@pytest.mark.parametrize("number", range(len(WARM)))
def test_warm_up(number: int) -> None:
    make, want = WARM[number]
    assert rates_of(make, len(want)) == pytest.approx(want, rel=1e-5)


def test_groups_warm_up_each_to_its_own_rate() -> None:
    optimizer = torch.optim.SGD(
        [{"params": [torch.zeros(1)], "lr": 0.1}, {"params": [torch.zeros(1)], "lr": 0.2}]
    )
    schedule = WarmupLR(exponential(optimizer), 0.5, 2)
    optimizer.step()
    schedule.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.081, 0.162])


def test_a_rate_that_is_a_tensor_stays_the_same_one() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=rate, capturable=True, foreach=True)
    schedule, found = WarmupLR(exponential(optimizer), 0.5, 5), []
    for _ in range(8):
        found.append(rate.item())
        assert optimizer.param_groups[0]["lr"] is rate
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(WARM[2][1], rel=1e-5)


@pytest.mark.parametrize("steps", [2, 7])
@pytest.mark.parametrize("number", range(len(WARM)))
def test_a_warm_up_goes_on_from_its_state(number: int, steps: int) -> None:
    make, _ = WARM[number]
    whole = rates_of(make, 12)
    first = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule = make(first)
    first.step()
    for _ in range(steps):
        schedule.step()
    kept = copy.deepcopy((first.state_dict(), schedule.state_dict()))
    second = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    again = make(second)
    second.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    second.step()
    for at in range(steps, 11):
        assert second.param_groups[0]["lr"] == pytest.approx(whole[at])
        again.step()
    assert again.last_step == 11


def test_what_a_warm_up_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ValueError, match="takes a scheduler or an optimizer, got int"):
        WarmupLR(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"linear" or "constant", got \'cosine\''):
        WarmupLR(optimizer, warmup_method="cosine")
    with pytest.raises(
        ValueError, match="warmup_iters must be positive where there is no scheduler"
    ):
        WarmupLR(optimizer, warmup_iters=0)
    alone = WarmupLR(optimizer, verbose=True)
    assert capsys.readouterr().out == "step 0: learning rates 0.03333\n"
    with pytest.raises(ValueError, match="takes no epoch"):
        alone.step(3)
    with pytest.raises(ValueError, match="must both have a scheduler, or neither"):
        WarmupLR(exponential(optimizer)).load_state_dict(alone.state_dict())
