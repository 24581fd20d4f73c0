"""Find the plan of a graph, and apply it to parameters and to the graph's next capture.

A graph with config.enable_auto_parallel() calls this module through `GRAPH_PLANNERS`. The eager
search (auto/apply/eager.py) shares its steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.pending_tensor import local_of
from ..._tensor.set_data import replace_local
from ...boxing import box
from ...cluster import Cluster, current_cluster, named_cluster
from ...distributed.world import world
from ...errors import GraphError
from ...graph.capture.dry_world import GRAPH, Left
from ...graph.config import MEMORY, Auto
from ...graph.graph import GRAPH_PLANNERS
from ...graph.printing import lines
from ...graph.rank_agreement import Text, agreed, settings
from ...graph.sharding_plan import PlanFollower, plan_of
from ...graph.sharding_plan import ShardingPlan as GraphPlan
from ...optim.local_step import relay
from ...parallel.expert_modules import dispatch_tokens, experts_in
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp
from ..intra_op.search import SearchResult, search
from ..intra_op.search_options import Options
from ..ir.op_graph import Calls
from ..ir.trace import captured_calls
from ..plan.model_name import named_after
from ..profile import cluster_here

__all__ = [
    "apply_layouts",
    "cluster_at_hand",
    "follow",
    "from_rank0",
    "options_of",
    "plan_for_capture",
    "search_plan",
    "states_of",
]

#: Attribute of a parameter whose layout a search has set; True if the search was for training.
#: Other graphs that hold the parameter accept its layout.
_LAID = "_laid_for_training"
#: Attribute of a graph: the function that chooses its plan in place of the search.
_CHOICE = "_choose_plan"


@GRAPH_PLANNERS.register("auto")
def _search_for(graph: Any, args: Any, kwargs: Any) -> PlanFollower:
    """Find the plan of a graph for these inputs, and box the graph's parameters to its layouts.

    Collective. Raises GraphError if the graph's tensors have no placement, or several."""
    parameters = {
        f"{name}.{path}": t
        for name, module in graph._modules.items()
        for path, t in module.named_parameters()
    }
    for module in graph._modules.values():
        for experts in experts_in(module).values():
            # as `parallelize` does, because layouts do not say which tokens go to which rank
            dispatch_tokens(experts)
    zero = graph._shared[1]
    if zero is not None:
        zero.detach()
        graph.__dict__["_shared"] = (None, None)
    auto: Auto = graph.config.auto

    def captured() -> tuple[tuple[fx.Graph, Calls, Placement], Text]:
        logical, calls = captured_calls(graph, args, kwargs)
        return (logical, calls, _mesh_of(graph.name, parameters, logical)), Text(
            settings(graph, ()), lines(logical)
        )

    try:
        logical, calls, mesh = agreed(graph.name, captured, f"{graph.name} was captured")
        if auto.ignore_user_sbp:
            for call in calls.calls:
                call.fixed = () if call.fixed is not None else None
        free = {path for path, t in parameters.items() if _is_layout_free(t, graph.training)}
        fixed = {v.label: (v.layout,) for v in calls.states() if v.layout and v.path not in free}
        choose, cluster = graph.__dict__.get(_CHOICE, search_plan), cluster_at_hand(mesh)
        search_result: SearchResult = agreed(
            graph.name, lambda: (choose(calls, cluster, mesh, auto, fixed, states_of(graph)), None)
        )
        # in the order of the model: that of a set of names differs by rank
        chosen = {path: p for path, p in parameters.items() if path in free}
        apply_layouts(chosen, search_result, graph.training)
        for entry in graph._optimizers:
            relay(entry.optimizer)
    finally:
        if zero is not None:
            graph._attach()
    return PlanFollower(
        plan_for_capture(logical, search_result),
        strict=False,
        unasked=auto.ignore_user_sbp,
        searched=named_after(search_result.plan, graph),
    )


def follow(
    graph: Any,
    choose: Callable[[Calls, Cluster, Placement, Auto, Mapping[str, Any], float], SearchResult],
) -> None:
    """Make a graph use the plan of ``choose`` from its next capture on, in place of the best plan.

    The graph must have config.enable_auto_parallel(). ``choose`` has the arguments of
    `search_plan`. It must choose the same plan on every rank, and must not change layouts in
    ``fixed`` (path -> layouts)."""
    graph.__dict__[_CHOICE] = choose


def options_of(auto: Auto, cluster: Cluster, fixed: Mapping[str, Any], states: float) -> Options:
    """Return the search's options that correspond to the settings of a graph's config."""
    return Options(
        computation=auto.computation, wait=auto.wait * cluster.launch, collect=auto.collector,
        optimizer_state_ratio=states, fixed=dict(fixed),
        hidden=None if auto.trunk else 0.0,
        memory=(cluster.memory or None) if auto.memory == "AdaptiveMemory" else None,
    )  # fmt: skip


def cluster_at_hand(where: Placement) -> Cluster:
    """Return the cluster to plan for on the ranks of this job.

    It is the cluster of `use_cluster` if there is one. Otherwise it is the measured cluster
    (`cluster_here`, measured now or before), and the generic machine if nothing can be measured.
    Collective among all ranks."""
    return named_cluster() or cluster_here(where.type) or current_cluster()


