"""Compare a fully sharded training step of the example's GPT: FSDP2 and ours.

Parameters, gradients and optimizer state are sharded over the ranks. FSDP2 by default frees the
gathered parameters after the forward and gathers them again in the backward. `fsdp2_keep` keeps
them (reshard_after_forward=False), which means less traffic and more memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from common import (
    LEAST,
    QUICK_SIZES,
    SIZES,
    Row,
    Size,
    interleave,
    on_ranks,
    options,
    same_losses,
    show,
    training_step,
)
from data_parallel import mean
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import PARALLEL, spread

import globaltensor as flow


def sharded(model: nn.Module, reshard: bool) -> nn.Module:
    """Apply FSDP2 as its documentation does: each block is a unit, and so is the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def compare(size: Size, rounds: int) -> Row:
    """Time the steps of all contenders at one size.

    Each rank's share of the batch is the same for every contender, and is on the rank before the
    clock starts."""
    rows = size.rows()
    mine = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
    ours, everyone = size.model(), flow.placement.all("cpu")
    spread(ours, PARALLEL["fsdp"], everyone)
    shared = rows.to_global(everyone, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
    steps = {
        "fsdp2": training_step(sharded(size.model(), True), mine),
        "fsdp2_keep": training_step(sharded(size.model(), False), mine),
        "ours": training_step(ours, shared),
    }
    same_losses(
        {
            "fsdp2": lambda: mean(steps["fsdp2"]()),
            "fsdp2_keep": lambda: mean(steps["fsdp2_keep"]()),
            "ours": lambda: steps["ours"]().item(),
        }
    )
    return Row(f"gpt step {size}", interleave(steps, rounds, calls=3, least=LEAST), "ms")


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=15)
    on_ranks(chosen.nproc)
    torch.set_num_threads(1)
    flow.env.get_rank()  # starts the process group that all contenders share
    rows = [
        compare(size, chosen.steps)
        for size in (QUICK_SIZES if chosen.quick else SIZES)
        if chosen.only in str(size)
    ]
    if dist.get_rank() == 0:
        show(rows, chosen.json, "fsdp2")


if __name__ == "__main__":
    main()
