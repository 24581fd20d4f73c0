"""``flow.auto.plan``: the best way to run a model on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
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
from ..graph.graph import Graph
from ..parallel.parallelize import PLANS
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .cost.strategies import gives_every_rank_data
from .gc_pause import gc_paused
from .inter_op.predict import simulate_plan
from .inter_op.search import search_pipelines
from .intra_op.formulate import Options, formulate
from .intra_op.search import SearchResult, compare, data_parallel, glance, search
from .ir.op_graph import Calls
from .ir.trace import calls_of_model, captured_calls
from .plan.plan import Plan, PlanError

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
    states: float | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Plan:
    """The best plan for a model, or a graph, and inputs of these shapes (a tuple of arguments;
    tensors are only looked at for shape and dtype).

    ``cluster``: a `Cluster`, the name of a preset, or a file that ``globaltensor profile`` wrote;
    None: the ranks of this world, by the current model of the cluster. ``memory``: bytes a rank, or
    "16GiB"; None: what the cluster's devices have, if it says. ``batch``: rows of the inputs, where
    it is to be others than those of the examples: of all tensors that have as many in dim 0 as the
    first one. ``kwargs``: keyword arguments beside the inputs. ``mesh``: a placement or its shape,
    where it is not to be searched for. ``objective``: "time" (seconds a step) or "memory" (the
    least memory, then time). ``seconds``: stop after so long with the best so far. ``states``:
    bytes of optimizer state for each byte of a parameter (2: Adam).

    From the same arguments the same plan on every rank, unless time cuts the search short: then let
    all take rank 0's. Raises PlanError where nothing fits into the memory, naming the least that
    would do; GraphError where the model's code depends on values.
    """
    if objective not in ("time", "memory"):
        raise PlanError(f'objective is "time" or "memory", got {objective!r}')
    left = _Clock(None if seconds is None else _number("seconds", seconds))
    found = cluster_of(cluster)
    given = (
        example_inputs if isinstance(example_inputs, tuple) else (example_inputs,),
        dict(kwargs or {}),
    )
    if batch is not None:
        given = _of_batch(given, batch)
    limit = nbytes(memory) if memory is not None else found.memory or None
    options = Options(states=_states(model_or_graph, states), memory=limit)
    where = None if mesh is None else mesh_of(mesh, found)
    if (
        where is None
        and objective == "time"
        and found.size > _FEW
        and len(set(_rows(given))) == 1
        and isinstance(model_or_graph, torch.nn.Module)
    ):
        return _of_everything(model_or_graph, given, found, options, left)
    calls, where = calls_of(model_or_graph, *given, found.device), where or mesh_of(None, found)
    if objective == "memory":
        least = formulate(calls, found, where, options).least_memory(left())
        if least is None:
            raise PlanError(
                "the least memory was not found in the time: give more seconds, or a limit by "
                "memory="
            )
        if limit is None or least < limit:  # else the search says what is wrong
            options = dataclasses.replace(options, memory=least)
    return search(
        calls, found, where, options, left(), recipes_of(model_or_graph, calls, where)
    ).plan


_FEW = 2  # devices that are worth but one mesh
_SMALL = 200  # nodes of a problem that is solved on every mesh which may be worth it
_LARGE = 1000  # nodes of a problem that is solved on one mesh only
_FEWER = 40  # turns of the solver (`search.search`) on meshes beside the first
_BROAD = (
    0.6  # the part of the time for the search over everything, before that on the mesh it has found
)


class _Clock:
    """Seconds that are left; None: as many as it takes."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.perf_counter() + seconds

    def __call__(self, part: float = 1.0) -> float | None:
        return None if self.end is None else part * max(0.0, self.end - time.perf_counter())


def _rows(given: Any) -> list[int]:
    """Dim 0 of each tensor of the inputs that has one."""
    return [t.shape[0] for t in object_tensors(given, []) if t.dim()]


