"""What the solver answers: a choice, its cost, and what is proven about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .problem import Number


@dataclass
class Solution:
    """The best choice found and a lower bound on every choice's cost.

    `choice` is None where none was found; then `least_usage` is (the least peak usage found, a proven lower bound of it), so that the caller can say
    which limit would do. `infeasible` says that it is proven that nothing fits. `log` says what was done: nodes merged, nodes eliminated, the
    elimination's width and largest table, rounds of multipliers, integer programs.
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
        return float(self.cost - self.bound) / (abs(self.cost) or 1.0) if self.cost > self.bound else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the cost is proven least: equal to the bound among integers, within 1e-9 of it among floats."""
        if self.choice is None:
            return False
        return self.bound >= self.cost if isinstance(self.cost, int) else self.gap <= 1e-9
