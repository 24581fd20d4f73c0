"""The cost of folding: the same search with a backward pass whose layouts are chosen freely.

The main search has one node for a call's forward and backward together
(auto/intra_op/formulate.py), and a gradient has the layout that duality gives. Here every operand's
gradient is a call of its own. It may use every strategy that the rules allow, independently of its
forward. Gradients may have any layout, be added up in any layout and be boxed for their calls in
any way. Values that backward needs from the forward are boxed from where they were made, or from
the layout in which the forward used them.

Every plan of the folded search is also a plan here, at the same cost. The optimum here is therefore
a lower bound, and the distance is the price of duality. Memory is left out, because there is no
defined time at which a free backward would run. `benchmarks/auto_unfolded.py` uses it.
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
    """A node for the gradient of one operand of a call.

    Each entry of ``rows`` is a strategy with three items. They are the layouts of the results'
    gradients, the layouts of the forward values that it needs, and the layout of the gradient it
    returns.
    """

    node: int
    rows: list[tuple[tuple[Layout, ...], tuple[Layout, ...], Layout]]
    results: tuple[int, ...]  # the values whose gradients it uses
    needs: tuple[int, ...]  # the forward values that it uses
    value: int  # the value whose gradient it returns
    call: int
    operand: int


def _reduced_variants(
    row: tuple[tuple[Layout, ...], tuple[Layout, ...], Layout],
) -> list[tuple[tuple[Layout, ...], tuple[Layout, ...], Layout]]:
    """Return the variants of a row in which some partial gradients are reduced.

    Any gradient is linear in the gradients it is computed from. A row that accepts partial sums and
    returns one is therefore also valid with the sums reduced, for any subset of such axes. Duality
    has these variants only for calls that are linear themselves.
    """
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
    """The unfolded problem of the formulation ``folded``.

    ``problem`` starts with the nodes of the folded problem, in their order.
    """

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
        self._add_other_costs()
        made = [
            b
            for call in calls.calls
            if call.number in folded.candidates
            for b in self._add_backward_nodes(call)
        ]
        for value in calls.values:
            self._add_gradient_edges(
                value,
                [b for b in made if b.value == value.number],
                [b for b in made if value.number in b.results],
            )

    def lifted(self, choice: Sequence[int]) -> list[int]:
        """Return the choice here that corresponds to this folded choice, at the same cost."""
        return [lift(choice) for lift in self._lifts]

    def _add_node(
        self, costs: Sequence[float] | Array, lift: Callable[[Sequence[int]], int]
    ) -> int:
        self._lifts.append(lift)
        return self.problem.node(costs)

    def _add_other_costs(self) -> None:
        """Add the forward nodes' other costs.

        These are the optimizer's step, and the backward share of what composite calls communicate
        themselves.
        """
        for number, node in self.forward.node_of_call.items():
            more = self.folded.candidates[number].moving - self.forward.candidates[number].moving
            self.problem.costs[node] = np.asarray(self.problem.costs[node] + more)
        for value in self.folded.calls.parameters:
            at = self.folded.node_of_value.get(value.number)
            if at is not None:
                # The folded node's cost is the optimizer's step, plus the change to the second
                # layout if there is one.
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

    def _add_backward_nodes(self, call: Call) -> list[_Backward]:
        values, strategies = self.folded.calls.values, self.folded.candidates[call.number]
        results = tuple(k for k, v in enumerate(call.outs) if values[v].grad)
        operands = [
            k for k, v in enumerate(call.operands) if values[v].grad and k == call.operands.index(v)
        ]
        if not results or not operands:
            return []
        made = []
        for k in operands:
            needs = self._needed_values(call, k)
            rows: dict[Any, tuple[int, float]] = {}
            of_row = []
            for r in range(len(strategies)):
                row = (
                    tuple(duals(strategies.outs[i][r]) for i in results),
                    tuple(self._layout_in_row(call, v, r) for v in needs),
                    duals(strategies.ins[k][r]),
                )
                cost = (
                    self.folded.options.computation * float(strategies.backward[r]) / len(operands)
                )
                at, least = rows.get(row, (len(rows), cost))
                rows[row] = at, min(least, cost)
                of_row.append(at)
            for row, (_, cost) in list(rows.items()):
                for other in _reduced_variants(row):
                    rows.setdefault(other, (len(rows), cost))
            call_node = self.folded.node_of_call[call.number]
            node = self._add_node(
                [cost for _, cost in rows.values()],
                lambda choice, of_row=of_row, call_node=call_node: of_row[choice[call_node]],
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
            self._add_saved_value(call, v, [b for b in made if v in b.needs])
        return made

    def _needed_values(self, call: Call, k: int) -> tuple[int, ...]:
        """Return the forward values from which the gradient of operand ``k`` is computed."""
        found, own = self.folded.candidates[call.number], call.operands[k]
        linear = any(
            e.is_partial and f.is_partial
            for i, o in zip(found.ins[k], found.outs[0], strict=True)
            for e, f in zip(i, o, strict=True)
        )
        if linear and own not in call.keeps:
            return ()  # such as the gradient of an addend
        return tuple(
            v for v in call.keeps if v in (*call.operands, *call.outs) and not (linear and v == own)
        )

    def _layout_in_row(self, call: Call, value: int, row: int) -> Layout:
        found = self.folded.candidates[call.number]
        return (
            found.ins[call.operands.index(value)][row]
            if value in call.operands
            else found.outs[call.outs.index(value)][row]
        )

    def _add_saved_value(self, call: Call, number: int, takers: list[_Backward]) -> None:
        """Add a node for a forward value as backward uses it.

        In the first half of its strategies the value is boxed from where it was made. In the second
        half it has the layout in which the call's forward used it.
        """
        value = self.folded.calls.values[number]
        wanted = list(
            dict.fromkeys(b_row[1][b.needs.index(number)] for b in takers for b_row in b.rows)
        )
        n, call_node = len(wanted), self.folded.node_of_call[call.number]
        has = [
            self._layout_in_row(call, number, r)
            for r in range(len(self.folded.candidates[call.number]))
        ]
        # Lifted as in the forward. Where two gradients of a folded plan use the value, both use
        # this layout.
        saved_node = self._add_node(
            np.zeros(2 * n), lambda choice: n + wanted.index(has[choice[call_node]])
        )
        none = np.zeros((len(has), n))
        self.problem.edge(
            call_node, saved_node, np.hstack([none, self._fetch_seconds(value, has, wanted)])
        )
        at = self.forward.node_of_value.get(number)
        if at is not None:
            pairs = self.forward.layouts[at]
            first = self._fetch_seconds(value, [x for x, _ in pairs], wanted)
            second = np.array(
                [
                    [np.inf] * n if y is None else self._fetch_seconds(value, [y], wanted)[0]
                    for _, y in pairs
                ]
            )
            self.problem.edge(
                at, saved_node, np.hstack([np.minimum(first, second), np.zeros((len(pairs), n))])
            )
        elif value.maker in self.forward.node_of_call and value.maker != call.number:
            maker = self.folded.calls.calls[value.maker]
            made = self.folded.candidates[value.maker].outs[maker.outs.index(number)]
            self.problem.edge(
                self.forward.node_of_call[value.maker],
                saved_node,
                np.hstack([self._fetch_seconds(value, made, wanted), np.zeros((len(made), n))]),
            )
        else:  # the value is available nowhere else
            self.problem.costs[saved_node] = np.concatenate([np.full(n, np.inf), np.zeros(n)])
        for b in takers:
            index = b.needs.index(number)
            agree = np.array(
                [[0.0 if row[1][index] == x else np.inf for row in b.rows] for x in wanted]
            )
            self.problem.edge(saved_node, b.node, np.vstack([agree, agree]))

    # Prices

    def _fetch_seconds(
        self, value: Value, layouts: Sequence[Layout], wanted: Sequence[Layout]
    ) -> Array:
        if value.state == "parameter":
            return self.prices.fetched(value.shape, value.dtype, layouts, wanted)
        return self._change_seconds(value, layouts, wanted)

    def _change_seconds(
        self, value: Value, layouts: Sequence[Layout], wanted: Sequence[Layout]
    ) -> Array:
        numbers, seconds = self.prices.table(value.shape, value.dtype, [*layouts, *wanted])
        return np.asarray(
            seconds[np.ix_([numbers[x] for x in layouts], [numbers[x] for x in wanted])]
        )

    def _leaf_gradient_seconds(
        self, value: Value, layouts: Sequence[Layout], leaves: Sequence[Layout]
    ) -> Array:
        """Return the seconds to bring a parameter's gradient to the parameter.

        The gradient is reduced in a bucket with others or, where it needs no reduction, boxed
        alone.
        """
        together = self.prices.gradients(
            value.shape, value.dtype, [duals(x) for x in layouts], leaves
        )
        return self.seen * np.minimum(together, self._change_seconds(value, layouts, leaves))

    # Edges between gradients

    def _add_gradient_edges(
        self, value: Value, makers: list[_Backward], takers: list[_Backward]
    ) -> None:
        """Add the edges from calls that return a value's gradient to calls that use it."""
        if not makers or not value.grad:
            return
        shares = [[row[2] for row in b.rows] for b in makers]
        if value.state:
            if value.state == "parameter":
                self._add_leaf_edges(value, makers, shares)
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
            added = self._add_node(
                self._second_layout_costs(
                    pairs, self._change_seconds(value, every, every).T, every, every
                ),
                self._lift_of(value, pairs),
            )
            for b, lie in zip(makers, shares, strict=True):
                first, second = (
                    self._change_seconds(value, lie, every),
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
            spread = self._add_node(
                self._second_layout_costs(
                    pairs, self._change_seconds(value, made, every), made, every
                ),
                self._spread_of(value, pairs, alone),
            )
            self.problem.edge(
                node, spread, np.array([[0.0 if x == y else np.inf for y, _ in pairs] for x in lie])
            )
            for b, want in zip(takers, wanted, strict=True):
                self.problem.edge(
                    spread,
                    b.node,
                    self._cheaper_source_costs(
                        pairs, self._change_seconds(value, [*made, *every], want), [*made, *every]
                    ),
                )
            return
        node, lie = source[0]
        self.problem.edge(node, takers[0].node, self._change_seconds(value, lie, wanted[0]))

    def _add_leaf_edges(
        self, value: Value, makers: list[_Backward], shares: list[list[Layout]]
    ) -> None:
        at = self.forward.node_of_value[value.number]
        leaves = [x for x, _ in self.forward.layouts[at]]
        if len(makers) == 1:
            self.problem.edge(
                makers[0].node, at, self._leaf_gradient_seconds(value, shares[0], leaves)
            )
            return
        made, every = list(dict.fromkeys(leaves)), list(dict.fromkeys(itertools.chain(*shares)))
        pairs: list[Pair] = [(x, None) for x in made] + [(x, y) for x in made for y in every]
        added = self._add_node(
            self._second_layout_costs(
                pairs, self._leaf_gradient_seconds(value, every, made).T, made, every
            ),
            self._lift_of(value, pairs),
        )
        self.problem.edge(
            added, at, np.array([[0.0 if x == y else np.inf for y in leaves] for x, _ in pairs])
        )
        for b, lie in zip(makers, shares, strict=True):
            first, second = (
                self._leaf_gradient_seconds(value, lie, made),
                self._change_seconds(value, lie, every),
            )
            table = [
                np.minimum(
                    first[:, made.index(x)], np.inf if y is None else second[:, every.index(y)]
                )
                for x, y in pairs
            ]
            self.problem.edge(b.node, added, np.stack(table, 1))

    def _second_layout_costs(
        self,
        pairs: Sequence[Pair],
        between: Array,
        firsts: Sequence[Layout],
        seconds: Sequence[Layout],
    ) -> Array:
        """Return the costs of the second layouts; ``between`` has the cost per pair of layouts."""
        return np.array(
            [0.0 if y is None else between[firsts.index(x), seconds.index(y)] for x, y in pairs]
        )

    def _cheaper_source_costs(
        self, pairs: Sequence[Pair], table: Array, layouts: Sequence[Layout]
    ) -> Array:
        """Return the cost from the cheaper one of each pair's two layouts."""
        first = table[[layouts.index(x) for x, _ in pairs]]
        second = np.array(
            [[np.inf] * table.shape[1] if y is None else table[layouts.index(y)] for _, y in pairs]
        )
        return np.minimum(first, second)

    def _lift_of(self, value: Value, pairs: list[Pair]) -> Callable[[Sequence[int]], int]:
        """Return the function that finds the pair of a folded choice.

        A folded plan adds up a computed value's gradient in the dual of the value's layout, and a
        parameter's in the parameter's own layout. Where the value has a second layout, its dual is
        used too.
        """
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
        """Return the function that finds the pair of a summed gradient in a folded choice.

        The gradient then has the dual of the layout that the value is made in. ``alone`` is the
        only call that returns the gradient, in the dual of the layout that its forward used.
        """

        def lift(choice: Sequence[int]) -> int:
            wanted = duals(self.folded.made(value, choice))
            produced_layout = (
                wanted
                if alone is None
                else duals(self.folded.wanted(alone.call, alone.operand, choice))
            )
            return pairs.index((produced_layout, None if produced_layout == wanted else wanted))

        return lift
