"""Planning of calls: from the rule of a function to the plan of a call.

`dispatch` calls `plan_call` on a cache miss, and caches the plan by the call's key."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._base import torch_private
from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.promote import operand_spec
from .._tensor.strides import differ, permutes
from ..boxing import box
from ..distributed.world import world
from ..errors import FallbackWarning, KernelError, PlacementError
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec, StorageSpec, layout_for
from . import call_plan
from .call_plan import (
    CallPlan,
    DelegatePlan,
    InPlacePlan,
    LocalPlan,
    LocalPlanList,
    LocalPlanMany,
    MoveTargetPlan,
    ReplicatedPlan,
    ReturnOperandPlan,
    StridedViewPlan,
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
from .rules.deferred_mean import materialize
from .shape_inference import check_dtypes, infer_outputs, operands_among

__all__ = ["lies_at", "plan_call", "stage_context", "writes"]


def autocast_state() -> tuple[Any, ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda", "xpu")
        if torch.is_autocast_enabled(kind)
    )


class _CommonPlacement(threading.local):
    where: Placement | None = None
    models = 0  # number of models in stages that run
    stages = 0  # number of stages that run, one within another


#: The placement where operands of several placements are brought together, while a model cut into
#: stages runs. It is that of the running stage, or of the last one that ran
#: (graph/pipeline/split_model.py).
stage_context = _CommonPlacement()


def _common_placement(func: Any, tensors: Sequence[torch.Tensor]) -> Placement:
    found: list[Placement] = []
    for t in tensors:
        if isinstance(t, GlobalTensor) and t._spec.shown.placement not in found:
            found.append(t._spec.shown.placement)
    if len(found) > 1:
        where = _place_of_scalars(tensors)
        if where is not None:
            return where
        if stage_context.where is not None and (
            not writes(func) or lies_at(tensors[0], stage_context.where)
        ):
            return stage_context.where
        raise PlacementError(
            f"{describe_call(func, tensors)}: the operands lie on different placements\n"
            + "".join(f"  {p}\n" for p in found)
            + f"bring them together first, for example x.to_global(placement={found[0]!r})"
            + (
                ", or write out of place (x = x + y), so that the result need not lie where x does"
                if writes(func)
                else ""
            )
        )
    return found[0]


def _place_of_scalars(tensors: Sequence[torch.Tensor]) -> Placement | None:
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
    these = iter(
        [
            t.to_global(placement=where, sbp=layout_for(where, t.sbp)) if elsewhere else t
            for t, elsewhere in zip(tensors, away, strict=True)
        ]
    )
    return func(*replaced(args, these), **replaced(kwargs, these))


def _with_scalars(
    func: Any, where: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``func`` with the scalars of other placements boxed to ``where``.

    Scalars of one spec are boxed together."""
    tensors = tensors_in(kwargs, tensors_in(args, []))
    groups: dict[Spec, list[GlobalTensor]] = {}
    for t in tensors:
        if isinstance(t, GlobalTensor) and t._spec.shown.placement is not where:
            groups.setdefault(materialize(t)._spec, []).append(t)
    brought: dict[int, torch.Tensor] = {}
    for group in groups.values():
        values = torch.stack(group) if len(group) > 1 else group[0].unsqueeze(0)
        spec = values._spec  # type: ignore[attr-defined]
        there = spec.replace(placement=where, layout=[broadcast] * where.axes)
        moved = GlobalTensor.wrap(box(values._local, spec, there, why=name_of(func)), there)  # type: ignore[attr-defined]
        brought.update(zip(map(id, group), moved.unbind(), strict=True))
    these = iter([brought.get(id(t), t) for t in tensors])
    return func(*replaced(args, these), **replaced(kwargs, these))


