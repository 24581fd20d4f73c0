"""Dynamic programming that cuts a chain of segments into pipeline stages.

`inter_op.search` calls it. It chooses the cuts and the layouts that cross them.

Let there be m micro-batches. Stage i takes t_i seconds for each of them, and u_i seconds once a
step. The modelled time of a step is sum_i t_i + max_i ((m - 1) t_i + u_i) + transfers (PipeDream,
Alpa). The first micro-batch goes through all stages; the others follow at the pace of the slowest
stage. The maximum can only be that of some stage. For each such limit the minimum sum is found. The
limit rises until no larger one can pay.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from .min_plus_elimination import TooWide
from .range_cost import Ranges, Table, runs
from .segment_cost import NEVER, SMALL, MeshContext, Quantity, Weights

__all__ = [
    "StageCosts",
    "StageOptions",
    "StageVariant",
    "divide_into_stages",
    "least_memory",
    "total",
]

Array = np.ndarray[Any, np.dtype[Any]]
_SIDES: Final = (0.5,)


class Weighting(NamedTuple):
    """A weighting to search layouts for.

    ``price`` is the price of memory: seconds of the whole step for as much memory as the limit.
    ``gathering`` and ``summing`` state which of two overlapping durations is longer (`Weights`).
    """

    price: float = 0.0
    gathering: float = 0.0
    summing: float = 0.0


class StageVariant(NamedTuple):
    """A way to run a stage.

    ``weights`` is the number of the weights that its layouts were found with, ``recomputed`` is how
    many of its segments recompute their forward pass.
    """

    weights: int
    recomputed: int


@dataclass(frozen=True)
class StageOptions:
    """The options of one stage, for each pair of layouts at its ends.

    ``time`` is seconds of a micro-batch, ``step`` seconds of a step, ``memory`` bytes, and ``way``
    the number of the variant in ``ways``. Times are inf where nothing fits.
    """

    time: Array
    step: Array
    memory: Array
    way: Array
    ways: tuple[StageVariant, ...]


class StageCosts:
    """The costs of each range of segments as a stage, on one mesh and within a memory limit.

    ``micros`` is the number of micro-batches. ``prices`` are prices of memory, in seconds of the
    whole step for as much memory as the limit; layouts are searched for each price. ``recompute``
    allows recomputation.
    """

    def __init__(
        self,
        ground: MeshContext,
        micros: int,
        stages: int,
        limit: float | None,
        prices: Sequence[float] = (0.0,),
        recompute: bool = True,
        hub: int = 0,
    ) -> None:
        self.ground, self.micros, self.stages, self.limit, self.hub = (
            ground,
            micros,
            stages,
            limit,
            hub,
        )
        self.kinds = ground.chain.kinds
        self.recompute = recompute and ground.calls.training
        self.prices = prices
        self._reset_caches()

    def _reset_caches(self) -> None:
        self._ranges: list[Ranges] = []
        self._known: dict[Any, StageOptions] = {}
        self._looks: list[Weighting] = []
        self.first = self.ranges(0)

    @property
    def looks(self) -> list[Weighting]:
        """The weightings to try.

        The first takes memory as free and all communication that can hide as hidden. The next ones
        hide less, where the first hides more than is possible. The last ones put prices on memory.
        """
        if not self._looks:
            self._looks = [
                Weighting(),
                *self._traffic_weightings(self._chain(self.first)),
                *map(Weighting, self.prices[1:]),
            ]
        return self._looks

    def _traffic_weightings(self, table: Table) -> list[Weighting]:
        """List weightings for chains that gather or sum for longer than they compute.

        The list is empty if the best chain of ``table`` does neither.
        """
        where = np.unravel_index(int(table.score.argmin()), table.score.shape)
        f, b, g, r = table.parts[(slice(4), *where)].tolist()
        if self.ground.seen >= 1.0 or not math.isfinite(float(table.score.min())):
            return []
        if g > (2 * min(f, b) if b else f):
            return [Weighting(0.0, x, x) for x in _SIDES]
        return [Weighting(0.0, 0.0, x) for x in _SIDES] if g / 2 + r > b > 0 else []

    def weights(self, k: int) -> Weights:
        """Return the `Weights` of the k-th entry of `looks`."""
        return self._weights(self.looks[k]) if k else self._weights(Weighting())

    def _weights(self, look: Weighting) -> Weights:
        time = float(self.micros + self.stages - 1)
        if not look.price or not self.limit:
            return Weights(time, 1.0, gathering=look.gathering, summing=look.summing)
        free = self._chain(self.first)
        each = look.price * float(free.score.min()) / (self.stages * self.limit)
        return Weights(time, 1.0, each, each * min(self.micros, (self.stages + 1) / 2))

    def _chain(self, ranges: Ranges) -> Table:
        return ranges.of(runs(self.kinds, [False] * len(self.kinds)))

    def ranges(self, k: int) -> Ranges:
        while len(self._ranges) <= k:
            self._ranges.append(Ranges(self.ground, self.weights(len(self._ranges))))
        return self._ranges[k]

    def of(self, a: int, b: int, flight: float) -> StageOptions:
        """Return the options of segments a to b as one stage.

        The stage has at most ``flight`` micro-batches in flight.
        """
        key = runs(self.kinds[a:b], [False] * (b - a)), flight
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._best_options(self.kinds[a:b], flight)
        return found

    def table(self, kinds: Sequence[int], way: StageVariant) -> Table:
        again = [k < way.recomputed for k in range(len(kinds))]
        return self.ranges(way.weights).of(runs(kinds, again))

    def _best_options(self, kinds: Sequence[int], flight: float) -> StageOptions:
        score = best = None
        ways: list[StageVariant] = []
        for k, look in enumerate(self.looks):
            if look.price and score is not None and np.isfinite(score).all():
                break  # everything fits already, so a price on memory gains nothing
            for way in self._recompute_variants(kinds, k, flight):
                table = self.table(kinds, way)
                parts = table.parts[:, self.hub]
                memory, time, step = (
                    held(parts, flight),
                    taken(parts, self.ground.seen),
                    once(parts, self.ground.seen),
                )
                cost = (self.micros + self.stages - 1) * time + step
                cost = np.where(
                    np.isfinite(table.score[self.hub]) & (memory <= (self.limit or math.inf)),
                    cost,
                    np.inf,
                )
                ways.append(way)
                number = np.full(cost.shape, len(ways) - 1)
                if best is None or score is None:
                    score, best = cost, [time, step, memory, number]
                else:
                    better = cost < score
                    score = np.where(better, cost, score)
                    best = [
                        np.where(better, new, old)
                        for new, old in zip((time, step, memory, number), best, strict=True)
                    ]
        assert score is not None
        assert best is not None
        gone = ~np.isfinite(score)
        return StageOptions(
            np.where(gone, np.inf, best[0]),
            np.where(gone, np.inf, best[1]),
            best[2],
            best[3],
            tuple(ways),
        )

    def _recompute_variants(
        self, kinds: Sequence[int], k: int, flight: float
    ) -> list[StageVariant]:
        """List the amounts of recomputation to try.

        They are nothing, and the fewest segments that make the stage fit. If nothing makes it fit,
        the only entry recomputes everything.
        """
        plain = StageVariant(k, 0)
        if self.limit is None or not self.recompute or self._fits_memory(kinds, plain, flight):
            return [plain]
        low, high = 0, len(kinds)
        if not self._fits_memory(kinds, StageVariant(k, high), flight):
            return [StageVariant(k, high)]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (low, middle)
                if self._fits_memory(kinds, StageVariant(k, middle), flight)
                else (middle, high)
            )
        return [plain, StageVariant(k, high)]

    def _fits_memory(self, kinds: Sequence[int], way: StageVariant, flight: float) -> bool:
        found = self.table(kinds, way)
        memory = held(found.parts[:, self.hub], flight)
        best = np.unravel_index(int(found.score[self.hub].argmin()), memory.shape)
        return bool(memory[best] <= (self.limit or math.inf))

    def evenly(self, gathers: float = 1.0, sides: bool = False) -> float:
        """Return a lower bound in seconds: all stages take equally long, with hubs and memory free.

        ``gathers`` is the fraction of the time for gathering parameters that counts. ``sides``:
        where gathering or summing takes longer than computing, try other weightings too and return
        the largest bound.
        """
        found = self._chain(self._free_hub_ranges(Weighting(), gathers))
        others = self._traffic_weightings(found) if sides else []
        least = max(
            [
                float(found.score.min()),
                *(
                    float(self._chain(self._free_hub_ranges(look, gathers)).score.min())
                    for look in others
                ),
            ]
        )
        return (
            least / self.stages if all(self.ground.part(k).sound for k in set(self.kinds)) else 0.0
        )

    def at_least(self, ideals: Sequence[float], enough: float) -> float:
        """Return a lower bound of `evenly`. It rises kind by kind until it reaches ``enough``.

        Kinds with many segments for their size come first. ``ideals`` has the minimum seconds of a
        micro-batch of each kind; it counts for kinds that have not been solved yet.
        """
        time, counts = self.micros + self.stages - 1, Counter(self.kinds)
        ranges, segments = self._free_hub_ranges(Weighting(), 1.0), self.ground.chain
        total = time * sum(n * ideals[kind] for kind, n in counts.items())
        for kind in sorted(
            counts, key=lambda k: len(segments.segments[segments.first[k]].calls) / counts[k]
        ):
            score = float(ranges.of(((kind, False, 1),)).score.min())
            if self.ground.part(kind).sound:
                total += counts[kind] * max(0.0, score - time * ideals[kind])
            if total >= enough * self.stages:
                break
        return total / self.stages

    def _free_hub_ranges(self, look: Weighting, gathers: float) -> Ranges:
        return Ranges(self.ground, self._weights(look)._replace(gathers=gathers), True)

    def settle(self, k: int = 0) -> None:
        """Choose the layouts of the hubs by the k-th weighting; afterwards each hub has one option.

        The best of a few common layouts for all hubs comes first. Then each hub that is not small
        is improved in turn. Call it with the first weighting before any other.
        """
        ground = self.ground
        if not ground.hubs or (not k and all(len(those) == 1 for those in ground.active.values())):
            return
        weights = self.weights(k)

        def cost(active: dict[int, list[int]]) -> Array:
            ground.active = active
            return np.asarray(self._chain(Ranges(ground, weights)).score.min((1, 2)))

        def costs(best: dict[int, list[int]], h: int) -> Sequence[float]:
            numbers = range(len(ground.hubs[h]))
            try:
                return cost({**best, h: list(numbers)}).tolist()  # type: ignore[no-any-return]
            except TooWide:
                return [float(cost({**best, h: [k]}).min()) for k in numbers]

        best = min(ground.starts(), key=lambda active: float(cost(active).min()))
        values = ground.calls.values
        large = SMALL * max(v.nbytes for v in values)
        for h in sorted(
            (h for h in ground.hubs if values[h].nbytes >= large), key=lambda h: -values[h].nbytes
        ):
            found = costs(best, h)
            best = {**best, h: [found.index(min(found))]}
        ground.active = best
        self._reset_caches()


def held(parts: Array, flight: float) -> Array:
    """Return bytes of a rank with ``flight`` micro-batches in flight."""
    return np.asarray(
        parts[Quantity.PARAMETERS]
        + flight * parts[Quantity.ACTIVATIONS]
        + parts[Quantity.WORKSPACE]
    )


def taken(parts: Array, seen: float) -> Array:
    """Return seconds of a micro-batch.

    Gathering overlaps with computing, half of it with each pass.
    """
    f, b, g = (parts[q] for q in (Quantity.FORWARD, Quantity.BACKWARD, Quantity.GATHERS))
    ahead = np.where(b > 0, g / 2, g)
    return _overlapped_seconds(f, ahead, seen) + _overlapped_seconds(b, g - ahead, seen)


def once(parts: Array, seen: float) -> Array:
    """Return seconds a step.

    They are those of the optimizer, and what summing gradients adds to the last backward pass.
    """
    b, g, r = (parts[q] for q in (Quantity.BACKWARD, Quantity.GATHERS, Quantity.REDUCTIONS))
    behind = np.where(b > 0, g / 2, 0.0)
    return np.asarray(
        parts[Quantity.OPTIMIZER]
        + _overlapped_seconds(b, behind + r, seen)
        - _overlapped_seconds(b, behind, seen)
    )


def _overlapped_seconds(computing: Array, moving: Array, seen: float) -> Array:
    return np.asarray(np.maximum(computing, moving) + seen * np.minimum(computing, moving))


def total(
    times: Sequence[float], steps: Sequence[float], transfers: Sequence[float], micros: int
) -> float:
    """Return the modelled time of a step.

    >>> total([1.0, 2.0], [0.5, 0.0], [0.25], micros=3)
    7.25
    """
    return (
        sum(times)
        + max((micros - 1) * t + u for t, u in zip(times, steps, strict=True))
        + sum(transfers)
    )


def least_memory(cutting: StageCosts, stages: int, flights: Sequence[float]) -> float:
    """Return the minimum limit under which every even share of the chain would fit as a stage.

    Layouts are those of the highest price of memory. A stage recomputes everything or nothing,
    whichever needs less memory.
    """
    k = len(cutting.looks) - 1
    size = -(-len(cutting.kinds) // stages)
    worst = 0.0
    for i in range(stages):
        kinds = cutting.kinds[i * size : (i + 1) * size]
        if kinds:
            tables = [
                cutting.table(kinds, StageVariant(k, r))
                for r in ({0, len(kinds)} if cutting.recompute else {0})
            ]
            worst = max(
                worst, min(float(held(t.parts[:, cutting.hub], flights[i]).min()) for t in tables)
            )
    return worst


# ------------------------------------------------------------------------------ dynamic programming


class StageDivision(NamedTuple):
    """A division of the chain into stages.

    ``cuts`` includes 0 and the number of segments. ``faces`` has the layouts at the cuts, by
    number. ``cost`` is the modelled time.
    """

    cuts: tuple[int, ...]
    faces: tuple[int, ...]
    cost: float


def divide_into_stages(
    segments: int, stages: int, micros: int, stage: Callable[[int, int, int], StageOptions],
    transfer: Callable[[int, int], Array],
    loads: Sequence[float] | None = None, slack: float = 1.15,
    faces: Callable[[int], Sequence[int]] | None = None,
) -> StageDivision | None:  # fmt: skip
    """Find the best cut of ``segments`` consecutive segments into ``stages``; None where none fits.

    ``stage(i, a, b)`` returns the options of segments a to b as stage i. ``transfer(i, b)`` returns
    seconds of the transfer from stage i at cut b, for each layout. ``loads`` is about how long each
    segment takes. Stages with more than ``slack`` times an even share, and a segment more, are not
    considered. With ``loads=None`` all stages are considered. ``faces(b)`` lists the layouts
    considered at cut b; None: all.
    """
    pairs = _stage_ranges(segments, stages, loads, slack)
    tables: dict[tuple[int, int, int], tuple[Array, Array]] = {}
    for i, a, b in pairs:
        found = stage(i, a, b)
        time, step = found.time, found.step
        if faces is not None:
            some = np.ix_(
                list(faces(a)) if a else range(time.shape[0]),
                list(faces(b)) if b < segments else range(time.shape[1]),
            )
            time, step = time[some], step[some]
        if np.isfinite(time).any():
            tables[i, a, b] = (
                time,
                np.where(np.isfinite(time), (micros - 1) * np.minimum(time, NEVER) + step, np.inf),
            )
    crossing: dict[tuple[int, int], Array] = {}
    for i, _, b in tables:
        if i < stages - 1 and (i, b) not in crossing:
            row = transfer(i, b)
            crossing[i, b] = row[list(faces(b))] if faces is not None else row
    limits = sorted(
        {float(x) for _, pace in tables.values() for x in pace[np.isfinite(pace)].ravel()}
    )
    free = _min_sum_division(tables, crossing, segments, stages, math.inf)
    if free is None or not limits:
        return None
    low = bisect.bisect_left(limits, _min_bottleneck(tables, crossing, segments, stages))
    best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
    for limit in limits[low:]:
        if best is not None and limit + free[0] >= best[0]:
            break
        found_here = _min_sum_division(tables, crossing, segments, stages, limit)
        if found_here is None:
            continue
        cost, cuts, between = found_here
        pace = max(
            float(tables[i, cuts[i], cuts[i + 1]][1][between[i], between[i + 1]])
            for i in range(stages)
        )
        if best is None or cost + pace < best[0]:
            best = cost + pace, cuts, between
    if best is None:
        return None
    own = tuple(
        f if faces is None or c in (0, segments) else list(faces(c))[f]
        for c, f in zip(best[1], best[2], strict=True)
    )
    return StageDivision(best[1], own, best[0])


def _stage_ranges(
    segments: int, stages: int, loads: Sequence[float] | None, slack: float
) -> list[tuple[int, int, int]]:
    """List (stage, start, end) of the ranges that a stage may have."""
    upto = [0.0]
    for x in loads if loads is not None else [0.0] * segments:
        upto.append(upto[-1] + x)
    # An even share with its slack, and always one segment more than an even share.
    most = slack * upto[-1] / stages + (max(loads) if loads else 0.0)
    stage_ranges = []
    for i in range(stages):
        for a in [0] if i == 0 else range(i, segments - (stages - i) + 1):
            if upto[a] > i * most:
                break
            for b in (
                [segments] if i == stages - 1 else range(a + 1, segments - (stages - i - 1) + 1)
            ):
                if upto[b] - upto[a] > most:
                    break
                if upto[-1] - upto[b] <= (stages - i - 1) * most:
                    stage_ranges.append((i, a, b))
    return stage_ranges


def _min_bottleneck(
    tables: dict[tuple[int, int, int], tuple[Array, Array]],
    crossing: dict[tuple[int, int], Array],
    segments: int,
    stages: int,
) -> float:
    """Return the minimum over all divisions of the slowest stage's pace."""
    best: dict[tuple[int, int], Array] = {}
    for (i, a, b), (time, pace) in tables.items():
        if i and (i, a) not in best:
            continue
        slowest = np.where(time < NEVER / 10, pace, np.inf)
        slowest = (slowest if i == 0 else np.maximum(best[i, a][:, None], slowest)).min(0)
        if i < stages - 1:
            slowest = np.where(crossing[i, b] < NEVER / 10, slowest, np.inf)
        best[i + 1, b] = np.minimum(best[i + 1, b], slowest) if (i + 1, b) in best else slowest
    return float(best[stages, segments].min())


