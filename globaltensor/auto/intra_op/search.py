"""The search on one mesh: formulate, solve, read the plan out of the solution."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...boxing.moves import Layout, show_bytes
from ...cluster import Cluster
from ...sharding.placement import Placement
from ...sharding.sbp import broadcast, split
from ..cost.strategies import gives_every_rank_data
from ..gc_pause import gc_paused
from ..ir.op_graph import Calls
from ..plan.plan import Alternative, Plan, PlanError
from ..solver import STOP, MinimaxSolver, Solution, solve
from .formulate import Formulation, Options, formulate, hidden
from .layout_changes import Changes, short
from .read_solution import read_plan

__all__ = [
    "SearchResult",
    "binding_formulation",
    "compare",
    "data_parallel",
    "glance",
    "price_layouts",
    "search",
]


class SearchResult(NamedTuple):
    """A plan, the problem it solves, and the choice that it is."""

    plan: Plan
    formulation: Formulation
    choice: Sequence[int]


Answer = tuple[Solution, Formulation]  # and the problem by which the solution costs what it does
_LONGEST = 60.0  # seconds that the solver may take where nothing is said
_COMPARED = 5.0  # seconds for each way that is but compared, likewise
_LARGE = 1000  # nodes
_TURNS, _TURNS_OF_LARGE = (
    400,
    5,
)  # further solutions at most where gradients take longer than what they hide behind
_FEW, _TURNS_OF_COMPARED, _ROUGH = (
    200,
    40,
    0.01,
)  # nodes up to which what is compared has such turns; a gap of its cost that is not worth a word
_WORK, _WORK_WITHIN = (
    40_000,
    6_000,
)  # nodes of all of these together, without a limit of memory and with one, where each takes longer
_CLOSE = 1e-5  # a gap between cost and bound at which it may stop
_NEAR, _NEAR_OF_LARGE = (
    1e-3,
    2e-3,
)  # the same for what is but compared; and for a large problem's weights


@gc_paused()
def search(
    calls: Calls,
    cluster: Cluster,
    mesh: Placement,
    options: Options,
    seconds: float | None = None,
    recipes: Mapping[str, Any] | None = None,
    agreed: Callable[[Solution], Solution] = lambda solution: solution,
    compared: bool = True,
    turns: int | None = None,
) -> SearchResult:
    """The best plan on this mesh. ``seconds``: stop after so long with the best so far, what is
    priced beside it included. ``recipes``: name -> {path: layouts} of other ways to price; with
    ``compared=False`` none are, nor data parallelism. ``turns``: how often at most to solve again
    where gradients take longer than what they hide behind. ``agreed``: of what each rank has found,
    what all take: where time runs out they may differ. Raises PlanError where no plan fits into the
    memory, naming the least that would do, and where none was found in the time."""
    started = time.perf_counter()
    formulation = formulate(calls, cluster, mesh, options)
    built = time.perf_counter()
    left = _LONGEST if seconds is None else max(0.0, started + seconds - built)
    solution, by = _within(formulation, left, agreed, _TURNS if turns is None else turns)
    solved = time.perf_counter()
    if not solution.feasible:
        raise PlanError(_too_little(formulation, solution))
    plan = read_plan(by, solution)
    ways = {"data parallel": data_parallel(calls, mesh), **(recipes or {})} if compared else {}
    others = compare(formulation, ways, None if seconds is None else started + seconds - solved)
    told = {
        "formulating_seconds": built - started,
        "solving_seconds": solved - built,
        "nodes": len(formulation.problem.costs),
        "log": dict(solution.log),
    }
    left_out = sum(found.left_out for found in formulation.candidates.values())
    if left_out:
        told["left_out_ways"] = f"{left_out} ways to run calls left out, too many for one call"
    return SearchResult(
        dataclasses.replace(plan, alternatives=others, search=told), by, solution.choice
    )


@gc_paused()
def glance(
    calls: Calls, cluster: Cluster, mesh: Placement, options: Options, seconds: float | None = None
) -> float:
    """Return what no plan on this mesh costs less than, by few solutions. inf: none fits into the
    memory."""
    solution, _ = _within(
        formulate(calls, cluster, mesh, options), _LONGEST if seconds is None else seconds, turns=0
    )
    return math.inf if solution.infeasible else float(solution.bound)


def _within(
    formulation: Formulation,
    seconds: float,
    agreed: Callable[[Solution], Solution] = lambda solution: solution,
    turns: int = _TURNS,
) -> Answer:
    """The best choice within the limit of memory, if there is one. First what is best whatever
    memory it takes: mostly there is enough. Where there is not, gathered parameters may be kept for
    backward or gathered again, all of them: the better of the two.
    """
    end, limit = time.perf_counter() + seconds, formulation.problem.usage_limit
    if limit is None:
        return _solved(formulation, seconds, agreed, turns)
    free = dataclasses.replace(
        formulation, problem=dataclasses.replace(formulation.problem, usage_limit=None)
    )
    roomy, by = _solved(free, seconds / 2, agreed, turns, limit)
    if roomy.feasible and by.problem.peak(roomy.choice) <= limit:
        return roomy, by
    ways = (
        [formulation, formulation.under(freed=True)]
        if formulation.calls.training
        else [formulation]
    )
    found: list[Answer] = []
    for k, way in enumerate(ways):
        below = min((s.cost for s, _ in found), default=math.inf)
        found.append(
            _solved(
                way,
                max(0.0, end - time.perf_counter()) / (len(ways) - k),
                agreed,
                turns,
                below=float(below),
            )
        )
    best, by = min(
        found,
        key=lambda answer: (
            not answer[0].feasible,
            answer[0].cost if answer[0].feasible else _least(answer[0]),
        ),
    )
    bound = max(
        roomy.bound, min((s.bound for s, _ in found if not s.infeasible), default=best.bound)
    )
    return dataclasses.replace(
        best, bound=bound, infeasible=all(s.infeasible for s, _ in found)
    ), by


def _least(solution: Solution) -> float:
    """What an answer that does not fit says of the memory that would do; inf: nothing."""
    return math.inf if solution.least_usage is None else float(solution.least_usage[0])


def _solved(
    formulation: Formulation, seconds: float,
    agreed: Callable[[Solution], Solution] = lambda solution: solution, turns: int = _TURNS,
    within: float | None = None, below: float = math.inf, near: float | None = None,
) -> Answer:  # fmt: skip
    """The best choice, and the formulation by which it costs what it does, where the traffic of
    gradients may take longer than the backward pass that it hides behind. ``within``: memory, of a
    choice that takes more nothing needs to be proven. ``below``: only what costs less is looked
    for. ``near``: a gap that is small enough (None: as small as it can be).

    With b and r for the two, what shows is max(b, r) and the part of the other that does not hide.
    The problem has r hide behind b; where that isn't so, the least larger one of its cost and that
    of the problem solved the other way round is looked for (`solver.Larger`; `parts.Weights` of
    what lies between).
    """
    end = time.perf_counter() + seconds
    # Without turns it is a glance: nobody asks what memory would do.
    first = agreed(
        solve(
            formulation.problem,
            seconds=seconds,
            gap=_CLOSE if turns == _TURNS else _NEAR,
            least=turns > 0,
            below=below,
        )
    )
    if not first.feasible or not gradient_traffic_exposed(formulation, first.choice):
        return first, formulation
    turned, large, limit = (
        formulation.turned(),
        len(first.choice) > _LARGE,
        formulation.problem.usage_limit,
    )
    near = near or (_NEAR_OF_LARGE if large else STOP if limit is None else _CLOSE)
    order = [formulation.node_of_call[call] for call in sorted(formulation.node_of_call)]
    most = min(
        turns,
        _TURNS_OF_LARGE
        if large
        else (_WORK if limit is None else _WORK_WITHIN) // len(first.choice),
    )
    proving = not large and near < _NEAR
    larger = MinimaxSolver(
        (formulation.problem, turned.problem),
        order,
        first,
        near,
        most,
        end - time.perf_counter(),
        proving,
        below,
    )
    larger.run(lambda choice: within is None or formulation.problem.peak(choice) <= within)
    best = larger.best
    found = dataclasses.replace(
        first,
        choice=list(best.whole),
        cost=best.cost,
        bound=min(best.cost, larger.bound),
        log=first.log | larger.log,
    )
    found = agreed(found)
    by = max(formulation, turned, key=lambda f: float(f.problem.evaluate(found.choice or ())))
    return dataclasses.replace(found, peak=by.problem.peak(found.choice or ())), by


def binding_formulation(formulation: Formulation, choice: Sequence[int]) -> Formulation:
    """The formulation by which a choice costs what it does: whichever has it cost more, gradients
    hidden behind the backward pass or this behind them."""
    if not hidden(formulation.prices.cluster, formulation.options):
        return formulation
    return max(formulation, formulation.turned(), key=lambda f: float(f.problem.evaluate(choice)))


def gradient_traffic_exposed(formulation: Formulation, choice: Sequence[int]) -> bool:
    """Whether the traffic of gradients takes longer than all of the backward pass, of which some
    would hide it."""
    f = formulation
    if not f.calls.training or not hidden(f.prices.cluster, f.options):
        return False
    listed = Changes(f)
    sums = sum(
        c.backward
        for v in f.calls.parameters
        if v.number in f.node_of_value
        for c in listed.of(v, choice)
        if c.src == short(f.made(v, choice))
    )
    return sums > f.options.computation * sum(
        float(found.backward[choice[f.node_of_call[c]]]) for c, found in f.candidates.items()
    )


def data_parallel(calls: Calls, mesh: Placement) -> dict[str, tuple[Layout, ...]]:
    """Every rank has all parameters and a part of each input."""
    axes = len(mesh.shape)
    whole, parted = (broadcast,) * axes, (split(0),) * axes
    return {
        v.path or v.name: (whole,) if v.state != "input" or not v.shape else (parted,)
        for v in calls.states()
    }


def compare(
    formulation: Formulation,
    ways: Mapping[str, Mapping[str, tuple[Layout, ...]]],
    seconds: float | None = None,
) -> dict[str, Alternative]:
    """What each of some ways to lay given tensors costs at best. ``seconds``: of all together,
    shared evenly by those that are left; None: a few for each."""
    started, found = time.perf_counter(), {}
    for k, (name, fixed) in enumerate(ways.items()):
        left = (
            _COMPARED
            if seconds is None
            else max(0.0, started + seconds - time.perf_counter()) / (len(ways) - k)
        )
        found[name] = price_layouts(formulation, fixed, left)
    return found


def price_layouts(
    formulation: Formulation, fixed: Mapping[str, tuple[Layout, ...]], seconds: float = _COMPARED
) -> Alternative:
    """Return what it costs at best where given tensors lie so, as far as that is found in so many
    ``seconds``. Of a problem that is not small, where gradients take longer than the backward pass
    what shows of them is added to the best if they did not; it is said then that this is at most
    what it costs."""
    calls, mesh, options = formulation.calls, formulation.mesh, formulation.options
    for v in calls.states():
        if v.state == "input" and any(
            not gives_every_rank_data(v.shape, layout, mesh) for layout in fixed.get(v.name, ())
        ):
            return Alternative(
                math.inf, 0, False, f"{v.name} {list(v.shape)} has fewer rows than there are ranks"
            )
    end = time.perf_counter() + seconds
    found = formulation.under(
        memory=None, fixed={**fixed, **options.fixed}, freed=False, summing=0.0
    )
    turns = _TURNS_OF_COMPARED if len(found.problem.costs) <= _FEW else 0
    solution, by = _solved(found, seconds, turns=turns, near=_NEAR)
    if (
        options.memory is not None
        and calls.training
        and solution.feasible
        and by.problem.peak(solution.choice) > options.memory
    ):
        # Where parameters are gathered again in backward it may fit, at its price.
        again, their = _solved(
            found.under(memory=options.memory, freed=True),
            max(0.0, end - time.perf_counter()),
            turns=turns,
            near=_NEAR,
        )
        solution, by = (again, their) if again.feasible else (solution, by)
    if not solution.feasible:
        why = (
            "some call cannot take tensors that lie so"
            if solution.infeasible
            else "nothing was found in the time there was"
        )
        return Alternative(math.inf, 0, False, why)
    memory = int(by.problem.peak(solution.choice))
    fits = options.memory is None or memory <= options.memory
    why = (
        ""
        if fits
        else f"needs {show_bytes(memory)} a rank, there are {show_bytes(options.memory or 0)}"
    )
    if fits and solution.gap > _ROUGH:
        why = "at most: it was not searched to the end"
    return Alternative(float(solution.cost), memory, fits, why)


def _too_little(formulation: Formulation, solution: Solution) -> str:
    limit = formulation.options.memory
    if not solution.infeasible:
        fits = (
            ""
            if limit is None
            else f" that fits into memory={limit} bytes ({show_bytes(limit)}) a rank"
        )
        return (
            f"no plan{fits} was found in the {solution.seconds:.3g} s that the search had; "
            f"whether there is one is open. Give more seconds, or more memory"
        )
    if limit is None:
        return "no way was found to run these calls: some explicit layouts contradict each other"
    least = None if solution.least_usage is None else math.ceil(solution.least_usage[0])
    would = (
        "what would do has not been found in the time"
        if least is None
        else f"the least that would do is {least} bytes ({show_bytes(least)}) a rank"
    )
    kept = sum(v.nbytes for v in formulation.calls.parameters)
    return (
        f"no plan fits into memory={limit} bytes ({show_bytes(limit)}) a rank on a mesh of "
        f"{'x'.join(map(str, formulation.mesh.shape))}: {would}; "
        f"parameters alone are {show_bytes(kept)} in all, with gradients and optimizer state "
        f"{show_bytes(int(kept * (2 + formulation.options.states)))}. Give more memory or more "
        f"ranks, a smaller batch, or an optimizer with less state"
    )
