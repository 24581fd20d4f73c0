"""Tests of plain tensors among global ones that differ by rank: every rank raises an error, which
starts with the user's line and says both fixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from support.pool import run_on
from support.refused import refused
from support.rows import line, rows, same_on_all
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import globaltensor as flow
from globaltensor._tensor.plain_operands import _quick_digest
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError
from globaltensor.utils.data import GlobalBatches

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def plain_inputs() -> list[str]:
    rank, where, said = flow.env.get_rank(), line(), []
    mine = torch.full((4, 3), float(rank))
    mends = (
        r"test_plain_operands.py:\d+: ",
        r"to_global\(placement, sbp=flow.sbp.split\(0\)\)",
        r"to_global\(placement, sbp=flow.sbp.broadcast\)",
    )
    held = (
        r"rank 0: float32\[4, 3\] of \[0, 0, 0, ...\]",
        r"rank 1: float32\[4, 3\] of \[1, 1, 1, ...\]",
    )
    model = flow.parallelize(nn.Linear(3, 2), where, "data")
    said.append(refused(lambda: model(mine).sum().backward(), "operand 0 of linear", *held, *mends))
    torch.manual_seed(rank)
    forgotten = nn.Linear(2, 4)
    said.append(
        refused(
            lambda: forgotten(model(torch.ones(4, 3))),
            "operand 1 of linear",
            r"rank 0: parameter float32\[4, 2\] of ",
            r"flow\.parallelize\(module, placement, plan\) or module\.to_global\(placement, ",
        )
    )
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
        text = refused(lambda: step(x, y), r"^test_plain_operands.py:\d+: ", *held, *WAYS)  # noqa: B023
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


def one_late_use(way: str, calls: int = 100) -> list[str]:
    """Return what ranks are told whose plain tensors differ in the last of ``calls`` calls alone.

    At that call the ranks exchange no digest of the tensor. The next collective compares it."""
    said, x, graph = [], rows(), Doubled(flow.parallelize(nn.Linear(3, 2), line(), "data"))
    for size in (1, 3, 4096, 100_000):  # the larger ones are summed by chunks
        value = torch.arange(float(size))
        wide = torch.zeros(4, size).to_global(line(), B)  # type: ignore[attr-defined]

        def use(
            i: int, value: torch.Tensor = value, wide: torch.Tensor = wide, size: int = size
        ) -> None:
            own = value.clone()
            if i == calls and flow.env.get_rank() == 1:
                own[size // 2] += 1
            if way == "function":
                wide + own
            elif way == "parameter":
                wide + nn.Parameter(own)
            elif size == 3:
                graph(own.expand(4, 3).clone())

        def run() -> None:
            for i in range(1, calls + 1):
                use(i)
            for _ in range(9):  # over gloo and MPI one collective in eight is compared
                x.sum().item()

        if way != "graph" or size == 3:
            said.append(
                refused(
                    run,
                    r"^test_plain_operands.py:\d+: (wide|graph)",
                    {
                        "function": "operand 1 of add",
                        "parameter": "operand 1 of add",
                        "graph": "input 0 of Doubled_",
                    }[way],
                    rf"rank 0: {'parameter ' * (way == 'parameter')}float32\[.*{size}\] of \[0",
                    rf"rank 1: {'parameter ' * (way == 'parameter')}float32\[.*{size}\] of \[[01]",
                    "is a parameter" if way == "parameter" else r"flow\.sbp\.split\(0\)",
                )
            )
    return said


@pytest.mark.parametrize("way", ["function", "parameter", "graph"])
@pytest.mark.sweep(2)
def test_a_single_late_use_that_differs_is_found(way: str) -> None:
    same_on_all(run_on(2, one_late_use, way))


def equal_values_in_other_memory() -> None:
    """Check that the memory layout of equal plain tensors does not matter, nor what they hold
    besides: results of functional collectives, and tensors of zeros without memory."""
    rank, x = flow.env.get_rank(), rows()
    wide = {n: torch.zeros(n).to_global(line(), B) for n in (3, 20_000)}  # type: ignore[attr-defined]
    table = torch.arange(20_000.0).view(100, 200)
    turned = table.t().contiguous().t() if rank else table
    conjugate = torch.complex(torch.ones(3), torch.ones(3)).conj()
    for _ in range(40):
        for n, one in wide.items():
            one + (torch.ones(n) if rank else torch.ones(1).expand(n))
        wide[20_000].view(100, 200) * turned
        wide[3] * (conjugate if rank else conjugate.resolve_conj())
        wide[3] + torch._efficientzerotensor(3)
        for shape in ((3,), ()):
            wide[3] + fc.all_reduce(torch.ones(shape), "sum", dist.group.WORLD)
        for dtype in (torch.bool, torch.bfloat16, torch.uint8, torch.float8_e4m3fn):
            wide[3].to(dtype).copy_(torch.ones(3).to(dtype))
        wide[3] + torch.full((3,), float("nan"))
        wide[3] * torch.ones(())
        wide[3][:0] * torch.ones(0)
    assert x.sum().item() == 66.0


def test_plain_tensors_with_equal_values_are_equal() -> None:
    run_on(2, equal_values_in_other_memory)


def changed(change: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor of more than one chunk, and one with a small difference."""
    draw = torch.Generator().manual_seed(seed)
    if change == "one label of one-hot rows":
        labels = torch.randint(1000, (128,), generator=draw)
        other = labels.clone()
        other[seed % 128] = (labels[seed % 128] + 1 + seed) % 1000
        return F.one_hot(labels, 1000).float(), F.one_hot(other, 1000).float()
    if change == "two rows change places":
        x = torch.randn(256, 64, generator=draw)
        a, b = torch.randperm(256, generator=draw)[:2].tolist()
    else:
        x = torch.arange(8192)
        a, b = torch.randperm(8192, generator=draw)[:2].tolist()
    other = x.clone()
    other[a], other[b] = x[b], x[a]
    return x, other


@pytest.mark.parametrize(
    "change", ["one label of one-hot rows", "two rows change places", "two numbers change places"]
)
def test_digests_of_large_tensors_show_small_differences(change: str) -> None:
    for seed in range(200):
        one, other = changed(change, seed)
        assert _quick_digest(one, 0)[0] != _quick_digest(other, 0)[0], seed


@pytest.mark.parametrize("shape", [(1024, 2048), (4096, 2049), (3, 4096 * 2048), (9_000_001,)])
@pytest.mark.sweep(2)
def test_digests_of_very_large_tensors_read_every_row_in_turn(shape: tuple[int, ...]) -> None:
    """Up to 8 MiB all is read, above some rows at each use."""
    x = torch.zeros(shape)
    other = x.clone()
    other.view(-1)[-1] = 1
    turns = -(-x.nbytes // (1 << 23))
    found = [_quick_digest(x, i)[0] != _quick_digest(other, i)[0] for i in range(2 * turns)]
    assert any(found[:turns]), found
    assert found[turns:] == found[:turns]
    assert _quick_digest(x.to(torch.bool), 0)[1] == b"\0\0\0"


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
