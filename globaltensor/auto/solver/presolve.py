"""Presolve: exact reductions to a smaller problem with the same optimum.

Forbidden, constant and dominated strategies are removed, and so are nodes that follow from a
neighbour. Postsolve steps restore them. Every step is exact under the memory limit. A strategy is
only dominated by one that uses no more memory at any time. A node is only eliminated where its
usage does not depend on its strategy. `solve` and `memory_presolve` call `presolve`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .array_interning import Shared
from .problem import FORBIDDEN, Array, Problem

#: The maximum number of entries over which dominance compares K x K strategies. Also the maximum
#: work of eliminating a node between two others.
MAX_COMPARED = 4_000_000
#: The maximum work of eliminating such a node where there is no memory limit. Variable elimination
#: would do the same work later.
MAX_LINKED = 30_000_000
#: The factor by which tables may grow where a node is merged or eliminated and its neighbours stay.
GROWTH = 3.0
#: A node with more neighbours than this is merged regardless of table growth.
MAX_NEIGHBOURS = 100
#: Table entries that dominance compares in one vectorised step, unless one strategy alone has more.
CHUNK_ENTRIES = 1 << 16
ZERO_TABLE = np.array(0)


@dataclass
class Uses:
    """The memory usages of one node: starts and ends (n), amounts (n, strategies)."""

    starts: Array
    ends: Array
    amounts: Array

    def pick(self, kept: Array, shared: Shared) -> Uses:
        return Uses(self.starts, self.ends, shared(columns, self.amounts, kept))


class Postsolve(NamedTuple):
    """A step that restores a node's strategy from later choices.

    The strategy is `table` indexed by the strategies of the nodes `near`. Where strategies were
    dropped, `near` is the node itself.
    """

    node: int
    near: tuple[int, ...]
    table: Array


@dataclass
class PresolvedProblem:
    """A problem under reduction, in float64, with inf for forbidden entries.

    The `live` nodes remain. The postsolve `steps` lead back to the full problem.

    Costs may be complex numbers. They then represent two problems at once, one in the real and one
    in the imaginary parts. A reduction is then no loss for either problem. It is therefore no loss
    for any weighted sum of both costs, nor for their maximum.
    """

    costs: list[Array]
    # near[i][j] = table (strategies of i, strategies of j); near[j][i] is its transpose.
    near: list[dict[int, Array]]
    uses: list[list[Uses]]
    # The memory left at each moment for what is still to be chosen.
    room: Array = field(default_factory=lambda: np.zeros(0))
    # The original numbers of these moments.
    moments: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    constant: Any = 0.0  # real or complex, like the costs
    steps: list[Postsolve] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    feasible: bool = True
    shared: Shared = field(default_factory=Shared)

    def copy(self) -> PresolvedProblem:
        """Return a core that can be reduced further independently.

        Arrays are shared, because reductions replace them and do not write to them. Only the room
        is copied.
        """
        near = [dict(around) for around in self.near]
        uses = [list(blocks) for blocks in self.uses]
        return PresolvedProblem(
            list(self.costs),
            near,
            uses,
            self.room.copy(),
            self.moments,
            self.constant,
            list(self.steps),
            set(self.live),
            self.feasible,
            self.shared,
        )

    def expand(self, choice: dict[int, int]) -> list[int]:
        """Return the choice for every node of the full problem, from one of the live nodes."""
        found = dict(choice)
        for step in reversed(self.steps):
            found[step.node] = int(step.table[tuple(found[j] for j in step.near)])
        return [found[i] for i in range(len(self.costs))]


def as_floats(costs: Array) -> Array:
    if costs.dtype.kind in "fc":
        return costs
    return np.where(costs >= FORBIDDEN, np.inf, costs.astype(np.float64))


def core_of(problem: Problem) -> PresolvedProblem:
    """Return the problem in the solver's form, with nothing reduced yet.

    Parallel edges are added up. Time is counted in the moments at which usage changes.
    """
    limited = problem.usage_limit is not None
    rows = [
        [use for use in uses if use.start is None or use.end is None or use.start < use.end]
        if limited
        else []
        for uses in problem.usages
    ]
    moments = sorted(
        {
            moment
            for uses in rows
            for use in uses
            for moment in (use.start, use.end)
            if moment is not None
        }
    ) or [0]
    place: dict[int | None, int] = {moment: n for n, moment in enumerate(moments)}
    last = max(len(moments) - 1, 1)
    shared = Shared()
    uses: list[list[Uses]] = []
    for listed in rows:
        block = Uses(
            np.array(
                [0 if use.start is None else place[use.start] for use in listed], dtype=np.int64
            ),
            np.array(
                [last if use.start is None else place[use.end] for use in listed], dtype=np.int64
            ),
            shared.same(np.array([use.amounts for use in listed], dtype=np.float64)),
        )
        uses.append([block] if listed else [])
    near: list[dict[int, Array]] = [{} for _ in problem.costs]
    converted: dict[int, Array] = {}
    for (i, j), table in zip(problem.edges, problem.tables, strict=True):
        floats = converted.get(id(table))
        if floats is None:
            floats = converted[id(table)] = shared.same(as_floats(table))
        join(near, i, j, floats, shared)
    room = np.full(last if any(rows) else 0, float(problem.ceiling or 0))
    costs = [shared.same(as_floats(costs)) for costs in problem.costs]
    return PresolvedProblem(
        costs,
        near,
        uses,
        room,
        np.arange(len(room)),
        live=set(range(len(problem.costs))),
        shared=shared,
    )


def join(near: list[dict[int, Array]], i: int, j: int, table: Array, shared: Shared) -> None:
    """Add a table to the edge (i, j)."""
    if j in near[i]:
        table = shared(np.add, near[i][j], table)
    near[i][j] = table
    near[j][i] = shared(np.transpose, table)


def presolve(
    core: PresolvedProblem, deadline: float = np.inf, nodes: dict[int, None] | None = None
) -> PresolvedProblem:
    """Reduce a core in place until nothing changes or time is up, and return it.

    Sets `feasible` to False where every choice takes a forbidden entry. `nodes` are the nodes that
    changed since the last reduction; None means all nodes.
    """
    if nodes is None:
        # An ordered set of the nodes whose costs, usages or edges are new.
        nodes = dict.fromkeys(sorted(core.live))
    # The edges whose tables are new.
    edges = {(min(i, j), max(i, j)): None for i in nodes for j in core.near[i]}
    while (edges or nodes) and time.monotonic() < deadline:
        changed = consistent(core, edges, nodes)
        if not core.feasible:
            break
        for i in [i for i in changed if i in core.live and len(core.costs[i]) == 1]:
            changed |= dict.fromkeys(fix(core, i))
        nodes |= changed
        edges = merged(core, edges, nodes)
        if edges:
            continue
        for i in list(nodes):
            if time.monotonic() >= deadline:
                break
            if i in core.live:
                constant_usage(core, i)
                if not core.uses[i] and len(core.near[i]) <= 2 and cheap(core, i):
                    around = eliminate(core, i)
                    if around is None:
                        continue
                    nodes |= dict.fromkeys(around)
                    if len(around) == 2:
                        edges[min(around), max(around)] = None
        looked, nodes = nodes, {}
        for i in looked:
            if time.monotonic() >= deadline:
                break
            kept = undominated(core, i) if i in core.live else None
            if kept is not None:
                drop(core, i, kept)
                nodes |= dict.fromkeys([i, *core.near[i]])
                edges |= {(min(i, j), max(i, j)): None for j in core.near[i]}
    return core


def consistent(
    core: PresolvedProblem, edges: dict[tuple[int, int], None], nodes: dict[int, None]
) -> dict[int, None]:
    """Drop strategies that are forbidden or compatible with no strategy of some neighbour.

    Returns the nodes touched, and adds to `edges` the edges whose tables shrink.
    """
    fresh, touched = list(edges), dict(nodes)
    shared = core.shared
    possible: dict[int, Array] = {
        i: shared(np.isfinite, core.costs[i]) for i in nodes if i in core.live
    }
    while fresh or possible:
        for i, j in fresh:
            table = core.near[i].get(j)
            if table is None:
                continue
            for end, goes in zip((i, j), shared(finite, table), strict=True):
                if goes is not None:
                    possible[end] = shared(
                        np.logical_and,
                        possible[end] if end in possible else shared(np.isfinite, core.costs[end]),
                        goes,
                    )
        fresh = []
        for i, goes in possible.items():
            left = shared(some, goes)
            if left is not None:
                if not len(left):
                    core.feasible = False
                    return touched
                drop(core, i, left)
                touched[i] = None
                fresh += [(min(i, j), max(i, j)) for j in core.near[i]]
        possible = {}
        fresh = list(dict.fromkeys(fresh))
        edges |= dict.fromkeys(fresh)
    return touched


def finite(table: Array) -> tuple[Array | None, Array | None]:
    """Return for each row, and for each column, whether it has a finite entry.

    A result is None where all rows, or all columns, have one.
    """
    mask = np.isfinite(table)
    rows, across = np.asarray(mask.any(1)), np.asarray(mask.any(0))
    return None if rows.all() else rows, None if across.all() else across


def some(goes: Array) -> Array | None:
    """Return the indices of the true entries, or None where all are true."""
    return None if goes.all() else np.flatnonzero(goes)


def merged(
    core: PresolvedProblem, edges: dict[tuple[int, int], None], nodes: dict[int, None]
) -> dict[tuple[int, int], None]:
    """Merge nodes that follow from a neighbour along these edges, and return the new edges.

    Adds the nodes touched to `nodes`.
    """
    new: dict[tuple[int, int], None] = {}
    for i, j in edges:
        table = core.near[i].get(j)
        if table is None:
            continue
        leaders = [
            (a, b)
            for a, b in ((i, j), (j, i))
            if core.shared(follows, core.near[a][b]) and slim(core, b, a)
        ]
        if leaders:
            leader, follower = min(leaders, key=lambda pair: len(core.near[pair[1]]))
            around = follow(core, follower, leader)
            nodes |= dict.fromkeys([leader, *around])
            new |= {(min(leader, n), max(leader, n)): None for n in around}
    return new


def drop(core: PresolvedProblem, i: int, strategies: Array) -> None:
    """Keep only these strategies of node i."""
    shared = core.shared
    core.costs[i] = shared(rows, core.costs[i], strategies)
    core.uses[i] = [block.pick(strategies, shared) for block in core.uses[i]]
    for j, table in core.near[i].items():
        core.near[i][j] = smaller = shared(rows, table, strategies)
        core.near[j][i] = shared(np.transpose, smaller)
    core.steps.append(Postsolve(i, (i,), strategies))


def rows(table: Array, kept: Array) -> Array:
    return np.ascontiguousarray(table[kept])


def columns(table: Array, kept: Array) -> Array:
    return np.ascontiguousarray(table[:, kept])


def detach(core: PresolvedProblem, i: int) -> list[int]:
    around = list(core.near[i])
    for j in around:
        del core.near[j][i]
    core.near[i] = {}
    core.live.discard(i)
    return around


def fix(core: PresolvedProblem, i: int) -> list[int]:
    """Remove a node with one strategy, and return its neighbours."""
    core.constant += core.costs[i][0].item()
    for block in core.uses[i]:
        occupy(core, block, block.amounts[:, 0])
    core.uses[i] = []
    for j, table in core.near[i].items():
        core.costs[j] = core.shared(with_first, core.costs[j], table)
    core.steps.append(Postsolve(i, (), ZERO_TABLE))
    return detach(core, i)


def with_first(costs: Array, table: Array) -> Array:
    return np.asarray(costs + table[0])


def follows(table: Array) -> bool:
    """Return True if each row (strategy of the leader) allows exactly one column."""
    return table.shape[0] == np.count_nonzero(np.isfinite(table)) and bool(
        np.isfinite(table).any(1).all()
    )


def slim(core: PresolvedProblem, j: int, i: int) -> bool:
    """Return True if merging node j into node i does not make tables grow much.

    The edges of j get one row per strategy of i.
    """
    size_j, size_i = len(core.costs[j]), len(core.costs[i])
    if size_i <= size_j or len(core.near[j]) > MAX_NEIGHBOURS:
        return True
    return (size_i - size_j) * sum(
        len(core.costs[n]) for n in core.near[j] if n != i and n not in core.near[i]
    ) <= GROWTH * size_i * size_j


def follow(core: PresolvedProblem, j: int, i: int) -> list[int]:
    """Merge node j into node i, each of whose strategies allows j exactly one strategy.

    Returns the other neighbours of j.
    """
    table, shared = core.near[i][j], core.shared
    chosen = shared(following, table)
    core.costs[i] = shared(followed, core.costs[i], core.costs[j], table, chosen)
    core.uses[i] = joined(
        core.uses[i] + [block.pick(chosen, shared) for block in core.uses[j]], shared
    )
    core.uses[j] = []
    others = [(n, other) for n, other in core.near[j].items() if n != i]
    core.steps.append(Postsolve(j, (i,), chosen))
    detach(core, j)
    for n, other in others:
        join(core.near, i, n, shared(rows, other, chosen), shared)
    return [n for n, _ in others]


def following(table: Array) -> Array:
    """Return the one column that each row allows."""
    return np.asarray(np.isfinite(table).argmax(1))


def followed(costs: Array, theirs: Array, table: Array, chosen: Array) -> Array:
    return np.asarray(costs + theirs[chosen] + table[np.arange(len(chosen)), chosen])


def joined(blocks: list[Uses], shared: Shared) -> list[Uses]:
    """Join usage blocks until each is at most about half as long as the one before it."""
    while len(blocks) > 1 and len(blocks[-1].starts) * 2 > len(blocks[-2].starts):
        a, b = blocks[-2:]
        starts, ends = np.concatenate([a.starts, b.starts]), np.concatenate([a.ends, b.ends])
        blocks = [*blocks[:-2], Uses(starts, ends, shared(stacked, a.amounts, b.amounts))]
    return blocks


def stacked(above: Array, below: Array) -> Array:
    return np.concatenate([above, below])


def occupy(core: PresolvedProblem, block: Uses, amounts: Array) -> None:
    """Subtract from the room what is used whichever choice is made."""
    low, high = int(block.starts.min()), int(block.ends.max())
    if len(block.starts) == 1:
        core.room[low:high] -= amounts[0]
    else:
        change = np.bincount(block.starts - low, amounts, high - low + 1) - np.bincount(
            block.ends - low, amounts, high - low + 1
        )
        core.room[low:high] -= np.cumsum(change[:-1])


def constant_usage(core: PresolvedProblem, i: int) -> None:
    """Subtract from the room what every strategy of node i uses, and keep the rest."""
    left = []
    for block in core.uses[i]:
        least, matters, rest = core.shared(above_least, block.amounts)
        if least is not None:
            occupy(core, block, least)
        if matters is not None:
            block = Uses(block.starts[matters], block.ends[matters], rest)
        elif least is not None:
            block = Uses(block.starts, block.ends, rest)
        if len(block.starts):
            left.append(block)
    core.uses[i] = left


def above_least(amounts: Array) -> tuple[Array | None, Array | None, Array]:
    """Split amounts into the minimum over the strategies and the rest.

    Returns (the minimum per item, the items that differ, their amounts above the minimum). The
    first is None where all minima are 0, the second where all items differ.
    """
    least = amounts.min(1)
    rest = amounts - least[:, None]
    matters = some(rest.any(1))
    return least if least.any() else None, matters, rest if matters is None else rest[matters]


def cheap(core: PresolvedProblem, i: int) -> bool:
    if len(core.near[i]) < 2:
        return True
    a, b = (len(core.costs[j]) for j in core.near[i])
    k = len(core.costs[i])
    if np.iscomplexobj(core.costs[i]):
        return a * b * k <= MAX_COMPARED and a * b <= GROWTH * k * (a + b)
    return a * b * k <= (MAX_COMPARED if len(core.room) else MAX_LINKED)


def eliminate(core: PresolvedProblem, i: int) -> list[int] | None:
    """Eliminate a node without memory usage that has at most two neighbours.

    Returns the neighbours. With complex costs the result is None where no strategy is cheapest for
    both costs.
    """
    around, costs = list(core.near[i]), core.costs[i]
    if len(around) > 1:
        a, b = around
        best, least = core.shared(without_link, core.near[a][i], core.near[b][i], costs)
    elif around:
        best, least = core.shared(
            without_leaf, core.costs[around[0]], core.near[around[0]][i], costs
        )
    else:
        best, least = core.shared(without_leaf, ZERO_TABLE, costs[None], ZERO_TABLE)
    if best is None:
        return None
    if len(around) > 1:
        join(core.near, a, b, least, core.shared)
    elif around:
        core.costs[around[0]] = least
    else:
        core.constant += least.item()
        best = best[0]
    core.steps.append(Postsolve(i, tuple(around), best))
    return detach(core, i)


def without_leaf(costs: Array, table: Array, leaf: Array) -> tuple[Array | None, Array]:
    """Eliminate a leaf.

    Returns (the leaf's best strategy for each strategy of its neighbour, the neighbour's costs
    including the leaf's). The first is None where no strategy is cheapest for both of two costs.
    """
    total = table + leaf
    best = total.argmin(1)
    least = total[np.arange(len(best)), best]
    return best if both_least(total, least) else None, costs + least


def without_link(one: Array, other: Array, link: Array) -> tuple[Array | None, Array]:
    """Eliminate a node between two others.

    Returns (its best strategy for each pair of their strategies, its cost there). The first is None
    where no strategy is cheapest for both of two costs.
    """
    other = other + link
    if len(one) * len(other) * len(link) <= MAX_COMPARED:
        total = one[:, None, :] + other[None]
        best = total.argmin(2)
        least = np.take_along_axis(total, best[:, :, None], 2)[:, :, 0]
        return best if both_least(total, least) else None, least
    if np.iscomplexobj(other):
        return None, ZERO_TABLE
    least = one[:, 0, None] + other[None, :, 0]
    best = np.zeros(least.shape, dtype=np.int64)
    for k in range(1, len(link)):
        total = one[:, k, None] + other[None, :, k]
        below = total < least
        best[below] = k
        np.copyto(least, total, where=below)
    return best, least


def both_least(total: Array, least: Array) -> bool:
    """Return True if `least` is the minimum of `total` in both its real and its imaginary parts.

    numpy orders complex numbers by the real part, then by the imaginary part. `least` is the
    minimum in this order.
    """
    return not np.iscomplexobj(total) or bool((least.imag <= total.imag.min(-1)).all())


def undominated(core: PresolvedProblem, i: int) -> Array | None:
    """Return the strategies that no other strategy dominates, or None if that is all of them.

    The dominating strategy costs no more and uses no more memory at any time, whichever strategies
    the neighbours take.
    """
    if len(core.costs[i]) == 1:
        return None
    shared = core.shared
    taken = shared(beside, core.costs[i], *(block.amounts for block in core.uses[i]))
    kept: Array | None = shared(best_of, core.costs[i], taken, *core.near[i].values())
    return kept


def beside(costs: Array, *amounts: Array) -> Array:
    """Return the memory usages of each strategy, one row per strategy."""
    return np.concatenate([costs[None, :0].reshape(0, len(costs)), *amounts]).T


def best_of(costs: Array, taken: Array, *tables: Array) -> Array | None:
    """Return the strategies of a node that none of the most promising ones dominates.

    The result is None if that is all of them. `taken` are their memory usages; each table has one
    row per strategy.

    Let d be the sum over the tables of the maximum of row a minus row b. Strategy a dominates b if
    it uses no more memory anywhere and costs[a] + d is at most costs[b]. The criterion is
    Goldstein's (Efficient rotamer elimination applied to protein side-chains and related spin
    glasses, Biophysical Journal 66 (1994)).
    """
    first = np.cumsum([0, 1, *(table.shape[1] for table in tables)])
    most = MAX_COMPARED // (len(costs) * int(first[-1] + taken.shape[1]))
    if not most:
        return None
    whole = np.concatenate([costs[:, None], *tables], axis=1)
    compared = [
        Compared.of(rows, first)
        for rows in ([whole.real, whole.imag] if np.iscomplexobj(whole) else [whole])
    ]
    order = np.argsort(sum(rows.least for rows in compared), kind="stable")
    if not np.isfinite(compared[0].least[order[0]]):
        return None
    compared = [rows.ordered(order) for rows in compared]
    taken = taken[order]
    left, at_once = np.ones(len(order), dtype=bool), max(1, CHUNK_ENTRIES // whole.size)
    for at in range(0, len(order), at_once):
        one = at + np.flatnonzero(left[at : at + at_once])[:most]
        pairs = left & (one[:, None] < np.arange(len(order)))
        for rows in compared:
            pairs &= rows.promising(one)
        if taken.shape[1]:
            pairs &= (taken[one][:, None] <= taken).all(2)
        a, b = np.nonzero(pairs)
        if len(a):
            goes = np.logical_and.reduce([rows.stands_in(one[a], b) for rows in compared])
            # If a dominated strategy itself dominates others, its own dominator dominates them too.
            left[b[goes]] = False
        most -= len(one)
        if most <= 0:
            break
    return None if left.all() and len(left) == len(costs) else np.sort(order[left])


class Compared(NamedTuple):
    """The costs of strategies for dominance checks, one row per strategy.

    A row holds the strategy's own cost and, from each position of ``first`` on, one table's
    entries. ``best`` is the position of the minimum of each section, and ``least`` is the sum of
    these minima.
    """

    rows: Array
    first: Array
    best: Array
    least: Array
    # The rows with finite values for forbidden entries, for the dominating strategy (`ours`) and
    # the dominated one (`theirs`). An entry that is forbidden for the dominated strategy is no
    # objection to dominance.
    ours: Array
    theirs: Array

    @classmethod
    def of(cls, rows: Array, first: Array) -> Compared:
        best = np.stack(
            [
                rows[:, at:end].argmin(1) + at
                for at, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)
            ],
            axis=1,
        )
        return cls(rows, first, best, np.take_along_axis(rows, best, 1).sum(1), rows, rows)

    def ordered(self, order: Array) -> Compared:
        rows = self.rows[order]
        forbidden = np.isinf(rows)
        return Compared(
            rows,
            self.first,
            self.best[order],
            self.least[order],
            np.where(forbidden, 1e200, rows),
            np.where(forbidden, 1e250, rows),
        )

    def promising(self, one: Array) -> Array:
        """Return a mask of the strategies that each strategy of `one` may dominate.

        The necessary condition: it costs no more at the neighbours' strategies that are best for
        the other one.
        """
        return np.asarray(self.rows[one[:, None, None], self.best].sum(2) <= self.least)

    def stands_in(self, a: Array, b: Array) -> Array:
        return np.asarray(
            np.maximum.reduceat(self.ours[a] - self.theirs[b], self.first[:-1], axis=1).sum(1) <= 0
        )
