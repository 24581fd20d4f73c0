"""Tests of flow.distributed, flow.comm and flow.env: every collective in every variant, a world
that starts automatically together with init_process_group, and the errors for mistakes."""

from __future__ import annotations

import datetime
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mpi import mpirun, needs_mpi
from support.pool import RanksFailed, run_on
from support.program import LAUNCH, run
from support.sweep import sweep
from support.warm_python import warmed

import globaltensor as flow
import globaltensor.distributed as dist
from globaltensor.distributed import rdma
from globaltensor.distributed.launch import reserved_port
from globaltensor.errors import KernelError, ShapeError, WorldError

# ------------------------------------------------------------------------------------------- values


#: Each part has every seventh call, and so every collective, dtype, reduction and layout.
PARTS = 7


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_every_collective_on_gloo(part: int) -> None:
    for count, wrong in run_on(2, sweep, part, PARTS):
        assert not wrong, "\n".join(wrong[:10])
        assert count > 1000 // PARTS


@pytest.mark.slow
def test_every_collective_on_gloo_with_four_ranks() -> None:
    for _, wrong in run_on(4, sweep, timeout=200.0):
        assert not wrong, "\n".join(wrong[:10])


@needs_mpi
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_every_collective_on_mpi(part: int) -> None:
    code, out = run([*mpirun(2, sys.executable), "-m", "support.sweep", str(part), str(PARTS)])
    assert code == 0, out[-3000:]
    assert out.count(" calls") == 2


def test_in_a_world_of_one() -> None:
    code, out = run([sys.executable, "-W", "error", "-m", "support.sweep"])
    assert code == 0, out[-3000:]


def in_oneflows_spelling() -> None:
    comm, rank, size = flow.comm, flow.env.get_rank(), flow.env.get_world_size()
    ones = torch.ones(2, 3)
    x = ones * (rank + 1)
    comm.all_reduce(x)
    assert torch.equal(x, ones * 3)
    y = ones * (rank + 1)
    comm.reduce(y, 1)
    assert torch.equal(y, ones * (3 if rank == 1 else 1)), "the others keep theirs"
    mine, other = torch.full((2,), float(rank)), torch.empty(1)
    outs: list[Any] = [other, torch.empty(2)]
    kept = outs[1]
    comm.all_gather(outs, mine)
    assert [t.tolist() for t in outs] == [[0, 0], [1, 1]]
    assert outs[0] is not other, "an entry that does not fit is replaced"
    assert outs[1] is kept, "one that fits is written"
    for shape in ((size, 2), (size * 2,)):
        whole = torch.empty(shape)
        comm.all_gather_into_tensor(whole, mine)
        assert whole.flatten().tolist() == [0, 0, 1, 1]
    gaps = torch.empty(size, 2, 2)[..., 0]
    comm.all_gather_into_tensor(gaps, mine)
    assert gaps.tolist() == [[0, 0], [1, 1]]
    part = torch.empty(1)
    comm.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]))
    assert part.item() == 2 * (rank + 1)
    parts = torch.empty(2, 3)
    for shape in (
        (4, 3),
        (2, 3, 2),
        (12,),
    ):  # shapes that torch accepts, and one that only has the right number of elements
        comm.reduce_scatter_tensor(parts.zero_(), torch.arange(12.0).reshape(shape))
        assert parts.flatten().tolist() == [2.0 * (6 * rank + i) for i in range(6)]
    comm.reduce_scatter_tensor(gaps[0], mine.repeat(2))
    assert gaps[0].tolist() == [1, 1]
    with pytest.raises(ShapeError, match="must hold 12 elements"):
        comm.reduce_scatter_tensor(parts, torch.empty(4, 2))
    with pytest.raises(ShapeError, match="must hold 4 elements"):
        comm.all_gather_into_tensor(torch.empty(3), mine)
    with pytest.raises(ShapeError, match="1 entries for 2 ranks"):
        comm.all_gather([mine], mine)
    gathered = [torch.empty(2), torch.empty(2)]
    comm.gather(mine, gathered, dst=1)  # only the receiver reads the list
    assert rank == 0 or [t.tolist() for t in gathered] == [[0, 0], [1, 1]]


