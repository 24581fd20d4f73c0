"""Measure the cost of comparing the ranks' calls, in a training step of the example's GPT.

The step runs with and without comparison, over shared memory, gloo and MPI. "off" records nothing
and compares nothing: it sets a field of the world that users cannot set. The limit of the cost is
1 % of a step of the GPT 4 x 128.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import (
    LEAST,
    QUICK_SIZES,
    SIZES,
    Row,
    Size,
    interleave,
    options,
    same_losses,
    show,
    started,
    training_step,
)
from torch import Tensor
from train_gpt import PARALLEL, spread

import globaltensor as flow
from globaltensor._ops.dispatch import fresh_plans
from globaltensor._ops.rules import Derived
from globaltensor.distributed.world import world

#: Environment variable that names the transport which a started rank measures.
TRANSPORT = "GLOBALTENSOR_BENCHMARK_TRANSPORT"
TRANSPORTS = {"shared memory": "gloo", "gloo": "gloo", "mpi": "mpi"}


def switched(step: Callable[[], Tensor], on: bool) -> Callable[[], Tensor]:
    """Return the step with or without comparison.

    It has plans of its own, because a plan saves the code that records its calls."""
    plans = Derived()

    def once() -> Tensor:
        here = world()
        before, here.compares = here.compares, on
        try:
            with fresh_plans(plans):
                return step()
        finally:
            here.compares = before

    return once


def compare(size: Size, how: str, rounds: int) -> Row:
    """Time a step of the same model with and without comparison."""
    everyone, steps = flow.placement.all("cpu"), {}
    for name in ("off", "ours"):
        model = size.model()
        spread(model, PARALLEL[how], everyone)
        rows: Any = size.rows()
        shared = rows.to_global(everyone, flow.sbp.broadcast).to_global(sbp=PARALLEL[how].batch)
        steps[name] = switched(training_step(model, shared), name == "ours")
    same_losses({name: lambda name=name: steps[name]().item() for name in steps})
    return Row(
        f"{how}, gpt step {size}, {os.environ[TRANSPORT]}",
        interleave(steps, rounds, calls=3, least=3 * LEAST),
        "ms",
    )


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=15)
    if "RANK" not in os.environ:
        for transport, backend in TRANSPORTS.items():
            if backend == "mpi" and not importlib.util.find_spec("mpi4py"):
                continue
            os.environ |= {
                TRANSPORT: transport,
                "GLOBALTENSOR_SHARED_MEMORY": str(int(transport == "shared memory")),
            }
            if status := started(chosen.nproc, backend):
                sys.exit(status)
        return
    torch.set_num_threads(1)
    cases = [
        (size, how)
        for size in (QUICK_SIZES if chosen.quick else SIZES[:2])
        for how in ("data", "tensor")
    ]
    rows = [
        compare(size, how, chosen.steps) for size, how in cases if chosen.only in f"{how} {size}"
    ]
    if flow.env.get_rank() == 0:
        show(rows, chosen.json, "off")


if __name__ == "__main__":
    main()
