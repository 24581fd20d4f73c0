"""The solver: one strategy for each node of a graph, at the least cost of nodes and edges, within a
memory limit that holds at all times."""

from .problem_io import from_iopddl, load, save
from .minimax import MinimaxSolver
from .problem import Problem, ProblemError, Usage
from .solution import EXACT, STOP, Solution, proven
from .solve import solve

__all__ = [
    "EXACT",
    "STOP",
    "MinimaxSolver",
    "Problem",
    "ProblemError",
    "Solution",
    "Usage",
    "from_iopddl",
    "load",
    "proven",
    "save",
    "solve",
]
