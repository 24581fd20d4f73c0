"""Tests of kernels called by name (torch.ops.aten...), and of calls whose arguments or results
depend on data."""

from __future__ import annotations

import pytest
import torch

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import InplaceError

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
aten = torch.ops.aten


def spread(value: torch.Tensor, sbp: object = S(0)) -> torch.Tensor:
    return (
        value.to_global(flow.placement("cpu", [0, 1]), B, check_meta=False)
        .to_global(sbp=sbp)
        .detach()
    )  # type: ignore[attr-defined, no-any-return]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(torch.from_numpy(got.detach().numpy()), want)


def _a_kernel_follows_the_rule_of_its_function() -> None:
    value, weight = torch.arange(24.0).view(8, 3), torch.ones(5, 3)
    x = spread(value).requires_grad_()
    with flow.no_boxing():
        outs = (
            aten.add.Tensor(x, x),
            aten.mul(x, 2),
            aten.sum.dim_IntList(x, [1]),
            aten.linear(x, spread(weight, B)),
            aten.relu_.default(x.detach().clone()),
        )
    for out, want in zip(
        outs, (value + value, value * 2, value.sum(1), value @ weight.T, value.relu()), strict=True
    ):
        assert out.sbp == (S(0),)
        same(out, want)
    aten.gelu(x).sum().backward()
    plain = value.clone().requires_grad_()
    torch.nn.functional.gelu(plain).sum().backward()
    same(x.grad, plain.grad)


def _a_kernel_that_torch_has_no_function_for() -> None:
    value = torch.arange(24.0).view(8, 3)
    same(aten._softmax.default(spread(value), 0, False), value.softmax(0))


def _places_to_cut_that_are_data() -> None:
    value = torch.arange(24.0).view(8, 3)
    for places in (torch.tensor([2, 5]), spread(torch.tensor([2, 5])), spread(torch.tensor(3), B)):
        want = torch.tensor_split(
            value, torch.tensor(3) if not places.ndim else torch.tensor([2, 5])
        )
        for got, part in zip(torch.tensor_split(spread(value), places), want, strict=True):
            same(got, part)


def _ends_of_a_range_that_are_data() -> None:
    ends = spread(torch.tensor(1.0), B), spread(torch.tensor(3.0), P)
    same(torch.linspace(*ends, 5), torch.linspace(1, 3, 5))
    same(torch.logspace(*ends, 5), torch.logspace(1, 3, 5))
    same(torch.linspace(0, 1, 6, out=spread(torch.zeros(6))), torch.linspace(0, 1, 6))


def _where_of_a_condition() -> None:
    value = torch.arange(24.0).view(8, 3) % 5
    for got, want in zip(torch.where(spread(value, S(1)) > 2), torch.where(value > 2), strict=True):
        same(got, want)


def _one_index_into_a_number() -> None:
    same(
        torch.index_select(spread(torch.tensor(3.0), B), 0, spread(torch.tensor([0]))),
        torch.tensor(3.0),
    )


def _resize() -> None:
    x = spread(torch.ones(8, 3))
    assert x.resize_(8, 3) is x
    with pytest.raises(InplaceError, match="one storage for another shape"):
        x.resize_(3, 8)


@pytest.mark.filterwarnings("ignore::globaltensor.errors.FallbackWarning")
@pytest.mark.parametrize(
    "case",
    [
        _a_kernel_follows_the_rule_of_its_function, _a_kernel_that_torch_has_no_function_for,
        _places_to_cut_that_are_data, _ends_of_a_range_that_are_data,
        _where_of_a_condition, _one_index_into_a_number, _resize,
    ],
)  # fmt: skip
def test_on_two_ranks(case: object) -> None:
    simulate(2, case)  # type: ignore[arg-type]
