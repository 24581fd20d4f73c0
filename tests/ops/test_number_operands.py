"""Tests that every kind of number that torch accepts is one operand of a call: Python's numbers,
NumPy's and those of subclasses, by position and by name. A number is added once to a partial sum.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.pool import run_on
from torch import Tensor

import globaltensor as flow
from globaltensor._base.python_numbers import as_python_numbers
from globaltensor._ops.dispatch import _cache
from globaltensor.distributed.simulate import simulate

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


class OwnFloat(float):
    pass


class OwnInt(enum.IntEnum):
    TWO = 2


NUMBERS: tuple[Any, ...] = (
    np.float16(1.5), np.float32(1.5), np.float64(1.5), np.longdouble(1.5), np.int64(2),
    np.uint8(2), np.bool_(True), np.complex128(1j), OwnFloat(1.5), OwnInt.TWO,
    1.5, 2, True, 1j,
)  # fmt: skip


def added(x: Tensor, n: Any) -> Tensor:
    return x.clone().add_(n)


def added_by_operator(x: Tensor, n: Any) -> Tensor:
    x = x.clone()
    x += n
    return x


OPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "x + n": lambda x, n: x + n,
    "n + x": lambda x, n: n + x,  # type: ignore[no-any-return]
    "x - n": lambda x, n: x - n,
    "n - x": lambda x, n: n - x,  # type: ignore[no-any-return]
    "add": lambda x, n: torch.add(x, n),
    "add with alpha": lambda x, n: torch.add(x, n, alpha=2),
    "add by name": lambda x, n: torch.add(x, other=n),
    "add with all names": lambda x, n: torch.add(input=x, other=n),
    "sub by name": lambda x, n: x.sub(other=n),
    "rsub": lambda x, n: torch.rsub(x, n),
    "__radd__": lambda x, n: x.__radd__(n),
    "add_": added,
    "+=": added_by_operator,
    "where": lambda x, n: torch.where(x == x, x, n),
    "x * n": lambda x, n: x * n,
    "foreach": lambda x, n: torch._foreach_add([x], n)[0],  # type: ignore[no-any-return]
}


def outcome(call: Callable[[Tensor, Any], Tensor], x: Tensor, n: Any) -> Any:
    try:
        y = call(x, n)
    except RuntimeError:
        return RuntimeError
    return y.dtype, y.tolist()


#: Each part has every eighth op.
PARTS = 8


def compare(
    rows: list[Any], make: Callable[[Tensor], Tensor], dtype: torch.dtype, ops: slice
) -> None:
    """Compare ops and numbers with the same on one device, in two orders of the numbers."""
    x = torch.arange(1, 5).to(dtype)
    for name, call in list(OPS.items())[ops]:
        for n in (*NUMBERS, *NUMBERS[::-1]):
            want, got = outcome(call, x, n), outcome(call, make(x), n)
            if got != want:
                rows.append((name, dtype, type(n).__name__, got, want))


@pytest.mark.filterwarnings("ignore:Casting complex values")
def on_processes(dtype: torch.dtype, part: int) -> list[Any]:
    line = flow.placement.all("cpu")
    wrong: list[Any] = []
    ops = slice(part, None, PARTS)
    compare(wrong, lambda x: x.to_global(line, B).to_global(sbp=P), dtype, ops)
    return wrong


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.complex64], ids=str)
@pytest.mark.sweep(PARTS + 1)  # of each dtype another part
def test_a_number_of_any_type_is_added_once(dtype: torch.dtype, part: int) -> None:
    assert run_on(2, on_processes, dtype, part) == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("sbp", [[P, P], [S(0), P], [P, B]])
@pytest.mark.sweep(PARTS + 1)  # in each layout another part
def test_on_two_axes(sbp: list[Any], part: int) -> None:
    def body() -> list[Any]:
        grid = flow.placement("cpu", [[0, 1], [2, 3]])
        wrong: list[Any] = []
        ops = slice(part, None, PARTS)
        compare(wrong, lambda x: x.to_global(grid, [B, B]).to_global(sbp=sbp), torch.float64, ops)
        return wrong

    assert simulate(4, body) == [[]] * 4


def reduced() -> list[float]:
    x = torch.arange(12.0).view(4, 3).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))
    return [
        (x.sum() + np.float32(1)).item(),
        (np.float32(1) - x.mean()).item(),
        torch.add(x.sum(), other=1.0).item(),
    ]


def test_a_number_and_a_reduced_tensor() -> None:
    assert run_on(2, reduced) == [[67.0, -4.5, 67.0]] * 2


def overloads_of_scalars() -> None:
    aten, value = torch.ops.aten, torch.arange(12.0).view(4, 3)
    p = value.to_global(flow.placement.all("cpu"), B).to_global(sbp=P)  # type: ignore[attr-defined]
    calls: list[Callable[[Any], Any]] = [
        lambda x: aten.add.Scalar(x, 3.0),
        lambda x: aten.add.Scalar(x, 3.0, 2),
        lambda x: aten.sub.Scalar(x, 3.0, alpha=2),
        lambda x: aten.rsub.Scalar(x, 3.0),
        lambda x: aten.rsub.Scalar(x, 3.0, 2.0),
        lambda x: aten.add_.Scalar(x.clone(), 3.0),
        lambda x: torch.rsub(x, 3.0, alpha=2),
    ]
    for i, call in enumerate(calls):
        got = call(p).to_global(sbp=B).to_local()
        torch.testing.assert_close(got, call(value), msg=f"call {i}: {got}")


def test_overloads_of_scalars_add_the_number_once() -> None:
    run_on(2, overloads_of_scalars)


def alternating() -> list[float]:
    p = torch.ones(3).to_global(flow.placement.all("cpu"), B).to_global(sbp=P)
    numbers = (np.float64(2), 2.0, np.float64(2), np.float32(2), OwnFloat(2.0), 2, np.int64(2))
    return [(p + n).sum().item() for n in numbers]


def test_the_answer_does_not_depend_on_the_calls_before() -> None:
    assert run_on(2, alternating) == [[9.0] * 7] * 2


class Sums(flow.nn.Graph):
    def build(self, a: Tensor) -> Any:
        return np.float32(2) + a, np.float32(2) - a, torch.add(a, other=2.0), a.sum() + np.int64(2)


def in_a_graph() -> list[Any]:
    p = torch.ones(3).to_global(flow.placement.all("cpu"), B).to_global(sbp=P)
    graph = Sums()
    return [[t.tolist() for t in graph(p)] for _ in range(2)]


def test_a_number_in_a_graph() -> None:
    assert run_on(2, in_a_graph) == [[[[3.0] * 3, [1.0] * 3, [3.0] * 3, 5.0]] * 2] * 2


def shifted() -> list[Any]:
    line = flow.placement.all("cpu")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    x = torch.arange(12.0).view(4, 3)
    alone = model(x).square().mean() + np.float32(2)
    alone.backward()
    want = [alone.item(), model.weight.grad.flatten().tolist()]  # type: ignore[union-attr]
    model.zero_grad()
    model.to_global(line, B)
    rows = x.to_global(line, B).to_global(sbp=S(0))
    loss = model(rows).square().mean() + np.float32(2)
    loss.backward()
    return [loss.item(), model.weight.grad.flatten().tolist()], want  # type: ignore[union-attr, return-value]


def test_a_number_and_a_loss() -> None:
    for got, want in run_on(2, shifted):
        assert got[0] == pytest.approx(want[0])
        assert got[1] == pytest.approx(want[1])


def counted() -> int:
    p = torch.ones(3).to_global(flow.placement.all("cpu"), B).to_global(sbp=P)
    _ = p + np.float32(0)
    before = len(_cache.plans)
    for i in range(50):
        _ = p + np.float32(i)
    return len(_cache.plans) - before


def test_numbers_of_other_types_share_a_plan() -> None:
    assert simulate(2, counted) == [0, 0]


def test_numbers_that_are_no_operands_mean_the_same_too() -> None:
    def body() -> bool:
        x = torch.arange(12.0).view(4, 3)
        g = x.to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))
        one, two = np.int64(1), np.int32(2)
        return all(
            call(g).tolist() == call(x).tolist()
            for call in (
                lambda t: t.sum(one),
                lambda t: t.sum((one,), keepdim=True),
                lambda t: t[:, one],
                lambda t: t[:, one:two],
                lambda t: t.transpose(np.uint8(0), one).contiguous(),
                lambda t: t.pow(np.float32(2)),
            )
        )

    assert simulate(2, body) == [True, True]


def test_other_parts_of_a_pytree_stay_the_same_objects() -> None:
    values = ([1, torch.ones(1)], {"a": slice(0, 2)}, torch.Size([2]), None)
    assert as_python_numbers(values) is values
    changed = as_python_numbers((values[0], {"a": slice(np.int64(0), None)}, OwnInt.TWO))
    assert changed == (values[0], {"a": slice(0, None)}, 2)
    assert changed[0] is values[0]
    assert type(changed[2]) is int


def choose_between_sums() -> None:
    value, other = torch.arange(12.0).view(4, 3), torch.full((4, 3), 10.0)
    mask, everywhere = value > 4, flow.placement.all("cpu")

    def spread(t: Tensor, sbp: Any) -> Tensor:
        return t.to_global(everywhere, B).to_global(sbp=sbp)  # type: ignore[attr-defined, no-any-return]

    want = other.where(mask, value)
    for of_mask in (B, S(0), S(1)):
        for of_other in (B, S(0), P):
            m, x, y = spread(mask, of_mask), spread(other, of_other), spread(value, P)
            for got in (
                x.where(m, y),
                other.where(m, y),
                y.where(~m, x),
                x.where(condition=m, other=y),
                torch.where(m, x, y),
                torch.where(m, 10.0, y),
                torch.where(mask, 10.0, y),
            ):
                assert torch.equal(got.to_global(sbp=B).to_local(), want), (of_mask, of_other)  # type: ignore[attr-defined]


def test_a_choice_by_a_mask_is_linear_in_the_two_choices_alone() -> None:
    run_on(2, choose_between_sums)
