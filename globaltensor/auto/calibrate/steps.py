"""Measure whole training steps, in which calls and moves take longer than alone.

`calibrate.ops` calls it. Alone and within a step differ for three reasons:

- In a step, caches contain what other calls left there, and ranks come late to a collective.
  Measured alone, calls and moves take a quarter to a third less (on two CPU ranks).
- A rank's local parameters cost two or three times the time that its optimizer takes to read and
  write them.
- Buckets of parameters and gradients start early. They take less time than moves that ranks have to
  meet for (a third of it, on four ranks of two cores).

So a few plans run on a copy of the model. They compute, move, wait and store different amounts.
Five numbers are fitted to the times of their steps. Four are factors: of computing, of moving, of
moving in buckets, and of the optimizer's step with the copies before and after moves. The fifth is
how long ranks wait for one another at each blocking move: a move that they cannot go on without.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..._base.pytree import object_tensors, replaced_in_objects
from ..._base.user_code import warn_user
from ..._tensor.global_tensor import GlobalTensor
from ...cluster import Cluster, current_cluster, use_cluster
from ...distributed.world import world
from ...errors import PlanError
from ...graph.graph import Graph
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp, broadcast, split
from ..api import recipes_of
from ..apply import graphs as arrange
from ..cost.reshard_cost import ReshardCosts
from ..cost.strategies import StrategyBuilder, gives_every_rank_data
from ..intra_op.formulate import Formulation, formulate
from ..intra_op.read_solution import read_plan
from ..intra_op.search import SearchResult, binding_formulation, data_parallel, search
from ..profile.clock import Case, Clock
from ..solver import Problem, solve

__all__ = ["COPIES", "MeasuredStep", "calibrate_steps", "factors", "perturbed"]

# timed steps in a row, as in training, and untimed steps before them, because the first steps find
# in the caches what another plan's steps left there
_ROW, _BEFORE = (
    10,
    5,
)
_SEARCH = 5.0  # seconds of the search for each plan
_GRAPHS = 4  # the maximum number of graphs that run each plan
_MIN_BUILD_SECONDS = 1e-3  # the minimum seconds that building is assumed to take
# Penalties of the fit for factors that differ, as fractions of a step's time: equal factors must
# explain this much less before they may differ.
_ALIKE = 0.1  # computing and moving
_ALIKE_TOO = 0.03  # computing and the optimizer, which is a smaller fraction of the step
_MOVES_ALIKE = 0.4  # moving in buckets and otherwise, which few steps distinguish well
_LEAST, _MOST = 0.1, 10.0
_WAIT = 1e-3  # seconds; the unit of waits in the fit
_MORE_SKEW = 1e-7  # seconds added to the rank_skew to count the waits of a plan

_Steps = dict[str, Callable[[], None]]
#: Layouts of parameters by their paths, for a graph's calls on a mesh.
Fixed = Callable[[Graph, Any, Placement], Mapping[str, Any]]


class MeasuredStep(NamedTuple):
    """The terms of one plan's step in seconds.

    ``computing``, ``moving``, ``bucketed`` (moves in buckets) and ``updating`` (the optimizer) are
    predicted by the model of the cluster. ``measured`` is the measured time. ``waits`` is the
    number of blocking moves. Copies before and after moves count as the optimizer's, because in a
    step they find equally little in the caches.
    """

    computing: float
    moving: float
    measured: float
    waits: float = 0.0
    updating: float = 0.0
    bucketed: float = 0.0


def calibrate_steps(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cluster: Cluster,
    mesh: Placement,
    seconds: float,
) -> Cluster:
    """Return ``cluster`` with times as they are within steps of this model.

    A plan that cannot run as a step is left out, with a warning. Where none can run, nothing
    changes. It is collective among all ranks, which are those of the mesh.
    """
    with torch.random.fork_rng(devices=[]), use_cluster(cluster):
        steps = _measure_variants(model, args, kwargs, mesh, seconds)
    if not steps:
        return cluster
    computing, moving, waiting, updating, bucketed = factors(steps)
    return cluster.scaled(computing, moving, waiting, updating, bucketed, copying=updating)


def factors(steps: Sequence[MeasuredStep]) -> tuple[float, float, float, float, float]:
    """Fit four factors and the duration of a wait to measured steps.

    Return the factors of computing and moving, the seconds by which each wait is longer, and the
    factors of the optimizer's step and of moving in buckets. The fit minimises the relative error
    (least squares). Factors that the steps do not distinguish are equal. If the steps have no
    information about waits, their duration is unchanged.

    >>> steps = [MeasuredStep(1.0, 1.0, 3.5), MeasuredStep(2.0, 0.1, 3.15)]
    >>> steps += [MeasuredStep(1.0, 4.0, 9.5), MeasuredStep(1.0, 1.0, 3.6, waits=20)]
    >>> a, b, c, d, e = factors(steps)
    >>> round(a, 1), round(b, 1), round(c, 3), round(d, 1), round(e, 1)
    (1.5, 2.0, 0.006, 1.5, 2.0)
    """
    rows = [
        [x / s.measured for x in (s.computing, s.moving, s.bucketed, s.updating, _WAIT * s.waits)]
        for s in steps
    ]
    rows += [
        [_ALIKE, -_ALIKE, 0, 0, 0],
        [0, _MOVES_ALIKE, -_MOVES_ALIKE, 0, 0],
        [_ALIKE_TOO, 0, 0, -_ALIKE_TOO, 0],
    ]
    rows += [[0, 0, 0, 0, _ALIKE * _WAIT / statistics.median(s.measured for s in steps)]]
    wanted = np.array([1.0] * len(steps) + [0.0] * 4)
    found = np.linalg.lstsq(np.array(rows), wanted, rcond=None)[0]
    if found[-1] < 0:
        found = [*np.linalg.lstsq(np.array(rows)[:, :-1], wanted, rcond=None)[0], 0.0]
    computing, moving, bucketed, updating = (float(min(max(f, _LEAST), _MOST)) for f in found[:-1])
    return computing, moving, float(found[-1]) * _WAIT, updating, bucketed


def _recipe(name: str) -> Fixed:
    return lambda graph, calls, mesh: recipes_of(graph, calls, mesh)[name]


def _data_parallel_layouts(graph: Graph, calls: Any, mesh: Placement) -> Mapping[str, Any]:
    inputs = {v.name for v in calls.values if v.state == "input"}
    return {
        path: layouts for path, layouts in data_parallel(calls, mesh).items() if path not in inputs
    }


def _alternating_layouts(graph: Graph, calls: Any, mesh: Placement) -> Mapping[str, Any]:
    """Give each parameter another layout than the one before.

    This moves much that no good plan would move.
    """
    menu, found = StrategyBuilder(ReshardCosts(current_cluster(), mesh), True), {}
    for k, v in enumerate(calls.parameters):
        states = menu.states(v, True)
        found[v.path] = (states[k % len(states)],)
    return found


class StepVariant(NamedTuple):
    """A plan to measure, by the layouts of the batch and of fixed parameters.

    With ``noise`` it is the best plan for costs with random noise, in multiples of a node's mean
    cost.
    """

    batch: Sbp
    fixed: Fixed = lambda graph, calls, mesh: {}
    noise: float = 0.0


#: Plans with little and with much to compute, to move and to wait for.
_WAYS: Mapping[str, StepVariant] = {
    "the best": StepVariant(split(0)),
    "the best, batch whole": StepVariant(broadcast),
    "data parallel": StepVariant(split(0), _data_parallel_layouts),
    "tensor parallel": StepVariant(broadcast, _recipe("tensor parallel")),
    "fully sharded": StepVariant(split(0), _recipe("fully sharded (ZeRO-3)")),
    "each otherwise": StepVariant(split(0), _alternating_layouts),
    "each otherwise, batch whole": StepVariant(broadcast, _alternating_layouts),
    "far from the best": StepVariant(split(0), noise=2.0),
    "further from the best": StepVariant(broadcast, noise=8.0),
    "furthest from the best": StepVariant(split(0), noise=16.0),
}


#: The maximum number of copies of a model: parameters, gradients and two states for each plan.
COPIES = 4 * len(_WAYS)


class _Training(Graph):
    """A training step of a model under one plan."""

    def __init__(self, model: torch.nn.Module, plan: _VariantPlanner) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(
            torch.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0
            )
        )
        self.config.enable_auto_parallel()
        self.config.enable_auto_memory("Disable")
        arrange.follow(self, functools.partial(plan, self))

    def build(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = _loss(self.model(*args, **kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def _loss(out: Any) -> torch.Tensor:
    """Return a scalar to start backward from: the model's loss, or the sum of its first result."""
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = next((t for t in object_tensors(out, []) if t.requires_grad), None)
    if not isinstance(loss, torch.Tensor):
        raise PlanError("no result of the model has a gradient")
    return loss if not loss.dim() else loss.float().sum()


