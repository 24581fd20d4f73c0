"""Reductions that use the memory limit.

Moments that never bind are dropped, strategies that cannot fit are forbidden, and what every
strategy uses is subtracted from the room. `solve` and `joint_presolve` call `tighten`.
"""

from __future__ import annotations

import time

import numpy as np

from .presolve import PresolvedProblem, Uses, drop, presolve
from .problem import Array


def tighten(core: PresolvedProblem, deadline: float = np.inf) -> PresolvedProblem:
    """Alternate `presolve` and the memory reductions until neither finds anything, or time is up.

    Sets `feasible` to False where the room is too small for every choice.
    """
    presolve(core, deadline)
    while core.feasible and len(core.room) and time.monotonic() < deadline:
        steps = {
            i: step(core.uses[i], len(core.costs[i])) for i in sorted(core.live) if core.uses[i]
        }
        for i, block in steps.items():
            core.uses[i] = [set_aside(core, block)]
        if core.room.min() < 0:
            core.feasible = False
            break
        compress(core)
        nodes = forbid(core)
        if not nodes or not core.feasible:
            break
        presolve(core, deadline, nodes)
    return core


def step(blocks: list[Uses], count: int) -> Uses:
    """Return the usage of a node as intervals that do not overlap."""
    starts, ends, amounts = (
        np.concatenate([getattr(block, part) for block in blocks])
        for part in ("starts", "ends", "amounts")
    )
    if len(starts) == 1:
        return Uses(starts, ends, amounts)
    moments, where = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    change = np.zeros((len(moments), count))
    np.add.at(change, where[: len(starts)], amounts)
    np.add.at(change, where[len(starts) :], -amounts)
    level = np.cumsum(change, 0)[:-1]
    new = np.concatenate([[True], (level[1:] != level[:-1]).any(1)])
    first = np.flatnonzero(new)
    level, begin, end = (
        level[first],
        moments[first],
        moments[np.concatenate([first[1:], [len(moments) - 1]])],
    )
    some = level.any(1)
    return Uses(begin[some], end[some], level[some])


def set_aside(core: PresolvedProblem, block: Uses) -> Uses:
    """Subtract from the room what every strategy uses, and return the rest of the usage."""
    least = block.amounts.min(1)
    for start, end, amount in zip(
        block.starts[least > 0].tolist(),
        block.ends[least > 0].tolist(),
        least[least > 0].tolist(),
        strict=True,
    ):
        core.room[start:end] -= amount
    return Uses(block.starts, block.ends, block.amounts - least[:, None])


def compress(core: PresolvedProblem) -> None:
    """Keep only the moments that can bind.

    At these moments the maximum possible usage exceeds the room, and no neighbouring moment implies
    them.
    """
    nodes = [i for i in sorted(core.live) if core.uses[i]]
    most = np.zeros(len(core.room) + 1)
    for i in nodes:
        (block,) = core.uses[i]
        most += np.bincount(block.starts, top := block.amounts.max(1), len(most)) - np.bincount(
            block.ends, top, len(most)
        )
    kept = np.flatnonzero(np.cumsum(most)[:-1] > core.room)
    renumber(core, nodes, kept)
    for later in (True, False):
        edge = np.zeros(len(core.room) + 1, dtype=bool)
        for i in nodes:
            for block in core.uses[i]:
                edge[block.ends if later else block.starts] = True
        room = core.room
        if later:  # implied by the next moment, where nothing ends in between
            implied = np.concatenate(
                [~edge[1:-1] & (room[1:] <= room[:-1]), np.zeros(min(1, len(room)), bool)]
            )
        else:  # or implied by the moment before, where nothing starts in between
            implied = np.concatenate(
                [np.zeros(min(1, len(room)), bool), ~edge[1:-1] & (room[:-1] <= room[1:])]
            )
        renumber(core, nodes, np.flatnonzero(~implied))


def renumber(core: PresolvedProblem, nodes: list[int], moments: Array) -> None:
    """Keep only these moments."""
    if len(moments) == len(core.room):
        return
    core.room, core.moments = core.room[moments], core.moments[moments]
    for i in nodes:
        blocks = []
        for block in core.uses[i]:
            starts, ends = (
                np.searchsorted(moments, block.starts),
                np.searchsorted(moments, block.ends),
            )
            some = (starts < ends) & block.amounts.any(1)
            if some.any():
                blocks.append(
                    step(
                        [Uses(starts[some], ends[some], block.amounts[some])],
                        block.amounts.shape[1],
                    )
                )
        core.uses[i] = blocks


class Least:
    """A sparse table for minima over ranges of an array, in constant time each."""

    def __init__(self, values: Array) -> None:
        self.rows = [values]
        while (width := 1 << len(self.rows)) <= len(values):
            above = self.rows[-1]
            self.rows.append(
                np.minimum(
                    above[: len(values) - width + 1], above[width // 2 :][: len(values) - width + 1]
                )
            )

    def between(self, starts: Array, ends: Array) -> Array:
        """Return min(values[start:end]) for each pair; starts < ends."""
        out = np.empty(len(starts))
        level = np.frexp((ends - starts).astype(np.float64))[1] - 1
        for n in np.unique(level):
            at = np.flatnonzero(level == n)
            out[at] = np.minimum(self.rows[n][starts[at]], self.rows[n][ends[at] - (1 << int(n))])
        return out


def forbid(core: PresolvedProblem) -> dict[int, None]:
    """Drop the strategies that leave too little room for the minimum usage of the other nodes.

    Returns the nodes touched.
    """
    touched: dict[int, None] = {}
    if not len(core.room):
        return touched
    least = Least(core.room)
    for i in sorted(core.live):
        fits = np.ones(len(core.costs[i]), dtype=bool)
        for block in core.uses[i]:
            fits &= (block.amounts <= least.between(block.starts, block.ends)[:, None]).all(0)
        if not fits.all():
            if not fits.any():
                core.feasible = False
                return touched
            drop(core, i, np.flatnonzero(fits))
            touched |= dict.fromkeys([i, *core.near[i]])
    return touched
