"""A data-parallel training step of the example's GPT: torch DDP and ours, and the same step with no communication at all as the limit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import QUICK_SIZES, SIZES, Row, Size, interleave, on_ranks, options, same_losses, show, training_step
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from train_gpt import PARALLEL, spread

import globaltensor as flow


def mean(loss: Tensor) -> float:
    """The mean over the ranks of their local losses."""
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def compare(size: Size, rounds: int) -> Row:
    """Each rank's share of the batch is the same for every contender; data is there before the clock starts."""
    rows = size.rows()
    mine = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
    ours, everyone = size.model(), flow.placement.all("cpu")
    spread(ours, PARALLEL["data"], everyone)
    shared = rows.to_global(everyone, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
    steps = {
        "plain": training_step(size.model(), mine),
        "ddp": training_step(DistributedDataParallel(size.model()), mine),
        "ours": training_step(ours, shared),
    }
    same_losses({"ddp": lambda: mean(steps["ddp"]()), "ours": lambda: steps["ours"]().item()})
    return Row(f"gpt step {size}", interleave(steps, rounds, calls=3), "ms")


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=15)
    on_ranks(chosen.nproc)
    torch.set_num_threads(1)
    flow.env.get_rank()  # starts the process group that all contenders share
    rows = [compare(size, chosen.steps) for size in (QUICK_SIZES if chosen.quick else SIZES) if chosen.only in str(size)]
    if dist.get_rank() == 0:
        show(rows, chosen.json, "ddp")


if __name__ == "__main__":
    main()
