"""The gap that multipliers leave, closed by an integer program for HiGHS.

The program sends one unit of flow through the strategies of each node and the pairs of each edge.
Each pair has one continuous variable. The sums over rows and columns equal the strategies'
variables (the local polytope in its equality form, whose relaxation is almost always integral
here). Memory rows are added when they turn out to be violated. `solve.finish` and `minimax` call
it.
"""

from __future__ import annotations

import importlib
import time
from typing import Any, NamedTuple

import numpy as np

from ..._base.extras import install_extra
from .flat_arrays import FlatProblem, ranges
from .problem import Array
from .reduced_cost_fixing import entries

#: Costs are scaled so that the gap to close is this wide, because HiGHS has absolute tolerances of
#: 1e-7.
WIDE = 1e4
#: The maximum number of memory rows added in one round.
ROWS = 40


class Outcome(NamedTuple):
    """The result of an integer program.

    `choice` is a choice of the flat problem's nodes, or None. `bound` is a lower bound. `done` is
    True if the program was solved to the end: its choice is optimal, or there is none.
    """

    choice: Array | None
    bound: float
    done: bool


def highspy() -> Any | None:
    """Return the module, or None where the extra `auto` is not installed."""
    try:
        return importlib.import_module("highspy")
    except ImportError:
        return None


def close(
    flat: FlatProblem, price: Array, gap: float, deadline: float, threads: int, seed: int
) -> Outcome:
    """Solve the flat problem as an integer program until the deadline.

    `gap` is about the distance between bound and incumbent. The moments with a positive `price` get
    memory rows from the start.

    Raises ImportError where highspy is missing.
    """
    program = IntegerProgram(flat, max(gap, 1e-300), threads, seed)
    program.add_rows(np.flatnonzero(price > 0)[:ROWS])
    return ended(program, deadline)


def close_larger(
    flats: tuple[FlatProblem, FlatProblem],
    price: Array,
    low: float,
    high: float,
    gap: float,
    deadline: float,
    threads: int,
    seed: int,
) -> Outcome:
    """Minimise the larger of two costs in the way of `close`.

    The two flat problems allow the same pairs. The search is for a choice that costs less than
    `high`; no choice costs less than `low`. It also stops where cost and bound differ by at most
    `gap`.

    Raises ImportError where highspy is missing.
    """
    program = IntegerProgram(flats[0], max(high - low, 1e-300), threads, seed)
    program.larger_of(flats, low, high, gap)
    program.add_rows(np.flatnonzero(price > 0)[:ROWS])
    return ended(program, deadline)


def ended(program: IntegerProgram, deadline: float) -> Outcome:
    """Run a program to its end.

    It is solved relaxed first, then with integer variables. Violated memory rows are added in
    between.
    """
    bound = -np.inf
    relaxed = True
    while True:
        left = deadline - time.monotonic()
        if left < 0.05:
            return Outcome(None, bound, False)
        if not relaxed:
            program.integral()
        status = program.run(left)
        if status == "infeasible":
            return Outcome(None, np.inf, True)
        bound = max(bound, program.bound(relaxed))
        values = program.values()
        if values is None:
            return Outcome(None, bound, False)
        used = program.usage(values)
        violated = program.violated(used)
        if len(violated):
            program.relax()
            relaxed = True
            program.add_rows(violated)
            if status != "optimal":
                return Outcome(None, bound, False)
        elif relaxed and not program.is_integral(values):
            if status != "optimal":
                return Outcome(None, bound, False)
            relaxed = False
        else:
            return Outcome(program.rounded(values), bound, status == "optimal")


