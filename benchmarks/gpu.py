"""Measure the overhead of global tensors in training steps on one GPU, against plain PyTorch.

The steps run in eager mode, as a graph and compiled. The world is one rank over NCCL, so nothing is
sent. The time is that of the host issuing a step or, at the larger sizes, that of the kernels.
DTensor is a contender where it can run the model (the MLP). DistributedDataParallel of one rank
fills its buckets, but has no other rank to send them to.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import Contenders, Row, Size, interleave, on_ranks, options, same_losses, show
from eager_overhead import MLP
from graph import Step, by_hand
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.nn.parallel import DistributedDataParallel
from train_gpt import loss_of

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split
#: size -> dtype: two sizes have short kernels, and one fills the GPU.
SIZES = {
    Size(4, 64, 4, 32, 4): torch.float32,
    Size(4, 512, 8, 128, 8): torch.bfloat16,
    Size(12, 1024, 16, 1024, 8): torch.bfloat16,
}
QUICK_SIZES = {Size(1, 32, 2, 16, 4): torch.float32}
# part of each case's name, because the other benchmarks' results come from a machine without a GPU
HERE = (
    f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}, torch "
    f"{torch.__version__}"
)


def clock() -> float:
    """Wait until the GPU's queue is empty, and return the time in seconds."""
    torch.cuda.synchronize()
    return time.perf_counter()


def mlp(rounds: int) -> Row:
    """Time the narrow MLP's forward and backward, which are almost only overhead."""
    mesh, place = init_device_mesh("cuda", (1,)), flow.placement("cuda", [0])
    made = {name: MLP().cuda() for name in ("plain", "dtensor", "ours")}
    for model in made.values():
        model.load_state_dict(made["plain"].state_dict())
    distribute_module(made["dtensor"], mesh)
    made["ours"].to_global(place, B)
    x = torch.randn(8, 16, device="cuda")
    data = {
        "plain": x,
        "dtensor": DTensor.from_local(x, mesh, [Shard(0)], run_check=False),
        "ours": x.to_global(place, S(0)),
    }

    def both(name: str) -> None:
        made[name].zero_grad()
        made[name](data[name]).backward()

    calls: Contenders = {name: lambda name=name: both(name) for name in made}
    return Row(
        f"4-layer MLP forward + backward, {HERE}",
        interleave(calls, rounds, calls=50, clock=clock),
        "us",
    )


def gpt(size: Size, dtype: torch.dtype, rounds: int, compiled: bool) -> Row:
    rows, place = size.rows().cuda(), flow.placement("cuda", [0])
    shared = rows.to_global(place, S(0))

    def model() -> nn.Module:
        return size.model().to("cuda", dtype)

    def ours() -> nn.Module:
        made = model()
        made.to_global(place, B)
        return made

    def plain(around: Callable[[Any], Any] = lambda m: m) -> Callable[[], Tensor]:
        made = model()
        run = around(made)
        return by_hand(made, lambda: loss_of(run, rows))

    eager, graph = ours(), Step(ours())
    steps: dict[str, Callable[[], Any]] = {
        "plain": plain(), "ddp": plain(DistributedDataParallel),
        "eager": by_hand(eager, lambda: loss_of(eager, shared)), "graph": lambda: graph(shared),
    }  # fmt: skip
    if compiled:
        fast = Step(ours(), "inductor")
        steps |= {"plain, compiled": plain(torch.compile), "graph, compiled": lambda: fast(shared)}
    same_losses(
        {name: lambda step=step: step().item() for name, step in steps.items()},
        tolerance=1e-3 if dtype is torch.float32 else 2e-2,
    )
    contenders: Contenders = dict(steps)
    return Row(
        f"gpt step {size}, {str(dtype).removeprefix('torch.')}, {HERE}",
        interleave(contenders, rounds, calls=5, clock=clock),
        "ms",
    )


def main() -> None:
    chosen = options(
        __doc__.splitlines()[0],
        steps=15,
        more={
            "--without-compiler": {
                "action": "store_true",
                "help": "leave out the compiled contenders",
            }
        },
    )
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    on_ranks(1)
    dist.init_process_group("nccl")  # for torch's contenders; our world of one rank needs no group
    torch.manual_seed(0)
    rows = [mlp(chosen.steps)] if chosen.only in "4-layer MLP forward + backward" else []
    for size, dtype in (QUICK_SIZES if chosen.quick else SIZES).items():
        if chosen.only in f"gpt step {size}":
            rows.append(gpt(size, dtype, chosen.steps, not chosen.without_compiler))
            print(rows[-1].line(), file=sys.stderr, flush=True)
    show(rows, chosen.json, "plain")
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
