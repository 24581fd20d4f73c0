"""A call on global tensors, in five steps: key, plan, box, run locally, wrap. The cached path is the product's hot loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import _torch, plans
from .bodies import FORGOTTEN, apply_plainly, body_of
from .boxing import box
from .counted_once import note_replicated
from .distributed.world import ON_FORGET, sent, world
from .errors import FallbackWarning, GlobalTensorError, InplaceError, KernelError, PlacementError
from .moved import MovedView
from .operators import Writing, keep_written_whole, needs_fake, written_operands
from .placement import Placement
from .plans import Answer, Boxed, InPlace, LaidView, Listed, Moved, Plan, Recalling, Same, Several, Through, Whole, describe_call, name_of, replaced, tensors_in
from .promote import operand_spec, promote
from .rules import RULES, Arg, Choice, Derived, Op, Range, Rule, Split, choose, rule_of, spellings_of
from .rules import rule as declare_rule
from .rules.quotient import settle
from .sbp import broadcast
from .spec import Spec, Stored, fitting, layout_on
from .strides import differ, permutes
from .trial import check_dtypes, on_meta, operands_among
from .visible import SEEN, apply
from .wrapper import ORDINARY, GlobalTensor, Memory, SlottedGlobalTensor, kernel_message

__all__ = ["HANDLERS", "call", "copy_back", "fresh_plans", "global_copy", "into_plain", "lies_at", "record", "rule", "writes"]

#: Functions that need no plan: torch function -> handler(func, args, kwargs). Filled by the rooms above.
HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}
_MOST = 1 << 13  # plans kept; beyond that all are forgotten
_make = _torch.make_wrapper
_grad_enabled = torch.is_grad_enabled
_any_autocast = _torch.any_autocast
_Size = torch.Size
_NUMBERS = frozenset((int, float, bool))
_APPLY = apply_plainly.__code__
_DEEPEST = 16  # frames searched for the apply of a custom Function


class _Plans(threading.local):
    """Plans hold this rank's shapes; simulated ranks are threads, so each thread has its own."""

    def __init__(self) -> None:
        self.derived = Derived()
        self.plans: dict[tuple[Any, ...], Plan] = self.derived.found  # which costs a look less in `call`

    def use(self, derived: Derived) -> Derived:
        """Look in ``derived`` from now on -> where it was looked before."""
        before, self.derived, self.plans = self.derived, derived, derived.found
        return before


_cache = _Plans()


@contextlib.contextmanager
def fresh_plans(plans: Derived | None = None) -> Iterator[None]:
    """Inside, calls are planned anew and the plans forgotten afterwards: while a recorder looks on, none runs by the short way. ``plans``: those of another
    world, kept for the next time there."""
    before = _cache.use(Derived() if plans is None else plans)
    try:
        yield
    finally:
        _cache.use(before)


def _forget_plans() -> None:
    _cache.plans.clear()


ON_FORGET.append(_forget_plans)
_SCALARS = RULES.scalars


