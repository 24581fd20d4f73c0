"""Profiling: the cluster this job runs on, measured."""

from .here import cluster_here
from .measure import profile
from .ops import measure_ops
from .show import describe

__all__ = ["cluster_here", "describe", "measure_ops", "profile"]
