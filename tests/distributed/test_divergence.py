"""Tests of ranks that diverge. By default every rank raises an error, which starts with the user's
line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forked import forked
from support.mpi import needs_mpi, run_by_mpi
from support.pool import run_on
from support.refused import refused
from support.rows import line, rows, same_on_all, square_on_a_grid
from torch import nn

import globaltensor as flow
from globaltensor.distributed.divergence import ALWAYS_COMPARED, COMPARED_EVERY, due
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError, GraphError

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def diverging() -> list[str]:
    rank, said = flow.env.get_rank(), []

    def read_here_or_there() -> None:
        x = rows()
        if rank == 0:
            x.numpy()
        x.sum().item()

    said.append(
        refused(
            read_here_or_there,
            r"^test_divergence.py:\d+: x.numpy\(\)\nrank 0 reads the value of a global tensor here",
            "numpy\\(\\) of a global tensor",
            "call them on every rank, or box to broadcast first",
        )
    )  # fmt: skip
    said.append(
        refused(
            lambda: (rows().sin() if rank else rows().cos()).sum().item(),
            r"rank 0 has run cos\(f32\[4, 3\] S\(0\)\)  \(test_divergence.py:\d+: .*\), which "
            r"rank 1 has not",
        )
    )
    said.append(
        refused(
            lambda: (rows() * (2 + rank)).sum().item(),
            r"rank 0 has run mul\(f32\[4, 3\] S\(0\), int\) with 2  \(test_divergence.py:\d+: ",
            r"rank 1 has run mul\(f32\[4, 3\] S\(0\), int\) with 3  \(test_divergence.py:\d+: ",
        )
    )
    said.append(
        refused(
            lambda: (rows()[rank]).sum().item(),
            r"rank 1 has run __getitem__\(f32\[4, 3\] S\(0\), 1\)  \(.*\), which rank 0 has not",
        )
    )
    said.append(
        refused(lambda: (rows().double() if rank else rows()).exp().sum().item(), "f64", "f32")
    )
    said.append(
        refused(
            lambda: rows().to_global(sbp=S(1) if rank else B),
            r"all_gather for to_global: f32\[4, 3\] S\(0\) -> f32\[4, 3\] B",
            "all_to_all",
        )
    )
    said.append(
        refused(lambda: rows().cumsum(rank).sum().item(), r"cumsum\(f32\[4, 3\] S\(0\), 1\)")
    )

    def other_order() -> None:
        x, y = rows(), rows()
        for t in (x * 2, y) if rank else (y, x * 2):
            t.to_global(sbp=B)
        (x if rank else x + y).sum().item()

    said.append(refused(other_order, "diverged"))
    said.append(
        refused(
            lambda: (
                rows().sum().requires_grad_().backward(torch.tensor(1.0))
                if rank
                else rows().sum().item()
            ),
            "rank 0 reads the value of a global tensor here, while rank 1 is at comparison",
        )
    )

    def other_rate() -> None:
        w = torch.ones(3).to_global(line(), B).requires_grad_()  # type: ignore[attr-defined]
        optimizer = torch.optim.SGD([w], lr=0.1 * (1 + rank))
        (rows() * w).sum().backward()
        optimizer.step()
        (rows() * w).sum().item()

    said.append(refused(other_rate, "diverged"))
    said.append(refused(lambda: [rows().mul_(1 + rank), rows().sum().item()], "diverged"))
    said.append(refused(lambda: [rows().fill_(rank), rows().sum().item()], "diverged"))
    said.append(
        refused(
            lambda: [torch._foreach_mul_([rows()], 1.0 + rank), rows().sum().item()], "diverged"
        )
    )
    said.append(
        refused(
            lambda: [flow.full((2,), float(rank), placement=line(), sbp=B), rows().sum().item()],
            "diverged",
        )
    )

    def other_seed() -> None:
        torch.manual_seed(rank)
        nn.functional.dropout(rows()).sum().item()

    said.append(refused(other_seed, "random seed"))
    torch.manual_seed(0)
    rows().sum().item()
    return said


def test_divergence_is_told_on_every_rank() -> None:
    same_on_all(run_on(2, diverging))


def on_gloo_pool() -> None:
    assert world().comm((0, 1)).peers(torch.device("cpu")) is None  # type: ignore[attr-defined]
    diverging()


def test_divergence_is_told_over_gloo(fresh_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOBALTENSOR_SHARED_MEMORY", "0")
    fresh_pool(2).run(on_gloo_pool)


class Called(flow.nn.Graph):  # type: ignore[misc]
    """A function as a graph."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def graph_refused(body: Any, *patterns: str) -> str:
    return refused(body, *patterns, errors=(GraphError, DivergenceError))


