"""What other ways would cost: each other strategy of one call, or of one thing given, the rest of the plan as it is.

The tensors beside a call follow it: each takes the layout that suits the new strategy best, as far as its other takers, which stay, let it. A call and the
tensors around it are a star, so that is exact: the tensors do not touch one another.

Of the backward pass and the traffic of gradients the longer one is thought to remain so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..boxing.moves import Layout, show_bytes
from .calls import Value
from .changes import Changes, Kind, short
from .formulate import Formulation
from .planned import Change, Other

__all__ = ["Responses", "moved"]

Array = np.ndarray[Any, np.dtype[Any]]
_LISTED = 3
_NOTHING = 1e-12  # seconds


class Responses:
    """Other ways around one choice."""

    def __init__(self, f: Formulation, choice: Sequence[int], changes: Changes) -> None:
        self.f, self.choice, self.changes = f, list(choice), changes
        self.value_at = {node: f.calls.values[v] for v, node in f.node_of_value.items()}
        self.beside: dict[int, dict[int, Array]] = {}  # node -> neighbour -> table, its own strategies along the rows
        for (i, j), table in zip(f.problem.edges, f.problem.tables, strict=True):
            for a, b, t in ((i, j, table), (j, i, table.T)):
                there = self.beside.setdefault(a, {})
                there[b] = there[b] + t if b in there else t
        self.now: dict[int, tuple[Kind, ...]] = {}  # value -> its changes under the choice
        self.level, self.start = self._levels()
        self.peak = float(self.level.max()) if len(self.level) else 0.0

    def of_call(self, number: int) -> tuple[Other, ...]:
        """Other ways to run a call, the cheapest first, of each way its results may lie no more than one."""
        f, node = self.f, self.f.node_of_call[number]
        found = f.candidates[number]
        total, leaves = self._star(node)
        now = self._current(node)
        own = tuple(out[self.choice[node]] for out in found.outs)
        seen = {own}
        listed: list[Other] = []
        for k in np.argsort(total, kind="stable").tolist():
            outs = tuple(out[k] for out in found.outs)
            if len(listed) == _LISTED or not np.isfinite(total[k]):
                break
            if outs in seen:
                continue
            seen.add(outs)
            changed = {node: k, **{leaf: int(best[k]) for leaf, (_, best) in leaves.items()}}
            listed.append(self._other(tuple(x[k] for x in found.ins), outs, float(total[k] - now), changed, [number]))
        return tuple(listed)

    def of_value(self, value: Value) -> tuple[Other, ...]:
        """Other ways for something given to lie, the cheapest first. Where one call takes it, that call follows."""
        f, node = self.f, self.f.node_of_value[value.number]
        takers = list(self.beside.get(node, ()))
        pairs = f.layouts[node]
        call = f.calls.calls[value.takers[0]].number
        if len(takers) == 1 and f.node_of_call.get(call) == takers[0]:
            total, leaves = self._star(takers[0])
            matrix, best = leaves.pop(node)
            whole = (total - matrix[np.arange(len(total)), best])[:, None] + matrix
            along = whole.argmin(0)
            cost, now = whole.min(0), self._current(takers[0])
        else:
            cost = self._alone(node, ())
            now, along, leaves = float(cost[self.choice[node]]), None, {}
        listed: dict[Layout, Other] = {}
        for s in np.argsort(cost, kind="stable").tolist():
            layout = pairs[s][0]
            if len(listed) == _LISTED or not np.isfinite(cost[s]):
                break
            if layout == pairs[self.choice[node]][0] or layout in listed:
                continue
            changed = {node: s}
            if along is not None:
                changed |= {takers[0]: int(along[s]), **{leaf: int(best[along[s]]) for leaf, (_, best) in leaves.items()}}
            listed[layout] = self._other((), (layout,), float(cost[s] - now), changed, [call] if along is not None else [])
        return tuple(listed.values())

    # Costs

    def _alone(self, node: int, without: Iterable[int]) -> Array:
        """Cost of each strategy of a node with its edges to all neighbours but ``without``, as these have chosen."""
        cost = self.f.problem.costs[node].astype(float)
        for other, table in self.beside.get(node, {}).items():
            if other not in without:
                cost = cost + table[:, self.choice[other]]
        return cost

    def _star(self, node: int) -> tuple[Array, dict[int, tuple[Array, Array]]]:
        """(cost of each strategy of a call's node, neighbour that follows -> (cost by both strategies, its best by the call's))."""
        leaves: dict[int, tuple[Array, Array]] = {}
        total = self._alone(node, [n for n in self.beside.get(node, {}) if n in self.value_at])
        for leaf, table in self.beside.get(node, {}).items():
            if leaf in self.value_at:
                matrix = table + self._alone(leaf, (node,))[None, :]
                best = matrix.argmin(1)
                leaves[leaf] = matrix, best
                total = total + matrix[np.arange(len(matrix)), best]
        return total, leaves

    def _current(self, node: int) -> float:
        """What the star of a call costs in the plan."""
        cost = float(self._alone(node, [n for n in self.beside.get(node, {}) if n in self.value_at])[self.choice[node]])
        return cost + sum(float(self._alone(leaf, ())[self.choice[leaf]]) for leaf in self.beside.get(node, {}) if leaf in self.value_at)

    # Memory

    def _levels(self) -> tuple[Array, int]:
        """Bytes at each moment, and the first moment."""
        spans = [(u.start, u.end) for uses in self.f.problem.usages for u in uses if u.start is not None and u.end is not None]
        first, last = min((a for a, _ in spans), default=0), max((b for _, b in spans), default=1)
        level = np.zeros(last - first + 1)
        for node, k in enumerate(self.choice):
            self._add(level, first, node, k, 1.0)
        return level[:-1].cumsum() if len(level) > 1 else level, first

    def _add(self, steps: Array, first: int, node: int, k: int, sign: float) -> None:
        for start, end, amounts in self.f.problem.usages[node]:
            steps[0 if start is None else start - first] += sign * amounts[k]
            steps[-1 if end is None else end - first] -= sign * amounts[k]

    def _growth(self, changed: dict[int, int]) -> int:
        """Bytes that the peak grows."""
        steps = np.zeros(len(self.level) + 1)
        for node, k in changed.items():
            if k != self.choice[node]:
                self._add(steps, self.start, node, k, 1.0)
                self._add(steps, self.start, node, self.choice[node], -1.0)
        return round(float((self.level + steps[:-1].cumsum()).max()) - self.peak)

    # Words

    def _other(self, takes: tuple[Layout, ...], gives: tuple[Layout, ...], extra: float, changed: dict[int, int], calls: list[int]) -> Other:
        grown = self._growth(changed)
        kept = {node: self.choice[node] for node in changed}
        values = {v.number: v for node in changed if (v := self.value_at.get(node)) is not None}
        for number in calls:
            call = self.f.calls.calls[number]
            values |= {v: self.f.calls.values[v] for v in (*call.operands, *call.outs)}
        for v, value in values.items():
            if v not in self.now:
                self.now[v] = self.changes.kinds(value, self.choice)
        for node, k in changed.items():
            self.choice[node] = k
        after = {v: self.changes.kinds(value, self.choice) for v, value in values.items()}
        parts = [part for number in calls for part in self._computing(number, kept)]
        for node, k in kept.items():
            self.choice[node] = k
        more, what = max(parts, key=lambda part: part[0], default=(0.0, ""))
        moving = [(*_moving(self.now[v], after[v]), value) for v, value in values.items() if self.now[v] is not after[v]]
        grown_most, kind, value = max(moving, key=lambda part: part[0], default=(0.0, None, None))
        if grown_most > more and kind is not None and value is not None:
            more, what = grown_most, moved(self.changes.named(kind, value))
        because = what if more > max(_NOTHING, 0.05 * abs(extra)) else ""
        extra = extra if abs(extra) > _NOTHING else 0.0
        return Other(tuple(map(short, takes)), tuple(map(short, gives)), extra, grown, because)

    def _computing(self, number: int, kept: dict[int, int]) -> list[tuple[float, str]]:
        """What the call itself adds under the present choice, against the one it had."""
        found, node = self.f.candidates[number], self.f.node_of_call[number]
        new, old = self.choice[node], kept.get(node, self.choice[node])
        weight = self.f.options.computation
        computing = weight * float(found.forward[new] + found.backward[new] - found.forward[old] - found.backward[old])
        moving = float(found.moving[new] - found.moving[old])
        parts, before = _part(found.share[new]), _part(found.share[old])
        slower = f"each rank computes {parts} of it, not {before}" if parts != before else "its kernels take longer"
        return [(computing, slower), (moving, "what the call itself communicates")]


def _moving(before: Sequence[Kind], after: Sequence[Kind]) -> tuple[float, Kind | None]:
    """(seconds more, the dearest of the new ones) of a value's changes of layout."""
    known = {(k.change.src, k.change.dst) for k in before}
    new = [k for k in after if (k.change.src, k.change.dst) not in known]
    more = sum(k.seconds for k in after) - sum(k.seconds for k in before)
    return (more, max(new, key=lambda k: k.seconds)) if new else (0.0, None)


def moved(change: Change) -> str:
    """What a change of layout moves, in words.

    >>> moved(Change("x", "matmul", ("S(0)",), ("B",), 1e-3, 2e-3, 1 << 24, "all_gather", "reduce_scatter"))
    'all_gather of x, reduce_scatter of its gradient (16.0 MiB, S(0) -> B)'
    """
    there, back = change.forward and change.there, change.backward and change.back
    if there == back:
        what = f"{there} of {change.value} and of its gradient" if there else change.value
    elif there and back:
        what = f"{there} of {change.value}, {back} of its gradient"
    else:
        what = f"{there} of {change.value}" if there else f"{back} of the gradient of {change.value}"
    how = f"{' '.join(change.src)} -> {' '.join(change.dst)}" if change.src != change.dst else " ".join(change.src)
    return f"{what} ({show_bytes(change.bytes)}, {how})"


def _part(share: float) -> str:
    return "all" if share >= 1 else f"1/{1 / share:.3g}"