def _of_everything(
    model: torch.nn.Module, given: Any, cluster: Cluster, options: Options, left: _Clock
) -> Plan:
    """Mesh, stages, micro-batches, recomputation and shares are searched too. Beside a plan on one
    mesh the known ways on that are priced, beside one in stages those on one axis."""
    calls, rows = calls_of_model(model, *given, cluster.device), _rows(given)[0]

    def calls_at(n: int) -> Calls:
        return calls if n == rows else calls_of_model(model, *_of_batch(given, n), cluster.device)

    done = search_pipelines(calls_at, rows, cluster, None, options, None, left(_BROAD))
    found = _on_meshes(done, calls, cluster, options, left)
    known = (
        found.formulation
        if found is not None
        else formulate(
            calls, cluster, mesh_of(done.mesh if _single(done) else None, cluster), options
        )
    )
    ways = {
        "data parallel": data_parallel(calls, known.mesh),
        **recipes_of(model, calls, known.mesh),
    }
    others = compare(known, ways, left())
    if found is None:
        return dataclasses.replace(done, alternatives=others)
    plan = found.plan
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
    """All of a plan on one mesh."""
    names, modules = [c.name for c in plan.calls], list(dict.fromkeys(c.module for c in plan.calls))
    whole = {
        "mesh": list(plan.mesh),
        "calls": [*names[:1], *names[-1:]],
        "modules": modules,
        "recompute": [],
        "memory": plan.memory,
    }
    return {"lane": 0, "ranks": [0, math.prod(plan.mesh)], **whole}


def _single(plan: Plan) -> bool:
    """Whether it has one mesh, in one go, and nothing that the solver does not know."""
    return (
        len(plan.choices["stages"]) == 1
        and plan.choices["micro_batches"] == 1
        and not plan.choices["recompute"]
        and not plan.choices["zero"]
    )


def _on_meshes(
    done: Plan, calls: Calls, cluster: Cluster, options: Options, left: _Clock
) -> SearchResult | None:
    """The plan on one mesh, by the solver, that is to take the place of ``done``, if any. Its bound
    is that of all meshes and pipelines.

    The solver knows the mesh as a whole, and what the runtime gathers together. So a plan on one
    mesh is its plan there; and, unless the problem is large, it is asked about every mesh on which
    by its bound something better than the best so far may be found. That bound is the other
    search's, which leaves nothing partial between segments, and may so be a little too high: of a
    small problem it is what computing takes."""
    nodes = len(calls.calls) + len(calls.parameters)
    bounds = {
        tuple(shape): bound
        for bound, shape in done.search[
            "computing_of_meshes" if nodes <= _SMALL else "bounds_of_meshes"
        ]
    }
    first, large = [done.mesh] if _single(done) else [], nodes > _LARGE
    best: SearchResult | None = None
    least = min(done.cost, done.seconds)
    for shape in first + sorted(
        (shape for shape in bounds if shape not in first), key=bounds.__getitem__
    ):
        if shape not in first and (large or bounds[shape] >= least):
            continue
        with contextlib.suppress(
            PlanError
        ):  # by its own account of memory, or in the time that is left, it may have none
            where = mesh_of(shape, cluster)
            if shape not in first:  # a glance may tell that it is not worth a closer look
                bounds[shape] = glance(calls, cluster, where, options, left())
                if bounds[shape] >= least:
                    continue
            found = search(
                calls,
                cluster,
                where,
                options,
                left(),
                compared=False,
                turns=None if shape in first else _FEWER,
            )
            bounds[shape] = found.plan.bound
            if found.plan.cost < least or (
                shape in first and (found.plan.optimal or found.plan.cost <= done.cost)
            ):
                best, least = found, found.plan.cost
    if best is None:
        return None
    pipelines = done.search["bound_of_pipelines"]
    bound = min([best.plan.cost, *bounds.values(), *([] if pipelines is None else [pipelines])])
    return best._replace(plan=dataclasses.replace(best.plan, bound=bound))


