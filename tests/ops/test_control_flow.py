"""Tests of `torch.cond` and torch's `while_loop` on global tensors: values, layouts, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.pool import run_on

import globaltensor as flow
from globaltensor.errors import CompileError

B, S = flow.sbp.broadcast, flow.sbp.split


def branches(x: Any, w: Any) -> tuple[list[Any], bool]:
    from torch._higher_order_ops import while_loop

    x = x.requires_grad_()
    chosen = torch.cond(x.sum() > 3, lambda t, v: (t @ v).sin(), lambda t, v: t @ v, (x, w))
    other = torch.cond(x.sum() < 3, lambda t: t.sin(), lambda t: t * 2, (x,))
    rounds, grown = while_loop(
        lambda i, t: (t * t).sum() < 3000, lambda i, t: (i + 1, t * 2), (torch.tensor(0), x)
    )
    (same,) = while_loop(lambda t: t.sum() < 0, lambda t: (t * 2,), (x,))
    loss = chosen.sum() + other.sum() + grown.sum()
    loss.backward()
    return [chosen, other, rounds, grown, same, x.grad], same is x


def values() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    return x, torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)


def on_ranks(dim: int) -> tuple[list[Any], bool]:
    where = flow.placement.all("cpu")
    x, w = (t.to_global(where, B) for t in values())  # type: ignore[attr-defined]
    found, same = branches(x.to_global(sbp=S(dim)), w.to_global(sbp=S(1)))
    assert found[1].sbp == found[3].sbp == (S(dim),)
    return [t.detach().numpy().tolist() for t in found], same


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.sweep(2)
def test_branches_and_loops_equal_one_device(dim: int) -> None:
    found, same = branches(*values())
    want = [t.detach().tolist() for t in found], same
    assert run_on(2, on_ranks, dim) == [want] * 2


def with_a_model_that_is_no_operand() -> str:
    model = flow.parallelize(torch.nn.Linear(3, 3), flow.placement.all("cpu"), "fsdp")
    try:
        torch.cond(torch.tensor(True), lambda x: model(x), lambda x: x, (torch.ones(4, 3),))
    except CompileError as error:
        return str(error)
    return ""


def test_global_tensors_that_are_no_operands_are_refused_alike() -> None:
    first, second = run_on(2, with_a_model_that_is_no_operand)
    assert first == second
    assert "test_control_flow.py" in first.splitlines()[0]
    assert "uses global tensors that are not among the operands" in first


def loops() -> list[Any]:
    from torch._higher_order_ops import while_loop

    x: Any = torch.ones(2).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    kept, count = while_loop(lambda t, n: t.sum() < 0, lambda t, n: (t, n), (x, 3))
    first, second = while_loop(lambda a, b: a.sum() < 3, lambda a, b: (b * 2, a), (x, x + 1))
    with pytest.raises(RuntimeError, match="must return a tuple of as many values"):
        while_loop(lambda t, n: t.sum() < 3, lambda t, n: t, (x, x))
    return [kept is x, count, first.tolist(), second is x, second.tolist()]


def test_results_of_loops_are_new_tensors_and_numbers_pass() -> None:
    assert run_on(2, loops) == [[False, 3, [4.0, 4.0], False, [1.0, 1.0]]] * 2


def with_nested_operands(x: Any) -> list[Any]:
    from torch._higher_order_ops import while_loop

    operands = ({"a": x, "b": [x * 2]},)
    chosen = torch.cond(
        x.sum() > 3, lambda d: d["a"] + d["b"][0], lambda d: d["a"] - d["b"][0], operands
    )
    rounds, grown = while_loop(
        lambda i, d: i < 3,
        lambda i, d: (i + 1, {"k": d["k"] * 2, "n": (d["n"][0] + 1,)}),
        (torch.tensor(0), {"k": x, "n": (x - 1,)}),
    )
    _, same = while_loop(
        lambda i, d: i < 0, lambda i, d: (i + 1, {"k": d["k"] * 2}), (torch.tensor(0), {"k": x})
    )
    return [chosen, rounds, grown["k"], grown["n"][0], same["k"]]


def nested_on_ranks() -> list[Any]:
    x: Any = values()[0].to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    x = x.to_global(sbp=S(0))
    return [torch.as_tensor(t).tolist() for t in map(full, with_nested_operands(x))]


def full(x: Any) -> Any:
    return x.numpy() if isinstance(x, flow.GlobalTensor) else x


def test_operands_and_carried_values_may_be_in_dicts_and_lists() -> None:
    want = [t.tolist() for t in with_nested_operands(values()[0])]
    assert run_on(2, nested_on_ranks) == [want] * 2


def results_that_are_operands() -> list[Any]:
    from torch._higher_order_ops import while_loop

    x: Any = torch.ones(4, 3).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    same = torch.cond(x.sum() > 3, lambda t: t, lambda t: t + 1, (x,))
    view = torch.cond(x.sum() > 3, lambda t: t.view(3, 4), lambda t: t.T + 1, (x,))
    _, turned = while_loop(
        lambda i, t: i < 1, lambda i, t: (i + 1, t.view(4, 3)), (torch.tensor(0), x)
    )
    for y in (same, view, turned):
        y.zero_()
    return x.tolist()  # type: ignore[no-any-return]


def test_writes_into_results_do_not_reach_the_operands() -> None:
    assert run_on(2, results_that_are_operands) == [torch.ones(4, 3).tolist()] * 2
