"""Tests of the reference document 003 (torch.distributed's own text) with the import changed: its
program and every call it describes, on gloo and on mpi."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.mpi import mpirun, needs_mpi
from support.program import run

from globaltensor.distributed.launch import reserved_port

# The document's program. Only the import, the backend and the device are changed, to those of this
# machine.
EXAMPLE = """
import torch
import globaltensor.distributed as dist
import MODULE as mp

def setup(rank, world_size):
    \"\"\"Initialize the distributed environment.\"\"\"
    dist.init_process_group(
        backend='gloo',
        init_method='tcp://127.0.0.1:PORT',
        world_size=world_size,
        rank=rank
    )

def cleanup():
    dist.destroy_process_group()

def demo_basic(rank, world_size):
    setup(rank, world_size)

    # Create a tensor
    tensor = torch.ones(2, 2).to("cpu")

    # All-reduce operation
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    print(f'Rank {rank}: {tensor}')

    cleanup()

if __name__ == '__main__':
    world_size = 2
    mp.spawn(demo_basic, args=(world_size,), nprocs=world_size)
"""
WHAT_IT_PRINTS = ["Rank 0: tensor([[2., 2.],", "Rank 1: tensor([[2., 2.],"]

# The calls with the arguments that the document names, each at its default, and their expected
# results.
CALLS = """
import sys, torch
import globaltensor as flow
import globaltensor.distributed as dist
from globaltensor.distributed import default_pg_timeout

backend = sys.argv[1]
assert not dist.is_initialized()
dist.init_process_group(backend, init_method=None, timeout=default_pg_timeout, world_size=-1, rank=-1, store=None, group_name='', pg_options=None)
assert dist.is_initialized() and dist.get_backend() == backend
rank, size = dist.get_rank(group=None), dist.get_world_size(group=None)
assert size == 2
mine = torch.full((2,), float(rank + 1))

if rank == 0:
    dist.send(mine, 1, group=None, tag=0)
else:
    got = torch.zeros(2)
    assert dist.recv(got, src=None, group=None, tag=0) == 0 and got.tolist() == [1, 1]

x = mine.clone()
dist.broadcast(x, 1, group=None, async_op=False)
assert x.tolist() == [2, 2]

x = mine.clone()
dist.all_reduce(x, op=dist.ReduceOp.SUM, group=None, async_op=False)
assert x.tolist() == [3, 3]

x = mine.clone()
dist.reduce(x, 0, op=dist.ReduceOp.SUM, group=None, async_op=False)
assert rank == 1 or x.tolist() == [3, 3]

outs = [torch.zeros(2) for _ in range(size)]
work = dist.all_gather(outs, mine, group=None, async_op=True)
work.wait()
assert [o.tolist() for o in outs] == [[1, 1], [2, 2]]

outs = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
dist.gather(mine, gather_list=outs, dst=0, group=None, async_op=False)
assert rank == 1 or [o.tolist() for o in outs] == [[1, 1], [2, 2]]

x = torch.zeros(2)
dist.scatter(x, scatter_list=[mine, mine * 5] if rank == 0 else None, src=0, group=None, async_op=False)
assert x.tolist() == [1 + 4 * rank] * 2

dist.barrier(group=None, async_op=False, device_ids=None)

model = flow.nn.Linear(2, 1)
ddp = flow.nn.parallel.DistributedDataParallel(
    model, device_ids=None, output_device=None, dim=0, broadcast_buffers=True, process_group=None, bucket_cap_mb=25, find_unused_parameters=False,
    check_reduction=False, gradient_as_bucket_view=False, static_graph=False)
ddp(mine).sum().backward()
assert model.weight.grad.tolist() == [[1.5, 1.5]]

data = list(range(5))
sampler = flow.utils.data.distributed.DistributedSampler(data, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False)
every = [None] * size
dist.all_gather_object(every, list(sampler))
assert set(every[0] + every[1]) == set(data) and len(every[0]) == len(every[1]) == 3

dist.destroy_process_group()
assert not dist.is_initialized()
print("good", flush=True)
"""  # noqa: E501


@pytest.mark.parametrize("module", ["torch.multiprocessing", "globaltensor"])
@pytest.mark.sweep(2)
def test_its_program(module: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    with reserved_port() as port:
        program.write_text(EXAMPLE.replace("MODULE", module).replace("PORT", str(port)))
        code, out = run([sys.executable, str(program)])
    assert code == 0, out
    assert all(line in out for line in WHAT_IT_PRINTS), out


@needs_mpi
@pytest.mark.extended
def test_its_program_on_mpi(tmp_path: Path) -> None:
    """mpirun starts the program and sets the rank of each process."""
    program = tmp_path / "program.py"
    begin = (
        "    rank, world_size = flow.env.get_rank(), flow.env.get_world_size()\n    "
        "dist.destroy_process_group()\n    demo_basic(rank, world_size)\n"
    )
    text = EXAMPLE.replace("backend='gloo'", "backend='mpi'").replace(
        "import MODULE as mp", "import globaltensor as flow"
    )
    with reserved_port() as port:
        program.write_text(
            text[: text.index("    world_size = 2\n")].replace("PORT", str(port)) + begin
        )
        code, out = run([*mpirun(2, sys.executable), str(program)])
    assert code == 0, out
    assert all(line in out for line in WHAT_IT_PRINTS), out


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=needs_mpi)])
@pytest.mark.sweep(2)
def test_its_calls(backend: str, tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    start = (
        mpirun(2, sys.executable)
        if backend == "mpi"
        else [sys.executable, "-m", "globaltensor.distributed.launch", "--nproc_per_node", "2"]
    )
    code, out = run([*start, str(tmp_path / "calls.py"), backend])
    assert code == 0, out
    assert out.count("good") == 2
