"""Compare a training step of the example's GPT: a static graph, the eager step and code by hand.

The code by hand is for one rank, with the same collectives. For data parallel it is torch's
DistributedDataParallel. For tensor parallel it is Megatron's two functions (Shoeybi et al. 2019,
section 3) around local matrices. All update with the same fused AdamW. The last row is the time of
capturing, planning and building for 48 layers.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import LEAST, QUICK_SIZES, Row, Size, interleave, on_ranks, options, same_losses, show
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, PARALLEL, loss_of, spread

import globaltensor as flow

SIZES = [Size(4, 64, 4, 32, 4), Size(4, 128, 4, 128, 16)]
DEEP = Size(48, 64, 4, 32, 4)

# ---------------------------------------------------------------- by hand


class Into(torch.autograd.Function):
    """The entry of a tensor-parallel region: an identity whose backward sums (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class OutOf(torch.autograd.Function):
    """The exit of a tensor-parallel region: a sum whose backward is an identity (g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Split(nn.Module):
    """One rank's share of the GPT, split as PARALLEL["tensor"] splits it.

    The loss is computed from logits that are split over the vocabulary."""

    def __init__(self, whole: GPT, rank: int, world: int) -> None:
        super().__init__()
        self.whole = whole
        self.first = rank * (whole.token.weight.shape[0] // world)
        for block in whole.blocks:
            for linear in (block.q, block.k, block.v, block.up):
                linear.weight = nn.Parameter(linear.weight.detach().chunk(world)[rank].clone())
            block.up.bias = nn.Parameter(block.up.bias.detach().chunk(world)[rank].clone())
            for linear in (block.out, block.down):
                linear.weight = nn.Parameter(linear.weight.detach().chunk(world, 1)[rank].clone())
        self.token = nn.Parameter(whole.token.weight.detach().chunk(world)[rank].clone())
        whole.head.weight = whole.token.weight = None  # type: ignore[assignment]

    def block(self, block: Any, x: Tensor) -> Tensor:
        h = Into.apply(block.norm1(x))
        q, k, v = (
            project(h).unflatten(-1, (-1, block.head_size)).transpose(1, 2)
            for project in (block.q, block.k, block.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + OutOf.apply(block.out(attended.transpose(1, 2).flatten(2)))
        h = Into.apply(block.norm2(x))
        return x + OutOf.apply(F.linear(F.gelu(block.up(h)), block.down.weight)) + block.down.bias

    def forward(self, rows: Tensor) -> Tensor:
        """Return the mean cross-entropy; logits stay split over the vocabulary."""
        n, ids = self.token.shape[0], rows[:, :-1] - self.first
        inside = (ids >= 0) & (ids < n)
        found = F.embedding(ids.clamp(0, n - 1), self.token) * inside.unsqueeze(-1)
        x = OutOf.apply(found) + self.whole.position(torch.arange(ids.shape[1]))
        for block in self.whole.blocks:
            x = self.block(block, x)
        logits = F.linear(Into.apply(self.whole.norm(x)), self.token).flatten(0, 1)
        with torch.no_grad():
            top = logits.amax(1)
            dist.all_reduce(top, dist.ReduceOp.MAX)
        total = OutOf.apply((logits - top[:, None]).exp().sum(1)).log() + top
        target = rows[:, 1:].flatten() - self.first
        mine = (target >= 0) & (target < n)
        wanted = OutOf.apply(logits.gather(1, target.clamp(0, n - 1)[:, None]).squeeze(1) * mine)
        return (total - wanted).mean()


# ---------------------------------------------------------------- steps


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def by_hand(model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    optimizer = adamw(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Step(flow.nn.Graph):
    """The training step as a graph."""

    def __init__(self, model: nn.Module, backend: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(adamw(model))
        if backend is not None:
            self.config.enable_compile(backend=backend)

    def build(self, rows: Tensor) -> Tensor:
        loss = loss_of(self.model, rows)
        loss.backward()
        return loss


def mean(loss: Tensor) -> float:
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def compare(kind: str, size: Size, rounds: int, compiled: bool) -> Row:
    rows, everyone, rank = size.rows(), flow.placement.all("cpu"), dist.get_rank()
    shared = rows.to_global(everyone, flow.sbp.broadcast, check_meta=False).to_global(
        sbp=PARALLEL[kind].batch
    )
    mine = rows.tensor_split(dist.get_world_size())[rank]

    def ours() -> nn.Module:
        model = size.model()
        spread(model, PARALLEL[kind], everyone)
        return model

    def local(compile: bool) -> Callable[[], Tensor]:
        if kind == "tensor":
            split: Any = Split(size.model(), rank, dist.get_world_size())  # type: ignore[arg-type]
            run = torch.compile(split) if compile else split
            return by_hand(split, lambda: run(rows))
        model: Any = DistributedDataParallel(size.model())
        run = torch.compile(model) if compile else model
        return by_hand(model, lambda: loss_of(run, mine))

    eager, graph = ours(), Step(ours())
    steps: dict[str, Callable[[], object]] = {
        "by hand": local(False),
        "eager": by_hand(eager, lambda: loss_of(eager, shared)),
        "graph": lambda: graph(shared),
    }
    if compiled:
        fast = Step(ours(), "inductor")
        steps |= {"by hand, compiled": local(True), "graph, compiled": lambda: fast(shared)}
    told = {
        name: (lambda s=step, h="by hand" in name: mean(s()) if h else s().item())
        for name, step in steps.items()
    }  # type: ignore[misc]
    same_losses(told)
    return Row(f"{kind} {size}", interleave(steps, rounds, calls=3, least=LEAST), "ms")


def building(rounds: int) -> Row:
    """Time capturing, planning and building: a graph's first call minus its second call."""
    rows, everyone = DEEP.rows(), flow.placement.all("cpu")
    shared = rows.to_global(everyone, flow.sbp.broadcast, check_meta=False).to_global(
        sbp=PARALLEL["data"].batch
    )
    model = DEEP.model()
    spread(model, PARALLEL["data"], everyone)
    seconds = []
    for _ in range(rounds):
        graph = Step(model)
        began = time.perf_counter()
        graph(shared)
        middle = time.perf_counter()
        graph(shared)
        seconds.append(max(0.0, 2 * middle - began - time.perf_counter()))
    return Row(f"capture, plan, build: {DEEP.layers} layers", {"graph": seconds}, "ms")


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=15)
    on_ranks(chosen.nproc)
    torch.set_num_threads(1)
    flow.env.get_rank()  # starts the process group that all contenders share
    compiled = not os.environ.get("GLOBALTENSOR_BENCHMARK_WITHOUT_COMPILER")
    rows = [
        compare(kind, size, chosen.steps, compiled)
        for kind in ("data", "tensor")
        for size in (QUICK_SIZES if chosen.quick else SIZES)
        if chosen.only in f"{kind} {size}"
    ]
    if chosen.only in "capture, plan, build":
        rows.append(building(min(3, chosen.steps)))
    if flow.env.get_rank() == 0:
        show(rows, chosen.json, "by hand")


if __name__ == "__main__":
    with warnings.catch_warnings(), contextlib.suppress(BrokenPipeError):
        warnings.simplefilter("ignore")
        main()
