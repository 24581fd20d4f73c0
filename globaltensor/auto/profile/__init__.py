"""Profiling: the cluster this job runs on, measured."""

from .this_machine import cluster_here
from .measure import profile
from .ops import measure_ops
from .table import describe

__all__ = ["cluster_here", "describe", "measure_ops", "profile"]