def messages_in_oneflows_spelling() -> Any:
    comm, rank = flow.comm, flow.env.get_rank()
    half = torch.arange(6, dtype=torch.float16).reshape(2, 3)
    if rank == 0:
        comm.send(half, 1)
        comm.send(torch.tensor(5), 1)
        comm.send(half.mT, 1)
        comm.send(half, 1, send_meta=False)
        comm.send(half, 1)
        return None
    first, scalar, turned = comm.recv(0), comm.recv(0), comm.recv(0)
    known = comm.recv(0, shape=(2, 3), dtype=torch.float16, device="cpu")
    out = torch.empty(2, 3, dtype=torch.float16)
    assert comm.recv(0, out=out) is out
    with pytest.raises(WorldError, match="all of shape, dtype and device"):
        comm.recv(0, shape=(2, 3))
    assert scalar.shape == ()
    assert scalar.item() == 5
    return [t.tolist() for t in (first, turned.mT, known, out)], first.dtype


def test_flow_comm() -> None:
    run_on(2, in_oneflows_spelling)
    want = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert run_on(2, messages_in_oneflows_spelling)[1] == ([want] * 4, torch.float16)


def a_result_that_does_not_fit() -> None:
    if flow.env.get_rank() == 0:
        flow.comm.send(torch.ones(3), 1)
    else:
        with pytest.raises(
            ShapeError,
            match=r"out is torch\.float32 \(2,\), but rank 0 sends torch\.float32 \(3,\)",
        ):
            flow.comm.recv(0, out=torch.ones(2))
        flow.comm.recv(0, (3,), torch.float32, "cpu")


def sparse_sum() -> list[Any]:
    rank = flow.env.get_rank()
    with (
        torch.sparse.check_sparse_tensor_invariants()
    ):  # torch 2.11 warns if only the call asks for the check
        x = torch.sparse_coo_tensor([[0, 2 + rank]], torch.tensor([1.0, 2.0]) * (rank + 1), (4,))
    y = x.clone()
    dist.all_reduce(x)
    dist.all_reduce(y, async_op=True).wait()
    return [x.to_dense().tolist(), y.to_dense().tolist()]


@pytest.mark.filterwarnings("ignore")
def test_sums_of_sparse_tensors_on_gloo() -> None:
    assert run_on(2, sparse_sum) == [[[3, 0, 2, 4]] * 2] * 2


def test_flow_comm_refuses_what_does_not_fit() -> None:
    run_on(2, a_result_that_does_not_fit)


def _messages_to_nobody() -> list[str]:
    here, x, found = flow.env.get_rank(), torch.ones(1), []
    calls: list[Callable[[], Any]] = [
        lambda: flow.comm.send(x, 99),
        lambda: flow.comm.recv(-1),
        lambda: flow.distributed.send(x, dst=2),
        lambda: flow.distributed.recv(x, 99),
        lambda: flow.distributed.isend(x, 99),
        lambda: flow.distributed.irecv(x, src=99),
        lambda: flow.distributed.P2POp(flow.distributed.isend, x, 99),
        lambda: flow.distributed.P2POp(torch.distributed.irecv, x, peer=-1),
        lambda: flow.distributed.send_object_list([x], dst=99),
        lambda: flow.distributed.recv_object_list([None], 99),
    ]
    for call in calls:
        with pytest.raises(WorldError) as info:
            call()
        found.append(str(info.value))
    # messages go on afterwards
    if here == 0:
        flow.comm.send(x, 1)
    else:
        assert flow.comm.recv(0).item() == 1.0
    return found


def test_a_message_to_a_rank_that_does_not_exist_is_refused() -> None:
    for found in run_on(2, _messages_to_nobody):
        assert found[0] == "send: dst=99 is not a rank of this job, whose ranks are 0 to 1"
        assert "src=-1" in found[1]
        assert all("is not a rank of this job" in text for text in found)


def test_signatures_are_torchs() -> None:
    for name in set(torch.distributed.distributed_c10d.__all__) - {
        "reduce_op"
    }:  # (reading reduce_op warns)
        theirs, ours = getattr(torch.distributed.distributed_c10d, name), getattr(dist, name)
        if inspect.isfunction(theirs) and name != "init_process_group":
            missing = [
                p
                for p in inspect.signature(theirs).parameters
                if p not in inspect.signature(ours).parameters and not p.startswith("_")
            ]
            free = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(ours).parameters.values())
            assert free or not missing, f"{name} does not take {missing}"
    assert dist.ReduceOp is torch.distributed.ReduceOp
    assert dist.TCPStore is torch.distributed.TCPStore


