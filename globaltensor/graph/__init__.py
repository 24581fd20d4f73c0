"""The static graph: captured once, planned, and run as one program per rank.

Users reach it as ``flow.nn.Graph`` and ``flow.nn.graph``."""
