"""The intra-operator search on one mesh: formulate, solve, and read the plan from the solution.

`auto/api.py`, `auto/apply` and `auto/calibrate` call `search`. `glance` returns a quick bound.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...boxing.moves import Layout, show_bytes
from ...cluster import Cluster
from ...errors import PlanError
from ...sharding.placement import Placement
from ...sharding.sbp import broadcast, split
from ..cost.strategies import gives_every_rank_data
from ..gc_pause import gc_paused
from ..ir.op_graph import Calls
from ..plan.plan import Alternative, Plan
from ..search_limits import LIMITS
from ..solver import STOP, MinimaxSolver, Solution, solve
from .formulate import Formulation, formulate, hidden
from .layout_changes import Changes, short
from .read_solution import read_plan
from .search_options import Options

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
    """A plan, the formulation it solves, and its choice."""

    plan: Plan
    formulation: Formulation
    choice: Sequence[int]


Answer = tuple[Solution, Formulation]  # the formulation is the one that gives the solution's cost


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
    """Return the best plan on this mesh.

    ``seconds`` limits the time, pricing of alternatives included; the result is then the best plan
    so far. ``recipes`` maps names to {path: layouts} of alternatives to price. With
    ``compared=False`` no alternative is priced, not even data parallelism. ``turns`` limits how
    often the problem is solved again where gradients take longer than what they hide behind.
    ``agreed`` maps each rank's solution to the one that all ranks adopt, because solutions may
    differ where time runs out.

    Raises PlanError where no plan fits into the memory, with the minimum memory that would do, and
    where no plan was found in time.
    """
    started = time.perf_counter()
    formulation = formulate(calls, cluster, mesh, options)
    built = time.perf_counter()
    left = LIMITS.solver_seconds if seconds is None else max(0.0, started + seconds - built)
    solution, by = _solve_within_memory(
        formulation, left, agreed, LIMITS.turns if turns is None else turns
    )
    solved = time.perf_counter()
    if not solution.feasible:
        raise PlanError(_no_plan_message(formulation, solution))
    plan = read_plan(by, solution)
    ways = {"data parallel": data_parallel(calls, mesh), **(recipes or {})} if compared else {}
    others = compare(formulation, ways, None if seconds is None else started + seconds - solved)
    search_log = {
        "formulating_seconds": built - started,
        "solving_seconds": solved - built,
        "nodes": len(formulation.problem.costs),
        "log": dict(solution.log),
    }
    left_out = sum(found.left_out for found in formulation.candidates.values())
    if left_out:
        search_log["left_out_ways"] = f"{left_out} strategies left out, too many for one call"
    return SearchResult(
        dataclasses.replace(plan, alternatives=others, search=search_log), by, solution.choice
    )


@gc_paused()
def glance(
    calls: Calls, cluster: Cluster, mesh: Placement, options: Options, seconds: float | None = None
) -> float:
    """Return a lower bound of the cost of all plans on this mesh, in seconds, from few solutions.

    The result is inf where no plan fits into the memory.
    """
    solution, _ = _solve_within_memory(
        formulate(calls, cluster, mesh, options),
        LIMITS.solver_seconds if seconds is None else seconds,
        turns=0,
    )
    return math.inf if solution.infeasible else float(solution.bound)


def _solve_within_memory(
    formulation: Formulation,
    seconds: float,
    agreed: Callable[[Solution], Solution] = lambda solution: solution,
    turns: int = LIMITS.turns,
) -> Answer:
    """Return the best choice within the memory limit, if there is one.

    The problem is first solved without the limit: mostly there is enough memory. Where there is
    not, gathered parameters may all be saved for backward, or all be gathered again. The result is
    the better of the two.
    """
    end, limit = time.perf_counter() + seconds, formulation.problem.usage_limit
    if limit is None:
        return _solve_formulation(formulation, seconds, agreed, turns)
    free = dataclasses.replace(
        formulation, problem=dataclasses.replace(formulation.problem, usage_limit=None)
    )
    roomy, by = _solve_formulation(free, seconds / 2, agreed, turns, limit)
    if roomy.feasible and by.problem.peak(roomy.choice) <= limit:
        return roomy, by
    ways = (
        [formulation, formulation.under(freed=True)]
        if formulation.calls.training
        else [formulation]
    )
    answers: list[Answer] = []
    for k, way in enumerate(ways):
        below = min((s.cost for s, _ in answers), default=math.inf)
        answers.append(
            _solve_formulation(
                way,
                max(0.0, end - time.perf_counter()) / (len(ways) - k),
                agreed,
                turns,
                below=float(below),
            )
        )
    best, by = min(
        answers,
        key=lambda answer: (
            not answer[0].feasible,
            answer[0].cost if answer[0].feasible else _min_feasible_memory(answer[0]),
        ),
    )
    bound = max(
        roomy.bound, min((s.bound for s, _ in answers if not s.infeasible), default=best.bound)
    )
    return dataclasses.replace(
        best, bound=bound, infeasible=all(s.infeasible for s, _ in answers)
    ), by


def _min_feasible_memory(solution: Solution) -> float:
    """Return the memory that would be feasible by an infeasible answer, or inf if it is unknown."""
    return math.inf if solution.least_usage is None else float(solution.least_usage[0])


def _solve_formulation(
    formulation: Formulation, seconds: float,
    agreed: Callable[[Solution], Solution] = lambda solution: solution, turns: int = LIMITS.turns,
    within: float | None = None, below: float = math.inf, near: float | None = None,
) -> Answer:  # fmt: skip
    """Return the best choice, and the formulation that gives its true cost.

    ``within`` is a memory limit; nothing needs to be proven for a choice that exceeds it. With
    ``below``, only choices that cost less are searched for. ``near`` is a gap that is small enough
    (None: as small as possible).

    Let b be the backward pass and r the gradient traffic that may hide behind it, in seconds. The
    exposed time is max(b, r) plus the part of the other one that does not hide. The problem hides r
    behind b. Where r is longer, the solver minimises the larger of this problem's cost and the
    turned problem's cost (`solver.MinimaxSolver`). `inter_op.segment_cost.Weights` describes the
    weights in between.
    """
    end = time.perf_counter() + seconds
    # Without turns this is a glance, which needs no feasible memory limit.
    first = agreed(
        solve(
            formulation.problem,
            seconds=seconds,
            gap=LIMITS.gap if turns == LIMITS.turns else LIMITS.alternative_gap,
            least=turns > 0,
            below=below,
        )
    )
    if not first.feasible or not gradient_traffic_exposed(formulation, first.choice):
        return first, formulation
    turned, large, limit = (
        formulation.turned(),
        len(first.choice) > LIMITS.large_problem,
        formulation.problem.usage_limit,
    )
    near = near or (LIMITS.gap_of_large if large else STOP if limit is None else LIMITS.gap)
    order = [formulation.node_of_call[call] for call in sorted(formulation.node_of_call)]
    most = min(
        turns,
        LIMITS.turns_of_large
        if large
        else (LIMITS.turn_nodes if limit is None else LIMITS.turn_nodes_with_memory)
        // len(first.choice),
    )
    proving = not large and near < LIMITS.alternative_gap
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
    solution = dataclasses.replace(
        first,
        choice=list(best.whole),
        cost=best.cost,
        bound=min(best.cost, larger.bound),
        log=first.log | larger.log,
    )
    solution = agreed(solution)
    by = max(formulation, turned, key=lambda f: float(f.problem.evaluate(solution.choice or ())))
    return dataclasses.replace(solution, peak=by.problem.peak(solution.choice or ())), by


def binding_formulation(formulation: Formulation, choice: Sequence[int]) -> Formulation:
    """Return the formulation that gives the true cost of `choice`.

    The true cost is the larger of "gradient traffic hides behind backward" and the reverse.
    """
    if not hidden(formulation.prices.cluster, formulation.options):
        return formulation
    return max(formulation, formulation.turned(), key=lambda f: float(f.problem.evaluate(choice)))


def gradient_traffic_exposed(formulation: Formulation, choice: Sequence[int]) -> bool:
    """Return True if the gradient traffic takes longer than the whole backward pass."""
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
    """Return the data-parallel layouts: all parameters on every rank, inputs split in dim 0."""
    axes = len(mesh.shape)
    whole, parted = (broadcast,) * axes, (split(0),) * axes
    return {
        v.label: (whole,) if v.state != "input" or not v.shape else (parted,)
        for v in calls.states()
    }


def compare(
    formulation: Formulation,
    ways: Mapping[str, Mapping[str, tuple[Layout, ...]]],
    seconds: float | None = None,
) -> dict[str, Alternative]:
    """Return the minimum cost of each of several layouts of the given tensors.

    ``seconds`` limits the total time, shared evenly by the remaining ones. None means a few seconds
    for each.
    """
    started, alternatives = time.perf_counter(), {}
    for k, (name, fixed) in enumerate(ways.items()):
        left = (
            LIMITS.alternative_seconds
            if seconds is None
            else max(0.0, started + seconds - time.perf_counter()) / (len(ways) - k)
        )
        alternatives[name] = price_layouts(formulation, fixed, left)
    return alternatives


def price_layouts(
    formulation: Formulation,
    fixed: Mapping[str, tuple[Layout, ...]],
    seconds: float = LIMITS.alternative_seconds,
) -> Alternative:
    """Return the minimum cost with given tensors in these layouts, as found within ``seconds``.

    In a large problem, gradients may take longer than the backward pass. The exposed part of them
    is then added to the optimum that ignores it. The result then says that its cost is an upper
    bound.
    """
    calls, mesh, options = formulation.calls, formulation.mesh, formulation.options
    for v in calls.states():
        if v.state == "input" and any(
            not gives_every_rank_data(v.shape, layout, mesh) for layout in fixed.get(v.name, ())
        ):
            return Alternative(
                math.inf, 0, False, f"{v.name} {list(v.shape)} has fewer rows than there are ranks"
            )
    end = time.perf_counter() + seconds
    fixed_formulation = formulation.under(
        memory=None, fixed={**fixed, **options.fixed}, freed=False, summing=0.0
    )
    turns = (
        LIMITS.alternative_turns
        if len(fixed_formulation.problem.costs) <= LIMITS.alternative_nodes
        else 0
    )
    solution, by = _solve_formulation(
        fixed_formulation, seconds, turns=turns, near=LIMITS.alternative_gap
    )
    if (
        options.memory is not None
        and calls.training
        and solution.feasible
        and by.problem.peak(solution.choice) > options.memory
    ):
        # The plan may fit if parameters are gathered again in backward, at the price of that.
        again, their = _solve_formulation(
            fixed_formulation.under(memory=options.memory, freed=True),
            max(0.0, end - time.perf_counter()),
            turns=turns,
            near=LIMITS.alternative_gap,
        )
        solution, by = (again, their) if again.feasible else (solution, by)
    if not solution.feasible:
        why = (
            "some call has no strategy with these layouts"
            if solution.infeasible
            else "no plan was found in the given time"
        )
        return Alternative(math.inf, 0, False, why)
    memory = int(by.problem.peak(solution.choice))
    fits = options.memory is None or memory <= options.memory
    why = (
        ""
        if fits
        else f"needs {show_bytes(memory)} a rank, there are {show_bytes(options.memory or 0)}"
    )
    if fits and solution.gap > LIMITS.alternative_difference:
        why = "at most: it was not searched to the end"
    return Alternative(float(solution.cost), memory, fits, why)


def _no_plan_message(formulation: Formulation, solution: Solution) -> str:
    limit = formulation.options.memory
    if not solution.infeasible:
        fits = (
            ""
            if limit is None
            else f" that fits into memory={limit} bytes ({show_bytes(limit)}) a rank"
        )
        return (
            f"no plan{fits} was found in the {solution.seconds:.3g} s that the search had; a plan "
            "may still exist. Give more seconds, or more memory"
        )
    if limit is None:
        return "these calls have no plan: some explicit layouts contradict each other"
    least = None if solution.least_usage is None else math.ceil(solution.least_usage[0])
    would = (
        "the minimum that would do was not found in the given time"
        if least is None
        else f"the minimum that would do is {least} bytes ({show_bytes(least)}) a rank"
    )
    parameter_bytes = sum(v.nbytes for v in formulation.calls.parameters)
    state_bytes = int(parameter_bytes * (2 + formulation.options.optimizer_state_ratio))
    return (
        f"no plan fits into memory={limit} bytes ({show_bytes(limit)}) a rank on a mesh of "
        f"{'x'.join(map(str, formulation.mesh.shape))}: {would}; "
        f"parameters alone are {show_bytes(parameter_bytes)} in all, with gradients and optimizer "
        f"state {show_bytes(state_bytes)}. "
        f"Give more memory or more ranks, a smaller batch, or an optimizer with less state"
    )
