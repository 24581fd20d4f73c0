"""Tests of variables that the code of build() refers to: another tensor there counts at the next
call, and no fake tensor stays there (graph/capture/reachable_containers.py)."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

S, B = flow.sbp.split, flow.sbp.broadcast


def filled(value: float = 1.0) -> Tensor:
    return torch.full((3,), value, dtype=torch.float64)


FACTOR = filled()
LEFT: list[Tensor] = []


class Settings:
    factor = filled()


class Holder:
    def __init__(self) -> None:
        self.factor, self.inner = filled(), types.SimpleNamespace(factor=filled())

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


def scaled_by_global(x: Tensor) -> Tensor:
    return x * FACTOR


def change_global() -> None:
    global FACTOR
    FACTOR = filled(5.0)


def linear(value: float) -> nn.Linear:
    module = nn.Linear(3, 1, bias=False).double()
    nn.init.constant_(module.weight, value)
    return module


class Scale(flow.nn.Graph):
    """A graph that finds its factor in an attribute of an object, or through a method."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.holder = way, Holder()

    def build(self, x: Tensor) -> Tensor:
        return self.through_method(x) if self.way == "method" else x * self.holder.inner.factor

    def through_method(self, x: Tensor) -> Tensor:
        return x * FACTOR


def case_of(name: str, place: Any) -> tuple[flow.nn.Graph, Callable[[], Any]]:
    """Return a graph that multiplies by 1, and a function after which it has to multiply by 5."""
    holder, places, factors = Holder(), {"factor": filled()}, [filled()]
    modules = {"linear": linear(1.0)}
    factor, module = filled(), linear(1.0)

    def by_nonlocal(x: Tensor) -> Tensor:
        return x * factor

    def by_module(x: Tensor) -> Tensor:
        return module(x)  # type: ignore[no-any-return]

    def change_nonlocal() -> None:
        nonlocal factor, module
        factor, module = filled(5.0), linear(5.0)

    def product(x: Tensor) -> Tensor:
        for t in factors:
            x = x * t
        return x

    def change_weight() -> None:
        modules["linear"].weight = nn.Parameter(filled(5.0).view(1, 3))

    if name == "global tensor":
        places["factor"] = places["factor"].to_global(place, B)
    new: Any = filled(5.0).to_global(place, B) if name == "global tensor" else filled(5.0)
    inner = types.SimpleNamespace(factor=filled(5.0))
    by_dict = lambda x: x * places["factor"]  # noqa: E731
    change_dict = lambda: places.update(factor=new)  # noqa: E731
    functions: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
        "nonlocal": (by_nonlocal, change_nonlocal),
        "nonlocal module": (by_module, change_nonlocal),
        "global variable": (lambda x: x * FACTOR, change_global),
        "global of a helper": (lambda x: scaled_by_global(x), change_global),
        "dict": (by_dict, change_dict),
        "global tensor": (by_dict, change_dict),
        "list": (lambda x: x * factors[0], lambda: factors.__setitem__(0, filled(5.0))),
        "longer list": (product, lambda: factors.append(filled(5.0))),
        "object": (lambda x: x * holder.factor, lambda: setattr(holder, "factor", filled(5.0))),
        "method": (lambda x: holder.scaled(x), lambda: setattr(holder, "factor", filled(5.0))),
        "object in an object": (
            lambda x: x * holder.inner.factor,
            lambda: setattr(holder, "inner", inner),
        ),
        "class": (
            lambda x: x * Settings.factor,
            lambda: setattr(Settings, "factor", filled(5.0)),
        ),
        "partial": (functools.partial(lambda d, x: x * d["factor"], places), change_dict),
        "default": (lambda x, d=places: x * d["factor"], change_dict),  # type: ignore[misc]
        "module in a dict": (
            lambda x: modules["linear"](x),
            lambda: modules.update(linear=linear(5.0)),
        ),
        "weight of a module in a dict": (lambda x: modules["linear"](x), change_weight),
    }
    if name == "graph's object":
        graph = Scale("object")
        return graph, lambda: setattr(graph.holder, "inner", inner)
    if name == "graph's method":
        return Scale("method"), change_global
    function, change = functions[name]
    return flow.nn.Graph.trace(function), change


