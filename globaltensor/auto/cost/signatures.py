"""The signatures of a call on one axis, found by probing its rule.

A signature has the layouts of the operands, the layouts of the results, and what the call itself
communicates. `strategies.py` and `batch_scaling.py` call `signatures`.

A rule describes a call for given operand layouts. For other layouts it may return another
description. For example, a call may be linear only if an operand is partial. It may be a
composition of other calls if a dim is split that the kernel needs in full. So the rule is probed
with several layouts: all broadcast, each operand split along each dim, and each operand partial. A
composition runs on meta or fake tensors, which shows its result layouts and its communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..._base import torch_private
from ..._base.pytree import replaced, tensors_in
from ..._ops.dispatch import fresh_plans
from ..._ops.rules import (
    Arg,
    Derived,
    OpDescription,
    Rule,
    Signature,
    rule_of,
    select_signature,
)
from ..._ops.rules.notation import Dims
from ..._ops.rules.partial_extrema import AHEAD
from ..._ops.shape_inference import memoized
from ..._tensor.global_tensor import GlobalTensor
from ...boxing import log
from ...distributed.world import set_world, world
from ...graph.capture.dry_world import DryComm, DryWorld, Untraceable
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp, broadcast, partial_sum, split
from ...sharding.spec import Spec
from ..ir.op_graph import Call, Value
from .rule_failures import RuleFailures, describe

__all__ = ["CostedSignature", "probe_decomposition", "signatures"]


class CostedSignature(NamedTuple):
    """One strategy for a call on an axis.

    ``divided`` is True if the ranks divide the work. ``moved`` lists the call's own collectives in
    forward, as (kind, bytes as `Cluster.seconds` accepts them). ``composed`` is True if the call is
    a composition of other calls with these layouts. On several axes, it may be other calls.
    """

    ins: tuple[Sbp, ...]
    outs: tuple[Sbp, ...]
    divided: bool
    moved: tuple[tuple[str, int], ...] = ()
    composed: bool = False


def signatures(
    call: Call, values: Sequence[Value], ranks: int, losses: RuleFailures | None = None
) -> list[CostedSignature]:
    """Return all signatures of ``call`` on an axis of ``ranks``; the first is all broadcast.

    ``losses`` counts the layouts that could not be probed because of an error.
    """
    losses = RuleFailures() if losses is None else losses
    operands, outs = [values[v] for v in call.operands], [values[v] for v in call.outs]
    whole = CostedSignature((broadcast,) * len(operands), (broadcast,) * len(outs), False)
    if call.wild or any(v.plain for v in outs):
        return [whole]
    if call.fixed is not None:
        return _layout_change_signatures(operands[0])
    axis = Placement("cpu", list(range(ranks)))
    signature_of: dict[tuple[Any, ...], CostedSignature] = {}
    probed: dict[Any, CostedSignature | None] = {}
    for hint in _hints(call, operands, ranks):
        specs = [
            Spec.make(v.shape, v.dtype, axis, entry)
            for v, entry in zip(operands, hint, strict=True)
        ]
        for s in _probe_until_error(call, operands, outs, specs, axis, losses, probed):
            if _is_sensible(s, operands) and all(
                _fills(v, e, ranks)
                for v, e in zip((*operands, *outs), (*s.ins, *s.outs), strict=True)
            ):
                signature_of.setdefault((s.ins, s.outs), s)
    if call.inplace:
        return [s for s in signature_of.values() if s.ins[0] is s.outs[0]] or [whole]
    return list(signature_of.values()) or [whole]


def _is_sensible(s: CostedSignature, operands: Sequence[Value]) -> bool:
    """Return True unless the signature turns a given tensor into a partial sum for no reason.

    A reason is an operand that is split, or a computed operand that is partial.
    """
    asked = any(
        e.is_split or (e.is_partial and not v.state) for v, e in zip(operands, s.ins, strict=True)
    )
    return asked or not any(e.is_partial for e in s.ins)


def _layout_change_signatures(value: Value) -> list[CostedSignature]:
    """Return the signatures of a change of layout that accepts every layout."""
    entries = [broadcast, *(split(d) for d, n in enumerate(value.shape) if n > 1)]
    entries += [partial_sum] if value.dtype.is_floating_point else []
    return [CostedSignature((e,), (e,), e.is_split) for e in entries]


def _fills(value: Value, entry: Sbp, ranks: int) -> bool:
    """Return True if a split leaves no rank without data."""
    if not entry.is_split:
        return True
    return -(-value.shape[entry.dim] // entry.unit) >= ranks


def _hints(call: Call, operands: Sequence[Value], ranks: int) -> Iterator[tuple[Sbp, ...]]:
    none = [broadcast] * len(operands)
    yield tuple(none)
    for i, v in enumerate(operands):
        if v.plain:
            continue
        for d, n in enumerate(v.shape):
            if n >= ranks:
                yield tuple(split(d) if j == i else e for j, e in enumerate(none))
                alike = [
                    j
                    for j, w in enumerate(operands)
                    if not w.plain and len(w.shape) > d and w.shape[d] == n
                ]
                if i == 0 and len(alike) > 1:
                    yield tuple(split(d) if j in alike else e for j, e in enumerate(none))
    real = [
        i
        for i, v in enumerate(operands)
        if not v.plain and (v.dtype.is_floating_point or v.dtype.is_complex)
    ]
    for i in real:
        yield tuple(partial_sum if j == i else e for j, e in enumerate(none))
    if len(real) > 1:
        yield tuple(partial_sum if j in real else e for j, e in enumerate(none))


def _probe_until_error(
    call: Call,
    operands: Sequence[Value],
    outs: Sequence[Value],
    specs: Sequence[Spec],
    axis: Placement,
    losses: RuleFailures,
    probed: dict[Any, CostedSignature | None],
) -> Iterator[CostedSignature]:
    """Yield the rule's signatures for these operand layouts, until an error occurs."""
    try:
        yield from _probe_rule(call, operands, outs, specs, axis, losses, probed)
    except Exception as error:
        losses.note(call.func, error)