class IntegerProgram:
    """A HiGHS model of a flat problem."""

    def __init__(self, flat: FlatProblem, gap: float, threads: int, seed: int) -> None:
        module = highspy()
        if module is None:
            raise ImportError(f"highspy is missing: {install_extra('auto')}")
        self.module, self.flat = module, flat
        # The objective is the cost of a choice above the base, times the scale.
        self.scale, self.base = (
            WIDE / gap,
            flat.constant,
        )
        nodes, strategies = len(flat.nodes), len(flat.cost)
        self.finite_pairs = finite_pairs = np.flatnonzero(flat.table < flat.never)
        row, column = entries(flat)
        heads, tails = flat.size[flat.head], flat.size[flat.tail]
        of_head, of_tail = (
            ranges(flat.first[flat.head], heads),
            ranges(flat.first[flat.tail], tails),
        )
        # Rows: one per node, one per (edge, strategy of the head), one per (edge, strategy of the
        # tail). The last tail row of each edge is left out, because it follows from the others.
        count = nodes + len(of_head) + len(of_tail)
        pairs = strategies + np.arange(len(finite_pairs))
        second = nodes + len(of_head)
        at = [
            flat.owner,
            nodes + row[finite_pairs],
            second + column[finite_pairs],
            nodes + np.arange(len(of_head)),
            second + np.arange(len(of_tail)),
        ]
        variable = [np.arange(strategies), pairs, pairs, of_head, of_tail]
        factor = [
            np.ones(strategies),
            np.ones(2 * len(finite_pairs)),
            -np.ones(len(of_head) + len(of_tail)),
        ]
        order = np.argsort(np.concatenate(at), kind="stable")
        at_row = np.concatenate(at)[order]
        last = np.zeros(count, dtype=bool)
        last[nodes + len(of_head) + np.cumsum(tails) - 1] = True
        keep = ~last[at_row]
        number = np.cumsum(~last) - 1
        rows = int((~last).sum())
        lp = module.HighsLp()
        lp.num_col_, lp.num_row_ = strategies + len(finite_pairs), rows
        lp.col_cost_ = np.concatenate([flat.cost, flat.table[finite_pairs]]) * self.scale
        lp.col_lower_ = np.zeros(lp.num_col_)
        lp.col_upper_ = np.where(
            np.concatenate([flat.cost, np.zeros(len(finite_pairs))]) < flat.never, 1.0, 0.0
        )
        side = np.zeros(count)
        side[:nodes] = 1.0
        lp.row_lower_ = lp.row_upper_ = side[~last]
        lp.a_matrix_.format_ = module.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.searchsorted(number[at_row[keep]], np.arange(rows + 1)).astype(
            np.int32
        )
        lp.a_matrix_.index_ = np.concatenate(variable)[order][keep].astype(np.int32)
        lp.a_matrix_.value_ = np.concatenate(factor)[order][keep]
        # Otherwise the first user of HiGHS in this thread has set the number of threads, and HiGHS
        # refuses any other number.
        module.Highs.resetGlobalScheduler(True)
        self.model = module.Highs()
        self.model.setOptionValue("output_flag", False)
        self.model.setOptionValue("threads", threads)
        self.model.setOptionValue("random_seed", seed)
        self.model.setOptionValue("mip_rel_gap", 0.0)
        self.model.setOptionValue("mip_abs_gap", 1e-6)
        self.model.passModel(lp)
        self.rows: set[int] = set()

    def larger_of(
        self, flats: tuple[FlatProblem, FlatProblem], low: float, high: float, gap: float
    ) -> None:
        """Make the objective the larger of two problems' costs, between `low` and `high`.

        It adds one variable, and one row per cost that keeps the variable at or above that cost.
        """
        count, most = self.model.getNumCol(), self.module.kHighsInf
        self.base = low
        self.model.changeColsCost(count, np.arange(count, dtype=np.int32), np.zeros(count))
        self.model.addCol(
            1.0, 0.0, (high - low) * self.scale, 0, np.zeros(0, dtype=np.int32), np.zeros(0)
        )
        for flat in flats:
            costs = (
                np.concatenate(
                    [
                        np.where(self.flat.cost < self.flat.never, flat.cost, 0.0),
                        flat.table[self.finite_pairs],
                    ]
                )
                * self.scale
            )
            some = np.flatnonzero(costs)
            side = (low - flat.constant) * self.scale
            self.model.addRow(
                -most,
                side,
                len(some) + 1,
                np.append(some, count).astype(np.int32),
                np.append(costs[some], -1.0),
            )
        self.model.setOptionValue("mip_abs_gap", max(gap * self.scale, 1e-6))

    def add_rows(self, moments: Array) -> None:
        """Add memory rows for these moments, in units of the room at each moment."""
        flat = self.flat
        for t in moments.tolist():
            some = (flat.begin[flat.item] <= t) & (t < flat.end[flat.item])
            weight = np.bincount(flat.position[some], flat.amount[some], len(flat.cost))
            taken = np.flatnonzero(weight)
            unit = max(float(flat.room[t]), float(weight.max(initial=0.0)) * 1e-3, 1e-300)
            self.model.addRow(
                -self.module.kHighsInf,
                float(flat.room[t]) / unit,
                len(taken),
                taken.astype(np.int32),
                weight[taken] / unit,
            )
            self.rows.add(t)

    def integral(self) -> None:
        count = len(self.flat.cost)
        self.model.changeColsIntegrality(
            count,
            np.arange(count, dtype=np.int32),
            np.full(count, self.module.HighsVarType.kInteger),
        )

    def relax(self) -> None:
        count = len(self.flat.cost)
        self.model.changeColsIntegrality(
            count,
            np.arange(count, dtype=np.int32),
            np.full(count, self.module.HighsVarType.kContinuous),
        )

    def run(self, seconds: float) -> str:
        """Return "optimal", "infeasible", or "limit" where time ran out or the solver gave up."""
        self.model.setOptionValue("time_limit", self.model.getRunTime() + seconds)
        self.model.run()
        status = self.model.getModelStatus()
        kinds = self.module.HighsModelStatus
        return (
            "optimal"
            if status == kinds.kOptimal
            else "infeasible"
            if status == kinds.kInfeasible
            else "limit"
        )

    def bound(self, relaxed: bool) -> float:
        info = self.model.getInfo()
        if relaxed:
            good = self.model.getModelStatus() == self.module.HighsModelStatus.kOptimal
            value = info.objective_function_value if good else -np.inf
        else:
            value = info.mip_dual_bound
        return float(self.base + float(value) / self.scale)

    def values(self) -> Array | None:
        solution = self.model.getSolution()
        if not solution.value_valid:
            return None
        return np.array(solution.col_value)[: len(self.flat.cost)]

    def is_integral(self, values: Array) -> bool:
        return bool(np.minimum(values, 1 - values).max(initial=0.0) < 1e-6)

    def rounded(self, values: Array) -> Array:
        flat = self.flat
        best = np.maximum.reduceat(values, flat.first[:-1])
        k = np.where(
            values == best[flat.owner],
            np.arange(len(values)) - flat.first[flat.owner],
            np.iinfo(np.int64).max,
        )
        return np.asarray(np.minimum.reduceat(k, flat.first[:-1]))

    def usage(self, values: Array) -> Array:
        flat = self.flat
        return flat.spread(
            np.bincount(flat.item, flat.amount * values[flat.position], len(flat.begin))
        )

    def violated(self, used: Array) -> Array:
        """Return the moments without a row whose room is exceeded.

        The worst moment comes first, then the worst moment outside its neighbourhood, and so on.
        """
        room = self.flat.room
        over = (used - room) / np.maximum(room, 1e-300)
        over[list(self.rows)] = -1.0
        moments: list[int] = []
        near = max(1, len(over) // 200)
        while (
            len(moments) < ROWS
            and len(over)
            and (worst := int(over.argmax())) >= 0
            and over[worst] > 1e-6
        ):
            moments.append(worst)
            over[max(0, worst - near) : worst + near + 1] = -1.0
        return np.array(moments, dtype=np.int64)
