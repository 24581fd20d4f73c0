"""What folding costs: the same search with a backward pass that chooses for itself, each gradient
computed and kept as is best for it alone.

The search has one node for a call's forward and backward together (auto/intra_op/formulate.py): a
gradient lies as duality says. Here every operand's gradient is a call of its own, with the ways
that the rules allow it whatever its forward does; gradients lie, are added up and are brought to
their takers as they please; and what backward needs of the forward is brought to it from where it
was made or from how its forward took it. Every plan of the folded search is one of these plans, at
the same cost, so the best one here is a lower bound, and the distance is what duality gives up.
Memory is left out: it knows no moment in which a backward that is free would run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...boxing.moves import Layout
from ...sharding.sbp import broadcast, partial_sum
from ..cost.reshard_cost import duals
from ..ir.op_graph import Call, Value
from .formulate import Formulation, FormulationCache, bucket_of, formulate, gathered_of, hidden

__all__ = ["Unfolded"]

Array = np.ndarray[Any, np.dtype[Any]]
Pair = tuple[Layout, Layout | None]


@dataclasses.dataclass
class _Backward:
    """A node for the gradient of one operand of a call. ``rows``: for each strategy how the
    results' gradients come, how what it needs of the forward comes (by value), and how the gradient
    lies."""

    node: int
    rows: list[tuple[tuple[Layout, ...], tuple[Layout, ...], Layout]]
    results: tuple[int, ...]  # values whose gradients it takes
    needs: tuple[int, ...]  # values of the forward that it takes
    value: int  # whose gradient it gives
    call: int
    operand: int


def _whole(
    row: tuple[tuple[Layout, ...], tuple[Layout, ...], Layout],
) -> list[tuple[tuple[Layout, ...], tuple[Layout, ...], Layout]]:
    """The same work on whole gradients. Any gradient is linear in those it is computed from, so
    what takes partial sums and gives one does so as well with the sums taken: axis by axis, each
    way that duality has only for calls that are linear themselves."""
    come, needs, gives = row
    axes = [
        a
        for a, e in enumerate(gives)
        if e is partial_sum
        and all(c[a] is partial_sum for c in come)
        and not any(n[a].is_partial for n in needs)
    ]

    def summed(layout: Layout, some: Sequence[int]) -> Layout:
        return tuple(broadcast if a in some else e for a, e in enumerate(layout))

    subsets = (some for k in range(1, len(axes) + 1) for some in itertools.combinations(axes, k))
    return [(tuple(summed(c, some) for c in come), needs, summed(gives, some)) for some in subsets]


class Unfolded:
    """The problem of ``folded``, unfolded. ``problem`` begins with the nodes of the folded one, in
    their order."""

    def __init__(self, folded: Formulation) -> None:
        if folded.options.wait or folded.options.memory is not None or not folded.calls.training:
            raise ValueError(
                "only a training step can be unfolded, without a limit of memory and without a "
                "wait for each change"
            )
        self.folded = folded
        cluster, calls = folded.prices.cluster, folded.calls
        known = FormulationCache(cluster, folded.mesh, False, bucket_of(calls), gathered_of(calls))
        self.forward = formulate(
            dataclasses.replace(calls, training=False), cluster, folded.mesh, folded.options, known
        )
        self.prices, self.problem = known.prices, self.forward.problem
        self.seen = 1.0 - hidden(cluster, folded.options)
        self._lifts: list[Callable[[Sequence[int]], int]] = [
            lambda choice, i=i: choice[i] for i in range(len(self.problem.costs))
        ]  # type: ignore[misc]
        self._same_costs()
        made = [
            b
            for call in calls.calls
            if call.number in folded.candidates
            for b in self._backwards(call)
        ]
        for value in calls.values:
            self._gradient(
                value,
                [b for b in made if b.value == value.number],
                [b for b in made if value.number in b.results],
            )

    def lifted(self, choice: Sequence[int]) -> list[int]:
        """The choice here that is this choice of the folded problem. It costs the same."""
        return [lift(choice) for lift in self._lifts]

    def _node(self, costs: Sequence[float] | Array, lift: Callable[[Sequence[int]], int]) -> int:
        self._lifts.append(lift)
        return self.problem.node(costs)

    def _same_costs(self) -> None:
        """What forward nodes cost besides: the optimizer's step, and the way back of what
        compositions move themselves."""
        for number, node in self.forward.node_of_call.items():
            more = self.folded.candidates[number].moving - self.forward.candidates[number].moving
            self.problem.costs[node] = np.asarray(self.problem.costs[node] + more)
        for value in self.folded.calls.parameters:
            at = self.folded.node_of_value.get(value.number)
            if at is not None:
                # Of the folded node's cost all but the way to the second layout is the step.
                pairs = self.folded.layouts[at]
                alone = {
                    pair[0]: cost
                    for pair, cost in zip(pairs, self.folded.problem.costs[at], strict=True)
                    if pair[1] is None
                }
                self.problem.costs[at] = np.asarray(
                    self.problem.costs[at] + np.array([alone[x] for x, _ in pairs])
                )

    # Gradients as calls of their own

    def _backwards(self, call: Call) -> list[_Backward]:
        values, found = self.folded.calls.values, self.folded.candidates[call.number]
        results = tuple(k for k, v in enumerate(call.outs) if values[v].grad)
        operands = [
            k for k, v in enumerate(call.operands) if values[v].grad and k == call.operands.index(v)
        ]
        if not results or not operands:
            return []
        made = []
        for k in operands:
            needs = self._needs(call, k)
            rows: dict[Any, tuple[int, float]] = {}
            of_row = []
            for r in range(len(found)):
                row = (
                    tuple(duals(found.outs[i][r]) for i in results),
                    tuple(self._taken(call, v, r) for v in needs),
                    duals(found.ins[k][r]),
                )
                cost = self.folded.options.computation * float(found.backward[r]) / len(operands)
                at, least = rows.get(row, (len(rows), cost))
                rows[row] = at, min(least, cost)
                of_row.append(at)
            for row, (_, cost) in list(rows.items()):
                for other in _whole(row):
                    rows.setdefault(other, (len(rows), cost))
            here = self.folded.node_of_call[call.number]
            node = self._node(
                [cost for _, cost in rows.values()],
                lambda choice, of_row=of_row, here=here: of_row[choice[here]],
            )  # type: ignore[misc]
            made.append(
                _Backward(
                    node,
                    list(rows),
                    tuple(call.outs[i] for i in results),
                    needs,
                    call.operands[k],
                    call.number,
                    k,
                )
            )
        for v in dict.fromkeys(v for b in made for v in b.needs):
            self._keep(call, v, [b for b in made if v in b.needs])
        return made

    def _needs(self, call: Call, k: int) -> tuple[int, ...]:
        """What of the forward the gradient of operand ``k`` is computed from."""
        found, own = self.folded.candidates[call.number], call.operands[k]
        linear = any(
            e.is_partial and f.is_partial
            for i, o in zip(found.ins[k], found.outs[0], strict=True)
            for e, f in zip(i, o, strict=True)
        )
        if linear and own not in call.keeps:
            return ()  # as an addend's
        return tuple(
            v for v in call.keeps if v in (*call.operands, *call.outs) and not (linear and v == own)
        )

    def _taken(self, call: Call, value: int, row: int) -> Layout:
        found = self.folded.candidates[call.number]
        return (
            found.ins[call.operands.index(value)][row]
            if value in call.operands
            else found.outs[call.outs.index(value)][row]
        )

    def _keep(self, call: Call, number: int, takers: list[_Backward]) -> None:
        """A value of the forward as backward takes it: brought from where it was made (strategies
        before the middle), or as the call's forward has it."""
        value = self.folded.calls.values[number]
        wanted = list(
            dict.fromkeys(b_row[1][b.needs.index(number)] for b in takers for b_row in b.rows)
        )
        n, here = len(wanted), self.folded.node_of_call[call.number]
        has = [
            self._taken(call, number, r) for r in range(len(self.folded.candidates[call.number]))
        ]
        # Taken as the forward takes it; where two gradients of a folded plan want it, they want it
        # so.
        kept = self._node(np.zeros(2 * n), lambda choice: n + wanted.index(has[choice[here]]))
        none = np.zeros((len(has), n))
        self.problem.edge(here, kept, np.hstack([none, self._there(value, has, wanted)]))
        at = self.forward.node_of_value.get(number)
        if at is not None:
            pairs = self.forward.layouts[at]
            first = self._there(value, [x for x, _ in pairs], wanted)
            second = np.array(
                [
                    [np.inf] * n if y is None else self._there(value, [y], wanted)[0]
                    for _, y in pairs
                ]
            )
            self.problem.edge(
                at, kept, np.hstack([np.minimum(first, second), np.zeros((len(pairs), n))])
            )
        elif value.maker in self.forward.node_of_call and value.maker != call.number:
            maker = self.folded.calls.calls[value.maker]
            made = self.folded.candidates[value.maker].outs[maker.outs.index(number)]
            self.problem.edge(
                self.forward.node_of_call[value.maker],
                kept,
                np.hstack([self._there(value, made, wanted), np.zeros((len(made), n))]),
            )
        else:  # nowhere else
            self.problem.costs[kept] = np.concatenate([np.full(n, np.inf), np.zeros(n)])
        for b in takers:
            index = b.needs.index(number)
            agree = np.array(
                [[0.0 if row[1][index] == x else np.inf for row in b.rows] for x in wanted]
            )
            self.problem.edge(kept, b.node, np.vstack([agree, agree]))

    # Prices

    def _there(self, value: Value, layouts: Sequence[Layout], wanted: Sequence[Layout]) -> Array:
        if value.state == "parameter":
            return self.prices.fetched(value.shape, value.dtype, layouts, wanted)
        return self._moved(value, layouts, wanted)

    def _moved(self, value: Value, layouts: Sequence[Layout], wanted: Sequence[Layout]) -> Array:
        numbers, seconds = self.prices.table(value.shape, value.dtype, [*layouts, *wanted])
        return np.asarray(
            seconds[np.ix_([numbers[x] for x in layouts], [numbers[x] for x in wanted])]
        )

    def _home(self, value: Value, layouts: Sequence[Layout], leaves: Sequence[Layout]) -> Array:
        """Seconds of a parameter's gradient to the parameter: summed with others, or, as one that
        is whole need not be, by itself."""
        together = self.prices.gradients(
            value.shape, value.dtype, [duals(x) for x in layouts], leaves
        )
        return self.seen * np.minimum(together, self._moved(value, layouts, leaves))

    # Gradients between them

    def _gradient(self, value: Value, makers: list[_Backward], takers: list[_Backward]) -> None:
        """From the calls that give shares of a value's gradient to those that take it."""
        if not makers or not value.grad:
            return
        shares = [[row[2] for row in b.rows] for b in makers]
        if value.state:
            if value.state == "parameter":
                self._leaf(value, makers, shares)
            return
        wanted = [[row[0][b.results.index(value.number)] for row in b.rows] for b in takers]
        if not takers:
            return
        source: list[tuple[int, list[Layout]]] = [(makers[0].node, shares[0])]
        if len(makers) > 1:
            every = list(dict.fromkeys(itertools.chain(*shares, *wanted)))
            pairs: list[Pair] = [(x, None) for x in every] + [
                (x, y) for x in every for y in every if x != y
            ]
            added = self._node(
                self._second(pairs, self._moved(value, every, every).T, every, every),
                self._lift_of(value, pairs),
            )
            for b, lie in zip(makers, shares, strict=True):
                first, second = (
                    self._moved(value, lie, every),
                    [None if y is None else every.index(y) for _, y in pairs],
                )
                table = [
                    np.minimum(first[:, every.index(x)], np.inf if j is None else first[:, j])
                    for (x, _), j in zip(pairs, second, strict=True)
                ]
                self.problem.edge(b.node, added, np.stack(table, 1))
            source = [(added, [x for x, _ in pairs])]
        if len(takers) > 1:
            node, lie = source[0]
            made, every = list(dict.fromkeys(lie)), list(dict.fromkeys(itertools.chain(*wanted)))
            pairs = [(x, None) for x in made] + [(x, y) for x in made for y in every if x != y]
            alone = makers[0] if len(makers) == 1 else None
            spread = self._node(
                self._second(pairs, self._moved(value, made, every), made, every),
                self._spread_of(value, pairs, alone),
            )
            self.problem.edge(
                node, spread, np.array([[0.0 if x == y else np.inf for y, _ in pairs] for x in lie])
            )
            for b, want in zip(takers, wanted, strict=True):
                self.problem.edge(
                    spread,
                    b.node,
                    self._either(pairs, self._moved(value, [*made, *every], want), [*made, *every]),
                )
            return
        node, lie = source[0]
        self.problem.edge(node, takers[0].node, self._moved(value, lie, wanted[0]))

    def _leaf(self, value: Value, makers: list[_Backward], shares: list[list[Layout]]) -> None:
        at = self.forward.node_of_value[value.number]
        leaves = [x for x, _ in self.forward.layouts[at]]
        if len(makers) == 1:
            self.problem.edge(makers[0].node, at, self._home(value, shares[0], leaves))
            return
        made, every = list(dict.fromkeys(leaves)), list(dict.fromkeys(itertools.chain(*shares)))
        pairs: list[Pair] = [(x, None) for x in made] + [(x, y) for x in made for y in every]
        added = self._node(
            self._second(pairs, self._home(value, every, made).T, made, every),
            self._lift_of(value, pairs),
        )
        self.problem.edge(
            added, at, np.array([[0.0 if x == y else np.inf for y in leaves] for x, _ in pairs])
        )
        for b, lie in zip(makers, shares, strict=True):
            first, second = self._home(value, lie, made), self._moved(value, lie, every)
            table = [
                np.minimum(
                    first[:, made.index(x)], np.inf if y is None else second[:, every.index(y)]
                )
                for x, y in pairs
            ]
            self.problem.edge(b.node, added, np.stack(table, 1))

    def _second(
        self,
        pairs: Sequence[Pair],
        between: Array,
        firsts: Sequence[Layout],
        seconds: Sequence[Layout],
    ) -> Array:
        """What the second layouts cost; ``between``: from or to each of them."""
        return np.array(
            [0.0 if y is None else between[firsts.index(x), seconds.index(y)] for x, y in pairs]
        )

    def _either(self, pairs: Sequence[Pair], table: Array, layouts: Sequence[Layout]) -> Array:
        """From whichever of the two is nearer."""
        first = table[[layouts.index(x) for x, _ in pairs]]
        second = np.array(
            [[np.inf] * table.shape[1] if y is None else table[layouts.index(y)] for _, y in pairs]
        )
        return np.minimum(first, second)

    def _lift_of(self, value: Value, pairs: list[Pair]) -> Callable[[Sequence[int]], int]:
        """A folded plan adds a value's gradient up as the value is made and, where it is, kept as
        well."""
        at = self.folded.node_of_value.get(value.number)

        def lift(choice: Sequence[int]) -> int:
            made = self.folded.made(value, choice)
            kept = None if at is None else self.folded.layouts[at][choice[at]][1]
            return pairs.index(
                (made if value.state else duals(made), None if kept is None else duals(kept))
            )

        return lift

    def _spread_of(
        self, value: Value, pairs: list[Pair], alone: _Backward | None
    ) -> Callable[[Sequence[int]], int]:
        """It is then as the value is made. ``alone``: what gives all of it, in the dual of what its
        forward takes."""

        def lift(choice: Sequence[int]) -> int:
            wanted = duals(self.folded.made(value, choice))
            given = (
                wanted
                if alone is None
                else duals(self.folded.wanted(alone.call, alone.operand, choice))
            )
            return pairs.index((given, None if given == wanted else wanted))

        return lift
