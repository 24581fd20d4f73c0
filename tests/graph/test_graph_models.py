"""Tests of models as users write them, in graphs. Two steps on two ranks equal two steps of plain
torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.bodies import values
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

B, S = flow.sbp.broadcast, flow.sbp.split


class Contrastive(nn.Module):
    """Two encoders, whose pairs are matched in both directions (Radford et al. 2021). The targets
    follow from the code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.normalize(self.left(x), dim=-1), F.normalize(self.right(x), dim=-1)
        logits, labels = self.scale.exp() * a @ b.t(), torch.arange(len(x))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class Residual(nn.Module):
    """A network trained on its derivative by its inputs (Raissi et al. 2019), with a leaf that is
    made in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return (slope + bend).square().mean()


class Adversarial(nn.Module):
    """A step on inputs that a gradient has made worse (Goodfellow et al. 2015). The gradient is
    read from the leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        before = [p.grad for p in self.parameters()]
        worse = x.detach().clone().requires_grad_()
        self.net(worse).square().mean().backward()
        assert worse.grad is not None
        for p, grad in zip(self.parameters(), before, strict=True):
            p.grad = grad
        return self.net(x + 0.1 * worse.grad).square().mean()  # type: ignore[no-any-return]


class Variational(nn.Module):
    """A model with distributions, which inspect the values of their arguments on one device (Kingma
    & Welling 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.width, self.back = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.distributions.Normal(self.mean(x), F.softplus(self.width(x)))
        prior = torch.distributions.Normal(
            torch.zeros_like(found.loc), torch.ones_like(found.scale)
        )
        bits = torch.distributions.Bernoulli(logits=self.back(found.loc))
        return (
            torch.distributions.kl_divergence(found, prior).sum(-1)
            - bits.log_prob((x > 0).to(x.dtype)).sum(-1)
        ).mean()  # type: ignore[no-any-return,no-untyped-call]


class Transcribing(nn.Module):
    """A model of sequences of several lengths, aligned with their texts (Graves et al. 2006). The
    kernel reads the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        spoken, written = 5 + (x[:, 0, 0] > 0).long(), 1 + (x[:, 0, 1] > 0).long()
        texts = 1 + (x[:, :2, 2] > 0).long()
        return F.ctc_loss(self.letters(x).log_softmax(-1).transpose(0, 1), texts, spoken, written)


class Vocoder(nn.Module):
    """A filter between a transform of sound and its inverse. The inverse checks that the windows
    overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        window = torch.hann_window(8, dtype=x.dtype)
        heard = torch.stft(x, 8, 2, window=window, return_complex=True)
        gain = self.gain(heard.abs().transpose(1, 2)).transpose(1, 2).sigmoid()
        return (
            (torch.istft(heard * gain, 8, 2, window=window, length=x.shape[1]) - x.abs())
            .square()
            .mean()
        )


class StateSpace(nn.Module):
    """A recurrence whose steps run in parallel by torch's scan under a compiler (Gu & Dao 2023),
    and step by step otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.into = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.associative_scan import associative_scan

        pair = (self.decay(x).sigmoid(), self.into(x))
        if torch.compiler.is_compiling():
            return associative_scan(_after, pair, 1, combine_mode="generic")[1].square().mean()  # type: ignore[no-any-return]
        states = [pair[1][:, 0]]
        for t in range(1, x.shape[1]):
            states.append(pair[0][:, t] * states[-1] + pair[1][:, t])
        return torch.stack(states, 1).square().mean()


def _after(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


class Uncached(torch.autograd.Function):
    """A layer that is recomputed in backward (Gomez et al. 2017). No argument names its parameters,
    which get their gradients in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x.detach())
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(*grads)
        return x.grad, None


class Reversible(nn.Module):
    """A model around such a layer, whose gradients too are read before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Uncached.apply(self.first(x).tanh(), self.inner)).square().mean()  # type: ignore[no-any-return]


class Case(NamedTuple):
    model: Callable[[], nn.Module]  # the result is a loss
    shape: tuple[int, ...] = (4, 3)
    clip: float | None = None  # the maximum norm of the gradients


PLANS = {"columns": lambda path, t: S(t.dim() - 1) if t.dim() else B}
CASES = {"contrastive": Case(Contrastive), "derivatives": Case(Residual),
    "adversarial": Case(Adversarial), "variational": Case(Variational),
         "transcribing": Case(Transcribing, (4, 6, 3)), "vocoder": Case(Vocoder, (4, 24)),
         "state space": Case(StateSpace, (4, 5, 3)), "reversible": Case(Reversible, clip=0.05)}  # fmt: skip  # noqa: E501


def made(name: str) -> nn.Module:
    model = CASES[name].model().double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(values(*p.shape, seed=i))
    return model


def steps(model: nn.Module, batches: list[Tensor], step: Callable[[Tensor], Tensor]) -> list[Any]:
    """Return the losses, then the parameters."""
    losses = [step(x).item() for x in batches]
    return [
        torch.tensor(losses, dtype=torch.float64),
        *(torch.tensor(p.tolist(), dtype=torch.float64) for p in model.parameters()),
    ]


def clipped(name: str, model: nn.Module) -> None:
    most = CASES[name].clip
    if most is not None:
        assert nn.utils.clip_grad_norm_(model.parameters(), most) is not None


def on_ranks(name: str, plan: str, sbp: Any, want: list[Any]) -> None:
    line = flow.placement("cpu", [0, 1])
    model = flow.parallelize(made(name), line, PLANS.get(plan, plan))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Training(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x: Tensor) -> Tensor:
            loss: Tensor = self.model(x)
            loss.backward()
            clipped(name, self.model)
            return loss

    batches = [
        values(*CASES[name].shape, seed=20 + i).to_global(line, B).to_global(sbp=sbp)
        for i in range(2)
    ]  # type: ignore[attr-defined]
    for got, wanted in zip(steps(model, batches, Training()), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("plan", ["data", "tensor", "columns"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(8)
def test_as_on_one_device(name: str, plan: str) -> None:
    plain = made(name)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = plain(x)
        loss.backward()
        clipped(name, plain)
        optimizer.step()
        return loss

    want = steps(plain, [values(*CASES[name].shape, seed=20 + i) for i in range(2)], step)
    simulate(2, on_ranks, name, plan, S(0) if plan == "data" else B, want)
