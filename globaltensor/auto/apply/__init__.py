"""Carry a plan out: in graphs, in modules, in eager mode."""
