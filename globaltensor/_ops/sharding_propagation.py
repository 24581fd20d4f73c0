"""Planning of calls: from the rule of a function to the plan of a call.

`dispatch` calls `plan_call` on a cache miss, and caches the plan by the call's key."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch

from .._base import torch_private
from .._base.refusals import refuse_collective
from .._base.user_code import warn_user
from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.plain_operands import operand_spec
from .._tensor.strides import (
    Note,
    base_note,
    by_rows,
    differ,
    local_strides_tell,
    note_strides,
    results,
    strides_ambiguous,
)
from .._tensor.view_tracking import RemoteView, link_alias
from ..boxing import box
from ..distributed.world import world
from ..errors import FallbackWarning, KernelError, PlacementError
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec, StorageSpec, layout_for
from . import call_plan
from .autocast import as_autocast_would
from .call_plan import (
    AttributePlan,
    CallPlan,
    ConstantPlan,
    DelegatePlan,
    ReturnOperandPlan,
    describe_call,
    name_of,
    replaced,
    tensors_in,
)
from .custom_ops import Writing, keep_written_whole, needs_fake, written_operands
from .fallback import (
    call_with_out,
    check_out,
    plan_on_whole,
    plan_without_rule,
    warn_without_rule,
    write_into_plain,
)
from .local_plan import (
    REFUSED,
    InPlacePlan,
    LocalPlan,
    LocalPlanList,
    LocalPlanMany,
    NotedViewPlan,
    ReshapePlan,
    StridedViewPlan,
    local_tensors_mislead,
)
from .replicated_plan import MoveTargetPlan, ReplicatedPlan
from .result_strides import ComposedPlan, ResultStrides, local_order_misleads
from .rules import (
    RULES,
    Arg,
    LocalContext,
    OpDescription,
    Range,
    Rule,
    SignatureChoice,
    rule_of,
    select_signature,
)
from .shape_inference import check_dtypes, infer_outputs, operands_among

__all__ = ["lies_at", "plan_call", "stage_context", "writes"]


class _CommonPlacement(threading.local):
    where: Placement | None = None
    models = 0  # number of models in stages that run
    stages = 0  # number of stages that run, one within another


#: The placement where operands of several placements are brought together, while a model cut into
#: stages runs. It is that of the running stage, or of the last one that ran
#: (graph/pipeline/split_model.py).
stage_context = _CommonPlacement()


def _common_placement(func: Any, tensors: Sequence[torch.Tensor]) -> Placement:
    placements: list[Placement] = []
    for t in tensors:
        if isinstance(t, GlobalTensor) and t._spec.shown.placement not in placements:
            placements.append(t._spec.shown.placement)
    if len(placements) > 1:
        where = _placement_of_scalars(tensors)
        if where is not None:
            return where
        if stage_context.where is not None and (
            not writes(func) or lies_at(tensors[0], stage_context.where)
        ):
            return stage_context.where
        raise PlacementError(
            f"{describe_call(func, tensors)}: the operands are on different placements\n"
            + "".join(f"  {p}\n" for p in placements)
            + "move them to one placement first, for example "
            + f"x.to_global(placement={placements[0]!r})"
            + (
                ", or write out of place (x = x + y): the result may have another placement than x"
                if writes(func)
                else ""
            )
        )
    return placements[0]


def _placement_of_scalars(tensors: Sequence[torch.Tensor]) -> Placement | None:
    """Return the common placement if the operands on all other placements are 0-dim.

    Such scalars may be moved freely, as torch allows between devices. Returns None if tensors with
    dims have several placements. If all are scalars, returns a placement of all ranks that hold
    one.
    """
    places = list(
        dict.fromkeys(t._spec.shown.placement for t in tensors if isinstance(t, GlobalTensor))
    )
    sized = list(
        dict.fromkeys(
            t._spec.shown.placement for t in tensors if isinstance(t, GlobalTensor) and t.dim()
        )
    )
    if len(sized) > 1:
        return None
    return (
        sized[0]
        if sized
        else Placement(places[0].type, sorted({r for p in places for r in p.flat}))
    )


def lies_at(t: torch.Tensor, where: Placement) -> bool:
    return isinstance(t, GlobalTensor) and t._spec.shown.placement is where


def writes(func: Any) -> bool:
    """Return True if a function writes into its first argument, judged by its name."""
    name = getattr(func, "__name__", "")
    return (
        name in ("__setitem__", "__set__")
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name != "__invert__")
    )


def _call_on_common_placement(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with all operands boxed to their common placement.

    An operand keeps its sbp if the placement has as many axes. Raises PlacementError if there is no
    common placement."""
    tensors = tensors_in(kwargs, tensors_in(args, []))
    where = _common_placement(func, tensors)
    away = [isinstance(t, GlobalTensor) and t._spec.shown.placement is not where for t in tensors]
    boxed_operands = iter(
        [
            t.to_global(placement=where, sbp=layout_for(where, t.sbp)) if elsewhere else t
            for t, elsewhere in zip(tensors, away, strict=True)
        ]
    )
    return func(*replaced(args, boxed_operands), **replaced(kwargs, boxed_operands))