class _VariantPlan(NamedTuple):
    """A plan, its blocking moves, and seconds of computing, of bucketed moves and of copying."""

    search_result: SearchResult
    waits: float
    computing: float
    bucketed: float
    copied: float


class _VariantPlanner:
    """The plan of a variant, searched once for all graphs that follow it.

    ``seconds`` is the time that the search took.
    """

    def __init__(self, way: StepVariant) -> None:
        self.way, self.seconds = way, 0.0
        self.chosen: _VariantPlan | None = None

    def __call__(self, graph: _Training, *args: Any) -> SearchResult:
        if self.chosen is None:
            began = time.perf_counter()
            self.chosen = _search_variant(graph, self.way, *args)
            self.seconds = time.perf_counter() - began
        return self.chosen.search_result

    def step(self, measured: float) -> MeasuredStep:
        assert self.chosen is not None, "it has been run"
        search_result, waits, computing, bucketed, copied = self.chosen
        spent = search_result.plan.cost_breakdown
        moving = (
            spent["computing"] + spent["moving"] - spent["hidden"] - computing - bucketed - copied
        )
        return MeasuredStep(
            computing, moving, measured, waits, spent["updating"] + copied, bucketed
        )


def _measure_variants(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Placement,
    seconds: float,
) -> list[MeasuredStep]:
    """Measure the steps of each plan.

    Steps of one plan differ by up to a tenth from graph to graph, depending on the addresses of its
    memory. So graphs are built several times, each time in another order, in at most half of the
    seconds. The median of their times counts.
    """
    clock = Clock(world().device(current_cluster().device))
    plans = {name: _VariantPlanner(way) for name, way in _WAYS.items()}
    began = time.perf_counter()
    graphs = _build_steps(plans, model, args, kwargs, mesh)
    building = clock.slowest(
        [time.perf_counter() - began - sum(plan.seconds for plan in plans.values())]
    )[0]
    times = max(1, min(_GRAPHS, 1 + int(seconds / 2 / max(building, _MIN_BUILD_SECONDS))))
    each, names = (seconds - (times - 1) * building) / times, list(graphs)
    took = [_time_steps(graphs, clock, each)]
    while len(took) < times and names:
        graphs.clear()
        gc.collect()
        order = np.random.default_rng(len(took)).permutation(len(names))
        graphs = _build_steps({names[i]: plans[names[i]] for i in order}, model, args, kwargs, mesh)
        took.append(_time_steps(graphs, clock, each))
    return [
        plans[name].step(statistics.median(found[name] for found in took if name in found))
        for name in names
    ]