def _probe_rule(
    call: Call,
    operands: Sequence[Value],
    outs: Sequence[Value],
    specs: Sequence[Spec],
    axis: Placement,
    losses: RuleFailures,
    probed: dict[Any, CostedSignature | None],
) -> Iterator[CostedSignature]:
    """Yield the rule's signatures for these operand layouts.

    A rule offers most signatures for every hint. ``probed`` has those that were tried before.
    """
    rule = rule_of(call.func, call.kwargs)
    if rule is None:
        # One of this library's functions (to, contiguous, clone, ...). It treats local tensors in
        # the same way along every axis.
        seen = probe_decomposition(call, specs, losses) if operands else None
        if seen is not None:
            yield CostedSignature(
                tuple(x.layout[0] for x in specs),
                tuple(o[0] for o in seen[0]),
                any(x.layout[0].is_split for x in specs),
                seen[1],
            )
        return
    op = OpDescription([Arg(i, s) for i, s in enumerate(specs)], function=call.func)
    if not describe(rule, op, call.args, call.kwargs) or op.whole_call:
        return
    if op.composite is not None:
        lone = [i for i, s in enumerate(specs) if s.layout[0].is_split]
        # A split of a single operand other than the first never gives a signature.
        seen = probe_decomposition(call, specs, losses) if len(lone) != 1 or lone[0] == 0 else None
        if seen is not None:
            yield CostedSignature(
                tuple(s.layout[0] for s in specs),
                tuple(o[0] for o in seen[0]),
                any(s.layout[0].is_split for s in specs),
                seen[1],
                True,
            )
        return
    results = [Spec.make(v.shape, v.dtype, axis, broadcast) for v in outs]
    if not op.out:
        op.out = [(None,) * r.ndim for r in results]
    plain = {i for i, v in enumerate(operands) if v.plain}
    for s in op.signatures(0):
        # A plain tensor is replicated. It can be sliced without traffic, but it is never a partial
        # sum.
        if any(s.ins[i].is_partial and i not in op.addends for i in plain):
            continue
        key = s.ins, s.factor, tuple(map(tuple, op.out))
        if key not in probed:
            probed[key] = _probe_signature(call, rule, op.out, s, specs, results, losses)
        if (costed := probed[key]) is not None:
            yield costed


