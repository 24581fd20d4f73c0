"""Costs of consecutive segments: min-plus products of the segments' matrices.

`stage_dp` and `lagrangian_bound` call it. Segments of one kind share their matrix, so a run of n
equal segments costs log n products.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .segment_cost import MeshContext, Quantity, Weights

__all__ = ["Ranges", "Run", "Table", "join", "runs"]

Array = np.ndarray[Any, np.dtype[Any]]
#: (kind of segment, whether its forward pass is recomputed, number of segments)
Run = tuple[int, bool, int]


@dataclass(frozen=True)
class Table:
    """The costs of consecutive segments.

    ``score[h, i, j]`` is the minimum weighted cost with hubs in state h, input in layout i and
    output in layout j. ``parts`` has its quantities (first axis: `Quantity`).
    """

    score: Array
    parts: Array


def join(a: Table, b: Table) -> Table:
    """Concatenate two ranges: find the best layout in between for each pair of outer layouts."""
    both = a.score[:, :, :, None] + b.score[:, None, :, :]
    middle = both.argmin(2)
    h, i, j = np.ogrid[: middle.shape[0], : middle.shape[1], : middle.shape[2]]
    one, two = a.parts[:, h, i, middle], b.parts[:, h, middle, j]
    parts = one + two
    largest = Quantity.WORKSPACE
    parts[largest] = np.maximum(one[largest], two[largest])
    return Table(both[h, i, middle, j], parts)


def runs(kinds: Sequence[int], recomputed: Sequence[bool]) -> tuple[Run, ...]:
    """Group consecutive segments that are equal.

    >>> runs([0, 1, 1, 1, 2], [True, True, False, False, False])
    ((0, True, 1), (1, True, 1), (1, False, 2), (2, False, 1))
    """
    return tuple(
        (kind, again, len(list(group)))
        for (kind, again), group in itertools.groupby(zip(kinds, recomputed, strict=True))
    )


class Ranges:
    """The tables of runs of segments on a mesh, for some weights.

    ``loose``: hubs have in each segment the layouts that suit it alone. No plan can do better.
    """

    def __init__(self, ground: MeshContext, weights: Weights, loose: bool = False) -> None:
        self.ground, self.weights, self.loose = ground, weights, loose
        self.shape = tuple(len(ground.active[h]) for h in ground.hubs if not loose) or (1,)
        self._known: dict[tuple[Run, ...], Table] = {}

    def of(self, row: tuple[Run, ...]) -> Table:
        """Return the table of these runs."""
        table = self._known.get(row)
        if table is None:
            if len(row) > 1:
                table = join(self.of(row[:-1]), self.of(row[-1:]))
            else:
                ((kind, again, many),) = row
                table = (
                    join(
                        self.of(((kind, again, many // 2),)),
                        self.of(((kind, again, many - many // 2),)),
                    )
                    if many > 1
                    else self._segment_table(kind, again)
                )
            self._known[row] = table
        return table

    def _segment_table(self, kind: int, again: bool) -> Table:
        part = self.ground.part(kind)
        matrix = part.solve(self.weights, again, self.loose)
        have = [h in part.segment.hubs for h in self.ground.hubs if not self.loose]
        ends = matrix.score.shape[-2:]
        narrow = [n if there else 1 for n, there in zip(self.shape, have, strict=False)] or [1]
        states = int(np.prod(self.shape))
        score = np.broadcast_to(matrix.score.reshape(*narrow, *ends), (*self.shape, *ends)).reshape(
            states, *ends
        )
        parts = np.broadcast_to(
            matrix.parts.reshape(-1, *narrow, *ends), (len(matrix.parts), *self.shape, *ends)
        ).reshape(-1, states, *ends)
        return Table(score, parts)

    def faces(
        self, kinds: Sequence[int], recomputed: Sequence[bool], hub: int, start: int, end: int
    ) -> list[int]:
        """Find the layouts between segments on the cheapest path from ``start`` to ``end``.

        They are the layouts of the activation by number, with ``start`` and ``end`` included.
        """
        best, back = None, []
        for kind, again in zip(kinds, recomputed, strict=True):
            score = self.of(((kind, again, 1),)).score[hub]
            if best is None:
                best = score[start]
                continue
            total = best[:, None] + score
            back.append(total.argmin(0))
            best = total.min(0)
        found = [end]
        for step in reversed(back):
            found.append(int(step[found[-1]]))
        return [start, *reversed(found)]