# -------------------------------------------------------------------------------- ranks that differ


def differ(kind: str) -> str:
    """Return the error on this rank where the ranks make different calls. The group of the call is
    lost."""
    rank = flow.env.get_rank()
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))

    def late() -> None:
        dist.broadcast(torch.zeros(10 if rank else 3), src=0, group=group, async_op=True)
        dist.barrier(group=group)

    calls: dict[str, Any] = {
        "size": lambda: dist.all_reduce(torch.zeros(10 if rank else 1000), group=group),
        "dtype": lambda: dist.all_reduce(
            torch.zeros(4, dtype=torch.int32 if rank else torch.float32), group=group
        ),  # the byte counts agree, so gloo would sum them
        "op": lambda: dist.all_reduce(
            torch.zeros(4), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group
        ),
        "root": lambda: dist.broadcast(torch.zeros(4), src=rank, group=group),
        "longer than sent": lambda: dist.broadcast(
            torch.zeros(10 if rank else 3), src=0, group=group
        ),  # gloo would leave the remaining elements unchanged
        "collective": lambda: (
            dist.barrier(group=group)
            if rank
            else dist.all_gather([torch.zeros(2)] * 2, torch.zeros(2), group=group)
        ),
        "asynchronous": late,
        "pair": lambda: dist.all_to_all_single(
            torch.zeros(5), torch.zeros(4), [3, 2] if rank else [2, 3], [2, 2], group=group
        ),
    }
    with pytest.raises(WorldError) as error:
        calls[kind]()
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("size", "all_reduce of 1000 float32 (SUM)", "all_reduce of 10 float32 (SUM)"),
        ("dtype", "all_reduce of 4 float32 (SUM)", "all_reduce of 4 int32 (SUM)"),
        ("op", "all_reduce of 4 float32 (SUM)", "all_reduce of 4 float32 (MAX)"),
        ("root", "broadcast of 4 float32, root 0", "broadcast of 4 float32, root 1"),
        ("longer than sent", "broadcast of 3 float32, root 0", "broadcast of 10 float32, root 0"),
        ("collective", "all_gather of 4 float32", "barrier"),
        ("asynchronous", "broadcast of 3 float32, root 0", "broadcast of 10 float32, root 0"),
    ],
)
def test_ranks_that_differ_are_told(kind: str, first: str, second: str) -> None:
    told, end = (
        run_on(2, differ, kind),
        "all ranks of a group must call the same, with tensors that match",
    )
    lines = [text.rpartition("\n") for text in told]
    assert [text for *_, text in lines] == [
        f"rank 0 calls {first}, but rank 1 calls {second}: {end}",
        f"rank 1 calls {second}, but rank 0 calls {first}: {end}",
    ]
    if kind != "asynchronous":  # which is compared at a later call
        assert all(line.startswith("test_distributed_api.py:") for line, *_ in lines)


def test_an_all_to_all_whose_pairs_differ_is_told() -> None:
    told = run_on(2, differ, "pair")
    assert [text.rpartition("\n")[2] for text in told] == [
        f"all_to_all_single: rank {1 - r} sends 2 elements to rank {r}, which expects 3; make the "
        f"sizes agree"
        for r in range(2)
    ]


def mixed_blocking() -> list[float]:
    """Mix blocking and non-blocking ranks, and start many calls before the first wait."""
    rank = flow.env.get_rank()
    x = torch.full((4,), float(rank))
    work = dist.broadcast(x, src=1, async_op=rank == 0)
    if work is not None:
        work.wait()
    tensors = [torch.full((3,), float(rank + i)) for i in range(600)]
    for late in [dist.all_reduce(t, async_op=True) for t in tensors]:
        late.wait()
    assert [t[0].item() for t in tensors] == [2 * i + 1 for i in range(600)]
    dist.barrier()
    return x.tolist()


def test_blocking_and_not_may_be_mixed() -> None:
    assert run_on(2, mixed_blocking) == [[1.0] * 4] * 2


def unchecked() -> int:
    os.environ["GLOBALTENSOR_CHECK_COLLECTIVES"] = "0"
    try:
        x = torch.zeros(10 if flow.env.get_rank() else 3)
        dist.broadcast(x, src=0)
        return x.numel()
    finally:
        del os.environ["GLOBALTENSOR_CHECK_COLLECTIVES"]


