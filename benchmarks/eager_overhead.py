"""Measure the cost per call of plain local torch (the limit), DTensor and ours, without traffic.

There is one process with one thread, and the tensors are so small that overhead dominates. The
world has four ranks. This process is the first, and the others are imagined (torch's fake backend).
Nothing that is timed communicates, so this process does exactly what each of four would do. The
time is this process's own, so that other processes of the machine don't count. The training step of
ours is on a placement of one rank, where gradients need no all-reduce. DTensor's gradients stay
partial, so they need none either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import Contenders, Row, interleave, options, show
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

import globaltensor as flow

RANKS = 4
B, S = flow.sbp.broadcast, flow.sbp.split

#: name -> the call, on x [8, 16] a rank split in dim 0, w [16, 16] and b [16] broadcast.
OPS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "add": lambda x, w, b: x + x,
    "add broadcast": lambda x, w, b: x + b,
    "mul scalar": lambda x, w, b: x * 2.0,
    "add in place": lambda x, w, b: x.add_(0.0),
    "gelu": lambda x, w, b: F.gelu(x),
    "linear": lambda x, w, b: F.linear(x, w, b),
    "matmul": lambda x, w, b: x @ w,
    "layer_norm": lambda x, w, b: F.layer_norm(x, (16,), b, b),
    "softmax": lambda x, w, b: x.softmax(-1),
    "sum of a row": lambda x, w, b: x.sum(-1),
    "sum to partial": lambda x, w, b: x.sum(),
    "view": lambda x, w, b: x.view(-1, 4, 4),
    "transpose": lambda x, w, b: x.transpose(0, 1),
    "getitem": lambda x, w, b: x[:, :8],
    "cat": lambda x, w, b: torch.cat([x, x], 1),
    "split": lambda x, w, b: x.split(8, 1),
    "detach": lambda x, w, b: x.detach(),
    "shape": lambda x, w, b: x.shape,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd for-loop": lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9, fused=True),
    "adamw for-loop": lambda p: torch.optim.AdamW(p, lr=1e-6, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-6, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True),
}


class MLP(nn.Module):
    """A model of four pre-norm layers of width 16: linear, gelu, layer norm, residual."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = x + F.gelu(linear(norm(x)))
        return x.sum()


def op_cases(mesh: DeviceMesh, rounds: int, only: str) -> list[Row]:
    """Time each op alone, without and with autograd recording."""
    local = [torch.randn(8, 16), torch.randn(16, 16), torch.randn(16)]
    peers = [
        DTensor.from_local(t, mesh, [Shard(0) if i == 0 else Replicate()], run_check=False)
        for i, t in enumerate(local)
    ]
    everyone = flow.placement("cpu", list(range(RANKS)))
    # The imagined ranks send nothing, so their tensors cannot be checked.
    ours = [
        t.to_global(everyone, S(0) if i == 0 else B, check_meta=False) for i, t in enumerate(local)
    ]

    def contenders(op: Callable[..., object], recording: bool) -> Contenders:
        operands = {"plain": local, "dtensor": peers, "ours": ours}
        if recording:
            operands = {
                name: [t.detach().requires_grad_() for t in ts] for name, ts in operands.items()
            }
        return {name: lambda ts=ts: op(*ts) for name, ts in operands.items()}

    rows = []
    for recording in (False, True):
        for name, op in OPS.items():
            case = name + (", recorded for backward" if recording else "")
            if only not in case or (
                recording and name not in ("add", "linear", "layer_norm", "view")
            ):
                continue
            with torch.set_grad_enabled(recording):
                rows.append(
                    Row(
                        case, interleave(contenders(op, recording), rounds, clock=time.process_time)
                    )
                )
    return rows


def models(mesh: DeviceMesh) -> dict[str, nn.Module]:
    """Make the same MLP for each contender."""
    made = {name: MLP() for name in ("plain", "dtensor", "ours")}
    for model in made.values():
        model.load_state_dict(made["plain"].state_dict())
    distribute_module(made["dtensor"], mesh)
    made["ours"].to_global(flow.placement("cpu", [0]), B)
    return made


def step_cases(mesh: DeviceMesh, rounds: int, only: str) -> list[Row]:
    """Time the MLP's forward, and its forward with backward."""
    made, x = models(mesh), torch.randn(8, 16)
    data = {
        "plain": x,
        "dtensor": DTensor.from_local(x, mesh, [Shard(0)], run_check=False),
        "ours": x.to_global(flow.placement("cpu", [0]), S(0)),
    }

    def forward(name: str) -> object:
        with torch.no_grad():
            return made[name](data[name])

    def both(name: str) -> None:
        made[name].zero_grad()
        made[name](data[name]).backward()

    rows = []
    for case, run in {
        "4-layer MLP forward": forward,
        "4-layer MLP forward + backward": both,
    }.items():
        if only in case:
            rows.append(
                Row(
                    case,
                    interleave(
                        {name: lambda name=name, run=run: run(name) for name in made},
                        rounds,
                        calls=100,
                        clock=time.process_time,
                    ),
                )
            )
    return rows


def optimizer_cases(mesh: DeviceMesh, rounds: int, only: str) -> list[Row]:
    """Time one step of each optimizer over the MLP's 16 parameters."""
    rows = []
    for case, make in OPTIMIZERS.items():
        if only not in case:
            continue
        steps: Contenders = {}
        for name, model in models(mesh).items():
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            steps[name] = make(model.parameters()).step
        if "sgd fused" in case:
            del steps["dtensor"]  # DTensor has no strategy for this kernel
        rows.append(Row(case + " step", interleave(steps, rounds, clock=time.process_time)))
    return rows


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=15)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = [
        row
        for cases in (op_cases, step_cases, optimizer_cases)
        for row in cases(mesh, chosen.steps, chosen.only)
    ]
    show(rows, chosen.json, "plain")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
