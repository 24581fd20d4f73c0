"""The cost model of pipelines.

`inter_op.search` calls it for the step time by each schedule's formula, for the transfers between
stages, and for the stages in the simulator's form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from ...cluster import Cluster
from ...sharding.placement import Placement
from .segment_cost import MeshContext, ParameterStorage, Quantity
from .stage_dp import StageCosts, StageDivision, StageVariant
from .step_simulator import StageTimes

__all__ = [
    "Candidate",
    "Crossing",
    "Setting",
    "narrowed",
    "parts_of",
    "stages_of",
]

Array = np.ndarray[Any, np.dtype[Any]]
_MAX_BOUNDARY_LAYOUTS: Final = 3  # layouts considered where stages meet


class Setting(NamedTuple):
    """A number of stages, a number of micro-batches, and the mesh of each stage.

    No plan with this setting takes less than ``bound``.
    """

    bound: float
    stages: int
    micros: int
    mesh: Placement

    @property
    def key(self) -> tuple[int, int, Placement]:
        """The setting without its bound, which the search raises."""
        return self.stages, self.micros, self.mesh


@dataclass
class Candidate:
    """A candidate plan of the cost model.

    It has chunks of segments on lanes of devices, the layouts between them, and the variant of each
    chunk.
    """

    cost: float
    setting: Setting
    schedule: str
    lanes: tuple[int, ...]
    division: StageDivision
    ways: tuple[StageVariant, ...]
    cutting: StageCosts = field(repr=False)


class Crossing:
    """The transfers at a cut between stages: seconds forward and back, by the layout that crosses.

    Each rank sends its local tensor to its peer.
    """

    def __init__(self, ground: MeshContext, cluster: Cluster, setting: Setting, hub: int) -> None:
        self.ground, self.cluster, self.size = ground, cluster, setting.mesh.size
        states = np.unravel_index(
            hub, tuple(len(those) for those in ground.active.values()) or (1,)
        )
        self.hub = {
            h: options[ground.active[h][int(k)]]
            for (h, options), k in zip(ground.hubs.items(), states, strict=False)
        }
        self._known: dict[int, Array] = {}

    def seconds(self, cut: int) -> Array:
        found = self._known.get(cut)
        if found is None:
            found = self._known[cut] = self._seconds(cut)
        return found

    def bytes(self, cut: int) -> Array:
        """Return the bytes that each rank sends forward."""
        ground, chain = self.ground, self.ground.chain
        number = chain.segments[cut - 1].gives
        faces = ground.faces(number)
        sent = ground.bytes(ground.calls.values[number], faces) if number >= 0 else np.zeros(1)
        for h, layout in self.hub.items():
            value = ground.calls.values[h]
            touched = [k for k, s in enumerate(chain.segments) if h in s.hubs]
            if (
                value.maker >= 0
                and touched[0] < cut <= touched[-1]
                and not isinstance(layout, ParameterStorage)
            ):
                sent = sent + ground.bytes(value, [layout])
        return np.asarray(sent)

    def _seconds(self, cut: int) -> Array:
        ground = self.ground
        number = ground.chain.segments[cut - 1].gives
        back = ground.calls.training and number >= 0 and ground.calls.values[number].grad
        return np.array(
            [
                (1 + back) * self.cluster.seconds("send", float(n), (0, self.size))
                for n in self.bytes(cut)
            ]
        )


def narrowed(cutting: StageCosts, hub: int) -> Callable[[int], Sequence[int]]:
    """Select the layouts to consider at each cut: those with which the whole chain costs least."""
    tables = [cutting.first.of(((kind, False, 1),)).score[hub] for kind in cutting.kinds]
    forward, backward = [np.zeros(tables[0].shape[0])], [np.zeros(tables[-1].shape[1])]
    for table in tables:
        forward.append((forward[-1][:, None] + table).min(0))
    for table in reversed(tables):
        backward.append((table + backward[-1][None, :]).min(1))
    through = [a + b for a, b in zip(forward, reversed(backward), strict=True)]
    return lambda cut: [
        int(k) for k in np.argsort(through[cut], kind="stable")[:_MAX_BOUNDARY_LAYOUTS]
    ]


def parts_of(
    cutting: StageCosts, division: StageDivision, ways: Sequence[StageVariant], i: int
) -> Array:
    a, b = division.cuts[i], division.cuts[i + 1]
    return np.asarray(
        cutting.table(cutting.kinds[a:b], ways[i]).parts[
            :, cutting.hub, division.faces[i], division.faces[i + 1]
        ]
    )


def stages_of(candidate: Candidate, cluster: Cluster) -> list[StageTimes]:
    """Convert the chunks of a candidate to stages for the simulator."""
    cutting, division, size = candidate.cutting, candidate.division, candidate.setting.mesh.size
    crossing = Crossing(cutting.ground, cluster, candidate.setting, cutting.hub)
    out = []
    for i, way in enumerate(candidate.ways):
        p = parts_of(cutting, division, candidate.ways, i)
        again = _recompute_seconds(cutting, division, candidate.ways, i) if way.recomputed else 0.0
        last = i + 1 == len(candidate.ways)
        sent = 0.0 if last else float(crossing.bytes(division.cuts[i + 1])[division.faces[i + 1]])
        training = cutting.ground.calls.training
        out.append(
            StageTimes(
                forward=float(p[Quantity.FORWARD]), backward=float(p[Quantity.BACKWARD]),
                again=again,
                gathers=float(p[Quantity.GATHERS]), sums=float(p[Quantity.REDUCTIONS]),
                updates=float(p[Quantity.OPTIMIZER]),
                kept=float(p[Quantity.PARAMETERS]),
                activations=float(p[Quantity.ACTIVATIONS]) if training else 0.0,
                passing=float(p[Quantity.WORKSPACE]), sent=sent,
                first=candidate.lanes[i] * size, ranks=size,
            )
        )  # fmt: skip
    return out


def _recompute_seconds(
    cutting: StageCosts, division: StageDivision, ways: Sequence[StageVariant], i: int
) -> float:
    """Return the seconds of forward passes that run again in backward."""
    a, way = division.cuts[i], ways[i]
    faces = cutting.ranges(way.weights).faces(
        cutting.kinds[a : division.cuts[i + 1]],
        [k < way.recomputed for k in range(division.cuts[i + 1] - a)],
        cutting.hub,
        division.faces[i],
        division.faces[i + 1],
    )
    seconds = 0.0
    for k in range(way.recomputed):
        seconds += float(
            cutting.ranges(way.weights)
            .of(((cutting.kinds[a + k], True, 1),))
            .parts[0, cutting.hub, faces[k], faces[k + 1]]
        )
    return seconds
