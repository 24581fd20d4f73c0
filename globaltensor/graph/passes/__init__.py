"""Passes over a program: one file each, from graph to graph, verified after each."""

from .budget import choose
from .order import PASSES, PLAIN, agreed, meetings, run, same, verify
