"""Profiling: the cluster this job runs on, measured."""

from .measure import profile
from .ops import measure_ops
from .show import describe

__all__ = ["describe", "measure_ops", "profile"]
