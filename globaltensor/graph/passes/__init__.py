"""Passes over a program: one file each, from graph to graph, verified after each.

`Graph` and `PipelinedGraph` run them before a program is lowered."""

from .memory_budget import choose_recompute
from .pass_manager import PASSES, PLAIN, agreed, meetings, run, same, verify
