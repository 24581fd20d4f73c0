"""Attention forward and backward over a split sequence: keys round a ring, an exchange to split heads, keys gathered, and what "auto" takes (ours).

The second row of each case is the processor time of the busiest rank: how long a step takes where each rank has a core of its own. (With more ranks than cores
the first row is the work of all ranks together, and hides that under a causal mask some of them wait.) The third is memory: the most that a rank holds besides
its own queries, keys, values and their gradients; in comparison all keys and values, and what plain torch holds on one device. Scores are never held.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Row, interleave, options, show, started
from support.held import Held

import globaltensor as flow

METHODS = ("gather", "ring", "heads", "auto")
HEADS, WIDTH = 4, 64
#: (length, heads of keys, causal)
CASES = [(2048, HEADS, False), (2048, HEADS, True), (4096, HEADS, True), (4096, 1, True)]
QUICK_CASES = [(128, HEADS, False), (128, HEADS, True)]


@dataclass
class Memory(Row):
    """A row of bytes, shown in MiB."""

    def median(self, name: str) -> float:
        return self.seconds[name][0] / (1 << 20)


def step(method: str, tensors: list[torch.Tensor], causal: bool) -> Callable[[], torch.Tensor]:
    """One attention and its backward -> the result."""

    def call() -> torch.Tensor:
        for t in tensors:
            t.grad = None
        with flow.attention(method):
            out = F.scaled_dot_product_attention(*tensors, is_causal=causal, enable_gqa=tensors[1].shape[1] != HEADS)
        out.sum().backward()
        return out

    return call


def compare(length: int, heads: int, causal: bool, rounds: int) -> list[Row]:
    everyone, generator = flow.placement.all("cpu"), torch.Generator().manual_seed(0)
    whole = [torch.randn(1, h, length, WIDTH, generator=generator) for h in (HEADS, heads, heads)]
    tensors = [t.to_global(everyone, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(2)).detach().clone().requires_grad_() for t in whole]
    calls = {"ours" if m == "auto" else m: step(m, tensors, causal) for m in METHODS}
    results = {name: call().detach().to_local() for name, call in calls.items()}
    for name, result in results.items():
        if not torch.allclose(result, results["gather"], atol=1e-4):
            sys.exit(f"{name} does not do the same work as gather")
    case = f"{'causal ' if causal else ''}{length} x {HEADS} heads{f' ({heads} of keys)' if heads != HEADS else ''}, {dist.get_world_size()} ranks"
    memory = {}
    for name, call in calls.items():
        with Held() as held:
            call()
        most = torch.tensor([float(held.most - sum(t.to_local().nbytes for t in tensors))])  # less the gradients, which remain
        dist.all_reduce(most, dist.ReduceOp.MAX)
        memory[name] = most.tolist()
    memory["all keys"] = [float(sum(t.nbytes for t in whole[1:]))]
    alone = step("auto", [t.requires_grad_() for t in whole], causal)
    alone()
    with Held() as held:
        alone()
    memory["one device"] = [float(held.most - sum(t.nbytes for t in whole))]
    timed = Row(case, interleave(calls, rounds, calls=1, warm_up=1), "ms")
    busiest = Row(f"busiest, {case}", {name: most_of(found) for name, found in interleave(calls, rounds, 1, 0, time.process_time).items()}, "ms")
    return [timed, busiest, Memory(f"memory, {case}", memory, "MiB")]


def most_of(seconds: list[float]) -> list[float]:
    """Of each round, what the rank has that has most."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=5)
    if "RANK" not in os.environ:
        sys.exit(started(2) or started(4))
    torch.set_num_threads(1)
    flow.env.get_rank()  # starts the process group
    rows = [row for case in (QUICK_CASES if chosen.quick else CASES) if chosen.only in str(case[0]) for row in compare(*case, chosen.steps)]
    if dist.get_rank() == 0:
        show(rows, chosen.json, "gather")


if __name__ == "__main__":
    main()
