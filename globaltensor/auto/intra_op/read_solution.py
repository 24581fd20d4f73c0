"""The plan that a solution of the search represents.

It has the strategies of calls, the layouts of given tensors, the changes of layout, and the costs
of alternatives. `search.py`, `calibrate/steps.py` and `inter_op/predict.py` call `read_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...boxing.moves import Layout
from ..cost.rule_failures import lost_by
from ..ir.op_graph import Value
from ..plan.plan import LayoutChange, PlacedTensor, Plan, PlannedCall
from ..solver import Solution
from .alternatives import Responses
from .formulate import Formulation, hidden
from .layout_changes import Changes, short
from .peak_memory import memory_breakdown

__all__ = ["read_plan"]


def read_plan(formulation: Formulation, solution: Solution) -> Plan:
    """Return the plan that a solution's choice of strategies represents."""
    f, choice, calls = formulation, solution.choice, formulation.calls
    problem, listed, total = f.problem, Changes(f), float(solution.cost)
    changes = [change for value in calls.values for change in listed.of(value, choice)]
    sides = _overlap_seconds(f, choice, changes)
    responses = Responses(
        f,
        choice,
        listed,
        total,
        hidden(f.prices.cluster, f.options) * abs(sides.aside - sides.behind),
    )
    placed = [
        _placed_tensor(f, v, choice, responses)
        for v in calls.states()
        if v.number in f.node_of_value
    ]
    planned = []
    for call in calls.calls:
        if call.number not in f.candidates:
            continue
        k, strategies = choice[f.node_of_call[call.number]], f.candidates[call.number]
        planned.append(
            PlannedCall(
                call.name, getattr(call.func, "__name__", str(call.func)), call.module, call.where,
                tuple(calls.values[v].label for v in call.operands),
                tuple(short(strategies.ins[i][k]) for i in range(len(call.operands))),
                tuple(short(strategies.outs[i][k]) for i in range(len(call.outs))),
                tuple(calls.values[v].shape for v in call.outs),
                float(strategies.forward[k]), float(strategies.backward[k]),
                float(strategies.moving[k]), float(strategies.share[k]),
                responses.of_call(call.number),
                sum(_local_bytes(f, calls.values[v], strategies.outs[i][k])
                    for i, v in enumerate(call.outs)),
                call.number,
            )
        )  # fmt: skip
    memory = [(0 if t is None else t, int(level)) for t, level in problem.usage(choice)]
    peak = max((m for _, m in memory), default=0)
    return Plan(
        f.prices.cluster.name, tuple(f.mesh.shape), total, min(total, float(solution.bound)), total,
        peak, f.options.memory,
        calls.training, tuple(placed), tuple(planned), tuple(changes), over_time=tuple(memory),
        choices={"reshard_after_forward": True}
        if any(_is_gathered_in_backward(f, v, choice) for v in calls.parameters)
        else {},
        cost_breakdown=_cost_breakdown(f, choice, total, planned, changes, sides),
        memory_breakdown=memory_breakdown(f, choice, placed, peak),
        moments=(1 + calls.training) * len(calls.calls),
        lost=lost_by(strategies.losses for strategies in f.candidates.values()),
        source=f.prices.cluster.origin,
    )  # fmt: skip


class _OverlapSeconds(NamedTuple):
    """The seconds of two activities that overlap.

    `aside` is the traffic of parameters' gradients, and `behind` is the backward pass.
    """

    aside: float
    behind: float


def _overlap_seconds(
    f: Formulation, choice: Sequence[int], changes: Sequence[LayoutChange]
) -> _OverlapSeconds:
    parameters = {v.label for v in f.calls.parameters}
    aside = sum(c.backward for c in changes if c.value in parameters)
    back = sum(c.backward for c in changes) - aside
    for call, found in f.candidates.items():
        k = choice[f.node_of_call[call]]
        if found.backward[k]:
            back += float(f.options.computation * found.backward[k] + found.moving[k] / 2)
    return _OverlapSeconds(aside, back)


def _cost_breakdown(
    f: Formulation,
    choice: Sequence[int],
    total: float,
    planned: Sequence[PlannedCall],
    changes: Sequence[LayoutChange],
    sides: _OverlapSeconds,
) -> dict[str, float]:
    """Return the components of the cost, in seconds.

    They are computing, communication ("moving"), the hidden part of it, which is subtracted, and
    the optimizer's step.
    """
    spent = {
        "computing": f.options.computation * sum(c.forward + c.backward for c in planned),
        "moving": sum(c.forward + c.backward for c in changes) + sum(c.moving for c in planned),
        "hidden": hidden(f.prices.cluster, f.options) * min(sides),
        "updating": f.optimizing(choice),
    }
    if f.options.wait:
        spent["waiting"] = (
            total - spent["computing"] - spent["moving"] + spent["hidden"] - spent["updating"]
        )
    return spent


def _is_gathered_in_backward(f: Formulation, value: Value, choice: Sequence[int]) -> bool:
    """Return True if backward gathers a parameter again."""
    node = f.node_of_value.get(value.number)
    made, copy = (None, None) if node is None else f.layouts[node][choice[node]]
    return made is not None and copy is not None and f.twice(value, made, copy)


def _local_bytes(f: Formulation, value: Value, layout: Layout) -> int:
    """Return the bytes that one rank holds of a value."""
    return value.dtype.itemsize * f.prices.local(value.shape, layout)


def _placed_tensor(
    f: Formulation, value: Value, choice: Sequence[int], responses: Responses
) -> PlacedTensor:
    layout = f.made(value, choice)
    others, held = responses.of_value(value), _local_bytes(f, value, layout)
    return PlacedTensor(
        value.label,
        value.state,
        value.shape,
        str(value.dtype).removeprefix("torch."),
        short(layout),
        held,
        others,
    )
