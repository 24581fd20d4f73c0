"""Tests of plain values that a graph captures and uses with global tensors: ranks compare them
(graph/capture/replicated_uses.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import DivergenceError

S, B = flow.sbp.split, flow.sbp.broadcast
F64 = torch.float64


class Attribute(flow.nn.Graph):
    """A graph with a plain tensor, or a plain module, as attribute."""

    def __init__(self, own: Tensor | nn.Module) -> None:
        super().__init__()
        self.own = own

    def build(self, x: Tensor) -> Tensor:
        return self.own(x) if isinstance(self.own, nn.Module) else x * self.own


def written(x: Tensor, t: Tensor) -> Tensor:
    x = x * 1
    x[0] = t
    return x


def built(case: str, number: int) -> Callable[..., Tensor]:
    """Return a graph whose captured values depend on ``number``."""
    t, a = torch.ones(3, dtype=F64) * number, np.ones(3) * number
    linear = nn.Linear(3, 3).double()
    nn.init.constant_(linear.weight, float(number))
    places, generator = {"t": t}, torch.Generator().manual_seed(number)
    trace = flow.nn.Graph.trace
    graphs: dict[str, Callable[[], flow.nn.Graph]] = {
        "closure": lambda: trace(lambda x: x * t),
        "attribute": lambda: Attribute(t),
        "dict": lambda: trace(lambda x: x + places["t"]),
        "from_numpy": lambda: trace(lambda x: x * torch.from_numpy(a)),
        "as_tensor": lambda: trace(lambda x: x * torch.as_tensor(a)),
        "module": lambda: trace(lambda x: linear(x)),
        "module attribute": lambda: Attribute(linear),
        "computed": lambda: trace(lambda x: x * (t * 2).exp()),
        "generator": lambda: trace(lambda x: x * torch.rand(3, generator=generator)),
        "concat": lambda: trace(lambda x: torch.cat([x, t.view(1, 3)])),
        "write": lambda: trace(lambda x: written(x, t)),
        "creation": lambda: trace(
            lambda x: x + flow.tensor(a, placement=x.placement, sbp=B)  # type: ignore[attr-defined]
        ),
    }
    return graphs[case]()


CASES = [
    "closure", "attribute", "dict", "from_numpy", "as_tensor", "module", "module attribute",
    "computed", "generator", "concat", "write", "creation",
]  # fmt: skip


def rows(ranks: int) -> Tensor:
    place = flow.placement("cpu", list(range(ranks)))
    return torch.arange(12.0, dtype=F64).view(4, 3).to_global(place, B).to_global(sbp=S(0))


def failures(other: bool) -> list[str]:
    """Call a graph of each case, and return the error of each, or an empty text."""
    said = []
    for case in CASES:
        graph = built(case, 1 + (other and flow.env.get_rank()))
        try:
            graph(rows(2)).sum().item()
            said.append("")
        except DivergenceError as error:
            said.append(str(error))
    return said


def test_captured_values_that_differ_are_told() -> None:
    first, second = run_on(2, failures, True)
    assert first == second
    silent = [
        case for case, text in zip(CASES, first, strict=True) if "different values" not in text
    ]
    assert not silent
    assert "captured by Graph_" in first[0]
    assert "rank 0: float64[3] of [1, 1, 1]" in first[0]
    assert "rank 1: float64[3] of [2, 2, 2]" in first[0]


def test_captured_values_that_are_equal_are_used() -> None:
    assert run_on(2, failures, False) == [[""] * len(CASES)] * 2


def a_change_between_calls() -> tuple[list[float], str]:
    t = torch.ones(3, dtype=F64)
    graph, x = flow.nn.Graph.trace(lambda x: x * t), rows(2)
    sums = [graph(x).sum().item() for _ in range(3)]
    t[0] += flow.env.get_rank()
    try:
        graph(x)
    except DivergenceError as error:
        return sums, str(error)
    return sums, ""


def test_a_value_that_one_rank_changes_between_calls_is_told() -> None:
    first, second = run_on(2, a_change_between_calls)
    assert first == second
    assert first[0] == [66.0] * 3
    assert "rank 1: float64[3] of [2, 1, 1]" in first[1]


def one_of_four() -> str:
    place = flow.placement("cpu", [[0, 1], [2, 3]])
    x = torch.ones(4, 4, dtype=F64).to_global(place, [B, B]).to_global(sbp=[S(0), S(1)])
    t = torch.ones(4, dtype=F64) * (1 + (flow.env.get_rank() == 3))
    try:
        flow.nn.Graph.trace(lambda x: x * t)(x)
    except DivergenceError as error:
        return str(error)
    return ""


def test_of_four_ranks_the_one_that_differs_is_named() -> None:
    texts = run_on(4, one_of_four)
    assert len(set(texts)) == 1
    assert "rank 3: float64[4] of [2, 2, 2, ...]" in texts[0]


def an_input_beside_a_captured_global_tensor() -> str:
    """Pass a plain input to a graph whose only global tensor is captured."""
    x = rows(2)
    graph = flow.nn.Graph.trace(lambda t: x * t)
    try:
        graph(torch.ones(3, dtype=F64) * (1 + flow.env.get_rank()))
    except DivergenceError as error:
        return str(error)
    return ""


def test_plain_inputs_with_captured_global_tensors_are_compared() -> None:
    first, second = run_on(2, an_input_beside_a_captured_global_tensor)
    assert first == second
    assert "different values" in first


def own_rows() -> float:
    """Make a global tensor of each rank's own rows inside build()."""
    place = flow.placement.all("cpu")
    t = torch.ones(1, 3, dtype=F64) * (1 + flow.env.get_rank())
    graph = flow.nn.Graph.trace(lambda x: x + t.to_global(place, S(0)).sum(0))
    return graph(rows(2)).sum().item()


def test_a_rank_has_its_own_rows_where_it_says_so() -> None:
    assert run_on(2, own_rows) == [66.0 + 4 * 9.0] * 2


def on_some_ranks() -> str:
    """Use a plain tensor on two of three ranks; the third has another value, which is not used."""
    t: Any = torch.ones(3, dtype=F64) * (1 + (flow.env.get_rank() == 2))
    graph, x = flow.nn.Graph.trace(lambda x: x * t), rows(2)
    total: float = graph(x).sum().to_global(flow.placement.all("cpu"), B).item()
    return str(total)


def test_ranks_outside_may_hold_another_value() -> None:
    assert simulate(3, on_some_ranks) == ["66.0"] * 3


@pytest.mark.parametrize("calls", [40])
def test_comparisons_become_rare(calls: int) -> None:
    def messages() -> int:
        t = torch.ones(3, dtype=F64)
        graph, x = flow.nn.Graph.trace(lambda x: x * t), rows(2)
        graph(x)
        kinds = []
        from globaltensor.distributed.world import world

        comm = world().comm((0, 1))
        compare = comm.compare_plain
        comm.compare_plain = lambda *args: (kinds.append(1), compare(*args))[1]  # type: ignore[method-assign]
        for _ in range(calls):
            graph(x)
        return len(kinds)

    assert all(15 < n < 30 for n in simulate(2, messages))
