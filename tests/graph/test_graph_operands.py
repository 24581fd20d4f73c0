"""Tests of the global tensors that a graph call reads: every rank must pass and capture the same
ones, and a captured one is read as it is at the call (graph/graph.py)."""

from __future__ import annotations

import pytest
import torch
from support.pool import run_on
from torch import Tensor

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import DivergenceError

S, B = flow.sbp.split, flow.sbp.broadcast


def rows(start: float) -> Tensor:
    place = flow.placement.all("cpu")
    values = torch.arange(start, start + 12, dtype=torch.float64).view(4, 3)
    return values.to_global(place, B).to_global(sbp=S(0))


def swapped(way: str) -> str:
    """Pass or capture two tensors in another order on rank 1, and return the error."""
    a, b = rows(0.0), rows(100.0)
    first, second = (a, b) if way == "alike" or flow.env.get_rank() == 0 else (b, a)
    try:
        if way == "captured":
            out = flow.nn.Graph.trace(lambda x: x * 2 + first)(a)
        else:
            graph = flow.nn.Graph.trace(lambda x, y: x - 2 * y)
            if way == "outputs":
                both = graph(a, b), graph(a, a)
                out = both[flow.env.get_rank()] * 1
            else:
                out = graph(first, second)
        return str(out.sum().item())
    except DivergenceError:
        return "DivergenceError"


@pytest.mark.parametrize("way", ["inputs", "captured", "outputs"])
def test_ranks_that_use_other_tensors_are_told(way: str) -> None:
    assert run_on(2, swapped, way) == ["DivergenceError"] * 2


def test_ranks_that_use_the_same_tensors_go_on() -> None:
    assert run_on(2, swapped, "alike") == [str(66.0 - 2 * 1266.0)] * 2


def changed_in_place(way: str) -> list[float]:
    """Change a captured global tensor between two calls."""
    t, x = torch.ones(3, dtype=torch.float64).to_global(flow.placement.all("cpu"), B), rows(0.0)
    graph = flow.nn.Graph.trace(lambda x: x * t)
    sums = [graph(x).sum().item()]
    if way == "in place":
        t.mul_(5)
    elif way == "data":
        t.data = t * 5
    else:
        t.data = (t * 5).to_global(sbp=S(0))
    return [*sums, graph(x).sum().item()]


@pytest.mark.parametrize("way", ["in place", "data", "another sbp"])
def test_a_captured_tensor_is_read_at_each_call(way: str) -> None:
    assert simulate(2, changed_in_place, way) == [[66.0, 330.0]] * 2


def test_a_graph_on_some_ranks_ignores_the_others() -> None:
    def run() -> float:
        place = flow.placement("cpu", [0, 1])
        x = torch.ones(4, 3).to_global(place, B)
        graph = flow.nn.Graph.trace(lambda x: x * 2)
        total: float = graph(x).sum().to_global(flow.placement.all("cpu"), B).item()
        return total

    assert simulate(3, run) == [24.0] * 3
