"""Tests of calls whose operands are passed by name, in any order, on two processes.

The numbers are those of one device in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import run_on
from torch import Tensor

import globaltensor as flow

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
FIRST = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SECOND = torch.arange(12.0, dtype=torch.float64).view(4, 3)

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda x, y: torch.matmul(other=y.t(), input=x),
    "mm": lambda x, y: torch.mm(mat2=y.t(), input=x),
    "mv": lambda x, y: torch.mv(vec=y[0], input=x),
    "bmm": lambda x, y: torch.bmm(mat2=y.t()[None], input=x[None]),
    "addmm": lambda x, y: torch.addmm(mat2=y.t(), mat1=x, input=torch.ones(4).double()),
    "linear": lambda x, y: F.linear(bias=y[:, 0], weight=y, input=x),
    "outer": lambda x, y: torch.outer(vec2=y[0], input=x[0]),
    "cross": lambda x, y: torch.cross(other=y, input=x, dim=1),
    "sub": lambda x, y: torch.sub(other=y, input=x, alpha=3),
    "div": lambda x, y: torch.div(other=y + 1, input=x),
    "where": lambda x, y: torch.where(other=y, input=x, condition=x > 0.5),
    "the mask second": lambda x, y: torch.where(input=x, condition=y > 5, other=y),
    "where as a method": lambda x, y: x.where(other=y, condition=x > 0.5),
    "addcmul": lambda x, y: torch.addcmul(tensor2=y, tensor1=x, input=x, value=2),
    "addcdiv as a method": lambda x, y: x.addcdiv(tensor2=y + 1, tensor1=x),
    "lerp": lambda x, y: torch.lerp(weight=x, end=y, input=x),
    "in place": lambda x, y: x.clone().addcmul_(tensor2=y, tensor1=x),
    "into a plain tensor": lambda x, y: torch.ones(4, 3).double().lerp_(weight=x, end=y),
    "out= first": lambda x, y: torch.sub(out=torch.empty(4, 3).double(), other=y, input=x),
    "scatter": lambda x, y: x.scatter(src=y, index=torch.tensor([[1, 0, 2]]), dim=0),
    "NumPy's names": lambda x, y: torch.matmul(x2=y.t(), x1=x),
    "a kernel": lambda x, y: torch.ops.aten.mm(mat2=y.t(), self=x),
    "an overload of a kernel": lambda x, y: torch.ops.aten.mm.default(mat2=y.t(), self=x),
    "a user's operator": lambda x, y: doubled_first(b=y, a=x),
}


@torch.library.custom_op("operand_names::doubled_first", mutates_args=())
def doubled_first(a: Tensor, b: Tensor) -> Tensor:
    return 2 * a @ b.t()


@doubled_first.register_fake
def _doubled_first(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), len(b))


flow.rule(doubled_first, "r c, o c -> r o")


def spread(value: Tensor, sbp: Any) -> Any:
    return value.to_global(flow.placement.all("cpu"), B).to_global(sbp=sbp)  # type: ignore[attr-defined]


def compare(names: list[str]) -> None:
    for name in names:
        want = CALLS[name](FIRST, SECOND)
        for of_first in (B, S(0), P):
            for of_second in (S(0), S(1), P):
                got = CALLS[name](spread(FIRST, of_first), spread(SECOND, of_second))
                whole = got.to_global(sbp=B).to_local() if got.is_global else got
                torch.testing.assert_close(whole, want, msg=f"{name} {of_first} {of_second}")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sweep(4)
def test_operands_by_name_may_have_any_order(name: str) -> None:
    run_on(2, compare, [name])


class Captured(flow.nn.Graph):
    def build(self, x: Any, y: Any) -> Any:
        return torch.matmul(other=y.t(), input=x), torch.cross(other=y, input=x, dim=1)


def in_a_graph() -> None:
    for of_first in (B, S(0), P):
        for of_second in (S(0), S(1), P):
            product, cross = Captured()(spread(FIRST, of_first), spread(SECOND, of_second))
            assert torch.allclose(product.to_global(sbp=B).to_local(), FIRST @ SECOND.t())
            assert torch.allclose(cross.to_global(sbp=B).to_local(), torch.cross(FIRST, SECOND, 1))


def test_operands_by_name_in_a_graph() -> None:
    run_on(2, in_a_graph)


def by_other_orders() -> None:
    x, y = spread(FIRST, S(0)), spread(SECOND, P)
    for _ in range(2):
        if flow.env.get_rank():
            got = torch.sub(other=y, input=x)
        else:
            got = torch.sub(input=x, other=y)
    assert torch.allclose(got.to_global(sbp=B).to_local(), FIRST - SECOND)


def test_ranks_may_name_the_operands_in_different_orders() -> None:
    run_on(2, by_other_orders)