def search_plan(
    calls: Calls,
    cluster: Cluster,
    mesh: Placement,
    auto: Auto,
    fixed: Mapping[str, Any],
    states: float,
) -> SearchResult:
    """Return the best plan under ``auto``'s memory mode, the same on every rank.

    Collective. A rank on which the search raises must report the error to the others by `agree`."""
    options, saved = options_of(auto, cluster, fixed, states), MEMORY[auto.memory]
    unlimited_result = search(calls, cluster, mesh, options, agreed=from_rank0, compared=not saved)
    if not saved:
        return unlimited_result
    least = from_rank0(unlimited_result.formulation.least_memory())
    if least is None:
        # the minimum was not found in time, so no memory is saved
        least = unlimited_result.plan.memory
    limit = round(unlimited_result.plan.memory - saved * (unlimited_result.plan.memory - least))
    return search(
        calls,
        cluster,
        mesh,
        dataclasses.replace(options, memory=max(limit, least)),
        agreed=from_rank0,
    )


def from_rank0(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank.

    Raises Left if another rank has failed and has reported its error by `agree`."""
    this_world = world()
    if this_world.size == 1:
        return value
    everyone = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        (False, value), GRAPH
    )
    failed = [r for r, (wrong, _) in enumerate(everyone) if wrong]
    if failed:
        raise Left(f"rank {failed[0]} could not search for a plan: {everyone[failed[0]][1]}")
    return everyone[0][1]


def _is_layout_free(t: Any, training: bool) -> bool:
    """Return True if a search may change a parameter's layout.

    It may not if a search for another graph has set the layout. A graph that trains may still
    change the layout that was set for a graph that does not."""
    return isinstance(t, GlobalTensor) and (
        _LAID not in t.__dict__ or (training and not t.__dict__[_LAID])
    )


def states_of(graph: Any) -> float:
    """Return the bytes of optimizer state for each byte of a parameter.

    They are estimated from the type of the optimizer. With several, the largest counts."""
    kinds = {type(entry.optimizer).__name__ for entry in graph._optimizers}
    return max(
        (_STATES.get(kind, 2.0) if kind != "SGD" else float(_momentum(graph)) for kind in kinds),
        default=0.0,
    )


_STATES = {"Adagrad": 1.0, "RMSprop": 1.0, "Rprop": 2.0, "ASGD": 1.0, "Adafactor": 0.1}


def _momentum(graph: Any) -> bool:
    return any(
        group.get("momentum")
        for entry in graph._optimizers
        for group in entry.optimizer.param_groups
    )


def _mesh_of(name: str, parameters: Mapping[str, Any], logical: fx.Graph) -> Placement:
    places = {t._spec.shown.placement for t in parameters.values() if isinstance(t, GlobalTensor)}
    for node in logical.nodes:
        val = node.meta.get("val")
        if isinstance(val, GlobalTensor):
            places.add(val._spec.shown.placement)
    if not places:
        raise GraphError(
            f"{name}: config.enable_auto_parallel() needs a model on a placement: "
            "model.to_global(flow.placement.all('cpu'), flow.sbp.broadcast)"
        )
    if len(places) > 1:
        raise GraphError(
            f"{name}: config.enable_auto_parallel() chooses layouts on one placement, but the "
            f"graph has {len(places)}: {', '.join(map(repr, places))}. flow.auto.plan(...) "
            "chooses stages too, and flow.parallelize(model, placement, plan) and "
            "config.use_auto_plan(plan) apply them without a search"
        )
    return places.pop()


def apply_layouts(
    parameters: Mapping[str, torch.Tensor], search_result: SearchResult, training: bool = True
) -> None:
    """Box parameters to a plan's layouts, in place, so that optimizers still hold them.

    ``parameters`` maps paths to tensors. Collective."""
    values = {
        v.path: v
        for v in search_result.formulation.calls.states()
        if v.path and v.number in search_result.formulation.node_of_value
    }
    for path, t in parameters.items():
        value = values.get(path)
        if value is None or not isinstance(t, GlobalTensor):
            continue
        layout = search_result.formulation.made(value, search_result.choice)
        t.__dict__[_LAID] = training
        if layout != t._spec.layout:
            spec = t._spec.replace(layout=layout)
            with torch.no_grad():
                local = box(local_of(t).detach(), t._spec, spec, why="automatic plan")
                if (
                    local.numel() * local.element_size() != local.untyped_storage().nbytes()
                    or local.data_ptr() == t._local.data_ptr()
                ):
                    local = local.clone()  # a slice would keep the full storage alive
            replace_local(t, local.contiguous(), spec)


def plan_for_capture(logical: fx.Graph, found: SearchResult) -> GraphPlan:
    """Return the plan for the graph's next capture: the layouts of each call's operands."""
    f, choice = found.formulation, found.choice
    ops = []
    for op in plan_of(logical):
        number = f.calls.numbers.get(op.name)
        wanted: Sequence[tuple[Sbp, ...]] = ()
        if number is not None and number in f.candidates:
            call = f.calls.calls[number]
            wanted = [f.wanted(number, i, choice) for i in range(len(call.operands))]
            if call.fixed:
                wanted = ()  # the call itself says which layout its operand has
        if len(wanted) == len(op.operands):
            operands = [
                dataclasses.replace(o, wanted=tuple(e.short for e in w) if o.came else ())
                for o, w in zip(op.operands, wanted, strict=True)
            ]
        else:
            operands = [dataclasses.replace(o, wanted=()) for o in op.operands]
        ops.append(dataclasses.replace(op, operands=tuple(operands)))
    return GraphPlan(tuple(ops))
