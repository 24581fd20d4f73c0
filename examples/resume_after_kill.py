"""Train through the death of a rank: the launcher restarts all ranks, and they resume.

    python -m globaltensor.distributed.launch --nproc_per_node 2 --max_restarts 1 \\
        examples/resume_after_kill.py --checkpoint runs/resume.pt --die-at 12

Every few steps the ranks write a checkpoint: model, optimizer, and the place in the data. In the
first attempt the last rank kills itself by SIGKILL, as if its machine had failed. The second
attempt goes on from the last checkpoint. The losses are those of a run in which nothing has
happened. A checkpoint can also be resumed on another number of processes.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import globaltensor as flow
import globaltensor.distributed as dist
from globaltensor.utils.data import GlobalDataLoader


def data(batch: int, placement: flow.placement) -> GlobalDataLoader:
    """Return a loader of rows [batch, 16] and classes, the same on any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(320, 16, generator=generator)
    labels = rows[:, :4].argmax(1)  # the class: which of the first four features is largest
    split = {"placement": placement, "sbp": flow.sbp.split(0)}
    return GlobalDataLoader(TensorDataset(rows, labels), batch, shuffle=True, seed=2, **split)


class Checkpoint:
    """A file with all that a run needs to go on. Every rank calls the methods; rank 0 writes."""

    def __init__(self, path: Path, **parts: nn.Module | torch.optim.Optimizer | GlobalDataLoader):
        self.path, self.parts = path, parts

    def save(self, step: int, losses: list[float]) -> None:
        """Write full values. A rank that dies meanwhile leaves the file before, or the new one."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        flow.save({**state, "step": step, "losses": losses}, self.path, global_dst_rank=0)

    def restore(self) -> tuple[int, list[float]]:
        """Load the file if there is one. Return the number of steps done, and their losses."""
        found = [self.path.exists()]
        dist.broadcast_object_list(found, src=0)  # rank 0 knows, whatever disks the others have
        if not found[0]:
            return 0, []
        state = flow.load(self.path, global_src_rank=0)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])  # into the layout that the part has here
        return state["step"], state["losses"]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, resuming from the checkpoint if there is one, and return the losses of all steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/resume.pt"))
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die-at", type=int, help="the step at which the last rank dies, once")
    parser.add_argument("--parallel", choices=["data", "fsdp"], default="fsdp")
    options = parser.parse_args(arguments)
    rank, size = flow.env.get_rank(), flow.env.get_world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # set by the launcher

    everyone = flow.placement.all("cpu")
    torch.manual_seed(0)  # the same on every rank
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    flow.parallelize(model, everyone, options.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = data(32, everyone)
    if rank == 0:
        options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(options.checkpoint, model=model, optimizer=optimizer, loader=loader)
    step, losses = checkpoint.restore()
    if rank == 0:
        print(f"attempt {attempt}: {size} rank(s) start at step {step}", flush=True)
    while step < options.steps:
        for rows, labels in loader:  # the loader goes on where the checkpoint has left it
            if step == options.die_at and attempt == 0 and rank == size - 1:
                print(f"rank {rank} dies at step {step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            loss = F.cross_entropy(model(rows), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step % options.every == 0 or step == options.steps:
                checkpoint.save(step, losses)
            if step == options.steps:
                break
        else:
            loader.set_epoch(loader.epoch + 1)
    if rank == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses), flush=True)
    return losses


if __name__ == "__main__":
    main()
