"""A simulator of a training step: its time and its memory, by the schedule of its pipeline.

`inter_op.search` and `predict` call it. It models for each stage:

- the forward and backward passes, one micro-batch after the other in the order of the schedule;
- changes of layout within the passes, which do not overlap with computing;
- gathering sharded parameters, which overlaps with the pass that needs them;
- summing gradients, which overlaps with the last micro-batch's backward pass;
- transfers between stages, which overlap with computing, one message at a time on each edge and
  direction;
- the optimizer's step at the end.

Operations that overlap slow each other by the cluster's ``overlap``. Memory is parameters with
gradients and states, activations of the micro-batches in flight, and the most that a single call
needs temporarily.

Not modelled are jitter and stragglers, the allocator, contention between stages on one node's
links, and anything the host does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...cluster import Cluster
from ...graph.pipeline import Timeline, schedule, simulate, trace

__all__ = ["StageTimes", "StepSimulation", "step"]


@dataclass(frozen=True)
class StageTimes:
    """The costs of a pipeline stage.

    Seconds of a micro-batch are ``forward``, ``backward`` (of which ``again`` recomputes forward
    passes), and ``gathers`` of both passes. Seconds of a step are ``sums`` of gradients, and
    ``updates``. Bytes of each rank are ``kept`` permanently, ``activations`` of a micro-batch in
    flight, ``passing`` temporarily, and ``sent`` to the next stage. ``first`` is the first rank of
    the stage, ``ranks`` the number of its ranks.
    """

    forward: float
    backward: float
    again: float = 0.0
    gathers: float = 0.0
    sums: float = 0.0
    updates: float = 0.0
    kept: float = 0.0
    activations: float = 0.0
    passing: float = 0.0
    sent: float = 0.0
    first: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class StepSimulation:
    """The result of a simulated step.

    ``seconds`` is the time of the step. ``memory`` has the bytes of a rank for each lane of stages.
    ``timeline`` has the operations of each lane over time.
    """

    seconds: float
    memory: tuple[int, ...]
    timeline: Timeline

    @property
    def bubble(self) -> float:
        """The fraction of all lanes' time that is idle."""
        return self.timeline.bubble

    def trace(self) -> dict[str, Any]:
        """Return a Chrome trace with a thread for each lane, as `save_trace` writes for a run."""
        return trace(simulated=self.timeline)

    def __str__(self) -> str:
        return (
            f"{self.seconds:.6g} s a step, at most {max(self.memory) / 2**30:.2f} GiB a "
            f"rank\n{self.timeline.draw()}"
        )


def step(
    stages: Sequence[StageTimes], name: str, lanes: Sequence[int], micros: int, cluster: Cluster
) -> StepSimulation:
    """Simulate one step by the schedule ``name``. ``lanes[k]`` is the lane of stage k."""
    trains = any(s.backward for s in stages)
    made = schedule(name if trains else "forward", lanes, micros)
    costs: dict[Any, float] = {}
    for k, s in enumerate(stages):
        # Both passes gather equally much.
        ahead, behind = (s.gathers / 2, s.gathers / 2) if trains else (s.gathers, 0.0)
        costs["F", k] = cluster.overlapped(s.forward, ahead)
        inputs = s.again + (s.backward - s.again) / 2
        backward = cluster.overlapped(s.backward, behind)
        costs["B", k], costs["I", k] = backward, inputs + backward - s.backward
        costs["W", k] = s.backward - inputs
    # Summing gradients overlaps with the last backward pass of its stage. The rest comes after it.
    last = [0.0] * (max(lanes) + 1)
    for k, lane in enumerate(lanes):
        s = stages[k]
        behind = s.gathers / 2 if s.backward else 0.0
        last[lane] += (
            cluster.overlapped(s.backward, behind + s.sums)
            - cluster.overlapped(s.backward, behind)
            + s.updates
        )
    travel = {
        (k, k + 1): cluster.seconds("send", s.sent, (s.first, stages[k + 1].first))
        for k, s in enumerate(stages[:-1])
        if s.sent and lanes[k] != lanes[k + 1]
    }
    sizes = [round(s.activations) for s in stages]
    done = simulate(made, costs, travel or 0.0, step=last, nbytes=sizes)
    memory = []
    for lane in range(max(lanes) + 1):
        own = [s for s, where in zip(stages, lanes, strict=True) if where == lane]
        memory.append(
            round(
                sum(s.kept for s in own)
                + (done.peak_bytes[lane] if trains else 0)
                + max(s.passing for s in own)
            )
        )
    names = []
    for lane in range(max(lanes) + 1):
        s = next(s for s, where in zip(stages, lanes, strict=True) if where == lane)
        names.append(
            f"ranks {s.first}-{s.first + s.ranks - 1}" if s.ranks > 1 else f"rank {s.first}"
        )
    line = Timeline(done.spans, done.lanes, done.steps, names=tuple(names))
    return StepSimulation(line.makespan, tuple(memory), line)