def _probe_signature(
    call: Call,
    rule: Rule,
    out: Sequence[Dims],
    s: Signature,
    specs: Sequence[Spec],
    results: Sequence[Spec],
    losses: RuleFailures,
) -> CostedSignature | None:
    """Return a signature of a rule with its traffic, or None if a call does not run with it.

    ``out`` are the dims of the results where the rule does not name them for these layouts.
    """
    ins = [spec.replace(layout=[e]) for spec, e in zip(specs, s.ins, strict=True)]
    taken = OpDescription([Arg(i, x) for i, x in enumerate(ins)], function=call.func)
    try:
        known = describe(rule, taken, call.args, call.kwargs)
    except Exception as error:  # perhaps of this signature only
        losses.note(call.func, error)
        return None
    if not known or taken.composite is not None or taken.whole_call:
        return None  # a hint of its own probes this
    taken.out = taken.out or list(out)
    got = select_signature(taken, results, keep=0 if rule.inplace else None)
    if got is None or any(a is not b for a, b in zip(got.ins, ins, strict=True)):
        return None  # the op would box an operand
    own = taken.traffic(got) if taken.traffic is not None else 0.0
    moved: tuple[tuple[str, int], ...] = (("seconds", int(own * 1e12)),) if own else ()
    # For example an exchange with neighbours. What it moves is only known when it runs.
    if s.factor in taken.exchanges and not own:
        seen = probe_decomposition(call, ins, losses)
        if seen is None:
            return None
        moved = seen[1]
    return CostedSignature(
        tuple(x.layout[0] for x in ins),
        tuple(o.layout[0] for o in got.outs),
        s.factor is not None,
        moved,
    )


def probe_decomposition(
    call: Call, specs: Sequence[Spec], losses: RuleFailures
) -> tuple[list[tuple[Sbp, ...]], tuple[tuple[str, int], ...]] | None:
    """Run a composition, and return the layouts of its results and its traffic.

    The operands have the layouts of ``specs``. The result is None where the composition rejects the
    layouts. ``losses`` counts errors that are not refusals.
    """
    real, size = world(), specs[0].placement.size
    places = real.state(_ImaginedWorlds)
    dry = places.get(size)
    if dry is None:
        dry = places[size] = _ImaginedWorld(size)
    set_world(dry)
    try:
        try:
            with memoized(_tried):
                return _run_with_traffic(call, specs, "meta", dry.derived)
        except Exception:
            # Mostly an op without a meta kernel, or code that reads values. Fake tensors support
            # more of these, and are slower.
            with torch_private.fake_tensors():
                return _run_with_traffic(call, specs, None, None)
    except Exception as error:
        losses.note(call.func, error)
        return None
    finally:
        set_world(None)
        if world() is not real:
            set_world(real)


def _run_with_traffic(
    call: Call, specs: Sequence[Spec], device: str | None, plans: Derived | None
) -> tuple[list[tuple[Sbp, ...]], tuple[tuple[str, int], ...]] | None:
    """Run a call on tensors without memory, and return its result layouts and traffic."""
    with fresh_plans(plans), torch.no_grad(), log.boxing_log() as moves:
        operands = iter(
            [
                GlobalTensor.wrap(torch.empty(s.local_shape(0), dtype=s.dtype, device=device), s)
                for s in specs
            ]
        )
        out = call.func(*replaced(call.args, operands), **replaced(call.kwargs, operands))
        outs = [
            t._materialize()._spec if isinstance(t, GlobalTensor) else None
            for t in tensors_in(out, [])
        ]
    if not outs or any(o is None for o in outs):
        return None
    # Traffic that starts before it is needed, such as the count of a mean loss, hides behind
    # computing. In a program it is sent together with the gradients.
    return [o.layout for o in outs if o is not None], tuple(
        part for entry in moves if entry.op != AHEAD for part in _logged_moves(entry)
    )


def _logged_moves(entry: Any) -> Iterator[tuple[str, int]]:
    """Yield (kind, bytes as `Cluster.seconds` accepts them) for the moves of a log entry."""
    if isinstance(entry, log.ExchangeRecord):
        yield "exchange", entry.bytes
        return
    for m in entry.plan.moves:
        if m.bytes:
            whole = m.dst if m.kind == "all_gather" else m.src
            yield (
                m.kind,
                m.bytes if m.kind == "exchange" else whole.dtype.itemsize * whole.local_numel(),
            )


class _ImaginedWorld(DryWorld):
    """A world of any size, seen from rank 0, without real ranks.

    It caches the plans of calls that ran there on tensors without a device.
    """

    def __init__(self, size: int) -> None:
        super().__init__(world())
        self.rank, self.size = 0, size
        self.derived = Derived()

    def _connect(self, ranks: tuple[int, ...]) -> DryComm:
        return _NoPeersComm(self, ranks)


#: Memo of shape inference, shared by all imagined worlds.
_tried: dict[Any, Any] = {}


class _ImaginedWorlds(dict[int, "_ImaginedWorld"]):
    """The imagined worlds that a real world has created, by their number of ranks."""


class _NoPeersComm(DryComm):
    def all_gather_object(self, value: object, purpose: str = "") -> list[Any]:
        raise Untraceable  # there are no other ranks
