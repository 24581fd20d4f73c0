"""The search as a problem for the solver: nodes for what is given, for calls and for tensors that
several calls take; costs and memory folded in.

One node stands for a call's forward and backward together: by duality the layout of a gradient
follows from that of the value (DESIGN section 3), so an edge prices a change of layout with its way
back. The gradient of a value with several takers is brought back from each of them to what its
maker needs.

A tensor that several calls take has a node of its own, whose strategies are pairs: the layout it is
made in, and one more that it is kept in as well, so that a change of layout that several takers
want is paid once (what OneFlow calls an sbp collector). So has a parameter of which calls may take
more than a rank keeps: what is gathered is a copy, and takes memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..._tensor.gradients.parameter_gather import BUCKET_BYTES as GATHERED_BYTES
from ..._tensor.gradients.reducer import BUCKET_BYTES
from ...boxing.moves import Layout, gathers
from ...cluster import Cluster
from ...sharding.placement import Placement
from ..cost.reshard_cost import ReshardCosts, duals
from ..cost.strategies import StrategyBuilder, StrategyTable
from ..ir.op_graph import Calls, Value
from ..solver import Problem, solve

__all__ = ["Formulation", "Options", "bucket_of", "formulate", "gathered_of", "hidden", "updating"]

Array = np.ndarray[Any, np.dtype[Any]]
Use = tuple[
    tuple[int, int] | None, Array
]  # from when to when (None: always), and bytes by strategy
_T = TypeVar("_T")
Pair = tuple[Layout, Layout | None]  # how a value is made, or given, and how it is kept as well
_PATIENCE = 120.0  # seconds for finding out how little memory would do


class _Ends(NamedTuple):
    """Of pairs: the two layouts of each; those that there are of either, once; and which of these
    the pairs have (-1: none)."""

    first: list[Layout]
    second: list[Layout | None]
    made: list[Layout]
    kept: list[Layout]
    of_made: Array
    of_kept: Array


@dataclass(frozen=True)
class Options:
    """What else a search may be told. ``computation``: weight of computing against moving.
    ``wait``: seconds that each change of layout costs besides what the cluster says. ``collect``:
    whether several takers may share one change of layout. ``states``: bytes of optimizer state for
    each byte of a parameter. ``fixed``: path of something given -> the layouts it may have.
    ``hidden``: the part of the gradients' traffic that hides behind computing (None: as the cluster
    says). ``summing``: which hides, that traffic behind the backward pass (0, where this is longer)
    or the backward pass behind it (1); what lies between is a bound of both (`parts.Weights`).
    ``freed``: whether gathered parameters are let go of after each use and gathered again in
    backward (`sharded.freed`); without, autograd keeps them."""

    computation: float = 1.0
    wait: float = 0.0
    collect: bool = True
    states: float = 2.0
    memory: int | None = None
    fixed: dict[str, tuple[Layout, ...]] = field(default_factory=dict)
    hidden: float | None = None
    summing: float = 0.0
    freed: bool = False


class FormulationCache:
    """What formulations of the same calls on the same mesh share: candidates of calls, and tables
    of prices, with the lists that they are of."""

    def __init__(
        self, cluster: Cluster, mesh: Placement, training: bool, bucket: int = 0, gathered: int = 0
    ) -> None:
        self.prices = ReshardCosts(cluster, mesh, bucket, gathered)
        self.menu = StrategyBuilder(self.prices, training)
        self.tables: dict[Any, tuple[tuple[Any, ...], Any]] = {}


@dataclass
class Formulation:
    """A problem and what its nodes mean."""

    calls: Calls
    mesh: Placement
    options: Options
    prices: ReshardCosts
    problem: Problem
    candidates: dict[int, StrategyTable]  # of each call that has a node
    node_of_call: dict[int, int]
    node_of_value: dict[int, int]
    layouts: dict[int, list[Pair]]  # node of a value -> its strategies
    copies: dict[
        int, Array
    ]  # node of a parameter -> bytes that autograd keeps of what was gathered, by its strategies
    known: FormulationCache

    def made(self, value: Value, choice: Sequence[int]) -> Layout:
        """How a value lies where it is made, or given."""
        if value.number in self.node_of_value:
            node = self.node_of_value[value.number]
            return self.layouts[node][choice[node]][0]
        call = self.calls.calls[value.maker]
        found = self.candidates[call.number]
        return found.outs[call.outs.index(value.number)][choice[self.node_of_call[call.number]]]

    def wanted(self, call: int, operand: int, choice: Sequence[int]) -> Layout:
        """How a call takes an operand."""
        return self.candidates[call].ins[operand][choice[self.node_of_call[call]]]

    def optimizing(self, choice: Sequence[int]) -> float:
        """Seconds of the optimizer's step."""
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
        """The least bytes a rank that some plan would do with; None where ``seconds`` (by default
        120) have not been enough to find one."""
        least = dataclasses.replace(self.under(freed=self.calls.training).problem, usage_limit=0)
        found = solve(least, seconds=_PATIENCE if seconds is None else seconds).least_usage
        return None if found is None else math.ceil(found[0])

    def under(self, **changed: Any) -> Formulation:
        """The problem under other options, that of the weight of computing as it is."""
        return formulate(
            self.calls,
            self.prices.cluster,
            self.mesh,
            dataclasses.replace(self.options, **changed),
            self.known,
        )

    def turned(self) -> Formulation:
        """The same problem with the other sum as its cost: the traffic of gradients hides behind
        the backward pass in the one, the backward pass behind that traffic in the other. What a
        choice costs is the larger of the two."""
        found = self.under(summing=1.0 - self.options.summing)
        found.problem.usage_limit = self.problem.usage_limit
        return found

    def twice(self, value: Value, src: Layout, dst: Layout) -> bool:
        """Whether a change of a parameter's layout is made again in backward."""
        return _twice(self.calls, self.options, value, src, dst)