def plan_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
    """Plan a call after a cache miss: find the rule, select layouts, and freeze the plan."""
    rule = rule_of(func, kwargs)
    kernel, written = torch_private.is_kernel(func), None
    if kernel:
        rule = rule or RULES.get(torch_private.twin_of_kernel(func))
        if torch_private.kernel_writes(func) and (rule is None or not rule.inplace):
            written = written_operands(func, args, kwargs)
    if kwargs.get("out") is not None and written is None:
        check_out(func, args, kwargs)
        return DelegatePlan(lambda *a, **k: call_with_out(func, a, k))
    tensors = tensors_in(kwargs, tensors_in(args, []))
    placement = _common_placement(func, tensors)
    if any(
        isinstance(t, GlobalTensor) and t._spec.shown.placement is not placement for t in tensors
    ):
        if written is not None:
            raise PlacementError(
                f"{describe_call(func, tensors)}: an operator that writes into its arguments "
                f"needs all of them on one placement"
            )
        if _place_of_scalars(tensors) is None:
            return DelegatePlan(lambda *a, **k: _call_on_common_placement(func, a, k))
        return DelegatePlan(lambda *a, **k: _with_scalars(func, placement, a, k))
    if getattr(func, "__name__", "") == "__get__" and func not in RULES:
        return _attribute(func, args)
    operands = f"operand {{}} of {name_of(func)}"
    specs = [
        t._spec if isinstance(t, GlobalTensor) else operand_spec(t, placement, operands.format(i))
        for i, t in enumerate(tensors)
    ]
    if rule is None and written is not None:
        warn_without_rule(func)
        return plan_on_whole(func, specs, written)
    if rule is None:
        return plan_without_rule(func, specs, args, kwargs)
    if rule.inplace and not isinstance(tensors[0], GlobalTensor):
        return DelegatePlan(lambda *a, **k: write_into_plain(func, placement, a, k))
    # A tensor that is stored in another layout is planned by its logical spec, but stays stored.
    taken = [s.shown for s in specs]
    stored = specs[0] if rule.inplace and isinstance(specs[0], StorageSpec) else None
    if stored is not None:
        taken[0] = stored.plain
        if stored.placement is not placement:
            return ReplicatedPlan(rule.name, specs, True)
    op = OpDescription([Arg(i, s) for i, s in enumerate(taken)], function=func)
    these, unknown = iter(op.args), ""
    try:
        rule.describe(op, *replaced(args, these), **replaced(kwargs, these))
    except (TypeError, ValueError, IndexError) as error:
        unknown = str(error)
    except RuntimeError:
        # For example of shapes that do not fit. If the function itself refuses the call, its own
        # error is raised.
        infer_outputs(func, specs, args, kwargs)
        raise
    if op.composite is not None:  # before the meta run, because the result may depend on data
        meta, structure = infer_outputs(func, specs, args, kwargs) if op.checked else (None, None)
        if (same := _same(func, rule, meta or (), args)) and None not in same:
            return ReturnOperandPlan(same, structure, None)
        if meta is not None and not _is_ours(func):
            check_dtypes(func, specs, args, kwargs)
        cast = meta is not None and torch_private.any_autocast() and not rule.inplace
        return DelegatePlan(
            _as_autocast_would(op.composite, func, specs, args, kwargs, meta)
            if cast
            else op.composite
        )  # type: ignore[arg-type]
    if op.whole_call:
        return (
            ReplicatedPlan(rule.name, specs, rule.inplace)
            if written is None
            else plan_on_whole(func, specs, written)
        )
    # an invalid call fails here, with torch's own error
    meta, structure = infer_outputs(func, specs, args, kwargs)
    if meta is None:
        if kernel and torch_private.is_custom(func):
            raise needs_fake(func)
        return plan_without_rule(func, specs, args, kwargs)
    same = _same(func, rule, meta, args) if written is None else ()
    if same and None not in same:
        return ReturnOperandPlan(same, structure, None)
    if op.local is not None and not _is_ours(func):
        check_dtypes(func, specs, args, kwargs)
    if written is not None:
        keep_written_whole(op, written[0])
    if unknown:
        warnings.warn(
            f"the rule of {rule.name} does not know this form of the call ({unknown}); it runs on "
            f"whole tensors",
            FallbackWarning,
            stacklevel=3,
        )
        return (
            ReplicatedPlan(rule.name, specs, rule.inplace)
            if written is None
            else plan_on_whole(func, specs, written)
        )
    outs = [Spec.make(m.shape, m.dtype, placement, [broadcast] * placement.axes) for m in meta]
    if rule.inplace and not outs:  # x[i] = v returns nothing: its result is its target
        outs, op.out = [taken[0]], [op.dims[0]]
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
    if stored is not None:
        choice = dataclasses.replace(choice, outs=(stored, *choice.outs[1:]))
    plan = _build_call_plan(kind, func, rule, op, specs, choice, structure, args, kwargs)
    ranges = _cut_indices(plan, op)
    if ranges:
        plan = call_plan.RangeCheckedPlan(plan, ranges)
    if isinstance(plan, Writing) and written is not None:
        plan.writes, plan.returns = written
    return plan if all(i is None for i in same) else ReturnOperandPlan(same, structure, plan)


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