def same_number_of_bytes() -> list[str]:
    """Diverge in the dtype or layout, where all messages have the same number of bytes."""
    rank, said = flow.env.get_rank(), []

    def square(sbp: Any = B) -> Any:
        return torch.arange(16.0).view(4, 4).to_global(line(), B).to_global(sbp=sbp)  # type: ignore[attr-defined]

    for dtypes in (
        (torch.float32, torch.int32),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.int64),
    ):
        names = [re.escape(f"({flow_name[dtype]}[4, 4] S(0), int)") for dtype in dtypes]
        mine = dtypes[rank]

        def cast(x: Any, dtype: torch.dtype = mine) -> Any:
            return (x.to(dtype) * 2).to_global(sbp=B)

        said.append(refused(lambda cast=cast: cast(square(S(0))), *names))  # type: ignore[misc]
        graph = Called(cast)
        said.append(graph_refused(lambda graph=graph: graph(square(S(0))), *map(str, dtypes)))  # type: ignore[misc]
        graph = Called(lambda x: (x * 2).to_global(sbp=B))
        both = [square(S(0)).to(dtype) for dtype in dtypes]
        for x in both:
            graph(x)  # captured for each dtype
        said.append(graph_refused(lambda graph=graph, both=both: graph(both[rank])))  # type: ignore[misc]
    layouts = r"f32\[4, 4\] S\(0\)", r"f32\[4, 4\] S\(1\)"
    mine = S(rank)
    said.append(refused(lambda: square(mine).to_global(sbp=B), *layouts))
    said.append(refused(lambda: square(mine).exp().to_global(sbp=B), *layouts))
    said.append(refused(lambda: square(mine).sum().item(), *layouts))
    graph = Called(lambda x: x.to_global(sbp=mine).exp().to_global(sbp=B))
    said.append(graph_refused(lambda: graph(square()), *layouts))
    graph = Called(lambda x: x.exp().to_global(sbp=B))
    for x in (square(S(0)), square(S(1))):
        graph(x)  # captured for each layout
    said.append(graph_refused(lambda: graph(square(mine))))
    return said


flow_name = {
    torch.float32: "f32",
    torch.int32: "i32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int64: "i64",
}


def test_divergence_without_another_number_of_bytes_is_told() -> None:
    same_on_all(run_on(2, same_number_of_bytes))


def on_a_grid() -> list[str]:
    """Diverge on four ranks in two axes: on one rank, a row of ranks or a column of ranks."""
    rank, said, square = flow.env.get_rank(), [], square_on_a_grid
    for odd in (rank == 3, rank > 1, rank % 2 == 1):
        k, operation = (3, torch.sin) if odd else (2, torch.cos)
        for layout in ((S(0), S(1)), (S(1), S(0)), (S(0), S(0))):
            x = square(*layout)
            said.append(refused(lambda x=x, k=k: (x * k).sum().item(), "diverged"))  # type: ignore[misc]
            said.append(
                refused(lambda x=x, f=operation: f(x).sum().item(), r"cos\(f32", r"sin\(f32")  # type: ignore[misc]
            )
        graph = Called(lambda x, k=k: (x * k).sum())  # type: ignore[misc]
        said.append(
            graph_refused(lambda graph=graph: graph(square(S(0), S(1))).item(), "another graph")  # type: ignore[misc]
        )
    return said


def test_divergence_on_a_grid_is_told_on_every_rank() -> None:
    same_on_all(run_on(4, on_a_grid))


def one_column(axis: int) -> None:
    """Read a sum over the ranks of one axis. Ranks 0 and 2, or 0 and 1, meet no odd rank there."""
    x = square_on_a_grid(*((S(0), B), (B, S(1)))[axis])
    (x * (3 if flow.env.get_rank() == 3 else 2)).sum().item()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.sweep(2)
