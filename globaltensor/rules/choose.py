"""Pick the cheapest signature of an op for the operands as they lie. Pure and deterministic: every rank takes the same decision.

An op whose operands already fit a signature never communicates. Otherwise each combination of signatures, one an axis, is priced: the time to box
the operands, plus what is lost by it: giving up a broadcast operand costs the gather that would bring it back, and leaving a partial result costs
its reduction. Ties go to the combination with the least traffic, then to that which moves the fewest operands, then to the one listed first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..boxing import plan
from ..spec import Spec
from .notation import Factor, Op, Signature

__all__ = ["Choice", "choose"]

_MOST = 4096  # combinations priced at most; beyond that each axis keeps only its cheapest signatures


@dataclass(frozen=True)
class Choice:
    """The layouts an op will run with, and the axes that split each factor."""

    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    factors: dict[Factor, tuple[int, ...]]
    signatures: tuple[Signature, ...]


def choose(op: Op, outs: Sequence[Spec], keep: int | None = None, alike: bool = False) -> Choice | None:
    """The cheapest choice. ``outs``: specs of the results (their layouts are ignored). ``keep``: an operand whose layout must stay, and be that of
    result 0 (in-place). ``alike``: operand 0 and result 0 must lie alike. None where no signature admits that."""
    specs = [a.spec for a in op.args]
    axes = specs[0].placement.axes
    menu = [list(op.signatures(axis)) for axis in range(axes)]
    if keep is not None:
        menu = [[s for s in m if _alike(s.ins[keep], specs[keep], a) and _alike(s.outs[0], specs[keep], a)] for a, m in enumerate(menu)]
    for signatures in itertools.product(*([s for s in m if all(_alike(e, spec, a) for e, spec in zip(s.ins, specs, strict=True))] for a, m in enumerate(menu))):
        found = _choice(signatures, specs, outs)
        if all(a is b for a, b in zip(found.ins, specs, strict=True)) and (keep is None or found.outs[0].layout == specs[keep].layout):
            return found
    while len(menu) and _count(menu) > _MOST:
        longest = max(range(axes), key=lambda a: len(menu[a]))
        menu[longest].sort(key=lambda s: sum(not _alike(e, spec, longest) for e, spec in zip(s.ins, specs, strict=True)))
        menu[longest] = menu[longest][: max(1, len(menu[longest]) // 2)]
    best: tuple[tuple[float, float, int], Choice] | None = None
    for signatures in itertools.product(*menu):
        found = _choice(signatures, specs, outs)
        if keep is not None and (found.ins[keep] is not specs[keep] or found.outs[0].layout != specs[keep].layout):
            continue
        if alike and found.outs[0].layout != found.ins[0].layout:
            continue
        price = _price(specs, found)
        if best is None or price < best[0]:
            best = price, found
    return best[1] if best else None


def _count(menu: list[list[Signature]]) -> int:
    n = 1
    for m in menu:
        n *= len(m)
    return n


def _alike(entry: object, spec: Spec, axis: int) -> bool:
    mine = spec.layout[axis]
    return entry is mine or (getattr(entry, "kind", "") == mine.kind == "split" and getattr(entry, "dim", None) == mine.dim)


def _choice(signatures: tuple[Signature, ...], specs: Sequence[Spec], outs: Sequence[Spec]) -> Choice:
    ins = tuple(spec.replace(layout=[s.ins[i] for s in signatures]) for i, spec in enumerate(specs))
    results = tuple(spec.replace(layout=[s.outs[min(i, len(s.outs) - 1)] for s in signatures]) for i, spec in enumerate(outs))
    factors: dict[Factor, tuple[int, ...]] = {}
    for axis, s in enumerate(signatures):
        if s.factor is not None:
            factors[s.factor] = (*factors.get(s.factor, ()), axis)
    return Choice(ins, results, factors, signatures)


def _price(specs: Sequence[Spec], choice: Choice) -> tuple[float, float, int]:
    seconds, given_up, moved = 0.0, 0.0, 0
    for src, dst in zip(specs, choice.ins, strict=True):
        if src is not dst:
            route = plan(src, dst)
            seconds += route.seconds
            if not route.bytes:  # A free move gives something up: what it takes to win the result back, once, is part of the price.
                given_up = max(given_up, plan(dst, src).seconds)
            moved += 1
    traffic = round(seconds, 12)
    for out in choice.outs:
        if any(e.kind == "partial" for e in out.layout):
            seconds += plan(out, out.replicated()).seconds / 2
    # Equal prices: what is paid for sure counts for more than what may have to be won back. So S x B stays S.
    return round(seconds + given_up, 12), traffic, moved
