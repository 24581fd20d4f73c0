"""The solver's result: a choice, its cost, and the proven bound. `solve` returns it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .problem import Number

__all__ = ["EXACT", "STOP", "Solution", "proven", "relative_gap"]

#: The relative gap at which a search among floats may stop. Cost and bound are sums of up to about
#: ten thousand rounded numbers. HiGHS and the memory prices add errors to a bound of about 1e-10.
#: Two plans whose costs are closer than this cannot be distinguished.
STOP = 1e-9
#: The relative gap at which a cost counts as proven minimal. It is twice STOP, so that the rounding
#: of the last gap does not decide.
EXACT = 2 * STOP


def proven(cost: Number, bound: Number) -> bool:
    """Return True if this bound proves that a cost is the minimum.

    Among integers the bound must equal the cost, among floats it must be within a relative `EXACT`
    of it.

    >>> proven(10, 9), proven(1.0, 1.0 - 1e-9), proven(1.0, 1.0 - 1e-8)
    (False, True, False)
    """
    return bound >= cost if isinstance(cost, int) else cost - bound <= EXACT * abs(cost)


def relative_gap(cost: Number, bound: Number) -> float:
    """Return the relative gap (cost - bound) / abs(cost), which is 0 if the bound proves the cost.

    >>> relative_gap(10, 9), relative_gap(1.0, 1.0 - 1e-10), relative_gap(0, -2)
    (0.1, 0.0, 2.0)
    """
    return 0.0 if proven(cost, bound) else float(cost - bound) / (abs(cost) or 1.0)


@dataclass
class Solution:
    """The best choice found and a lower bound on every choice's cost.

    `choice` is None where none was found. `least_usage` is then (the lowest peak usage found, a
    proven lower bound of it), so that the caller can say which limit would be feasible.
    `infeasible` is True where it is proven that no choice is feasible. `log` records what was done:
    nodes merged, nodes eliminated, the elimination's width and largest table, rounds of
    multipliers, integer programs.
    """

    choice: list[int] | None
    cost: Number
    bound: Number
    feasible: bool
    infeasible: bool = False
    peak: Number | None = None
    least_usage: tuple[Number, Number] | None = None
    seconds: float = 0.0
    log: dict[str, object] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """The relative gap (cost - bound) / |cost|: 0 if optimal, inf if there is no choice."""
        if self.choice is None or not math.isfinite(self.cost):
            return math.inf
        return relative_gap(self.cost, self.bound)

    @property
    def optimal(self) -> bool:
        """Return True if the cost is proven to be the minimum (`proven`)."""
        return self.choice is not None and proven(self.cost, self.bound)
