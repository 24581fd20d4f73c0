"""Tests of views and indexing through the full library on simulated ranks: composites, in-place
forms, shapes that depend on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.everywhere import compare
from support.oracle import tensors_in

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

gen = torch.Generator().manual_seed(3)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=gen) > 0.5


def assigned(t: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    y = t * 1
    y[index] = value
    return y


def both(value: Any) -> torch.Tensor:
    return sum(t.sum() * k for k, t in enumerate(tensors_in(value), 1))  # type: ignore[return-value]


i5, i3 = torch.tensor([4, 0, 4, 2]), torch.tensor([1, 0, 2, 2])
ROWS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("view_as", lambda a, b: a.view_as(b), (x(6), x(2, 3))),
    ("reshape_as", lambda a, b: a.reshape_as(b), (x(5, 6), x(10, 3))),
    ("expand_as", lambda a, b: a.expand_as(b), (x(6), x(5, 6))),
    ("type_as", lambda a, b: a.type_as(b), (x(5), torch.ones(2, dtype=torch.int64))),
    ("to other", lambda a, b: a.to(b), (x(5), torch.ones(2, dtype=torch.int64))),
    ("hstack", lambda a, b: torch.hstack([a, b]), (x(5, 2), x(5, 3))),
    ("vstack", lambda a, b: torch.vstack([a, b]), (x(3), x(2, 3))),
    ("dstack", lambda a, b: torch.dstack([a, b]), (x(3), x(3))),
    ("column_stack", lambda a, b: torch.column_stack([a, b]), (x(3), x(3, 2))),
    ("atleast", lambda a, b: torch.atleast_3d(a, b), (x(3), x(3, 2))),
    ("broadcast_tensors", lambda a, b: torch.broadcast_tensors(a, b), (x(3, 1), x(4))),
    ("meshgrid", lambda a, b: torch.meshgrid(a, b, indexing="xy"), (x(3), x(4))),
    ("meshgrid ij", lambda a, b: torch.meshgrid([a, b], indexing="ij"), (x(3), x(4))),
    ("repeat_interleave flat", lambda a: a.repeat_interleave(2), (x(5, 3),)),
    ("getters", lambda a: a.T @ a.mT.T.H.mH, (x(5, 5),)),
    ("iterate", lambda a: both(list(a)), (x(5, 3),)),
    ("flatten keywords", lambda a: torch.flatten(input=a, start_dim=0), (x(5, 3),)),
    ("unflatten", lambda a: a.unflatten(0, (-1, 2)), (x(6, 3),)),
    ("index list", lambda a: a[[4, 0, 1]], (x(5, 3),)),
    ("index lists", lambda a: a[[4, 0], [1, 2]], (x(5, 3),)),
    ("index array", lambda a: a[:, np.array([2, 0])], (x(5, 3),)),
    ("index numpy int", lambda a: a[np.int64(3)], (x(5, 3),)),
    ("index item", lambda a: a[torch.tensor(3)], (x(5, 3),)),
    (
        "index items",
        lambda a: a[..., torch.tensor(-1), None, torch.tensor(0)] + a[torch.tensor(2), :, 1:][0],
        (x(4, 5, 3)[:, :1],),
    ),
    ("index global", lambda a, i: a[i], (x(5, 3), i5)),
    ("index globals", lambda a, i, j: a[i, j], (x(5, 3), i5, i3)),
    ("index mask", lambda a, m: a[m], (x(5, 3), mask(5, 3))),
    ("index mask row", lambda a, m: a[m], (x(5, 3), mask(5))),
    ("index mask inside", lambda a, m: a[:, m], (x(5, 3), mask(3))),
    ("index bool list", lambda a: a[[True, False, True]], (x(3, 2),)),
    ("plain table", lambda i: x(5, 3)[i], (i5,)),
    ("set list", lambda a, v: assigned(a, [4, 0], v), (x(5, 3), x(2, 3))),
    (
        "set mask values",
        lambda a, m, v: assigned(a, m, v[: int(m.sum())]),
        (x(5, 3), mask(5, 3), x(15)),
    ),
    ("set mask number", lambda a, m: assigned(a, m, 3.0), (x(5, 3), mask(5, 3))),
    ("set global", lambda a, i, v: assigned(a, i, v), (x(5, 3), torch.tensor([4, 0]), x(2, 3))),
    ("set slice", lambda a, v: assigned(a, slice(1, 4), v), (x(5, 3), x(3, 3))),
    ("set item", lambda a: assigned(a, (torch.tensor(1), slice(0, 2)), 5.0), (x(5, 3),)),
    (
        "index_put",
        lambda a, i, v: torch.index_put(a, (i,), v),
        (x(5, 3), torch.tensor([4, 0]), x(2, 3)),
    ),
    (
        "index_put_",
        lambda a, i, v: (a * 1).index_put_((i,), v),
        (x(5, 3), torch.tensor([4, 0]), x(2, 3)),
    ),
    ("take", lambda a, i: a.take(i), (x(5, 3), torch.tensor([[14, 0], [-1, 3]]))),
    (
        "take_along_dim",
        lambda a, i: torch.take_along_dim(a, i, 0),
        (x(5, 3), torch.tensor([[4], [0]])),
    ),
    (
        "take_along_dim flat",
        lambda a, i: torch.take_along_dim(a, i),
        (x(5, 3), torch.tensor([14, 0, 2])),
    ),
    ("nonzero", lambda a: a.nonzero(), (mask(5, 3),)),
    ("nonzero tuple", lambda a: torch.nonzero(a, as_tuple=True), (mask(5, 3),)),
    ("masked_select", lambda a, m: a.masked_select(m), (x(5, 3), mask(5, 3))),
    ("bincount", lambda a: torch.bincount(a), (i5,)),
    ("unique", lambda a: torch.unique(a, return_counts=True), (i5,)),
    ("one_hot counted", lambda a: F.one_hot(a), (i5,)),
    ("torch.embedding", lambda w, i: torch.embedding(w, i), (x(5, 3), i5)),
    ("masked_fill_", lambda a, m: (a * 1).masked_fill_(m, 2.0), (x(5, 3), mask(5, 3))),
    ("tril_", lambda a: (a * 1).tril_(), (x(5, 3),)),
    (
        "scatter_add_",
        lambda a, i, v: (a * 1).scatter_add_(0, i, v),
        (x(5, 3), torch.tensor([[4, 0, 1]]), x(1, 3)),
    ),
    ("pad then view", lambda a: F.pad(a, (0, 2)).view(5, 4, 2).flatten(1).view(-1), (x(5, 6),)),
    (
        "heads",
        lambda a: a.view(2, 3, 4, 3).transpose(1, 2).contiguous().view(8, 3, 3),
        (x(2, 3, 12),),
    ),
]


@pytest.mark.parametrize(
    ("function", "args"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
@pytest.mark.sweep(9)
def test_against_plain_torch(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    compare(function, *args, draws=4)


def _picked_row() -> None:
    t = flow.ones(4, 3, placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.split(0))
    t[1].mul_(2)  # the write reaches the tensor
    assert t.sum().item() == 15.0
    t[1] = t[1] * 2
    assert t.sum().item() == 21.0
    t.select(0, 1).mul_(2)
    assert t.sum().item() == 33.0


def test_writing_into_a_picked_row() -> None:
    simulate(2, _picked_row)


@pytest.mark.parametrize("sbp", [flow.sbp.broadcast, flow.sbp.split(0), flow.sbp.split(1)], ids=str)
def test_a_slice_whose_end_is_a_tensor(sbp: Any) -> None:
    """The end's value decides the shape, so a plan made for one value must not serve another."""

    def run() -> None:
        whole = x(6, 2)
        t = whole.to_global(
            flow.placement("cpu", [0, 1]), flow.sbp.broadcast, check_meta=False
        ).to_global(sbp=sbp)  # type: ignore[attr-defined]
        for end in (2, 3, 5, 2):
            got = t[: torch.tensor(end)]
            assert got.shape == (end, 2)
            torch.testing.assert_close(
                got.to_global(sbp=flow.sbp.broadcast).to_local(), whole[:end]
            )

    simulate(2, run)


