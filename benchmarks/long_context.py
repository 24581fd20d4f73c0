"""Compare methods of attention over a split sequence, forward and backward.

The methods send keys round a ring, exchange to split heads, or gather keys. "ours" is the method
that "auto" chooses. The second row of each case is the processor time of the busiest rank, which is
the time of a step if each rank has a core of its own. (With more ranks than cores, the first row is
the work of all ranks together. It hides that some ranks wait under a causal mask.) The third row is
memory: the peak bytes of a rank, with its queries, keys, values and their gradients. It also has
the peak of plain torch on one device, and the rank's share of that. Scores are never stored.
"""

from __future__ import annotations

import json
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
WIDTH = 64
#: (length, heads of queries, heads of keys, causal)
CASES = [
    (2048, 4, 4, False),
    (2048, 4, 4, True),
    (4096, 4, 4, True),
    (4096, 16, 4, True),
    (4096, 16, 1, True),
]
QUICK_CASES = [(128, 4, 4, False), (128, 4, 2, True)]


@dataclass
class Memory(Row):
    """A row of bytes, printed in MiB."""

    def median(self, name: str) -> float:
        return self.seconds[name][0] / (1 << 20)

    def line(self) -> str:
        shares = {
            f"{name} of one device": f"{self.ratio(name, 'one device'):.1%}"
            for name in ("ring", "ours")
        }
        return json.dumps(json.loads(super().line()) | shares)


def step(method: str, tensors: list[torch.Tensor], causal: bool) -> Callable[[], torch.Tensor]:
    """Return a function that runs attention and its backward, and returns the result."""

    def call() -> torch.Tensor:
        for t in tensors:
            t.grad = None
        with flow.context_parallel(method):
            out = F.scaled_dot_product_attention(
                *tensors, is_causal=causal, enable_gqa=tensors[1].shape[1] != tensors[0].shape[1]
            )
        out.sum().backward()
        return out

    return call


def compare(length: int, heads: int, of_keys: int, causal: bool, rounds: int) -> list[Row]:
    everyone, generator = flow.placement.all("cpu"), torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, h, length, WIDTH, generator=generator) for h in (heads, of_keys, of_keys)
    ]
    tensors = [
        t.to_global(everyone, flow.sbp.broadcast)
        .to_global(sbp=flow.sbp.split(2))
        .detach()
        .clone()
        .requires_grad_()
        for t in whole
    ]
    calls = {"ours" if m == "auto" else m: step(m, tensors, causal) for m in METHODS}
    results = {name: call().detach().to_local() for name, call in calls.items()}
    for name, result in results.items():
        if not torch.allclose(result, results["gather"], atol=1e-4):
            sys.exit(f"{name} does not do the same work as gather")
    case = (
        f"{'causal ' if causal else ''}{length} x {heads} "
        f"heads{f' ({of_keys} of keys)' if heads != of_keys else ''}, {dist.get_world_size()} "
        f"ranks"
    )
    memory = {name: [most_of([held_by(call, tensors)])[0]] for name, call in calls.items()}
    alone = [t.requires_grad_() for t in whole]
    memory["one device"] = [held_by(step("auto", alone, causal), alone)]
    timed = Row(case, interleave(calls, rounds, calls=1, warm_up=1), "ms")
    busiest = Row(
        f"busiest, {case}",
        {
            name: most_of(found)
            for name, found in interleave(calls, rounds, 1, 0, time.process_time).items()
        },
        "ms",
    )
    return [timed, busiest, Memory(f"memory, {case}", memory, "MiB")]


def held_by(call: Callable[[], torch.Tensor], tensors: list[torch.Tensor]) -> float:
    """Return the peak bytes during a call, with inputs and their gradients."""
    with Held() as held:
        call()
    return held.most + sum((t.to_local() if t.is_global else t).nbytes for t in tensors)


def most_of(found: list[float]) -> list[float]:
    """Return the maximum of each number over the ranks."""
    most = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=5)
    if "RANK" not in os.environ:
        sys.exit(started(2) or started(4))
    torch.set_num_threads(1)
    flow.env.get_rank()  # starts the process group
    rows = [
        row
        for case in (QUICK_CASES if chosen.quick else CASES)
        if chosen.only in str(case[0])
        for row in compare(*case, chosen.steps)
    ]
    if dist.get_rank() == 0:
        show(rows, chosen.json, "gather")


if __name__ == "__main__":
    main()
