"""Compare a pipelined training step of the example's GPT: torch's pipelining and `nn.Graph`.

Torch's contender is torch.distributed.pipelining. The step has 8 micro-batches and is run by each
schedule. Each rank has one core. Apart from the steps' times, the benchmark reports bubbles and
activations. One bubble comes from the run's spans. The other is predicted by the simulator from the
costs of the actions in the same run. The figures are medians over the rounds of each round's own
figures, and of the ratio of the two bubbles. The activations are the maximum that each lane held,
and the maximum that the schedule promises.

A bubble is the time that a rank is idle, in milliseconds and in percent of an ideal step
("Efficient Large-Scale Language Model Training on GPU Clusters", Narayanan et al., SC 2021). The
ideal step is the busy time of a rank in the round's least busy schedule, so that one measure serves
all schedules. The bubble as a share of the schedule's own step is reported too. That share is the
smaller the slower the actions are, and actions are slower the more activations a schedule holds.
The example ties the embedding to the output layer. Torch's stages cannot, so here the weights are
untied for both contenders.
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
#: Large enough that an action takes milliseconds, so that the schedule is measured.
SIZES = [Size(8, 128, 4, 128, 16)]
QUICK_SIZES = [Size(4, 32, 2, 16, 8)]
#: schedule -> (the lane of each stage, torch's schedule with the same order of actions, or the
#: most similar one)
SCHEDULES = {
    "gpipe": ((0, 1), "ScheduleGPipe"),
    "1f1b": ((0, 1), "Schedule1F1B"),
    "interleaved": ((0, 1, 0, 1), "ScheduleInterleaved1F1B"),
    "zb-h1": ((0, 1), "ScheduleInterleavedZeroBubble"),
    "zb-h2": ((0, 1), "ScheduleInterleavedZeroBubble"),
    "zb-v": ((0, 1, 1, 0), "ScheduleZBVZeroBubble"),
}


def model_of(size: Size) -> Any:
    """Make the example's GPT, with an output layer that has a weight of its own."""
    model: Any = size.model()
    model.head.weight = nn.Parameter(model.token.weight.detach().clone())
    return model


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(parameters: Any, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=fused)


class Training(flow.nn.Graph):
    """A training step as a graph: forward, backward and update."""

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
    """A step of the graph, with the timeline and the activations of a run."""

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
        """Run a step, and return the timeline of all ranks."""
        dist.barrier()
        self.step()
        return timeline(self.graph.timeline().spans)

    def held(self) -> list[int]:
        """Return the maximum number of activations that each lane held during a step."""
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
    """A stage for torch: some of the blocks.

    The first stage also has the embeddings, the last one the norm and the output layer."""

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
    """The same step by torch.distributed.pipelining, as in its documentation."""

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
    """Return on every rank the loss that rank ``source`` has."""
    value = loss.detach().clone() if loss.numel() == 1 else torch.zeros(())
    dist.broadcast(value, source)
    return value.item()


def compare(
    size: Size, names: Sequence[str], rounds: int
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Time the steps of all schedules in turn, and return the rows of times and of bubbles.

    The schedules take turns with each other, so that they can be compared too."""
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
    """Measure bubbles, simulate them from the costs of the same steps, and count activations."""
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
    """Return the idle seconds of a run, the mean of its lanes."""
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
