"""The measured timeline of a pipeline's run, and a trace of it with the simulated one.

`Graph.timeline` calls `measured`."""

from __future__ import annotations

import os
from statistics import median

from ...distributed.world import world
from .runtime import Pipeline
from .schedule import Action, Span
from .simulate import simulate
from .timeline import Timeline, save_trace, timeline

__all__ = ["measured"]


def measured(pipeline: Pipeline, path: str | os.PathLike[str] | None = None) -> Timeline:
    """Return the timeline of the last run, a line for each rank, with the optimizer steps after it.

    With ``path``, rank 0 writes a trace there. The trace also holds the simulator's prediction from
    the run's own costs, a line for each lane. Collective among all ranks."""
    this_world, ranks = world(), sorted(pipeline.lanes)
    own_run = [(*span.action, span.start, span.end) for span in pipeline.spans], pipeline.stepped
    everyone = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        own_run, "measured_timeline"
    )
    spans, steps = [], []
    for i, rank in enumerate(ranks):
        rank_spans, step = everyone[rank]
        spans += [Span(i, Action(*action), start, end) for *action, start, end in rank_spans]
        if step is not None:
            steps.append((i, *step))
    line = timeline(spans, steps, [f"rank {rank}" for rank in ranks])
    if path is not None and this_world.rank == 0:
        seconds: dict[int, list[float]] = {lane: [] for lane in range(len(pipeline.schedule.rows))}
        for i, start, end in steps:
            seconds[pipeline.lanes[ranks[i]]].append(end - start)
        step_of = [median(each) if each else 0.0 for each in seconds.values()]
        save_trace(
            path,
            measured=line,
            simulated=simulate(
                pipeline.schedule, line.costs, edges=pipeline.crossing, step=step_of
            ),
        )
    return line
