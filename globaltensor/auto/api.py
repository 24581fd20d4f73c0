"""``flow.auto.plan``: find the best way to run a model on a cluster.

Users call `plan`. The command line, calibration and graphs that search call the helpers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .._base.pytree import object_tensors, replaced_in_objects
from .._tensor.global_tensor import GlobalTensor
from ..cluster import Cluster, current_cluster
from ..distributed.world import world
from ..errors import PlanError
from ..graph.graph import Graph
from ..parallel.parallelize import PLANS
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .cost.strategies import gives_every_rank_data
from .gc_pause import gc_paused
from .inter_op.predict import simulate_plan
from .inter_op.search import search_pipelines
from .intra_op.formulate import formulate
from .intra_op.search import SearchResult, compare, data_parallel, glance, search
from .intra_op.search_options import Options
from .ir.op_graph import NOTHING_TO_SEARCH, Calls
from .ir.trace import calls_of_model, captured_calls
from .plan.model_name import named_after
from .plan.plan import Plan
from .search_limits import LIMITS

__all__ = ["calls_of", "cluster_of", "mesh_of", "nbytes", "plan", "recipes_of"]


@gc_paused()
def plan(
    model_or_graph: Any,
    example_inputs: Any,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    *,
    batch: int | None = None,
    objective: str = "time",
    mesh: Placement | Sequence[int] | None = None,
    seconds: float | None = None,
    optimizer_state_ratio: float | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the best plan for a model or a graph.

    ``example_inputs`` are a tuple of arguments. Only the shapes and dtypes of their tensors are
    used.

    - ``cluster``: a `Cluster`, the name of a preset, or a file that ``globaltensor profile`` wrote.
      None: the ranks of this world, by the current model of the cluster.
    - ``memory``: bytes a rank, or text such as "16GiB". None: the memory of the cluster's devices,
      if the cluster has a figure.
    - ``batch``: rows of the inputs, if other than those of the examples. It applies to all tensors
      with as many rows in dim 0 as the first one.
    - ``objective``: "time" (seconds a step) or "memory" (the minimum memory, then time).
    - ``mesh``: a placement or its shape, if it is not to be searched.
    - ``seconds``: stop after this time and return the best plan so far.
    - ``optimizer_state_ratio``: bytes of optimizer state for each byte of a parameter (0: SGD, 1:
      SGD with momentum, 2: Adam). None takes 2 for a model, and for a graph what its optimizers
      have.
    - ``kwargs``: keyword arguments of the model.

    The plan of a graph prices its own loss and optimizer. For a model, the loss is what the model
    itself computes: backward starts from every output, in any layout, and a loss after the model
    costs nothing. A model in evaluation mode is planned for training too.

    All ranks get the same plan from the same arguments, unless ``seconds`` stops the search. In
    that case let all ranks use rank 0's plan.

    Raises PlanError where no plan fits into the memory, with the minimum that would do, and for
    invalid arguments. Raises GraphError where the model's code depends on values.
    """
    if objective not in ("time", "memory"):
        raise PlanError(f'objective is "time" or "memory", got {objective!r}')
    left = _Clock(None if seconds is None else _nonnegative_float("seconds", seconds))
    cluster = cluster_of(cluster)
    inputs = (
        example_inputs if isinstance(example_inputs, tuple) else (example_inputs,),
        dict(kwargs or {}),
    )
    if batch is not None:
        inputs = _with_batch_size(inputs, batch)
    limit = nbytes(memory) if memory is not None else cluster.memory or None
    options = Options(
        optimizer_state_ratio=_states(model_or_graph, optimizer_state_ratio), memory=limit
    )
    where = None if mesh is None else mesh_of(mesh, cluster)
    if (
        where is None
        and objective == "time"
        and cluster.size > LIMITS.one_mesh_devices
        and len(set(_rows(inputs))) == 1
        and isinstance(model_or_graph, torch.nn.Module)
    ):
        found = _search_full_space(model_or_graph, inputs, cluster, options, left)
        return named_after(found, model_or_graph, options.optimizer_state_ratio)
    calls, where = (
        calls_of(model_or_graph, *inputs, cluster.device),
        where or mesh_of(None, cluster),
    )
    if objective == "memory":
        if not calls.calls:
            raise PlanError(NOTHING_TO_SEARCH)
        least = formulate(calls, cluster, where, options).least_memory(left())
        if least is None:
            raise PlanError(
                "the minimum memory was not found in the given time: give more seconds, or set a "
                "limit with memory="
            )
        if limit is None or least < limit:  # otherwise the search raises the error
            options = dataclasses.replace(options, memory=least)
    result = search(
        calls, cluster, where, options, left(), recipes_of(model_or_graph, calls, where)
    )
    return named_after(result.plan, model_or_graph, options.optimizer_state_ratio)


