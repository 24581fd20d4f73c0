"""Tests of indexing, gathering, scattering and tables: every signature against plain torch, forward
and gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.device import DEVICE
from support.everywhere import compare
from support.oracle import check, spelled

import globaltensor as flow
from globaltensor._ops.rules.indexing import _overlap
from globaltensor.distributed.simulate import simulate

T = torch.Tensor
get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__
gen = torch.Generator().manual_seed(3)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


def ints(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, n, shape, generator=gen)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=gen) > 0.5


every = slice(None)
ROWS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("int", get, (x(5, 3), 2)),
    ("negative int", get, (x(5, 3), (-1, 0))),
    ("int inside", get, (x(2, 5, 3), (every, -2))),
    ("int of bool", get, (mask(5, 3), 3)),
    ("slice", get, (x(5, 6), slice(1, 4))),
    ("slices", get, (x(5, 6), (slice(0, 5), slice(None, None, 2)))),
    ("ellipsis none", get, (x(5, 6), (..., None, slice(-3, None)))),
    ("none first", get, (x(5, 6), (None, 1, None))),
    ("nothing", get, (x(5, 6), ())),
    ("empty slice", get, (x(5, 6), slice(3, 3))),
    ("index", get, (x(7, 3), ints(7, 5))),
    ("index 2d", get, (x(7, 3), ints(7, 2, 3) - 7)),
    ("index inside", get, (x(2, 7, 3), (every, ints(7, 5)))),
    ("index twice", get, (x(7, 5, 3), (ints(7, 4), ints(5, 4)))),
    ("index twice broadcast", get, (x(7, 5, 3), (ints(7, 4, 1), ints(5, 2)))),
    ("index apart", get, (x(4, 5, 3), (ints(4, 2), every, ints(3, 2)))),
    ("index with int", get, (x(4, 5, 3), (ints(4, 2), 1))),
    ("index and int between", get, (x(4, 5, 3), (ints(4, 2), 1, ints(3, 2)))),
    ("index with slice and none", get, (x(4, 5, 3), (slice(1, 3), ints(5, 2), None))),
    ("index of one", get, (x(1, 3), ints(1, 4))),
    ("index by nothing", get, (x(5, 3), ints(5, 0))),
    ("index bool", get, (mask(5, 3), ints(5, 4))),
    ("gather", torch.gather, (x(5, 7), 1, ints(7, 5, 4))),
    ("gather fewer", torch.gather, (x(5, 7), 1, ints(7, 3, 4))),
    ("gather 3d", T.gather, (x(3, 5, 2), -3, ints(3, 4, 5, 2))),
    ("index_select", torch.index_select, (x(5, 7), 0, ints(5, 4))),
    ("index_select last", T.index_select, (x(2, 5, 7), -1, ints(7, 9))),
    ("scatter", torch.scatter, (x(3, 5), 1, torch.tensor([[0, 3], [4, 1], [2, 0]]), x(3, 2))),
    ("scatter number", torch.scatter, (x(5, 3), 0, ints(5, 2, 3), 2.5)),
    ("scatter fewer", torch.scatter, (x(5, 4), 0, torch.tensor([[0, 3], [4, 1]]), x(2, 2))),
    ("scatter_add", torch.scatter_add, (x(3, 5), 1, ints(5, 3, 4), x(3, 4))),
    ("scatter_add fewer", T.scatter_add, (x(3, 5), 1, ints(5, 2, 4), x(2, 4))),
    ("scatter_reduce", torch.scatter_reduce, (x(3, 5), 1, ints(5, 3, 4), x(3, 4), "amax")),
    ("scatter_reduce sum", torch.scatter_reduce, (x(3, 5), 1, ints(5, 3, 4), x(3, 4), "sum")),
    ("scatter_reduce mean", torch.scatter_reduce, (x(3, 5), 1, ints(5, 3, 4), x(3, 4), "mean")),
    ("index_add", torch.index_add, (x(5, 3), 0, ints(5, 4), x(4, 3))),
    ("index_copy", torch.index_copy, (x(5, 3), 0, torch.tensor([4, 0, 2]), x(3, 3))),
    ("index_fill", torch.index_fill, (x(5, 3), 1, ints(3, 2), 2.0)),
    ("index_fill tensor", torch.index_fill, (x(5, 3), 0, ints(5, 2), x())),
    ("index_reduce", torch.index_reduce, (x(5, 3).exp(), 0, ints(5, 4), x(4, 3).exp(), "prod")),
    ("select_scatter", torch.select_scatter, (x(5, 3), x(3), 0, 2)),
    ("slice_scatter", torch.slice_scatter, (x(5, 3), x(2, 3), 0, 1, 3)),
    ("diagonal_scatter", torch.diagonal_scatter, (x(4, 4), x(4))),
    ("masked_fill", torch.masked_fill, (x(5, 3), mask(5, 3), -2.0)),
    ("masked_fill zero", T.masked_fill, (x(5, 3), mask(3), 0)),
    ("masked_fill tensor", T.masked_fill, (x(5, 3), mask(5, 1), x())),
    ("masked_scatter", torch.masked_scatter, (x(5, 3), mask(5, 3), x(15))),
    ("embedding", F.embedding, (ints(7, 5, 2), x(7, 3))),
    ("embedding padding", F.embedding, (ints(7, 5, 4), x(7, 3), -3)),
    ("embedding small", F.embedding, (ints(1, 3), x(1, 5))),
    ("embedding_bag", F.embedding_bag, (ints(7, 5, 4), x(7, 3))),
    ("one_hot", F.one_hot, (ints(4, 5, 2), 4)),
    ("bucketize", torch.bucketize, (x(5, 3), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))),
    ("searchsorted", torch.searchsorted, (x(5, 4).sort(-1).values, x(5, 3))),
    ("searchsorted line", torch.searchsorted, (x(4).sort().values, x(5, 3))),
]
WRITES: list[tuple[str, tuple[Any, ...]]] = [
    ("int", (x(5, 3), 2, x(3))),
    ("int number", (x(5, 3), (1, 2), 4.0)),
    ("int zero", (x(5, 3), (-1, 2), 0)),
    ("int inside", (x(2, 5, 3), (every, -2), x(2, 3))),
    ("int of more dims", (x(5, 3), 2, x(1, 1, 3))),
    ("slice", (x(7, 3), slice(1, 6), x(5, 3))),
    ("slice step", (x(7, 6), (slice(1, 7, 2), slice(None, None, 3)), x(3, 2))),
    ("slice broadcast", (x(7, 6), (slice(2, 4), every), x(6))),
    ("slice column", (x(7, 6), (slice(2, 6), slice(1, 3)), x(4, 1))),
    ("slice number", (x(7, 6), (slice(1, 3), slice(None, None, 2)), 7.0)),
    ("slice nothing", (x(5, 3), slice(3, 3), 1.0)),
    ("all", (x(5, 3), ..., x(5, 3))),
    ("all broadcast", (x(5, 3), every, x())),
    ("none", (x(5, 3), (None, slice(1, 3)), x(1, 2, 3))),
    ("int and slice", (x(5, 4, 3), (1, slice(1, 4), every), x(3, 3))),
    ("index", (x(7, 3), torch.tensor([5, 0, -4]), x(3, 3))),
    ("index number", (x(7, 3), ints(7, 4), 2.0)),
    ("index broadcast", (x(7, 3), ints(7, 4), x(3))),
    ("index 2d", (x(7, 3), torch.tensor([[0, 6], [2, 3]]), x(2, 2, 3))),
    ("index column", (x(3, 7), (every, torch.tensor([5, 1])), x(3, 2))),
    ("index twice", (x(5, 4, 3), (torch.tensor([4, 0]), torch.tensor([1, -1])), x(2, 3))),
    ("index apart", (x(5, 4, 3), (torch.tensor([4, 0]), every, torch.tensor([1, -1])), x(2, 4))),
    ("index and int", (x(5, 4, 3), (torch.tensor([4, 0]), 2), x(2, 3))),
    ("index and slice", (x(5, 4, 3), (torch.tensor([4, 0]), slice(1, 3)), x(2, 2, 3))),
    ("index by nothing", (x(5, 3), ints(5, 0), x(0, 3))),
    ("mask number", (x(5, 3), mask(5, 3), 2.0)),
    ("mask rows", (x(5, 3), mask(5), x(3))),
    ("mask columns", (x(5, 3), (every, mask(3)), 0.0)),
]


@pytest.mark.parametrize(
    ("function", "args"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
@pytest.mark.sweep(3)
def test_every_signature(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert check(function, *args, most=40)


@pytest.mark.parametrize("args", [row[1] for row in WRITES], ids=[row[0] for row in WRITES])
@pytest.mark.sweep(3)
def test_writes(args: tuple[Any, ...]) -> None:
    assert check(put, *args, most=40, inplace=True)


@pytest.mark.parametrize(
    ("function", "args", "signature"),
    [
        (get, (x(5, 3), 2), "S(0) -> P"),
        (get, (x(5, 3), ints(5, 4)), "S(0) B -> P"),
        (get, (x(5, 3), ints(5, 4)), "B S(0) -> S(0)"),
        (get, (x(5, 3), (every, 1)), "S(0) -> S(0)"),
        (F.embedding, (ints(7, 5, 2), x(7, 4)), "B S(0) -> P"),
        (F.embedding, (ints(7, 5, 2), x(7, 4)), "B S(1) -> S(2)"),
        (F.embedding, (ints(7, 5, 2), x(7, 4)), "S(0) B -> S(0)"),
        (torch.gather, (x(5, 7), 1, ints(7, 5, 4)), "S(1) B -> P"),
        (torch.scatter_add, (x(3, 5), 1, ints(5, 3, 4), x(3, 4)), "P S(1) S(1) -> P"),
        (torch.index_add, (x(5, 3), 0, ints(5, 4), x(4, 3)), "S(0) B B -> S(0)"),
    ],
)
def test_stays_where_it_is(
    function: Callable[..., Any], args: tuple[Any, ...], signature: str
) -> None:
    assert signature in check(function, *args, grids=[(2,)], most=200)


INPLACE: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("scatter_", T.scatter_, (x(3, 5), 1, torch.tensor([[0, 3], [4, 1], [2, 0]]), x(3, 2))),
    ("scatter_ number", T.scatter_, (x(5, 3), 0, ints(5, 2, 3), 2.5)),
    ("scatter_add_", T.scatter_add_, (x(3, 5), 1, ints(5, 3, 4), x(3, 4))),
    ("index_add_", T.index_add_, (x(5, 3), 0, ints(5, 4), x(4, 3))),
    ("index_fill_", T.index_fill_, (x(5, 3), 0, ints(5, 2), 1.0)),
    ("masked_fill_", T.masked_fill_, (x(5, 3), mask(5, 3), -2.0)),
    ("tril_", T.tril_, (x(5, 3),)),
    ("triu_", T.triu_, (x(2, 5, 3), 1)),
]


@pytest.mark.parametrize(
    ("function", "args"), [row[1:] for row in INPLACE], ids=[row[0] for row in INPLACE]
)
@pytest.mark.sweep(2)
def test_in_place(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert check(function, *args, most=40, inplace=True)


@pytest.mark.parametrize(
    "index", [slice(1, 7, 2), slice(0, 9), slice(4, 5), slice(8, None, 3), slice(2, 2)]
)
def test_overlap(index: slice) -> None:
    r = range(*index.indices(9))
    for offset, length in [(0, 4), (4, 3), (7, 2), (9, 0)]:
        here, first, n = _overlap(r, offset, length)
        assert list(range(length))[here] == [i - offset for i in r if offset <= i < offset + length]
        assert list(r)[first : first + n] == [i for i in r if offset <= i < offset + length]


def test_index_out_of_range_is_an_error_where_the_dim_is_split() -> None:
    with pytest.raises(IndexError):
        check(get, x(4, 3), torch.tensor([0, 9]), grids=[(2,)])


LISTS: list[Any] = [
    [], [[]], ([], 0), (every, []), [0, 3], [True, False, True, False, True], [[0, 1], [2, 3]],
    [[[0, 1], [2, 3]]], [slice(1, 3), 0], [None, 1], [..., 1],
    [torch.tensor([1, 2]), torch.tensor([2, 0])], [torch.tensor(1), torch.tensor(2)],
    [np.int64(1), np.int64(3)], [0, 1] * 20,
]  # fmt: skip


@pytest.mark.parametrize("index", LISTS, ids=spelled)
@pytest.mark.sweep(4)
def test_lists_index_as_torch_has_it(index: Any) -> None:
    def read_and_write(x: Any) -> Any:
        y = x * 1
        picked = y[index] * 1
        y[index] = 2.0
        return picked, y

    compare(
        read_and_write, x(5, 4, 3), grids=((2,), (2, 2)), draws=2, fallback=True
    )  # torch warns in some cases


@pytest.mark.parametrize(
    "index",
    [
        True,
        False,
        (True, 1),
        (every, False),
        (..., True, [0, 2]),
        torch.tensor(True),
        (1, torch.tensor(False)),
    ],
    ids=spelled,
)
@pytest.mark.sweep(3)
def test_a_bool_is_a_mask_of_a_new_dim(index: Any) -> None:
    def read_and_write(x: Any) -> Any:
        y = x * 1
        picked = y[index] * 1
        y[index] = 2.0
        return picked, y

    compare(read_and_write, x(5, 4), grids=((2,), (2, 2)), draws=2)


MISFITS = [
    mask(3),
    (every, mask(5)),
    (..., mask(3)),
    (None, mask(5, 3)),
    (mask(5, 4), 0, mask(1)),
    [True, False],
    np.ones(4, bool),
    (1, mask(1)),
]


@pytest.mark.parametrize("index", MISFITS, ids=spelled)
def test_a_mask_of_another_shape_is_an_error_as_in_torch(index: Any) -> None:
    def on_ranks(write: bool) -> None:
        y = x(5, 4, 2).to_global(flow.placement("cpu", [0, 1]), flow.sbp.split(0))
        put(y, index, 1.0) if write else get(y, index)

    for write in (False, True):
        with pytest.raises(IndexError, match=r"mask|too many"):
            simulate(2, on_ranks, write)
        with pytest.raises(IndexError):
            put(x(5, 4, 2), index, 1.0) if write else get(x(5, 4, 2), index)


@pytest.mark.long
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.sweep(12)
def test_rows_of_a_table_are_bounded_where_they_lie(
    dtype: torch.dtype, function: Any, p: float
) -> None:
    """The lookup changes the table itself: each rank renormalises its own rows."""

    def look_up(table: Any, index: Any) -> Any:
        table = table * 1
        return function(index, table, max_norm=0.5, norm_type=p), table

    compare(look_up, x(9, 4), torch.tensor([[1, 2, 8], [0, 1, 1]], dtype=dtype))


def test_bytes_as_a_condition() -> None:
    compare(
        torch.where,
        torch.tensor([[1, 0, 2, 0], [0, 0, 1, 255]], dtype=torch.uint8),
        x(2, 4),
        x(4),
        fallback=True,
    )  # torch warns


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's kernel ends the process's use of it")
@pytest.mark.parametrize("index", [torch.tensor(7), torch.tensor([1, 7]), torch.tensor([[-5]])])
def test_an_index_out_of_bounds_is_told_in_numbers_of_the_whole(index: torch.Tensor) -> None:
    whole = torch.ones(4, 3)

    def on_ranks() -> None:
        mine = whole.to_global(flow.placement("cpu", [0, 1]), flow.sbp.broadcast).to_global(
            sbp=flow.sbp.split(0)
        )  # type: ignore[attr-defined]
        with pytest.raises(
            IndexError,
            match=rf"index {int(index.flatten()[-1])} is out of bounds for dimension 0 with size 4",
        ):
            mine[index]

    simulate(2, on_ranks)
