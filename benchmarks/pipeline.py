"""A training step of the example's GPT in pipeline stages, 8 micro-batches:
torch.distributed.pipelining and `nn.Graph`, by each schedule.

Each rank has one core. Beside the steps' times: the bubble as the run's spans show it, and as the
simulator foretells it from what each action cost in the same run (medians over the rounds of each
round's own figures, and of one over the other); the activations that each lane came to hold, and
those that the schedule promises. A bubble is the time that a rank is idle, in milliseconds and in
percent of an ideal step ("Efficient Large-Scale Language Model Training on GPU Clusters", Narayanan
et al., SC 2021), which is what the least busy of the round's schedules keeps a rank busy with: one
measure for all. As a share of its own step, which is told too, a schedule's bubble seems the
smaller the slower its actions are, and they are slower the more activations it holds. The example
ties the embedding to the output layer; torch's stages cannot, so here nobody's do.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import Row, Size, interleave, on_ranks, options, same_losses, show, table
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import globaltensor as flow
from globaltensor.graph.pipeline import Timeline, max_activations, simulate, timeline

MICROS = 8
#: Large enough that an action takes milliseconds: what is measured is the schedule.
SIZES = [Size(8, 128, 4, 128, 16)]
QUICK_SIZES = [Size(4, 32, 2, 16, 8)]
#: schedule -> (the lane of each stage, torch's schedule that orders the same actions, or the
#: nearest)
SCHEDULES = {
    "gpipe": ((0, 1), "ScheduleGPipe"),
    "1f1b": ((0, 1), "Schedule1F1B"),
    "interleaved": ((0, 1, 0, 1), "ScheduleInterleaved1F1B"),
    "zb-h1": ((0, 1), "ScheduleInterleavedZeroBubble"),
    "zb-h2": ((0, 1), "ScheduleInterleavedZeroBubble"),
    "zb-v": ((0, 1, 1, 0), "ScheduleZBVZeroBubble"),
}


def model_of(size: Size) -> Any:
    """The example's GPT; the output layer has a weight of its own."""
    model: Any = size.model()
    model.head.weight = nn.Parameter(model.token.weight.detach().clone())
    return model


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(parameters: Any, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=fused)


class Training(flow.nn.Graph):
    """The whole of a step."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.config.set_gradient_accumulation_steps(MICROS)
        self.config.set_schedule(name)
        self.add_optimizer(optimizer_of(model.parameters()))

    def build(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(self.model(ids), targets)
        loss.backward()
        return loss


class Ours:
    """A step of the graph, and what its last run was like."""

    def __init__(self, size: Size, name: str, lanes: Sequence[int]) -> None:
        self.name, self.lanes = name, lanes
        places = [flow.placement("cpu", [lane]) for lane in lanes]
        per_stage = size.layers // len(lanes)
        self.graph = Training(
            flow.pipeline.cut(
                model_of(size), places, at=[f"blocks.{k * per_stage}" for k in range(1, len(lanes))]
            ),
            name,
        )
        rows = size.rows()
        self.batch = [
            t.contiguous().to_global(p, flow.sbp.broadcast)
            for t, p in ((rows[:, :-1], places[0]), (rows[:, 1:], places[-1]))
        ]
        self.last = lanes[-1]

    def step(self) -> Tensor:
        return self.graph(*self.batch)  # type: ignore[no-any-return]

    def loss(self) -> float:
        return told(self.step().to_local(), self.last)

    @property
    def pipeline(self) -> Any:
        return self.graph._last.staged.pipeline

    def traced(self) -> Timeline:
        """One step -> when each rank did what."""
        dist.barrier()
        self.step()
        return timeline(self.graph.timeline().spans)

    def held(self) -> list[int]:
        """The most activations that each lane held during a step."""
        most, stages = 0, self.pipeline.stages

        def counting(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                nonlocal most
                out = forward(*args)
                most = max(most, sum(len(stage.micros) for stage in stages.values()))
                return out

            return run

        for stage in stages.values():
            stage.forward = counting(stage.forward)
        self.step()
        for stage in stages.values():
            del stage.forward
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, most)
        return everyone


class Part(nn.Module):
    """One of torch's stages: some of the blocks, with the model's beginning or end where they are
    its first or last."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        n = len(model.blocks) // stages
        self.token, self.position = (model.token, model.position) if stage == 0 else (None, None)
        self.blocks = model.blocks[stage * n : (stage + 1) * n]
        self.norm, self.head = (model.norm, model.head) if stage == stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class Theirs:
    """The same step by torch.distributed.pipelining, as its documentation has it."""

    def __init__(self, size: Size, kind: str, lanes: Sequence[int]) -> None:
        rank, model = dist.get_rank(), model_of(size)
        mine = [k for k, lane in enumerate(lanes) if lane == rank]
        parts = [Part(copy.deepcopy(model), k, len(lanes)) for k in mine]
        stages = [
            PipelineStage(part, k, len(lanes), torch.device("cpu"))
            for part, k in zip(parts, mine, strict=True)
        ]
        made = getattr(torch_schedules, kind)
        single = issubclass(made, torch_schedules.PipelineScheduleSingle)
        self.schedule = made(
            stages[0] if single else stages, n_microbatches=MICROS, loss_fn=loss_of
        )
        self.optimizer = optimizer_of([p for part in parts for p in part.parameters()], True)
        rows = size.rows()
        self.inputs, self.targets = (
            (rows[:, :-1].contiguous(),) if 0 in mine else (),
            rows[:, 1:].contiguous() if len(lanes) - 1 in mine else None,
        )
        self.last = lanes[-1]

    def step(self) -> list[Tensor]:
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        self.schedule.step(*self.inputs, target=self.targets, losses=losses)
        self.optimizer.step()
        return losses

    def loss(self) -> float:
        losses = self.step()
        return told(torch.stack(losses).mean() if losses else torch.zeros(()), self.last)


