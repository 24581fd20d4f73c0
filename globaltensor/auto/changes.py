"""The changes of layout that a choice means for a value: between where it is made, where it is kept as well, and each call that takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

from ..boxing.moves import MOVES, Layout
from ..sbp import broadcast
from .calls import Value
from .formulate import Formulation
from .planned import Change
from .prices import duals

__all__ = ["Changes", "Kind", "collectives", "name_of", "short"]

_LOCAL: Final = ("slice", "pad", "mask")


class Kind(NamedTuple):
    """A change but for its names. ``takers``: positions among the calls that take the value."""

    change: Change
    takers: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.change.forward + self.change.backward


class Changes:
    """Changes of one formulation; those of values in the same situation are worked out once."""

    def __init__(self, f: Formulation) -> None:
        self.f = f
        self._found: dict[Hashable, tuple[Kind, ...]] = {}
        self._outputs = frozenset(f.calls.outputs)
        self._takers: dict[int, list[tuple[int, int]]] = {}  # of a value: each call that takes it, as which operand

    def of(self, value: Value, choice: Sequence[int]) -> list[Change]:
        """With names."""
        return [self.named(kind, value) for kind in self.kinds(value, choice)]

    def named(self, kind: Kind, value: Value) -> Change:
        calls, takers = self.f.calls.calls, self.takers(value)
        return dataclasses.replace(kind.change, value=name_of(value), taker=" ".join(calls[takers[i][0]].name for i in kind.takers) or "output")

    def takers(self, value: Value) -> list[tuple[int, int]]:
        found = self._takers.get(value.number)
        if found is None:
            calls = self.f.calls.calls
            found = [(t, calls[t].operands.index(value.number)) for t in dict.fromkeys(value.takers) if t in self.f.candidates]
            self._takers[value.number] = found
        return found

    def kinds(self, value: Value, choice: Sequence[int]) -> tuple[Kind, ...]:
        """Without names. A second layout that several calls share is listed once; whoever gets a result takes its sum."""
        f, takers, result = self.f, self.takers(value), value.number in self._outputs
        if not (takers or result) or (value.maker >= 0 and value.maker not in f.candidates):
            return ()
        node = f.node_of_value.get(value.number)
        kept = None if node is None else f.layouts[node][choice[node]][1]
        made = f.made(value, choice)
        wanted = tuple(f.candidates[t].ins[i][choice[f.node_of_call[t]]] for t, i in takers)
        key = value.shape, value.dtype, value.grad, value.saved, value.state == "parameter", made, kept, wanted, result
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = (*self._listed(value, made, kept, wanted), *(self._settled(value, made) if result else ()))
        return found

    def _listed(self, value: Value, made: Layout, kept: Layout | None, wanted: Sequence[Layout]) -> list[Kind]:
        out = []
        groups: dict[Layout, list[int]] = {}
        for i, dst in enumerate(wanted):
            groups.setdefault(dst, []).append(i)
        if kept is not None:
            out.append(self._kind(value, made, kept, groups.pop(kept, [])))
        for dst, those in groups.items():
            kinds = [self._kind(value, made, dst, [i]) for i in those]
            if kept is not None and value.state != "parameter":  # from there it may be nearer; it goes on as a value that is computed
                onwards = [self._kind(value, kept, dst, [i], leaf=False) for i in those]
                kinds = [b if b.seconds < a.seconds else a for a, b in zip(kinds, onwards, strict=True)]
            out += kinds
        return [kind for kind in out if kind.change.src != kind.change.dst or kind.seconds]

    def _settled(self, value: Value, made: Layout) -> Sequence[Kind]:
        whole = tuple(broadcast if e.is_partial else e for e in made)
        if whole == made or value.maker < 0:
            return ()
        forward = float(self.f.prices.settled(value.shape, value.dtype, [made])[0])
        return (Kind(Change("", "", short(made), short(whole), forward, 0.0, value.nbytes, collectives(made, whole), ""), ()),)

    def _kind(self, value: Value, src: Layout, dst: Layout, takers: Sequence[int], leaf: bool | None = None) -> Kind:
        prices, own = self.f.prices, value.state == "parameter" if leaf is None else leaf
        numbers, seconds = prices.table(value.shape, value.dtype, [src, dst])
        forward, backward, back = float(seconds[numbers[src], numbers[dst]]), 0.0, ""
        if own:
            forward = float(prices.fetched(value.shape, value.dtype, [src], [dst])[0, 0]) * (1 + self.f.twice(value, src, dst))
        if self.f.calls.training and value.grad:
            # The gradient of a leaf ends as the leaf lies, that of a value as its maker's way back takes it.
            if own:
                backward = float(prices.gradients(value.shape, value.dtype, [dst], [src])[0, 0])
                on_the_way = collectives(duals(dst), duals(src))
                back = " + ".join(filter(None, [on_the_way, collectives(duals(src), src)])) if prices.summed(src) else collectives(duals(dst), src)
            else:
                backward, back = float(seconds[numbers[duals(dst)], numbers[duals(src)]]), collectives(duals(dst), duals(src))
        return Kind(Change("", "", short(src), short(dst), forward, backward, value.nbytes, collectives(src, dst), back if backward else ""), tuple(takers))


def collectives(src: Layout, dst: Layout) -> str:
    """What a change of layout is on each axis, as ``all_gather + all_to_all``; what needs no traffic is named where there is nothing else."""
    kinds = list(dict.fromkeys(MOVES[a.kind, b.kind] for a, b in zip(src, dst, strict=True) if a != b and (a.kind, b.kind) in MOVES))
    return " + ".join([k for k in kinds if k not in _LOCAL] or kinds)


def name_of(value: Value) -> str:
    """A parameter's path, the name of another given tensor, or of the call that makes it."""
    return value.path or value.name


def short(layout: Layout) -> tuple[str, ...]:
    return tuple(e.short for e in layout)
