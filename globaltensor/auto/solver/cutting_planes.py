"""Cutting planes for the best memory prices, where the minimum at given prices is known exactly.

An evaluation at prices p has a bound b and an overflow g. It bounds the dual bound at all prices q
from above by b + g (q - p). With one moment the maximum of the lowest such line has a closed form.
With several moments it is a small linear program for HiGHS (Kelley, The cutting-plane method for
solving convex programs, 1960). The search stays within a box around the best prices so far, which
is the usual stabilisation. `dual_ascent` calls it.
"""

from __future__ import annotations

import numpy as np

from .mip import highspy
from .problem import Array

#: The maximum number of saved cuts.
MAX_CUTS = 150


class CuttingPlanes:
    """A piecewise linear model of the dual bound as a function of the prices."""

    def __init__(self, width: float) -> None:
        """Start with no cut; `width` limits how far prices may move at first."""
        self.bounds: list[float] = []
        self.prices: list[Array] = []
        self.slopes: list[Array] = []
        self.width = width
        self.best = -np.inf

    def add(self, bound: float, price: Array, slope: Array) -> None:
        """Add the cut of one evaluation.

        The box grows after an evaluation that improves the bound and shrinks after one that does
        not.
        """
        self.bounds.append(bound)
        self.prices.append(price)
        self.slopes.append(slope)
        self.width *= 2.0 if bound > self.best else 0.5
        self.best = max(self.best, bound)
        if len(self.bounds) > MAX_CUTS:
            worst = int(np.argmin(self.bounds[:-20]))
            for row in (self.bounds, self.prices, self.slopes):
                del row[worst]

    def next(self, active: Array) -> tuple[Array, float] | None:
        """Return the most promising prices of the active moments and the model's bound there.

        Prices of other moments are 0. The result is None where HiGHS is needed and not installed,
        or fails.
        """
        centre = self.prices[int(np.argmax(self.bounds))]
        price = np.zeros(len(centre))
        if not len(active):
            return price, self.best
        at = np.array([p[active] for p in self.prices])
        slopes = np.array([s[active] for s in self.slopes])
        offsets = np.array(self.bounds) - (at * slopes).sum(1)  # bound(q) <= offset + slope q
        low, high = np.maximum(centre[active] - self.width, 0.0), centre[active] + self.width
        optimum = (
            line(offsets, slopes[:, 0], low[0], high[0])
            if len(active) == 1
            else program(offsets, slopes, low, high)
        )
        if optimum is None:
            return None
        price[active] = optimum[0]
        return price, optimum[1]


def line(offsets: Array, slopes: Array, low: float, high: float) -> tuple[Array, float]:
    """Return the highest point of the lower envelope of lines, and its height."""
    with np.errstate(divide="ignore", invalid="ignore"):
        crossings = ((offsets[None] - offsets[:, None]) / (slopes[:, None] - slopes[None])).ravel()
    points = np.concatenate([[low, high], crossings[(crossings >= low) & (crossings <= high)]])
    heights = (offsets[:, None] + slopes[:, None] * points[None]).min(0)
    best = int(heights.argmax())
    return points[[best]], float(heights[best])


def program(offsets: Array, slopes: Array, low: Array, high: Array) -> tuple[Array, float] | None:
    """Return the highest point of the lower envelope of planes, and its height.

    A linear program finds it, in values scaled to differences from the highest offset. The result
    is None where HiGHS is not installed or finds no optimum.
    """
    module = highspy()
    if module is None:
        return None
    count, width = slopes.shape
    unit = max(float((high - low).max()), 1e-300)
    base = offsets + slopes @ low
    size = max(float(base.max() - base.min()), 1e-9 * max(1.0, float(np.abs(base).max())))
    lp = module.HighsLp()
    lp.num_col_, lp.num_row_ = width + 1, count
    lp.sense_ = module.ObjSense.kMaximize
    lp.col_cost_ = np.concatenate([np.zeros(width), [1.0]])
    lp.col_lower_ = np.concatenate([np.zeros(width), [-module.kHighsInf]])
    lp.col_upper_ = np.concatenate([(high - low) / unit, [module.kHighsInf]])
    lp.row_lower_ = np.full(count, -module.kHighsInf)
    lp.row_upper_ = (base - base.max()) / size
    matrix = np.concatenate([-slopes * unit / size, np.ones((count, 1))], axis=1)
    lp.a_matrix_.format_ = module.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.arange(0, matrix.size + 1, width + 1, dtype=np.int32)
    lp.a_matrix_.index_ = np.tile(np.arange(width + 1, dtype=np.int32), count)
    lp.a_matrix_.value_ = matrix.ravel()
    model = module.Highs()
    model.setOptionValue("output_flag", False)
    model.passModel(lp)
    model.run()
    if model.getModelStatus() != module.HighsModelStatus.kOptimal:
        return None
    values = np.array(model.getSolution().col_value)
    return low + np.maximum(values[:-1], 0.0) * unit, float(values[-1]) * size + float(base.max())