def _pieces_of_an_empty_dim(shape: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Return the shapes of what several functions give, of a plain tensor and of global ones."""
    everyone = flow.placement.all("cpu")
    functions: list[Callable[[torch.Tensor], Any]] = [
        lambda t: t.unbind(0),
        lambda t: t.unbind(-1),
        list,
        lambda t: torch.split(t, [] if t.shape[0] == 0 else t.shape[0], 0),
        lambda t: torch.tensor_split(t, 2, 0),
        lambda t: t.chunk(3, -1),
    ]

    def shapes(t: torch.Tensor) -> list[Any]:
        return [[list(piece.shape) for piece in f(t)] for _ in range(2) for f in functions]

    plain = torch.zeros(shape)
    layouts = [flow.sbp.broadcast, flow.sbp.partial_sum]
    layouts += [flow.sbp.split(d) for d in range(len(shape))]
    whole = plain.to_global(everyone, flow.sbp.broadcast)
    return shapes(plain), [shapes(whole.to_global(sbp=layout)) for layout in layouts]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("n", [1, 2])
def test_an_empty_dim_has_no_pieces(n: int, shape: tuple[int, ...]) -> None:
    for plain, of_layouts in simulate(n, _pieces_of_an_empty_dim, shape):
        assert of_layouts == [plain] * len(of_layouts)