def call(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``__torch_function__`` of GlobalTensor. Each line here is paid by every op: measure (benchmarks/eager_overhead.py) before changing one."""
    if not _grad_enabled():
        _refuse_in_function(args)
    handler = HANDLERS.get(func)
    if handler is not None:
        return handler(func, args, kwargs or {})
    key: list[Any] = [func] if not _any_autocast() else [func, _autocast()]
    values: list[Any] = []  # the arguments, with local tensors
    number: Any = None  # that the plan does not depend on, for the record of what was run; a tuple where there are several
    for a in args:
        t = type(a)
        if t is SlottedGlobalTensor:
            key.append(a._spec)
            values.append(a._local)
            continue
        if t is GlobalTensor:
            key.append(a._spec)
            values.append(a._local)
            continue
        if t is int or t is float:  # equal numbers of both are other arguments
            key.append(t)
            if func in _SCALARS:
                number = a if number is None else (number, a)
            else:
                key.append(a)
        elif t is bool:
            key.append(bool)
            key.append(a)
        elif a is None or t is torch.dtype or t is str:
            key.append(a)
        elif t is list and func not in _SCALARS:  # what `_key` gives, without a call of it
            key.append((list, *[v._spec if type(v) in ORDINARY else _key(v, False) for v in a]))
        elif (t is tuple or t is _Size) and _NUMBERS.issuperset(types_ := tuple(map(type, a))):
            key.append(a)
            key.append(types_)
        else:
            key.append(_key(a, free := func in _SCALARS))
            if free:
                number = (number, _numbers_in(a))
            if t is not list and type(a) in ORDINARY:  # by now: a quotient has been taken for its key
                a = a._local
        values.append(a)
    if kwargs:
        for name, a in kwargs.items():
            key.append(name)
            if type(a) in ORDINARY:
                key.append(a._spec)
            elif a is None or type(a) is bool:
                key.append(a)
            else:
                key.append(_key(a, free := func in _SCALARS))
                if free:
                    number = (number, _numbers_in(a))
    try:
        found = _cache.plans[tuple(key)]
    except (KeyError, TypeError) as miss:
        found = _missed(func, args, kwargs or {}, key, isinstance(miss, KeyError))
    found.record(found.digest if number is None else found.digests.get(number) or found.digest_with(number))
    try:
        if not found.direct:
            return found.run(func, args, kwargs or {})
        if kwargs:
            out = (found.function or func)(*values, **{k: v._local if type(v) in ORDINARY else v for k, v in kwargs.items()})
        else:
            out = (found.function or func)(*values)
    except (IndexError, RuntimeError) as error:
        if (alone := plans.as_on_one_device(error, func, args, kwargs or {})) is not None:
            raise alone from None
        raise
    wrapped = _make(SlottedGlobalTensor, found.shape) if found.usual else _make(SlottedGlobalTensor, found.shape, dtype=found.dtype, device=found.device)
    wrapped._local = out
    wrapped._spec = found.out
    if found.view:  # as moved.share does
        memory = args[0]._memory
        if memory is None:
            memory = args[0]._memory = Memory()
        memory.viewed = True
        wrapped._memory = memory
    else:
        wrapped._memory = None
    return wrapped


def record(what: str, *tensors: GlobalTensor) -> None:
    """Add to what this rank has run on global tensors: for handlers, which have no plan that does."""
    for t in tensors:
        spec = t._spec
        world().history((spec.shown.placement,)).record(what.encode() + spec.text)


_PLAIN = frozenset({int, type(None)})


def _refuse_in_function(args: tuple[Any, ...]) -> None:
    """In the forward of a custom autograd.Function gradients are off, and its backward would see parts as if they were whole: say so, at its first op."""
    for a in args:  # a generator would take four times as long, in each op of inference
        if type(a) in ORDINARY and a._local.requires_grad:
            break
    else:
        return
    frame = sys._getframe(2)
    for _ in range(_DEEPEST):
        if frame is None:
            return
        if frame.f_code is _APPLY:
            raise KernelError(kernel_message("the forward of a custom torch.autograd.Function"))
        frame = frame.f_back  # type: ignore[assignment]


def _missed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: list[Any], hashable: bool) -> Plan:
    """No plan is kept for this call. Where an argument cannot be hashed it is planned each time."""
    version = RULES.version
    found = _plan(func, args, kwargs)
    if hashable and plans.by_default(found, args, kwargs):
        found = plans.Defaulted(found, _plan)
    if func in FORGOTTEN and kwargs.keys().isdisjoint(FORGOTTEN[func]):
        found = Recalling(found, lambda *a, **k: call(GlobalTensor, func, (), a, k))
    first = next((t for t in tensors_in(kwargs, tensors_in(args, [])) if isinstance(t, GlobalTensor)), None)
    if first is not None:
        history = world().history((first._spec.shown.placement,))
        found.record, found.digest = history.record, history.learn(_text(func, key))
    if hashable:
        _cache.derived.keep(tuple(key), found, version, _MOST)
    return found


def _text(func: Any, key: Sequence[Any]) -> str:
    """Return a call as reports show it, the same on every rank: ``mul(f32[4, 3] S(0), float)``."""
    arguments = [v for v, after in zip(key[1:], [*key[2:], None], strict=True) if not (isinstance(v, type) and type(after) is v)]  # the type of what follows
    return f"{name_of(func)}({', '.join(map(_spelled, arguments))})"


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    if isinstance(value, type):
        return value.__name__
    known = (Spec, int, float, complex, str, bytes, slice, torch.dtype, torch.device, type(None), type(Ellipsis))
    return repr(value) if isinstance(value, known) else type(value).__name__


def _numbers_in(a: Any) -> bytes:
    """Give the numbers in an argument of any kind, for the record of what was run."""
    if isinstance(a, (int, float, complex)):
        return repr(a).encode()
    if isinstance(a, (tuple, list)):
        return b"".join(map(_numbers_in, a))
    return b"".join(map(_numbers_in, a.values())) if isinstance(a, dict) else b""


GlobalTensor.__torch_function__ = classmethod(call)  # type: ignore[assignment]


def _autocast() -> tuple[Any, ...]:
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda", "xpu") if torch.is_autocast_enabled(kind))


def _key(a: Any, free: bool) -> Any:
    """A hashable stand-in for an argument: what of it may matter to the plan."""
    t = type(a)
    if t is slice:
        start, stop, step = a.start, a.stop, a.step
        if type(start) in _PLAIN and type(stop) in _PLAIN and type(step) in _PLAIN:
            return (slice, start, stop, step)
        if any(isinstance(n, torch.Tensor) for n in (start, stop, step)):
            return []  # its value decides the result's shape: no key, so it is planned each time
        return (slice, _key(start, free), _key(stop, free), _key(step, free))
    if t is float or t is int or t is complex:
        return t if free else (t, a)
    if t is tuple or t is list or t is torch.Size:
        return (t, *[v._spec if type(v) in ORDINARY else _key(v, free) for v in a])
    if a is None or a is Ellipsis:
        return a
    if isinstance(a, GlobalTensor):
        return settle(a)._spec if type(a) is not MovedView else (MovedView, a._spec)
    if isinstance(a, torch.Tensor):
        try:
            return (torch.Tensor, a.shape, a.dtype)
        except RuntimeError:  # of a kind without a shape: no key, so it is planned each time, which refuses
            return []
    if t is dict:
        return (dict, *[(k, _key(v, free)) for k, v in a.items()])
    return a


# ---------------------------------------------------------------------------------------------------------------- making a plan


class _Meeting(threading.local):
    where: Placement | None = None
    models = 0  # in stages, that run
    stages = 0  # that run, one within another


#: Where operands of several placements meet, while a model that is cut into stages runs: on the stage that runs, or has run last (pipeline.py).
meeting = _Meeting()


def _common_placement(func: Any, tensors: Sequence[torch.Tensor]) -> Placement:
    found: list[Placement] = []
    for t in tensors:
        if isinstance(t, GlobalTensor) and t._spec.shown.placement not in found:
            found.append(t._spec.shown.placement)
    if len(found) > 1:
        where = _place_of_scalars(tensors)
        if where is not None:
            return where
        if meeting.where is not None and (not writes(func) or lies_at(tensors[0], meeting.where)):
            return meeting.where
        raise PlacementError(
            f"{describe_call(func, tensors)}: the operands lie on different placements\n"
            + "".join(f"  {p}\n" for p in found)
            + f"bring them together first, for example x.to_global(placement={found[0]!r})"
            + (", or write out of place (x = x + y), so that the result need not lie where x does" if writes(func) else "")
        )
    return found[0]


def _place_of_scalars(tensors: Sequence[torch.Tensor]) -> Placement | None:
    """Where operands of several placements meet if all of one placement are but single numbers, which go anywhere (as torch lets them from device to device).

    None: tensors with dims lie on several placements. Of numbers alone, all ranks that have some.
    """
    places = list(dict.fromkeys(t._spec.shown.placement for t in tensors if isinstance(t, GlobalTensor)))
    sized = list(dict.fromkeys(t._spec.shown.placement for t in tensors if isinstance(t, GlobalTensor) and t.dim()))
    if len(sized) > 1:
        return None
    return sized[0] if sized else Placement(places[0].type, sorted({r for p in places for r in p.flat}))


def lies_at(t: torch.Tensor, where: Placement) -> bool:
    return isinstance(t, GlobalTensor) and t._spec.shown.placement is where


def writes(func: Any) -> bool:
    """Whether a function writes into its first argument, by its name."""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def _met(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with what lies elsewhere brought to where operands meet, with its sbp as it is where that has as many axes. Raises PlacementError where
    nothing says where."""
    tensors = tensors_in(kwargs, tensors_in(args, []))
    where = _common_placement(func, tensors)
    away = [isinstance(t, GlobalTensor) and t._spec.shown.placement is not where for t in tensors]
    these = iter([t.to_global(placement=where, sbp=layout_on(where, t.sbp)) if elsewhere else t for t, elsewhere in zip(tensors, away, strict=True)])
    return func(*replaced(args, these), **replaced(kwargs, these))


def _with_scalars(func: Any, where: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with the numbers that lie elsewhere brought to ``where``: those that lie alike together."""
    tensors = tensors_in(kwargs, tensors_in(args, []))
    groups: dict[Spec, list[GlobalTensor]] = {}
    for t in tensors:
        if isinstance(t, GlobalTensor) and t._spec.shown.placement is not where:
            groups.setdefault(settle(t)._spec, []).append(t)
    brought: dict[int, torch.Tensor] = {}
    for group in groups.values():
        values = torch.stack(group) if len(group) > 1 else group[0].unsqueeze(0)
        spec = values._spec  # type: ignore[attr-defined]
        there = spec.replace(placement=where, layout=[broadcast] * where.axes)
        moved = GlobalTensor.wrap(box(values._local, spec, there, why=name_of(func)), there)  # type: ignore[attr-defined]
        brought.update(zip(map(id, group), moved.unbind(), strict=True))
    these = iter([brought.get(id(t), t) for t in tensors])
    return func(*replaced(args, these), **replaced(kwargs, these))


def _plan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """A cache miss: find the rule, choose layouts, and freeze what to do."""
    rule = rule_of(func, kwargs)
    kernel, written = _torch.is_kernel(func), None
    if kernel:
        rule = rule or RULES.get(_torch.twin_of_kernel(func))
        if _torch.kernel_writes(func) and (rule is None or not rule.inplace):
            written = written_operands(func, args, kwargs)
    if kwargs.get("out") is not None and written is None:
        check_out(func, args, kwargs)
        return Through(lambda *a, **k: _with_out(func, a, k))
    tensors = tensors_in(kwargs, tensors_in(args, []))
    placement = _common_placement(func, tensors)
    if any(isinstance(t, GlobalTensor) and t._spec.shown.placement is not placement for t in tensors):
        if written is not None:
            raise PlacementError(f"{describe_call(func, tensors)}: an operator that writes into its arguments needs all of them on one placement")
        if _place_of_scalars(tensors) is None:
            return Through(lambda *a, **k: _met(func, a, k))
        return Through(lambda *a, **k: _with_scalars(func, placement, a, k))
    if getattr(func, "__name__", "") == "__get__" and func not in RULES:
        return _attribute(func, args)
    operands = f"operand {{}} of {name_of(func)}"
    specs = [t._spec if isinstance(t, GlobalTensor) else operand_spec(t, placement, operands.format(i)) for i, t in enumerate(tensors)]
    if rule is None and written is not None:
        _warn_of(func)
        return _on_whole(func, specs, written)
    if rule is None:
        return _unruled(func, specs, args, kwargs)
    if rule.inplace and not isinstance(tensors[0], GlobalTensor):
        return Through(lambda *a, **k: into_plain(func, placement, a, k))
    taken = [s.shown for s in specs]  # what is stored otherwise counts as what it is shown to be, but stays where it is stored
    stored = specs[0] if rule.inplace and isinstance(specs[0], Stored) else None
    if stored is not None:
        taken[0] = stored.plain
        if stored.placement is not placement:
            return Whole(rule.name, specs, True)
    op = Op([Arg(i, s) for i, s in enumerate(taken)], function=func)
    these, unknown = iter(op.args), ""
    try:
        rule.describe(op, *replaced(args, these), **replaced(kwargs, these))
    except (TypeError, ValueError, IndexError) as error:
        unknown = str(error)
    except RuntimeError:  # of shapes that do not fit, say: in the words of the function itself, if it refuses the call as well
        on_meta(func, specs, args, kwargs)
        raise
    if op.composite is not None:  # before the meta run: what comes out may depend on data
        meta, structure = on_meta(func, specs, args, kwargs) if op.checked else (None, None)
        if (same := _same(func, rule, meta or (), args)) and None not in same:
            return Same(same, structure, None)
        if meta is not None and not _is_ours(func):
            check_dtypes(func, specs, args, kwargs)
        cast = meta is not None and _torch.any_autocast() and not rule.inplace
        return Through(_as_autocast_would(op.composite, func, specs, args, kwargs, meta) if cast else op.composite)  # type: ignore[arg-type]
    if op.whole_call:
        return Whole(rule.name, specs, rule.inplace) if written is None else _on_whole(func, specs, written)
    meta, structure = on_meta(func, specs, args, kwargs)  # a call that is wrong fails here, with torch's own error
    if meta is None:
        if kernel and _torch.is_custom(func):
            raise needs_fake(func)
        return _unruled(func, specs, args, kwargs)
    same = _same(func, rule, meta, args) if written is None else ()
    if same and None not in same:
        return Same(same, structure, None)
    if op.local is not None and not _is_ours(func):
        check_dtypes(func, specs, args, kwargs)
    if written is not None:
        keep_written_whole(op, written[0])
    if unknown:
        warnings.warn(f"the rule of {rule.name} does not know this form of the call ({unknown}); it runs on whole tensors", FallbackWarning, stacklevel=3)
        return Whole(rule.name, specs, rule.inplace) if written is None else _on_whole(func, specs, written)
    outs = [Spec.make(m.shape, m.dtype, placement, [broadcast] * placement.axes) for m in meta]
    if rule.inplace and not outs:  # x[i] = v returns nothing: its result is its target
        outs, op.out = [taken[0]], [op.dims[0]]
    if not op.out:
        op.out = [(None,) * o.ndim for o in outs]
    if rule.inplace and outs[0].shape != specs[0].shape:
        return Whole(name_of(func), specs, True)  # which says why it cannot be
    choice = choose(op, outs, keep=0 if rule.inplace else None)
    kind: type[Boxed] = Boxed if written is None else Writing
    if choice is None:
        if not any(e.is_partial for e in specs[0].layout):
            return Whole(name_of(func), specs, True)  # compute on whole tensors and bring the target's part back
        choice, kind = choose(op, outs, alike=True), Moved
        if choice is None:
            return Whole(name_of(func), specs, True)
    if stored is not None:
        choice = dataclasses.replace(choice, outs=(stored, *choice.outs[1:]))
    plan = _freeze(kind, func, rule, op, specs, choice, structure, args, kwargs)
    ranges = _cut_indices(plan, op)
    if ranges:
        plan = plans.Guarded(plan, ranges)
    if isinstance(plan, Writing) and written is not None:
        plan.writes, plan.returns = written
    return plan if all(i is None for i in same) else Same(same, structure, plan)


def _cut_indices(plan: Plan, op: Op) -> list[tuple[int, Range]]:
    """Return the operands that are indices, that every rank has whole, and of which each rank's kernel will see a part."""
    if not isinstance(plan, Boxed) or _torch.recording.on or not op.ranges:
        return []
    cut = [i for i in op.ranges if plan.routes[i] is not None and all(e.is_broadcast for e in plan.src[i].layout)]
    return [(i, op.ranges[i]) for i in cut]


def _same(func: Any, rule: Rule, results: Sequence[torch.Tensor], args: tuple[Any, ...]) -> tuple[int | None, ...]:
    """Return which operand each result is, for all calls that a plan is for.

    In-place functions see to that themselves, and functions of this library may give their operand in another layout.
    """
    free = rule.scalars and any(isinstance(a, (int, float, complex)) for a in args)
    return (None,) * len(results) if rule.inplace or free or _is_ours(func) else operands_among(results)


def _is_ours(func: Any) -> bool:
    """Return True of a function of this library."""
    return (getattr(func, "__module__", None) or "").startswith(f"{__package__}.")


def _freeze(
    kind: type[Boxed], func: Any, rule: Rule, op: Op, specs: Sequence[Spec], choice: Choice, structure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Plan:
    if kind is Boxed and op.view and not rule.inplace and not _torch.function_mode_on() and _hides_strides(op, specs[0], choice.outs, structure):
        kind = LaidView
    done = kind(name_of(func), specs, choice.ins, choice.outs)
    done.inplace, done.view, done.structure = rule.inplace, op.view, structure
    done.picks = op.view and any(f in op.reduce or f in op.exchanges for f in choice.factors)
    done.single = isinstance(structure, torch.Tensor)
    done.random = op.random
    rank = world().rank
    if not done.outside:
        if op.local is not None:
            with _torch.real_tensors() if _torch.recording.on else contextlib.nullcontext():  # what it makes beforehand is for the program, too
                done.function = op.local(Split(rank, choice.ins, choice.outs, choice.factors, op))
        if op.random:
            where = specs[0].placement.coordinate(rank) or ()
            along = {a for axes in choice.factors.values() for a in axes}
            done.coordinates = tuple(c if a in along else 0 for a, c in enumerate(where))
    flat = not done.picks and bool(args or not op.view) and all(type(a) in ORDINARY or not tensors_in(a, []) for a in (*args, *kwargs.values()))
    if _torch.function_mode_on():
        return done  # a recorder is at work: it wants to be asked at each step
    if kind is not Boxed or done.outside or done.coordinates is not None or any(r is not None for r in done.routes):
        return done
    if rule.inplace:
        return InPlace(done) if flat and done.single and args and type(args[0]) in ORDINARY and not op.view else done
    if flat and done.single:
        done.direct, done.out = True, choice.outs[0]
        done.shape, done.dtype, done.device = done.out.shape, done.out.dtype, world().device(done.out.placement.type)
        done.usual = done.dtype is torch.get_default_dtype() and done.device.type == "cpu"
    elif flat and type(structure) in (tuple, list) and all(isinstance(t, torch.Tensor) for t in structure):
        return Several(done)
    elif done.single and not op.view and _is_list(args) and not tensors_in(kwargs, []):
        return Listed(done)
    return done


def _hides_strides(op: Op, base: Spec, outs: Sequence[Spec], structure: Any) -> bool:
    """Return True of a view function whose parts may not tell how the whole results are laid in memory."""
    if base.placement.coordinate(world().rank) is None or any(differ(s.plain) for s in (base, *outs)):
        return True
    return isinstance(structure, torch.Tensor) and permutes(op.dims[0], op.out[0], outs[0])


def _is_list(args: tuple[Any, ...]) -> bool:
    """Whether all tensors are in the first argument, a list of global ones."""
    first = args[0] if args else None
    return type(first) in (tuple, list) and all(type(t) in ORDINARY for t in first) and not tensors_in(args[1:], [])


def _as_autocast_would(
    composite: Callable[..., Any], func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any], meta: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Autocast knows what it does to ``func``, not to the functions it is composed of: cast what comes in to what ``func`` gives, and leave the rest alone."""
    kinds = [kind for kind, _ in _autocast()]

    def off() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    try:
        with off():
            plain = [m.dtype for m in on_meta(func, specs, args, kwargs)[0] or ()]
    except RuntimeError:  # operands of several dtypes, which autocast brings together
        plain = []
    found = {m.dtype for m in meta}
    wanted = found.pop() if len(found) == 1 else None
    if wanted is None or not wanted.is_floating_point:
        wanted = None
    elif plain == [m.dtype for m in meta] and any(s.dtype.is_floating_point and s.dtype.itemsize > wanted.itemsize for s in specs):
        wanted = None  # it takes them as they are, the running statistics of a batch norm say

    def run(*args: Any, **kwargs: Any) -> Any:
        if wanted is not None:
            these = iter([t.to(wanted) if t.is_floating_point() else t for t in tensors_in(kwargs, tensors_in(args, []))])
            args, kwargs = replaced(args, these), replaced(kwargs, these)
        with off():
            return composite(*args, **kwargs)

    return run


def _attribute(func: Any, args: tuple[Any, ...]) -> Plan:
    """A property of torch.Tensor that no rule knows: asked of the local tensor where it is no tensor itself."""

    def get(x: GlobalTensor) -> Any:
        value = func(x._local)
        if isinstance(value, torch.Tensor):
            if value is x._local:
                return x
            if value.shape != x._local.shape:
                raise KernelError(f"the attribute {name_of(func)} of a global tensor is not known; use the method of the same meaning")
            return GlobalTensor.wrap(value, x._spec.replace(dtype=value.dtype))
        return value

    return Through(get)


_WARNED: set[str] = set()
_OVERWRITING = frozenset(("copy_", "fill_", "zero_", "__setitem__", "index_copy_", "index_fill_", "index_put_", "masked_fill_", "masked_scatter_", "scatter_"))


def _unruled(func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """No rule: a Python function of torch runs through its own body; anything else runs on whole tensors, with one warning."""
    if any(map(plans.is_count, tensors_in(kwargs, tensors_in(args, []))[1:])) and on_meta(func, specs, args, kwargs)[0] is None:
        return Through(lambda *a, **k: plans.with_counts(func, a, k))
    name = name_of(func)
    inplace = name.endswith("_") and not name.endswith("__")
    body = body_of(func)
    if body is not None:
        return Through(body)
    meta, structure = on_meta(func, specs, args, kwargs) if not inplace else (None, None)
    if meta == [] and structure is not None:
        return Answer(structure)
    same = operands_among(meta or ())
    if same and None not in same:
        return Same(same, structure, None)
    _warn_of(func)
    return Whole(name, specs, inplace)


def _on_whole(func: Any, specs: Sequence[Spec], written: tuple[tuple[int, ...], tuple[int | None, ...]]) -> Plan:
    """Return the plan for an operator that writes into its arguments, with every operand whole."""
    plan = Writing.on_whole(name_of(func), specs)
    plan.writes, plan.returns = written
    return plan


def _warn_of(func: Any) -> None:
    """Warn once that a function has no rule."""
    name = name_of(func)
    if name not in _WARNED:
        _WARNED.add(name)
        target = f"torch.ops.{func}" if _torch.is_kernel(func) else repr(name)
        warnings.warn(
            f"no rule for {name}: it runs on whole tensors (every input is made broadcast). Say how it splits with "
            f"globaltensor.rule({target}, notation), or run it on local parts with globaltensor.local_map",
            FallbackWarning,
            stacklevel=5,
        )


def into_plain(func: Any, placement: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place op with global operands on a plain tensor, which all ranks have alike: afterwards all have the whole result in it."""
    target = args[0]
    overwritten = name_of(func) in _OVERWRITING  # what it held before does not matter, or has never been written
    stand_in = global_copy(target, placement, f"target of {name_of(func)}", checked=not overwritten)
    result = func(stand_in, *args[1:], **kwargs)
    copy_back(target, stand_in)
    return target if result is stand_in else result


def global_copy(plain: torch.Tensor, placement: Placement, purpose: str, checked: bool = True) -> GlobalTensor:
    """Return a broadcast copy of a plain tensor, for an in-place op to write into in its place. `copy_back` ends this."""
    spec = operand_spec(plain, placement, purpose)
    return GlobalTensor.wrap(promote(plain, spec, purpose, checked=checked).clone(), spec)


def copy_back(plain: torch.Tensor, written: GlobalTensor) -> None:
    """Copy the whole value of a global tensor into a plain one on every rank, those outside the placement included. Collective."""
    placement = written.placement
    whole: Any = written.to_global(sbp=[broadcast] * placement.axes)
    value = whole.to_local(grad_sbp=[broadcast] * placement.axes)
    here, inside = world(), placement.coordinate(world().rank) is not None
    if here.size > len(placement.flat):  # ranks outside have the plain tensor as well, and no part in its gradient
        sent_value = apply(sent, (value.detach() if inside else torch.empty_like(plain), placement.flat[0]), {})
        value = value if inside else sent_value
    plain.copy_(value)
    note_replicated(plain)


def check_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what PyTorch raises of a call whose ``out=`` does not fit; InplaceError where a global ``out`` would have to change its shape."""
    rest = {name: a for name, a in kwargs.items() if name != "out"}
    operands, targets = tensors_in(rest, tensors_in(args, [])), tensors_in(kwargs["out"], [])
    where = next(t._spec.shown.placement for t in (*operands, *targets) if isinstance(t, GlobalTensor))

    def specs_of(tensors: Sequence[torch.Tensor]) -> list[Spec]:
        return [Spec.make(t.shape, t.dtype, where, [broadcast] * where.axes) for t in tensors]

    results = on_meta(func, specs_of(operands), args, rest)[0]
    if results is None:
        return
    for target, result in zip(targets, results, strict=False):
        if isinstance(target, GlobalTensor):
            if target.numel() and target.shape != result.shape:
                raise InplaceError(f"out= has shape {list(target.shape)}, but the result has shape {list(result.shape)}: give a global tensor of that shape")
            if not torch.can_cast(result.dtype, target.dtype):
                name = name_of(func)
                raise InplaceError(f"out= of {name} has {target.dtype}, but the result has {result.dtype}, which can't be cast to it: give a wider one")
    given = {name: a for name, a in kwargs.items() if name != "device"}  # the meta device's, for this
    on_meta(func, specs_of(tensors_in(given, tensors_in(args, []))), args, given)


def _with_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute, then copy into the tensors given as ``out``: into global ones in their layout, into plain ones the whole result on every rank."""
    targets = tensors_in(kwargs.pop("out"), [])
    result = func(*args, **kwargs)
    values = tensors_in(result, [])
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*values, *targets)):
        raise RuntimeError(
            f"{name_of(func)}(): functions with out=... arguments don't support automatic differentiation, but one of the arguments requires grad."
        )
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            _put(target, value)
    return replaced(result, iter(targets))


def _put(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a result into a tensor given as ``out``, which takes the result's shape as PyTorch has it."""
    if target.shape != value.shape:
        if target.numel():
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(target.shape)}, which does not match the required output shape "
                f"{list(value.shape)}. This behavior is deprecated: give a tensor of that shape, or one of 0 elements",
                UserWarning,
                stacklevel=4,
            )
        if isinstance(target, GlobalTensor):
            target.data = target.new_empty(value.shape, placement=target.placement, sbp=fitting(target.sbp, value.dim()))
        else:
            target.resize_(value.shape)
    if isinstance(target, GlobalTensor) or not isinstance(value, GlobalTensor):
        target.copy_(value)
    else:
        copy_back(target, value)


