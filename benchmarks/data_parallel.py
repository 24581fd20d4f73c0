"""Compare a data-parallel training step of the example's GPT: torch DDP and ours.

The limit, "plain", is the same step without communication. "ours" trains as the example does: the
target count of the mean loss is reduced together with the gradients. "apart" reduces the count in a
message of its own. (DDP divides by each rank's own count, and sends none.) Both start from gloo. On
one host ours uses shared memory (docs/boxing.md), and with GLOBALTENSOR_SHARED_MEMORY=0 gloo alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_gpt import PARALLEL, spread

import globaltensor as flow


def mean(loss: Tensor) -> float:
    """Return the mean of the ranks' local losses."""
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def compare(size: Size, rounds: int) -> Row:
    """Time the steps of all contenders at one size.

    Each rank's share of the batch is the same for every contender, and is on the rank before the
    clock starts."""
    rows = size.rows()
    mine = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
    ours, also, everyone = size.model(), size.model(), flow.placement.all("cpu")
    spread(ours, PARALLEL["data"], everyone)
    spread(also, PARALLEL["data"], everyone)
    shared = rows.to_global(everyone, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
    steps = {
        "plain": training_step(size.model(), mine),
        "ddp": training_step(DistributedDataParallel(size.model()), mine),
        "ours": riding(training_step(ours, shared)),
        "apart": training_step(also, shared),
    }
    same_losses(
        {
            "ddp": lambda: mean(steps["ddp"]()),
            **{name: lambda name=name: steps[name]().item() for name in ("ours", "apart")},
        }
    )
    return Row(f"gpt step {size}", interleave(steps, rounds, calls=3, least=LEAST), "ms")


def riding(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the step with the mean loss's target count reduced together with the gradients."""

    def once() -> Tensor:
        flow.fuse_loss_count()
        try:
            return step()
        finally:
            flow.fuse_loss_count(False)

    return once


LINEARS = "linears 8 x 512, ours: ddp over mpi"


def over_backends(rounds: int, views: bool) -> Row:
    """Time a step that is mostly communication, by torch's DDP over gloo and over our mpi.

    With ``views``, DDP keeps gradients in the buckets where they are summed. Otherwise it copies
    them there and back, which takes a quarter of the step over mpi."""
    x, gloo = (
        torch.randn(4, 512, generator=torch.Generator().manual_seed(dist.get_rank())),
        dist.new_group(backend="gloo"),
    )

    def step(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], float]:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def once() -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return once

    over_gloo = step(
        lambda model: DistributedDataParallel(
            model, process_group=gloo, gradient_as_bucket_view=views
        )
    )
    over_mpi = step(lambda model: DistributedDataParallel(model, gradient_as_bucket_view=views))
    steps = {"plain": step(lambda model: model), "ddp": over_gloo, "ours": over_mpi}
    same_losses({name: steps[name] for name in ("ddp", "ours")})
    return Row(
        LINEARS + ", gradients as views" * views,
        interleave(steps, rounds, calls=3, least=LEAST),
        "ms",
    )


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=15)
    if "RANK" not in os.environ:
        # First a world over gloo, then one over mpi, whose ranks must be started for it.
        mpi = importlib.util.find_spec("mpi4py") and chosen.only in LINEARS
        sys.exit(started(chosen.nproc) or (started(chosen.nproc, "mpi") if mpi else 0))
    torch.set_num_threads(1)
    flow.env.get_rank()  # starts the process group that all contenders share
    if dist.get_backend() == "mpi":
        rows = [over_backends(chosen.steps, views) for views in (False, True)]
    else:
        rows = [
            compare(size, chosen.steps)
            for size in (QUICK_SIZES if chosen.quick else SIZES)
            if chosen.only in str(size)
        ]
    if dist.get_rank() == 0:
        show(rows, chosen.json, "ddp")


if __name__ == "__main__":
    main()
