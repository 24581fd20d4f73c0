"""A lower bound of all pipeline plans within a memory limit, by a price on memory.

The price is raised step by step (Lagrange 1788, Geoffrion 1974). `inter_op.search` calls it to skip
settings and to prove plans optimal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .range_cost import Ranges
from .segment_cost import Weights
from .stage_dp import StageCosts

__all__ = ["Dual"]

# The first price, as a fraction of the time without a limit, for the whole memory. It is about the
# price at which recomputing forward passes pays.
_FIRST: Final = 0.16
_NEAR: Final = 1.2  # prices with a ratio below this count as equal


class Dual:
    """The lower bound for the stages of ``cutting`` with one schedule.

    The schedule takes at least the fraction ``part`` of the weighted time, and ``bubble`` seconds
    more. Lane i holds ``flights[i]`` micro-batches.

    No stages do better than an even share of all work. Let lane i pay p / flights[i] seconds a
    byte. Then what a micro-batch saves costs the same on each lane, and a parameter is cheapest on
    the lane with most micro-batches. So lanes no longer matter. The minimum over the chain, less
    the value of the limits, is a bound for any p. The bound is concave in p.
    """

    def __init__(
        self, cutting: StageCosts, part: float, bubble: float, flights: Sequence[float]
    ) -> None:
        self.cutting, self.part, self.bubble = cutting, part, bubble
        self.most, self.mean = max(flights), len(flights) / sum(1 / f for f in flights)
        self.evenly = part * cutting.evenly()
        self.known: dict[float, float] = {0.0: self.evenly}

    @property
    def value(self) -> float:
        """The bound so far, in seconds."""
        return max(self.known.values()) + self.bubble

    def look(self) -> bool:
        """Try another price. Return True if there was a price that may raise the bound."""
        price = self._next_price() if self.cutting.limit and 0 < self.evenly < math.inf else None
        if price is not None:
            self.known[price] = self._bound_at(price)
        return price is not None

    def _next_price(self) -> float | None:
        tried = sorted(self.known)
        if len(tried) == 1:
            return _FIRST
        k = max(range(len(tried)), key=lambda i: self.known[tried[i]])
        if k == len(tried) - 1:
            return 4 * tried[k]
        if k == 0:
            return tried[1] / 8 if tried[1] > _FIRST / 100 else None
        below, above = tried[k] / (tried[k - 1] or tried[k] / 4), tried[k + 1] / tried[k]
        if max(below, above) < _NEAR:
            return None
        return tried[k] * math.sqrt(above) if above >= below else tried[k] / math.sqrt(below)

    def _bound_at(self, price: float) -> float:
        cutting, limit = self.cutting, self.cutting.limit or math.inf
        each, time = price * self.evenly / limit, float(cutting.micros + cutting.stages - 1)
        weights = Weights(
            self.part * time, self.part, each * self.mean / self.most, each * self.mean
        )
        return (
            self._min_chain_cost(Ranges(cutting.ground, weights, True)) / cutting.stages
            - price * self.evenly
        )

    def _min_chain_cost(self, ranges: Ranges) -> float:
        """Return the minimum of the chain. Each segment may recompute or not, and hubs are free."""
        best: np.ndarray[Any, Any] | None = None
        for kind in self.cutting.kinds:
            score = ranges.of(((kind, False, 1),)).score
            if self.cutting.recompute:
                score = np.minimum(score, ranges.of(((kind, True, 1),)).score)
            best = score if best is None else (best[:, :, :, None] + score[:, None]).min(2)
        assert best is not None
        return float(best.min())
