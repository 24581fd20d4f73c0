"""Tests of ranks that diverge, plain tensors that differ and replicas that were changed. By default
every rank raises an error, which starts with the user's line."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import forked
from support.launched import Launched
from support.mpi import needs_mpi, run_by_mpi
from support.pool import run_on
from support.refused import refused
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import globaltensor as flow
from globaltensor._base.tracebacks import shortened
from globaltensor.distributed.divergence import ALWAYS_COMPARED, COMPARED_EVERY, due
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError, GlobalTensorError, GraphError, SbpError, ShapeError
from globaltensor.utils.data import GlobalBatches

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def line() -> Any:
    return flow.placement.all("cpu")


def rows(sbp: Any = None) -> Any:
    return (
        torch.arange(12.0)
        .view(4, 3)
        .to_global(line(), B)
        .to_global(sbp=S(0) if sbp is None else sbp)
    )  # type: ignore[attr-defined]


def same_on_all(said: list[Any]) -> None:
    assert all(each == said[0] for each in said), said


# ------------------------------------------------------------------------------------ plain tensors


def plain_inputs() -> list[str]:
    rank, where, said = flow.env.get_rank(), line(), []
    mine = torch.full((4, 3), float(rank))
    mends = (
        r"test_divergence.py:\d+: ",
        r"to_global\(placement, sbp=flow.sbp.split\(0\)\)",
        r"to_global\(placement, sbp=flow.sbp.broadcast\)",
    )
    held = (
        r"rank 0: float32\[4, 3\] of \[0, 0, 0, ...\]",
        r"rank 1: float32\[4, 3\] of \[1, 1, 1, ...\]",
    )
    model = flow.parallelize(nn.Linear(3, 2), where, "data")
    said.append(refused(lambda: model(mine).sum().backward(), "operand 0 of linear", *held, *mends))
    for _ in range(3):  # the same batch on all ranks is allowed
        model(torch.ones(4, 3)).sum().backward()
    said.append(refused(lambda: rows() + mine, "operand 1 of add", *held, *mends))
    said.append(refused(lambda: torch.add(mine, rows()), "operand 0 of add", *held))
    said.append(refused(lambda: rows().mul_(mine), "operand 1 of mul_", *held))
    said.append(refused(lambda: rows().copy_(mine), "copy_", *held))
    said.append(refused(lambda: mine.clone().add_(rows()), "target of add_", *held))
    said.append(refused(lambda: torch.where(rows() > 3, rows(), mine), "where", *held))
    said.append(
        refused(
            lambda: (rows(B) * 1.0).requires_grad_().backward(mine),
            "gradient given to backward",
            *held,
        )
    )
    said.append(refused(lambda: flow.tensor(mine.tolist(), placement=where, sbp=S(0)), *held))
    said.append(
        refused(
            lambda: flow.local_map(torch.add, S(0), (S(0), S(0)))(rows(), mine), "local_map", *held
        )
    )
    # Different shapes, such as the last batch of an epoch, count as different values.
    said.append(
        refused(
            lambda: model(torch.ones(4 - rank, 3)),
            r"rank 0: float32\[4, 3\]",
            r"rank 1: float32\[3, 3\]",
            *mends,
        )
    )
    # Each rank draws a mask from its own seed.
    torch.manual_seed(rank)
    said.append(refused(lambda: rows() * torch.rand(4, 3), "torch.manual_seed with one number"))
    torch.manual_seed(0)
    # A target that is overwritten may hold any values.
    target = torch.full((4, 3), float(rank))
    target.copy_(rows())
    target[1:] = rows()[1:]
    assert torch.equal(target, torch.arange(12.0).view(4, 3))
    # NaN on all ranks counts as equal.
    assert torch.isnan(rows() + torch.tensor(float("nan"))).all()
    return said


def test_plain_tensors_that_differ_are_refused_at_the_first_meeting() -> None:
    same_on_all(run_on(2, plain_inputs))
    same_on_all(simulate(2, plain_inputs, timeout=30.0))


#: The ways to say that each rank brings its rows, which the error names for every plan.
WAYS = (
    r"flow\.utils\.data\.GlobalDataLoader\(dataset, batch_size, placement=placement\)",
    r"GlobalBatches\(loader, placement\)",
    r"flow\.utils\.data\.DistributedSampler",
    r"x\.to_global\(placement, sbp=flow\.sbp\.split\(0\)\)",
    r"x\.to_global\(placement, sbp=flow\.sbp\.broadcast\)",
    r"several axes .* one entry for each axis",
)


def batches_of_a_loop(plans: list[str], ranks: Any) -> list[str]:
    """Return what a training loop is told in which each rank brings its own batches, per plan."""
    where, rank, said = flow.placement("cpu", ranks), flow.env.get_rank(), []
    data = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12.0)[:, None])
    for plan in plans:
        model = flow.parallelize(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)), where, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [p.detach().clone().numpy() for p in model.parameters()]
        sampler = DistributedSampler(data, flow.env.get_world_size(), rank, shuffle=False)
        batches = DataLoader(data, batch_size=2, sampler=sampler)

        def step(x: torch.Tensor, y: torch.Tensor, m: Any = model, o: Any = optimizer) -> None:
            o.zero_grad()
            nn.functional.mse_loss(m(x), y).backward()
            o.step()

        x, y = next(iter(batches))
        held = tuple(rf"ranks? {r}: float32\[2, 2\] of" for r in range(flow.env.get_world_size()))
        text = refused(lambda: step(x, y), r"^test_divergence.py:\d+: ", *held, *WAYS)  # noqa: B023
        said.append(f"{plan}: {text}")
        for p, old in zip(model.parameters(), before, strict=True):
            assert (p.detach().numpy() == old).all(), "no step with one rank's rows"
        sbp = [S(0)] * where.axes
        for own, label in GlobalBatches(batches, where, sbp):  # the ways that the error names work
            step(own, label)
        step(x.to_global(where, sbp=sbp), y.to_global(where, sbp=sbp))  # type: ignore[attr-defined]
    return said


def test_own_batches_are_refused_under_every_plan() -> None:
    same_on_all(run_on(2, batches_of_a_loop, ["data", "fsdp", "tensor"], [0, 1]))


def test_own_batches_are_refused_under_a_plan_of_two_axes() -> None:
    same_on_all(run_on(4, batches_of_a_loop, ["hybrid"], [[0, 1], [2, 3]]))


def later_and_elsewhere() -> None:
    """Check that a source line is compared repeatedly, less and less often, and that every line has
    its own count."""
    rank, x = flow.env.get_rank(), rows()

    def place(i: int) -> None:
        x + torch.full((3,), float(rank * (i >= 200)))  # differs from the 200th call on

    def many() -> int:
        for i in range(400):
            try:
                place(i)
            except DivergenceError:
                world().forget()
                return i
        return -1

    at = many()
    assert 200 <= at < 240, at
    for tower in (0.0, 0.0, float(rank)):  # the third of three uses in one loop
        if tower == 0.0:
            x + torch.full((3,), tower)

    def towers() -> None:
        for tower in (0.0, 0.0, float(rank)):
            x + torch.full((3,), tower)

    with pytest.raises(DivergenceError):
        towers()
    world().forget()
    world().comm((0, 1)).barrier()


def test_a_place_is_looked_at_again() -> None:
    run_on(2, later_and_elsewhere)


class Doubled(flow.nn.Graph):  # type: ignore[misc]
    """A model as a graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) * 2


