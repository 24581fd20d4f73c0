"""Tests of modules whose parameters and buffers share memory: they share it as global tensors too,
or the conversion refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.errors import StorageError
from globaltensor.parallel.shared_storage import find_shared_memory

B, S = flow.sbp.broadcast, flow.sbp.split
PLANS = ("data", "fsdp", "tensor", "sequence")


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    return nn.Sequential(*layers).double()


def tied_by_data() -> nn.Module:
    model = pair()
    model[1].weight.data = model[0].weight.data
    return model


def tied_object() -> nn.Module:
    model = pair()
    model[1].weight = model[0].weight
    return model


def buffer_of_parameter() -> nn.Module:
    model = pair()
    model.register_buffer("first", model[0].weight.detach())
    return model


def disjoint_parts_of_flat() -> nn.Module:
    model, flat = pair(), torch.linspace(-1, 1, 32, dtype=torch.float64)
    model[0].weight.data, model[1].weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)
    return model


def disjoint_columns() -> nn.Module:
    model, wide = pair(), torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)
    model[0].weight.data, model[1].weight.data = wide[:, :4], wide[:, 4:]
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f
    for f in (
        tied_by_data,
        tied_object,
        buffer_of_parameter,
        disjoint_parts_of_flat,
        disjoint_columns,
    )
}


def losses(model: nn.Module, arrive: Callable[[torch.Tensor], Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.linspace(-1, 2, 32, dtype=torch.float64).view(8, 4)
    out = []
    for _ in range(4):
        loss = model(arrive(x)).square().mean()
        if "first" in dict(model.named_buffers()):
            loss = loss + 0.1 * model.first.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(float(loss.detach()))
    return out


def losses_on_ranks(name: str, plan: str) -> list[float]:
    where = flow.placement.all("cpu")
    rows = S(0) if plan in ("data", "fsdp") else B
    model = flow.parallelize(MODELS[name](), where, plan)
    return losses(model, lambda x: x.to_global(where, B).to_global(sbp=rows))  # type: ignore[attr-defined]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sweep(3)
def test_training_is_that_of_one_device(name: str, plan: str) -> None:
    want = pytest.approx(losses(MODELS[name](), lambda x: x), rel=1e-9)
    assert run_on(2, losses_on_ranks, name, plan) == [want, want]


def written_on_ranks() -> list[Any]:
    where, out = flow.placement.all("cpu"), []
    model: Any = tied_by_data().to_global(where, S(0))  # type: ignore[attr-defined]
    one, two = model[0].weight, model[1].weight
    with torch.no_grad():
        one.zero_()
        row = one[3]
        two.add_(1)
        out += [float(one.sum()), float(row.sum())]
        model.to_global(sbp=S(1))
        one.mul_(3)
        out += [float(two.sum()), one.sbp == two.sbp == (S(1),)]
        model.to_local()
        one.zero_()
        out.append(float(two.sum()))
    return out


def test_what_is_written_into_one_shows_in_the_other() -> None:
    assert run_on(2, written_on_ranks) == [[16.0, 4.0, 48.0, True, 0.0]] * 2


def part_of_parameter() -> nn.Module:
    model = pair()
    model[1].weight.data = model[0].weight.data[:2]
    return model


def transposed() -> nn.Module:
    model = pair()
    model[1].weight.data = model[0].weight.data.t()
    return model


def flat_is_registered() -> nn.Module:
    model, flat = pair(), torch.ones(32, dtype=torch.float64)
    model[0].weight.data = flat[:16].view(4, 4)
    model.register_buffer("flat", flat)
    return model


def buffer_of_buffer() -> nn.Module:
    model, big = pair(), torch.zeros(4, 3)
    model.register_buffer("big", big)
    model.register_buffer("row", big[1])
    return model


REFUSED: dict[Callable[[], nn.Module], str] = {
    part_of_parameter: r"0\.weight and 1\.weight of Sequential share memory",
    transposed: r"0\.weight and 1\.weight of Sequential share memory",
    flat_is_registered: r"0\.weight and flat of Sequential share memory.*give flat memory",
    buffer_of_buffer: r"big and row of Sequential share memory.*give row memory",
}


def refused_on_ranks(make: Callable[[], nn.Module], plan: str, text: str) -> bool:
    model = make()
    with pytest.raises(StorageError, match=text) as caught:
        flow.parallelize(model, flow.placement.all("cpu"), plan)
    assert str(caught.value).startswith("test_shared_storage.py:")
    return not any(t.is_global for t in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", REFUSED)
def test_other_views_of_one_memory_are_refused(make: Callable[[], nn.Module]) -> None:
    assert run_on(2, refused_on_ranks, make, "fsdp", REFUSED[make]) == [True, True]


def recurrent_and_meta() -> bool:
    where = flow.placement.all("cpu")
    layer = nn.LSTM(3, 4, 2, bidirectional=True)
    # cuDNN keeps the weights in one buffer, each at a place of its own
    flat = torch.cat([w.detach().flatten() for w in layer.parameters()])
    place = 0
    for w in layer.parameters():
        w.data = flat[place : place + w.numel()].view(w.shape)
        place += w.numel()
    flow.parallelize(layer, where, "data")
    flow.parallelize(pair().to("meta"), where, "fsdp")
    empty = torch.zeros(0)
    model = nn.Module()
    model.register_buffer("one", empty)
    model.register_buffer("two", empty[:0])
    flow.parallelize(model, where, "data")
    return True


def test_flat_weights_tensors_without_memory_and_empty_ones_are_accepted() -> None:
    assert run_on(2, recurrent_and_meta) == [True, True]


def test_the_owner_of_shared_memory_is_a_parameter() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    shared = find_shared_memory(
        [("early", weight.detach()), ("weight", weight), ("again", weight), ("late", weight.data)]
    )
    assert shared == ({"early": "weight", "late": "weight"}, None)


def gradient_on_ranks(plan: str) -> list[Any]:
    where = flow.placement.all("cpu")
    model = pair()
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    weight, grad = model[0].weight, model[0].weight.grad
    before = float(grad.sum())
    flow.parallelize(model, where, plan)
    out: list[Any] = [weight.grad is grad, float(grad.sum()) / before, grad.sbp == weight.sbp]
    for _ in range(2):
        # each rank has one of the two rows
        x = torch.ones(2, 4, dtype=torch.float64).to_global(where, B)  # type: ignore[attr-defined]
        model(x.to_global(sbp=S(0))).sum().backward()
    out += [weight.grad is grad, float(grad.sum()) / before]
    model.zero_grad(set_to_none=False)
    return [*out, weight.grad is grad, float(grad.abs().sum())]


@pytest.mark.parametrize("plan", ["data", "fsdp"])
def test_a_gradient_stays_the_same_object(plan: str) -> None:
    want = [True, pytest.approx(1), True, True, pytest.approx(3), True, 0.0]
    assert run_on(2, gradient_on_ranks, plan) == [want, want]