def test_the_comparison_can_be_turned_off() -> None:
    assert run_on(2, unchecked) == [3, 10], "gloo, not asked to compare, says nothing"


def a_rank_does_not_come() -> float:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    began = time.monotonic()
    if flow.env.get_rank() == 0:
        with pytest.raises(
            WorldError, match=r"rank 0 calls all_reduce of 3 float32.*but rank 1 did not join"
        ):
            dist.all_reduce(torch.zeros(3), group=group)
    took = time.monotonic() - began
    dist.barrier()
    return took


def test_a_rank_that_does_not_come_is_named() -> None:
    took, _ = run_on(2, a_rank_does_not_come)
    assert 1 < took < 15


def global_tensors_are_refused() -> None:
    x = flow.ones(4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    for call in (
        lambda: dist.all_reduce(x),
        lambda: dist.all_gather([torch.empty(2)] * 2, tensor=x),
        lambda: dist.all_gather([x, x], torch.empty(2)),
        lambda: dist.send(x, 1),
        lambda: dist.P2POp(dist.isend, x, 0),
        lambda: flow.comm.all_reduce(x),
    ):
        with pytest.raises(
            KernelError, match=r"got a global tensor, f32\[4\] S\(0\).*to_global.*to_local"
        ):
            call()
    functional = importlib.import_module("torch.distributed._functional_collectives")
    group = torch.distributed.group.WORLD
    kernels = torch.ops._c10d_functional
    kernels_with_gradients = torch.ops._c10d_functional_autograd
    for call in (
        lambda: torch.distributed.all_reduce(x),
        lambda: functional.all_reduce(x, "sum", group),
        lambda: functional.broadcast(x, 0, group),
        lambda: functional.all_to_all_single(x, None, None, group),
        lambda: functional.all_reduce_coalesced([x, torch.ones(4)], "sum", group),
        lambda: kernels.all_reduce.default(x, "sum", group.group_name),
        lambda: kernels.all_gather_into_tensor(x, 2, group.group_name),
        lambda: kernels.reduce_scatter_tensor(x, "sum", 2, group.group_name),
        lambda: kernels_with_gradients.all_gather_into_tensor(x, 2, group.group_name),
    ):
        with pytest.raises(
            KernelError, match=r"collective of torch\.distributed.*to_global.*to_local"
        ):
            call()
    local = x.to_local()  # one rank's values may be sent
    assert torch.equal(functional.all_reduce(local, "sum", group), 2 * local)


def test_global_tensors_are_refused() -> None:
    run_on(2, global_tensors_are_refused)


def test_simulated_ranks_have_no_group(simulated: Any) -> None:
    def ask() -> tuple[int, int]:
        with pytest.raises(WorldError, match="simulated ranks have no process group"):
            dist.all_reduce(torch.zeros(2))
        return dist.get_rank(), dist.get_world_size()

    assert simulated(2, ask) == [(0, 2), (1, 2)]


# -------------------------------------------------------------------- starting and ending the world


def beginnings(store: str) -> list[Any]:
    """Start the world automatically and then call init_process_group, and the other way round,
    several times."""
    rank, told = flow.env.get_rank(), list[Any]()

    def works() -> None:
        x = torch.ones(2)
        dist.all_reduce(x)
        ones = flow.ones(2, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
        told.append(
            (x.tolist(), dist.get_backend(), flow.env.get_rank() == rank, ones.sum().item())
        )

    dist.init_process_group("gloo")  # the world has begun already, and this call agrees with it
    dist.init_process_group(world_size=2, rank=rank, timeout=datetime.timedelta(seconds=50))
    works()
    with pytest.raises(
        WorldError,
        match=(
            r"asks for world_size 3, rank 2, backend 'nccl', but this process already is rank "
            r"\d of 2"
        ),
    ):
        dist.init_process_group("nccl", world_size=3, rank=2)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{store}.1", rank=rank, world_size=2)
    works()
    dist.destroy_process_group()
    dist.init_process_group(
        store=torch.distributed.FileStore(f"{store}.2", 2), rank=rank, world_size=2
    )
    works()
    dist.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}.3", rank=rank, world_size=2
    )  # torch's own function, which bypasses this library
    works()
    torch.distributed.destroy_process_group()
    dist.destroy_process_group()
    return told


