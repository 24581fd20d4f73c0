"""The changes of layout that a choice implies for a value.

They are between the layout it is made in, the one it is also stored in, and the one of each call
that uses it. The other modules of `intra_op` use them, and `inter_op/build_plan.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

from ...boxing.moves import MOVES, Layout
from ...sharding.sbp import broadcast
from ..cost.reshard_cost import Routes, duals
from ..ir.op_graph import Value
from ..plan.plan import LayoutChange
from .formulate import Formulation

__all__ = ["ChangeClass", "Changes", "collectives", "short"]

_LOCAL: Final = ("slice", "pad", "mask")


class ChangeClass(NamedTuple):
    """A change of layout without names.

    ``takers`` are indices among the calls that use the value.
    """

    change: LayoutChange
    takers: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.change.forward + self.change.backward


class Changes:
    """The changes of layout of one formulation, cached for values in equal situations."""

    def __init__(self, f: Formulation) -> None:
        self.f = f
        self._found: dict[Hashable, tuple[ChangeClass, ...]] = {}
        self._situations: dict[int, int] = {}  # by number of the value
        self._numbers: dict[Hashable, int] = {}
        self._tables: dict[Hashable, Routes] = {}
        # By id of the pairs of a value with a node of its own.
        self._ends: dict[int, tuple[list[Layout], list[Layout]]] = {}
        self._outputs = frozenset(f.calls.outputs)
        # By number of the value: (call that uses it, index of the operand).
        self._takers: dict[int, list[tuple[int, int]]] = {}

    def of(self, value: Value, choice: Sequence[int]) -> list[LayoutChange]:
        """Return the changes of a value with names."""
        return [self.named(kind, value) for kind in self.kinds(value, choice)]

    def named(self, kind: ChangeClass, value: Value) -> LayoutChange:
        calls, takers = self.f.calls.calls, self.takers(value)
        return dataclasses.replace(
            kind.change,
            value=value.label,
            taker=" ".join(calls[takers[i][0]].name for i in kind.takers) or "output",
        )

    def takers(self, value: Value) -> list[tuple[int, int]]:
        takers = self._takers.get(value.number)
        if takers is None:
            calls = self.f.calls.calls
            takers = [
                (t, calls[t].operands.index(value.number))
                for t in dict.fromkeys(value.takers)
                if t in self.f.candidates
            ]
            self._takers[value.number] = takers
        return takers

    def kinds(self, value: Value, choice: Sequence[int]) -> tuple[ChangeClass, ...]:
        """Return the changes of a value without names.

        A second layout that several calls share is listed once. For a result of the model, the
        reduction of its partial sums is listed too.
        """
        f, takers, result = self.f, self.takers(value), value.number in self._outputs
        node = f.node_of_value.get(value.number)
        # A state without a node is a result as it is: no call uses it.
        if not (takers or result) or (node is None and value.maker not in f.candidates):
            return ()
        second = None if node is None else f.layouts[node][choice[node]][1]
        made = f.made(value, choice)
        wanted = tuple(f.candidates[t].ins[i][choice[f.node_of_call[t]]] for t, i in takers)
        key = self.situation(value), made, second, wanted
        classes = self._found.get(key)
        if classes is None:
            classes = self._found[key] = (
                *self._list_changes(value, made, second, wanted),
                *(self._partial_reductions(value, made) if result else ()),
            )
        return classes

    def situation(self, value: Value) -> int:
        """Return a number that is equal for values with equal possible changes and costs.

        It depends on the value's properties, and on the layouts that its maker and its calls could
        choose.
        """
        number = self._situations.get(value.number)
        if number is None:
            f, node = self.f, self.f.node_of_value.get(value.number)
            lists = (
                id(f.candidates[value.maker]) if node is None else id(f.layouts[node]),
                *((id(f.candidates[t]), i) for t, i in self.takers(value)),
            )
            alike = (
                value.shape,
                value.dtype,
                value.grad,
                value.saved,
                value.state == "parameter",
                value.number in self._outputs,
                lists,
            )
            number = self._situations[value.number] = self._numbers.setdefault(
                alike, len(self._numbers)
            )
        return number

    def _list_changes(
        self, value: Value, made: Layout, second: Layout | None, wanted: Sequence[Layout]
    ) -> list[ChangeClass]:
        out = []
        sources, copies = self._sources(value)
        asked = [self.f.candidates[t].ins[i] for t, i in self.takers(value)]
        groups: dict[Layout, list[int]] = {}
        for i, dst in enumerate(wanted):
            groups.setdefault(dst, []).append(i)
        if second is not None:
            out.append(
                self._change_class(
                    value,
                    made,
                    second,
                    groups.pop(second, []),
                    self._routes(value, sources, copies),
                )
            )
        for dst, those in groups.items():
            kinds = [
                self._change_class(value, made, dst, [i], self._routes(value, sources, asked[i]))
                for i in those
            ]
            # The second layout may be the cheaper source. From there the change is that of a
            # computed value.
            if second is not None and value.state != "parameter":
                onwards = [
                    self._change_class(
                        value, second, dst, [i], self._routes(value, copies, asked[i]), leaf=False
                    )
                    for i in those
                ]
                kinds = [
                    b if b.seconds < a.seconds else a for a, b in zip(kinds, onwards, strict=True)
                ]
            out += kinds
        return [kind for kind in out if kind.change.src != kind.change.dst or kind.seconds]

    def _sources(self, value: Value) -> tuple[Sequence[Layout], Sequence[Layout]]:
        """Return the layouts a value may be made in, and those it may also be stored in."""
        node = self.f.node_of_value.get(value.number)
        if node is None:
            return self._outs(value), ()
        pairs = self.f.layouts[node]
        ends = self._ends.get(id(pairs))
        if ends is None:
            ends = self._ends[id(pairs)] = (
                list(dict.fromkeys(x for x, _ in pairs)),
                list(dict.fromkeys(y for _, y in pairs if y is not None)),
            )
        return ends

    def _outs(self, value: Value) -> Sequence[Layout]:
        """Return the layouts in which the value's maker may return it."""
        return self.f.candidates[value.maker].outs[
            self.f.calls.calls[value.maker].outs.index(value.number)
        ]

    def _routes(self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout]) -> Routes:
        """Return the problem's price table of changes between these layouts.

        It is cached by the identity of the lists. The lists belong to the formulation or to this
        object, so they stay alive.
        """
        key = value.shape, value.dtype, id(sources), id(targets)
        routes = self._tables.get(key)
        if routes is None:
            routes = self._tables[key] = self.f.prices.table(
                value.shape, value.dtype, [*sources, *targets]
            )
        return routes

    def _partial_reductions(self, value: Value, made: Layout) -> Sequence[ChangeClass]:
        whole = tuple(broadcast if e.is_partial else e for e in made)
        if whole == made or value.maker < 0:
            return ()
        outs = self._outs(value)
        forward = float(
            self.f.prices.settled(
                value.shape, value.dtype, [made], self._routes(value, outs, outs)
            )[0]
        )
        return (
            ChangeClass(
                LayoutChange(
                    "",
                    "",
                    short(made),
                    short(whole),
                    forward,
                    0.0,
                    value.nbytes,
                    collectives(made, whole),
                    "",
                ),
                (),
            ),
        )

    def _change_class(
        self,
        value: Value,
        src: Layout,
        dst: Layout,
        takers: Sequence[int],
        routes: Routes,
        leaf: bool | None = None,
    ) -> ChangeClass:
        prices, own = self.f.prices, value.state == "parameter" if leaf is None else leaf
        numbers, seconds = routes
        forward, backward, back = float(seconds[numbers[src], numbers[dst]]), 0.0, ""
        if own:
            forward = float(
                prices.fetched(value.shape, value.dtype, [src], [dst], routes)[0, 0]
            ) * (1 + self.f.twice(value, src, dst))
        if self.f.calls.training and value.grad:
            # The gradient of a leaf ends in the leaf's layout. The gradient of another value ends
            # in the layout that its maker's backward uses.
            if own:
                backward = float(
                    prices.gradients(value.shape, value.dtype, [dst], [src], routes)[0, 0]
                )
                on_the_way = collectives(duals(dst), duals(src))
                back = (
                    " + ".join(filter(None, [on_the_way, collectives(duals(src), src)]))
                    if prices.summed(src)
                    else collectives(duals(dst), src)
                )
            else:
                backward, back = (
                    float(seconds[numbers[duals(dst)], numbers[duals(src)]]),
                    collectives(duals(dst), duals(src)),
                )
        return ChangeClass(
            LayoutChange(
                "",
                "",
                short(src),
                short(dst),
                forward,
                backward,
                value.nbytes,
                collectives(src, dst),
                back if backward else "",
            ),
            tuple(takers),
        )


def collectives(src: Layout, dst: Layout) -> str:
    """Return the collectives of a change of layout, such as ``all_gather + all_to_all``.

    Moves without traffic are only named where there is no other move.
    """
    kinds = list(
        dict.fromkeys(
            MOVES[a.kind, b.kind]
            for a, b in zip(src, dst, strict=True)
            if a != b and (a.kind, b.kind) in MOVES
        )
    )
    return " + ".join([k for k in kinds if k not in _LOCAL] or kinds)


def short(layout: Layout) -> tuple[str, ...]:
    return tuple(e.short for e in layout)
