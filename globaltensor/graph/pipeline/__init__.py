"""Pipelines: stages on lanes of ranks, driven by a schedule that is data."""

# The families register themselves when imported.
from . import flushing as _flushing
from . import zero_bubble as _zero_bubble
from .check import check, fitted, in_flight, promise
from .schedule import Action, Schedule, Span, best, known, schedule
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