def test_the_world_and_init_process_group_get_on(fresh_pool: Any, tmp_path: Path) -> None:
    pool = fresh_pool(2)
    assert (
        pool.run(beginnings, str(tmp_path / "store")) == [[([2.0, 2.0], "gloo", True, 2.0)] * 4] * 2
    )
    assert [size for size, _ in pool.run(after_the_end)] == [2, 2], "what asks next starts afresh"


def after_the_end() -> tuple[int, Any]:
    x = torch.ones(2)
    dist.all_reduce(x)
    return flow.env.get_world_size(), x.tolist()


BY_ITSELF = """
import torch, globaltensor as flow, globaltensor.distributed as dist
assert not dist.is_initialized() and flow.env.get_world_size() == 1 and not dist.is_initialized()
x = torch.ones(2)
dist.all_reduce(x)
assert dist.is_initialized() and x.tolist() == [1, 1]
objects = [None]
dist.all_gather_object(objects, "a")
assert objects == ["a"]
dist.destroy_process_group()
dist.destroy_process_group()
dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), dist.get_backend()) == (0, 1, 0, "gloo")
print("good")
"""  # noqa: E501


def test_one_process_needs_no_launcher() -> None:
    assert run([sys.executable, "-W", "error", "-c", BY_ITSELF]) == (0, "good\n")


NODES = """
import sys
import globaltensor as flow, globaltensor.distributed as dist
from globaltensor.distributed import process_groups

def work(rank, store):
    process_groups.machine_name = lambda: "ab"[rank // 2]  # two machines with two ranks, and one rank
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    told = [None] * 3
    dist.all_gather_object(told, (flow.env.get_rank(), flow.env.get_local_rank(), flow.env.get_node_size()))
    assert told == [(0, 0, 2), (1, 1, 2), (2, 0, 2)], told
    dist.destroy_process_group()

if __name__ == "__main__":
    flow.spawn(work, args=(sys.argv[1],), nprocs=3)
    print("good")
"""  # noqa: E501


@pytest.mark.extended
def test_ranks_that_no_launcher_started_find_out_who_shares_a_machine(tmp_path: Path) -> None:
    (tmp_path / "nodes.py").write_text(NODES)
    assert run([sys.executable, str(tmp_path / "nodes.py"), str(tmp_path / "store")]) == (
        0,
        "good\n",
    )


ELSEWHERE = """
import os, sys, torch, globaltensor.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=int(os.environ["RANK"]), world_size=2)
x = torch.ones(2)
dist.all_reduce(x)
assert x.tolist() == [2, 2]
"""  # noqa: E501


@pytest.mark.extended
def test_ranks_of_a_launcher_may_meet_at_an_address_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    with reserved_port() as port:
        code, out = run(
            [*LAUNCH, "--nproc_per_node", "2", str(tmp_path / "elsewhere.py"), str(port)], 60
        )
    assert code == 0, out


#: The last rank reads each address late. The others are connected before it is, and end at once.
JOINS_LATE = """
import os, sys, time
import globaltensor.distributed as d
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

class Late(dist.Store):
    def __init__(self, store):
        super().__init__()
        self.store = store
    def set(self, key, value):
        self.store.set(key, value)
    def get(self, key):
        time.sleep(0.4 if rank == size - 1 else 0.0)
        return self.store.get(key)
    def wait(self, keys, *timeout):
        self.store.wait(keys, *timeout)
    def add(self, key, number):
        return self.store.add(key, number)
    def check(self, keys):
        return self.store.check(keys)
    def has_extended_api(self):
        return False

store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, False)
d.init_process_group("gloo", store=Late(store), rank=rank, world_size=size)
"""


@pytest.mark.parametrize(
    "automatic",
    [pytest.param(False, marks=pytest.mark.extended), True],
    ids=["by call", "automatic"],
)
def test_a_rank_that_ends_at_once_has_waited_until_all_have_joined(
    automatic: bool, tmp_path: Path
) -> None:
    """Gloo's connections are complete on one rank before they are on another."""
    script = tmp_path / "script.py"
    if automatic:
        start = "import globaltensor as flow\nfrom globaltensor.distributed import world\n"
        start += "world.meeting = lambda *_: {'store': Late(store), 'rank': rank, "
        start += "'world_size': size}\nflow.env.get_world_size()\n"
        script.write_text(JOINS_LATE.replace(JOINS_LATE.strip().splitlines()[-1], start))
    else:
        script.write_text(JOINS_LATE)
    code, out = run(warmed([*LAUNCH, "--nproc_per_node", "4", "--backend", "gloo", str(script)]))
    assert code == 0, out