def test_divergence_in_one_column_of_a_grid_ends_the_job(axis: int) -> None:
    codes, said = forked(4, one_column, axis)
    for rank in (3, (1, 2)[axis]):
        assert codes[rank] == 1
        assert "DivergenceError: test_divergence.py" in said[rank]
        assert "the ranks have diverged" in said[rank]
    assert None not in codes


@needs_mpi
def test_divergence_is_told_over_mpi() -> None:
    same_on_all(run_by_mpi(2, diverging))


def late() -> int:
    """Over gloo, check that later collectives are compared at intervals: a divergence raises an
    error within one interval."""
    comm = world().comm((0, 1))
    while comm._collectives < ALWAYS_COMPARED + 3:
        rows().sum().item()
    if flow.env.get_rank():
        rows() * 3
    for i in range(COMPARED_EVERY + 1):
        try:
            rows().sum().item()
        except DivergenceError:
            return i
    return -1


def test_later_collectives_are_compared_at_intervals(
    fresh_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [n for n in range(1, 100) if due(n)] == [
        *range(1, ALWAYS_COMPARED + 1),
        *range(ALWAYS_COMPARED + COMPARED_EVERY, 100, COMPARED_EVERY),
    ]
    assert [n for n in range(1000, 1100) if due(n)] == [1000, 1008, 1016, 1024, 1088]
    monkeypatch.setenv("GLOBALTENSOR_SHARED_MEMORY", "0")
    first, second = fresh_pool(2).run(late)
    assert first == second >= 0


def alone() -> None:
    """Run what one rank may do alone: read replicated tensors, plain tensors and its own local
    tensor."""
    x = rows()
    whole, loss = x.to_global(sbp=B), x.sum().to_global(sbp=B)
    value = x.numpy()
    if flow.env.get_rank() == 0:
        assert str(whole).replace(" ", "").startswith("tensor([[0.,1.,2.]")
        assert float(loss) == 66.0
        assert f"{loss:.1f}" == "66.0"
        assert whole.tolist()[3] == [9.0, 10.0, 11.0]
        assert value.sum() == 66.0
        assert (x.to_local() * 2).sum() == 30.0
        assert (x.shape, x.sbp, x.detach().dtype) == ((4, 3), (S(0),), torch.float32)
    assert x.sum().item() == 66.0


def test_what_one_rank_may_do_alone() -> None:
    run_on(2, alone)


def gradients_cleared() -> list[str]:
    """Clear gradients on one rank alone, or other ones than the other rank does."""
    rank, where = flow.env.get_rank(), line()

    def made() -> Any:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to_global(where, B)  # type: ignore[operator]

    def first(model: Any) -> None:
        model[0].zero_grad()

    def second(model: Any) -> None:
        model[1].zero_grad()

    def one(model: Any) -> None:
        model[0].weight.grad = None

    def by_optimizer(model: Any) -> None:
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()

    def none(model: Any) -> None:
        pass

    said = []
    for mine in ((first, second), (first, none), (by_optimizer, one), (one, none)):
        model = made()

        def step(clear: Any = mine[rank], m: Any = model) -> None:
            m(rows()).sum().backward()
            clear(m)
            m(rows()).sum().backward()
            m[0].weight.grad.sum().item()

        said.append(refused(step, "diverged"))
    return said


def test_gradients_cleared_on_one_rank_raise_an_error() -> None:
    same_on_all(run_on(2, gradients_cleared))


def caught_on_one_rank() -> str:
    x = torch.eye(2).repeat(4, 1, 1)
    x[3] = -x[3]
    where = flow.placement.all("cpu")
    g = flow.tensor(x, placement=where, sbp=flow.sbp.split(0))
    try:
        for jitter in (0.0, 2.0):
            with contextlib.suppress(torch.linalg.LinAlgError):
                root = torch.linalg.cholesky(g + jitter * torch.eye(2))
                break
        root.sum().item()
    except DivergenceError as error:
        return str(error)
    return ""


def test_reports_name_an_error_that_one_rank_has_caught() -> None:
    first, second = run_on(2, caught_on_one_rank)
    assert first == second
    assert "rank 1 had an error before: _LinAlgError at test_divergence.py:" in first
