"""Compare a tensor-parallel training step of the example's GPT: DTensor and ours.

DTensor is applied by `parallelize_module`. Both split the same parameters in the same dims: the
projections of every block by columns and rows, the embedding and the output layer by bytes. Both
compute the loss from split logits. The second case of each size also splits the activations between
the projections in time (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable

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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from train_gpt import PARALLEL, spread

import globaltensor as flow


def parallelized(model: nn.Module, sequence: bool) -> nn.Module:
    """Apply DTensor to a model as in its documentation.

    The calls between the projections run on plain local tensors, which is DTensor's cheapest
    variant."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.[qkv]": ColwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.out": RowwiseParallel(output_layouts=between),
        "blocks.*.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    model.head.weight = model.token.weight  # parallelize_module breaks the tie
    if sequence:
        norms = ("blocks.*.norm1", "blocks.*.norm2", "norm")
        parallelize_module(model, mesh, {name: SequenceParallel() for name in norms})
        parallelize_module(
            model,
            mesh,
            {
                name: PrepareModuleOutput(
                    output_layouts=Shard(1), desired_output_layouts=Replicate()
                )
                for name in norms
            },
        )
        rank, size = dist.get_rank(), dist.get_world_size()
        model.position.register_forward_hook(
            lambda module, inputs, output: output.tensor_split(size)[rank]
        )
        # Each rank sees only its own slice of time, so the positions' gradients are partial.
        model.position.weight.register_hook(all_reduced)
    return model


def all_reduced(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient


def dtensor_step(model: nn.Module, rows: Tensor) -> Callable[[], Tensor]:
    """Return a training step with a group of parameters for each type.

    The fused optimizer accepts plain and DTensor parameters, but not in one group."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    step = training_step(model, rows, [g for g in groups if g])

    def with_loss_parallel() -> Tensor:
        with loss_parallel():
            return step()

    return with_loss_parallel


def full(loss: Tensor) -> float:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def compare(size: Size, mode: str, rounds: int) -> Row:
    """Time both steps at one size; all ranks have the full batch before the clock starts."""
    rows, ours, everyone = size.rows(), size.model(), flow.placement.all("cpu")
    spread(ours, PARALLEL[mode], everyone)
    steps = {
        "dtensor": dtensor_step(parallelized(size.model(), mode == "sequence"), rows),
        "ours": training_step(ours, rows.to_global(everyone, flow.sbp.broadcast)),
    }
    same_losses(
        {"dtensor": lambda: full(steps["dtensor"]()), "ours": lambda: steps["ours"]().item()}
    )
    return Row(f"gpt {mode} step {size}", interleave(steps, rounds, calls=3, least=LEAST), "ms")


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=15)
    on_ranks(chosen.nproc)
    torch.set_num_threads(1)
    flow.env.get_rank()  # starts the process group that all contenders share
    sizes = [size for size in (QUICK_SIZES if chosen.quick else SIZES) if chosen.only in str(size)]
    rows = [compare(size, mode, chosen.steps) for size in sizes for mode in ("tensor", "sequence")]
    if dist.get_rank() == 0:
        show(rows, chosen.json, "dtensor")


if __name__ == "__main__":
    main()
