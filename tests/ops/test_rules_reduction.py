"""Tests of reductions, norms and softmax: each signature against plain torch, and composites
through the full library on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.everywhere import compare
from support.oracle import check

from globaltensor._base import torch_private

inf = float("inf")


def x(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


ties = torch.tensor([[1.0, 3, 3, 2, 3], [0, 0, 0, 0, 0], [-1, -2, -1, -3, -4]], dtype=torch.float64)
mask = torch.rand(5, 4, generator=torch.Generator().manual_seed(3)) > 0.5
whole = x(5, 4).round()
holes = torch.where(mask, float("nan"), x(5, 4))
L = torch.linalg

ROWS: list[tuple[Any, ...]] = [
    (torch.sum, x(5, 4)), (torch.sum, x(5, 4), 0), (torch.Tensor.sum, x(5, 1, 4), (0, -1)),
    (torch.sum, x(5, 4), 1, True), (torch.sum, mask),
    (torch.sum, x()), (torch.sum, x(0, 3), 0), (torch.mean, x(5, 4)),
    (torch.mean, x(5, 1, 4), (0, 2)), (torch.Tensor.mean, x(1, 3), 0),
    (torch.mean, x(2, 3), -1, True),
    (torch.nansum, holes, 0), (torch.nanmean, holes, 0), (torch.count_nonzero, mask),
    (torch.count_nonzero, mask, 1), (torch.any, mask), (torch.any, mask, 0),
    (torch.all, mask, 1), (torch.all, mask), (torch.prod, x(5, 4)), (torch.prod, x(5, 4), 1),
    (torch.trace, x(4, 4)),
    (torch.amax, x(5, 4), 0), (torch.amax, ties, 1), (torch.amin, ties),
    (torch.amax, x(1, 4), (0, 1), True), (torch.max, ties), (torch.min, x(5, 4)),
    (torch.max, x(5, 4), 0), (torch.min, x(5, 4), 1, True), (torch.max, x(5, 4), x(4)),
    (torch.argmax, x(5, 4)), (torch.argmax, x(5, 4), 1),
    (torch.argmin, x(5, 4), 0, True),
    (torch.median, x(5, 3)), (torch.median, x(5, 3), 0), (torch.nanmedian, x(5, 3), 1),
    (torch.mode, ties), (torch.kthvalue, x(5, 3), 2, 0),
    (torch.sort, x(5, 4)), (torch.sort, x(5, 4), 0), (torch.argsort, x(5, 4), 0),
    (torch.topk, x(5, 4), 2), (torch.topk, x(5, 4), 2, 0),
    (torch.msort, x(5, 4)),
    (torch.cumsum, x(5, 4), 0), (torch.cumprod, x(5, 4), 1), (torch.cummax, x(5, 4), 0),
    (torch.logcumsumexp, x(5, 4), 0),
    (torch.var, x(5, 4)), (torch.var, x(5, 4), 0), (torch.std, x(5, 4), (0, 1), False),
    (torch.var_mean, x(5, 4), 1), (torch.std_mean, x(5, 4)),
    (torch.norm, x(5, 4)), (torch.norm, x(5, 4), 3, 1), (torch.norm, x(5, 4), inf, 0),
    (L.vector_norm, x(5, 4)), (L.vector_norm, x(5, 4), 3, 0, True),
    (L.vector_norm, x(5, 4), 1),
    (L.vector_norm, x(5, 4), -inf, 0), (L.vector_norm, x(5, 4), 0, 0), (L.norm, x(5, 4)),
    (L.norm, x(5, 4), "fro"), (L.norm, x(5, 4), "nuc"),
    (L.matrix_norm, x(3, 5, 4)), (L.matrix_norm, x(3, 5, 4), 2),
    (torch.norm_except_dim, x(5, 4, 3), 2, 0), (torch.norm_except_dim, x(5, 4), 3, 1),
    (torch.norm_except_dim, x(5, 4), 2, -1),
    (torch_private.weight_norm, x(5, 4, 3), x(5, 1, 1), 0),
    (torch_private.weight_norm, x(5, 4), x(1, 4), 1),
    *[(f, mask) for f in torch_private.is_all_true + torch_private.is_any_true],
    (torch.dist, x(5, 4), x(5, 4)), (F.cosine_similarity, x(5, 4), x(5, 4)),
    (F.cosine_similarity, x(5, 4), x(4), -1), (F.pairwise_distance, x(5, 4), x(4)),
    (torch.cdist, x(2, 5, 3), x(4, 3)),
    (torch.softmax, x(5, 4), 0), (F.softmax, x(5, 4), 1), (F.log_softmax, x(5, 1, 4), 1),
    (F.softmin, x(5, 4), 0), (torch.logsumexp, x(5, 4), 0),
    (torch.logsumexp, x(5, 4), (0, 1), True),
    (torch.quantile, x(5, 4), 0.3, 0), (torch.diff, x(5, 4)), (torch.trapezoid, x(5, 4)),
    (torch.cumulative_trapezoid, x(5, 4), x(5, 4)),
    (torch.renorm, x(5, 4), 2, 0, 1.0), (torch.isin, whole, whole[0]),
    (torch.gradient, x(5, 4)), (torch.Tensor.sum_to_size, x(3, 5, 4), 5, 1),
    (torch.Tensor.sum_to_size, x(5, 4), (1, 4)),
]  # fmt: skip


def name(row: tuple[Any, ...]) -> str:
    return (
        f"{row[0].__name__} "
        f"{[tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in row[1:]]}"
    )


@pytest.mark.parametrize("row", ROWS, ids=name)
@pytest.mark.sweep(8)
def test_every_signature(row: tuple[Any, ...]) -> None:
    check(row[0], *row[1:])


@pytest.mark.parametrize("row", ROWS, ids=name)
@pytest.mark.sweep(12)
def test_on_global_tensors(row: tuple[Any, ...]) -> None:
    compare(row[0], *row[1:], draws=4)


@pytest.mark.long
def test_lists_of_tensors_are_reduced_one_by_one() -> None:
    compare(lambda a, b: torch._foreach_max([a, b]), x(5, 4), x(3, 2))
    compare(lambda a, b: torch._foreach_norm([a, b], 3), x(5, 4), x(3, 2))
    for function, others in (
        ("_foreach_powsum", [3]),
        ("_foreach_mm", [[torch.ones(4, 3).double(), torch.ones(2, 1).double()]]),
    ):  # since torch 2.13
        if (found := getattr(torch, function, None)) is not None:
            compare(
                lambda a, b, found=found, others=others: found([a.detach(), b.detach()], *others),
                x(5, 4),
                x(3, 2),
            )
