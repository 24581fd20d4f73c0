"""Train a GPT with pipeline, data and tensor parallelism at once, on eight simulated ranks.

    python examples/three_axes.py

The simulated ranks are threads of one process. Their values, layouts and messages are those of
eight processes, so one computer is enough. The same file also runs on eight processes:

    python -m globaltensor.distributed.launch --nproc_per_node 8 examples/three_axes.py

There are two pipeline stages of four ranks. The ranks of a stage are a grid [data, tensor] of
2 x 2. The first axis splits the rows of the batch, and the second splits the layers.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from train_gpt import GPT, TENSOR, corpus, draw, loss_of

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate

B, S = flow.sbp.broadcast, flow.sbp.split
LAYERS, WIDTH, HEADS, CONTEXT, BATCH, RATE = 4, 32, 4, 32, 8, 0.1


class Step(flow.nn.Graph):
    """A training step: four micro-batches of a batch pass through the stages in turn (1F1B)."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(4)
        self.config.set_schedule("1f1b")

    def build(self, rows: Tensor) -> Tensor:
        loss = loss_of(self.model, rows)
        loss.backward()
        return loss


def alone(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """Train a model by plain PyTorch, on one device, and return its losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for rows in batches:
        loss = loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_a_rank(start: nn.Module, batches: list[Tensor]) -> tuple[list[float], str]:
    """Train a copy of the model, and return its losses and a text on what this rank does.

    The copy is made before the call of `cut`, because all simulated ranks share one process."""
    rank, stages = flow.env.get_rank(), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    grids = [flow.placement("cpu", grid) for grid in stages]
    layout = {name: [B, sbp] for name, sbp in TENSOR.items()}  # data parallel over the first axis
    second = f"blocks.{LAYERS // 2}"  # the first module of the second stage
    model = flow.pipeline.cut(copy.deepcopy(start), grids, at=[second], sbp=layout)
    for block in model.blocks:  # sum the partial result of a pair of tensor-parallel layers at once
        for layer in (block.out, block.down):
            layer.register_forward_hook(lambda module, inputs, out: out.to_global(sbp=[S(0), B]))
    step = Step(model, torch.optim.SGD(model.parameters(), lr=RATE))
    losses = []
    for rows in batches:
        with record_collectives() as sent:
            rows = rows.to_global(grids[0], [B, B]).to_global(sbp=[S(0), B])
            losses.append(step(rows).item())
    weight = model.blocks[0 if rank < 4 else LAYERS - 1].up.weight
    traffic = Counter(f"{each.kind} with {sorted(set(each.ranks) - {rank})}" for each in sent)
    text = f"rank {rank}: stage {rank // 4}, up.weight {tuple(weight.to_local().shape)} of "
    text += f"{tuple(weight.shape)}; in a step: " + ", ".join(
        f"{n} x {k}" for k, n in traffic.items()
    )
    return losses, text


def main(arguments: Sequence[str] | None = None) -> list[list[float]]:
    """Train on one device and on eight ranks, and return the losses of both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(arguments)
    size = flow.env.get_world_size()
    if size not in (1, 8):
        raise SystemExit(f"this example is for 8 ranks, simulated or real; there are {size}")
    torch.manual_seed(0)  # the same on every rank
    model, text = GPT(LAYERS, WIDTH, HEADS, CONTEXT).double(), corpus()
    batches = [draw(text, BATCH, CONTEXT, step) for step in range(options.steps)]
    work = (on_a_rank, model, batches)
    results = simulate(8, *work) if size == 1 else [on_a_rank(model, batches)]
    losses = [alone(copy.deepcopy(model), batches), results[0][0]]
    if flow.env.get_rank() == 0:
        print("one device   ", *(f"{loss:.6f}" for loss in losses[0]))
        print("eight ranks  ", *(f"{loss:.6f}" for loss in losses[1]))
        print(*(text for _, text in results[:: 7 if size == 1 else 1]), sep="\n")
    return losses


if __name__ == "__main__":
    main()