class _Clock:
    """A clock that returns the seconds left; None: there is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.perf_counter() + seconds

    def __call__(self, part: float = 1.0) -> float | None:
        return None if self.end is None else part * max(0.0, self.end - time.perf_counter())


def _rows(given: Any) -> list[int]:
    """List dim 0 of each tensor of the inputs that has one."""
    return [t.shape[0] for t in object_tensors(given, []) if t.dim()]


def _search_full_space(
    model: torch.nn.Module, inputs: Any, cluster: Cluster, options: Options, left: _Clock
) -> Plan:
    """Search for mesh, stages, micro-batches, recomputation and ZeRO too.

    A plan on one mesh gets prices of the known plans on that mesh as alternatives. A plan in stages
    gets those on one axis.
    """
    calls, rows = calls_of_model(model, *inputs, cluster.device), _rows(inputs)[0]

    def calls_at(n: int) -> Calls:
        return (
            calls
            if n == rows
            else calls_of_model(model, *_with_batch_size(inputs, n), cluster.device)
        )

    done = search_pipelines(
        calls_at, rows, cluster, None, options, None, left(LIMITS.pipeline_fraction)
    )
    on_one_mesh = _search_one_mesh_plans(done, calls, cluster, options, left)
    known = (
        on_one_mesh.formulation
        if on_one_mesh is not None
        else formulate(
            calls,
            cluster,
            mesh_of(done.mesh if _is_intra_op_only(done) else None, cluster),
            options,
        )
    )
    ways = {
        "data parallel": data_parallel(calls, known.mesh),
        **recipes_of(model, calls, known.mesh),
    }
    others = compare(known, ways, left())
    if on_one_mesh is None:
        return dataclasses.replace(done, alternatives=others)
    plan = on_one_mesh.plan
    choices = {
        "mesh": list(plan.mesh),
        "stages": [_stage(plan)],
        "micro_batches": 1,
        "schedule": None,
        "recompute": [],
        "zero": {},
        "batch": rows,
    }
    plan = dataclasses.replace(
        plan,
        choices={**choices, **plan.choices},
        search={**done.search, **plan.search},
        alternatives=others,
    )
    plan = dataclasses.replace(plan, lost=tuple(dict.fromkeys((*done.lost, *plan.lost))))
    run = simulate_plan(plan, cluster)
    return dataclasses.replace(plan, seconds=run.seconds, timeline=run.trace())


def _stage(plan: Plan) -> dict[str, Any]:
    """Return the record of a stage that contains all of a plan on one mesh."""
    names, modules = [c.name for c in plan.calls], list(dict.fromkeys(c.module for c in plan.calls))
    whole = {
        "mesh": list(plan.mesh),
        "calls": [*names[:1], *names[-1:]],
        "modules": modules,
        "recompute": [],
        "memory": plan.memory,
    }
    return {"lane": 0, "ranks": [0, math.prod(plan.mesh)], **whole}


def _is_intra_op_only(plan: Plan) -> bool:
    """Return True if the plan has one mesh and one micro-batch, and only choices of the solver.

    It then has one stage, without recomputation and ZeRO.
    """
    return (
        len(plan.choices["stages"]) == 1
        and plan.choices["micro_batches"] == 1
        and not plan.choices["recompute"]
        and not plan.choices["zero"]
    )


def _search_one_mesh_plans(
    done: Plan, calls: Calls, cluster: Cluster, options: Options, left: _Clock
) -> SearchResult | None:
    """Search by the solver for a plan on one mesh that is better than ``done``.

    Return None if there is none. The bound of the plan found is that of all meshes and pipelines.

    The solver knows the whole mesh, and which parameters the runtime gathers together. So it
    replaces a plan on one mesh by its own plan there. Unless the problem is large, it also tries
    every other mesh whose bound is below the best cost so far. That bound comes from the other
    search. The other search leaves nothing partial between segments, so its bound may be a little
    too high. For a small problem the bound is the time of computing instead.
    """
    nodes = len(calls.calls) + len(calls.parameters)
    bounds = {
        tuple(shape): bound
        for bound, shape in done.search[
            "computing_of_meshes" if nodes <= LIMITS.every_mesh_nodes else "bounds_of_meshes"
        ]
    }
    first, large = [done.mesh] if _is_intra_op_only(done) else [], nodes > LIMITS.one_mesh_nodes
    best: SearchResult | None = None
    least = min(done.cost, done.seconds)
    for shape in first + sorted(
        (shape for shape in bounds if shape not in first), key=bounds.__getitem__
    ):
        if shape not in first and (large or bounds[shape] >= least):
            continue
        # the solver counts memory in its own way, and has limited time, so it may find no plan
        with contextlib.suppress(PlanError):
            where = mesh_of(shape, cluster)
            if shape not in first:  # a quick bound may rule the mesh out
                bounds[shape] = glance(calls, cluster, where, options, left())
                if bounds[shape] >= least:
                    continue
            result = search(
                calls,
                cluster,
                where,
                options,
                left(),
                compared=False,
                turns=None if shape in first else LIMITS.turns_of_other_meshes,
            )
            bounds[shape] = result.plan.bound
            if result.plan.cost < least or (
                shape in first and (result.plan.optimal or result.plan.cost <= done.cost)
            ):
                best, least = result, result.plan.cost
    if best is None:
        return None
    pipelines = done.search["bound_of_pipelines"]
    bound = min([best.plan.cost, *bounds.values(), *([] if pipelines is None else [pipelines])])
    return best._replace(plan=dataclasses.replace(best.plan, bound=bound))


def cluster_of(cluster: Cluster | str | os.PathLike[str] | None) -> Cluster:
    """Return a cluster: as it is, by the name of a preset, or from a file.

    A cluster without a number of devices gets as many as this world has ranks. Raises PlanError for
    a name that is neither preset nor file, and ClusterError for a file that contains no cluster.
    """
    if cluster is None:
        resolved = current_cluster()
    elif isinstance(cluster, Cluster):
        resolved = cluster
    elif not isinstance(cluster, (str, os.PathLike)):
        raise PlanError(f"cluster is a Cluster, the name of a preset or a file, got {cluster!r}")
    elif os.path.exists(cluster):
        resolved = Cluster.load(cluster)
    else:
        try:
            resolved = Cluster.preset(os.fspath(cluster))
        except ValueError as error:
            raise PlanError(f"cluster {os.fspath(cluster)!r} is no file, and {error}") from None
    return resolved if resolved.size else resolved.with_size(world().size)


_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def nbytes(size: int | float | str) -> int:
    """Convert a number or text such as "16GiB" to bytes. Raises PlanError for anything else.

    >>> nbytes("1.5 GiB")
    1610612736
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size >= 0:
        return int(size)
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if isinstance(size, str)
        else None
    )
    if match is None or match[2].lower() not in _UNITS:
        raise PlanError(
            f'memory is a number of bytes, or text such as "16GiB" or "80 GB", got {size!r}'
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def calls_of(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, device: str
) -> Calls:
    """Return the calls of a model or a graph for these inputs.

    ``device`` is the type of device that the calls are to run on ("cpu", "cuda"). Raises PlanError
    for a model that is neither a module nor a graph.
    """
    if isinstance(model, Graph):
        return captured_calls(model, args, kwargs, device)[1]
    if isinstance(model, torch.nn.Module):
        try:
            return calls_of_model(model, args, kwargs, device)
        except TypeError:
            _check_arguments(model, args, kwargs or {})
            raise
    raise PlanError(
        f"flow.auto.plan wants a torch.nn.Module or an nn.Graph, got {type(model).__name__}"
    )


def _check_arguments(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise PlanError if a call of the model has failed because of its arguments."""
    try:
        takes = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a function of C without a signature
        return
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        raise PlanError(
            f"{type(model).__name__}.forward{takes} does not take these example inputs: {error}. "
            f"Pass several inputs as a tuple, flow.auto.plan(model, (x, y), ...), and keyword "
            f"arguments by kwargs={{...}}"
        ) from None


def mesh_of(mesh: Placement | Sequence[int] | None, cluster: Cluster) -> Placement:
    """Return a mesh: as it is, or from its shape; None means all devices on one axis.

    Raises PlanError where the cluster has fewer devices, and for an invalid shape.
    """
    if isinstance(mesh, Placement):
        shape = tuple(mesh.shape)
    else:
        shape = (
            (cluster.size,)
            if mesh is None
            else tuple(mesh)
            if isinstance(mesh, Sequence) and not isinstance(mesh, str)
            else ()
        )
        if not shape or not all(
            isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape
        ):
            raise PlanError(
                f"mesh is a placement or a shape of numbers of devices, as (8,) or (2, 4), got "
                f"{mesh!r}"
            )
    size = math.prod(shape)
    if cluster.size and size > cluster.size:
        raise PlanError(
            f"a mesh of {'x'.join(map(str, shape))} has {size} devices, the cluster "
            f"{cluster.size}: cluster.with_size({size}) has as many"
        )
    # only the shape of a new placement counts
    return mesh if isinstance(mesh, Placement) else Placement("cpu", np.arange(size).reshape(shape))


def _with_batch_size(inputs: Any, batch: int) -> Any:
    """Return the same inputs with ``batch`` rows.

    The first tensor changes, and all tensors with as many rows as the first.
    """
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise PlanError(f"batch is a number of rows, at least 1, got {batch!r}")
    rows = next(iter(_rows(inputs)), None)
    if rows is None:
        raise PlanError(f"batch={batch}: none of the inputs is a tensor with rows")
    return replaced_in_objects(
        inputs,
        iter(
            [
                _resized(t, batch) if t.dim() and t.shape[0] == rows else t
                for t in object_tensors(inputs, [])
            ]
        ),
    )


def _resized(t: torch.Tensor, batch: int) -> torch.Tensor:
    shape = (batch, *t.shape[1:])
    if not isinstance(t, GlobalTensor):
        return torch.empty(shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)
    spec = Spec.make(shape, t.dtype, t._spec.placement, t._spec.layout)
    return GlobalTensor.wrap(
        t._stored.new_empty(spec.local_shape(world().rank)).requires_grad_(t.requires_grad), spec
    )


def _nonnegative_float(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise PlanError(f"{what} is a number of at least 0, got {value!r}")
    return float(value)


def _states(model: Any, states: float | None) -> float:
    from .apply.graphs import states_of

    if states is not None:
        return _nonnegative_float("optimizer_state_ratio", states)
    return states_of(model) if isinstance(model, Graph) else 2.0


def recipes_of(model: Any, calls: Calls, mesh: Placement) -> Mapping[str, Any]:
    """Return the layouts of parameters under the known plans, which are priced as alternatives."""
    modules = (
        {f"{name}.": m for name, m in model._modules.items()}
        if isinstance(model, Graph)
        else {"": model}
    )
    known = {v.path: v for v in calls.parameters}
    out = {}
    for name, axes in (("tensor parallel", "tensor"), ("fully sharded (ZeRO-3)", "fsdp")):
        fixed: dict[str, Any] = {}
        for prefix, module in modules.items():
            recipes = [
                PLANS[axes if a == len(mesh.shape) - 1 or axes == "fsdp" else "data"](module, n)
                for a, n in enumerate(mesh.shape)
            ]
            for path, t in module.named_parameters():
                value = known.get(prefix + path)
                if value is None:
                    continue
                layout = tuple(recipe.sbp(path, t) for recipe in recipes)
                fixed[prefix + path] = (
                    layout
                    if gives_every_rank_data(value.shape, layout, mesh)
                    else (broadcast,) * len(mesh.shape),
                )
        out[name] = fixed
    return out