def told(loss: Tensor, source: int) -> float:
    """A loss that one rank knows."""
    value = loss.detach().clone() if loss.numel() == 1 else torch.zeros(())
    dist.broadcast(value, source)
    return value.item()


def compare(
    size: Size, names: Sequence[str], rounds: int
) -> tuple[list[Row], list[dict[str, Any]]]:
    """The times of the schedules' steps, all in turn, so that schedules can be compared too; and
    their bubbles."""
    every = {
        name: {
            "torch": Theirs(size, SCHEDULES[name][1], SCHEDULES[name][0]),
            "ours": Ours(size, name, SCHEDULES[name][0]),
        }
        for name in names
    }
    for both in every.values():
        same_losses({who: steps.loss for who, steps in both.items()})
    seconds = interleave(
        {
            f"{who} {name}": steps.step
            for name, both in every.items()
            for who, steps in both.items()
        },
        rounds,
        calls=1,
    )
    rows = [
        Row(f"gpt {name} {size}", {who: seconds[f"{who} {name}"] for who in both}, "ms")
        for name, both in every.items()
    ]
    found = bubbles([both["ours"] for both in every.values()], 2 * rounds)
    return rows, [
        {"case": row.case, "unit": ""} | more for row, more in zip(rows, found, strict=True)
    ]


def bubbles(contenders: Sequence[Any], rounds: int) -> list[dict[str, Any]]:
    """Measured, and simulated from the costs of the same steps; the activations held."""
    found: list[list[tuple[float, ...]]] = [[] for _ in contenders]
    for ours in contenders:
        ours.graph.config.enable_timeline()
        ours.step()
    for _ in range(rounds):
        runs = [ours.traced() for ours in contenders]
        ideal = min(run.makespan - idle_of(run) for run in runs)
        for ours, run, figures in zip(contenders, runs, found, strict=True):
            model = simulate(ours.pipeline.schedule, run.each)
            idle, foretold = idle_of(run), idle_of(model)
            shares = idle / ideal * 100, foretold / ideal * 100, idle / foretold, run.bubble * 100
            figures.append(
                (run.makespan * 1e3, model.makespan * 1e3, idle * 1e3, *shares, run.period * 1e3)
            )
    names = (
        "run ms",
        "simulated ms",
        "idle ms",
        "bubble %",
        "simulated %",
        "of simulated",
        "of its step %",
        "period ms",
    )
    out = []
    for ours, figures in zip(contenders, found, strict=True):
        middle = [round(statistics.median(column), 2) for column in zip(*figures, strict=True)]
        held = {
            "held": "/".join(map(str, ours.held())),
            "promised": "/".join(map(str, max_activations(ours.name, ours.lanes, MICROS))),
        }
        out.append(dict(zip(names, middle, strict=True)) | held)
    return out


def idle_of(line: Timeline) -> float:
    """Seconds, the mean of the lanes."""
    return line.bubble * line.makespan


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=25)
    on_ranks(chosen.nproc)
    torch.set_num_threads(1)
    flow.env.get_rank()  # starts the process group that all contenders share
    rows, details = [], []
    for size in QUICK_SIZES if chosen.quick else SIZES:
        names = [name for name in SCHEDULES if chosen.only in f"{name} {size}"]
        if names:
            found = compare(size, names, chosen.steps)
            rows += found[0]
            details += found[1]
    if dist.get_rank() == 0:
        show(rows, chosen.json, "torch")
        print(
            "\n".join(map(json.dumps, details))
            if chosen.json
            else f"\n{table(details)}\nload {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
