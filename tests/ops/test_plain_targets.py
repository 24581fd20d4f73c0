"""Tests of in-place ops with global operands on plain tensors. The plain tensors hold the global
result on all ranks, and gradients flow through."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from support.pool import run_on
from torch import Tensor

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import DivergenceError, FallbackWarning

B, S = flow.sbp.broadcast, flow.sbp.split
INDEX = torch.tensor([0, 1, 2, 0, 1, 3])


def written(source: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.zeros(4, dtype=torch.float64).scatter_add_(0, index, source)
    doubled = weight * 2
    doubled.add_(counts[:3])
    doubled[0] = source[1]
    doubled *= source.sum()
    doubled[1:].copy_(source[:2] + doubled[1:])
    return counts, doubled


def run(ranks: list[int], after: bool) -> None:
    where = flow.placement("cpu", ranks)
    draw = torch.Generator().manual_seed(0)
    value = torch.randn(6, dtype=torch.float64, generator=draw)
    factor = torch.arange(4.0, dtype=torch.float64)

    def loss(source: Tensor, index: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        counts, doubled = written(source, index, weight)
        assert type(counts) is type(doubled) is Tensor
        return (counts * factor).sum() + (doubled.square() * factor[:3]).sum()

    plain, weight = value.clone().requires_grad_(), factor[:3].clone().requires_grad_()
    want = loss(plain, INDEX, weight, factor)
    want.backward()
    split = [t.to_global(where, B).to_global(sbp=S(0)) for t in (value, INDEX, factor)]  # type: ignore[attr-defined]
    source, ours = split[0].requires_grad_(), factor[:3].clone().requires_grad_()
    # The plain results are then combined with plain tensors or with global ones.
    got = loss(source, split[1], ours, split[2] if after else factor)
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    got.backward()
    assert plain.grad is not None
    assert weight.grad is not None
    if flow.env.get_rank() in ranks:
        mine = plain.grad.tensor_split(len(ranks))[ranks.index(flow.env.get_rank())]
        torch.testing.assert_close(source.grad.to_local(), mine, rtol=1e-12, atol=1e-13)
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, weight.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("after", [False, True])
def test_in_place_on_a_plain_tensor(after: bool) -> None:
    simulate(2, run, [0, 1], after)
    simulate(4, run, [0, 1, 2, 3], after)


def test_ranks_outside_have_the_result_too() -> None:
    simulate(3, run, [0, 2], True)


def leaf() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(torch.ones(3).to_global(flow.placement.all("cpu"), B))  # type: ignore[attr-defined]
    with torch.no_grad():
        x.add_(torch.ones(3).to_global(flow.placement.all("cpu"), B))  # type: ignore[attr-defined]
    assert x.tolist() == [2, 2, 2]


def test_a_leaf_is_written_without_gradients_alone() -> None:
    simulate(2, leaf)


def mapped() -> list[list[float]]:
    x = torch.arange(4.0)
    g = x.to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    plain, first, third = torch.ones(4), torch.ones(4), torch.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert plain.map_(g, lambda a, b: a + 2 * b) is plain  # type: ignore[attr-defined]
        first.map2_(g, g, lambda a, b, c: b * c)  # type: ignore[attr-defined]
        third.map2_(torch.ones(4), g, lambda a, b, c: a + b + c)  # type: ignore[attr-defined]
    return [plain.tolist(), first.tolist(), third.tolist()]


def test_in_place_functions_without_a_rule_write_into_plain_tensors() -> None:
    assert run_on(2, mapped) == [[[1, 3, 5, 7], [0, 1, 4, 9], [2, 3, 4, 5]]] * 2


#: Products that do not read their first operand, because ``beta`` is 0.
UNREAD: dict[str, Callable[[Callable[..., Tensor], Tensor], Tensor]] = {
    "addmm": lambda empty, x: torch.addmm(empty(3, 3), x, x.mT, beta=0, alpha=0.5),
    "addmm, out": lambda empty, x: (
        lambda a: torch.addmm(a, x, x.mT, beta=0.0, out=a)  # as in Muon
    )(empty(3, 3)),
    "addmm_": lambda empty, x: empty(3, 3).addmm_(x, x.mT, beta=0),
    "addmv": lambda empty, x: torch.addmv(empty(3), x, x[0], beta=0),
    "addr": lambda empty, x: empty(3, 4).addr(x[:, 0], x[1], beta=0.0),
    "baddbmm": lambda empty, x: torch.baddbmm(
        empty(2, 3, 3), torch.stack([x, x]), torch.stack([x.mT, x.mT]), beta=0.0, alpha=0.3
    ),  # scores of attention in several models
    "baddbmm_": lambda empty, x: empty(1, 3, 3).baddbmm_(x[None], x.mT[None], beta=0),
    "addbmm": lambda empty, x: torch.addbmm(empty(3, 3), x[None], x.mT[None], beta=0),
}


@pytest.mark.parametrize("name", UNREAD)
def test_an_operand_that_is_not_read_may_differ_by_rank(name: str) -> None:
    value = torch.arange(12.0, dtype=torch.float64).view(3, 4)

    def on_ranks() -> None:
        def empty(*shape: int) -> Tensor:
            return torch.full(shape, [float("nan"), 5.0][flow.env.get_rank()], dtype=value.dtype)

        want = UNREAD[name](torch.zeros, value.float())
        for layout in (B, S(0), S(1), flow.sbp.partial_sum):
            x = value.to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=layout)  # type: ignore[attr-defined]
            got = UNREAD[name](empty, x)
            torch.testing.assert_close(torch.from_numpy(got.numpy()).float(), want)

    simulate(2, on_ranks)


#: Functions that fill a buffer in parts. The buffer's old elements differ between the ranks.
FILLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "setitem": lambda out, x: [out.__setitem__(i, x * i) for i in range(3)],
    "setitem of a dim": lambda out, x: [out.__setitem__((slice(None), j), x[j]) for j in range(4)],
    "setitem by indices": lambda out, x: out.__setitem__(x[:3, 0].long() // 3, x),
    "setitem by a mask": lambda out, x: out.__setitem__(x.expand(3, 4, 3) >= 0, 2.0),
    "copy_ into a view": lambda out, x: [out[i].copy_(x) for i in range(3)],
    "masked_fill_": lambda out, x: out.masked_fill_(x >= 0, 2.0),
    "index_copy_": lambda out, x: out.index_copy_(0, torch.tensor([2, 0, 1]), x.expand(3, 4, 3)),
    "index_put_": lambda out, x: out.index_put_((torch.tensor([2, 0, 1]),), x),
    "put_": lambda out, x: out.put_(torch.arange(12), x),
    "scatter_": lambda out, x: out.scatter_(0, (x * 0).long()[None], x[None] + 1),
}


@pytest.mark.parametrize("name", FILLS)
def test_a_buffer_that_is_filled_in_parts_may_differ_by_rank(name: str) -> None:
    """Elements that are not written stay what they are on each rank. Gradients flow through."""
    value = torch.arange(12.0, dtype=torch.float64).view(4, 3)

    def filled(x: Tensor, old: float) -> Tensor:
        out = torch.full((3, 4, 3), old, dtype=torch.float64)
        FILLS[name](out, x)
        assert type(out) is Tensor
        return out

    def on_ranks() -> None:
        old = [5.0, 7.0][flow.env.get_rank()]
        plain = value.clone().requires_grad_()
        want = filled(plain, old)
        for layout in (B, S(0), S(1), flow.sbp.partial_sum):
            x = value.to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=layout)  # type: ignore[attr-defined]
            got = filled(x.requires_grad_(), old)
            torch.testing.assert_close(got.detach(), want.detach())
            assert got.requires_grad == want.requires_grad
            if want.requires_grad:
                plain.grad = None
                want.square().sum().backward(retain_graph=True)
                got.square().sum().backward()
                torch.testing.assert_close(x.grad.to_global(sbp=B).to_local(), plain.grad)

    simulate(2, on_ranks)


#: Writes that add to the old elements of their target.
ADDS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "index_put_": lambda out, x: out.index_put_((torch.tensor([0, 0]),), x[:2], True),
    "put_": lambda out, x: out.put_(torch.tensor([0, 0]), x[0, :2], accumulate=True),
    "scatter_": lambda out, x: out.scatter_(0, (x * 0).long(), x, reduce="add"),
    "index_add_": lambda out, x: out.index_add_(0, torch.tensor([0, 0]), x[:2]),
}


@pytest.mark.parametrize("name", ADDS)
def test_a_target_that_is_added_to_must_not_differ_by_rank(name: str) -> None:
    def on_ranks() -> None:
        x = flow.ones(4, 3, placement=flow.placement("cpu", [0, 1]), sbp=S(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of scatter_ with reduce
            ADDS[name](torch.full((4, 3), float(flow.env.get_rank())), x)

    with pytest.raises(DivergenceError, match=f"target of {name}"):
        simulate(2, on_ranks)


def test_an_index_of_a_plain_target_must_not_differ_by_rank() -> None:
    def on_ranks() -> None:
        x = flow.ones(4, 3, placement=flow.placement("cpu", [0, 1]), sbp=S(0))
        torch.zeros(2, 4, 3)[torch.tensor([flow.env.get_rank()])] = x

    with pytest.raises(DivergenceError, match=r"operand 1 of __setitem__"):
        simulate(2, on_ranks)


def test_an_operand_that_is_read_must_not_differ_by_rank() -> None:
    def on_ranks() -> None:
        x = flow.ones(3, 4, placement=flow.placement("cpu", [0, 1]), sbp=S(0))
        torch.addmm(torch.full((3, 3), float(flow.env.get_rank())), x, x.mT, beta=0.5)

    with pytest.raises(DivergenceError, match=r"operand 0 of addmm(.|\n)*PYTHONHASHSEED=0"):
        simulate(2, on_ranks)
