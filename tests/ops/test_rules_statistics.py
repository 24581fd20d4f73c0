"""Tests of counting, covariance, signals and torch's lower-level functions: random layouts against
plain torch, never computed on gathered tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.device import DEVICE
from support.everywhere import compare, full

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.sbp import broadcast, partial_sum, split


def _x(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


ROWS, COLUMNS = torch.tensor([0, 2, -1, 2]), torch.tensor([1, 3, 1, -1])

CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "cov": (torch.cov, (_x(3, 7),)),
    "cov of one": (torch.cov, (_x(7),)),
    "weighted cov": (lambda x, f, a: torch.cov(x, correction=1, fweights=f, aweights=a),
        (_x(3, 5), torch.tensor([1, 2, 0, 3, 1]), _x(5).abs())),
    "corrcoef": (torch.corrcoef, (_x(3, 7),)),
    "bincount": (torch.bincount, (torch.tensor([3, 1, 1, 0, 6]),)),
    "weighted bincount": (lambda x, w: torch.bincount(x, w.detach(), 9),
        (torch.tensor([3, 1, 1, 0, 6]), _x(5))),
    "histc": (lambda x: torch.histc(x.detach(), 5), (_x(4, 6),)),
    "histogram": (lambda x: tuple(torch.histogram(x.detach(), 5)), (_x(4, 6),)),
    "density": (lambda x,
        w: tuple(torch.histogram(x.detach(), 5, range=(-1.0, 1.0), weight=w.detach(),
            density=True)), (_x(9), _x(9).abs())),
    "histogram of edges": (lambda x, e: tuple(torch.histogram(x.detach(), e.detach())),
        (_x(9), torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64))),
    "diagonal": (lambda x: x.diagonal(1), (_x(5, 7),)),
    "lower diagonal": (lambda x: x.diagonal(-2, 1, 2), (_x(3, 7, 4),)),
    "diag": (torch.diag, (_x(5),)),
    "diagflat": (torch.diagflat, (_x(2, 3),)),
    "trace": (torch.trace, (_x(5, 7),)),
    "combinations": (torch.combinations, (_x(5),)),
    "cartesian_prod": (torch.cartesian_prod, (_x(3), _x(4))),
    "repeat_interleave": (lambda x, n: x.repeat_interleave(n, 1),
        (_x(3, 4), torch.tensor([2, 0, 3, 1]))),
    "put": (lambda x, v: x.put(ROWS, v), (_x(3, 4), _x(2, 2)[:1].repeat(2, 1))),
    "put and add": (lambda x, v: x.put(ROWS, v, accumulate=True), (_x(3, 4), _x(2, 2))),
    "index_put and add": (lambda x, v: x.index_put((ROWS, COLUMNS), v, accumulate=True),
        (_x(5, 4, 3), _x(4, 3))),
    "index_put_ and add": (lambda x, v: x.clone().index_put_((ROWS,), v, accumulate=True),
        (_x(5, 4), _x(4, 1))),
    "stft": (lambda x, w: torch.stft(x, 8, 4, window=w, return_complex=True),
        (_x(3, 40), torch.hann_window(8, dtype=torch.float64))),
    "istft": (lambda x: torch.istft(torch.complex(x, x), 8, 4,
        window=torch.hann_window(8, dtype=torch.float64)), (_x(3, 5, 6),)),
    "grid_sampler": (lambda x, g: torch.grid_sampler_2d(x, g, 0, 0, False),
        (_x(3, 2, 4, 5), _x(3, 2, 3, 2).tanh())),
    "embedding_bag": (lambda i, w, o: F.embedding_bag(i, w, o),
        (torch.tensor([1, 2, 4, 5, 4, 3]), _x(7, 5), torch.tensor([0, 4]))),
    "copy of a view": (lambda x: torch.unbind_copy(torch.transpose_copy(x, 0, 1), 1), (_x(3, 4),)),
    "lu": (lambda x: torch.linalg.lu_factor(x)[0], (_x(3, 4, 4),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sweep(9)
def test_equals_torch_and_stays_apart(name: str) -> None:
    function, operands = CALLS[name]
    compare(function, *operands, draws=5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("tuples", [False, True])
@pytest.mark.sweep(4)
def test_ctc_loss(reduction: str, tuples: bool) -> None:
    inputs, targets = [6, 5, 6], [2, 3, 1]
    lengths = (inputs, targets) if tuples else (torch.tensor(inputs), torch.tensor(targets))
    ids = torch.tensor([[1, 2, 0], [3, 1, 1], [2, 0, 0]])
    compare(
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t, *lengths, reduction=reduction),
        _x(6, 3, 4),
        ids,
        draws=5,
    )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.sweep(3)
def test_head_and_loss_in_chunks(reduction: str, weighted: bool) -> None:
    options_of = getattr(torch.nn.functional, "LinearCrossEntropyOptions", None) or getattr(
        torch.nn, "LinearCrossEntropyOptions", None
    )
    if options_of is None:
        pytest.skip("this torch has no linear_cross_entropy in chunks")
    weight = torch.tensor([0.5, 1.0, 2.0, 0.1, 1.5], dtype=torch.float64) if weighted else None
    target = torch.tensor([0, 4, -100, 2, 2, 1, 3])

    def call(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(
            x, w, t, weight=weight, reduction=reduction, options=options_of(batch_chunk_size=2)
        )

    compare(call, _x(7, 6), _x(5, 6), target, draws=5)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
def test_products_of_groups() -> None:
    whole = [
        t.round().to(torch.bfloat16) for t in (_x(12, 16), _x(3, 16, 8), _x(3, 4, 16))
    ]  # integer values, whose sums are exact in any order
    ends = torch.tensor([4, 9, 12], dtype=torch.int32)
    with torch.no_grad():
        compare(
            lambda a, b, e: F.grouped_mm(a.detach(), b.detach(), offs=e),
            whole[0],
            whole[1],
            ends,
            draws=5,
        )
        compare(lambda a, b: F.grouped_mm(a.detach(), b.detach()), whole[2], whole[1], draws=5)


def _low_rank() -> tuple[bool, list[list[float]]]:
    placement = flow.placement("cpu", [0, 1])
    low = _x(9, 2) @ _x(2, 6)
    x = low.to_global(placement=placement, sbp=broadcast)
    u, s, v = torch.svd_lowrank(x, 3)
    return torch.allclose(full(u) * full(s) @ full(v).mT, low, atol=1e-8), u.to_local().tolist()


def test_random_decompositions_are_the_same_on_all_ranks() -> None:
    (right, first), (_, second) = simulate(2, _low_rank)
    assert right
    assert first == second


def _clamped() -> torch.Tensor:
    placement = flow.placement("cpu", [0, 1])
    x = (
        _x(5)
        .to_global(placement=placement, sbp=broadcast)
        .to_global(sbp=partial_sum)
        .detach()
        .requires_grad_()
    )
    y = x * 2
    with torch.no_grad():
        y.clamp_(min=0.5)  # a partial sum cannot be clamped in place, so it is boxed
    (y * y).sum().backward()
    return full(x.grad)


def test_a_partial_target_written_without_gradients_keeps_its_own() -> None:
    x = _x(5).requires_grad_()
    y = x * 2
    with torch.no_grad():
        y.clamp_(min=0.5)
    (y * y).sum().backward()
    for grad in simulate(2, _clamped):
        torch.testing.assert_close(grad, x.grad)


def _out_of_range() -> None:
    x = (
        _x(4, 3)
        .to_global(placement=flow.placement("cpu", [0, 1]), sbp=broadcast)
        .to_global(sbp=split(0))
    )
    x.index_put(
        (torch.tensor([0]), torch.tensor([3])), torch.ones(1, dtype=torch.float64), accumulate=True
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU gives up every later call of the process")
def test_an_index_out_of_range_is_no_other_row() -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"out of (range|bounds)"):
        simulate(2, _out_of_range, timeout=5.0)


@pytest.mark.parametrize("function", [torch.cov, torch.corrcoef])
def test_in_graphs(function: Callable[..., Any]) -> None:
    """Planning infers outputs on meta tensors. It does not use the fake tensors of a capture, which
    have no values for torch's own checks."""

    def on_ranks() -> torch.Tensor:
        x = (
            _x(3, 7)
            .to_global(placement=flow.placement("cpu", [0, 1]), sbp=broadcast)
            .to_global(sbp=split(1))
        )
        return full(flow.nn.Graph.trace(lambda x: function(x))(x))

    for got in simulate(2, on_ranks):
        torch.testing.assert_close(got, function(_x(3, 7)))
