"""The search for a complete plan under a memory limit.

`flow.auto.plan` calls it. It chooses mesh, pipeline stages, micro-batches, schedule, recomputation,
ZeRO, and the layout of every tensor.

Each combination of a number of stages, a mesh and a number of micro-batches has a lower bound of
the modelled time. Combinations that cannot beat the best plan so far are skipped (branch and
bound). The best few plans of the model are simulated action by action, and the fastest of them is
returned.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..._base.byte_size import show_bytes
from ...cluster import Cluster
from ...errors import PlanError
from ...graph.pipeline import max_activations
from ...graph.pipeline.schedule_cost import (
    COUNTS_FILLING,
    PRICED,
    bubble_left,
    filling,
    modelled,
    usual_lanes,
)
from ...sharding.placement import Placement
from ..cost.batch_scaling import Batches, takes_statistics
from ..cost.meshes import divisors, meshes
from ..cost.reshard_cost import FELLOWS, ReshardCosts
from ..cost.rule_failures import lost_by
from ..cost.strategies import roofline
from ..gc_pause import gc_paused
from ..intra_op.formulate import bucket_of
from ..intra_op.search_options import Options
from ..ir.flops import work_of
from ..ir.op_graph import Calls
from ..ir.segments import Chain, cut
from ..plan.plan import Plan
from ..search_limits import LIMITS
from .build_plan import build_plan
from .lagrangian_bound import Dual
from .pipeline_cost import Candidate, Crossing, Setting, narrowed, parts_of, stages_of
from .range_cost import runs
from .segment_cost import MeshContext, Quantity
from .stage_dp import StageCosts, divide_into_stages, least_memory
from .step_simulator import StepSimulation, step

__all__ = ["SearchSpace", "search_pipelines"]


@dataclass(frozen=True)
class SearchSpace:
    """The space of a search.

    ``stages``, ``micro_batches`` and ``meshes`` (shapes of the mesh of one stage) restrict the
    search to these; None: all sensible ones. ``axes`` is the maximum number of axes of a mesh.
    ``schedules`` are those of pipelines; gpipe takes as long as 1f1b and more memory. ``recompute``
    allows recomputation. ``slack`` limits a stage's work, as a multiple of an even share.

    Models that take statistics of the batch (batch norm) compute other numbers with micro-batches,
    as with any accumulation of gradients. They get micro-batches only if ``micro_batches`` asks for
    them.
    """

    stages: Sequence[int] | None = None
    micro_batches: Sequence[int] | None = None
    meshes: Sequence[tuple[int, ...]] | None = None
    axes: int = 2
    schedules: Sequence[str] = ("1f1b", "interleaved", "zb-h1", "zb-v")
    recompute: bool = True
    slack: float = 1.15


@gc_paused()
def search_pipelines(
    calls_of: Callable[[int], Calls],
    batch: int,
    cluster: Cluster,
    devices: int | None = None,
    options: Options | None = None,
    space: SearchSpace | None = None,
    seconds: float | None = None,
) -> Plan:
    """Search for the best plan of a step of ``batch`` rows on ``devices`` devices.

    ``calls_of(rows)`` returns the calls of a step on so many rows; the batch is dim 0 of the
    inputs. ``devices=None`` means all devices of the cluster. ``options.memory`` is bytes of a
    device, by default the cluster's. ``seconds``: stop after this time and return the best plan so
    far.

    The plan has the best lower bound known. The search is deterministic, unless it is stopped.
    Raises PlanError where nothing fits, with the minimum memory that would do.
    """
    started = time.perf_counter()
    devices = devices or cluster.size or 1
    options = options or Options()
    if options.memory is None and cluster.memory:
        options = dataclasses.replace(options, memory=cluster.memory)
    search = PipelineSearch(
        Batches(calls_of, batch), cluster, devices, options, space or SearchSpace()
    )
    captured = time.perf_counter()
    search.run(math.inf if seconds is None else started + seconds)
    best, run = search.best()
    log = {
        **search.log,
        "capturing_seconds": captured - started,
        "searching_seconds": time.perf_counter() - captured,
    }
    return dataclasses.replace(
        build_plan(best, run, min(search.bound, best.cost), batch, log),
        lost=lost_by(search.batches.losses()),
    )


class PipelineSearch:
    def __init__(
        self, batches: Batches, cluster: Cluster, devices: int, options: Options, space: SearchSpace
    ) -> None:
        self.batches, self.cluster, self.devices, self.options, self.space = (
            batches,
            cluster,
            devices,
            options,
            space,
        )
        self.chain: Chain = cut(batches.whole, options.fixed)
        self.prices: dict[Placement, ReshardCosts] = {}
        self.candidates: list[Candidate] = []
        self.bounds: dict[tuple[int, int, Placement], float] = {}
        #: Bounds of the settings with one stage and one micro-batch. They also hold where gathered
        #: parameters are saved for backward (`formulate`). Then each is gathered once, in a bucket
        #: with others, which takes a fraction of the time.
        self.once: dict[tuple[int, int, Placement], float] = {}
        self.log: dict[str, Any] = {
            "segments": len(self.chain.segments),
            "kinds": len(self.chain.first),
        }
        self.statistics = takes_statistics(batches.whole)
        if self.statistics and not space.micro_batches:
            self.log["one_batch"] = (
                f"{self.statistics} takes statistics of the batch, and statistics of "
                "micro-batches would differ: the search has no micro-batches and no pipelines"
            )
        self.duals: dict[tuple[int, int, Placement, str], Dual] = {}
        self._ideals: dict[tuple[int, int], list[tuple[float, float]]] = {}
        self.settled: dict[Placement, dict[int, list[int]]] = {}  # layouts of the hubs on a mesh
        self._later: list[tuple[float, Setting, MeshContext, int]] = []

    @property
    def least(self) -> float:
        """The modelled seconds of the best plan so far."""
        return self.candidates[0].cost if self.candidates else math.inf

    @property
    def bound(self) -> float:
        return min(self.bounds.values(), default=0.0)

    def run(self, until: float) -> None:
        settings = sorted(self._settings(), key=lambda s: s[:3])
        if not settings:
            out = "".join(f"; {told}" for told in self.log.get("left_out", {}).values())
            many = len(self.chain.segments)
            raise PlanError(
                f"nothing to search: {self.devices} devices, a batch of {self.batches.batch}, "
                f"{many} segments to cut between, {self.space}{out}"
            )
        self.bounds = {s.key: s.bound for s in settings}
        self.once = {s.key: s.bound for s in settings if s.stages == s.micros == 1}
        seen = 0
        for setting in settings:
            if setting.bound >= self.least or (self.candidates and time.perf_counter() > until):
                continue
            seen += 1
            self._explore_setting(setting)
        if not self.candidates:
            raise PlanError(self._no_plan_message())
        self._reschedule(until)
        self._tighten(until)
        others = min(
            (bound for key, bound in self.bounds.items() if key not in self.once), default=math.inf
        )
        self.log |= {
            "settings": len(settings),
            "searched": seen,
            "bound_gathered_once": min(others, *self.once.values(), math.inf),
        }
        self.log["bound_of_pipelines"] = others if math.isfinite(others) else None
        self.log["bounds_of_meshes"] = sorted(
            [bound, list(mesh.shape)] for (_, _, mesh), bound in self.once.items()
        )
        self.log["computing_of_meshes"] = [
            [s.bound, list(s.mesh.shape)] for s in settings if s.key in self.once
        ]

    # The search space

    def _settings(self) -> Iterator[Setting]:
        space = self.space
        for stages in space.stages or divisors(self.devices):
            if (
                stages > len(self.chain.segments)
                or self.devices % stages
                or not any(True for _ in self._lanes(stages))
            ):
                continue
            shapes = meshes(self.devices // stages, self.cluster, space.axes)
            if space.meshes is not None:
                shapes = [m for m in shapes if m.shape in set(map(tuple, space.meshes))]
            for micros in self._micros(stages):
                bound = sum(
                    self._ideal_seconds(stages, micros)[kind][0] for kind in self.chain.kinds
                ) * micros / stages + self._bubble(stages, micros)
                yield from (Setting(bound, stages, micros, mesh) for mesh in shapes)

    def _micros(self, stages: int) -> list[int]:
        """List the numbers of micro-batches to try: those of the space, or those that make sense.

        The latter are at least as many as the stages, and grow by a factor of two or more. A model
        that takes statistics of the batch gets one micro-batch, because a plan must not change
        results.
        """
        batch, wanted = self.batches.batch, self.space.micro_batches
        if wanted:
            return [m for m in wanted if batch % m == 0 and self._makes_same_calls(batch // m)]
        if self.statistics:
            return [1] if stages == 1 else []
        able = [
            m
            for m in divisors(batch)
            if (m >= stages or stages == 1)
            and (self.batches.whole.training or m == 1 or stages > 1)
        ]
        micro_batches: list[int] = []
        for m in able:
            if (
                m <= max(64, 8 * stages)
                and (not micro_batches or m >= 2 * micro_batches[-1])
                and self._makes_same_calls(batch // m)
            ):
                micro_batches.append(m)
        return micro_batches

    def _makes_same_calls(self, rows: int) -> bool:
        """Return True if the model makes the same calls on ``rows`` rows."""
        out = self.log.get("left_out", {})
        if str(rows) not in out:
            try:
                self.batches.at(rows)
            except PlanError as error:
                self.log["left_out"] = out = {**out, str(rows): str(error)}
        return str(rows) not in out

    def _bubble(
        self, stages: int, micros: int, by: Sequence[tuple[tuple[int, ...], str]] | None = None
    ) -> float:
        """Return a lower bound of the seconds that a pipeline takes beyond its busiest lane's work.

        The bound is the minimum over schedules (`modelled`), or over the lanes and schedules
        ``by``. It counts computing only.
        """
        least = self._ideal_seconds(stages, micros)
        work, forward = (sum(least[kind][k] for kind in self.chain.kinds) for k in (0, 1))
        if stages > len(self.chain.segments):
            return math.inf
        return min(
            filling(schedule, stages, len(lanes), micros, work, forward)
            for lanes, schedule in by or self._lanes(stages)
        )

    def _ideal_seconds(self, stages: int, micros: int) -> list[tuple[float, float]]:
        """Return the minimum seconds of computing a micro-batch of each kind of segment.

        Each entry is (both passes, forward pass). All ranks of a stage share the work evenly, and
        nothing communicates. In a cluster with measured calls memory traffic is not counted,
        because measured calls may take less than the roofline of their bytes.
        """
        key = stages, micros
        if key not in self._ideals:
            calls, share = self.batches.at(self.batches.batch // micros), stages / self.devices
            self._ideals[key] = []
            for first in self.chain.first:
                both = forward = 0.0
                for number in self.chain.segments[first].calls:
                    call, values = calls.calls[number], calls.values
                    work, operands, results = (
                        work_of(call, values),
                        [values[v] for v in call.operands],
                        [values[v] for v in call.outs],
                    )
                    nbytes = (
                        0.0
                        if self.cluster.ops
                        else share * sum(v.nbytes for v in (*operands, *results))
                    )
                    if not work.view and (work.flops or nbytes):
                        passes = roofline(
                            self.cluster, operands, results, work, share, nbytes, calls.training
                        )
                        both, forward = both + sum(passes), forward + passes[0]
                self._ideals[key].append(
                    (self.options.computation * both, self.options.computation * forward)
                )
        return self._ideals[key]

    # One setting

    def _explore_setting(self, setting: Setting) -> None:
        _, stages, micros, mesh = setting
        ground = self._mesh_context(mesh, micros)
        settled = self.settled.get(mesh)
        if settled is not None:
            ground.active = settled
        free = StageCosts(ground, micros, stages, None)
        part, bubble = micros / (micros + stages - 1), self._bubble(stages, micros)
        if setting.key not in self.once:
            least = [both for both, _ in self._ideal_seconds(stages, micros)]
            self._raise_bound(
                setting,
                free.at_least(least, (self.least * LIMITS.setting_margin - bubble) / part) * part
                + bubble,
            )
            if self.bounds[setting.key] >= self.least * LIMITS.setting_margin:
                return
        for sides in (False, True):
            if self.bounds[setting.key] < self.least * LIMITS.setting_margin:
                evenly = free.evenly(sides=sides)
                self._raise_bound(
                    setting,
                    evenly
                    if all(name in COUNTS_FILLING for _, name in self._lanes(stages))
                    else evenly * part + bubble,
                )
        if setting.key in self.once:
            self.once[setting.key] = max(
                setting.bound,
                free.evenly(0.5 * min(1.0, self.cluster.bucket_factor) / FELLOWS, True),
            )
        if self.bounds[setting.key] >= self.least * LIMITS.setting_margin:
            return
        free.settle()
        self.settled[mesh] = ground.active
        scores = free.first.of(runs(free.kinds, [False] * len(free.kinds))).score.min((1, 2))
        evenly, hub = float(scores.min()) / stages, int(scores.argmin())
        # The first schedule has the whole bubble. Others that could save some are tried later.
        lanes, schedule = next(self._lanes(stages))
        if (
            evenly if schedule in COUNTS_FILLING else self.bounds[setting.key]
        ) < self.least * LIMITS.setting_margin:
            self._divide(ground, setting, schedule, lanes, hub)
        if stages > 1 and self.bounds[setting.key] < self.least:
            self._later.append((evenly, setting, ground, hub))
            hopes = {
                id(e): min(
                    [
                        self._optimistic_seconds(e[0], e[1], name)
                        for _, name in self._lanes(e[1].stages)
                    ]
                )
                for e in self._later
            }
            self._later = sorted(self._later, key=lambda entry: (hopes[id(entry)], entry[1][:3]))[
                : LIMITS.rescheduled_settings
            ]

    def _mesh_context(self, mesh: Placement, micros: int) -> MeshContext:
        prices = self.prices.setdefault(
            mesh, ReshardCosts(self.cluster, mesh, bucket_of(self.batches.whole))
        )
        return MeshContext(
            self.batches,
            self.batches.batch // micros,
            self.cluster,
            mesh,
            self.options,
            self.chain,
            prices,
        )

    def _optimistic_seconds(self, evenly: float, setting: Setting, schedule: str) -> float:
        """Return the best time that a schedule can reach for stages that take ``evenly`` by 1f1b.

        It is that time without the part of the bubble that the schedule saves.
        """
        _, stages, micros, _ = setting
        bubble = evenly * (stages - 1) / (micros + stages - 1)
        return evenly - (1 - bubble_left(schedule, stages, micros)) * bubble

    def _raise_bound(self, setting: Setting, bound: float) -> None:
        self.bounds[setting.key] = max(self.bounds[setting.key], bound)

    def _lanes(self, stages: int) -> Iterator[tuple[tuple[int, ...], str]]:
        segments, wanted = len(self.chain.segments), self.space.schedules
        if stages == 1 or not self.batches.whole.training:
            yield tuple(range(stages)), "1f1b"
            return
        # those with one chunk a lane first
        for name in sorted(wanted, key=lambda name: len(usual_lanes(name, stages))):
            lanes = usual_lanes(name, stages)
            if name in PRICED and len(lanes) <= max(segments, stages):
                yield lanes, name

    def _divide(
        self, ground: MeshContext, setting: Setting, schedule: str, lanes: tuple[int, ...], hub: int
    ) -> None:
        """Add the best plan of a setting with this schedule to the candidates."""
        dual = self._dual(ground, setting, schedule, lanes)
        while (
            dual.value < self.least * LIMITS.setting_margin
            and len(dual.known) <= LIMITS.prices_before_division
            and dual.look()
        ):
            pass
        if dual.value >= self.least * LIMITS.setting_margin:
            return
        stages, micros, chunks = setting.stages, setting.micros, len(lanes)
        each = chunks // stages
        held = self._flights(stages, micros, schedule, lanes)
        flights = tuple(held[lane] for lane in lanes)
        limit = self.options.memory / each if self.options.memory else None
        cutting = StageCosts(
            ground,
            micros,
            stages,
            limit,
            LIMITS.memory_prices if limit else (0.0,),
            self.space.recompute,
            hub,
        )
        if limit and chunks > 1 and least_memory(cutting, chunks, flights) > limit:
            return
        loads = [
            float(cutting.first.of(((kind, False, 1),)).score[hub].min()) for kind in cutting.kinds
        ]
        crossing = Crossing(ground, self.cluster, setting, hub)
        faces = None if chunks == 1 else narrowed(cutting, hub)
        division = divide_into_stages(
            len(cutting.kinds), chunks, micros, lambda i, a, b: cutting.of(a, b, flights[i]),
            lambda i, b: crossing.seconds(b),
            loads, self.space.slack, faces,
        )  # fmt: skip
        if division is None:
            return
        spans, ends = (
            zip(division.cuts, division.cuts[1:], strict=False),
            list(zip(division.faces, division.faces[1:], strict=False)),
        )
        offers = [cutting.of(a, b, flights[i]) for i, (a, b) in enumerate(spans)]
        ways = tuple(o.ways[int(o.way[e])] for o, e in zip(offers, ends, strict=True))
        parts = [parts_of(cutting, division, ways, i) for i in range(chunks)]
        forwards = [float(p[Quantity.FORWARD]) for p in parts]
        moved = [
            float(crossing.seconds(c)[f])
            for c, f in zip(division.cuts[1:-1], division.faces[1:-1], strict=True)
        ]
        times, steps = (
            [float(o.time[e]) for o, e in zip(offers, ends, strict=True)],
            [float(o.step[e]) for o, e in zip(offers, ends, strict=True)],
        )
        cost = modelled(schedule, lanes, micros, times, steps, moved, forwards)
        self.candidates.append(Candidate(cost, setting, schedule, lanes, division, ways, cutting))
        self.candidates.sort(key=lambda c: (c.cost, c.setting.stages, c.setting.micros, c.schedule))
        del self.candidates[3 * LIMITS.simulated_plans :]

    def _flights(
        self, stages: int, micros: int, schedule: str, lanes: tuple[int, ...]
    ) -> tuple[float, ...]:
        """Return the maximum number of micro-batches in flight in each lane.

        A micro-batch counts as one if the lane holds it for all of its layers.
        """
        most = (
            max_activations(schedule, lanes, micros)
            if stages > 1 and self.batches.whole.training
            else (1,) * stages
        )
        return tuple(n * stages / len(lanes) for n in most)

    def _dual(
        self, ground: MeshContext, setting: Setting, schedule: str, lanes: tuple[int, ...]
    ) -> Dual:
        """Return the lower bound of a setting with this schedule, within the memory limit."""
        _, stages, micros, _ = setting
        key = *setting.key, schedule
        if key not in self.duals:
            part, bubble = (
                (1.0, 0.0)
                if schedule in COUNTS_FILLING
                else (
                    micros / (micros + stages - 1),
                    self._bubble(stages, micros, [(lanes, schedule)]),
                )
            )
            cutting = StageCosts(
                ground, micros, stages, self.options.memory or None, recompute=self.space.recompute
            )
            self.duals[key] = Dual(
                cutting, part, bubble, self._flights(stages, micros, schedule, lanes)
            )
        return self.duals[key]

    def _reschedule(self, until: float) -> None:
        """Try other schedules for the pipelines that would be best without their bubble."""
        for evenly, setting, ground, hub in self._later:
            for lanes, schedule in list(self._lanes(setting.stages))[1:]:
                if (
                    max(
                        self.bounds[setting.key],
                        self._optimistic_seconds(evenly, setting, schedule),
                    )
                    < self.least
                    and time.perf_counter() < until
                ):
                    self._divide(ground, setting, schedule, lanes, hub)

    def _tighten(self, until: float) -> None:
        """Raise the lowest bounds by a price on memory, where there is a limit."""
        if not self.options.memory:
            return
        for _ in range(LIMITS.prices_for_bound):
            key = min(self.bounds, key=lambda k: (self.bounds[k], k[:2]))
            if self.bounds[key] >= self.candidates[0].cost or time.perf_counter() > until:
                return
            setting, ground = Setting(self.bounds[key], *key), self._mesh_context(key[2], key[1])
            duals = [
                self._dual(ground, setting, schedule, lanes)
                for lanes, schedule in self._lanes(key[0])
            ]
            lowest = min(duals, key=lambda dual: dual.value)
            if lowest.value <= self.bounds[key] and not lowest.look():
                return
            self._raise_bound(setting, min(dual.value for dual in duals))

    # The result

    def best(self) -> tuple[Candidate, StepSimulation]:
        """Simulate the best few candidates and return the fastest with its simulation."""
        tried: list[tuple[float, float, int, Candidate, StepSimulation]] = []
        for candidate in self.candidates:
            run = step(
                stages_of(candidate, self.cluster),
                candidate.schedule,
                candidate.lanes,
                candidate.setting.micros,
                self.cluster,
            )
            if not self.options.memory or max(run.memory) <= self.options.memory:
                tried.append((run.seconds, candidate.cost, len(tried), candidate, run))
            if len(tried) == LIMITS.simulated_plans:
                break
        if not tried:
            raise PlanError(self._no_plan_message())
        _, _, _, candidate, run = min(tried, key=lambda t: t[:3])
        self.log["simulated"] = len(tried)
        return candidate, run

    def _no_plan_message(self) -> str:
        limit, calls = self.options.memory, self.batches.whole
        if not limit:
            return (
                f"these calls have no plan on {self.devices} devices in {self.space}: some call "
                "cannot take the layouts of its operands"
            )
        least, where = math.inf, ""
        for stages in self.space.stages or divisors(self.devices):
            if stages > len(self.chain.segments) or self.devices % stages:
                continue
            if stages > 1 and self.statistics and not self.space.micro_batches:
                continue
            micros = max(self._micros(stages), default=1)
            for mesh in meshes(self.devices // stages, self.cluster, 1):
                cutting = StageCosts(
                    self._mesh_context(mesh, micros),
                    micros,
                    stages,
                    float(limit),
                    LIMITS.memory_prices,
                    self.space.recompute,
                )
                cutting.settle()
                cutting.settle(-1)
                needed_bytes = least_memory(
                    cutting, stages, [float(min(micros, stages - i)) for i in range(stages)]
                )
                if needed_bytes < least:
                    least, where = (
                        needed_bytes,
                        (
                            f"{stages} stage{'s' * (stages > 1)} of {mesh.size} devices, {micros} "
                            f"micro-batches"
                        ),
                    )
        parameter_bytes = sum(v.nbytes for v in calls.parameters)
        state_bytes = int(parameter_bytes * (2 + self.options.optimizer_state_ratio))
        return (
            f"no plan fits into memory={limit} bytes ({show_bytes(limit)}) a device on "
            f"{self.devices} devices with a "
            f"batch of {self.batches.batch}: the minimum that was found is "
            f"{math.ceil(least)} bytes ({show_bytes(math.ceil(least))}) a device, with "
            f"{where}{' and everything recomputed' if self.space.recompute else ''}; "
            f"parameters, gradients and optimizer state are "
            f"{show_bytes(state_bytes)} in all. "
            f"Give more devices or memory, a smaller "
            f"batch, an optimizer with less "
            f"state{'' if self.space.recompute else ', or allow recomputation'}"
        )
