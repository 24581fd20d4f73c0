"""The formulation of the intra-operator search as a problem for the solver.

Its nodes are given tensors (parameters, buffers, inputs), calls, and tensors that several calls
use. Costs and memory are folded into nodes and edges. `search.py`, `separate_backward.py`,
`auto/api.py` and `auto/calibrate` call `formulate`.

One node represents a call's forward and backward together. By duality the layout of a gradient
follows from that of the value (DESIGN section 3). An edge therefore prices a change of layout
together with the gradient's change in backward. The gradient of a value that several calls use is
boxed from each of them to the layout that its maker needs.

A tensor that several calls use has a node of its own, whose strategies are pairs. A pair is the
layout the tensor is made in, and one more layout that it is also stored in. A change of layout that
several calls need is then paid once (OneFlow calls this an sbp collector). A parameter also has
such a node where calls may use more of it than a rank stores: the gathered tensor is a copy, and
uses memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._tensor.gradients.parameter_gather import BUCKET_BYTES as GATHERED_BYTES
from ..._tensor.gradients.reducer import BUCKET_BYTES
from ...boxing.moves import Layout
from ...cluster import Cluster
from ...sharding.placement import Placement
from ..cost.reshard_cost import ReshardCosts, duals
from ..cost.strategies import StrategyBuilder, StrategyTable
from ..ir.op_graph import Calls, Value
from ..search_limits import LIMITS
from ..solver import Problem, solve
from .layout_pairs import Array, ListCache, Pair, maker_layouts, wanted_layouts
from .peak_memory import MemoryUsage, Use
from .search_options import Options, is_gathered_twice

__all__ = ["Formulation", "Options", "bucket_of", "formulate", "gathered_of", "hidden", "updating"]


class FormulationCache:
    """A cache that formulations of the same calls on the same mesh share.

    It has the candidates of calls, and tables of prices together with the lists they were made
    from.
    """

    def __init__(
        self, cluster: Cluster, mesh: Placement, training: bool, bucket: int = 0, gathered: int = 0
    ) -> None:
        self.prices = ReshardCosts(cluster, mesh, bucket, gathered)
        self.menu = StrategyBuilder(self.prices, training)
        self.lists = ListCache()


@dataclass
class Formulation:
    """A problem and the meaning of its nodes."""

    calls: Calls
    mesh: Placement
    options: Options
    prices: ReshardCosts
    problem: Problem
    candidates: dict[int, StrategyTable]  # by number of each call that has a node
    node_of_call: dict[int, int]
    node_of_value: dict[int, int]
    layouts: dict[int, list[Pair]]  # node of a value -> its strategies
    # Node of a parameter -> bytes of gathered copies that autograd saves, by strategy.
    copies: dict[int, Array]
    known: FormulationCache

    def made(self, value: Value, choice: Sequence[int]) -> Layout:
        """Return the layout that a value is made or given in."""
        if value.number in self.node_of_value:
            node = self.node_of_value[value.number]
            return self.layouts[node][choice[node]][0]
        call = self.calls.calls[value.maker]
        found = self.candidates[call.number]
        return found.outs[call.outs.index(value.number)][choice[self.node_of_call[call.number]]]

    def wanted(self, call: int, operand: int, choice: Sequence[int]) -> Layout:
        """Return the layout in which a call uses an operand."""
        return self.candidates[call].ins[operand][choice[self.node_of_call[call]]]

    def optimizing(self, choice: Sequence[int]) -> float:
        """Return the seconds of the optimizer's step."""
        trained = [
            v
            for v in self.calls.parameters
            if self.calls.training and v.grad and v.number in self.node_of_value
        ]
        sizes = [
            v.dtype.itemsize * self.prices.local(v.shape, self.made(v, choice)) for v in trained
        ]
        return sum(
            updating(self.prices.cluster, n, self.options, v.dtype)
            for v, n in zip(trained, sizes, strict=True)
        )

    def least_memory(self, seconds: float | None = None) -> int | None:
        """Return the minimum bytes a rank that some plan needs.

        The result is None where ``seconds`` (by default 120) are not enough to find one.
        """
        least = dataclasses.replace(self.under(freed=self.calls.training).problem, usage_limit=0)
        found = solve(
            least, seconds=LIMITS.min_memory_seconds if seconds is None else seconds
        ).least_usage
        return None if found is None else math.ceil(found[0])

    def under(self, **changed: Any) -> Formulation:
        """Return the formulation under other options; the weight of computing must not change."""
        return formulate(
            self.calls,
            self.prices.cluster,
            self.mesh,
            dataclasses.replace(self.options, **changed),
            self.known,
        )

    def turned(self) -> Formulation:
        """Return the same problem with the other sum as its cost.

        In one sum the gradient traffic hides behind the backward pass, in the other the backward
        pass hides behind that traffic. The true cost of a choice is the larger of the two.
        """
        found = self.under(summing=1.0 - self.options.summing)
        found.problem.usage_limit = self.problem.usage_limit
        return found

    def twice(self, value: Value, src: Layout, dst: Layout) -> bool:
        """Return True if a change of a parameter's layout is made again in backward."""
        return is_gathered_twice(self.calls, self.options, value, src, dst)


