"""Timelines: when each lane ran what, measured or simulated, with figures and a Chrome trace.

A trace shows several timelines side by side. `simulate` and `Graph.timeline` return timelines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..._base.atomic_file import write_text
from ...errors import ScheduleError
from .schedule import KINDS, Action, Span

__all__ = ["Timeline", "save_trace", "timeline", "trace"]


@dataclass(frozen=True)
class Timeline:
    """A timeline of ``lanes`` lanes (or ranks), in seconds.

    ``spans`` are the actions, ``steps`` holds (lane, start, end) of optimizer steps, and ``names``
    the names of the lanes, if they have any."""

    spans: tuple[Span, ...]
    lanes: int
    steps: tuple[tuple[int, float, float], ...] = ()
    names: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def makespan(self) -> float:
        """The seconds from the first start to the last end."""
        times = self._times()
        return (
            max(end for _, _, end in times) - min(start for _, start, _ in times) if times else 0.0
        )

    @property
    def busy(self) -> tuple[float, ...]:
        """The seconds that each lane works."""
        total = [0.0] * self.lanes
        for lane, start, end in self._times():
            total[lane] += end - start
        return tuple(total)

    @property
    def bubble(self) -> float:
        """The fraction of all lanes' time, from the first start to the last end, that is idle."""
        return 1 - sum(self.busy) / (self.lanes * self.makespan) if self.makespan else 0.0

    @property
    def period(self) -> float:
        """The longest time of a lane from its own first start to its own last end.

        It is the time of a step if the next step does not wait for all lanes (the cost in Qi et
        al., Zero Bubble Pipeline Parallelism, section 2.3)."""
        first, last = dict[int, float](), dict[int, float]()
        for lane, start, end in self._times():
            first[lane], last[lane] = (
                min(start, first.get(lane, start)),
                max(end, last.get(lane, end)),
            )
        return max((last[lane] - first[lane] for lane in first), default=0.0)

    @property
    def period_bubble(self) -> float:
        """The idle fraction of a period."""
        return 1 - sum(self.busy) / (self.lanes * self.period) if self.period else 0.0

    @property
    def costs(self) -> dict[tuple[str, int], float]:
        """The costs that `simulate` accepts: (kind, stage) -> seconds.

        Each is the median over micro-batches and ranks."""
        durations: dict[tuple[str, int], list[float]] = {}
        for _, action, start, end in self.spans:
            durations.setdefault((action.kind, action.stage), []).append(end - start)
        return {key: median(times) for key, times in sorted(durations.items())}

    @property
    def each(self) -> dict[Action, float]:
        """The cost of each action in seconds, the median over ranks.

        With these costs `simulate` shows the waiting that is unavoidable, whatever disturbed an
        action."""
        durations: dict[Action, list[float]] = {}
        for _, action, start, end in self.spans:
            durations.setdefault(action, []).append(end - start)
        return {action: median(times) for action, times in durations.items()}

    def _times(self) -> list[tuple[int, float, float]]:
        return [*((span.lane, span.start, span.end) for span in self.spans), *self.steps]

    def draw(self, width: int = 150) -> str:
        """Draw a line for each lane, to scale and at most about ``width`` columns wide.

        Idle time is blank. The stage is left out if no lane has two."""
        times = self._times()
        if not self.makespan:
            return ""
        begin, one = (
            min(start for _, start, _ in times),
            len({(s.lane, s.action.stage) for s in self.spans})
            == len({s.lane for s in self.spans}),
        )
        pieces = [
            (s.lane, s.start, s.end, f"{s.action.kind}{s.action.micro}" if one else str(s.action))
            for s in self.spans
        ]
        pieces += [(lane, start, end, "step") for lane, start, end in self.steps]
        least = min(end - start for _, start, end in times if end > start)
        scale = min((1 + max(len(name) for *_, name in pieces)) / least, width / self.makespan)
        rows = [[" "] * (1 + round(self.makespan * scale)) for _ in range(self.lanes)]
        for lane, start, end, name in pieces:
            a, b = round((start - begin) * scale), round((end - begin) * scale)
            rows[lane][a : b - 1] = (
                name[: b - 1 - a].ljust(b - 1 - a, "-") if b - 1 > a else rows[lane][a : b - 1]
            )
        names = self.names or [
            f"lane {lane:{len(str(self.lanes - 1))}}" for lane in range(self.lanes)
        ]
        return "\n".join(
            f"{name:{max(map(len, names))}}  {''.join(row)}".rstrip()
            for name, row in zip(names, rows, strict=True)
        )

    def __str__(self) -> str:
        figures = (
            f"{self.makespan:.6g} s, bubble {self.bubble:.1%}; step after step "
            f"{self.period:.6g} s, bubble {self.period_bubble:.1%}"
        )
        return f"{figures}\n{self.draw()}"


def timeline(
    spans: Iterable[Span | tuple[int, Action | str, float, float]],
    steps: Iterable[tuple[int, float, float]] = (),
    names: Iterable[str] = (),
) -> Timeline:
    """Return the timeline of measured spans: (lane or rank, action, start, end).

    ``names`` are the names of lanes 0, 1, ...; by default "lane 0" and so on. Raises ScheduleError
    for a span that ends before it starts."""
    measured_spans = tuple(
        Span(lane, Action.parse(action) if isinstance(action, str) else action, start, end)
        for lane, action, start, end in spans
    )
    each = tuple(steps)
    wrong = [span for span in measured_spans if span.end < span.start or span.lane < 0]
    if wrong:
        raise ScheduleError(
            f"{tuple(wrong[0])} is not a span: a span is (lane or rank, action, start, end) with "
            "start before end"
        )
    called = tuple(names)
    lanes = 1 + max(
        [span.lane for span in measured_spans] + [lane for lane, _, _ in each] + [len(called) - 1],
        default=-1,
    )
    return Timeline(measured_spans, lanes, each, names=called)


def trace(**sources: Timeline | Iterable[Span]) -> dict[str, Any]:
    """Return the sources as one Chrome trace.

    The trace is the JSON that chrome://tracing and ui.perfetto.dev read. Each source is a process
    that begins at zero, and each lane is a thread. Example: ``trace(measured=spans,
    simulated=simulate(...))``."""
    events: list[dict[str, Any]] = []
    for pid, (source, given) in enumerate(sources.items()):
        line = given if isinstance(given, Timeline) else timeline(given)
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": source}})
        names = line.names or [f"lane {lane}" for lane in range(line.lanes)]
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}}
            for lane, name in enumerate(names)
        ]
        begin = min((start for _, start, _ in line._times()), default=0.0)
        for lane, action, start, end in line.spans:
            about = {
                "cat": KINDS.get(action.kind, action.kind),
                "args": {"stage": action.stage, "micro": action.micro},
            }
            events.append(_event(str(action), pid, lane, start - begin, end - begin) | about)
        events += [
            _event("step", pid, lane, start - begin, end - begin) | {"cat": "optimizer"}
            for lane, start, end in line.steps
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(path: str | os.PathLike[str], **sources: Timeline | Iterable[Span]) -> None:
    """Write the `trace` of the sources as JSON."""
    write_text(path, json.dumps(trace(**sources)))


def _event(name: str, pid: int, lane: int, start: float, end: float) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": pid,
        "tid": lane,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
    }  # microseconds
