"""Tests that parameters stay the same objects when a module becomes global, moves or becomes local.
Optimizers, averages and hooks made before still apply to them."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.errors import GlobalTensorError

B, S = flow.sbp.broadcast, flow.sbp.split
STEPS = 3
PLANS = ("data", "fsdp", "tensor")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


def everyone(axes: int = 1) -> Any:
    n = flow.env.get_world_size()
    return flow.placement("cpu", list(range(n)) if axes == 1 else [[0, 1], [2, 3]])


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()


def rows(n: int = 6) -> Tensor:
    return torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def full(t: Tensor) -> Tensor:
    return torch.from_numpy(t.detach().numpy())


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(full(got), want.detach(), rtol=1e-10, atol=1e-12)


def given(x: Tensor, placement: Any) -> Tensor:
    return x.to_global(placement, [B] * placement.axes).to_global(
        sbp=[S(0), *[B] * (placement.axes - 1)]
    )  # type: ignore[attr-defined,no-any-return]


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int = STEPS
) -> list[float]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(steps)]  # type: ignore[union-attr,arg-type]


#: Optimizers, plans, and the numbers of steps before the conversion, after one of which the
#: optimizer has state. Each part has every seventh case. The first one has every optimizer and
#: plan.
CASES = list(itertools.product(OPTIMIZERS, PLANS, (0, 1)))
PARTS = 7


def optimizers_made_before(axes: int, part: int) -> None:
    where = everyone(axes)
    for name, plan, before in CASES[part::PARTS]:
        make = OPTIMIZERS[name]
        reference = mlp()
        reference_optimizer = make(reference.parameters())
        want = trained(reference, reference_optimizer, rows(), before) + trained(
            reference, reference_optimizer, rows()
        )
        model = mlp()
        held, known = list(model.parameters()), weakref.ref(model[0].weight)  # type: ignore[index]
        optimizer = make(model.parameters())
        got = trained(model, optimizer, rows(), before)
        flow.parallelize(model, where, [plan] * axes)
        assert all(p is q for p, q in zip(model.parameters(), held, strict=True)), (name, plan)
        assert known() is held[0]
        assert all(isinstance(p, nn.Parameter) and p.is_global for p in held)  # type: ignore[attr-defined]
        got += trained(model, optimizer, given(rows(), where))
        assert got == pytest.approx(want, rel=1e-9), (name, plan, before)
        for p, q in zip(held, reference.parameters(), strict=True):
            same(p, q)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_optimizers_made_before_train(part: int) -> None:
    run_on(2, optimizers_made_before, 1, part, timeout=120.0)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_optimizers_made_before_train_on_a_grid(part: int) -> None:
    run_on(4, optimizers_made_before, 2, part, timeout=240.0)


class Trained(flow.nn.Graph):  # type: ignore[misc]
    """A training step as a graph, perhaps with ZeRO of this stage."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        if stage:
            self.config.enable_zero(True, stage=stage, shard_min_size=1)

    def build(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss


#: Stages of ZeRO, plans, and the numbers of steps before the conversion.
IN_GRAPHS = (
    (0, "data", 1),
    (0, "tensor", 0),
    (0, "fsdp", 1),
    (1, "data", 1),
    (2, "data", 0),
    (3, "data", 1),
    (3, "tensor", 0),
)
#: Each part has every fifth case. The first one has every optimizer and five of the rows above.
CASES_IN_GRAPHS = list(itertools.product(("sgd", "adamw", "adamw foreach"), IN_GRAPHS))
PARTS_IN_GRAPHS = 5


def optimizers_made_before_graphs(axes: int, part: int) -> None:
    where = everyone(axes)
    for name, (stage, plan, before) in CASES_IN_GRAPHS[part::PARTS_IN_GRAPHS]:
        make = OPTIMIZERS[name]
        reference, model = mlp(), mlp()
        reference_optimizer, optimizer = (make(m.parameters()) for m in (reference, model))
        want = trained(reference, reference_optimizer, rows(), before + STEPS)
        held = list(model.parameters())
        got = trained(model, optimizer, rows(), before)
        if plan == "data" and before:
            model.to_global(where, [B] * axes)  # type: ignore[operator]
        else:
            flow.parallelize(model, where, [plan] * axes)
        optimizer.zero_grad()
        graph = Trained(model, optimizer, stage)
        got += [graph(given(rows(), where)).item() for _ in range(STEPS)]
        assert got == pytest.approx(want, rel=1e-9), (name, stage, plan)
        assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
        for p, q in zip(held, reference.parameters(), strict=True):
            same(p, q)


@pytest.mark.parametrize("part", range(PARTS_IN_GRAPHS))
@pytest.mark.sweep(PARTS_IN_GRAPHS)
def test_optimizers_made_before_train_in_graphs(part: int) -> None:
    run_on(2, optimizers_made_before_graphs, 1, part)


@pytest.mark.extended
@pytest.mark.parametrize("part", range(PARTS_IN_GRAPHS))
def test_optimizers_made_before_train_in_graphs_on_a_grid(part: int) -> None:
    run_on(4, optimizers_made_before_graphs, 2, part, timeout=240.0)


def hooks_and_gradients() -> None:
    def hooked(model: nn.Module) -> tuple[list[Any], list[str]]:
        seen: list[str] = []
        weight, bias = model[0].weight, model[0].bias  # type: ignore[index]
        handles = [
            weight.register_hook(lambda g: g * 2),
            weight.register_hook(lambda g: g + 1),
            bias.register_hook(lambda g: seen.append(f"bias {list(g.shape)}")),
            bias.register_post_accumulate_grad_hook(
                lambda p: seen.append(f"whole {p.grad is not None}")
            ),
        ]
        return handles, seen

    want_model, model = mlp(), mlp()
    want_model(rows()).square().mean().backward()
    model(rows()).square().mean().backward()
    (want_handles, want_seen), (handles, seen) = hooked(want_model), hooked(model)
    flow.parallelize(model, everyone(), "fsdp")
    for (name, p), q in zip(model.named_parameters(), want_model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        same(p.grad, q.grad)
        assert p.grad.sbp == p.sbp, name  # type: ignore[attr-defined]
    for removed in (None, 0, 2):
        if removed is not None:
            handles[removed].remove()
            want_handles[removed].remove()
        want_model(rows()).square().mean().backward()
        model(given(rows(), everyone())).square().mean().backward()
        for p, q in zip(model.parameters(), want_model.parameters(), strict=True):
            same(p.grad, q.grad)  # type: ignore[arg-type]
    assert seen == want_seen


def test_hooks_and_gradients_go_along() -> None:
    run_on(2, hooks_and_gradients)


class Tied(nn.Module):
    """A model whose input and output embeddings share a weight, which a list holds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.words.weight
        self.also = [self.words.weight]
        self.register_buffer("scale", torch.full((4,), 2.0, dtype=torch.float64))
        self.again = self.scale

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids) * self.again) + self.also[0].sum()


def tied_and_recurrent() -> None:
    torch.manual_seed(0)
    tied = Tied().double()
    want = copy.deepcopy(tied)
    tied.to_global(everyone(), {"scale": B, "*": S(0)})  # type: ignore[operator]
    assert tied.out.weight is tied.words.weight is tied.also[0]
    assert tied.again is tied.scale
    ids = torch.arange(9)
    for model in (tied, want):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
    same(tied.words.weight, want.words.weight)

    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, 2).double()
    want_layer = copy.deepcopy(layer)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layer, want_layer)]
    layer.to_global(everyone(), S(0))  # type: ignore[operator]
    x = torch.randn(5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for model, optimizer in zip((layer, want_layer), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            model(x)[0].square().mean().backward()
            optimizer.step()
    for p, q in zip(layer.parameters(), want_layer.parameters(), strict=True):
        same(p, q)


def test_tied_parameters_and_recurrent_layers() -> None:
    run_on(2, tied_and_recurrent)


def moved_and_back() -> None:
    where, model, want = everyone(), mlp(), mlp()
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, want))
    held, buffers = list(model.parameters()), list(model.buffers())
    losses, expected = [], []
    for sbp in (B, {"0.*": S(0), "*": B}, B):
        model.to_global(where, sbp)  # type: ignore[operator]
        assert all(
            p is q
            for p, q in zip((*model.parameters(), *model.buffers()), (*held, *buffers), strict=True)
        )
        losses += trained(model, optimizer, given(rows(), where), 1)
        expected += trained(want, reference, rows(), 1)
    assert losses == pytest.approx(expected, rel=1e-9)
    model.to_local()  # type: ignore[operator]
    assert all(
        p is q
        for p, q in zip((*model.parameters(), *model.buffers()), (*held, *buffers), strict=True)
    )
    assert all(type(p) is nn.Parameter for p in held)
    assert all(type(b) is Tensor for b in buffers)
    assert model[0].weight.grad is None  # type: ignore[index]
    for p, q in zip(held, want.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    model(rows()).square().mean().backward()
    assert held[0].grad is not None


def test_a_module_that_moves_and_becomes_local_again() -> None:
    run_on(2, moved_and_back)


def older_graphs() -> str:
    model = mlp()
    loss = model(rows()).square().mean()
    model.to_global(everyone(), B)  # type: ignore[operator]
    with pytest.raises(GlobalTensorError, match="run the forward pass again") as found:
        loss.backward()
    loss = model(given(rows(), everyone())).square().mean()
    model.to_global(sbp={"0.*": S(0), "*": B})  # type: ignore[operator]
    with pytest.raises(GlobalTensorError, match="run the forward pass again"):
        loss.backward()
    model(given(rows(), everyone())).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    return str(found.value)


def test_a_graph_from_before_refuses_to_go_backward() -> None:
    first, second = run_on(2, older_graphs)
    assert first == second


def averages() -> None:
    """Check that a plain average of weights, made earlier, follows the model that became global."""
    model, want = mlp(), mlp()
    mean, reference = (
        torch.optim.swa_utils.AveragedModel(m, avg_fn=lambda a, b, n: a * 0.5 + b * 0.5)
        for m in (model, want)
    )
    flow.parallelize(model, everyone(), "fsdp")
    for m, average, x in ((model, mean, given(rows(), everyone())), (want, reference, rows())):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            trained(m, optimizer, x, 1)
            average.update_parameters(m)
    for p, q in zip(mean.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_averages_made_before_follow() -> None:
    run_on(2, averages)


def exchanged() -> None:
    """Check that parameters exchange their values, layouts and gradients in every layout."""
    values = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    rows_of = {"replicated": B, "split": S(0), "partial": flow.sbp.partial_sum}

    def parameter(value: Tensor, sbp: Any) -> Any:
        return nn.Parameter(given(value, everyone()).to_global(sbp=sbp))  # type: ignore[attr-defined]

    for first in rows_of.values():
        for second in rows_of.values():
            a, b = parameter(values, first), parameter(2 * values, second)
            weight = given(values, everyone())
            (a * weight).sum().backward()
            torch.utils.swap_tensors(a, b)
            assert (a.sbp, b.sbp) == ((second,), (first,))
            same(a, 2 * values)
            same(b, values)
            assert a.grad is None
            same(b.grad, values)
            (a * weight * 3).sum().backward()
            same(a.grad, 3 * values)
            (b * weight).sum().backward()
            same(b.grad, 2 * values)
            hooked = []
            a.register_post_accumulate_grad_hook(lambda t, hooked=hooked: hooked.append(t))
            (a * weight).sum().backward()
            assert hooked == [a]


def test_swapped_parameters_exchange_everything() -> None:
    run_on(2, exchanged)


def converted_by_swapping() -> str:
    """Check that a module's parameters change dtype in the mode in which torch swaps them."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for made in ("with the module", "as parameters"):
            model = mlp()
            model.to_global(everyone(), B)  # type: ignore[operator]
            if made == "as parameters":
                for layer in (model[0], model[3]):  # type: ignore[index]
                    layer.weight = nn.Parameter(layer.weight.detach() * 1)
            parameters = list(model.parameters())
            model(given(rows(), everyone())).square().mean().backward()
            grads = [full(p.grad) for p in parameters]  # type: ignore[arg-type]
            loss = model(given(rows(), everyone())).square().mean()
            model.float()
            assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
            for p, grad in zip(parameters, grads, strict=True):
                assert p.dtype is torch.float32
                assert p.sbp == (B,)  # type: ignore[attr-defined]
                same(p.grad, grad.float())  # type: ignore[arg-type]
            model.zero_grad()
            model(given(rows().float(), everyone())).square().mean().backward()
            for p, grad in zip(parameters, grads, strict=True):
                summed = full(p.grad)  # type: ignore[arg-type]
                torch.testing.assert_close(summed, grad.float(), rtol=1e-3, atol=1e-4)
            with pytest.raises(GlobalTensorError, match="run the forward pass again") as found:
                loss.backward()
        for sbp in (S(0), S(1)):
            layer = nn.Linear(5, 4).double()
            layer.to_global(everyone(), {"weight": sbp, "bias": B})  # type: ignore[operator]
            weight, values = layer.weight, full(layer.weight)
            layer.float()
            assert layer.weight is weight
            assert weight.sbp == (sbp,)  # type: ignore[attr-defined]
            same(weight, values.float())
            x = given(rows().float(), everyone())
            layer(x).sum().backward()
            summed = full(weight.grad)  # type: ignore[arg-type]
            torch.testing.assert_close(summed, rows().float().sum(0).expand(4, 5))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return str(found.value)


def test_parameters_convert_in_swap_mode() -> None:
    first, second = run_on(2, converted_by_swapping)
    assert first == second


class Slotted(nn.Parameter):
    """A parameter whose class has its own slot."""

    __slots__ = ("mine",)


def cannot_stay() -> str:
    model = nn.Linear(2, 2)
    model.weight = Slotted(torch.ones(2, 2))
    with pytest.raises(
        GlobalTensorError, match=r"weight of Linear is a Slotted, whose class has slots of its own"
    ) as found:
        model.to_global(everyone(), B)  # type: ignore[operator]
    assert not any(p.is_global for p in model.parameters())  # type: ignore[attr-defined]
    return str(found.value)


def test_what_cannot_stay_the_same_object_is_refused() -> None:
    first, second = run_on(2, cannot_stay)
    assert first == second
