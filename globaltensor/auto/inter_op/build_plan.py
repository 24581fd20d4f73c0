"""Convert a candidate of the search to a plan.

`inter_op.search` calls it for the best candidate. The plan has the layouts of each call and each
tensor, their stage, and all other choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...boxing.moves import Layout
from ..cost.reshard_cost import duals
from ..intra_op.layout_changes import collectives, short
from ..ir.op_graph import Value
from ..ir.segments import Segment
from ..plan.plan import LayoutChange, PlacedTensor, Plan, PlannedCall
from .pipeline_cost import Candidate, stages_of
from .segment_cost import MeshContext, ParameterStorage, Quantity, SegmentProblem
from .step_simulator import StepSimulation

__all__ = ["build_plan"]


class _SegmentPlan(NamedTuple):
    """The calls, changes of layout and stored tensors of one segment."""

    calls: list[PlannedCall]
    changes: list[LayoutChange]
    storage_of: dict[int, Any]  # number of a parameter, buffer or input -> the way it is stored


def build_plan(
    candidate: Candidate, run: StepSimulation, bound: float, batch: int, log: dict[str, Any]
) -> Plan:
    """Build the plan of a candidate.

    Seconds of calls and changes of layout are those of one micro-batch. Cost and seconds of the
    plan are those of the whole step.
    """
    cutting, division, setting = candidate.cutting, candidate.division, candidate.setting
    ground, chain = cutting.ground, cutting.ground.chain
    calls, changes, storage_of = list[PlannedCall](), list[LayoutChange](), dict[int, Any]()
    stages, recomputed = [], []
    records = stages_of(candidate, ground.cluster)
    for i, way in enumerate(candidate.ways):
        a, b = division.cuts[i], division.cuts[i + 1]
        again = [k < way.recomputed for k in range(b - a)]
        faces = cutting.ranges(way.weights).faces(
            cutting.kinds[a:b], again, cutting.hub, division.faces[i], division.faces[i + 1]
        )
        own = list[PlannedCall]()
        for k, segment in enumerate(chain.segments[a:b]):
            piece = _segment(
                ground,
                segment,
                cutting.hub,
                cutting.weights(way.weights),
                again[k],
                (faces[k], faces[k + 1]),
            )
            own += [dataclasses.replace(c, again=again[k]) for c in piece.calls]
            changes += piece.changes
            storage_of |= piece.storage_of
            if again[k]:
                recomputed.append(segment.name)
        calls += own
        first = candidate.lanes[i] * setting.mesh.size
        stages.append(
            {
                "lane": candidate.lanes[i], "ranks": [first, first + setting.mesh.size],
                "mesh": list(setting.mesh.shape),
                "calls": [own[0].name, own[-1].name] if own else [],
                "modules": list(dict.fromkeys(c.module for c in own)),
                "segments": [s.name for s in chain.segments[a:b]],
                "recompute": [s.name for s, r in zip(chain.segments[a:b], again, strict=True) if r],
                "memory": run.memory[candidate.lanes[i]], "costs": dataclasses.asdict(records[i]),
            }
        )  # fmt: skip
    values = ground.calls.values
    states = {
        h: options[ground.active[h][_hub_option(ground, cutting.hub, h)]]
        for h, options in ground.hubs.items()
    }
    storage_of |= {h: how for h, how in states.items() if values[h].state}
    shared = {
        values[v].path: how
        for v, how in sorted(storage_of.items())
        if isinstance(how, ParameterStorage) and how.zero
    }
    zero = {
        path: {"stage": how.zero, "shares": list(short(how.shares))} for path, how in shared.items()
    }
    choices = {
        "mesh": list(setting.mesh.shape), "stages": stages, "micro_batches": setting.micros,
        "schedule": candidate.schedule if setting.stages > 1 else None,
        "recompute": recomputed, "zero": zero, "batch": batch,
    }  # fmt: skip
    placed = tuple(_placed_tensor(ground, values[v], how) for v, how in sorted(storage_of.items()))
    parameters = {g.name for g in placed if g.kind == "parameter"}
    if ground.calls.training and any(
        c.value in parameters and c.src != c.dst and "all_gather" in c.forward_collectives
        for c in changes
    ):
        choices["reshard_after_forward"] = True
    return Plan(
        cluster=ground.cluster.name, mesh=tuple(setting.mesh.shape), cost=candidate.cost,
        bound=bound, seconds=run.seconds, memory=max(run.memory),
        limit=ground.options.memory, timeline=run.trace(), source=ground.cluster.origin,
        training=ground.calls.training, placed=placed, calls=tuple(calls), changes=tuple(changes),
        choices=choices, search=log,
        cost_breakdown=_cost_breakdown(records, setting.micros, ground.seen),
        memory_breakdown=_memory_breakdown(placed, ground, storage_of, max(run.memory)),
    )  # fmt: skip


def _hub_option(ground: MeshContext, hub: int, number: int) -> int:
    """Return the option of the hub ``number`` in the joint state ``hub`` of all hubs."""
    shape = tuple(len(those) for those in ground.active.values())
    return int(np.unravel_index(hub, shape)[list(ground.hubs).index(number)])


def _segment(
    ground: MeshContext,
    segment: Segment,
    hub: int,
    weights: Any,
    again: bool,
    ends: tuple[int, int],
) -> _SegmentPlan:
    part = ground.part(segment.kind)
    states = [_hub_option(ground, hub, h) for h in ground.hubs if h in segment.hubs]
    chosen = part.strategies(weights, again, (*states, *ends))
    actual = _value_counterparts(ground, part.segment, segment)
    reader = _SegmentReader(ground, part, chosen, actual)
    storage_of = {
        actual[v]: part.options[part.node_of["value", v]][chosen["value", v]]
        for v in part.segment.own_states
    }
    return _SegmentPlan(list(reader.calls()), list(reader.changes()), storage_of)


def _value_counterparts(ground: MeshContext, one: Segment, other: Segment) -> dict[int, int]:
    """Map each value of the first segment of a kind to the same value of another segment."""
    counterpart: dict[int, int] = {}
    for c, d in zip(one.calls, other.calls, strict=True):
        a, b = ground.calls.calls[c], ground.calls.calls[d]
        counterpart.update(zip((*a.operands, *a.outs), (*b.operands, *b.outs), strict=True))
        counterpart[-1 - c] = d
    return counterpart


class _SegmentReader:
    """A reader of the calls and changes of layout of a segment.

    It reads the choices that were made for the first segment of the same kind.
    """

    def __init__(
        self,
        ground: MeshContext,
        part: SegmentProblem,
        chosen: dict[tuple[str, int], int],
        actual: dict[int, int],
    ) -> None:
        self.ground, self.part, self.chosen, self.actual = ground, part, chosen, actual
        self.values = ground.calls.values

    def name(self, v: int) -> str:
        value = self.values[self.actual[v]]
        return value.label

    def calls(self) -> Iterator[PlannedCall]:
        for c in self.part.segment.calls:
            call, like, strategies = (
                self.ground.calls.calls[self.actual[-1 - c]],
                self.ground.calls.calls[c],
                self.part.candidates[c],
            )
            k = self.chosen["call", c]
            yield PlannedCall(
                call.name, getattr(call.func, "__name__", str(call.func)), call.module, call.where,
                tuple(self.name(v) for v in like.operands),
                tuple(short(x[k]) for x in strategies.ins),
                tuple(short(x[k]) for x in strategies.outs),
                tuple(self.values[v].shape for v in like.outs), float(strategies.forward[k]),
                float(strategies.backward[k]), float(strategies.moving[k]),
                float(strategies.share[k]),
                bytes=int(sum(self.ground.bytes(self.values[v], [x[k]])[0] for v,
                    x in zip(like.outs, strategies.outs, strict=True))),
                number=call.number,
            )  # fmt: skip

    def changes(self) -> Iterator[LayoutChange]:
        segment = self.part.segment
        for c in segment.calls:
            for v in self.ground.calls.calls[c].outs:
                made = self._result_layout(c, v)
                if v == segment.gives:
                    yield from self._change(v, "", made, self._option("gives", v))
                elif v in segment.hubs:
                    yield from self._change(v, "", made, self._option("value", v))
        for v, takers in self.part.takers.items():
            src, second = self._source(v)
            if src is None:
                continue
            wanted: dict[Layout, list[int]] = {}
            for t in takers:
                call = self.ground.calls.calls[t]
                wanted.setdefault(
                    self.part.candidates[t].ins[call.operands.index(v)][self.chosen["call", t]], []
                ).append(t)
            for dst, those in wanted.items():
                for group in [those] if dst == second else [[t] for t in those]:
                    names = " ".join(
                        self.ground.calls.calls[self.actual[-1 - t]].name for t in group
                    )
                    yield from self._change(v, names, src, dst)

    def _result_layout(self, c: int, v: int) -> Layout:
        call = self.ground.calls.calls[c]
        return self.part.candidates[c].outs[call.outs.index(v)][self.chosen["call", c]]

    def _option(self, what: str, v: int) -> Any:
        return self.part.options[self.part.node_of[what, v]][self.chosen[what, v]]

    def _source(self, v: int) -> tuple[Any, Layout | None]:
        """Return the layout of a value where calls take it, and its second saved layout."""
        value, segment = self.values[v], self.part.segment
        if ("value", v) in self.part.node_of:
            option = self._option("value", v)
            pair = not value.state and v not in segment.hubs
            return (option[0], option[1]) if pair else (option, None)
        if v == segment.takes:
            return self._option("face", v), None
        if v == segment.gives:
            return self._option("gives", v), None
        if value.plain:
            return self.ground.whole, None
        return (
            (self._result_layout(value.maker, v), None)
            if value.maker in self.part.candidates
            else (None, None)
        )

    def _change(self, v: int, takers: str, src: Any, dst: Layout) -> Iterator[LayoutChange]:
        ground, value = self.ground, self.values[v]
        if isinstance(src, ParameterStorage):
            forward = float(
                ground.prices.fetched(value.shape, value.dtype, [src.layout], [dst])[0, 0]
            )
            backward = (
                float(ground.prices.gradients(value.shape, value.dtype, [dst], [src.shares])[0, 0])
                if ground.calls.training and value.grad
                else 0.0
            )
            if src.layout != dst or backward:
                backward_collectives = (
                    collectives(duals(dst), src.shares)
                    if ground.calls.training and value.grad
                    else ""
                )
                forward_collectives = collectives(src.layout, dst) or backward_collectives
                yield LayoutChange(
                    self.name(v),
                    takers,
                    short(src.layout),
                    short(dst),
                    forward,
                    backward,
                    value.nbytes,
                    forward_collectives,
                    backward_collectives if backward else "",
                )
        elif src != dst:
            forward, backward = (float(x[0, 0]) for x in ground.change(value, [src], [dst]))
            names = collectives(src, dst), collectives(duals(dst), duals(src)) if backward else ""
            yield LayoutChange(
                self.name(v),
                takers,
                short(src),
                short(dst),
                forward,
                backward,
                value.nbytes,
                *names,
            )


def _placed_tensor(ground: MeshContext, value: Value, how: Any) -> PlacedTensor:
    layout = how.layout if isinstance(how, ParameterStorage) else how
    held = int(ground.bytes(value, [layout])[0])
    return PlacedTensor(
        value.label,
        value.state,
        value.shape,
        str(value.dtype).removeprefix("torch."),
        short(layout),
        held,
    )


def _cost_breakdown(records: Sequence[Any], micros: int, seen: float) -> dict[str, float]:
    """Split the cost into its terms, each summed over stages."""
    passes = sum(micros * (s.forward + s.backward) for s in records)
    aside = sum(micros * s.gathers + s.sums for s in records)
    return {
        "computing and moving": passes,
        "parameters and gradients": aside,
        "hidden": (1 - seen) * aside,
        "updating": sum(s.updates for s in records),
    }


def _memory_breakdown(
    placed: Sequence[PlacedTensor], ground: MeshContext, storage_of: dict[int, Any], peak: int
) -> dict[str, int]:
    """Split the peak memory of the fullest rank into its terms, in bytes.

    The split is right where all stages have the same layouts.
    """
    parameters = sum(g.bytes for g in placed if g.kind == "parameter")
    states = sum(
        float(ground.keeping(ground.calls.values[v], [how])[Quantity.PARAMETERS][0])
        for v, how in storage_of.items()
        if ground.calls.values[v].state == "parameter"
    )
    return {
        "parameters": parameters,
        "gradients and optimizer": round(states - parameters),
        "peak": peak,
    }
