"""Tests of the simulated world: collectives, failures and waits."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
from support.program import run

from globaltensor.distributed.communicator import Traffic, combine, record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import ProcessWorld, world
from globaltensor.distributed.world_base import World
from globaltensor.errors import WorldError


def test_every_rank_sees_its_own_world() -> None:
    assert simulate(3, lambda: (world().rank, world().size)) == [(0, 3), (1, 3), (2, 3)]
    assert world().size == 1


def test_collectives_keep_the_order_of_ranks() -> None:
    order = (2, 0, 3, 1)

    def run() -> tuple[object, ...]:
        here, comm = world().rank, world().comm(order)
        t = torch.full((here,), here)
        sends = [torch.full((2,), 10 * here + r) for r in order]
        with record_collectives() as log:
            out = (
                [p.tolist() for p in comm.all_gather(t, list(order))],
                comm.all_reduce(torch.tensor([here, 1])).tolist(),
                comm.all_reduce(torch.tensor([here == 3, True]), "min").tolist(),
                [p.tolist() for p in comm.all_to_all(sends, [2] * 4)],
                comm.reduce_scatter(sends).tolist(),
                comm.broadcast(torch.tensor([here]), 2).tolist(),
                comm.all_gather_object(here),
                {
                    k: v.tolist()
                    for k, v in comm.exchange(
                        {(comm.index + 1) % 4: t}, {(comm.index - 1) % 4: order[comm.index - 1]}, t
                    ).items()
                },
            )
        assert log[0] == Traffic("all_gather", order, 36)
        return out

    for rank, (gathered, total, every, swapped, scattered, one, objects, ring) in enumerate(
        simulate(4, run)
    ):
        assert gathered == [[r] * r for r in order]
        assert total == [6, 4]
        assert every == [False, True]
        assert swapped == [[10 * r + rank] * 2 for r in order]
        assert scattered == [60 + 4 * rank] * 2
        assert one == [3]
        assert objects == list(order)
        left = order[order.index(rank) - 1]
        assert ring == {order.index(left): [left] * left}


def test_inputs_stay_and_results_are_fresh() -> None:
    def run() -> None:
        comm, t = world().comm((0, 1)), torch.arange(6.0).reshape(2, 3).T
        before = t.clone()
        for got in (
            comm.all_reduce(t),
            *comm.all_gather(t, [6, 6]),
            comm.reduce_scatter([t, t]),
            comm.broadcast(t, 0),
            *comm.all_to_all([t, t], [6, 6]),
        ):
            got.add_(1)
        flat = torch.ones(4)
        comm.all_reduce_async(flat).wait()
        assert flat.tolist() == [2.0] * 4
        assert torch.equal(t, before)

    simulate(2, run)


@pytest.mark.parametrize("size", [0, 1, 5, 100_003])
def test_all_reduce_of_any_size(size: int) -> None:
    results = simulate(
        3,
        lambda: (
            world()
            .comm((0, 1, 2))
            .all_reduce(torch.arange(size, dtype=torch.float64) * (world().rank + 1))
        ),
    )
    for r in results:
        torch.testing.assert_close(r, torch.arange(size, dtype=torch.float64) * 6)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_reductions_of_every_dtype() -> None:
    integers = (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int64,
    )
    for dtype in (
        *integers,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex32,
        torch.complex128,
    ):
        parts = [torch.tensor(v).to(dtype) for v in ([1, 0, 3], [2, 0, 1], [4, 0, 1])]
        assert combine(parts, "sum").to(torch.complex128).real.tolist() == (
            [1, 0, 1] if dtype is torch.bool else [7, 0, 5]
        )
        if not dtype.is_complex:
            assert combine(parts, "max").to(torch.float64).tolist() == (
                [1, 0, 1] if dtype is torch.bool else [4, 0, 3]
            )
            assert combine(parts, "min").to(torch.float64).tolist() == [1, 0, 1]
    top = torch.tensor([2**63 + 5, 3], dtype=torch.uint64)
    assert combine([top, torch.tensor([7, 4], dtype=torch.uint64)], "max").tolist() == [
        2**63 + 5,
        4,
    ]
    # bf16 values are added in float32 and rounded once
    assert combine(
        [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)], "sum"
    ).tolist() == [258.0]


def test_a_failing_rank_ends_the_others() -> None:
    def run() -> None:
        if world().rank == 1:
            raise ValueError("broken")
        world().comm((0, 1, 2)).barrier()

    with pytest.raises(ValueError, match="broken") as caught:
        simulate(3, run)
    assert caught.value.__notes__ == ["(on simulated rank 1 of 3)"]


def test_a_rank_that_ends_early_is_named() -> None:
    with pytest.raises(
        WorldError,
        match="rank 0 waited in a collective among ranks \\[0, 1\\], but rank 1 has ended",
    ):
        simulate(2, lambda: world().comm((0, 1)).barrier() if world().rank == 0 else None)


def test_a_rank_that_never_comes_is_waited_for_a_bounded_time() -> None:
    done = threading.Event()
    with pytest.raises(WorldError, match=r"did not join within 0\.2 s"):
        simulate(
            2,
            lambda: world().comm((0, 1)).barrier() if world().rank == 0 else done.wait(0.5),
            timeout=0.2,
        )


def test_only_members_get_a_communicator() -> None:
    def run() -> None:
        here: World = world()
        assert here.comm((0, 1)) is here.comm((0, 1))
        with pytest.raises(WorldError, match="must be ranks of this job, this one included"):
            here.comm((1 - here.rank,))
        with pytest.raises(WorldError, match="must be ranks of this job"):
            here.comm((0, 1, 2))

    simulate(2, run)


# --------------------------------------------------------------------------------------------- GPUs


def test_ranks_share_the_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert simulate(3, lambda: str(world().device("cuda"))) == ["cuda:0", "cuda:1", "cuda:0"]
    over_gloo, over_nccl = (
        ProcessWorld(2, 3, 2, 1, owned=False),
        ProcessWorld(2, 3, 2, 1, owned=False),
    )
    over_nccl.backends = {"cuda": "nccl"}
    assert str(over_gloo.device("cuda")) == "cuda:0"
    with pytest.raises(
        WorldError,
        match=(
            r"rank 2 .* has no cuda device: PyTorch finds 2 on this machine. Start at most 2 "
            r"processes here, let ranks share GPUs with the backend gloo, or use the placement "
            r"type \"cpu\"$"
        ),
    ):
        over_nccl.device("cuda")
    assert str(over_nccl.outside("cuda")) == "cpu", (
        "what it holds of others' tensors is nothing, and may lie anywhere"
    )
    assert str(over_gloo.outside("cpu")) == "cpu"
    assert str(over_gloo.outside("npu")) == "cpu"


def test_without_gpus_nobody_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        WorldError,
        match=(
            r"PyTorch finds none on this machine. Use the placement type \"cpu\": "
            r"flow.placement.all\(\"cpu\"\). With a GPU, check the build of PyTorch and the "
            r"driver: globaltensor doctor$"
        ),
    ):
        ProcessWorld(0, 1, 0, 1, owned=False).device("cuda")


# ------------------------------------------------------------------------------------- collection

#: Garbage whose finalizer gives the interpreter to another thread, collected inside get_state.
COLLECTS_IN_GET_STATE = """
import gc, sys, weakref
import torch
from globaltensor.distributed.simulate import simulate

class Cycle:
    def __init__(self):
        self.itself = self

def rank():
    for _ in range(1000):
        gc.set_threshold(10**6)
        watched = [weakref.ref(Cycle(), lambda _: sum(range(3000))) for _ in range(3)]
        gc.set_threshold(1)
        torch.default_generator.get_state()

sys.setswitchinterval(1e-6)
simulate(2, rank)
print("ended")
"""


def test_a_collection_blocks_no_rank_that_reads_the_random_state() -> None:
    code, out = run([sys.executable, "-c", COLLECTS_IN_GET_STATE], 60)
    assert (code, out) == (0, "ended\n")


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_where_ranks_meet() -> None:
    def collected() -> int:
        watched = []
        for _ in range(20):
            watched += [weakref.ref(Cycle()) for _ in range(100)]
            world().comm((0, 1)).barrier()
        return sum(cycle() is None for cycle in watched)

    before = gc.get_threshold()
    gc.set_threshold(500, 10, 10)
    try:
        assert min(simulate(2, collected)) > 1000
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()
    with pytest.raises(ValueError, match="here"):
        simulate(2, fails)
    assert gc.isenabled()


def fails() -> None:
    raise ValueError("here")
