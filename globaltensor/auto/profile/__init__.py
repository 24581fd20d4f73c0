"""Profiling: measure the cluster that this job runs on.

Users call `profile` by ``globaltensor profile``. Graphs that search for a plan call `cluster_here`.
"""

from .this_machine import cluster_here
from .measure import profile
from .op_timing import measure_ops
from .table import describe

__all__ = ["cluster_here", "describe", "measure_ops", "profile"]