CASES = [
    "nonlocal", "nonlocal module", "global variable", "global of a helper", "dict",
    "global tensor", "list", "longer list", "object", "method", "object in an object", "class",
    "partial", "default", "module in a dict", "weight of a module in a dict", "graph's object",
    "graph's method",
]  # fmt: skip


def sums_around_a_change(name: str) -> tuple[list[float], int]:
    global FACTOR
    FACTOR = Settings.factor = filled()
    place = flow.placement.all("cpu")
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3).to_global(place, B)
    graph, change = case_of(name, place)
    sums = [graph(x).sum().item() for _ in range(2)]
    change()
    return sums + [graph(x).sum().item() for _ in range(2)], graph._captures


@pytest.mark.parametrize("name", CASES)
def test_another_tensor_counts_at_the_next_call(name: str) -> None:
    assert simulate(1, sums_around_a_change, name) == [([66.0, 66.0, 330.0, 330.0], 2)]


def two_shapes() -> int:
    place, places = flow.placement.all("cpu"), {"factor": filled()}
    graph = flow.nn.Graph.trace(lambda x: x * places["factor"])
    for _ in range(4):
        for rows in (2, 4):
            graph(torch.ones(rows, 3, dtype=torch.float64).to_global(place, B))
    return graph._captures


def test_a_variable_that_stays_costs_no_capture() -> None:
    assert simulate(2, two_shapes) == [2, 2]


def tensors_left_outside() -> list[str]:
    place = flow.placement.all("cpu")
    outs: list[Any] = []
    named: dict[str, Any] = {}
    holder, last = Holder(), None

    def build(x: Tensor) -> Tensor:
        nonlocal last
        y = last = x * 2
        outs.append(y)
        LEFT.append(y)
        named["y"] = holder.late = y  # type: ignore[attr-defined]
        return y

    x = torch.ones(2, 3, dtype=torch.float64).to_global(place, B)
    graph = flow.nn.Graph.trace(build)
    with pytest.warns(UserWarning, match="is given a tensor inside build") as warned:
        assert [graph(x).sum().item() for _ in range(2)] == [12.0, 12.0]
    assert outs == LEFT == []
    assert not named
    assert last is None
    assert not hasattr(holder, "late")
    return sorted(str(w.message).split(" is given")[0] for w in warned)


def test_tensors_left_in_variables_are_told() -> None:
    assert simulate(1, tensors_left_outside) == [
        ["LEFT[0]", "holder.late", "last", "named.y", "outs[0]"]
    ]


def a_running_sum() -> tuple[list[float], bool]:
    place, total = flow.placement.all("cpu"), torch.zeros(3, dtype=torch.float64)
    first = total

    def build(x: Tensor) -> Tensor:
        nonlocal total
        total = total + x.to_local().sum(0)
        return x * 1

    x = torch.ones(2, 3, dtype=torch.float64).to_global(place, B)
    graph = flow.nn.Graph.trace(build)
    for _ in range(3):
        graph(x)
    return total.tolist(), total is first


def test_a_state_in_a_variable_is_updated_at_each_step() -> None:
    assert simulate(1, a_running_sum) == [([6.0, 6.0, 6.0], True)]


class LazyTable(dict[str, Any]):
    """A dict that loads a value when it is read, as transformers' tables of models do."""

    def items(self) -> Any:
        raise ImportError("a model that is not installed")

    values = items


MODELS = LazyTable(linear=nn.Linear)


def a_table_that_computes_its_entries() -> list[float]:
    place = flow.placement.all("cpu")

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.weight = LazyTable(b=2), nn.Parameter(filled(2.0))

        def forward(self, x: Tensor) -> Tensor:
            factor = len(MODELS) + len(self.table)
            return x * self.weight * factor

    model = flow.parallelize(Chosen(), place, "auto")
    x = filled().to_global(place, B)
    step = flow.nn.Graph.trace(lambda x: model(x) * len(MODELS))
    return [model(x).sum().item(), step(x).sum().item(), step(x).sum().item()]


def test_a_table_that_computes_its_entries_is_not_read() -> None:
    assert simulate(1, a_table_that_computes_its_entries) == [[12.0, 12.0, 12.0]]
