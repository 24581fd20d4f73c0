"""Passes over a program: one file each, from graph to graph, verified after each."""

from .memory_budget import choose_recompute
from .pass_manager import PASSES, PLAIN, agreed, meetings, run, same, verify