def _min_sum_division(
    tables: dict[tuple[int, int, int], tuple[Array, Array]],
    crossing: dict[tuple[int, int], Array],
    segments: int,
    stages: int,
    limit: float,
) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
    """Return (minimum sum of times and transfers, cuts, layouts at the cuts).

    No stage may be slower than ``limit``. Return None where there is no such division.
    """
    best: dict[tuple[int, int], Array] = {}
    back: dict[tuple[int, int], list[tuple[int, Array]]] = {}
    for (i, a, b), (time, pace) in tables.items():
        if i and (i, a) not in best:
            continue
        allowed = np.where(pace <= limit, time, np.inf)
        reach = allowed if i == 0 else best[i, a][:, None] + allowed
        where, cost = reach.argmin(0), reach.min(0)
        if i < stages - 1:
            cost = cost + crossing[i, b]
        old = best.get((i + 1, b))
        if old is None:
            best[i + 1, b], back[i + 1, b] = cost, [(a, where)] * len(cost)
        elif (cost < old).any():
            best[i + 1, b] = np.minimum(cost, old)
            back[i + 1, b] = [
                (a, where) if new < o else kept
                for new, o, kept in zip(cost, old, back[i + 1, b], strict=True)
            ]
    last = best.get((stages, segments))
    if last is None or not last.min() < NEVER / 10:
        return None
    face = int(last.argmin())
    cuts, faces = [segments], [face]
    for i in range(stages, 0, -1):
        a, where = back[i, cuts[-1]][faces[-1]]
        cuts.append(a)
        faces.append(int(where[faces[-1]]))
    return float(last.min()), tuple(reversed(cuts)), tuple(reversed(faces))
