"""Dispatch of calls on global tensors, in five steps: key, plan, box, run locally, wrap.

PyTorch calls `dispatch` for every function of a GlobalTensor. The cached path is the library's hot
loop."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from .._base import torch_private
from .._base.python_bodies import DROPPED_ARGS, apply_plainly, plain_applies
from .._base.python_numbers import OWN_TYPES, as_python_numbers, key_of_other
from .._base.tracebacks import mark_torch_error
from .._base.user_code import user_line
from .._tensor.global_tensor import ORDINARY, AliasGroup, GlobalTensor, SlottedGlobalTensor
from .._tensor.view_tracking import RemoteView
from ..distributed.world import world
from ..distributed.world_base import World, on_forget
from ..errors import GlobalTensorError, KernelError
from ..sharding.placement import Placement
from ..sharding.spec import Spec
from . import call_plan
from .autocast import autocast_state
from .call_plan import (
    ANYWHERE,
    ANYWHERE_UNSORTED,
    IN_LIST,
    ONE_AND_NAMED,
    ONE_AND_NAMED_UNSORTED,
    AttributePlan,
    CallPlan,
    ConstantPlan,
    DelegatePlan,
    RecoverArgsPlan,
    name_of,
    tensors_in,
)
from .rules import RULES, Derived
from .sharding_propagation import plan_call

__all__ = ["Handler", "dispatch", "fresh_plans", "handler_kind", "register_handlers"]

#: A function that answers a call without a plan: ``handler(func, args, kwargs)``.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_handlers: dict[Any, Handler] = {}
_handler_kinds: dict[Any, str] = {}


def register_handlers(handlers: Mapping[Any, Handler], kind: str, *, replace: bool = True) -> None:
    """Let calls of each torch function be answered by its handler, without a plan.

    ``kind``: what the table of functions (`op_table`) calls them: "method", "creation" and so on.
    ``replace``: if False, a function that has a handler already keeps it.
    """
    for function, handler in handlers.items():
        if replace or function not in _handlers:
            _handlers[function], _handler_kinds[function] = handler, kind


def handler_kind(function: Any) -> str | None:
    """Return the kind under which a torch function's handler was registered, or None."""
    return _handler_kinds.get(function)


_MAX_PLANS = 1 << 13  # if the cache has so many plans, it is cleared
_make = torch_private.make_wrapper
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch_private.any_autocast
_Size = torch.Size
_NUMBERS = frozenset((int, float, bool))
_APPLY = apply_plainly.__code__
_MAX_FRAMES = 16  # maximum number of frames searched for the apply of a custom Function


class _Plans(threading.local):
    """A plan cache for each thread: plans hold a rank's shapes, and simulated ranks are threads."""

    def __init__(self) -> None:
        self.derived = Derived()
        # an alias, which saves `dispatch` a look-up
        self.plans: dict[tuple[Any, ...], CallPlan] = self.derived.entries

    def use(self, derived: Derived) -> Derived:
        """Switch to the cache ``derived`` and return the one used before."""
        before, self.derived, self.plans = self.derived, derived, derived.entries
        return before


_cache = _Plans()


@contextlib.contextmanager
def fresh_plans(plans: Derived | None = None) -> Iterator[None]:
    """Plan calls anew within the block, in a separate cache.

    A graph recorder uses it, so that no call runs by the cached path. ``plans``: the cache to use,
    which another world saves for its next use. Without it, the cache is dropped afterwards."""
    before = _cache.use(Derived() if plans is None else plans)
    try:
        yield
    finally:
        _cache.use(before)


@on_forget
def _forget_plans(of: World) -> None:
    _cache.plans.clear()


_SCALARS = RULES.scalars