def updating(cluster: Cluster, nbytes: float, options: Options, dtype: Any) -> float:
    """Return the seconds of an optimizer's step on `nbytes` bytes of a parameter.

    The step reads and writes the parameter and its state, and reads the gradient.
    """
    return cluster.optimizer_factor * cluster.compute(
        0.0, int(nbytes * (3 + 2 * options.optimizer_state_ratio)), dtype
    )


def hidden(cluster: Cluster, options: Options) -> float:
    """Return the fraction of the parameter gradients' traffic that hides behind computing."""
    return max(0.0, min(0.9, 2.0 - cluster.overlap)) if options.hidden is None else options.hidden


def bucket_of(calls: Calls) -> int:
    """Return the bytes of gradients that are reduced together.

    These are all gradients, up to the reducer's limit, and 0 without training.
    """
    return (
        min(BUCKET_BYTES, sum(v.nbytes for v in calls.parameters if v.grad))
        if calls.training
        else 0
    )


def gathered_of(calls: Calls) -> int:
    """Return the bytes of parameters that are gathered together, up to the gather's limit."""
    return min(GATHERED_BYTES, sum(v.nbytes for v in calls.parameters))


def formulate(
    calls: Calls,
    cluster: Cluster,
    mesh: Placement,
    options: Options,
    known: FormulationCache | None = None,
) -> Formulation:
    """Return the formulation of the problem on one mesh.

    ``known`` is the cache of another formulation with the same computation weight and calls.
    """
    return _Builder(
        calls,
        mesh,
        options,
        known
        or FormulationCache(cluster, mesh, calls.training, bucket_of(calls), gathered_of(calls)),
    ).build()


