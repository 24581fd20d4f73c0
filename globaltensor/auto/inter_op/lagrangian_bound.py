"""What no plan of a chain in stages can beat within a memory limit, by a price on memory (Lagrange
1788, Geoffrion 1974), raised step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .range_cost import Ranges
from .segment_cost import Weights
from .stage_dp import StageCosts

__all__ = ["Dual"]

# of the time without a limit, for as much memory as there is: about where running forward passes
# again pays
_FIRST: Final = 0.16
_NEAR: Final = 1.2  # prices nearer than that to one another are as good


class Dual:
    """The bound of the stages of ``cutting`` by a schedule that takes ``part`` of the weighted time
    at least, and ``bubble`` seconds besides, where lane i holds ``flights[i]`` micro-batches.

    Stages cannot do better than share all work evenly. If lane i pays p / flights[i] seconds a
    byte, what a micro-batch keeps costs the same on each lane, and a parameter costs least on the
    lane with most micro-batches: then no lane counts any more, and the least of the chain, less
    what the limits are worth, is a bound for any p. It is concave in p.
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
        """Try another price. Returns whether there was one that may raise the bound."""
        price = self._next() if self.cutting.limit and 0 < self.evenly < math.inf else None
        if price is not None:
            self.known[price] = self._at(price)
        return price is not None

    def _next(self) -> float | None:
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

    def _at(self, price: float) -> float:
        cutting, limit = self.cutting, self.cutting.limit or math.inf
        each, time = price * self.evenly / limit, float(cutting.micros + cutting.stages - 1)
        weights = Weights(
            self.part * time, self.part, each * self.mean / self.most, each * self.mean
        )
        return (
            self._least(Ranges(cutting.ground, weights, True)) / cutting.stages
            - price * self.evenly
        )

    def _least(self, ranges: Ranges) -> float:
        """The least of a chain where each segment may recompute or not, whatever the hubs."""
        best: np.ndarray[Any, Any] | None = None
        for kind in self.cutting.kinds:
            score = ranges.of(((kind, False, 1),)).score
            if self.cutting.recompute:
                score = np.minimum(score, ranges.of(((kind, True, 1),)).score)
            best = score if best is None else (best[:, :, :, None] + score[:, None]).min(2)
        assert best is not None
        return float(best.min())
