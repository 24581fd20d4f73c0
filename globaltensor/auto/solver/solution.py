"""What the solver answers: a choice, its cost, and what is proven about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .problem import Number

__all__ = ["EXACT", "STOP", "Solution", "proven"]

#: The part of the cost between cost and bound at which a search among floats may stop. Both are
#: sums of up to some ten thousand rounded numbers, and what HiGHS or the prices of memory add to a
#: bound holds to about 1e-10: closer than this, two plans cannot be told apart.
STOP = 1e-9
#: The part at which a cost counts as proven least. It is twice that, so that how the last gap
#: happens to be rounded does not decide.
EXACT = 2 * STOP


def proven(cost: Number, bound: Number) -> bool:
    """Return True if a cost is the least by this bound: equal to it among integers, within `EXACT`
    of it among floats.

    >>> proven(10, 9), proven(1.0, 1.0 - 1e-9), proven(1.0, 1.0 - 1e-8)
    (False, True, False)
    """
    return bound >= cost if isinstance(cost, int) else cost - bound <= EXACT * abs(cost)


@dataclass
class Solution:
    """The best choice found and a lower bound on every choice's cost.

    `choice` is None where none was found; then `least_usage` is (the least peak usage found, a
    proven lower bound of it), so that the caller can say which limit would do. `infeasible` says
    that it is proven that nothing fits. `log` says what was done: nodes merged, nodes eliminated,
    the elimination's width and largest table, rounds of multipliers, integer programs.
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
        """(cost - bound) / |cost|: 0 is proven optimal, inf where there is no choice."""
        if self.choice is None or not math.isfinite(self.cost):
            return math.inf
        return (
            float(self.cost - self.bound) / (abs(self.cost) or 1.0)
            if self.cost > self.bound
            else 0.0
        )

    @property
    def optimal(self) -> bool:
        """Return True if the cost is proven least (`proven`)."""
        return self.choice is not None and proven(self.cost, self.bound)