class _Builder:
    def __init__(
        self, calls: Calls, mesh: Placement, options: Options, known: FormulationCache
    ) -> None:
        self.calls, self.mesh, self.options, self.known = calls, mesh, options, known
        self.prices, self.menu, self.lists = known.prices, known.menu, known.lists
        hides = hidden(known.prices.cluster, options)
        self.seen, self.back = 1.0 - hides * (1.0 - options.summing), 1.0 - hides * options.summing
        self.problem = Problem("sbp", options.memory)
        self.candidates: dict[int, StrategyTable] = {}
        self.node_of_call: dict[int, int] = {}
        self.node_of_value: dict[int, int] = {}
        self.layouts: dict[int, list[Pair]] = {}
        self.copies: dict[int, Array] = {}
        # by node of a parameter: does each call have its own copy, by strategy?
        self.apart: dict[int, tuple[bool, ...]] = {}
        self.memory = MemoryUsage(calls, options, self.prices, self.candidates, self.lists)

    def build(self) -> Formulation:
        live = [c for c in self.calls.calls if not c.wild]
        for call in live:
            self.candidates[call.number] = self.menu.of(call, self.calls.values)
        for value in self.calls.values:
            if value.state and any(t in self.candidates for t in value.takers):
                self._add_state(value)
        for call in live:
            self._add_call(call.number)
        for value in self.calls.values:
            takers = [t for t in dict.fromkeys(value.takers) if t in self.candidates]
            if not value.state and len(takers) > 1 and value.maker in self.candidates:
                self._add_computed_value(value, takers)
        for value in self.calls.values:
            self._edges(value)
        return Formulation(
            self.calls, self.mesh, self.options, self.prices, self.problem, self.candidates,
            self.node_of_call, self.node_of_value, self.layouts, self.copies,
            self.known,
        )  # fmt: skip

    # Nodes

    def _add_state(self, value: Value) -> None:
        fixed = self.options.fixed.get(value.label)
        made = (
            self.lists.cached(("fixed", fixed), (), lambda: list(fixed))
            if fixed
            else self.menu.states(value, value.state != "buffer")
        )
        takers = [t for t in dict.fromkeys(value.takers) if t in self.candidates]
        pairs = self._pairs(value, made, takers)
        usage: list[Use] = []
        saved_bytes, apart = np.zeros(len(pairs)), ()
        if value.state == "parameter":
            pairs, apart = self._parameter_strategies(value, made, pairs, takers)
            usage, saved_bytes = self.memory.of_copies(value, pairs, apart, takers)
        costs = self._second_layout_cost(value, pairs)
        size = self.memory.local_bytes(value, self.lists.ends(pairs).first)
        if value.state == "parameter" and self.calls.training and value.grad:
            usage.append(
                (
                    None,
                    self.lists.cached(
                        ("states", self.options.optimizer_state_ratio),
                        (size,),
                        lambda: size * (2 + self.options.optimizer_state_ratio),
                    ),
                )
            )
            key = "updating", value.dtype, self.options.optimizer_state_ratio
            costs = self.lists.cached(
                key,
                (costs, size),
                lambda: (
                    costs
                    + np.array(
                        [updating(self.prices.cluster, b, self.options, value.dtype) for b in size]
                    )
                ),
            )
        else:
            usage.append((None, size))
        self._add_value_node(value, pairs, costs, usage)
        node = self.node_of_value[value.number]
        self.copies[node], self.apart[node] = saved_bytes, apart

    def _add_call(self, number: int) -> None:
        call, strategies = self.calls.calls[number], self.candidates[number]
        costs = self.lists.cached(
            ("costs", self.options.computation, self.back),
            (strategies,),
            lambda: self._strategy_seconds(strategies),
        )
        usage: list[Use] = []
        if call.extra and self.calls.training:
            usage.append(
                (
                    self.memory.saved_interval(number),
                    self.lists.cached(
                        ("extra", call.extra), (strategies,), lambda: strategies.share * call.extra
                    ),
                )
            )
        for k, v in enumerate(call.outs):
            value = self.calls.values[v]
            if v in self.calls.outputs:
                costs = costs + self.prices.settled(value.shape, value.dtype, strategies.outs[k])
            if v not in self.node_of_value and not self.memory.shares_memory(value):
                usage += self.memory.of_value(value, strategies.outs[k])
        for k, v in enumerate(call.operands):
            value = self.calls.values[v]
            if value.saved and self.memory.has_single_user(value) and self.calls.training:
                usage.append(
                    (
                        self.memory.saved_interval(number),
                        self.memory.local_bytes(value, strategies.ins[k]),
                    )
                )
        self.node_of_call[number] = self.problem.node(costs, usage, name=call.name)

    def _strategy_seconds(self, strategies: StrategyTable) -> Array:
        own = np.where(strategies.backward > 0, (1 + self.back) / 2, 1.0) * strategies.moving
        return np.asarray(
            self.options.computation * (strategies.forward + self.back * strategies.backward) + own
        )

    def _add_computed_value(self, value: Value, takers: Sequence[int]) -> None:
        maker_layouts = self._maker_layouts(value)
        pairs = self._pairs(
            value,
            self.lists.cached(
                "different", (maker_layouts,), lambda: list(dict.fromkeys(maker_layouts))
            ),
            takers,
        )
        ends = self.lists.ends(pairs)
        usage = self.memory.of_value(value, ends.first)
        copies = self.memory.local_bytes(value, ends.second)
        if copies.any():
            usage.append(
                (
                    (value.maker, self.memory.last_use(value) + 1)
                    if not (value.saved and self.calls.training)
                    else self.memory.saved_interval(value.maker),
                    copies,
                )
            )
        self._add_value_node(value, pairs, self._second_layout_cost(value, pairs), usage)

    def _add_value_node(
        self, value: Value, pairs: list[Pair], costs: Array, usage: list[Use]
    ) -> None:
        node = self.problem.node(costs, usage, name=value.label)
        self.node_of_value[value.number] = node
        self.layouts[node] = pairs

    # Gathered parameters

    def _parameter_strategies(
        self, value: Value, made: Sequence[Layout], pairs: list[Pair], takers: Sequence[int]
    ) -> tuple[list[Pair], tuple[bool, ...]]:
        """Return the strategies of a parameter, and for each whether every call has its own copy.

        The strategies are those of ``pairs`` and one per copy that a call may need. Where several
        calls may need copies, one more strategy has a copy for each call.
        """
        wanted = [self._wanted_layouts(value, t) for t in takers]

        def make() -> tuple[list[Pair], tuple[bool, ...]]:
            copies: dict[Layout, dict[Layout, None]] = {x: {} for x in made}
            asked = [
                (w, self.memory.needs_more_memory(value, made, w))
                for w in (list(dict.fromkeys(w)) for w in wanted)
            ]
            several = []
            for x in made:
                own = [
                    [y for k, y in enumerate(w) if grown[made.index(x), k]] for w, grown in asked
                ]
                if len(own) == 1 or self.options.collect:
                    copies[x] = dict.fromkeys(itertools.chain(*own))
                if sum(map(bool, own)) > 1:
                    several.append(x)
            found = list(
                dict.fromkeys([*pairs, *((x, y) for x, those in copies.items() for y in those)])
            )
            return [*found, *((x, None) for x in several)], (False,) * len(found) + (True,) * len(
                several
            )

        return self.lists.cached(
            ("grown", value.shape, value.dtype.itemsize, self.options.collect),
            (made, pairs, *wanted),
            make,
        )

    # Changes of layout

    def _maker_layouts(self, value: Value) -> list[Layout]:
        return maker_layouts(self.calls, self.candidates, value)

    def _wanted_layouts(self, value: Value, taker: int) -> list[Layout]:
        return wanted_layouts(self.calls, self.candidates, value, taker)

    def _pairs(self, value: Value, made: Sequence[Layout], takers: Sequence[int]) -> list[Pair]:
        """Return the strategies of a value with its own node.

        A strategy is a pair: the layout that the value is made in, and one that it is also stored
        in.
        """
        wanted = [self._wanted_layouts(value, t) for t in takers] if self.options.collect else []

        def make() -> list[Pair]:
            alone: list[Pair] = [(x, None) for x in made]
            sets = [set(w) for w in wanted]
            several = [
                x
                for x in dict.fromkeys(itertools.chain(*wanted))
                if sum(x in w for w in sets) > 1 and not any(e.is_partial for e in x)
            ]
            return alone + [(x, y) for x in made for y in several if x != y]

        return self.lists.cached("pairs", (made, *wanted), make)

    def _key(self, name: str, value: Value) -> tuple[Any, ...]:
        """Return the cache key of a value's changes of layout, without the layouts.

        Changes with equal keys and equal layouts take the same time.
        """
        return (
            name,
            value.shape,
            value.dtype,
            value.grad,
            value.state == "parameter",
            self.seen,
            self.back,
            self.options.wait,
            self.options.freed and value.saved,
        )

    def _change_seconds(
        self, value: Value, layouts: Sequence[Layout], wanted: Sequence[Layout]
    ) -> Array:
        """Return the seconds from each of ``layouts`` to each of ``wanted``.

        The gradient's change in backward is included.
        """
        return self.lists.cached(
            self._key("change", value),
            (layouts, wanted),
            lambda: self._price_changes(value, list(layouts), list(wanted)),
        )

    def _price_changes(self, value: Value, layouts: list[Layout], wanted: list[Layout]) -> Array:
        graded = self.calls.training and value.grad
        if value.state == "parameter":
            fetch_seconds = self.prices.fetched(value.shape, value.dtype, layouts, wanted)
            if self.options.freed:
                fetch_seconds = fetch_seconds * np.array(
                    [
                        [
                            1 + is_gathered_twice(self.calls, self.options, value, x, y)
                            for y in wanted
                        ]
                        for x in layouts
                    ]
                )
            # The gradient of a leaf has the leaf's layout. Its reduction overlaps with computing,
            # the gathering of the leaf for a call does not.
            back = (
                self.seen * self.prices.gradients(value.shape, value.dtype, wanted, layouts).T
                if graded
                else 0.0
            )
            return np.asarray(fetch_seconds + self.options.wait * (fetch_seconds > 0) + back)
        return self._boxing_seconds(value, layouts, wanted)

    def _second_layout_cost(self, value: Value, pairs: Sequence[Pair]) -> Array:
        ends = self.lists.ends(pairs)
        if not ends.copies:
            return self.lists.cached("nothing", (pairs,), lambda: np.zeros(len(pairs)))
        table = self._change_seconds(value, ends.made, ends.copies)
        return self.lists.cached(
            "kept",
            (table, pairs),
            lambda: np.where(ends.of_copies < 0, 0.0, table[ends.of_made, ends.of_copies]),
        )

    def _edges(self, value: Value) -> None:
        node = self.node_of_value.get(value.number)
        takers = [t for t in dict.fromkeys(value.takers) if t in self.candidates]
        if node is None:
            if value.maker in self.candidates and takers:
                table = self._change_seconds(
                    value,
                    self._maker_layouts(value),
                    self._wanted_layouts(value, takers[0]),
                )
                self.problem.edge(
                    self.node_of_call[value.maker], self.node_of_call[takers[0]], table
                )
            return
        pairs = self.layouts[node]
        if value.maker >= 0:
            made = self._maker_layouts(value)
            same = self.lists.cached(
                "same",
                (made, pairs),
                lambda: np.array([[0.0 if x == p[0] else np.inf for p in pairs] for x in made]),
            )
            self.problem.edge(self.node_of_call[value.maker], node, same)
        for taker in takers:
            self.problem.edge(
                node,
                self.node_of_call[taker],
                self._seconds_from_pairs(
                    value,
                    pairs,
                    self._wanted_layouts(value, taker),
                    self.apart.get(node, ()),
                ),
            )

    def _seconds_from_pairs(
        self, value: Value, pairs: Sequence[Pair], wanted: Sequence[Layout], apart: tuple[bool, ...]
    ) -> Array:
        """Return the seconds from each pair of a value to each wanted layout.

        ``apart`` says for a parameter's pairs whether calls have their own copies. Where they do
        not, only the pair's second layout may need more memory than the stored one. Programs box a
        parameter only from its first layout, so a call uses the second one as it is or not at all.
        """

        def make() -> Array:
            ends = self.lists.ends(pairs)
            first = self._change_seconds(value, ends.made, wanted)[ends.of_made]
            if apart:
                first = np.where(
                    self.memory.needs_more_memory(value, ends.first, wanted)
                    & ~np.array(apart)[:, None],
                    np.inf,
                    first,
                )
            if ends.copies:
                # The change of the gradient on the way to the second layout is paid in the cost of
                # the pair.
                if value.state == "parameter":
                    second = np.array(
                        [[0.0 if x == y else np.inf for x in wanted] for y in ends.copies]
                    )
                else:
                    second = self._boxing_seconds(value, ends.copies, wanted)
                first = np.where(
                    (ends.of_copies >= 0)[:, None], np.minimum(first, second[ends.of_copies]), first
                )
            return first

        return self.lists.cached(self._key("taken", value), (pairs, wanted), make)

    def _boxing_seconds(
        self, value: Value, sources: Sequence[Layout], wanted: Sequence[Layout]
    ) -> Array:
        numbers, seconds = self.prices.table(value.shape, value.dtype, [*sources, *wanted])
        change_seconds = seconds[
            np.ix_([numbers[x] for x in sources], [numbers[x] for x in wanted])
        ]
        change_seconds = change_seconds + self.options.wait * (change_seconds > 0)
        if self.calls.training and value.grad:
            back = seconds[
                np.ix_([numbers[duals(x)] for x in wanted], [numbers[duals(x)] for x in sources])
            ].T
            change_seconds = change_seconds + self.back * back + self.options.wait * (back > 0)
        return np.asarray(change_seconds)