def _call_with_boxed_scalars(
    func: Any, where: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``func`` with the scalars of other placements boxed to ``where``.

    Scalars of one spec are boxed together."""
    tensors = tensors_in(kwargs, tensors_in(args, []))
    groups: dict[Spec, list[GlobalTensor]] = {}
    for t in tensors:
        if isinstance(t, GlobalTensor) and t._spec.shown.placement is not where:
            groups.setdefault(t._materialize()._spec, []).append(t)
    brought: dict[int, torch.Tensor] = {}
    for group in groups.values():
        values = torch.stack(group) if len(group) > 1 else group[0].unsqueeze(0)
        spec = values._spec  # type: ignore[attr-defined]
        there = spec.replace(placement=where, layout=[broadcast] * where.axes)
        moved = GlobalTensor.wrap(box(values._local, spec, there, why=name_of(func)), there)  # type: ignore[attr-defined]
        brought.update(zip(map(id, group), moved.unbind(), strict=True))
    these = iter([brought.get(id(t), t) for t in tensors])
    return func(*replaced(args, these), **replaced(kwargs, these))


@dataclasses.dataclass
class _CallToPlan:
    """A call that is being planned. Each step of `plan_call` stores its results for the next."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rule: Rule | None
    kernel: bool  # True for an operator of the dispatcher (``torch.ops...``)
    #: For an operator that writes into arguments: the operands that it writes, and for each result
    #: which of them it is.
    written: tuple[tuple[int, ...], tuple[int | None, ...]] | None
    tensors: list[torch.Tensor]
    placement: Placement | None = None
    specs: list[Spec] = dataclasses.field(default_factory=list)
    #: The spec in which an in-place target is stored, if that is not its logical one (ZeRO).
    stored: StorageSpec | None = None
    op: OpDescription | None = None
    unknown: str = ""  # the reason why the rule does not know this form of the call
    meta: Sequence[torch.Tensor] = ()  # the results on meta tensors, of the global shapes
    structure: Any = None  # the result's structure, with meta tensors in it
    same: tuple[int | None, ...] = ()  # for each result the operand that it is


def plan_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
    """Plan a call after a cache miss: the first of these steps that returns a plan decides."""
    call = _new_call(func, args, kwargs)
    for step in (
        _plan_with_out,
        _plan_several_placements,
        _plan_attribute_read,
        _plan_without_rule,
        _plan_plain_target,
        _plan_by_description,
        _plan_composite,
        _plan_whole_call,
        _infer_results,
        _plan_returned_operand,
        _check_dtypes,
        _plan_unknown_form,
    ):
        if (plan := step(call)) is not None:
            return plan
    return _plan_by_signature(call)


def _new_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _CallToPlan:
    rule = rule_of(func, kwargs)
    kernel, written = torch_private.is_kernel(func), None
    if kernel:
        rule = rule or RULES.get(torch_private.twin_of_kernel(func))
        if torch_private.kernel_writes(func) and (rule is None or not rule.inplace):
            written = written_operands(func, args, kwargs)
    return _CallToPlan(func, args, kwargs, rule, kernel, written, [])


def _plan_with_out(call: _CallToPlan) -> CallPlan | None:
    """Plan a call with ``out=``: run it without ``out=``, and copy the result into ``out``."""
    if call.kwargs.get("out") is None or call.written is not None:
        return None
    func = call.func  # the plan is cached: it must not hold the call's arguments
    check_out(func, call.args, call.kwargs)
    return DelegatePlan(lambda *a, **k: call_with_out(func, a, k))


def _plan_several_placements(call: _CallToPlan) -> CallPlan | None:
    """Find the operands' common placement. Plan a call whose operands must first be moved to it."""
    func = call.func
    call.tensors = tensors = tensors_in(call.kwargs, tensors_in(call.args, []))
    call.placement = placement = _common_placement(func, tensors)
    if not any(
        isinstance(t, GlobalTensor) and t._spec.shown.placement is not placement for t in tensors
    ):
        return None
    if call.written is not None:
        raise PlacementError(
            f"{describe_call(func, tensors)}: an operator that writes into its arguments "
            f"needs all of them on one placement"
        )
    if _placement_of_scalars(tensors) is None:
        return DelegatePlan(lambda *a, **k: _call_on_common_placement(func, a, k))
    return DelegatePlan(lambda *a, **k: _call_with_boxed_scalars(func, placement, a, k))


def _plan_attribute_read(call: _CallToPlan) -> CallPlan | None:
    """Plan the read of a torch.Tensor property that has no rule."""
    if getattr(call.func, "__name__", "") == "__get__" and call.func not in RULES:
        return _attribute_plan(call.func, call.args)
    return None


def _plan_without_rule(call: _CallToPlan) -> CallPlan | None:
    """Find the operands' specs. Plan a call of a function that has no rule."""
    assert call.placement is not None
    if call.kernel and call.rule is None:
        refuse_collective(call.func)
    operands = f"operand {{}} of {name_of(call.func)}"
    call.specs = [
        t._spec
        if isinstance(t, GlobalTensor)
        else operand_spec(t, call.placement, operands.format(i))
        for i, t in enumerate(call.tensors)
    ]
    if call.rule is not None:
        return None
    if call.written is not None:
        warn_without_rule(call.func)
        return plan_on_whole(call.func, call.specs, call.written)
    return plan_without_rule(call.func, call.specs, call.args, call.kwargs)


def _plan_plain_target(call: _CallToPlan) -> CallPlan | None:
    """Plan an in-place call that writes into a plain tensor."""
    if not _rule(call).inplace or isinstance(call.tensors[0], GlobalTensor):
        return None
    func, placement = call.func, call.placement
    assert placement is not None
    return DelegatePlan(lambda *a, **k: write_into_plain(func, placement, a, k))


def _plan_by_description(call: _CallToPlan) -> CallPlan | None:
    """Let the rule describe the call; a target that is stored on another placement is replicated.

    A tensor that is stored in another layout is planned by its logical spec, but stays stored."""
    rule, specs = _rule(call), call.specs
    taken = [s.shown for s in specs]
    if rule.inplace and isinstance(specs[0], StorageSpec):
        call.stored = specs[0]
        taken[0] = call.stored.plain
        if call.stored.placement is not call.placement:
            return ReplicatedPlan(rule.name, specs, True)
    call.op = op = OpDescription([Arg(i, s) for i, s in enumerate(taken)], function=call.func)
    these = iter(op.args)
    try:
        rule.describe(op, *replaced(call.args, these), **replaced(call.kwargs, these))
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        call.unknown = str(error)  # an AttributeError: an array or a list in a tensor's place
    except RuntimeError:
        # For example of shapes that do not fit. If the function itself refuses the call, its own
        # error is raised.
        infer_outputs(call.func, specs, call.args, call.kwargs)
        raise
    return None


def _plan_composite(call: _CallToPlan) -> CallPlan | None:
    """Plan a call that its rule composes of functions of global tensors.

    This comes before the run on meta tensors, because the result may depend on data."""
    op, rule, func = _op(call), _rule(call), call.func
    if op.composite is None:
        return None
    meta, structure = (
        infer_outputs(func, call.specs, call.args, call.kwargs) if op.checked else (None, None)
    )
    if (same := _returned_operands(func, rule, meta or (), call.args)) and None not in same:
        return ReturnOperandPlan(same, structure, None)
    if meta is not None and not _is_ours(func):
        check_dtypes(func, call.specs, call.args, call.kwargs)
    composed: Any = op.composite
    if meta is not None and torch_private.any_autocast() and not rule.inplace:
        composed = as_autocast_would(composed, func, call.specs, call.args, call.kwargs, meta)
    matrices = any(m.dim() > 1 for m in meta or ())
    if matrices and not (op.view or rule.inplace or op.random) and _is_torchs(func):
        return ComposedPlan(composed, ResultStrides(call.specs))
    return DelegatePlan(composed)


def _plan_whole_call(call: _CallToPlan) -> CallPlan | None:
    """Plan a call that its rule runs on replicated operands."""
    return _plan_replicated(call) if _op(call).whole_call else None


def _plan_replicated(call: _CallToPlan) -> CallPlan:
    if call.written is not None:
        return plan_on_whole(call.func, call.specs, call.written)
    return ReplicatedPlan(_rule(call).name, call.specs, _rule(call).inplace)


def _infer_results(call: _CallToPlan) -> CallPlan | None:
    """Run the call on meta tensors. An invalid call fails here, with torch's own error."""
    meta, call.structure = infer_outputs(call.func, call.specs, call.args, call.kwargs)
    if call.structure is NotImplemented:  # Python then asks the other operand, or refuses
        return ConstantPlan(NotImplemented)
    if meta is not None:
        call.meta = meta
        return None
    if call.kernel and torch_private.is_custom(call.func):
        raise needs_fake(call.func)
    return plan_without_rule(call.func, call.specs, call.args, call.kwargs)


def _plan_returned_operand(call: _CallToPlan) -> CallPlan | None:
    """Plan a call whose results are operands, as those of ``F.dropout`` in eval mode."""
    if call.written is None:
        call.same = _returned_operands(call.func, _rule(call), call.meta, call.args)
    if call.same and None not in call.same:
        return ReturnOperandPlan(call.same, call.structure, None)
    return None


def _check_dtypes(call: _CallToPlan) -> None:
    """Check the dtypes of a call with a local function. Keep written operands replicated."""
    op = _op(call)
    # einsum computes by kernels that depend on the sizes of the local tensors, size 1 above all
    several = call.func is torch.einsum
    if (op.local is not None or several) and not _is_ours(call.func):
        check_dtypes(call.func, call.specs, call.args, call.kwargs)
    if call.written is not None:
        keep_written_whole(op, call.written[0])


def _plan_unknown_form(call: _CallToPlan) -> CallPlan | None:
    """Plan a call whose form the rule does not know, on replicated operands and with a warning."""
    if not call.unknown:
        return None
    warn_user(
        f"the rule of {_rule(call).name} does not know this form of the call ({call.unknown}); "
        f"the call runs on full tensors",
        FallbackWarning,
    )
    return _plan_replicated(call)


def _plan_by_signature(call: _CallToPlan) -> CallPlan:
    """Plan a call by the cheapest of the signatures that its rule admits."""
    func, rule, op, specs = call.func, _rule(call), _op(call), call.specs
    placement, written = call.placement, call.written
    assert placement is not None
    outs = [Spec.make(m.shape, m.dtype, placement, [broadcast] * placement.axes) for m in call.meta]
    if rule.inplace and not outs:  # x[i] = v returns nothing: its result is its target
        outs, op.out = [op.args[0].spec], [op.dims[0]]
    if not op.out:
        op.out = [(None,) * o.ndim for o in outs]
    if rule.inplace and outs[0].shape != specs[0].shape:
        return ReplicatedPlan(name_of(func), specs, True)  # its run raises the error
    choice = select_signature(op, outs, keep=0 if rule.inplace else None)
    kind: type[LocalPlan] = LocalPlan if written is None else Writing
    if choice is None:
        # compute on replicated tensors and copy the target's shard back
        if not any(e.is_partial for e in specs[0].layout):
            return ReplicatedPlan(name_of(func), specs, True)
        choice, kind = select_signature(op, outs, alike=True), MoveTargetPlan
        if choice is None:
            return ReplicatedPlan(name_of(func), specs, True)
    if call.stored is not None:
        choice = dataclasses.replace(choice, outs=(call.stored, *choice.outs[1:]))
    plan = _build_call_plan(
        kind, func, rule, op, specs, choice, call.structure, call.args, call.kwargs
    )
    ranges = _cut_indices(plan, op)
    if ranges:
        plan = call_plan.RangeCheckedPlan(plan, ranges)
    if isinstance(plan, Writing) and written is not None:
        plan.writes, plan.returns = written
    if all(i is None for i in call.same):
        return plan
    return ReturnOperandPlan(call.same, call.structure, plan)


def _rule(call: _CallToPlan) -> Rule:
    assert call.rule is not None  # `_plan_without_rule` has planned the others
    return call.rule


def _op(call: _CallToPlan) -> OpDescription:
    assert call.op is not None  # `_plan_by_description` makes it
    return call.op


def _cut_indices(plan: CallPlan, op: OpDescription) -> list[tuple[int, Range]]:
    """Return the index operands of which every rank has the full value, but its kernel a shard."""
    if not isinstance(plan, LocalPlan) or torch_private.recording.on or not op.ranges:
        return []
    cut = [
        i
        for i in op.ranges
        if plan.routes[i] is not None and all(e.is_broadcast for e in plan.src[i].layout)
    ]
    return [(i, op.ranges[i]) for i in cut]


def _returned_operands(
    func: Any, rule: Rule, results: Sequence[torch.Tensor], args: tuple[Any, ...]
) -> tuple[int | None, ...]:
    """Return for each result the operand that it is, valid for all calls of the plan.

    In-place functions handle this themselves. Functions of this library may return their operand in
    another layout.
    """
    free = rule.scalars and any(isinstance(a, (int, float, complex)) for a in args)
    return (
        (None,) * len(results)
        if rule.inplace or free or _is_ours(func)
        else operands_among(results)
    )


def _is_ours(func: Any) -> bool:
    """Return True if a function belongs to this library."""
    return (getattr(func, "__module__", None) or "").startswith(f"{__package__}.")


def _is_torchs(func: Any) -> bool:
    """Return True if a function is torch's own, which has no side effects when it is run again."""
    return isinstance(func, _TORCH_KINDS) or (
        isinstance(func, FunctionType) and (func.__module__ or "").partition(".")[0] == "torch"
    )


_TORCH_KINDS = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


def _build_call_plan(
    kind: type[LocalPlan],
    func: Any,
    rule: Rule,
    op: OpDescription,
    specs: Sequence[Spec],
    choice: SignatureChoice,
    structure: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CallPlan:
    if kind is LocalPlan and op.view and not rule.inplace:
        communicates = (
            choice.ins[0] is not specs[0]
            or type(tensors_in(kwargs, tensors_in(args, []))[0]) is RemoteView
        )
        kind = _kind_of_view_plan(rule, specs[0], choice.outs, communicates)
    done = kind(name_of(func), specs, choice.ins, choice.outs)
    done.inplace, done.view, done.structure = rule.inplace, op.view, structure
    done.picks = op.view and any(f in op.reduce or f in op.exchanges for f in choice.factors)
    done.single = isinstance(structure, torch.Tensor)
    done.random, done.takes_sparse, done.unread = op.random, bool(op.reduce), op.unread
    rank = world().rank
    if not done.outside:
        if op.local is not None:
            # The tensors that it makes beforehand are part of a recorded program too.
            with (
                torch_private.real_tensors()
                if torch_private.recording.on
                else contextlib.nullcontext()
            ):
                done.function = op.local(
                    LocalContext(rank, choice.ins, choice.outs, choice.factors, op)
                )
        if op.random:
            where = specs[0].placement.coordinate(rank) or ()
            along = {a for axes in choice.factors.values() for a in axes}
            done.coordinates = tuple(c if a in along else 0 for a, c in enumerate(where))
    flat = (
        not done.picks
        and bool(args or not op.view)
        and all(type(a) in ORDINARY or not tensors_in(a, []) for a in (*args, *kwargs.values()))
    )
    if not (op.view or rule.inplace) and _is_torchs(func):
        remote = any(type(t) is RemoteView for t in tensors_in(kwargs, tensors_in(args, [])))
        boxed = any(r is not None for r in done.routes)
        messages = done.function is not None and (
            bool(op.ranges) or any(f in op.exchanges or f in op.reduce for f in choice.factors)
        )
        if local_order_misleads(boxed, done.outside, messages, remote, choice.outs):
            done.order = ResultStrides(specs, op.random)
    if torch_private.function_mode_on():
        return done  # a recorder is active and must see each step
    if (
        kind is not LocalPlan
        or done.outside
        or done.coordinates is not None
        or any(r is not None for r in done.routes)
    ):
        return done
    if rule.inplace:
        return (
            InPlacePlan(done)
            if flat and done.single and args and type(args[0]) in ORDINARY and not op.view
            else done
        )
    if flat and done.single:
        done.direct, done.out = True, choice.outs[0]
        done.shape, done.dtype, done.device = (
            done.out.shape,
            done.out.dtype,
            world().device(done.out.placement.type),
        )
        done.usual = done.dtype is torch.get_default_dtype() and done.device.type == "cpu"
    elif (
        flat
        and type(structure) in (tuple, list)
        and all(isinstance(t, torch.Tensor) for t in structure)
    ):
        return LocalPlanMany(done)
    elif done.single and not op.view and _is_list(args) and not tensors_in(kwargs, []):
        return LocalPlanList(done)
    return done


def _kind_of_view_plan(
    rule: Rule, base: Spec, outs: Sequence[Spec], communicates: bool
) -> type[LocalPlan]:
    """Return the class of a view function's plan: what it does with the strides of one device.

    ``communicates``: its base is boxed, or is a view that needed communication."""
    hides, recorded = _hides_strides(base, outs), torch_private.function_mode_on()
    refused = rule.name in REFUSED and bool(outs) and base.shape != outs[0].shape and communicates
    if (hides or refused) and not recorded:
        return StridedViewPlan
    if outs and local_tensors_mislead(rule.name, base, outs[0], communicates):
        return ReshapePlan
    return NotedViewPlan if hides else LocalPlan


def _hides_strides(base: Spec, outs: Sequence[Spec]) -> bool:
    """Return True if local tensors may not determine the memory order of a view's results."""
    return base.placement.coordinate(world().rank) is None or any(
        differ(s.plain) or strides_ambiguous(s.plain) for s in (base, *outs)
    )


def _is_list(args: tuple[Any, ...]) -> bool:
    """Return True if all tensors are in the first argument, a list of global ones."""
    first = args[0] if args else None
    return (
        type(first) in (tuple, list)
        and all(type(t) in ORDINARY for t in first)
        and not tensors_in(args[1:], [])
    )


def _attribute_plan(func: Any, args: tuple[Any, ...]) -> CallPlan:
    """Return the plan of a torch.Tensor property without a rule, read from the local tensor."""

    def get(x: GlobalTensor) -> Any:
        value = func(x._local)
        if isinstance(value, torch.Tensor):
            if value is x._local:
                return x
            if value.shape != x._local.shape:
                raise KernelError(
                    f"a global tensor does not support the attribute {name_of(func)}; use the "
                    f"method with the same meaning"
                )
            spec = x._spec.replace(dtype=value.dtype)
            if isinstance(x, RemoteView) and name_of(func) in ("real", "imag"):
                return RemoteView.of(value, spec, x, func)
            out = GlobalTensor.wrap(value, spec)
            if name_of(func) in ("real", "imag"):
                if not local_strides_tell(out):
                    base = base_note(x, True)
                    out = GlobalTensor.wrap(func(x._local), spec)  # it may be laid out by rows now
                    found = results(x, base.strides, func, copies=False) or [by_rows(x.shape)]
                    note_strides(out, Note(found[0], base.exact))
                link_alias(x, out)
            return out
        return value

    return (DelegatePlan if name_of(func) in ("real", "imag") else AttributePlan)(get)