def test_others_who_cannot_be_joined_are_told() -> None:
    program = (
        "import globaltensor.distributed as d, datetime as t; d.init_process_group('gloo', "
        "timeout=t.timedelta(seconds=2))"
    )
    where = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    code, out = run([sys.executable, "-c", program], **where)
    assert code == 1
    assert "are all ranks started, and can they reach each other?" in out
    assert "rank 1, world_size 2" in out


# --------------------------------------------------------------------------------------------- RDMA


def test_rdma_says_what_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "mlx5_9" / "ports" / "1").mkdir(parents=True)
    (tmp_path / "mlx5_9" / "ports" / "1" / "state").write_text("1: DOWN\n")
    with pytest.raises(
        WorldError,
        match=(
            r"rank 0 lacks an InfiniBand or RoCE device with an active port \(looked in .*; "
            r"devices there: mlx5_9\)"
        ),
    ):
        rdma.init_rdma(tmp_path)
    assert not flow.env.rdma_is_initialized()
    flow.env.destroy_rdma()


def test_rdma_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, state, link in (
        ("mlx5_0", "4: ACTIVE", "InfiniBand"),
        ("mlx5_1", "1: DOWN", "InfiniBand"),
        ("rxe0", "4: ACTIVE", "Ethernet"),
    ):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text(link + "\n")
    assert rdma.devices(tmp_path) == ["mlx5_0:1 (InfiniBand)", "rxe0:1 (RoCE)"]
    with pytest.raises(
        WorldError,
        match="rank 0 lacks a backend that uses RDMA: this world's is gloo, which speaks TCP",
    ):
        rdma.init_rdma(tmp_path)
    monkeypatch.setattr(flow.distributed.world.world(), "backend", "cpu:gloo,cuda:nccl")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    with pytest.raises(WorldError, match="NCCL_IB_DISABLE is set"):
        rdma.init_rdma(tmp_path)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    rdma.init_rdma(tmp_path)
    assert flow.env.rdma_is_initialized()
    flow.env.destory_rdma()
    assert not flow.env.rdma_is_initialized()


# -------------------------------------------------------------------------------------------- names


def test_names_are_torchs() -> None:
    program = """
import torch
import globaltensor as flow
import globaltensor.nn.functional as F
import globaltensor.nn.utils.rnn as rnn
import globaltensor.distributed as dist
from globaltensor.optim.lr_scheduler import StepLR
from globaltensor.nn.parallel import DataParallel, DistributedDataParallel
from globaltensor.distributed.fsdp import fully_shard
from globaltensor.utils.data import DataLoader, DistributedSampler, GlobalDataLoader
import globaltensor.distributed.checkpoint as dcp
assert F is torch.nn.functional is flow.nn.functional and F.__spec__.name == "torch.nn.functional"
assert rnn is torch.nn.utils.rnn and StepLR is torch.optim.lr_scheduler.StepLR and DataParallel is torch.nn.DataParallel
assert dcp is torch.distributed.checkpoint and dist is flow.distributed and DataLoader is flow.utils.data.DataLoader is torch.utils.data.DataLoader
assert flow.nn.Linear is torch.nn.Linear and flow.utils.checkpoint.checkpoint is torch.utils.checkpoint.checkpoint
import globaltensor.nn.quantized
for module in ("globaltensor.nothing", "globaltensor.nn.nothing", "globaltensor.nn.functional.nothing"):
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        assert module in str(error), error
    else:
        raise AssertionError(module)
try:
    flow.nn.nothing
except AttributeError as error:
    assert str(error) == "neither globaltensor.nn nor torch.nn has 'nothing'", error
print("good")
"""  # noqa: E501
    assert run([sys.executable, "-c", program])[1].splitlines()[-1] == "good"


def test_a_failing_rank_in_the_pool_is_seen() -> None:
    """A failing rank in the pool raises an error, so the checks above can fail."""
    with pytest.raises(RanksFailed, match="rank 1 of 2"):
        run_on(2, fail_on_one)


def fail_on_one() -> None:
    assert flow.env.get_rank() == 0