def _time_steps(graphs: _Steps, clock: Clock, seconds: float) -> dict[str, float]:
    """Return the seconds of a step of each graph."""
    cases = [
        Case(
            i,
            0,
            functools.partial(_run_steps, step, _ROW),
            functools.partial(_run_steps, step, _BEFORE),
            _ROW,
        )
        for i, step in enumerate(graphs.values())
    ]
    found = clock.time(cases, seconds) if cases else {}
    return {name: found[i] for i, name in enumerate(graphs)}


def _build_steps(
    plans: Mapping[str, _VariantPlanner],
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Placement,
) -> _Steps:
    """Build a step of each plan and run it once. Plans that cannot run are left out."""
    where = Placement(current_cluster().device, mesh.ranks)
    steps: _Steps = {}
    for name, plan in plans.items():
        try:
            whole = copy.deepcopy(model).to_global(where, [broadcast] * mesh.axes)  # type: ignore[operator]
            graph = _Training(whole, plan)
            own, named = replaced_in_objects(
                (args, dict(kwargs)),
                iter(
                    [
                        _make_input(t, where, plan.way.batch)
                        for t in object_tensors((args, dict(kwargs)), [])
                    ]
                ),
            )
            step = functools.partial(_run, graph, own, named)
            step()
            steps[name] = step
        except Exception as error:  # the model may fail on inputs that are not the user's
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warn_user(
                f"calibrate: steps of the plan {name!r} could not be run, and are left out: "
                f"{reason}",
            )
    return steps