def _twice(calls: Calls, options: Options, value: Value, src: Layout, dst: Layout) -> bool:
    return options.freed and calls.training and value.saved and bool(gathers(src, dst))


def updating(cluster: Cluster, nbytes: float, options: Options, dtype: Any) -> float:
    """Seconds of an optimizer's step on so many bytes of a parameter: it reads and writes them and
    its state, and reads the gradient."""
    return cluster.updating * cluster.compute(0.0, int(nbytes * (3 + 2 * options.states)), dtype)


def hidden(cluster: Cluster, options: Options) -> float:
    """The part of the traffic of parameters' gradients that hides behind computing."""
    return max(0.0, min(0.9, 2.0 - cluster.overlap)) if options.hidden is None else options.hidden


def bucket_of(calls: Calls) -> int:
    """Bytes of gradients that go together: all of them, up to the reducer's limit."""
    return (
        min(BUCKET_BYTES, sum(v.nbytes for v in calls.parameters if v.grad))
        if calls.training
        else 0
    )


def gathered_of(calls: Calls) -> int:
    """Bytes of parameters that are gathered together, likewise."""
    return min(GATHERED_BYTES, sum(v.nbytes for v in calls.parameters))


def formulate(
    calls: Calls,
    cluster: Cluster,
    mesh: Placement,
    options: Options,
    known: FormulationCache | None = None,
) -> Formulation:
    """The problem of one mesh. ``known``: of another formulation with the same computation weight
    and calls."""
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
        self.prices, self.menu, self.tables = known.prices, known.menu, known.tables
        hides = hidden(known.prices.cluster, options)
        self.seen, self.back = 1.0 - hides * (1.0 - options.summing), 1.0 - hides * options.summing
        self.problem = Problem("sbp", options.memory)
        self.candidates: dict[int, StrategyTable] = {}
        self.node_of_call: dict[int, int] = {}
        self.node_of_value: dict[int, int] = {}
        self.layouts: dict[int, list[Pair]] = {}
        self.copies: dict[int, Array] = {}
        self.apart: dict[int, tuple[bool, ...]] = {}  # of parameters
        self.end = len(calls.calls)

    def build(self) -> Formulation:
        live = [c for c in self.calls.calls if not c.wild]
        for call in live:
            self.candidates[call.number] = self.menu.of(call, self.calls.values)
        for value in self.calls.values:
            if value.state and any(t in self.candidates for t in value.takers):
                self._given(value)
        for call in live:
            self._call(call.number)
        for value in self.calls.values:
            takers = [t for t in dict.fromkeys(value.takers) if t in self.candidates]
            if not value.state and len(takers) > 1 and value.maker in self.candidates:
                self._held(value, takers)
        for value in self.calls.values:
            self._edges(value)
        return Formulation(
            self.calls, self.mesh, self.options, self.prices, self.problem, self.candidates,
            self.node_of_call, self.node_of_value, self.layouts, self.copies,
            self.known,
        )  # fmt: skip

    # Nodes

    def _given(self, value: Value) -> None:
        fixed = self.options.fixed.get(value.path or value.name)
        made = (
            self._once(("fixed", fixed), (), lambda: list(fixed))
            if fixed
            else self.menu.states(value, value.state != "buffer")
        )
        takers = [t for t in dict.fromkeys(value.takers) if t in self.candidates]
        pairs = self._pairs(value, made, takers)
        usage: list[Use] = []
        kept, apart = np.zeros(len(pairs)), ()
        if value.state == "parameter":
            pairs, apart = self._grown(value, made, pairs, takers)
            usage, kept = self._copied(value, pairs, apart, takers)
        costs = self._kept_cost(value, pairs)
        size = self._bytes(value, self._ends(pairs).first)
        if value.state == "parameter" and self.calls.training and value.grad:
            usage.append(
                (
                    None,
                    self._once(
                        ("states", self.options.states),
                        (size,),
                        lambda: size * (2 + self.options.states),
                    ),
                )
            )
            key = "updating", value.dtype, self.options.states
            costs = self._once(
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
        self._add(value, pairs, costs, usage)
        node = self.node_of_value[value.number]
        self.copies[node], self.apart[node] = kept, apart

    def _call(self, number: int) -> None:
        call, found = self.calls.calls[number], self.candidates[number]
        costs = self._once(
            ("costs", self.options.computation, self.back), (found,), lambda: self._costs(found)
        )
        usage: list[Use] = []
        if call.extra and self.calls.training:
            usage.append(
                (
                    self._kept(number),
                    self._once(("extra", call.extra), (found,), lambda: found.share * call.extra),
                )
            )
        for k, v in enumerate(call.outs):
            value = self.calls.values[v]
            if v in self.calls.outputs:
                costs = costs + self.prices.settled(value.shape, value.dtype, found.outs[k])
            if v not in self.node_of_value and not self._alias(value):
                usage += self._usage(value, found.outs[k])
        for k, v in enumerate(call.operands):
            value = self.calls.values[v]
            if value.saved and self._single(value) and self.calls.training:
                usage.append((self._kept(number), self._bytes(value, found.ins[k])))
        self.node_of_call[number] = self.problem.node(costs, usage, name=call.name)

    def _costs(self, found: StrategyTable) -> Array:
        own = np.where(found.backward > 0, (1 + self.back) / 2, 1.0) * found.moving
        return np.asarray(
            self.options.computation * (found.forward + self.back * found.backward) + own
        )

    def _held(self, value: Value, takers: Sequence[int]) -> None:
        given = self._made(value)
        pairs = self._pairs(
            value, self._once("different", (given,), lambda: list(dict.fromkeys(given))), takers
        )
        ends = self._ends(pairs)
        usage = self._usage(value, ends.first)
        copies = self._bytes(value, ends.second)
        if copies.any():
            usage.append(
                (
                    (value.maker, self._last(value) + 1)
                    if not (value.saved and self.calls.training)
                    else self._kept(value.maker),
                    copies,
                )
            )
        self._add(value, pairs, self._kept_cost(value, pairs), usage)

    def _add(self, value: Value, pairs: list[Pair], costs: Array, usage: list[Use]) -> None:
        node = self.problem.node(costs, usage, name=value.path or value.name)
        self.node_of_value[value.number] = node
        self.layouts[node] = pairs

    # Memory

    def _kept(self, number: int) -> tuple[int, int]:
        """From a call to its backward."""
        return number, 2 * self.end - number

    def _last(self, value: Value) -> int:
        return max(value.takers, default=value.maker)

    def _single(self, value: Value) -> bool:
        """Whether one call takes it, so that what is kept for backward is what that call has
        taken."""
        return not value.state and len(set(value.takers)) == 1 and value.maker in self.candidates

    def _alias(self, value: Value) -> bool:
        """Whether it shares the memory of the operand it was made of."""
        return self.calls.calls[value.maker].inplace or self.candidates[value.maker].free

    def _usage(self, value: Value, layouts: Sequence[Layout]) -> list[Use]:
        """What a computed value takes: until its last use; kept for backward; and its gradient
        there."""
        size = self._bytes(value, layouts)
        start, end = value.maker, self._last(value) + 1
        if not self.calls.training:
            return [((start, end), size)]
        if value.saved and not self._single(value):
            return [(self._kept(start), size)]
        found: list[Use] = [((start, end), size)]
        if value.grad:
            found.append(((2 * self.end - end, 2 * self.end - start), size))
        return found

    def _bytes(self, value: Value, layouts: Sequence[Layout | None]) -> Array:
        """Bytes of the largest part in each of these layouts; None is nothing."""
        return self._once(
            ("bytes", value.shape, value.dtype.itemsize),
            (layouts,),
            lambda: self._sized(value, layouts),
        )

    def _sized(self, value: Value, layouts: Sequence[Layout | None]) -> Array:
        return np.array(
            [
                0 if x is None else value.dtype.itemsize * self.prices.local(value.shape, x)
                for x in layouts
            ],
            dtype=float,
        )

    # What is gathered of parameters

    def _more(self, value: Value, src: Sequence[Layout], dst: Sequence[Layout]) -> Array:
        """Whether ``dst`` is more than a rank has in ``src``: it is a copy then, of which memory is
        kept account."""
        whole = np.array([not any(e.is_partial for e in y) for y in dst], dtype=bool)
        return np.asarray(
            (self._sized(value, dst)[None, :] > self._sized(value, src)[:, None]) & whole[None, :]
        )

    def _grown(
        self, value: Value, made: Sequence[Layout], pairs: list[Pair], takers: Sequence[int]
    ) -> tuple[list[Pair], tuple[bool, ...]]:
        """The strategies of a parameter: those of ``pairs``, each copy that a call may want, and,
        where several calls may, that each has its own; with whether that is so."""
        wanted = [self._wanted(value, t) for t in takers]

        def make() -> tuple[list[Pair], tuple[bool, ...]]:
            copies: dict[Layout, dict[Layout, None]] = {x: {} for x in made}
            asked = [
                (w, self._more(value, made, w)) for w in (list(dict.fromkeys(w)) for w in wanted)
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

        return self._once(
            ("grown", value.shape, value.dtype.itemsize, self.options.collect),
            (made, pairs, *wanted),
            make,
        )

    def _copied(
        self, value: Value, pairs: Sequence[Pair], apart: Sequence[bool], takers: Sequence[int]
    ) -> tuple[list[Use], Array]:
        """What copies of a parameter take, and how much of it autograd keeps: from the first use to
        its backward, or about each use. Where calls have their own copies, as much as these are at
        most."""
        wanted = [self._wanted(value, t) for t in takers]
        key = "copies", value.shape, value.dtype.itemsize, value.saved, self.options.freed
        size, noted = self._once(
            key, (pairs, *wanted), lambda: self._sizes(value, pairs, apart, wanted)
        )
        if not size.any():
            return [], size
        first, last = min(takers), max(takers)
        if not self.calls.training:
            return [((first, last + 1), size)], np.zeros(len(pairs))

        def make() -> tuple[Array, Array, Array]:
            kept = np.where(noted | (not value.saved), 0.0, size)
            # In backward it is there again, if it is let go of, and its gradient is until it has
            # been scattered.
            return kept, size - kept, (size - kept) * value.saved + size * value.grad

        kept, passing, again = self._once(("amounts", value.saved, value.grad), (size, noted), make)
        spans = (
            self._kept(first),
            (first, last + 1),
            (2 * self.end - last - 1, 2 * self.end - first),
        )
        return [
            (span, amounts)
            for span, amounts in zip(spans, (kept, passing, again), strict=True)
            if amounts.any()
        ], kept

    def _sizes(
        self,
        value: Value,
        pairs: Sequence[Pair],
        apart: Sequence[bool],
        wanted: Sequence[Sequence[Layout]],
    ) -> tuple[Array, Array]:
        """(bytes of copies, whether autograd keeps but a note of them) by strategy."""
        ends, most, grown = (
            self._ends(pairs),
            np.zeros(len(pairs)),
            np.zeros(len(pairs), dtype=bool),
        )
        if any(apart):
            for those in wanted:
                different = list(dict.fromkeys(those))
                most = most + (
                    self._more(value, ends.first, different)
                    * self._sized(value, different)[None, :]
                ).max(1)
        if ends.kept:
            grown = (ends.of_kept >= 0) & self._more(value, ends.made, ends.kept)[
                ends.of_made, ends.of_kept
            ]
        noted = np.array(
            [y is not None and _twice(self.calls, self.options, value, x, y) for x, y in pairs]
        )
        return np.where(apart, most, grown * self._bytes(value, ends.second)), noted

    def _once(self, key: Any, lists: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        """What other values and formulations have needed too, of these very lists: calls that are
        alike share theirs, so that nobody looks into them. They are kept, for an identity must not
        pass on to another."""
        key = key, *map(id, lists)
        found = self.tables.get(key)
        if found is None:
            found = self.tables[key] = lists, make()
        made: _T = found[1]
        return made

    # Changes of layout

    def _made(self, value: Value) -> list[Layout]:
        call = self.calls.calls[value.maker]
        return self.candidates[value.maker].outs[call.outs.index(value.number)]

    def _wanted(self, value: Value, taker: int) -> list[Layout]:
        call = self.calls.calls[taker]
        return self.candidates[taker].ins[call.operands.index(value.number)]

    def _pairs(self, value: Value, made: Sequence[Layout], takers: Sequence[int]) -> list[Pair]:
        """The strategies of a value with a node of its own: how it is made, and how it is kept as
        well."""
        wanted = [self._wanted(value, t) for t in takers] if self.options.collect else []

        def make() -> list[Pair]:
            alone: list[Pair] = [(x, None) for x in made]
            sets = [set(w) for w in wanted]
            several = [
                x
                for x in dict.fromkeys(itertools.chain(*wanted))
                if sum(x in w for w in sets) > 1 and not any(e.is_partial for e in x)
            ]
            return alone + [(x, y) for x in made for y in several if x != y]

        return self._once("pairs", (made, *wanted), make)

    def _ends(self, pairs: Sequence[Pair]) -> _Ends:
        def make() -> _Ends:
            first, second = [x for x, _ in pairs], [y for _, y in pairs]
            made, kept = (
                {x: i for i, x in enumerate(dict.fromkeys(those))}
                for those in (first, (y for y in second if y is not None))
            )
            of_kept = np.array([-1 if y is None else kept[y] for y in second], dtype=np.int64)
            return _Ends(
                first,
                second,
                list(made),
                list(kept),
                np.array([made[x] for x in first], dtype=np.int64),
                of_kept,
            )

        return self._once("ends", (pairs,), make)

    def _change(self, value: Value, layouts: Sequence[Layout], wanted: Sequence[Layout]) -> Array:
        """Seconds from each of ``layouts`` to each of ``wanted`` and, for the gradient, back."""
        freed = self.options.freed and value.saved
        key = (
            "change",
            value.shape,
            value.dtype,
            value.grad,
            value.state == "parameter",
            self.seen,
            self.back,
            self.options.wait,
            freed,
        )
        return self._once(
            key, (layouts, wanted), lambda: self._priced(value, list(layouts), list(wanted))
        )

    def _priced(self, value: Value, layouts: list[Layout], wanted: list[Layout]) -> Array:
        graded = self.calls.training and value.grad
        if value.state == "parameter":
            there = self.prices.fetched(value.shape, value.dtype, layouts, wanted)
            if self.options.freed:
                there = there * np.array(
                    [
                        [1 + _twice(self.calls, self.options, value, x, y) for y in wanted]
                        for x in layouts
                    ]
                )
            # A leaf keeps its gradient as it lies itself. What brings it there runs beside
            # computing, and what brings the leaf to a call does not.
            back = (
                self.seen * self.prices.gradients(value.shape, value.dtype, wanted, layouts).T
                if graded
                else 0.0
            )
            return np.asarray(there + self.options.wait * (there > 0) + back)
        return self._onwards(value, layouts, wanted)

    def _kept_cost(self, value: Value, pairs: Sequence[Pair]) -> Array:
        ends = self._ends(pairs)
        if not ends.kept:
            return self._once("nothing", (pairs,), lambda: np.zeros(len(pairs)))
        table = self._change(value, ends.made, ends.kept)
        return self._once(
            "kept",
            (table, pairs),
            lambda: np.where(ends.of_kept < 0, 0.0, table[ends.of_made, ends.of_kept]),
        )

    def _edges(self, value: Value) -> None:
        node = self.node_of_value.get(value.number)
        takers = [t for t in dict.fromkeys(value.takers) if t in self.candidates]
        if node is None:
            if value.maker in self.candidates and takers:
                table = self._change(value, self._made(value), self._wanted(value, takers[0]))
                self.problem.edge(
                    self.node_of_call[value.maker], self.node_of_call[takers[0]], table
                )
            return
        pairs = self.layouts[node]
        if value.maker >= 0:
            made = self._made(value)
            same = self._once(
                "same",
                (made, pairs),
                lambda: np.array([[0.0 if x == p[0] else np.inf for p in pairs] for x in made]),
            )
            self.problem.edge(self.node_of_call[value.maker], node, same)
        for taker in takers:
            self.problem.edge(
                node,
                self.node_of_call[taker],
                self._taken(value, pairs, self._wanted(value, taker), self.apart.get(node, ())),
            )

    def _taken(
        self, value: Value, pairs: Sequence[Pair], wanted: Sequence[Layout], apart: tuple[bool, ...]
    ) -> Array:
        """``apart``: of a parameter's pairs, whether calls have their own copies; else what is more
        than is kept is the second layout. Programs make no other from it: who wants another has it
        from the first."""

        def make() -> Array:
            ends = self._ends(pairs)
            first = self._change(value, ends.made, wanted)[ends.of_made]
            if apart:
                first = np.where(
                    self._more(value, ends.first, wanted) & ~np.array(apart)[:, None], np.inf, first
                )
            if ends.kept:
                # What becomes of its gradient on the way to the second layout is paid where the two
                # meet.
                if value.state == "parameter":
                    second = np.array(
                        [[0.0 if x == y else np.inf for x in wanted] for y in ends.kept]
                    )
                else:
                    second = self._onwards(value, ends.kept, wanted)
                first = np.where(
                    (ends.of_kept >= 0)[:, None], np.minimum(first, second[ends.of_kept]), first
                )
            return first

        freed = self.options.freed and value.saved
        key = (
            "taken",
            value.shape,
            value.dtype,
            value.grad,
            value.state == "parameter",
            self.seen,
            self.back,
            self.options.wait,
            freed,
        )
        return self._once(key, (pairs, wanted), make)

    def _onwards(self, value: Value, kept: Sequence[Layout], wanted: Sequence[Layout]) -> Array:
        numbers, seconds = self.prices.table(value.shape, value.dtype, [*kept, *wanted])
        there = seconds[np.ix_([numbers[x] for x in kept], [numbers[x] for x in wanted])]
        there = there + self.options.wait * (there > 0)
        if self.calls.training and value.grad:
            back = seconds[
                np.ix_([numbers[duals(x)] for x in wanted], [numbers[duals(x)] for x in kept])
            ].T
            there = there + self.back * back + self.options.wait * (back > 0)
        return np.asarray(there)
