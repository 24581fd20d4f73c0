"""The simulator: predict when each lane runs what, from the costs of actions and transfers.

It is deterministic and runs no action. Users and the search for layouts call `simulate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ScheduleError
from .schedule import Action, Schedule, Span
from .timeline import Timeline
from .validate_schedule import Flow, peak_activations, running_order

__all__ = ["ScheduleSimulation", "simulate"]


@dataclass(frozen=True)
class ScheduleSimulation(Timeline):
    """The timeline of a simulated schedule.

    ``in_flight`` is the maximum number of activations that each lane holds, and ``peak_bytes``
    their bytes, if bytes were passed."""

    schedule: Schedule | None = None
    in_flight: tuple[int, ...] = ()
    peak_bytes: tuple[int, ...] = ()

    def __str__(self) -> str:
        name = self.schedule.name if self.schedule else ""
        held = f"at most {', '.join(map(str, self.in_flight))} activations in flight"
        return f"{name}: {held}\n{super().__str__()}"


def simulate(
    schedule: Schedule,
    costs: Mapping[Action, float] | Mapping[tuple[str, int], float] | Mapping[str, float],
    transfer: float | Mapping[tuple[int, int], float] = 0.0,
    *,
    edges: Collection[tuple[int, int]] | None = None,
    step: float | Sequence[float] = 0.0,
    nbytes: Sequence[int] | None = None,
    kept: Sequence[int] | None = None,
) -> ScheduleSimulation:
    """Simulate ``schedule`` and return its timeline.

    ``costs``: seconds by (kind, stage), by kind for all stages, or by action; B may be left out if
    I and W are present. ``transfer``: seconds of a transfer between stages, one number or by (from,
    to). Gradients are transferred from (to) to (from), at the cost of (to, from), or else of (from,
    to). Transfers overlap computation. Transfers of one edge and direction follow one another.
    Within a lane they cost nothing. ``edges``: as for `Flow`, by default also those that
    ``transfer`` names. ``step``: seconds of the optimizer step, one number or one for each lane. A
    lane runs it at its end without waiting for others. ``nbytes``: bytes of activations of each
    stage and micro-batch. ``kept``: bytes still held between I and W, by default the same. Raises
    ScheduleError if a cost is missing or the schedule would not end.

    >>> from .schedule import schedule
    >>> run = simulate(schedule("1f1b", (0, 1), micros=3), {"F": 1.0, "B": 2.0})
    >>> run.makespan, run.bubble
    (12.0, 0.25)
    """
    if edges is None and isinstance(transfer, Mapping):
        edges = {(k, k + 1) for k in range(schedule.stages - 1)} | {
            (min(pair), max(pair)) for pair in transfer
        }
    flow, lanes = Flow(schedule, edges), schedule.lanes
    cost, travel = _costs(costs), _transfer(transfer)
    free, ends, spans = [0.0] * len(schedule.rows), dict[Action, float](), list[Span]()
    arrivals, link = dict[tuple[Action, int], float](), dict[tuple[int, int], float]()
    for lane, action in running_order(schedule, flow):
        start = max(
            [
                free[lane],
                *(arrivals.get((need, action.stage), ends[need]) for need in flow.needs(action)),
            ]
        )
        free[lane] = ends[action] = start + cost(action)
        spans.append(Span(lane, action, start, free[lane]))
        onward = (
            flow.targets if action.kind == "F" else flow.sources if action.kind in "BI" else None
        )
        for stage in onward[action.stage] if onward else ():
            if lanes[stage] != lane:
                edge = action.stage, stage
                link[edge] = arrivals[action, stage] = max(
                    free[lane], link.get(edge, 0.0)
                ) + travel(*edge)
    seconds = list(step) if isinstance(step, Sequence) else [step] * len(free)
    steps = tuple((lane, free[lane], free[lane] + s) for lane, s in enumerate(seconds) if s)
    peak = (
        _peak_bytes(schedule, nbytes, nbytes if kept is None else kept)
        if nbytes is not None
        else ()
    )
    return ScheduleSimulation(
        tuple(sorted(spans, key=lambda s: (s.start, s.lane, s.end))),
        len(free),
        steps,
        schedule,
        peak_activations(schedule),
        peak,
    )


def _costs(costs: Mapping[Any, float]) -> Callable[[Action], float]:
    table: dict[Any, float] = dict(costs)
    wrong = {
        key: value for key, value in table.items() if not (math.isfinite(value) and value >= 0)
    }
    if wrong:
        raise ScheduleError(f"costs are seconds, not {wrong}")

    def of(kind: str, stage: int, micro: int) -> float | None:
        return table.get((kind, stage, micro), table.get((kind, stage), table.get(kind)))

    def cost(action: Action) -> float:
        kind, stage, micro = action
        seconds = of(kind, stage, micro)
        if seconds is None and kind == "B":
            inputs, weights = of("I", stage, micro), of("W", stage, micro)
            seconds = None if inputs is None or weights is None else inputs + weights
        if seconds is None:
            raise ScheduleError(
                f"costs lack {kind} of stage {stage}: give it as ({kind!r}, {stage}), or {kind!r} "
                f"for all stages"
            )
        return seconds

    return cost


def _transfer(transfer: float | Mapping[tuple[int, int], float]) -> Callable[[int, int], float]:
    if not isinstance(transfer, Mapping):
        return lambda source, target: transfer

    def travel(source: int, target: int) -> float:
        return transfer.get((source, target), transfer.get((target, source), 0.0))

    return travel


def _peak_bytes(
    schedule: Schedule, whole: Sequence[int], held_for_weight: Sequence[int]
) -> tuple[int, ...]:
    peaks = []
    for row in schedule.rows:
        now = peak = 0
        for kind, stage, _ in row:
            now += {
                "F": whole[stage],
                "B": -whole[stage],
                "I": held_for_weight[stage] - whole[stage],
                "W": -held_for_weight[stage],
            }[kind]
            peak = max(peak, now)
        peaks.append(peak if schedule.trains else max((whole[a.stage] for a in row), default=0))
    return tuple(peaks)
