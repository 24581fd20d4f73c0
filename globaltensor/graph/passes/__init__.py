"""Passes over a program: one file each, from graph to graph, verified after each."""

from .order import PASSES, PLAIN, meetings, run, same, verify
