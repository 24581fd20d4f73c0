"""The main search, from a problem to a choice with a proven bound.

Its stages are presolve, variable elimination, dual ascent with memory prices, reduced-cost fixing,
and an integer program or branching for what is left. `auto/intra_op`, `auto/calibrate` and
`minimax` call `solve`.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial

import numpy as np

from .branching import halves
from .dual_ascent import Ascent
from .flat_arrays import FlatProblem
from .incumbent import SearchState
from .memory_presolve import tighten
from .min_marginals import marginals
from .min_memory import minimum_memory
from .mip import close, highspy
from .neighborhood_search import NeighborhoodSearch
from .presolve import PresolvedProblem, core_of, drop, presolve
from .problem import Array, Problem
from .reduced_cost_fixing import ExactMarginals, Reparametrization
from .solution import Solution
from .variable_elimination import Elimination

#: The default time limit, in seconds.
DEFAULT_SECONDS = 3600.0
#: Rounds of dual ascent between attempts at reduced-cost fixing.
ROUNDS_PER_CHUNK = 10
#: MOVES is the number of neighbourhood moves after each chunk of rounds, for cores of at least
#: SMALL nodes. SCALES are the memory prices of the moves, relative to the best prices.
MOVES, SMALL, SCALES = 3, 20, (1.0, 0.7, 1.0, 1.4)
#: The maximum number of table entries of an integer program.
MAX_PROGRAM_ENTRIES = 400_000
#: The maximum work, in table entries, of an elimination without the memory limit. It tests whether
#: the limit binds.
MAX_UNLIMITED_WORK = 3e8
#: The maximum work of an elimination that runs before anything else is tried. Messages mostly show
#: that few of the entries matter.
MAX_FIRST_WORK = 1e8
#: The maximum number of table entries that an elimination may hold at once.
MAX_HELD_ENTRIES = 2e8
#: Elimination is still tried after the deadline for at most this many nodes.
MAX_LATE_NODES = 1000
#: The maximum time in seconds to find which memory limit is feasible.
FEASIBILITY_SECONDS = 30.0
#: Half a second of messages is worth trying for at most this many table entries.
MAX_MESSAGE_ENTRIES = 300_000
#: Passes of messages before costs are reparametrized along them, where no messages were passed yet.
WARMUP_PASSES = 8
#: Problems with at most this many nodes are first solved without their memory limit, which may not
#: bind.
MAX_UNLIMITED_NODES = 6000


def solve(
    problem: Problem,
    seconds: float | None = None,
    seed: int = 0,
    threads: int = 1,
    gap: float = 0.0,
    least: bool = True,
    below: float = math.inf,
) -> Solution:
    """Return the best choice for a problem, with a lower bound on every choice's cost.

    `seconds` limits the time; the answer is then the best choice so far. None means until the proof
    is done, at most an hour. The same problem gives the same answer unless time cuts the search
    short. The search ends as soon as (cost - bound) / |cost| is at most `gap`. `seed` seeds the
    random draws. `threads` is the number of threads HiGHS may use. `least` asks for a feasible
    memory limit where no choice fits (`Solution.least_usage`).

    With `below`, only choices that cost less are searched for. Where none is found, `choice` is
    None. `bound` is then `below` if it is proven that there is none, and at most `below` otherwise.
    """
    began = time.monotonic()
    search = SearchState(
        problem,
        began,
        began + (DEFAULT_SECONDS if seconds is None else seconds),
        seed,
        threads,
        gap=gap,
        below=below,
    )
    if (
        problem.usage_limit is None
        or problem.usage_limit <= 0
        or len(problem.costs) > MAX_UNLIMITED_NODES
        or not unlimited(search)
    ):
        core = tighten(
            core_of(problem),
            max(
                search.deadline, began + (1.0 if len(problem.costs) <= MAX_UNLIMITED_NODES else 0.0)
            ),
        )
        search.log |= {
            "nodes": len(problem.costs),
            "left": len(core.live),
            "reduced_seconds": round(time.monotonic() - began, 3),
        }
        search.reduced(core)
        search.exhausted = search_core(search, core)
    if (
        least
        and search.choice is None
        and search.exhausted
        and below == math.inf
        and problem.usage_limit is not None
    ):
        search.least_usage = minimum_memory(
            problem,
            partial(feasible, threads=threads),
            min(search.deadline, time.monotonic() + FEASIBILITY_SECONDS),
        )
    return search.answer()


def unlimited(search: SearchState) -> bool:
    """Solve the problem without its memory limit, where one elimination is enough.

    Returns True if the search is finished: the choice stays within the limit, or every choice is
    forbidden.
    """
    core = presolve(core_of(replace(search.problem, usage_limit=None)), search.deadline)
    if not core.feasible:
        return search.exhaust()
    elimination = plan_elimination(search, core)
    if (
        not elimination.fits
        or elimination.total > MAX_HELD_ENTRIES
        or elimination.work > MAX_UNLIMITED_WORK
    ):
        return False
    eliminated(search, core, elimination)
    if search.choice is None:
        return False
    search.log |= {
        "nodes": len(search.problem.costs),
        "left": len(core.live),
        "limit": "does not bind",
    }
    search.reduced(core)
    return search.exhaust()


def feasible(problem: Problem, seconds: float, threads: int) -> Solution:
    """Return any choice that fits, or the proof that there is none."""
    search = SearchState(
        problem,
        time.monotonic(),
        time.monotonic() + seconds,
        0,
        threads,
        first=problem.usage_limit is not None,
    )
    search.exhausted = search_core(search, tighten(core_of(problem), search.deadline))
    return search.answer()


def search_core(search: SearchState, core: PresolvedProblem, price: Array | None = None) -> bool:
    """Search this core within the time left.

    Returns True if it is proven that the core contains nothing better than the incumbent
    afterwards.
    """
    while core.feasible:
        if not core.live:
            search.offer(core, (), np.zeros(0, dtype=np.int64))
            return True
        elimination = (
            None
            if search.late and len(core.live) > MAX_LATE_NODES
            else plan_elimination(search, core)
        )
        fits = (
            elimination is not None
            and not len(core.room)
            and elimination.fits
            and elimination.total <= MAX_HELD_ENTRIES
            and elimination.work <= search.affordable
        )
        exact = elimination if fits else None
        if exact is not None and exact.work <= MAX_FIRST_WORK:
            eliminated(search, core, exact)
            return True
        flat = FlatProblem(core, float(search.cost))
        if search.late and search.choice is None:
            quick_feasible(search, core, flat)
        if search.late:
            return False
        ascent = Ascent(flat, price, float(search.cost), elimination)
        outcome = ascend(search, core, flat, ascent, exact is not None)
        if outcome == "stuck" and exact is not None:
            eliminated(search, core, exact)
            return True
        if outcome != "smaller":
            return outcome == "done" or (outcome == "stuck" and finish(search, core, flat, ascent))
        moments = core.moments
        tighten(core, search.deadline)
        price = carried(ascent.best_price, moments, core.moments)
    return True


def quick_feasible(search: SearchState, core: PresolvedProblem, flat: FlatProblem) -> None:
    """Offer a feasible choice within half a second more.

    It is for problems whose reading and presolve used up all the time.
    """
    deadline = time.monotonic() + 0.5
    if len(flat.table) > MAX_MESSAGE_ENTRIES:
        search.offer_something(core, flat, deadline)
        return
    ascent = Ascent(flat)
    ascent.run(deadline, 3 * ROUNDS_PER_CHUNK, polish_every=3)
    if ascent.choice is not None:
        search.offer(core, flat.nodes, ascent.choice)
    search.proves(ascent.bound, len(flat.table))


def plan_elimination(search: SearchState, core: PresolvedProblem) -> Elimination:
    """Return an elimination order for the core, and log its width."""
    elimination = Elimination.of(core)
    if elimination.fits:
        search.widths(elimination.width, elimination.largest)
    search.log.setdefault("elimination_leaves", len(elimination.left))
    return elimination


def eliminated(search: SearchState, core: PresolvedProblem, elimination: Elimination) -> None:
    """Solve a core without memory limit and with a narrow graph by elimination alone."""
    nodes = sorted(core.live)
    value, choice = elimination.run([core.costs[i] for i in nodes])
    if choice or not nodes:
        search.offer(core, nodes, np.array([choice[n] for n in range(len(nodes))], dtype=np.int64))
        search.proves(core.constant + value, len(search.problem.costs) + len(search.problem.tables))


def ascend(
    search: SearchState, core: PresolvedProblem, flat: FlatProblem, ascent: Ascent, exact: bool
) -> str:
    """Raise the bound of a core.

    Returns "done" when the core contains nothing better, "smaller" when much of it was forbidden,
    "stuck", or "late". `exact` says that an elimination comes next.
    """
    entries = len(flat.table) + len(flat.cost)
    history, blocks, longest = [-np.inf], None, 0.0
    while not search.late:
        goal = min(search.goal, flat.most)
        before = ascent.rounds
        ascent.run(search.deadline, ROUNDS_PER_CHUNK, goal, gap=search.near)
        search.log["rounds"] = int(str(search.log.get("rounds", 0))) + ascent.rounds - before
        if ascent.choice is not None and ascent.value < search.cost:
            search.offer(core, flat.nodes, ascent.choice)
        search.proves(ascent.bound, len(flat.table))
        if (
            ascent.choice is not None
            and len(flat.nodes) >= SMALL
            and ascent.bound <= search.goal
            and not search.late
        ):
            blocks = blocks or NeighborhoodSearch(flat, ascent.local, search.seed)
            for turn in range(MOVES):
                start = time.monotonic()
                if start + 1.5 * longest < search.deadline and not search.late:
                    price = ascent.best_price * SCALES[(len(history) + turn) % len(SCALES)]
                    ascent.offer(blocks.improve(ascent.choice, price, search.deadline))
                    longest = max(longest, time.monotonic() - start)
            if ascent.value < search.cost:
                search.offer(core, flat.nodes, ascent.choice)
        if ascent.bound > min(search.goal, flat.most):
            return "done"
        history.append(ascent.bound)
        rising = ascent.bound - history[max(0, len(history) - 4)] > 0.02 * (
            search.cost - ascent.bound
        )
        if search.cost < np.inf and (not rising or len(history) % 4 == 3):
            known = dear(flat, ascent, search.problem.integral)
            share = known.share(search.goal)
            if share > 0.3 or (share > 0.05 and not rising):
                known.apply(core, search.goal)
                search.log["forbidden"] = [
                    *search.log.get("forbidden", []),
                    (entries, round(share, 3)),
                ]  # type: ignore[misc]
                return "smaller"
        if (
            not rising
            and len(history) > (2 if exact else 4)
            and (exact or entries < MAX_PROGRAM_ENTRIES)
        ):
            return "stuck"
    return "late"


def dear(flat: FlatProblem, ascent: Ascent, whole: bool) -> ExactMarginals | Reparametrization:
    """Return lower bounds of the cost with each strategy and each pair, at the best prices.

    They come from elimination, or from costs reparametrized along the messages. `whole` keeps
    integer costs integers.
    """
    priced = flat.cost + flat.prices(ascent.best_price)
    min_marginals = (
        None
        if ascent.elimination is None
        else marginals(ascent.elimination, np.split(priced, flat.first[1:-1]))
    )
    if min_marginals is not None:
        return ExactMarginals(flat, ascent.best_price, min_marginals)
    # Messages are not updated where elimination replaces them.
    for _ in range(WARMUP_PASSES if ascent.elimination is not None else 0):
        ascent.messages.sweep(priced, True)
        ascent.messages.sweep(priced, False)
    ascent.messages.sweep(priced, True)
    ahead = Reparametrization(flat, ascent.messages, ascent.best_price, True, whole)
    ascent.messages.sweep(priced, False)
    known = Reparametrization(flat, ascent.messages, ascent.best_price, False, whole)
    known.other = ahead.bound + ahead.extra
    return known


def carried(price: Array, before: Array, after: Array) -> Array:
    """Return the prices for the moments that are left.

    A dropped moment passes its price to the nearest remaining one.
    """
    if not len(after):
        return np.zeros(0)
    right = np.clip(np.searchsorted(after, before), 0, len(after) - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.where(np.abs(after[left] - before) < np.abs(after[right] - before), left, right)
    return np.bincount(nearest, price, len(after))


def finish(search: SearchState, core: PresolvedProblem, flat: FlatProblem, ascent: Ascent) -> bool:
    """Close the gap that the messages leave, by an integer program or by branching.

    It branches where HiGHS is not installed. Returns True if it is proven that the core contains
    nothing better.
    """
    if highspy() is None:
        search.log["highspy"] = "not installed: branching instead"
        return divide(search, core, ascent)
    gap = (
        max(float(search.cost) - ascent.bound, 1e-9 * abs(ascent.bound))
        if search.cost < np.inf
        else abs(ascent.bound) + 1.0
    )
    outcome = close(flat, ascent.best_price, gap, search.deadline, search.threads, search.seed)
    search.log["program"] = [
        *search.log.get("program", []),
        (len(flat.nodes), len(flat.table), outcome.done),
    ]  # type: ignore[misc]
    if outcome.choice is not None:
        search.offer(core, flat.nodes, outcome.choice)
    search.proves(outcome.bound, len(flat.table))
    if outcome.done and outcome.choice is not None and flat.value(outcome.choice) < search.goal:
        # The choice was not accepted. It exceeds the memory limit by less than HiGHS's tolerance.
        return divide(search, core, ascent)
    return outcome.done


def divide(search: SearchState, core: PresolvedProblem, ascent: Ascent) -> bool:
    """Branch on the strategies of one node in two parts, the better part first.

    Returns True if it is proven that neither part contains anything better.
    """
    node, parts = halves(core, ascent)
    proven = True
    for kept in parts:
        if search.late:
            return False
        part = core.copy()
        drop(part, node, kept)
        tighten(part, search.deadline)
        moments = core.moments
        proven &= search_core(search, part, carried(ascent.best_price, moments, part.moments))
    return proven