def cluster_of(cluster: Cluster | str | os.PathLike[str] | None) -> Cluster:
    """A cluster by itself, by a preset's name, or from a file; with as many devices as this world
    has ranks, where it does not say how many. Raises PlanError for a name that is neither,
    ClusterError for a file that holds none."""
    if cluster is None:
        found = current_cluster()
    elif isinstance(cluster, Cluster):
        found = cluster
    elif not isinstance(cluster, (str, os.PathLike)):
        raise PlanError(f"cluster is a Cluster, the name of a preset or a file, got {cluster!r}")
    elif os.path.exists(cluster):
        found = Cluster.load(cluster)
    else:
        try:
            found = Cluster.preset(os.fspath(cluster))
        except ValueError as error:
            raise PlanError(f"cluster {os.fspath(cluster)!r} is no file, and {error}") from None
    return found if found.size else found.with_size(world().size)


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
    """Bytes, of a number or of text as "16GiB". Raises PlanError.

    >>> nbytes("1.5 GiB")
    1610612736
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size >= 0:
        return int(size)
    told = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if isinstance(size, str)
        else None
    )
    if told is None or told[2].lower() not in _UNITS:
        raise PlanError(
            f'memory is a number of bytes, or text such as "16GiB" or "80 GB", got {size!r}'
        )
    return int(float(told[1]) * _UNITS[told[2].lower()])


def calls_of(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, device: str
) -> Calls:
    """The calls of a model or a graph for these inputs, that are to run on such a device ("cpu",
    "cuda"). Raises PlanError for something else."""
    if isinstance(model, Graph):
        return captured_calls(model, args, kwargs, device)[1]
    if isinstance(model, torch.nn.Module):
        return calls_of_model(model, args, kwargs, device)
    raise PlanError(
        f"flow.auto.plan wants a torch.nn.Module or an nn.Graph, got {type(model).__name__}"
    )


def mesh_of(mesh: Placement | Sequence[int] | None, cluster: Cluster) -> Placement:
    """A mesh by itself or by its shape; None: all devices on one axis. Raises PlanError where the
    cluster has fewer, and for what is no shape."""
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
    return (
        mesh if isinstance(mesh, Placement) else Placement("cpu", np.arange(size).reshape(shape))
    )  # only its shape counts


def _of_batch(given: Any, batch: int) -> Any:
    """The same inputs with a batch of so many rows: that of the first of them, and of those that
    have as many."""
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise PlanError(f"batch is a number of rows, at least 1, got {batch!r}")
    rows = next(iter(_rows(given)), None)
    if rows is None:
        raise PlanError(f"batch={batch}: none of the inputs is a tensor with rows")
    return replaced_in_objects(
        given,
        iter(
            [
                _resized(t, batch) if t.dim() and t.shape[0] == rows else t
                for t in object_tensors(given, [])
            ]
        ),
    )


def _resized(t: torch.Tensor, batch: int) -> torch.Tensor:
    shape = (batch, *t.shape[1:])
    if not isinstance(t, GlobalTensor):
        return torch.empty(shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)
    spec = Spec.make(shape, t.dtype, t._spec.placement, t._spec.layout)
    return GlobalTensor.wrap(
        t._local.new_empty(spec.local_shape(world().rank)).requires_grad_(t.requires_grad), spec
    )


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise PlanError(f"{what} is a number of at least 0, got {value!r}")
    return float(value)


def _states(model: Any, states: float | None) -> float:
    from .apply.graphs import states_of

    if states is not None:
        return _number("states", states)
    return states_of(model) if isinstance(model, Graph) else 2.0


def recipes_of(model: Any, calls: Calls, mesh: Placement) -> Mapping[str, Any]:
    """Layouts of parameters under the known plans, to be priced beside the one found."""
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
