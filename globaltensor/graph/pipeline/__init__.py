"""Pipelines: stages on lanes of ranks, driven by a schedule that is data."""

# The families register themselves when imported.
from . import flush_schedules as _flushing
from . import zero_bubble_schedules as _zero_bubble
from .validate_schedule import check, fitted, in_flight, promise
from .runtime import Pipeline
from .schedule import Action, Schedule, Span, best, known, schedule
from .simulate import Simulation, simulate
from .stage import Stage
from .timeline import Timeline, save_trace, timeline, trace
from .stage_transfer import Edge

__all__ = [
    "Action",
    "Edge",
    "Pipeline",
    "Schedule",
    "Simulation",
    "Span",
    "Stage",
    "Timeline",
    "best",
    "check",
    "fitted",
    "in_flight",
    "known",
    "promise",
    "save_trace",
    "schedule",
    "simulate",
    "timeline",
    "trace",
]
