"""Pipelines: stages on lanes of ranks, driven by a schedule that is data."""

# The families register themselves when imported.
from . import flushing as _flushing
from .schedule import Action, Schedule, Span, best, schedule

__all__ = ["Action", "Schedule", "Span", "best", "schedule"]
