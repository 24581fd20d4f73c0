"""Tests of products, linear algebra and Fourier transforms: each signature against plain torch, and
through the full library on simulated ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.everywhere import compare
from support.oracle import check

import globaltensor as flow
from globaltensor.distributed.simulate import simulate


def x(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + sum(shape))
    )


def spd(n: int, *lead: int) -> torch.Tensor:
    a = x(*lead, n, n)
    return a @ a.mT + n * torch.eye(n, dtype=torch.float64)


L, M = torch.linalg, torch.fft
e = torch.einsum

ROWS: list[tuple[Any, ...]] = [
    (torch.matmul, x(5, 6), x(6, 7)), (torch.matmul, x(3, 5, 2), x(3, 2, 4)),
    (torch.matmul, x(3, 5, 2), x(2, 4)), (torch.matmul, x(5, 3), x(3)),
    (torch.matmul, x(3), x(3, 5)),
    (torch.matmul, x(2, 1, 3, 4), x(3, 4, 2)), (torch.matmul, x(3), x(2, 3, 1)),
    (torch.dot, x(7), x(7)), (torch.vdot, x(3), x(3)),
    (torch.mv, x(5, 3), x(3)), (torch.mm, x(1, 3), x(3, 5)),
    (torch.bmm, x(3, 5, 2), x(3, 2, 1)), (torch.matmul, x(5, 0), x(0, 3)),
    (torch.Tensor.__rmatmul__, x(3, 5), x(4, 3)), (torch.inner, x(5, 3), x(2, 3)),
    (torch.inner, x(5, 3), x()),
    (torch.outer, x(5), x(3)), (torch.addmm, x(7), x(5, 6), x(6, 7)),
    (torch.addmm, x(5, 1), x(5, 2), x(2, 3)), (torch.addmv, x(5), x(5, 3), x(3)),
    (torch.addr, x(5, 3), x(5), x(3)),
    (torch.baddbmm, x(3, 5, 4), x(3, 5, 2), x(3, 2, 4)),
    (torch.baddbmm, x(4), x(3, 5, 2), x(3, 2, 4)), (torch.addbmm, x(5, 4), x(3, 5, 2), x(3, 2, 4)),
    (F.linear, x(5, 6), x(7, 6), x(7)), (F.linear, x(2, 5, 3), x(4, 3)),
    (F.linear, x(3), x(4, 3), x(4)), (F.bilinear, x(5, 3), x(5, 2), x(4, 3, 2), x(4)),
    (torch.tensordot, x(5, 3, 2), x(3, 2, 4)),
    (torch.tensordot, x(5, 3, 2), x(2, 4, 5), ([0, 2], [2, 0])),
    (L.multi_dot, [x(5, 3), x(3, 2), x(2, 4)]), (L.multi_dot, [x(3), x(3, 2), x(2)]),
    (torch.kron, x(5, 3), x(2, 2)), (torch.kron, x(3), x(2, 2)),
    (e, "bij,bkj->bik", x(3, 5, 2), x(3, 4, 2)), (e, "ij,jk,kl->il", x(5, 3), x(3, 2), x(2, 4)),
    (e, "ij,jk", x(5, 3), x(3, 2)),
    (e, "...i,...i", x(5, 3), x(3)), (e, "ii->i", x(4, 4)), (e, "ii", x(4, 4)),
    (e, "b...,o...->bo", x(5, 3), x(2, 3)), (e, "ij->", x(5, 3)), (e, "ij->j", x(5, 3)),
    (e, "i,j->ij", x(5), x(3)), (e, "ij,ij->i", x(5, 1), x(5, 3)),
    (L.vecdot, x(5, 3), x(5, 3)), (L.vecdot, x(5, 3), x(3)),
    (L.cross, x(5, 3), x(5, 3)), (torch.cross, x(3, 5), x(3, 5), 0),
    (L.inv, spd(3, 5)), (torch.inverse, spd(3)), (L.cholesky, spd(3, 5)), (L.det, x(5, 3, 3)),
    (L.slogdet, spd(3, 5)), (L.eigh, spd(3, 1)),
    (L.eigvalsh, spd(3, 5)), (L.svdvals, x(5, 3, 2)), (L.qr, x(5, 4, 2)),
    (L.pinv, x(5, 4, 2)), (L.matrix_exp, x(5, 2, 2)), (L.matrix_power, x(5, 2, 2), 3),
    (L.solve, spd(3, 5), x(5, 3, 2)), (L.solve, spd(3, 5), x(5, 3)),
    (L.solve, spd(3, 5), x(3, 2)), (L.lu_factor, spd(3, 5)),
    (torch.cholesky_solve, x(5, 3, 2), L.cholesky(spd(3, 5))), (L.vander, x(5, 3)),
    (L.matrix_rank, x(5, 3, 2)), (L.cond, spd(3, 5)),
]  # fmt: skip
FOURIER: list[tuple[Any, ...]] = [
    (M.fft, x(5, 6)), (M.fft, x(5, 6), None, 0), (M.rfft, x(5, 6)), (M.fft2, x(2, 5, 4)),
    (M.fftn, x(3, 5)),
    (M.rfftn, x(3, 4, 5), None, (0, 1)), (M.fftshift, x(5, 3), 0),
]  # fmt: skip


def name(row: tuple[Any, ...]) -> str:
    shown = [
        tuple(a.shape) if isinstance(a, torch.Tensor) else "list" if isinstance(a, list) else a
        for a in row[1:]
    ]
    return f"{row[0].__name__} {shown}"


@pytest.mark.parametrize("row", ROWS, ids=name)
@pytest.mark.sweep(8, kind=lambda row: row[0])
def test_every_signature(row: tuple[Any, ...]) -> None:
    check(row[0], *row[1:], most=40)


TRIANGLE = x(5, 3, 3).tril() + 3 * torch.eye(3, dtype=torch.float64)
WITH_KEYWORDS: list[tuple[Any, tuple[torch.Tensor, ...], dict[str, Any]]] = [
    (L.solve_triangular, (TRIANGLE, x(5, 3, 2)), {"upper": False}),
    (torch.addmm, (x(4), x(5, 3), x(3, 4)), {"beta": 0.5, "alpha": 2.0}),
    (torch.baddbmm, (x(2, 5, 4), x(2, 5, 3), x(2, 3, 4)), {"beta": 2, "alpha": 0.5}),
]


@pytest.mark.long
@pytest.mark.parametrize("run", [check, compare])
@pytest.mark.parametrize("row", WITH_KEYWORDS, ids=lambda row: row[0].__name__)
@pytest.mark.sweep(3)  # the first with one, the second with the other
def test_keywords(row: tuple[Any, ...], run: Any) -> None:
    function, args, kwargs = row
    run(function, *args, **kwargs)


@pytest.mark.parametrize("row", FOURIER, ids=name)
@pytest.mark.sweep(2)
def test_transforms(row: tuple[Any, ...]) -> None:
    compare(lambda *a: row[0](*a).abs(), *row[1:])


@pytest.mark.parametrize("row", ROWS, ids=name)
@pytest.mark.sweep(12)
def test_on_global_tensors(row: tuple[Any, ...]) -> None:
    compare(row[0], *row[1:], draws=4)


def test_operands_that_are_no_tensors_are_refused_in_words_of_python() -> None:
    def body() -> list[str]:
        g: Any = x(3, 2).to_global(flow.placement.all("cpu"), flow.sbp.broadcast)  # type: ignore[attr-defined]
        texts = []
        for sbp in (flow.sbp.broadcast, flow.sbp.split(0), flow.sbp.partial_sum):
            for other in (np.ones((2, 3)), [[1.0, 2.0, 3.0]], 2.0, np.float32(2)):
                with pytest.raises(
                    TypeError, match=r"unsupported operand type\(s\) for @"
                ) as error:
                    other @ g.to_global(sbp=sbp)
                texts.append(str(error.value))
        with pytest.raises(TypeError, match="must be Tensor, not"):
            torch.matmul(np.ones((2, 3)), g)  # type: ignore[arg-type]
        return texts

    first, second = simulate(2, body)
    assert first == second
    assert len(first) == 12