def _run(graph: _Training, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    graph(*args, **kwargs).item()


def _search_variant(
    graph: _Training,
    way: StepVariant,
    calls: Any,
    cluster: Cluster,
    mesh: Placement,
    auto: Any,
    fixed_layouts: Mapping[str, Any],
    states: float,
) -> _VariantPlan:
    options = dataclasses.replace(
        arrange.options_of(
            auto, cluster, {**way.fixed(graph, calls, mesh), **fixed_layouts}, states
        ),
        memory=None,
    )
    search_result = search(
        calls, cluster, mesh, options, _SEARCH, agreed=arrange.from_rank0, compared=False
    )
    if way.noise:
        other = arrange.from_rank0(
            solve(
                perturbed(
                    search_result.formulation,
                    way.noise * search_result.plan.cost / len(search_result.choice),
                ),
                seconds=_SEARCH,
            )
        )
        if other.feasible:
            by = binding_formulation(search_result.formulation, other.choice)
            other = dataclasses.replace(other, cost=by.problem.evaluate(other.choice), bound=0.0)
            search_result = SearchResult(read_plan(by, other), by, other.choice)
    own = search_result.formulation

    def extra_seconds(other: Cluster) -> float:
        """Return how many seconds longer the plan takes on this cluster, without the optimizer."""
        reformulated = formulate(calls, other, mesh, own.options)
        longer, own_seconds = (
            float(f.problem.evaluate(search_result.choice)) - f.optimizing(search_result.choice)
            for f in (reformulated, own)
        )
        return longer - own_seconds

    waits = (
        extra_seconds(dataclasses.replace(cluster, rank_skew=cluster.rank_skew + _MORE_SKEW))
        / _MORE_SKEW
    )
    same = functools.partial(cluster.scaled, updating=1.0, bucketed=1.0)  # no change by itself
    return _VariantPlan(
        search_result,
        waits,
        extra_seconds(same(2.0, 1.0, copying=1.0)),
        extra_seconds(cluster.scaled(1.0, 1.0, bucketed=2.0)),
        extra_seconds(same(1.0, 1.0, copying=2.0)),
    )


def perturbed(formulation: Formulation, by: float, seed: int = 0) -> Problem:
    """Return the problem with random seconds added to all options.

    The seconds are exponentially distributed with the mean ``by``. Options that differ only in
    their second layout get the same noise, so second layouts keep their price.
    """
    drawn, costs = np.random.default_rng(seed), []
    for node, cost in enumerate(formulation.problem.costs):
        lies = [x for x, _ in formulation.layouts.get(node, ())] or range(len(cost))
        ways = list(dict.fromkeys(lies))
        more = dict(zip(ways, by * drawn.exponential(size=len(ways)), strict=True))
        costs.append(cost + np.array([more[x] for x in lies]))
    return dataclasses.replace(formulation.problem, costs=costs)


def _make_input(t: torch.Tensor, where: Placement, batch: Sbp) -> GlobalTensor:
    """Make an input of this shape and layout, the same on every rank."""
    if t.is_meta or isinstance(t, GlobalTensor):
        t = (
            torch.randn(t.shape, dtype=t.dtype)
            if t.is_floating_point()
            else torch.zeros(t.shape, dtype=t.dtype)
        )
    whole = t.detach().to_global(where, [broadcast] * where.axes, check_meta=False)  # type: ignore[attr-defined]
    layout = (batch,) * where.axes
    return (
        whole.to_global(sbp=layout)
        if t.dim() and gives_every_rank_data(tuple(t.shape), layout, where)
        else whole
    )  # type: ignore[no-any-return]


def _run_steps(step: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        step()
