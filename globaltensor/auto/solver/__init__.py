"""The integer-programming solver: one strategy per node at minimum cost, within a memory limit.

The cost is the sum of node and edge costs. The memory limit holds at all times. `auto/intra_op`
formulates the problems that this package solves.
"""

from .problem_io import from_iopddl, load, save
from .minimax import MinimaxSolver
from .problem import Problem, Usage
from ...errors import ProblemError
from .solution import EXACT, STOP, Solution, proven, relative_gap
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
    "relative_gap",
    "save",
    "solve",
]