def _same(
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
    if (
        kind is LocalPlan
        and op.view
        and not rule.inplace
        and not torch_private.function_mode_on()
        and _hides_strides(op, specs[0], choice.outs, structure)
    ):
        kind = StridedViewPlan
    done = kind(name_of(func), specs, choice.ins, choice.outs)
    done.inplace, done.view, done.structure = rule.inplace, op.view, structure
    done.picks = op.view and any(f in op.reduce or f in op.exchanges for f in choice.factors)
    done.single = isinstance(structure, torch.Tensor)
    done.random = op.random
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


def _hides_strides(op: OpDescription, base: Spec, outs: Sequence[Spec], structure: Any) -> bool:
    """Return True if local tensors may not determine the memory order of a view's results."""
    if base.placement.coordinate(world().rank) is None or any(
        differ(s.plain) for s in (base, *outs)
    ):
        return True
    return isinstance(structure, torch.Tensor) and permutes(op.dims[0], op.out[0], outs[0])


def _is_list(args: tuple[Any, ...]) -> bool:
    """Return True if all tensors are in the first argument, a list of global ones."""
    first = args[0] if args else None
    return (
        type(first) in (tuple, list)
        and all(type(t) in ORDINARY for t in first)
        and not tensors_in(args[1:], [])
    )


def _as_autocast_would(
    composite: Callable[..., Any],
    func: Any,
    specs: Sequence[Spec],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meta: Sequence[torch.Tensor],
) -> Callable[..., Any]:
    """Return a composite that casts as autocast casts for ``func``.

    Autocast has a policy for ``func``, but not for the functions that ``composite`` calls. So the
    inputs are cast to the dtype that ``func`` would return, and the composite runs with autocast
    off."""
    kinds = [kind for kind, _ in autocast_state()]

    def off() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    try:
        with off():
            plain = [m.dtype for m in infer_outputs(func, specs, args, kwargs)[0] or ()]
    except RuntimeError:  # operands of several dtypes, which autocast unifies
        plain = []
    found = {m.dtype for m in meta}
    wanted = found.pop() if len(found) == 1 else None
    if wanted is None or not wanted.is_floating_point:
        wanted = None
    elif plain == [m.dtype for m in meta] and any(
        s.dtype.is_floating_point and s.dtype.itemsize > wanted.itemsize for s in specs
    ):
        # it accepts these dtypes as they are, such as the running statistics of a batch norm
        wanted = None

    def run(*args: Any, **kwargs: Any) -> Any:
        if wanted is not None:
            these = iter(
                [
                    t.to(wanted) if t.is_floating_point() else t
                    for t in tensors_in(kwargs, tensors_in(args, []))
                ]
            )
            args, kwargs = replaced(args, these), replaced(kwargs, these)
        with off():
            return composite(*args, **kwargs)

    return run


def _attribute(func: Any, args: tuple[Any, ...]) -> CallPlan:
    """Return the plan of a torch.Tensor property without a rule, read from the local tensor."""

    def get(x: GlobalTensor) -> Any:
        value = func(x._local)
        if isinstance(value, torch.Tensor):
            if value is x._local:
                return x
            if value.shape != x._local.shape:
                raise KernelError(
                    f"the attribute {name_of(func)} of a global tensor is not known; use the "
                    f"method of the same meaning"
                )
            return GlobalTensor.wrap(value, x._spec.replace(dtype=value.dtype))
        return value

    return DelegatePlan(get)