def graph_inputs() -> str:
    graph = Doubled(flow.parallelize(nn.Linear(3, 2), line(), "data"))
    graph(torch.ones(4, 3))
    text = refused(
        lambda: graph(torch.full((4, 3), float(flow.env.get_rank()))),
        "input 0 of Doubled_",
        r"rank 1: float32\[4, 3\] of \[1, 1, 1, ...\]",
    )
    graph(torch.ones(4, 3))
    alone = flow.nn.Graph.trace(lambda x: x * 2)  # plain inputs alone may differ by rank
    assert alone(torch.full((2,), float(flow.env.get_rank())))[0] == 2 * flow.env.get_rank()
    return text


def test_plain_inputs_of_graphs() -> None:
    same_on_all(run_on(2, graph_inputs))


def ranks_outside() -> None:
    """Check that a rank outside the placement may hold any values, and that ranks of different
    placements need not agree."""
    rank = flow.env.get_rank()
    pair = flow.placement("cpu", [1, 3])
    x = torch.ones(4).to_global(pair, S(0), check_meta=False)  # type: ignore[attr-defined]
    y = x + torch.full((8,), float(rank in (1, 3)))
    assert y.to_global(placement=line(), sbp=B).to_local().tolist() == [2.0] * 8
    mine = flow.placement("cpu", [0, 1] if rank < 2 else [2, 3])
    # each pair has its own replicas
    z = torch.ones(4).to_global(mine, B, check_meta=False) * (2 if rank < 2 else 3)  # type: ignore[attr-defined]
    assert (z + torch.full((4,), float(rank // 2))).to_local()[0] == (2 if rank < 2 else 4)
    # Ranks run this line with tensors of several placements, not all of them equally often.
    for place in (pair, line(), pair, pair, line(), line()):
        torch.ones(4, 2).to_global(place, B, check_meta=False) + torch.full(
            (2,), float(place is pair)
        )  # type: ignore[attr-defined]
    world().comm(tuple(range(4))).barrier()
    with pytest.raises(DivergenceError, match=r"ranks? 3"):
        x + torch.full((8,), float(rank)) if rank in (1, 3) else _raise()
    world().forget()


def _raise() -> None:
    raise DivergenceError("ranks 3: only those of the placement compare")


@pytest.mark.extended
def test_placements_compare_their_own_ranks() -> None:
    run_on(4, ranks_outside)


# ------------------------------------------------------------------------------------- data loaders


def loaders() -> None:
    rank, size, where = flow.env.get_rank(), flow.env.get_world_size(), line()
    data = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12))
    loader = DataLoader(
        data, batch_size=2, sampler=DistributedSampler(data, size, rank, shuffle=False)
    )
    batches = GlobalBatches(loader, where)
    assert len(batches) == len(loader) == 3
    for _ in range(2):  # epochs
        seen = []
        for x, label in batches:
            assert x.sbp == label.sbp == (S(0),)
            assert x.shape == (2 * size, 2)
            seen += label.tolist()
        assert sorted(seen) == list(range(12))
    # Batches may be dicts and contain 0-dim tensors and values that are not tensors.
    one = [
        {"x": torch.full((2, 3), float(rank)), "scale": torch.tensor(2.0), "name": f"rank {rank}"}
    ]
    (batch,) = GlobalBatches(one, where)
    assert batch["x"].tolist() == [[float(r)] * 3 for r in range(size) for _ in range(2)]
    assert batch["scale"].sbp == (B,)
    assert batch["name"] == f"rank {rank}"
    with pytest.raises(
        GlobalTensorError,
        match=r"loader of rank 1 has ended after 1 batches, that of rank 0 has more",
    ):
        list(GlobalBatches([torch.ones(2)] * (2 - rank), where))
    assert len(list(GlobalBatches([torch.ones(2)] * (2 - rank), where, uneven="stop"))) == 1
    with pytest.raises(ShapeError, match="do not form one tensor"):
        list(GlobalBatches([torch.ones(2 + 3 * rank)], where))
    assert next(iter(GlobalBatches([torch.ones(3 - rank)], where))).shape == (5,)
    with pytest.raises(GlobalTensorError, match="numbers of tensors by rank"):
        list(GlobalBatches([(torch.ones(2),) * (1 + rank)], where))
    refused(
        lambda: list(GlobalBatches([torch.full((2,), float(rank))], where, B)), "read the same rows"
    )
    for wrong in ({"uneven": "pad"}, {"sbp": P}):
        with pytest.raises(GlobalTensorError):
            GlobalBatches([], where, **wrong)


def loaders_on_four() -> None:
    rank, square = flow.env.get_rank(), flow.placement("cpu", [[0, 1], [2, 3]])
    with pytest.raises(SbpError, match="give sbp"):
        GlobalBatches([], square)
    (x,) = GlobalBatches([torch.full((2,), float(rank // 2))], square, [S(0), B])
    assert x.tolist() == [0, 0, 1, 1]
    refused(
        lambda: list(GlobalBatches([torch.full((2,), float(rank))], square, [S(0), B])),
        "read the same rows",
    )
    pair = flow.placement("cpu", [0, 2])
    found = list(
        GlobalBatches([torch.full((2,), float(rank))] if rank in (0, 2) else (), pair)
    )  # ranks outside the placement iterate, too
    assert [x.shape for x in found] == [(4,)]


def test_each_rank_brings_its_rows() -> None:
    run_on(2, loaders)
    run_on(4, loaders_on_four)


# --------------------------------------------------------------------------------------- operations


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
            r"rank 0 has run cos\(f32\[4, 3\] S\(0\)\), which rank 1 has not",
        )
    )
    said.append(refused(lambda: (rows() * (2 + rank)).sum().item(), "with other numbers"))
    said.append(
        refused(
            lambda: (rows()[rank]).sum().item(),
            r"rank 1 has run __getitem__\(f32\[4, 3\] S\(0\), 1\), which rank 0 has not",
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


def square_on_a_grid(*sbp: Any) -> Any:
    grid = flow.placement("cpu", [[0, 1], [2, 3]])
    return torch.arange(16.0).view(4, 4).to_global(grid, [B, B]).to_global(sbp=list(sbp))  # type: ignore[attr-defined]


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


# ----------------------------------------------------------------------------------------- replicas


def replicas() -> list[str]:
    rank, where, said = flow.env.get_rank(), line(), []
    model = flow.parallelize(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), where, "data"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    flow.check_replicas(model, optimizer, [rows(), rows(B), torch.ones(2)])
    with torch.no_grad():
        model[2].weight.to_local()[0, 0] += rank  # type: ignore[index, operator]
    said.append(
        refused(
            lambda: flow.check_replicas(model),
            r"of 1 tensor",
            r"2.weight: rank 0: \w+; rank 1: \w+",
            r"x.to_local\(\).to_global",
        )
    )
    with torch.no_grad():
        weight: Any = model[2].weight  # type: ignore[index]
        weight.copy_(weight.to_local().to_global(where, B))
    flow.check_replicas(model)
    optimizer.state[weight]["exp_avg"].to_local()[0, 0] += rank
    said.append(
        refused(lambda: flow.check_replicas(optimizer), "state exp_avg of parameter 4 in group 0")
    )
    said.append(refused(lambda: flow.check_replicas(torch.full((2,), float(rank))), "argument 0"))
    said.append(
        refused(lambda: flow.check_replicas({"a": rows(B), "b": [torch.ones(1 + rank)]}), "b.0")
    )
    split = flow.parallelize(nn.Linear(4, 4), where, "fsdp")
    with torch.no_grad():
        split.weight.to_local().mul_(1.0 + rank)  # type: ignore[union-attr,operator]
    flow.check_replicas(split)  # local tensors of a split parameter may differ by rank
    return said


def test_check_replicas() -> None:
    same_on_all(run_on(2, replicas))


def replicas_on_a_grid() -> list[str]:
    rank, said = flow.env.get_rank(), []
    for layout, bad, pattern in (
        ((B, S(1)), 3, r"w: rank 1: \w+; rank 3: \w+"),
        ((S(0), B), 1, r"w: rank 0: \w+; rank 1: \w+"),
        ((B, B), 2, r"w: ranks 0, 1, 3: \w+; rank 2: \w+"),
    ):
        w = square_on_a_grid(*layout)
        flow.check_replicas({"w": w})
        with flow.check_ranks():
            assert (w * 2).sum().item() == 240.0
        w.to_local().add_(float(rank == bad))
        said.append(refused(lambda w=w: flow.check_replicas({"w": w}), "of 1 tensor", pattern))  # type: ignore[misc]

        def guarded(w: Any = w) -> None:
            with flow.check_ranks():  # the sum joins all ranks, more than those with one replica
                (w * square_on_a_grid(S(0), S(1))).sum().item()

        said.append(refused(guarded, "replicas differ", "operand 0 of mul", f"on rank {bad}"))
    w = square_on_a_grid(S(0), S(1))
    w.to_local().add_(float(rank))
    flow.check_replicas(w)
    model = flow.parallelize(nn.Linear(4, 4), w.placement, ["data", "fsdp"])
    with torch.no_grad():
        model.weight.to_local().add_(float(rank == 2))  # type: ignore[operator, union-attr]
    said.append(refused(lambda: flow.check_replicas(model), "weight: rank 0: .*; rank 2: "))
    return said


def test_check_replicas_on_a_grid() -> None:
    same_on_all(run_on(4, replicas_on_a_grid))


def replicas_of_a_graph() -> list[str]:
    rank, said = flow.env.get_rank(), []
    model = flow.parallelize(nn.Linear(3, 2), line(), "data")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    class Train(flow.nn.Graph):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(x).square().mean()
            loss.backward()
            return loss

    graph = Train()
    for _ in range(2):
        graph(rows())
    flow.check_replicas(model, optimizer)
    state: Any = optimizer.state[model.weight]["exp_avg"]
    state.to_local()[0, 0] += rank
    said.append(refused(lambda: flow.check_replicas(optimizer), "exp_avg of parameter 0"))
    state.to_local()[0, 0] -= rank
    state.copy_(state.to_local().to_global(line(), B))
    with torch.no_grad():
        model.weight.to_local()[0, 0] += rank  # type: ignore[index, operator, union-attr]
    graph(rows())
    said.append(refused(lambda: flow.check_replicas(model), r"weight: rank 0: \w+; rank 1: "))
    return said


def test_check_replicas_of_a_model_in_a_graph() -> None:
    same_on_all(run_on(2, replicas_of_a_graph))


def replicas_in_guard_mode() -> str:
    w = torch.ones(3).to_global(line(), B)  # type: ignore[attr-defined]
    with flow.check_ranks():
        (rows() * w).sum().item()
        if flow.env.get_rank():
            w.to_local()[0] = 5.0
        with pytest.raises(DivergenceError) as found:
            (rows() * w).sum().item()
    world().forget()
    text = str(found.value)
    assert re.search(
        r"replicas differ: ranks 0 and 1 hold .*\n  operand 1 of mul f32\[3\] B \(\w+\) on rank "
        r"0, .* on rank 1  \(test_divergence.py:\d+: ",
        text,
    )
    return text


def test_the_guard_compares_replicas() -> None:
    same_on_all(run_on(2, replicas_in_guard_mode))


# -------------------------------------------------------------------------------- complete programs

PROGRAM = """
import torch
import globaltensor as flow
rank = flow.env.get_rank()
B, S = flow.sbp.broadcast, flow.sbp.split
x = torch.arange(12.).view(4, 3).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))
"""
READS = {
    "print": "print(x)",
    "item": "total = (x * x).sum().item()",
    "logging": 'import logging; logging.warning("%s", x)',
    # as torch.utils.tensorboard reads a value, in a function of a library
    "writer": 'writer.add_scalar("loss", x.sum(), 1)',
}
WRITER = """
class SummaryWriter:
    def add_scalar(self, tag, value, step):
        self.value = value.detach().cpu().numpy()
"""
LAST = PROGRAM + "print((x * (2 + rank)).to_local().sum())\n"
OWN_GROUP = (
    "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    + LAST
    + "dist.destroy_process_group()\n"
)


def launched(
    folder: Path, program: str, *options: str, warm: bool = True, **variables: str
) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text(program)
    with Launched(
        folder,
        "--nproc_per_node",
        2,
        *options,
        script,
        warm=warm,
        OMP_NUM_THREADS="1",
        **variables,
    ) as running:
        code = running.code()
    return code, running.err


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize(
    ("shared", "backend"),
    [
        ("1", "gloo"),
        ("0", "gloo"),
        pytest.param("1", "mpi", marks=[needs_mpi, pytest.mark.extended]),
    ],
    ids=["shared memory", "gloo", "mpi"],
)
def test_a_value_read_on_one_rank_is_told_in_few_lines(
    tmp_path: Path, shared: str, backend: str, reads: str
) -> None:
    (tmp_path / "writers.py").write_text(WRITER)
    program = PROGRAM + "from writers import SummaryWriter\nwriter = SummaryWriter()\n"
    code, said = launched(
        tmp_path,
        f"{program}if rank == 0:\n    {READS[reads]}\n",
        "--backend",
        backend,
        warm=backend != "mpi",
        GLOBALTENSOR_SHARED_MEMORY=shared,
    )
    assert code == 1
    # a log call shows all its callers, among them those that run this program as __main__
    said = re.sub(r".*File .*/support/warm_python/.*\n.*\n", "", said)
    own, _, summary = said.partition("globaltensor.launch:")
    line = re.escape(READS[reads])
    for text in (own, summary):  # the rank's error and the launcher's summary say the same
        assert re.search(
            rf"File \".*train.py\", line 10, in <module>\n.*{line}\n(.*writers.py.*\n.*\n)?"
            rf".*WorldError: (train.py:10: {line}|writers.py:4: .*)\n",
            text,
        ), text
        assert (
            "Printing, item() and numpy() of a global tensor are collective: call them on every "
            "rank, or box to broadcast first" in text
        )
        assert "/globaltensor/" not in text
        assert "/logging/" not in text
        assert "GLHF" not in text
        # the program goes on after a log call, so its end tells of the divergence, in 3 lines
        assert len(text.splitlines()) < 12 + 3 * (reads == "logging"), text


def test_all_frames_of_an_error_are_shown_on_request(tmp_path: Path) -> None:
    for reads in ("print", "logging"):
        code, said = launched(
            tmp_path,
            f"{PROGRAM}if rank == 0:\n    {READS[reads]}\n",
            GLOBALTENSOR_TRACEBACK="full",
        )
        assert code == 1
        assert "/globaltensor/boxing/" in said


@pytest.mark.parametrize("program", [LAST, OWN_GROUP], ids=["world of ours", "group of the user"])
@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.sweep(4)
def test_a_divergence_after_the_last_collective_is_told_at_the_end(
    tmp_path: Path, shared: str, program: str
) -> None:
    code, said = launched(tmp_path, program, GLOBALTENSOR_SHARED_MEMORY=shared)
    assert code == 1
    assert "DivergenceError: the ranks have diverged" in said
    assert "This was found when the program ended" in said
    code, said = launched(
        tmp_path, program.replace("2 + rank", "2"), GLOBALTENSOR_SHARED_MEMORY=shared
    )
    assert (code, said) == (0, ""), said


def test_errors_show_the_lines_of_the_user_alone() -> None:
    with pytest.raises(SbpError) as found:
        rows().to_global(sbp=S(7))
    lines = shortened(found.value)
    assert lines is not None
    text = "".join(lines)
    assert __file__ in text
    assert os.path.dirname(flow.__file__) not in text
    assert "SbpError: sbp splits dim 7" in text
    assert found.value._render_traceback_()[0] == "Traceback (most recent call last):"  # type: ignore[attr-defined]
    assert shortened(ValueError("mine")) is None


REFUSED_BY_TORCH: list[tuple[type[Exception], str, Callable[[torch.Tensor], Any]]] = [
    (RuntimeError, "mat1 and mat2 shapes", lambda x: nn.Linear(7, 2)(x)),
    (RuntimeError, "same dtype", lambda x: nn.Linear(x.shape[1], 2)(x.double())),
    (RuntimeError, "same dtype", lambda x: nn.Linear(x.shape[1], 2)(x.long())),
    (ValueError, "to match target batch_size", lambda x: loss_of(x, torch.tensor([1]))),
    (RuntimeError, "target dtype", lambda x: loss_of(x, torch.zeros(len(x)))),
    (IndexError, "out of bounds", lambda x: x[:, 99]),
]
loss_of = nn.functional.cross_entropy


@pytest.mark.parametrize(("kind", "says", "call"), REFUSED_BY_TORCH)
def test_calls_that_torch_refuses_show_the_lines_of_the_user_alone(
    kind: type[Exception], says: str, call: Callable[[torch.Tensor], Any]
) -> None:
    for _ in range(2):  # a call that is planned the first time, and perhaps cached then
        with pytest.raises(kind, match=says) as found:
            call(rows())
        assert "KeyError" not in "".join(traceback.format_exception(found.value))
        lines = shortened(found.value)
        assert lines is not None
        text = "".join(lines)
        assert says in text
        assert __file__ in text
        assert os.path.dirname(flow.__file__) not in text
        assert os.path.dirname(torch.__file__) not in text


UNSEEDED = """
from typing import Any
import torch
from torch import nn
import globaltensor as flow
B = flow.sbp.broadcast
"""


def unseeded() -> tuple[list[float], float, list[float]]:
    """Draw in a program without a seed: torch gives each process a different seed."""
    where = line()
    own = torch.initial_seed()
    x = flow.randn(3, placement=where, sbp=B)
    dropped = nn.functional.dropout(torch.ones(64).to_global(where, B))  # type: ignore[attr-defined]
    return x.tolist(), float(own), dropped.to_local().tolist()


def test_without_a_seed_all_ranks_draw_the_first_ones_numbers(tmp_path: Path) -> None:
    functions = "".join(map(inspect.getsource, (line, unseeded)))
    script = tmp_path / "train.py"
    script.write_text(f"{UNSEEDED}{functions}print(unseeded())\n")
    with Launched(tmp_path, "--nproc_per_node", 2, script, OMP_NUM_THREADS="1") as running:
        assert running.code() == 0, running.err
    first, second = sorted(
        re.sub(r"^\[\w+\]:", "", each) for each in running.out.strip().splitlines()
    )
    (x, seed, dropped), (y, other, dropped_too) = eval(first), eval(second)
    assert (x, dropped) == (y, dropped_too)
    assert seed != other
