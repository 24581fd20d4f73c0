"""Tests of writing by index tensors into split dims, in graphs. A rank's own indices are known only
when the program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bodies import values
from torch import Tensor

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

LINE, GRID = flow.placement("cpu", [0, 1]), flow.placement("cpu", [[0, 1], [2, 3]])
B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
ROWS, COLUMNS = torch.tensor([0, -2, 2]), torch.tensor([1, 1, 0])


class Graph(flow.nn.Graph):
    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step = step

    def build(self, *args: Any) -> Any:
        return self.step(*args)


def rows(x: Any, v: Any, i: Any, j: Any) -> Any:
    x[i] = v[:, None, :]
    return x


def corner(x: Any, v: Any, i: Any, j: Any) -> Any:
    x[i, :, j] = v
    return x


def put(x: Any, v: Any, i: Any, j: Any) -> Any:
    return x.index_put_((i, j), v[:, :1])


def number(x: Any, v: Any, i: Any, j: Any) -> Any:
    x[i[:0]] = 1.0
    x[i, 1:3, j] = 2.0
    return x


def one_row(x: Any, v: Any, i: Any, j: Any) -> Any:
    x[i[1]] = v[0, :3]
    x[i[0], :, j[0] - 3] += v[1]
    x[i, i[2] - 4] = v[:, :3]
    return x


@pytest.mark.parametrize("write", [rows, corner, put, number, one_row])
@pytest.mark.parametrize(
    ("where", "sbp"),
    [
        (LINE, [S(0)]),
        (LINE, [S(2)]),
        (LINE, [P]),
        (GRID, [S(0), S(2)]),
        (GRID, [S(2), S(0)]),
        (GRID, [S(0), S(0)]),
    ],
)
@pytest.mark.sweep(8)
def test_writing_into_split_dims(write: Callable[..., Any], where: Any, sbp: Any) -> None:
    def step(x: Any, v: Any, i: Any, j: Any) -> Any:
        with torch.enable_grad():
            x, v = x.detach().requires_grad_(), v.detach().requires_grad_()
            out = write(x * 1, v, i, j)
            given = torch.autograd.grad(out.square().sum(), (x, v), allow_unused=True)
        return out, *(g if g is not None else x * 0 for g in given)

    x, v = values(5, 4, 3), values(3, 4, seed=1) if write is not rows else values(3, 3, seed=1)

    def on_ranks() -> None:
        whole = [B] * where.ranks.ndim
        brought: list[Any] = [t.to_global(where, whole) for t in (x, v, ROWS, COLUMNS)]  # type: ignore[attr-defined]
        for got, want in zip(
            Graph(step)(brought[0].to_global(sbp=sbp), *brought[1:]),
            step(x, v, ROWS, COLUMNS),
            strict=True,
        ):
            torch.testing.assert_close(torch.from_numpy(got.detach().numpy()), want.detach())

    simulate(where.ranks.size, on_ranks)


def test_an_index_that_is_nowhere_is_told() -> None:
    def write(x: Tensor, i: Tensor) -> Tensor:
        x = x * 1
        x[i] = 1.0
        return x

    def on_ranks() -> None:
        graph = Graph(write)
        x: Any = values(5, 4)
        x = x.to_global(LINE, B).to_global(sbp=S(0))
        graph(x, ROWS.to_global(LINE, B))  # type: ignore[attr-defined]
        with pytest.raises(IndexError, match="out of"):
            graph(x, torch.tensor([0, 7, 1]).to_global(LINE, B))  # type: ignore[attr-defined]

    simulate(2, on_ranks)


@pytest.mark.parametrize(
    ("where", "sbp"), [(LINE, [S(0)]), (LINE, [S(1)]), (GRID, [S(0), S(1)]), (GRID, [P, S(0)])]
)
def test_the_place_of_the_largest_of_all(where: Any, sbp: Any) -> None:
    x = values(5, 4)

    def on_ranks() -> None:
        given: Any = x.to_global(where, [B] * where.ranks.ndim).to_global(sbp=sbp)  # type: ignore[attr-defined]
        assert [t.item() for t in Graph(lambda x: (x.argmax(), x.argmin()))(given)] == [
            x.argmax().item(),
            x.argmin().item(),
        ]

    simulate(where.ranks.size, on_ranks)
