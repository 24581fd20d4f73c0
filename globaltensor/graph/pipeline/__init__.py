"""Pipelines: stages on lanes of ranks, driven by a schedule that is data.

`Graph` uses it when modules have stages; users reach it through ``flow.pipeline``."""

# The schedule families register themselves when imported.
from . import gpipe_1f1b_schedules as _flushing
from . import zero_bubble_schedules as _zero_bubble
from .validate_schedule import check, resolve_schedule, peak_activations, max_activations
from .runtime import Pipeline
from .schedule import Action, Schedule, Span, default_schedule, parse_schedule, schedule
from .simulate import ScheduleSimulation, simulate
from .stage import Stage
from .timeline import Timeline, save_trace, timeline, trace
from .stage_transfer import Edge

__all__ = [
    "Action",
    "Edge",
    "Pipeline",
    "Schedule",
    "ScheduleSimulation",
    "Span",
    "Stage",
    "Timeline",
    "check",
    "default_schedule",
    "max_activations",
    "parse_schedule",
    "peak_activations",
    "resolve_schedule",
    "save_trace",
    "schedule",
    "simulate",
    "timeline",
    "trace",
]
