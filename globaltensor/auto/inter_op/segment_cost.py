"""The exact minimum cost of a segment on a mesh, for each pair of boundary layouts.

`range_cost` and `stage_dp` call it for every kind of segment. A boundary layout is the layout of
the activation that the segment takes as input, or of the one that it returns.

Costs are stored separately by quantity. So one segment serves any number of micro-batches, stages
and schedules, and any price of memory:

F, B   seconds of the forward and of the backward pass of a micro-batch, with their communication
G      seconds a micro-batch of gathering parameters that are sharded, and of scattering their
       gradients; this traffic may hide behind computing
R      seconds a step of summing gradients; this traffic may hide behind the backward pass
O      seconds a step of the optimizer, with gathering the shards that it has updated
P      bytes of parameters, their gradients and the optimizer's state
A      bytes saved for backward, for each micro-batch in flight
X      bytes that are needed only temporarily: the maximum over calls, not the sum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from ...boxing.moves import Layout
from ...cluster import Cluster
from ...sharding.placement import Placement
from ...sharding.sbp import broadcast
from ..cost.batch_scaling import Batches, BatchMenu
from ..cost.reshard_cost import ReshardCosts, duals
from ..intra_op.formulate import bucket_of, hidden, updating
from ..intra_op.search_options import Options
from ..ir.op_graph import Calls, Value
from ..ir.segments import Chain, Segment
from .min_plus_elimination import Eliminated, Factor, TooWide, eliminate
from .option_pruning import Pairs, apart, cheapest, some, spread

__all__ = [
    "NEVER",
    "SMALL",
    "MeshContext",
    "ParameterStorage",
    "Quantity",
    "SegmentCosts",
    "SegmentProblem",
    "Weights",
]

Array = np.ndarray[Any, np.dtype[Any]]
Costs = dict[int, Array]


class Quantity:
    """The quantities of a segment: keys of its costs, and indices of the first axis of its tables.

    Seconds of a micro-batch: `FORWARD` and `BACKWARD` (computing and moving), `GATHERS` (of
    parameters). Seconds of a step: `REDUCTIONS` (of gradients), `OPTIMIZER`. Bytes of a rank:
    `PARAMETERS` (with their gradients and optimizer state), `ACTIVATIONS` (of each micro-batch in
    flight), `WORKSPACE` (the largest memory in use for a moment; the others add up).
    """

    FORWARD, BACKWARD, GATHERS, REDUCTIONS, OPTIMIZER, PARAMETERS, ACTIVATIONS, WORKSPACE = range(8)
    COUNT = 8


#: Seconds of what is impossible. It is finite, so that a product with a weight of 0 is 0.
NEVER: Final = 1e15
_MAX_TABLE_ENTRIES: Final = 1 << 21  # the maximum number of entries of a table
SMALL: Final = 1 / 64  # a value is small below this fraction of the bytes of the largest value


class ParameterStorage(NamedTuple):
    """The way a parameter is stored.

    ``layout`` is its layout for the calls of its stage, ``shares`` its layout for the optimizer.
    ``zero`` is the stage of ZeRO, 0 to 2. A fully sharded parameter (stage 3) is a ``layout`` of
    its own.
    """

    layout: Layout
    zero: int
    shares: Layout


class Weights(NamedTuple):
    """The weights of a second of a micro-batch, a second of a step, and a byte.

    ``gathers`` is the fraction of the time for gathering parameters that counts.

    Two durations a and b that overlap take max(a, b) + seen * min(a, b), which no linear cost
    expresses. A linear lower bound is (1 - h x) a + (1 - h (1 - x)) b with h = 1 - seen. It holds
    for any x in [0, 1], and is exact for some x. ``gathering`` is this x for computing (a) and
    gathering (b). ``summing`` is this x for the last backward pass (a) and summing gradients (b).
    Each is 0 where computing takes longer.
    """

    time: float
    step: float
    stored: float = 0.0
    activations: float = 0.0
    gathers: float = 1.0
    gathering: float = 0.0
    summing: float = 0.0


@dataclass(frozen=True)
class SegmentCosts:
    """The minimum costs of a segment.

    ``score`` has the weighted cost for each combination of layouts of the shared values (hubs),
    layout of the input and layout of the output. ``parts`` has its quantities (first axis:
    `Quantity`).
    """

    score: Array
    parts: Array
    choice: dict[int, Array]  # node of the segment -> its option


class MeshContext:
    """A mesh of a cluster with a batch of ``rows`` rows: the data that all segments share there."""

    def __init__(
        self,
        batches: Batches,
        rows: int,
        cluster: Cluster,
        mesh: Placement,
        options: Options,
        chain: Chain,
        prices: ReshardCosts | None = None,
    ) -> None:
        self.calls: Calls = batches.at(rows)
        self.cluster, self.mesh, self.options, self.chain = cluster, mesh, options, chain
        self.prices = prices or ReshardCosts(cluster, mesh, bucket_of(self.calls))
        self.menu = BatchMenu(self.prices, batches, rows)
        self.seen = 1.0 - hidden(cluster, options)
        self.whole: Layout = (broadcast,) * len(mesh.shape)
        self.hubs = {h: self._hub(self.calls.values[h]) for h in chain.hubs}
        #: The options of each hub, by number, that are searched together with everything else.
        self.active = {h: list(range(len(options))) for h, options in self.hubs.items()}
        self._changes: dict[Any, tuple[Array, Array]] = {}
        self._parts: dict[int, SegmentProblem] = {}

    def part(self, kind: int) -> SegmentProblem:
        """Return the problem of the segments of a kind."""
        problem = self._parts.get(kind)
        if problem is None:
            problem = self._parts[kind] = SegmentProblem(
                self, self.chain.segments[self.chain.first[kind]]
            )
        return problem

    def faces(self, number: int) -> list[Layout]:
        """List the boundary layouts that a value may have between segments. None is partial."""
        return self.menu.states(self.calls.values[number], True) if number >= 0 else [self.whole]

    def _hub(self, value: Value) -> list[Any]:
        if value.state:
            return self.storages(value)
        return self.menu.states(value, True)

    def starts(self) -> list[dict[int, list[int]]]:
        """List initial layouts for all shared values (hubs).

        The k-th entry shards dim 0 of the values that carry the batch along the first k axes of the
        mesh, and replicates all else.
        """
        found = []
        for many in range(len(self.mesh.shape) + 1):
            found.append({h: [self._nearest(h, options, many)] for h, options in self.hubs.items()})
        return found

    def _nearest(self, h: int, options: Sequence[Any], many: int) -> int:
        value = self.calls.values[h]
        rows = value.state != "parameter" and bool(value.shape) and value.shape[0] > 1

        def off(k: int) -> tuple[int, int]:
            option = options[k]
            layout = option.layout if isinstance(option, ParameterStorage) else option
            wanted = [rows and a < many for a in range(len(layout))]
            wrong = sum(
                (e.is_split and e.dim == 0) != w for e, w in zip(layout, wanted, strict=True)
            ) + sum(e.is_split and e.dim != 0 for e in layout)
            return wrong, k

        return min(range(len(options)), key=off)

    def bytes(self, value: Value, layouts: Sequence[Layout]) -> Array:
        known = {
            x: float(value.dtype.itemsize * self.prices.local(value.shape, x))
            for x in dict.fromkeys(layouts)
        }
        return np.array([known[x] for x in layouts])

    def storages(self, value: Value) -> list[ParameterStorage] | list[Layout]:
        """List the ways in which a parameter, buffer or input may be stored."""
        layouts = self.menu.states(value, value.state != "buffer")
        fixed = self.options.fixed.get(value.label)
        layouts = list(fixed) if fixed else layouts
        if value.state != "parameter":
            return layouts
        storages = [ParameterStorage(x, 0, x) for x in layouts]
        if self.calls.training and value.grad and self.options.optimizer_state_ratio:
            storages += [
                ParameterStorage(x, zero, y)
                for x in layouts
                if (y := self._fully_sharded_layout(value, x)) is not None
                for zero in (1, 2)
            ]
        return storages

    def _fully_sharded_layout(self, value: Value, layout: Layout) -> Layout | None:
        """Return the layout that shards a parameter over all axes on which it is replicated."""
        alike = [a for a, e in enumerate(layout) if e.is_broadcast and self.mesh.shape[a] > 1]
        if not alike:
            return None
        able = [
            y for y in self.menu.states(value, True)
            if all(y[a].is_split for a in alike) and all(y[a] is layout[a] for a in range(len(layout)) if a not in alike)  # noqa: E501
        ]  # fmt: skip
        if not able:
            return None
        numbers, seconds = self.prices.table(value.shape, value.dtype, [layout, *able])
        return min(able, key=lambda y: float(seconds[numbers[y], numbers[layout]]))

    def change(
        self, value: Value, src: Sequence[Layout], dst: Sequence[Layout]
    ) -> tuple[Array, Array]:
        """Return seconds to move a value from each of ``src`` to each of ``dst``.

        The second table has the seconds to move its gradient back.
        """
        back = bool(self.calls.training and value.grad)
        key = value.shape, value.dtype, back, tuple(src), tuple(dst)
        seconds_both_ways = self._changes.get(key)
        if seconds_both_ways is None:
            numbers, seconds = self.prices.table(
                value.shape, value.dtype, [*dict.fromkeys([*src, *dst])]
            )
            forward = np.minimum(
                seconds[np.ix_([numbers[x] for x in src], [numbers[x] for x in dst])], NEVER
            )
            forward = forward + self.options.wait * (forward > 0)
            backward = np.zeros_like(forward)
            if back:
                backward = np.minimum(
                    seconds[
                        np.ix_([numbers[duals(x)] for x in dst], [numbers[duals(x)] for x in src])
                    ].T,
                    NEVER,
                )
                backward = backward + self.options.wait * (backward > 0)
            seconds_both_ways = self._changes[key] = forward, backward
        return seconds_both_ways

    def fetch(
        self, value: Value, storages: Sequence[ParameterStorage], wanted: Sequence[Layout]
    ) -> Costs:
        """Price the traffic of calls that take a parameter, by stored layout and wanted layout."""
        layouts = [s.layout for s in storages]
        fetch_seconds = np.minimum(
            self.prices.fetched(value.shape, value.dtype, layouts, wanted), NEVER
        )
        held = np.where(fetch_seconds > 0, self.bytes(value, wanted)[None, :], 0.0)
        if not (self.calls.training and value.grad):
            return {Quantity.GATHERS: fetch_seconds, Quantity.WORKSPACE: held}
        sums = np.minimum(
            self.prices.gradients(value.shape, value.dtype, wanted, [s.shares for s in storages]).T,
            NEVER,
        )
        # A sharded parameter is gathered again in backward, and its gradient is scattered for each
        # micro-batch. Otherwise gradients are summed once a step.
        each = (fetch_seconds > 0) | np.array([s.zero == 2 for s in storages])[:, None]
        return {
            Quantity.GATHERS: 2 * fetch_seconds + np.where(each, sums, 0.0),
            Quantity.REDUCTIONS: np.where(each, 0.0, sums),
            Quantity.WORKSPACE: 2 * held,
        }

    def keeping(self, value: Value, storages: Sequence[Any]) -> Costs:
        """Price the storage of a parameter, buffer or input: bytes, and seconds each step."""
        if value.state != "parameter":
            return {Quantity.PARAMETERS: self.bytes(value, storages)}
        whole = self.bytes(value, [s.layout for s in storages])
        if not (self.calls.training and value.grad):
            return {Quantity.PARAMETERS: whole}
        own, states = (
            self.bytes(value, [s.shares for s in storages]),
            self.options.optimizer_state_ratio,
        )
        zero = np.array([s.zero for s in storages])
        numbers, seconds = self.prices.table(
            value.shape,
            value.dtype,
            list(dict.fromkeys(x for s in storages for x in (s.layout, s.shares))),
        )
        again = np.array([seconds[numbers[s.shares], numbers[s.layout]] for s in storages])
        step = np.array([updating(self.cluster, n, self.options, value.dtype) for n in own])
        return {
            Quantity.PARAMETERS: whole + np.where(zero == 2, own, whole) + states * own,
            Quantity.OPTIMIZER: step + again,
        }


@dataclass
class SegmentProblem:
    """A kind of segment on a mesh as a problem: nodes and edges with their costs.

    The costs are ready to be weighted and minimised.
    """

    ground: MeshContext
    segment: Segment
    sizes: dict[int, int] = field(default_factory=dict)
    costs: list[Costs] = field(default_factory=list)
    edges: list[tuple[int, int, Costs]] = field(default_factory=list)
    options: list[Any] = field(default_factory=list)  # the strategies of each node
    node_of: dict[tuple[str, int], int] = field(
        default_factory=dict
    )  # ("call" | "value" | "face", number) -> node
    exact: bool = True  # all options were considered, with the hubs' layouts common to all segments
    sound: bool = True  # the result for this segment alone is a lower bound
    pairs: dict[int, Pairs] = field(default_factory=dict)
    #: How often there were too many options, with layouts of hubs that suit this segment alone
    #: (True) and with those common to all segments (False).
    fewer: dict[bool, int] = field(default_factory=dict)
    _solved: dict[Any, SegmentCosts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g, s = self.ground, self.segment
        values = g.calls.values
        self.hubs = [self._add_node("value", h, g.hubs[h], {}) for h in g.chain.hubs if h in s.hubs]
        self.taken = self._add_node("face", s.takes, g.faces(s.takes), {})
        same = s.takes == s.gives and s.takes >= 0
        self.gave = self._add_node("gives", s.gives, g.faces(s.gives), {})
        if same:
            self._add_edge(
                self.taken,
                self.gave,
                {
                    Quantity.FORWARD: np.where(
                        np.eye(self.sizes[self.taken], dtype=bool), 0.0, NEVER
                    )
                },
            )
        self.candidates = {number: g.menu.of(g.calls.calls[number], values) for number in s.calls}
        self.takers: dict[int, list[int]] = {}
        for number in s.calls:
            for v in dict.fromkeys(g.calls.calls[number].operands):
                self.takers.setdefault(v, []).append(number)
        for number in s.calls:
            self._add_call(number)
        for h in s.hubs:
            if (
                values[h].state
                and g.chain.segments[_first_segment_with(g.chain, h)].calls == s.calls
            ):
                self.costs[self.node_of["value", h]].update(g.keeping(values[h], g.hubs[h]))
        for v in s.own_states:
            storages = g.storages(values[v])
            self._add_node("value", v, storages, g.keeping(values[v], storages))
        for number in s.calls:
            for v in g.calls.calls[number].outs:
                self._add_maker_edge(values[v])
        for v in self.takers:
            self._add_user_edges(values[v])

    # Build the problem

    def _add_node(self, what: str, number: int, options: Sequence[Any], costs: Costs) -> int:
        node = len(self.costs)
        self.sizes[node] = len(options)
        self.costs.append(dict(costs))
        self.options.append(list(options))
        self.node_of[what, number] = node
        return node

    def _add_edge(self, i: int, j: int, costs: Costs) -> None:
        self.edges.append((i, j, costs))

    def _add_call(self, number: int) -> None:
        g, call, strategies = self.ground, self.ground.calls.calls[number], self.candidates[number]
        values, training = g.calls.values, g.calls.training
        backward = strategies.backward > 0
        moving = np.where(backward, strategies.moving / 2, strategies.moving)
        costs = {
            Quantity.FORWARD: g.options.computation * strategies.forward + moving,
            Quantity.BACKWARD: g.options.computation * strategies.backward
            + np.where(backward, moving, 0.0),
        }
        if training:
            saved_bytes = strategies.share * call.extra
            for v in dict.fromkeys(call.operands):
                value = values[v]
                if value.saved and not value.state and not value.plain and self._has_single_user(v):
                    saved_bytes = saved_bytes + g.bytes(
                        value, strategies.ins[call.operands.index(v)]
                    )
            costs[Quantity.ACTIVATIONS] = saved_bytes
        busy = np.zeros(len(strategies))
        for k, v in enumerate(call.outs):
            if v in g.calls.outputs:
                costs[Quantity.FORWARD] = costs[Quantity.FORWARD] + g.prices.settled(
                    values[v].shape, values[v].dtype, strategies.outs[k]
                )
            busy = busy + g.bytes(values[v], strategies.outs[k])
        costs[Quantity.WORKSPACE] = busy * (1 + training)
        self._add_node("call", number, range(len(strategies)), costs)

    def _has_single_user(self, v: int) -> bool:
        """Return True if a single call takes the value.

        Then the layout saved for backward is the one in which that call takes the value.
        """
        return v not in self.ground.chain.hubs and len(set(self.ground.calls.values[v].takers)) == 1

    def _add_maker_edge(self, value: Value) -> None:
        """Add an edge from the call that makes a value to the node that represents the value."""
        g, s = self.ground, self.segment
        call = g.calls.calls[value.maker]
        made = self.candidates[call.number].outs[call.outs.index(value.number)]
        maker = self.node_of["call", call.number]
        if value.number == s.gives:
            self._add_change_edge(value, maker, made, self.gave, self.options[self.gave])
        elif value.number in s.hubs:
            hub = self.node_of["value", value.number]
            self._add_change_edge(value, maker, made, hub, self.options[hub])
            if value.saved and g.calls.training:
                self.costs[hub][Quantity.ACTIVATIONS] = g.bytes(value, self.options[hub])
        elif len(self.takers.get(value.number, ())) > 1:
            self._add_shared_value(value, maker, made)

    def _add_change_edge(
        self, value: Value, i: int, src: Sequence[Layout], j: int, dst: Sequence[Layout]
    ) -> None:
        there, back = self.ground.change(value, src, dst)
        self._add_edge(i, j, {Quantity.FORWARD: there, Quantity.BACKWARD: back})

    def _add_shared_value(self, value: Value, before: int, made: Sequence[Layout]) -> None:
        """Add a node for a value that several calls take.

        Its options are pairs of layouts. The first is the one in which the value is made. The
        second is one in which it is saved as well, so that calls can share a change of layout.
        """
        g = self.ground
        several: list[Layout] = []
        if g.options.collect and len(g.mesh.shape) < 3:
            wanted = [set(self._wanted_layouts(value.number, t)) for t in self.takers[value.number]]
            several = [
                x
                for x in dict.fromkeys(y for w in wanted for y in sorted(w, key=str))
                if sum(x in w for w in wanted) > 1
            ]
            several = [x for x in several if not any(e.is_partial for e in x)]
        layouts = list(dict.fromkeys(made))
        pairs = [(x, y) for x in layouts for y in (None, *several) if x != y]
        costs: Costs = {}
        size = np.array([0.0 if y is None else 1.0 for _, y in pairs])
        if several:
            there, back = g.change(value, layouts, several)
            where = [(layouts.index(x), several.index(y) if y is not None else 0) for x, y in pairs]
            costs = {
                Quantity.FORWARD: np.array([there[w] for w in where]) * size,
                Quantity.BACKWARD: np.array([back[w] for w in where]) * size,
            }
        if value.saved and g.calls.training:
            costs[Quantity.ACTIVATIONS] = g.bytes(value, [x for x, _ in pairs]) + np.array(
                [0.0 if y is None else g.bytes(value, [y])[0] for _, y in pairs]
            )
        node = self._add_node("value", value.number, pairs, costs)
        if several:
            largest = max(g.calls.values[v].nbytes for v in self.takers)
            self.pairs[node] = Pairs(
                tuple(pairs.index((x, None)) for x, _ in pairs),
                len(self.takers[value.number]),
                value.nbytes < SMALL * largest,
            )
        first = np.array([[0.0 if x == p[0] else NEVER for p in pairs] for x in made])
        self._add_edge(before, node, {Quantity.FORWARD: first})

    def _wanted_layouts(self, v: int, taker: int) -> list[Layout]:
        call = self.ground.calls.calls[taker]
        return self.candidates[taker].ins[call.operands.index(v)]

    def _add_user_edges(self, value: Value) -> None:
        """Add edges from the node that represents a value to the calls that take the value."""
        g, s, v = self.ground, self.segment, value.number
        takers = self.takers[v]
        if v == s.takes and v != s.gives and len(takers) > 1 and len(g.mesh.shape) < 3:
            self._add_shared_value(value, self.taken, self.options[self.taken])
        elif v == s.takes and value.saved and g.calls.training and not self._has_single_user(v):
            self.costs[self.taken][Quantity.ACTIVATIONS] = g.bytes(value, self.options[self.taken])
        node = self.node_of.get(
            ("value", v), self.taken if v == s.takes else self.gave if v == s.gives else None
        )
        for taker in takers:
            wanted, j = self._wanted_layouts(v, taker), self.node_of["call", taker]
            if node is not None and value.state == "parameter":
                self._add_edge(node, j, g.fetch(value, self.options[node], wanted))
            elif (
                node is not None
                and ("value", v) in self.node_of
                and not value.state
                and v not in s.hubs
            ):
                self._add_edge(node, j, self._costs_from_pairs(value, self.options[node], wanted))
            elif node is not None:
                self._add_change_edge(value, node, self.options[node], j, wanted)
            elif value.plain:
                self._add_cost(j, Quantity.FORWARD, g.change(value, [g.whole], wanted)[0][0])
            elif value.maker in self.candidates:
                call = g.calls.calls[value.maker]
                self._add_change_edge(
                    value,
                    self.node_of["call", value.maker],
                    self.candidates[value.maker].outs[call.outs.index(v)],
                    j,
                    wanted,
                )

    def _add_cost(self, node: int, quantity: str, amounts: Array) -> None:
        self.costs[node][quantity] = self.costs[node].get(quantity, 0.0) + amounts

    def _costs_from_pairs(
        self, value: Value, pairs: Sequence[tuple[Layout, Layout | None]], wanted: Sequence[Layout]
    ) -> Costs:
        g = self.ground
        there, back = g.change(value, [x for x, _ in pairs], wanted)
        seconds, home = g.change(value, [x if y is None else y for x, y in pairs], wanted)
        better = seconds + home < there + back
        return {
            Quantity.FORWARD: np.where(better, seconds, there),
            Quantity.BACKWARD: np.where(better, home, back),
        }

    # Solve it

    def solve(
        self, weights: Weights, recomputed: bool = False, loose: bool = False
    ) -> SegmentCosts:
        """Minimise the cost of the segment for each combination of layouts of hubs and ends.

        Only the active options of hubs count. ``recomputed``: the forward pass runs again in
        backward, so only the segment's input is saved. ``loose``: hubs may have the layouts here
        that suit this segment alone.
        """
        if loose and not self.hubs:
            found = self.solve(weights, recomputed)
            if self.exact:
                return found
        active = tuple(
            tuple(self.ground.active[h]) for h in self.ground.chain.hubs if h in self.segment.hubs
        )
        key = weights, recomputed, None if loose else active
        known = self._solved.get(key)
        if known is None:
            known = self._solved[key] = self._solve(
                weights, recomputed, None if loose else dict(zip(self.hubs, active, strict=True))
            )
        return known

    def _solve(
        self, weights: Weights, recomputed: bool, active: Mapping[int, Sequence[int]] | None
    ) -> SegmentCosts:
        time, step, stored, activations, gathers, x, y = weights
        hides = 1.0 - self.ground.seen
        # All passes overlap with gathering. The last backward pass of a step overlaps with summing
        # gradients as well.
        forward = time * (1 - hides * x)
        backward, gathering = (
            forward - step * hides * (y - x),
            time * (1 - hides * (1 - x)) + step * hides * (y - x) / 2,
        )
        per = {
            Quantity.FORWARD: forward + recomputed * backward,
            Quantity.BACKWARD: backward,
            Quantity.GATHERS: gathering * gathers,
            Quantity.REDUCTIONS: step * (1 - hides * (1 - y)),
            Quantity.OPTIMIZER: step,
            Quantity.PARAMETERS: stored,
        }
        per[Quantity.ACTIVATIONS] = 0.0 if recomputed else activations
        rows: list[tuple[tuple[int, ...], Costs]] = [
            ((i,), costs) for i, costs in enumerate(self.costs) if costs
        ]
        rows += [((i, j), costs) for i, j, costs in self.edges]
        eliminated, options_of = self._eliminate_nodes(
            [(nodes, _weighted(costs, per)) for nodes, costs in rows], active
        )
        choice = eliminated.choices()
        for node, those in options_of.items():
            choice[node] = np.asarray(those)[choice[node]]
        parts = np.zeros((Quantity.COUNT, *eliminated.values.shape))
        for nodes, costs in rows:
            where = tuple(choice[n] for n in nodes)
            for q, amounts in costs.items():
                if active is None:
                    # a value may have several layouts at once here
                    amounts = np.where(amounts < NEVER / 10, amounts, 0.0)
                if q == Quantity.WORKSPACE:
                    np.maximum(parts[q], amounts[where], out=parts[q])
                else:
                    parts[q] += amounts[where]
        score = eliminated.values
        if recomputed:
            parts[Quantity.BACKWARD] += parts[Quantity.FORWARD]
            parts[Quantity.WORKSPACE] += parts[Quantity.ACTIVATIONS]
            value = (
                self.ground.calls.values[self.segment.takes] if self.segment.takes >= 0 else None
            )
            boundary = (
                self.ground.bytes(value, self.options[self.taken])
                if value is not None
                else np.zeros(1)
            )
            parts[Quantity.ACTIVATIONS] = boundary[:, None]
            score = score + activations * boundary[:, None]
        return SegmentCosts(np.where(score < NEVER / 10, score, np.inf), parts, choice)

    def _eliminate_nodes(
        self, factors: Sequence[Factor], active: Mapping[int, Sequence[int]] | None
    ) -> tuple[Eliminated, dict[int, Sequence[int]]]:
        """Eliminate all nodes except the ends and the active hubs.

        Return the result, and the options left for each restricted node, by number. ``active=None``
        means that this segment is solved alone. Raises TooWide where hubs could have fewer options
        instead.

        Where tables would be too wide, nodes get fewer and fewer options: those that are cheapest
        regardless of the neighbours, and the first. The solution of a segment alone has to give a
        bound. There each call first takes small values in the layout that suits it, and pays an
        even share of second layouts, independent of other calls. Only after that are options
        removed.
        """
        alone, active = active is None, active or {}
        ends = [*active, self.taken, self.gave]
        while True:
            level = self.fewer.get(alone, 0)
            options_of, tables, gone = dict(active), list(factors), level
            if alone and level:
                single = {n: p for n, p in self.pairs.items() if not p.small}
                small, gone = [n for n, p in self.pairs.items() if p.small], level - 1
                tables = [spread(apart(f, small), factors, single) for f in factors]
                options_of |= {n: sorted(set(p.alone)) for n, p in single.items()}
            if gone:
                most = max(self.sizes.values()) >> gone
                wide = [
                    n
                    for n, size in self.sizes.items()
                    if n not in ends and len(options_of.get(n, range(size))) > most
                ]
                options_of |= {n: cheapest(n, factors, most, options_of.get(n)) for n in wide}
            fewer = [some(f, options_of, ends) for f in tables]
            try:
                return eliminate(
                    {
                        n: len(options_of[n]) if n in options_of else size
                        for n, size in self.sizes.items()
                    },
                    fewer,
                    ends,
                    _MAX_TABLE_ENTRIES,
                ), options_of
            except TooWide:
                if any(len(those) > 1 for those in active.values()):
                    raise
                self.fewer[alone] = level + 1
                if alone:
                    self.sound = self.sound and level < 1
                else:
                    self.exact = False

    def strategies(
        self, weights: Weights, recomputed: bool, ends: tuple[int, ...]
    ) -> dict[tuple[str, int], int]:
        """Map ("call" | "value", number) to its strategy in the minimum for these ``ends``.

        The ends are the layouts of the hubs, of the input and of the output, by number.
        """
        choice = self.solve(weights, recomputed).choice
        return {name: int(choice[node][ends]) for name, node in self.node_of.items()}


def _weighted(costs: Mapping[int, Array], per: Mapping[int, float]) -> Array:
    total = 0.0
    for q, amounts in costs.items():
        weight = per.get(q, 0.0)
        if weight:
            total = total + weight * amounts
    if isinstance(total, float):
        shape = np.shape(next(iter(costs.values())))
        return np.zeros(shape)
    return total


def _first_segment_with(chain: Chain, hub: int) -> int:
    return next(k for k, s in enumerate(chain.segments) if hub in s.hubs)
