"""Measured times of moves, and estimates for sizes and groups that were not measured. Pure.

There is a curve over sizes for some group sizes. The cluster model reads these curves.

Timings are noisy, and planners need laws. More bytes or more ranks never take less time. An
all-reduce takes no less time than either of its halves. So where measurements contradict a law they
are pooled (isotonic regression of their logarithms): the smallest change that makes the law hold.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Curve", "Curves", "pooled"]


@dataclass(frozen=True)
class Curve:
    """The seconds of one kind of move among ``ranks`` ranks on ``nodes`` machines.

    ``points`` are (bytes, seconds), by rising bytes. Bytes are counted as `Cluster.seconds` does.
    Raises ValueError where a point is not positive, or a size occurs twice.
    """

    kind: str
    ranks: int
    nodes: int
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "points", tuple(sorted((int(n), float(s)) for n, s in self.points))
        )
        what = f"the curve of {self.kind} among {self.ranks} ranks on {self.nodes} nodes"
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(f"{what}: there must be a rank on each node")
        if not self.points or any(n < 1 or not 0 < s < math.inf for n, s in self.points):
            raise ValueError(
                f"{what} needs at least one point (bytes, seconds), all of them positive and finite"
            )
        if len({n for n, _ in self.points}) < len(self.points):
            raise ValueError(f"{what} has two points of the same size")

    def lawful(self) -> Curve:
        """Return the nearest curve on which more bytes never take less time."""
        return Curve(
            self.kind,
            self.ranks,
            self.nodes,
            tuple(
                zip([n for n, _ in self.points], pooled([s for _, s in self.points]), strict=True)
            ),
        )


def pooled(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence that is nearest to positive values, by their logarithms.

    The algorithm is pool adjacent violators (Ayer et al. 1955).

    >>> pooled([1.0, 4.0, 1.0, 8.0])
    [1.0, 2.0, 2.0, 8.0]
    """
    if all(a <= b for a, b in pairwise(values)):
        return list(values)
    pools: list[tuple[float, int]] = []  # (mean of the logarithms, number of values)
    for value in values:
        mean, n = math.log2(value), 1
        while pools and pools[-1][0] > mean:
            before, m = pools.pop()
            mean, n = (before * m + mean * n) / (m + n), m + n
        pools.append((mean, n))
    return [2.0**mean for mean, n in pools for _ in range(n)]


class _CurveLookup:
    """A lawful curve, prepared for look-ups."""

    __slots__ = ("logs", "points", "ranks", "sizes")

    def __init__(self, curve: Curve) -> None:
        self.ranks, self.points = curve.ranks, curve.lawful().points
        self.sizes = [n for n, _ in self.points]
        self.logs = [(math.log(n), math.log(s)) for n, s in self.points]

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for ``nbytes``.

        Between two points it is a power law. Below the first point it is that point's time. Beyond
        the last point it follows that point's bandwidth.
        """
        at = bisect_right(self.sizes, nbytes)
        if at == 0:
            return self.points[0][1]
        n, s = self.points[at - 1]
        if nbytes == n:
            return s
        if at == len(self.points):
            return s * nbytes / n
        (x0, y0), (x1, y1) = self.logs[at - 1], self.logs[at]
        return min(
            max(s, math.exp(y0 + (y1 - y0) * (math.log(nbytes) - x0) / (x1 - x0))),
            self.points[at][1],
        )


#: (kind, bytes, ranks on one node) -> (time before the first byte moves, time of the bytes), by the
#: ring formulas.
Parts = Callable[[str, float, int], tuple[float, float]]


class Curves:
    """The curves of a cluster, by kind and by the number of ranks on one node (0: all ranks)."""

    def __init__(self, curves: Iterable[Curve]) -> None:
        by_kind: dict[str, dict[int, dict[int, _CurveLookup]]] = {}
        for curve in sorted(curves, key=lambda c: (c.kind, c.ranks, c.nodes)):
            local = 0 if curve.nodes == 1 else max(1, curve.ranks // curve.nodes)
            by_kind.setdefault(curve.kind, {}).setdefault(local, {})[curve.ranks] = _CurveLookup(
                curve
            )
        self._families = {
            kind: {local: list(by_size.values()) for local, by_size in families.items()}
            for kind, families in by_kind.items()
        }

    def __contains__(self, kind: str) -> bool:
        return kind in self._families

    def seconds(
        self, kind: str, nbytes: float, ranks: int, local: int, parts: Parts
    ) -> float | None:
        """Return the seconds of a move, or None where nothing comparable was measured.

        ``local``: the number of the group's ranks on each of several nodes, or 0 for all ranks on
        one.
        """
        families = self._families.get(kind, {})
        if local and local not in families:
            local = min(
                (have for have in families if have),
                key=lambda have: (abs(math.log(have / local)), have),
                default=local,
            )
        family = families.get(local)
        return (
            None if family is None else _interpolate_group_sizes(family, kind, nbytes, ranks, parts)
        )


def _interpolate_group_sizes(
    family: list[_CurveLookup], kind: str, nbytes: float, ranks: int, parts: Parts
) -> float:
    """Return the seconds for ``ranks`` from the curves of measured group sizes.

    Between two measured sizes it is a power law. Beyond them the nearest size's time grows as the
    ring formula does, for steps and for bytes separately.
    """
    raw = [curve.seconds(nbytes) for curve in family]
    seconds = pooled(raw)
    sizes = [curve.ranks for curve in family]
    at = bisect_right(sizes, ranks)
    if at and sizes[at - 1] == ranks:
        return seconds[at - 1]
    if 0 < at < len(sizes):
        share = math.log(ranks / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
        return seconds[at - 1] * math.pow(seconds[at] / seconds[at - 1], share)
    nearest = family[-1] if at else family[0]
    total = seconds[-1] if at else seconds[0]
    first = min(total, pooled([curve.points[0][1] for curve in family])[-1 if at else 0])
    (steps, moved), (steps_here, moved_here) = (
        parts(kind, nbytes or 1, nearest.ranks),
        parts(kind, nbytes or 1, ranks),
    )
    # Where the formula gives 0 for steps, or for bytes, it gives no growth for them either.
    return first * (steps_here / steps if steps else 1.0) + (total - first) * (
        moved_here / moved if moved else 1.0
    )
