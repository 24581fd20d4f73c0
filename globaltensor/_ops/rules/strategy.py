"""Selection of the cheapest signature of an op for the layouts of its operands.

Dispatch and the costs of the search call `select_signature`. The selection is pure and
deterministic, so every rank takes the same decision.

An op whose operands already fit a signature never communicates. (A broadcast addend fits a split
contraction, as it enters on one rank.) Otherwise each combination of signatures, one per axis, is
priced. The price is the time to box the operands, plus the op's own communication, plus the cost of
what the choice loses:

  broadcast operands given up     the gather that would bring one back
  a partial result left           half its reduction
  the main operand's split lost   the boxing that restores it

Ties go to the combination whose result has the layout of some operand. Further ties go to the
minimum traffic, then to the fewest operands moved, then to the one listed first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ...boxing import plan_boxing
from ...sharding.sbp import Sbp
from ...sharding.spec import Spec
from .notation import Factor, OpDescription, Signature

__all__ = ["SignatureChoice", "select_signature"]

# The maximum number of combinations that are priced. Beyond it, each axis keeps only its cheapest
# signatures.
_MAX_SIGNATURES = 4096


@dataclass(frozen=True)
class SignatureChoice:
    """The layouts that an op will run with, and the axes that split each factor."""

    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    factors: dict[Factor, tuple[int, ...]]
    signatures: tuple[Signature, ...]


def select_signature(
    op: OpDescription, outs: Sequence[Spec], keep: int | None = None, alike: bool = False
) -> SignatureChoice | None:
    """Return the cheapest choice of signatures, or None if no signature is admissible.

    ``outs``: specs of the results, whose layouts are ignored. ``keep``: an operand whose layout
    must stay, and which result 0 must share (in-place). ``alike``: operand 0 and result 0 must have
    the same layout.
    """
    specs = [a.spec for a in op.args]
    axes = specs[0].placement.axes
    menu = [list(op.signatures(axis)) for axis in range(axes)]
    if keep is not None:
        menu = [
            [
                s
                for s in m
                if _same_entry(s.ins[keep], specs[keep], a)
                and _same_entry(s.outs[0], specs[keep], a)
            ]
            for a, m in enumerate(menu)
        ]
    for signatures in itertools.product(
        *([s for s in m if _fits(op, s, specs, a)] for a, m in enumerate(menu))
    ):
        candidate = _choice(signatures, specs, outs)
        same = (
            a is b or (i in op.addends and not plan_boxing(b, a).bytes)
            for i, (a, b) in enumerate(zip(candidate.ins, specs, strict=True))
        )
        if (
            all(same)
            and not (op.traffic and op.traffic(candidate))
            and (keep is None or candidate.outs[0].layout == specs[keep].layout)
        ):
            return candidate
    while len(menu) and _num_combinations(menu) > _MAX_SIGNATURES:
        longest = max(range(axes), key=lambda a: len(menu[a]))
        menu[longest].sort(
            key=lambda s: sum(
                not _same_entry(e, spec, longest) for e, spec in zip(s.ins, specs, strict=True)
            )
        )
        menu[longest] = menu[longest][: max(1, len(menu[longest]) // 2)]
    best: tuple[tuple[float, int, float, int, int], SignatureChoice] | None = None
    choices = [_choice(signatures, specs, outs) for signatures in itertools.product(*menu)]
    # Price the choices that move few operands first. A choice that costs more than the best so far
    # need not be priced to the end.
    for number in sorted(
        range(len(choices)),
        key=lambda n: sum(a is not b for a, b in zip(choices[n].ins, specs, strict=True)),
    ):
        candidate = choices[number]
        if keep is not None and (
            candidate.ins[keep] is not specs[keep] or candidate.outs[0].layout != specs[keep].layout
        ):
            continue
        if alike and candidate.outs[0].layout != candidate.ins[0].layout:
            continue
        price = _price(op, specs, candidate, best[0][0] if best else inf)
        if price is not None and (best is None or (*price, number) < best[0]):
            best = (*price, number), candidate
    return best[1] if best else None


def _num_combinations(menu: list[list[Signature]]) -> int:
    n = 1
    for m in menu:
        n *= len(m)
    return n


def _same_entry(entry: object, spec: Spec, axis: int) -> bool:
    mine = spec.layout[axis]
    return entry is mine or (
        getattr(entry, "kind", "") == mine.kind == "split"
        and getattr(entry, "dim", None) == mine.dim
    )


def _fits(op: OpDescription, signature: Signature, specs: Sequence[Spec], axis: int) -> bool:
    """Return True if the operands have the layouts that this signature requires.

    A broadcast addend may enter as partial.
    """
    return all(
        _same_entry(entry, spec, axis)
        or (i in op.addends and entry.is_partial and spec.layout[axis].is_broadcast)
        for i, (entry, spec) in enumerate(zip(signature.ins, specs, strict=True))
    )


def _choice(
    signatures: tuple[Signature, ...], specs: Sequence[Spec], outs: Sequence[Spec]
) -> SignatureChoice:
    ins = tuple(spec.replace(layout=[s.ins[i] for s in signatures]) for i, spec in enumerate(specs))
    results = tuple(
        spec.replace(layout=[s.outs[min(i, len(s.outs) - 1)] for s in signatures])
        for i, spec in enumerate(outs)
    )
    factors: dict[Factor, tuple[int, ...]] = {}
    for axis, s in enumerate(signatures):
        if s.factor is not None:
            factors[s.factor] = (*factors.get(s.factor, ()), axis)
    return SignatureChoice(ins, results, factors, signatures)


def _price(
    op: OpDescription, specs: Sequence[Spec], choice: SignatureChoice, most: float
) -> tuple[float, int, float, int] | None:
    """Return the price of a choice, as a tuple that compares; None if it exceeds ``most`` seconds.

    The tuple starts with the seconds and the number of axes on which the result has a layout that
    no operand had. The seconds of traffic and the number of operands moved follow.
    """
    traffic, lost, moved = op.traffic(choice) if op.traffic else 0.0, 0.0, 0
    for src, dst in zip(specs, choice.ins, strict=True):
        if src is not dst:
            route = plan_boxing(src, dst)
            moved += 1
            if route.bytes:
                traffic += route.seconds
            else:
                # A free move loses something. The price includes the cost of restoring it, once for
                # all operands.
                lost = max(lost, plan_boxing(dst, src).seconds)
            if round(traffic + lost, 12) > most:
                return None
    for out in choice.outs:
        if any(e.kind == "partial" for e in out.layout):
            lost += plan_boxing(out, out.replicated()).seconds / 2
    # The program goes on with the main operand's split. A result that lost this split will have to
    # be boxed back.
    main = _main_operand(op)
    for axis, entry in enumerate(specs[main].layout):
        factor = op.dims[main][entry.dim] if entry.is_split else None
        if factor is not None and choice.signatures[axis].factor != factor:
            for out, dims in zip(choice.outs, op.out, strict=False):
                if factor in dims:
                    back = [
                        Sbp("split", dims.index(factor)) if a == axis else e
                        for a, e in enumerate(out.layout)
                    ]
                    lost += plan_boxing(out, out.replace(layout=back)).seconds
    new = sum(_is_new(op, axis, s) for axis, s in enumerate(choice.signatures))
    return round(traffic + lost, 12), new, round(traffic, 12), moved


def _main_operand(op: OpDescription) -> int:
    """Return the index of the operand that the program goes on from.

    The main operand is the largest that has every dim of the result (not the scale in
    ``scale * x``, nor the class token that ``cat`` puts before a batch), of equally large ones the
    first. If no operand has every dim, it is operand 0.
    """
    wanted = {f for f in op.out[0] if f is not None} if op.out else set()
    full = [i for i, dims in enumerate(op.dims) if wanted <= set(dims)]
    return max(full, key=lambda i: op.args[i].spec.numel, default=0)


def _is_new(op: OpDescription, axis: int, signature: Signature) -> bool:
    """Return True if no operand has the result's layout on this axis."""
    for arg, dims in zip(op.args, op.dims, strict=True):
        entry = arg.spec.layout[axis]
        if signature.factor is None:
            if any(out is entry for out in signature.outs):
                return False
        elif entry.is_split and dims[entry.dim] == signature.factor:
            return False
    return True
