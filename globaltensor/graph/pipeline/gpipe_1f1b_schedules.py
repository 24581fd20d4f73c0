"""Schedules with an undivided backward: gpipe, 1f1b, interleaved; and forward, for evaluation.

Stages that follow one another on one lane act as one, called a run here. All schedules accumulate
gradients in the order of the micro-batches. `pipeline` imports this module to register the
families.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from .schedule import Action, family, in_turn

__all__ = ["Run", "expand", "per_lane", "runs"]


class Run(NamedTuple):
    """A run: stages ``first`` to ``last`` on one lane, with their neighbours on other lanes."""

    lane: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def runs(lanes: Sequence[int]) -> list[Run]:
    """Return the runs, in the order of their stages.

    >>> runs((0, 0, 1))
    [Run(lane=0, first=0, last=1), Run(lane=1, first=2, last=2)]
    """
    result: list[Run] = []
    for stage, lane in enumerate(lanes):
        if result and result[-1].lane == lane:
            result[-1] = result[-1]._replace(last=stage)
        else:
            result.append(Run(lane, stage, stage))
    return result


def expand(run: Run, work: Iterable[tuple[str, int]]) -> Iterator[Action]:
    """Yield the actions of the run's stages for each (kind, micro) of ``work``.

    Forwards go from the first stage on, backwards from the last."""
    for kind, micro in work:
        stages = (
            range(run.first, run.last + 1) if kind == "F" else range(run.last, run.first - 1, -1)
        )
        yield from (Action(kind, stage, micro) for stage in stages)


def per_lane(lanes: tuple[int, ...], held: Iterable[int]) -> tuple[int, ...]:
    """Return the sums per lane of what the runs hold."""
    total = [0] * (max(lanes) + 1)
    for run, many in zip(runs(lanes), held, strict=True):
        total[run.lane] += many * run.size
    return tuple(total)


@family(
    "forward",
    "evaluation",
    "eval",
    "inference",
    promise=lambda lanes, micros: (0,) * (max(lanes) + 1),
)
def forward(lanes: tuple[int, ...], micros: int) -> list[list[Action]]:
    """Return rows of forwards only, run by run."""
    rows: list[list[Action]] = [[] for _ in range(max(lanes) + 1)]
    for run in runs(lanes):
        rows[run.lane] += expand(run, (("F", micro) for micro in range(micros)))
    return rows


@family(
    "gpipe",
    "fill-drain",
    promise=lambda lanes, micros: per_lane(lanes, [micros] * len(runs(lanes))),
)
def gpipe(lanes: tuple[int, ...], micros: int) -> list[list[Action]]:
    """Return rows of all forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).

    If a lane has several runs, they follow one another, breadth first (Lamy-Poirier, Breadth-First
    Pipeline Parallelism, MLSys 2023)."""
    rows = forward(lanes, micros)
    for run in reversed(runs(lanes)):
        rows[run.lane] += expand(run, (("B", micro) for micro in range(micros)))
    return rows


def _warmup_forwards(runs_after: int, micros: int, eager: bool) -> int:
    return min(micros, 1 + runs_after * (2 if eager else 1))


def _promise_1f1b(lanes: tuple[int, ...], micros: int, eager: bool = False) -> tuple[int, ...]:
    many = len(runs(lanes))
    return per_lane(lanes, (_warmup_forwards(many - 1 - k, micros, eager) for k in range(many)))


@family(
    "1f1b", "one-forward-one-backward", "one-f-one-b", promise=_promise_1f1b, options=("eager",)
)
def one_f_one_b(lanes: tuple[int, ...], micros: int, eager: bool = False) -> list[list[Action]]:
    """Return rows of one forward, one backward (Narayanan et al., PipeDream-Flush, ICML 2021).

    Run k of n starts with n - k forwards, so it never holds more.

    ``eager`` starts with 2 (n - k) - 1 instead. Transfers then overlap computation, for more memory
    (Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023). If a lane has
    several runs, they share it, each in this order.
    """
    lane_runs = runs(lanes)
    orders: list[list[tuple[str, int]]] = []
    for k in range(len(lane_runs)):
        warm = _warmup_forwards(len(lane_runs) - 1 - k, micros, eager)
        order = [("F", micro) for micro in range(warm)]
        for micro in range(micros):
            order.append(("B", micro))
            if micro + warm < micros:
                order.append(("F", micro + warm))
        orders.append(order)
    if len(lane_runs) == max(lanes) + 1:
        return [
            list(expand(run, order))
            for _, run, order in sorted(
                zip((run.lane for run in lane_runs), lane_runs, orders, strict=True)
            )
        ]
    return _merge(lane_runs, orders)


def _merge(lane_runs: list[Run], orders: list[list[tuple[str, int]]]) -> list[list[Action]]:
    """Merge the orders of the runs into rows of the lanes.

    Each run keeps its order, and runs of one lane take turns. The action that can start first is
    next, where a backward counts as two forwards. The merge ends for any lanes, because the orders
    would end with a lane for each run."""
    waiting = [deque(order) for order in orders]
    free, done = [0] * (max(run.lane for run in lane_runs) + 1), dict[tuple[str, int, int], int]()
    rows: list[list[Action]] = [[] for _ in free]
    while True:
        ready = []
        for k, (run, order) in enumerate(zip(lane_runs, waiting, strict=True)):
            if order:
                kind, micro = order[0]
                before = k - 1 if kind == "F" else k + 1
                if not 0 <= before < len(lane_runs) or (kind, before, micro) in done:
                    ready.append(
                        (max(free[run.lane], done.get((kind, before, micro), 0)), kind, -k)
                    )
        if not ready:
            return rows
        start, kind, k = min(ready)  # B before F, then the later run
        run, (_, micro) = lane_runs[-k], waiting[-k].popleft()
        free[run.lane] = done[kind, -k, micro] = start + run.size * (1 if kind == "F" else 2)
        rows[run.lane] += expand(run, [(kind, micro)])


def _groups(lanes: tuple[int, ...], micros: int) -> list[range]:
    """Return the groups of micro-batches that go through a turn together.

    A group has at least as many micro-batches as there are lanes, and the groups are as even as
    possible."""
    wide = max(lanes) + 1
    many = max(1, micros // wide)
    sizes = [max(wide, micros // many + (k < micros % many)) for k in range(many)]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _start(lanes: tuple[int, ...], lane: int, micros: int) -> int:
    """Return the number of forwards with which a lane starts."""
    turns, after = len(lanes) // (max(lanes) + 1), max(lanes) - lanes.index(lane)
    return 1 + after * (2 if turns > 1 else 1) + (turns - 1) * len(_groups(lanes, micros)[0])


def _promise_interleaved(lanes: tuple[int, ...], micros: int) -> tuple[int, ...]:
    return tuple(
        min(micros * len(lanes) // (max(lanes) + 1), _start(lanes, lane, micros))
        for lane in range(max(lanes) + 1)
    )


@family(
    "interleaved",
    "interleaved-1f1b",
    layout="lanes that take one stage each, in turn, such as 0, 1, 0, 1",
    fits=in_turn,
    promise=_promise_interleaved,
)
def interleaved(lanes: tuple[int, ...], micros: int) -> list[list[Action]]:
    """Return rows of 1f1b with several stages a lane, in turn.

    The method is that of Narayanan et al., Megatron-LM, SC 2021. The bubble is as many times
    smaller as a lane has stages. Micro-batches go through all turns in groups. Fewer micro-batches
    than lanes are a group with some left out."""
    rows = []
    for lane in range(max(lanes) + 1):
        lane_stages, warm, groups = (
            [k for k, where in enumerate(lanes) if where == lane],
            _start(lanes, lane, micros),
            _groups(lanes, micros),
        )
        forwards = [
            Action("F", stage, micro)
            for group in groups
            for stage in lane_stages
            for micro in group
        ]
        backwards = [
            Action("B", stage, micro)
            for group in groups
            for stage in reversed(lane_stages)
            for micro in group
        ]
        row = forwards[:warm]
        for k, action in enumerate(backwards):
            row += [action, *forwards[warm + k : warm + k + 1]]
        rows.append([action for action in row if action.micro < micros])
    return rows
