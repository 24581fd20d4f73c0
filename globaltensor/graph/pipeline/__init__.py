"""Pipelines: stages on lanes of ranks, driven by a schedule that is data."""

# The families register themselves when imported.
from . import flushing as _flushing
from . import zero_bubble as _zero_bubble
from .check import check, in_flight, promise
from .schedule import Action, Schedule, Span, best, schedule
from .simulate import Simulation, simulate
from .timeline import Timeline, save_trace, timeline, trace

__all__ = [
    "Action",
    "Schedule",
    "Simulation",
    "Span",
    "Timeline",
    "best",
    "check",
    "in_flight",
    "promise",
    "save_trace",
    "schedule",
    "simulate",
    "timeline",
    "trace",
]