@functools.wraps(declare_rule)
def rule(*args: Any, **kwargs: Any) -> Any:
    target = kwargs["target"] if "target" in kwargs else args[0]
    for one in target if isinstance(target, (list, tuple)) else [target]:
        check_target(one)
    return declare_rule(*args, **kwargs)


def check_target(target: Any) -> None:
    """Raise GlobalTensorError of what a rule would never be found for."""
    if isinstance(target, str):
        if not spellings_of(target):
            raise GlobalTensorError(f"rule: neither a function of torch nor an operator has the name {target!r}; name an operator of your own 'space::name'")
    elif isinstance(target, type) or (isinstance(target, types.FunctionType) and not _asks_classes(target)):
        raise GlobalTensorError(
            f"rule: {target.__module__}.{target.__qualname__} is written in Python and runs on global tensors as it stands: a rule for it would never be "
            "found. Rules are for torch's functions and for operators (torch.library.custom_op); globaltensor.local_map runs a function of your own on parts"
        )


def _asks_classes(function: Any) -> bool:
    """Return True if a Python function asks the classes of its tensors whether they override it."""
    while function is not None:
        if (getattr(function, "__module__", None) or "").startswith("torch") or function in SEEN:
            return True
        if isinstance(function, types.FunctionType) and any("torch_function" in name for name in function.__code__.co_names):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