def dispatch(
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a call, as the ``__torch_function__`` of GlobalTensor.

    Every op pays for each line here: measure (benchmarks/eager_overhead.py) before changing one."""
    if plain_applies and not _grad_enabled():
        _refuse_in_function(args)
    handler = _handlers.get(func)
    if handler is not None:
        if not kwargs:
            return handler(func, args, {})
        if not args and "input" in kwargs:  # torch.clone(input=x): handlers read it by position
            args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
        return handler(func, args, kwargs)
    key: list[Any] = [func] if not _any_autocast() else [func, autocast_state()]
    values: list[Any] = []  # the arguments, with local tensors
    # The number that the plan does not depend on, for the history of operations. It is a tuple if
    # there are several.
    number: Any = None
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
        if t is int or t is float:  # an int and a float that are equal are different arguments
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
        elif (
            t is list and func not in _SCALARS
        ):  # the result of `_argument_key`, without the cost of a call
            entries: list[Any] = [list]  # a loop: until Python 3.12 a comprehension is a call
            for v in a:
                entries.append(v._spec if type(v) in ORDINARY else _argument_key(v, False))
            key.append(tuple(entries))
        elif (t is tuple or t is _Size) and _NUMBERS.issuperset(types_ := tuple(map(type, a))):
            key.append(a)
            key.append(types_)
        else:
            key.append(_argument_key(a, free := func in _SCALARS))
            if free:
                number = (number, _numbers_in(a))
            # `_argument_key` has materialized it: a deferred mean is an ordinary tensor now.
            if t is not list and type(a) in ORDINARY:
                a = a._local
        values.append(a)
    if kwargs:
        named: Any = 0  # the serials of the operands by name, for the history
        for name, a in kwargs.items():
            key.append(name)
            t = type(a)
            if t in ORDINARY:
                key.append(a._spec)
                named = (named, a._serial)
            elif a is None or t is bool:
                key.append(a)
            elif t is float and func not in _SCALARS:
                key.append((t, a))  # the result of `_argument_key`, without the cost of a call
            else:
                key.append(described := _argument_key(a, free := func in _SCALARS))
                if free:
                    number = (number, _numbers_in(a))
                if type(described) is Spec or t is RemoteView:
                    named = (named, a._serial)
    try:
        plan = _cache.plans[tuple(key)]
    except (KeyError, TypeError) as miss:
        plan = _plan_and_cache(func, args, kwargs or {}, key, miss)
    recorded, serial = plan.recorded, 0
    if recorded is not None:
        # The serials of the operands are numbers alone: None has no hash that is the same in every
        # process.
        history, code, leading = recorded
        if _grad_enabled() is not history.grad_enabled:
            history.record_grad_mode(_grad_enabled())
        if number is not None:
            code = plan.codes.get(number) or plan.code_with(number)
        if leading == 1:
            serial = hash((history.serial, code, args[0]._serial))
        elif leading == 2:
            serial = hash((history.serial, code, args[0]._serial, args[1]._serial))
        elif leading == 3:
            of_two = args[0]._serial, args[1]._serial
            serial = hash((history.serial, code, of_two, args[2]._serial))
        elif leading == IN_LIST:
            serials = [history.serial, code]
            for v in args[0]:
                serials.append(v._serial)
            serial = hash(tuple(serials))
        elif leading == ONE_AND_NAMED:
            serial = hash((history.serial, code, args[0]._serial, named))
        else:
            serial = hash((history.serial, code, *_serials_in(args, kwargs, leading)))
        history.serial = serial
    try:
        if not plan.direct:
            if recorded is None:
                if plan.mixed_history is not None:
                    code = plan.code
                    if number is not None:
                        code = plan.codes.get(number) or plan.code_with(number)
                    return _run_on_several_placements(plan, code, func, args, kwargs or {})
                return plan.run(func, args, kwargs or {})
            results = plan.run(func, args, kwargs or {})
            if type(results) is not SlottedGlobalTensor:
                return _assign_serials(results, serial)
            if not results._serial:
                results._serial = serial
            return results
        if kwargs:
            out = (plan.function or func)(
                *values, **{k: v._local if type(v) in ORDINARY else v for k, v in kwargs.items()}
            )
        else:
            out = (plan.function or func)(*values)
    except (IndexError, RuntimeError) as error:
        if not isinstance(error, GlobalTensorError):
            world().raised = f"{type(error).__name__} at {user_line()}"
        if (alone := call_plan.as_on_one_device(error, func, args, kwargs or {})) is not None:
            raise alone from None
        mark_torch_error(error)
        raise
    wrapped = (
        _make(SlottedGlobalTensor, plan.shape)
        if plan.usual
        else _make(SlottedGlobalTensor, plan.shape, dtype=plan.dtype, device=plan.device)
    )
    wrapped._local = out
    wrapped._spec = plan.out
    wrapped._serial = serial
    if plan.view:  # as `link_alias` does
        memory = args[0]._memory
        if memory is None:
            memory = args[0]._memory = AliasGroup()
        memory.viewed = True
        wrapped._memory = memory
    else:
        wrapped._memory = None
        if plan.order is not None and not plan.order.is_row_major(args, kwargs):
            kwargs = kwargs or {}
            operands = tensors_in(kwargs, tensors_in(args, []))
            plan.order.arrange(func, args, kwargs, operands, [wrapped])
    return wrapped


def _serials_in(args: tuple[Any, ...], kwargs: dict[str, Any] | None, places: int) -> list[Any]:
    """Return the serials of the global tensors in a call's arguments.

    The order of the arguments by name makes no difference."""
    if kwargs and places != ANYWHERE:
        kwargs = dict(sorted(kwargs.items()))
        if places == ONE_AND_NAMED_UNSORTED:  # as `dispatch` itself nests them
            named: Any = 0
            for a in kwargs.values():
                if isinstance(a, GlobalTensor):
                    named = (named, a._serial)
            return [args[0]._serial, named]
    tensors = tensors_in(kwargs, tensors_in(args, []))
    return [t._serial for t in tensors if isinstance(t, GlobalTensor)]


def _assign_serials(results: Any, serial: int) -> Any:
    """Give the new tensors among a call's results their serials, and return the results."""
    # isinstance with a class of tensors is slow: it is the last test
    if type(results) is tuple or type(results) is list or isinstance(results, (tuple, list)):
        for result in results:
            serial += 1
            if type(result) is SlottedGlobalTensor:
                result._serial = result._serial or serial
            elif isinstance(result, GlobalTensor) and not result._serial:
                result._serial = serial
    elif isinstance(results, GlobalTensor) and not results._serial:
        results._serial = serial
    return results


def _run_on_several_placements(
    plan: CallPlan, code: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run and record a call with operands on several placements.

    The history is that of one placement, whose ranks know the serials of the tensors on it."""
    history = plan.mixed_history
    assert history is not None

    def on_its_ranks(value: Any) -> list[GlobalTensor]:
        found = [t for t in tensors_in(value, []) if isinstance(t, GlobalTensor)]
        return [t for t in found if history.ranks == frozenset(t._spec.shown.placement.flat)]

    known = [t._serial for t in on_its_ranks((args, dict(sorted(kwargs.items()))))]
    history.record(b"", code, *known)
    serial = history.serial
    results = plan.run(func, args, kwargs)
    for i, result in enumerate(on_its_ranks(results)):
        result._serial = result._serial or hash((serial, i))
    return results


_PLAIN = frozenset({int, type(None)})


def _refuse_in_function(args: tuple[Any, ...]) -> None:
    """Raise KernelError at the first op in the forward of a custom autograd.Function.

    Gradients are off there, and the Function's backward would receive local tensors as if they were
    global."""
    if not any(type(a) in ORDINARY and a._local.requires_grad for a in args):
        return
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        if frame.f_code is _APPLY:
            raise KernelError(
                "a global tensor reached the forward of a custom torch.autograd.Function, but is "
                "no argument of apply (it is in a list, or the forward refers to it by name), so "
                "backward would not know its sbp. Pass it to apply by itself; or make a plain "
                "argument global first, x.to_global(placement, sbp=flow.sbp.broadcast); or run the "
                "Function on local tensors: globaltensor.local_map(function, out_sbp=..., "
                "in_sbp=...)"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _forget_miss(error: BaseException, miss: Exception) -> None:
    """Take the cache's miss out of an error's context: its traceback would show the miss first."""
    while error.__context__ is not None and error.__context__ is not miss:
        error = error.__context__
    error.__context__ = None


def _plan_and_cache(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: list[Any],
    miss: KeyError | TypeError,
) -> CallPlan:
    """Plan a call that is not in the cache, and cache the plan if all arguments can be hashed.

    ``miss`` is the error of the cache: a KeyError, or a TypeError if the key has no hash.
    """
    hashable = isinstance(miss, KeyError)
    version = RULES.version
    if (delegate := _delegate_of_spelling(func, args, kwargs)) is not None:
        if hashable:
            _cache.derived.keep(tuple(key), delegate, version, _MAX_PLANS)
        return delegate
    try:
        plan = plan_call(func, args, kwargs)
    except Exception as error:
        _forget_miss(error, miss)
        raise
    if hashable and call_plan.has_default_dtype(plan, args, kwargs):
        plan = call_plan.DefaultDtypePlan(plan, plan_call)
    if func in DROPPED_ARGS and kwargs.keys().isdisjoint(DROPPED_ARGS[func]):
        plan = RecoverArgsPlan(plan, lambda *a, **k: dispatch(func, (), a, k))
    plan.number_names = _unsorted_number_names(func, kwargs)
    tensors = [t for t in tensors_in(kwargs, tensors_in(args, [])) if isinstance(t, GlobalTensor)]
    first = next(iter(tensors), None)
    if first is not None and not isinstance(plan, (AttributePlan, ConstantPlan)):
        _record_in_history(
            plan,
            first._spec.shown.placement,
            args,
            kwargs,
            tensors,
            _call_text(func, key, kwargs),
            isinstance(func, FunctionType),
        )
    if hashable:
        _cache.derived.keep(tuple(key), plan, version, _MAX_PLANS)
    return plan


def _delegate_of_spelling(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DelegatePlan | None:
    """Return a plan that dispatches an unusual spelling of a call as the usual one, or None.

    The usual spelling, which is recorded and planned, has Python's own numbers, and its tensors by
    name are in the order of torch's schema. Rules tell operands apart by their order, so
    ``matmul(other=b, input=a)`` planned as it stands would be ``matmul(b, a)``."""
    if as_python_numbers(args) is not args or as_python_numbers(kwargs) is not kwargs:
        return DelegatePlan(lambda *a, **k: func(*as_python_numbers(a), **as_python_numbers(k)))
    if sum(bool(tensors_in(a, [])) for a in kwargs.values()) < 2:
        return None
    names = torch_private.names_in_schema_order(func, list(kwargs))
    if names is None:
        return None
    return DelegatePlan(lambda *a, **k: dispatch(func, (), a, {name: k[name] for name in names}))


def _record_in_history(
    plan: CallPlan,
    placement: Placement,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Sequence[GlobalTensor],
    text: str,
    in_order: bool,
) -> None:
    """Record calls by this plan in the history of the ranks of ``placement``.

    ``operands``: the global tensors among the arguments of the call that was planned.
    ``in_order``: every call has its arguments by name in one order."""
    history = world().history((placement,))
    plan.code = int.from_bytes(history.learn(text), "little")
    if not history.records:
        return
    if all(t._spec.shown.placement is placement for t in operands):
        places = _operand_places(args, kwargs, operands, in_order)
        plan.recorded = history, plan.code, places
    else:
        plan.mixed_history = history


def _operand_places(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Sequence[GlobalTensor],
    in_order: bool,
) -> int:
    """Return where a call has its operands, for a quick way to their serials.

    It is their number, if they are the first one to three arguments, or one of the constants of
    call_plan.py."""
    places = [i for i, a in enumerate(args) if isinstance(a, GlobalTensor)]
    named = sum(isinstance(a, GlobalTensor) for a in kwargs.values())
    if len(places) == len(operands) <= 3 and places == list(range(len(places))):
        return len(places)
    names = [name for name, a in kwargs.items() if tensors_in(a, [])]
    in_order = in_order or names == sorted(names)
    if places == [0] and 1 + named == len(operands):
        return ONE_AND_NAMED if in_order else ONE_AND_NAMED_UNSORTED
    if args and type(args[0]) is list and len(args[0]) == len(operands) and not places:
        return IN_LIST
    return ANYWHERE if in_order else ANYWHERE_UNSORTED


def _unsorted_number_names(func: Any, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the arguments whose numbers `dispatch` adds to the history.

    Return none if they are in alphabetical order: the history has the numbers in that order."""
    if func not in _SCALARS:
        return ()
    names = [
        name
        for name, a in kwargs.items()
        if type(a) not in ORDINARY and a is not None and type(a) is not bool
    ]
    return () if names == sorted(names) else tuple(names)


def _call_text(func: Any, key: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a call as reports show it, the same on every rank: ``mul(f32[4, 3] S(0), float)``.

    Ranks may pass arguments by name in any order."""
    if len(kwargs) > 1:  # the key ends with each name and the entry of its argument
        before = len(key) - 2 * len(kwargs)
        entries = {key[i]: key[i + 1] for i in range(before, len(key), 2)}
        key = [*key[:before], *[v for name in sorted(entries) for v in (name, entries[name])]]
    # without the types of numbers, which precede the numbers in the key
    arguments = [
        v
        for v, after in zip(key[1:], [*key[2:], None], strict=True)
        if not (isinstance(v, type) and type(after) is v)
    ]
    return f"{name_of(func)}({', '.join(map(_argument_text, arguments))})"


def _argument_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_argument_text, value))}]"
    if isinstance(value, type):
        return value.__name__
    known = (
        Spec,
        int,
        float,
        complex,
        str,
        bytes,
        slice,
        torch.dtype,
        torch.device,
        type(None),
        type(Ellipsis),
    )
    return repr(value) if isinstance(value, known) else type(value).__name__


def _numbers_in(a: Any) -> bytes:
    """Return the text of all numbers in an argument, for the history of operations."""
    if isinstance(a, (int, float, complex)):
        return repr(a).encode()
    if isinstance(a, (tuple, list)):
        return b"".join(map(_numbers_in, a))
    return b"".join(map(_numbers_in, a.values())) if isinstance(a, dict) else b""


# For each argument of a call, torch looks up this attribute, several times, without a cache. It is
# found soonest on the class itself. A static method needs no new method object each time. Torch
# warns of a method that is bound to a tensor, so it asks for `__self__`, and a missing attribute
# costs an exception.
dispatch.__self__ = GlobalTensor  # type: ignore[attr-defined]
for _class in (GlobalTensor, SlottedGlobalTensor):
    _class.__torch_function__ = staticmethod(dispatch)  # type: ignore[assignment]


def _argument_key(a: Any, free: bool) -> Any:
    """Return a hashable key of an argument: the properties that may matter to the plan."""
    t = type(a)
    if t is slice:
        start, stop, step = a.start, a.stop, a.step
        if type(start) in _PLAIN and type(stop) in _PLAIN and type(step) in _PLAIN:
            return (slice, start, stop, step)
        if any(isinstance(n, torch.Tensor) for n in (start, stop, step)):
            # its value decides the result's shape: no key, so the call is planned each time
            return []
        return (
            slice,
            _argument_key(start, free),
            _argument_key(stop, free),
            _argument_key(step, free),
        )
    if t is float or t is int or t is complex:
        return t if free else (t, a)
    if t is tuple or t is list or t is torch.Size:
        return (t, *[v._spec if type(v) in ORDINARY else _argument_key(v, free) for v in a])
    if a is None or a is Ellipsis:
        return a
    if isinstance(a, GlobalTensor):
        # `PendingTensor` has done so already, unless torch has not seen it among the arguments.
        a._materialize()
        return (RemoteView, a._spec) if type(a) is RemoteView else a._spec
    if isinstance(a, torch.Tensor):
        try:
            return (torch.Tensor, a.shape, a.dtype)
        # A kind without a shape has no key, so the call is planned each time, which refuses it.
        except RuntimeError:
            return []
    if t is dict:
        return (dict, *[(k, _argument_key(v, free)) for k, v in a.items()])
    return a if t in OWN_TYPES else key_of_other(a)
