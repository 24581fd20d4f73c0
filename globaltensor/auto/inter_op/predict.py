"""Predict a plan's step time on any cluster, up to thousands of devices.

`flow.auto.plan` simulates its plans here. One rank of each distinct stage is simulated. On a
cluster other than the plan's own, every call and every change of layout is priced again. The
layouts, stages and schedule remain the plan's. The docstring of `step_simulator` says what is
modelled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ...boxing.moves import Layout, gathers
from ...cluster import Cluster
from ...errors import PlanError
from ...graph.sharding_plan import entry
from ..cost.meshes import mesh
from ..cost.reshard_cost import ReshardCosts, duals
from ..cost.strategies import StrategyBuilder
from ..intra_op.formulate import bucket_of, gathered_of, updating
from ..intra_op.read_solution import short
from ..intra_op.search_options import Options
from ..ir.op_graph import Calls, Value
from ..plan.plan import LayoutChange, Plan, PlannedCall
from .step_simulator import StageTimes, StepSimulation, step

__all__ = ["predict", "repriced", "simulate_plan"]


def predict(
    plan: Plan,
    cluster: Cluster | None = None,
    calls: Calls | None = None,
    options: Options | None = None,
) -> StepSimulation:
    """Simulate a step of ``plan``.

    ``cluster`` is another cluster than the one that the plan was made for. It needs ``calls``: the
    calls of one micro-batch that the plan was made of.

    Without ``cluster``, calls and changes of layout cost what the plan says. Only the name of the
    plan's own cluster is known. So transfers between stages use links of the generic cluster, with
    its ``overlap``.

    Raises PlanError where plan and calls do not belong together, or the cluster is too small.
    """
    if cluster is None:
        cluster = Cluster(name=plan.cluster)
    else:
        ranks = max(
            [s["ranks"][1] for s in plan.choices.get("stages", ())] or [math.prod(plan.mesh)]
        )
        if cluster.size and cluster.size < ranks:
            raise PlanError(
                f"the plan is for {ranks} devices, {cluster.name} has {cluster.size}: "
                f"cluster.with_size({ranks}) imagines as many"
            )
        if calls is None:
            raise PlanError(
                "pricing a plan for another cluster needs the calls that the plan was made from: "
                "predict(plan, cluster, calls)"
            )
        plan = repriced(plan, cluster, calls, options or Options())
    return simulate_plan(plan, cluster)


def simulate_plan(plan: Plan, cluster: Cluster) -> StepSimulation:
    """Simulate a step of a plan whose calls and changes are priced for this cluster."""
    lanes = [s["lane"] for s in plan.choices.get("stages", ())] or [0]
    return step(
        _stages(plan),
        plan.choices.get("schedule") or "1f1b",
        lanes,
        plan.choices.get("micro_batches", 1),
        cluster,
    )


def _priced_by_stages(plan: Plan) -> bool:
    """Return True if the plan has costs of its stages.

    Plans of the complete search have them; the solver's plans on one mesh do not.
    """
    told = plan.choices.get("stages") or ()
    return bool(told) and all("costs" in s for s in told)


def _stages(plan: Plan) -> list[StageTimes]:
    """Convert the stages of a plan to stages for the simulator."""
    if _priced_by_stages(plan):
        return [StageTimes(**s["costs"]) for s in plan.choices["stages"]]
    forward, backward = _seconds(
        plan.calls, plan.changes, {g.name for g in plan.placed if g.kind == "parameter"}
    )
    gathers, sums = _overlappable_seconds(
        plan.changes, {g.name for g in plan.placed if g.kind == "parameter"}
    )
    return [
        StageTimes(
            forward + gathers,
            backward,
            0.0,
            0.0,
            sums,
            plan.cost_breakdown.get("updating", 0.0),
            float(plan.memory),
            ranks=math.prod(plan.mesh),
        )
    ]


def _seconds(
    calls: Sequence[PlannedCall], changes: Sequence[LayoutChange], leaves: set[str]
) -> tuple[float, float]:
    """Return seconds of the forward and the backward pass, with their communication."""
    forward = sum(c.forward + (c.moving / 2 if c.backward else c.moving) for c in calls) + sum(
        c.forward for c in changes if c.value not in leaves
    )
    backward = sum(c.backward + (c.moving / 2 if c.backward else 0.0) for c in calls) + sum(
        c.backward for c in changes if c.value not in leaves
    )
    return forward, backward


def _overlappable_seconds(changes: Sequence[LayoutChange], leaves: set[str]) -> tuple[float, float]:
    """Return seconds of (gathering parameters, summing gradients), which may overlap computing."""
    own = [c for c in changes if c.value in leaves]
    return sum(c.forward for c in own), sum(c.backward for c in own)


def repriced(plan: Plan, cluster: Cluster, calls: Calls, options: Options) -> Plan:
    """Return the same plan with the seconds of another cluster.

    Raises PlanError for calls that are not the plan's.
    """
    where = mesh(tuple(plan.mesh))
    staged, zero = _priced_by_stages(plan), plan.choices.get("zero", {})
    prices = ReshardCosts(cluster, where, bucket_of(calls), 0 if staged else gathered_of(calls))
    # costs of stages already include the second gathering
    twice = bool(plan.choices.get("reshard_after_forward")) and not staged
    pricer = _Pricer(prices, StrategyBuilder(prices, calls.training), calls, zero, twice)
    changed = tuple(map(pricer.call, plan.calls))
    changes = tuple(map(pricer.change, plan.changes))
    values = {v.label: v for v in calls.values}
    trained = [g for g in plan.placed if g.kind == "parameter" and plan.training]
    update = {
        g.name: _update_seconds(
            g.bytes, values[g.name], zero.get(g.name), prices, options, g.layout
        )
        for g in trained
    }
    choices = dict(plan.choices)
    if staged:
        choices["stages"] = [
            _reprice_stage(s, plan, (changed, changes), update) for s in choices["stages"]
        ]
    spent = {**plan.cost_breakdown, "updating": sum(update.values())}
    return dataclasses.replace(
        plan,
        cluster=cluster.name,
        calls=changed,
        changes=changes,
        cost_breakdown=spent,
        choices=choices,
    )


def _update_seconds(
    nbytes: int,
    value: Value,
    zero: dict[str, Any] | None,
    prices: ReshardCosts,
    options: Options,
    layout: tuple[str, ...],
) -> float:
    if zero is None:
        return updating(prices.cluster, nbytes, options, value.dtype)
    own, there = _entries(zero["shares"]), _entries(layout)
    numbers, seconds = prices.table(value.shape, value.dtype, [own, there])
    share = value.dtype.itemsize * prices.local(value.shape, own)
    return updating(prices.cluster, share, options, value.dtype) + float(
        seconds[numbers[own], numbers[there]]
    )


def _reprice_stage(
    stage: dict[str, Any],
    plan: Plan,
    priced: tuple[Sequence[PlannedCall], Sequence[LayoutChange]],
    update: dict[str, float],
) -> dict[str, Any]:
    """Return a stage with the costs of another cluster.

    Each cost is scaled as the stage's calls and changes of layout are.
    """
    names = [c.name for c in plan.calls]
    first, last = (names.index(n) for n in stage["calls"])
    own = set(names[first : last + 1])
    leaves = {g.name for g in plan.placed if g.kind == "parameter"}
    sums = []
    for calls, changes in ((plan.calls, plan.changes), priced):
        own_calls = [c for c in calls if c.name in own]
        made = {v for c in own_calls for v in c.operands}
        own_changes = [
            c for c in changes if (set(c.taker.split()) & own if c.taker else c.value in made)
        ]
        sums.append(
            (*_seconds(own_calls, own_changes, leaves), *_overlappable_seconds(own_changes, leaves))
        )
    before, after = sums
    costs = dict(stage["costs"])
    ratio = [new / old if old else 1.0 for new, old in zip(after, before, strict=True)]
    again = costs["again"] * ratio[0]
    costs |= {
        "forward": costs["forward"] * ratio[0],
        "backward": (costs["backward"] - costs["again"]) * ratio[1] + again, "again": again,
        "gathers": costs["gathers"] * ratio[2], "sums": costs["sums"] * ratio[3],
    }  # fmt: skip
    held = {v for c in plan.calls if c.name in own for v in c.operands}
    costs["updates"] = sum(seconds for path, seconds in update.items() if path in held)
    return {**stage, "costs": costs}


class _Pricer:
    def __init__(
        self,
        prices: ReshardCosts,
        menu: StrategyBuilder,
        calls: Calls,
        zero: dict[str, Any],
        twice: bool,
    ) -> None:
        self.prices, self.menu, self.calls, self.zero, self.twice = prices, menu, calls, zero, twice
        self.values = {v.label: v for v in calls.values}
        self.named = {c.name: c for c in calls.calls}

    def call(self, planned: PlannedCall) -> PlannedCall:
        call = self.named.get(planned.name)
        if (
            call is None
            or getattr(call.func, "__name__", str(call.func)) != planned.function
            or tuple(self.calls.values[v].shape for v in call.outs) != planned.shapes
        ):
            raise PlanError(
                f"{planned.name}: the plan's call to {planned.function} returning {planned.shapes} "
                "is not among these calls: another model, or another batch"
            )
        strategies = self.menu.of(call, self.calls.values)
        for k in range(len(strategies)):
            if (
                tuple(short(x[k]) for x in strategies.ins) == planned.wanted
                and tuple(short(x[k]) for x in strategies.outs) == planned.results
            ):
                return dataclasses.replace(
                    planned,
                    forward=float(strategies.forward[k]),
                    backward=float(strategies.backward[k]),
                    moving=float(strategies.moving[k]),
                    share=float(strategies.share[k]),
                )
        raise PlanError(
            f"{planned.name} has no strategy from {planned.wanted} to {planned.results} on a mesh "
            f"of {'x'.join(map(str, self.prices.mesh.shape))}"
        )

    def change(self, planned: LayoutChange) -> LayoutChange:
        value = self.values[planned.value]
        src, dst = _entries(planned.src), _entries(planned.dst)
        numbers, seconds = self.prices.table(value.shape, value.dtype, [src, dst])
        forward, backward = float(seconds[numbers[src], numbers[dst]]), 0.0
        if value.state == "parameter":
            again = self.twice and value.saved and gathers(src, dst)
            forward = float(self.prices.fetched(value.shape, value.dtype, [src], [dst])[0, 0]) * (
                2 if again else 1
            )
        elif planned.taker == "output":
            forward = float(self.prices.settled(value.shape, value.dtype, [src])[0])
        if planned.backward:
            if value.state == "parameter":
                home = _entries(self.zero[value.path]["shares"]) if value.path in self.zero else src
                backward = float(
                    self.prices.gradients(value.shape, value.dtype, [dst], [home])[0, 0]
                )
            else:
                backward = float(seconds[numbers[duals(dst)], numbers[duals(src)]])
        return dataclasses.replace(planned, forward=forward, backward=backward)


def _entries(layout: Sequence[str]) -> Layout:
    return tuple(map(entry, layout))
