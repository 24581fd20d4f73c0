"""A call on global tensors, in five steps: key, plan, box, run locally, wrap. The cached path is the product's hot loop."""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import _torch, sharded
from .boxing import box, log, plan
from .distributed.world import world
from .errors import FallbackWarning, InplaceError, KernelError, PlacementError
from .placement import Placement
from .rules import RULES, Arg, Choice, Op, Rule, Split, choose
from .sbp import broadcast
from .spec import Spec
from .wrapper import GlobalTensor, kernel_message

__all__ = ["HANDLERS", "call", "describe_call"]

#: Functions that need no plan: torch function -> handler(func, args, kwargs). Filled by the rooms above.
HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}
#: In-training random functions run through this: (function, args, kwargs, coordinates along split axes). Set by globaltensor.random.
RANDOM: list[Callable[..., Any]] = []
_MOST = 1 << 13  # plans kept; beyond that all are forgotten
_make = _torch.make_wrapper


class _Plans(threading.local):
    """Plans hold this rank's shapes; simulated ranks are threads, so each thread has its own."""

    def __init__(self) -> None:
        self.plans: dict[tuple[Any, ...], Plan] = {}


_cache = _Plans()
_SCALARS = {f for f, r in RULES.items() if r.scalars}


def call(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``__torch_function__`` of GlobalTensor. Each line here is paid by every op: measure (benchmarks/eager_overhead.py) before changing one."""
    key: list[Any] = [func]
    for a in args:
        t = type(a)
        if t is GlobalTensor:
            key.append(a._spec)
        elif t is float or t is int:
            key.append(t)
            if func not in _SCALARS:
                key.append(a)
        elif a is None or t is bool or t is torch.dtype or t is str:
            key.append(a)
        else:
            key.append(_key(a, func in _SCALARS))
    if kwargs:
        for name, a in kwargs.items():
            key.append(name)
            key.append(a._spec if type(a) is GlobalTensor else a if a is None or type(a) is bool else _key(a, func in _SCALARS))
    try:
        found = _cache.plans[tuple(key)]
    except (KeyError, TypeError) as miss:
        found = _missed(func, args, kwargs or {}, key if isinstance(miss, KeyError) else None)
    if not found.direct:
        return found.run(func, args, kwargs or {})
    if kwargs:
        kwargs = {k: v._local if type(v) is GlobalTensor else v for k, v in kwargs.items()}
        out = (found.function or func)(*[a._local if type(a) is GlobalTensor else a for a in args], **kwargs)
    else:
        out = (found.function or func)(*[a._local if type(a) is GlobalTensor else a for a in args])
    wrapped = _make(GlobalTensor, found.shape, dtype=found.dtype, device=found.device)
    wrapped._local = out
    wrapped._spec = found.out
    return wrapped


def _missed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: list[Any] | None) -> Plan:
    """No plan is kept for this call. ``key`` is None where an argument cannot be hashed: then it is planned each time."""
    handler = HANDLERS.get(func)
    if handler is not None:
        return Through(lambda *a, **k: handler(func, a, k))
    found = _plan(func, args, kwargs)
    if key is not None:
        if len(_cache.plans) >= _MOST:
            _cache.plans.clear()
        _cache.plans[tuple(key)] = found
    return found


GlobalTensor.__torch_function__ = classmethod(call)  # type: ignore[assignment]


def _key(a: Any, free: bool) -> Any:
    """A hashable stand-in for an argument: what of it may matter to the plan."""
    t = type(a)
    if isinstance(a, GlobalTensor):
        return a._spec
    if t is float or t is int or t is complex:
        return t if free else (t, a)
    if t is tuple or t is list or t is torch.Size:
        return (t, *[_key(v, free) for v in a])
    if isinstance(a, torch.Tensor):
        return (torch.Tensor, a.shape, a.dtype)
    if t is slice:
        return (slice, _key(a.start, free), _key(a.stop, free), _key(a.step, free))
    if t is dict:
        return (dict, *[(k, _key(v, free)) for k, v in a.items()])
    return a


# ---------------------------------------------------------------------------------------------------------------- trees of arguments


def tensors_in(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in a nest of tuples, lists, slices and dicts, in order."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for v in value:
            tensors_in(v, found)
    elif isinstance(value, dict):
        for v in value.values():
            tensors_in(v, found)
    return found


def replaced(value: Any, these: Iterator[Any]) -> Any:
    """The same nest with its tensors replaced by ``these``, in order."""
    if isinstance(value, torch.Tensor):
        return next(these)
    if isinstance(value, (tuple, list)):
        parts = [replaced(v, these) for v in value]
        if isinstance(value, torch.Size):
            return value
        return type(value)(parts) if not isinstance(value, tuple) or type(value) is tuple else _named(value, parts)
    if isinstance(value, dict):
        return {k: replaced(v, these) for k, v in value.items()}
    return value


def _named(value: tuple[Any, ...], parts: list[Any]) -> Any:
    """A named tuple of the same kind: torch's own take one sequence, Python's take the fields."""
    return type(value)(*parts) if isinstance(getattr(value, "_fields", None), tuple) else type(value)(parts)


# ---------------------------------------------------------------------------------------------------------------- plans


class Plan:
    """What to do for a key. ``direct``: operands fit, one tensor comes out, arguments are flat: done inline by ``call``."""

    __slots__ = ("device", "direct", "dtype", "function", "out", "shape")

    def __init__(self) -> None:
        self.direct = False
        self.function: Callable[..., Any] | None = None
        self.out: Spec | None = None
        self.shape: torch.Size | None = None
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError("a plan that is not direct has its own run")


class Answer(Plan):
    """The result is no tensor and follows from the specs alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.value


class Through(Plan):
    """Call another function with the same arguments: a composite of global ops, or a handler."""

    __slots__ = ("other",)

    def __init__(self, other: Callable[..., Any]) -> None:
        super().__init__()
        self.other = other

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.other(*args, **kwargs)


class Boxed(Plan):
    """Box the operands that need it, run on the local tensors, wrap the results."""

    __slots__ = ("coordinates", "dst", "gathers", "inplace", "name", "outs", "outside", "random", "routes", "single", "src", "structure", "traffic", "view")

    def __init__(self, name: str, src: Sequence[Spec], dst: Sequence[Spec], outs: Sequence[Spec | None]) -> None:
        super().__init__()
        self.name, self.src, self.dst, self.outs = name, tuple(src), tuple(dst), tuple(outs)
        routes = [plan(a, b) if a is not b else None for a, b in zip(src, dst, strict=True)]
        self.routes = [r if r is not None and r.moves else None for r in routes]
        self.gathers = [r is not None and bool(sharded.gather_axes(r.src, r.dst)) for r in self.routes]
        self.traffic = any(r is not None and r.bytes for r in self.routes)
        self.outside = src[0].placement.coordinate(world().rank) is None
        self.inplace = False
        self.view = False
        self.random = False
        self.single = False
        self.coordinates: tuple[int, ...] | None = None
        self.structure: Any = None  # the results' nest, with meta tensors

    def locals(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operands' local tensors, boxed to where the op wants them."""
        if self.traffic and log.forbidden():
            for i, route in enumerate(self.routes):
                if route is not None:
                    log.check(route, f"{self.name}: operand {i}")
        out = []
        for i, (t, src, dst) in enumerate(zip(tensors, self.src, self.dst, strict=True)):
            if self.gathers[i] and "_is_param" in t.__dict__ and isinstance(t, GlobalTensor):
                out.append(sharded.gathered(t, src, dst, f"{self.name}: operand {i}"))
                continue
            local = t._local if isinstance(t, GlobalTensor) else promote(t, src)
            out.append(local if self.routes[i] is None else box(local, src, dst, why=f"{self.name}: operand {i}"))
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(kwargs, tensors_in(args, []))
        if self.inplace and tensors[0]._stale:
            raise InplaceError(
                f"{self.name} in place on a view whose base holds its data elsewhere (the view had to move data): the base would not change. "
                "Write through the base instead (base[...] = value), or .clone() the view if a copy is meant"
            )
        locals_ = self.locals(tensors)
        if self.outside:
            if self.random:  # the stream of random keys moves on here too
                RANDOM[0](lambda **k: None, (), {"generator": kwargs.get("generator")}, ())
            result = _elsewhere(self.outs, locals_)
            if self.inplace:
                tensors[0]._local = result[0]
                return tensors[0]
        else:
            these = iter(locals_)
            function = self.function or func
            new_args, new_kwargs = replaced(args, these), replaced(kwargs, these)
            out = function(*new_args, **new_kwargs) if self.coordinates is None else RANDOM[0](function, new_args, new_kwargs, self.coordinates)
            if self.inplace:
                tensors[0]._spec = self.outs[0]
                return tensors[0]
            if self.single:
                return self._wrapped(out, self.outs[0])
            result = tensors_in(out, [])
        wrapped = iter([self._wrapped(local, spec) for local, spec in zip(result, self.outs, strict=True)])
        return replaced(self.structure, wrapped)

    def _wrapped(self, local: torch.Tensor, spec: Any) -> GlobalTensor:
        out = GlobalTensor.wrap(local, spec)
        if self.view and self.routes[0] is not None:
            out._stale = True
        return out


class Whole(Plan):
    """The broadcast fallback: every operand whole on every rank. For functions without a rule, and for shapes that depend on data."""

    __slots__ = ("inplace", "name", "placement", "src")

    def __init__(self, name: str, src: Sequence[Spec], inplace: bool) -> None:
        super().__init__()
        self.name, self.src, self.placement, self.inplace = name, tuple(src), src[0].placement, inplace

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(kwargs, tensors_in(args, []))
        inner = Boxed(self.name, self.src, [s.replicated() for s in self.src], [])
        locals_ = inner.locals(tensors)
        if self.inplace and not inner.outside:
            locals_[0] = locals_[0].clone() if inner.routes[0] is None else locals_[0]
        out: Any = None
        if not inner.outside:
            these = iter(locals_)
            out = func(*replaced(args, these), **replaced(kwargs, these))
        members = set(self.placement.flat)
        if len(members) < world().size:
            out = self._share(out, inner.outside, locals_)
        if self.inplace:
            target = tensors[0]
            value = out if isinstance(out, torch.Tensor) else locals_[0]
            back = box(value, inner.dst[0], self.src[0], why=self.name)
            if not inner.outside:
                target._local.copy_(back)  # type: ignore[attr-defined]
            return target
        shapes = iter([GlobalTensor.wrap(t, Spec.make(t.shape if not inner.outside else t._shape, t.dtype, self.placement, [broadcast] * self.placement.axes)) for t in tensors_in(out, [])])  # type: ignore[attr-defined]
        return replaced(out, shapes)

    def _share(self, out: Any, outside: bool, locals_: list[torch.Tensor]) -> Any:
        """Tell the ranks outside the placement what came out: its structure, shapes and dtypes, or its value where it is no tensor."""
        everyone = world().comm(tuple(range(world().size)))
        mine = None if outside else replaced(out, iter([_Shape(t.shape, t.dtype) for t in tensors_in(out, [])]))
        told = everyone.all_gather_object(mine)[self.placement.flat[0]]
        if not outside:
            return out
        return _materialise(told, locals_)


class _Shape:
    """A tensor's shape and dtype, as sent to ranks outside a placement."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype


def _materialise(told: Any, locals_: list[torch.Tensor]) -> Any:
    if isinstance(told, _Shape):
        out = _elsewhere([None], locals_, told.dtype)[0]
        out._shape = told.shape  # type: ignore[attr-defined]
        return out
    if isinstance(told, (tuple, list)):
        parts = [_materialise(v, locals_) for v in told]
        return type(told)(parts) if type(told) in (tuple, list) else _named(told, parts)  # type: ignore[arg-type]
    return told


class _Elsewhere(torch.autograd.Function):
    """A rank outside the placement computes nothing, but its backward must pass the same boxings in the same order as the others'."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.inputs = [(t.shape, t.dtype, t.device) for t in inputs]
        return torch.empty(0, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, *[torch.zeros(s, dtype=d, device=v) if d.is_floating_point or d.is_complex else None for s, d, v in ctx.inputs])


def _elsewhere(outs: Sequence[Spec | None], locals_: list[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    out = []
    for spec in outs:
        kind = spec.dtype if spec is not None else dtype
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in locals_) and (kind.is_floating_point or kind.is_complex)  # type: ignore[union-attr]
        out.append(_Elsewhere.apply(kind, *locals_) if grad else torch.empty(0, dtype=kind))
    return out


# ---------------------------------------------------------------------------------------------------------------- promotion


class _Border(torch.autograd.Function):
    """A plain tensor that enters an op as broadcast: every rank's copy gets the whole gradient, not its own share."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
        ctx.spec = spec
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return box(grads[0], ctx.spec.dual(), ctx.spec, why="gradient of a plain tensor"), None


def promote(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A plain tensor among global ones -> the local part of a broadcast one."""
    where = spec.placement.coordinate(world().rank)
    if where is None:
        return torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad and torch.is_grad_enabled())
    if tensor.device.type != spec.placement.type:
        tensor = tensor.to(world().device(spec.placement.type))
    return _Border.apply(tensor, spec) if tensor.requires_grad and torch.is_grad_enabled() else tensor  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------------- making a plan


def describe_call(func: Any, tensors: Sequence[torch.Tensor]) -> str:
    """``add(f32[4, 4] S(0), f32[4, 4] B)``: a call as error messages show it."""
    shown = [repr(t._spec) if isinstance(t, GlobalTensor) else f"plain {list(t.shape)}" for t in tensors]
    return f"{name_of(func)}({', '.join(shown)})"


def name_of(func: Any) -> str:
    if func in RULES:
        return RULES[func].name + ("_" if RULES[func].inplace else "")
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", "attribute") if getattr(func, "__name__", "") == "__get__" else getattr(func, "__name__", str(func))


def _common_placement(func: Any, tensors: Sequence[torch.Tensor]) -> Placement:
    found: list[Placement] = []
    for t in tensors:
        if isinstance(t, GlobalTensor) and t._spec.placement not in found:
            found.append(t._spec.placement)
    if len(found) > 1:
        raise PlacementError(
            f"{describe_call(func, tensors)}: the operands lie on different placements\n"
            + "".join(f"  {p}\n" for p in found)
            + f"bring them together first, for example x.to_global(placement={found[0]!r})"
        )
    return found[0]


def _plan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """A cache miss: find the rule, choose layouts, and freeze what to do."""
    if _torch.is_kernel(func):
        raise KernelError(kernel_message(func))
    if kwargs.get("out") is not None:
        return Through(lambda *a, **k: _with_out(func, a, k))
    tensors = tensors_in(kwargs, tensors_in(args, []))
    placement = _common_placement(func, tensors)
    if getattr(func, "__name__", "") == "__get__" and func not in RULES:
        return _attribute(func, args)
    rule = RULES.get(func)
    specs = [t._spec if isinstance(t, GlobalTensor) else Spec.make(t.shape, t.dtype, placement, [broadcast] * placement.axes) for t in tensors]
    if rule is None:
        return _unruled(func, specs, args, kwargs)
    if rule.inplace and not isinstance(tensors[0], GlobalTensor):
        raise InplaceError(
            f"{describe_call(func, tensors)}: an in-place op on a plain tensor cannot take a global operand; use the out-of-place form, "
            "or x.to_local() of the operand (its local part), or make the target global with to_global(placement, sbp)"
        )
    meta, structure = _on_meta(func, specs, args, kwargs)
    if meta is None:
        return _unruled(func, specs, args, kwargs)
    op = Op([Arg(i, s) for i, s in enumerate(specs)], function=func)
    these = iter(op.args)
    try:
        rule.describe(op, *replaced(args, these), **replaced(kwargs, these))
    except (TypeError, ValueError, IndexError) as error:
        warnings.warn(f"the rule of {rule.name} does not know this form of the call ({error}); it runs on whole tensors", FallbackWarning, stacklevel=3)
        return Whole(rule.name, specs, rule.inplace)
    if op.composite is not None:
        return Through(op.composite)
    outs = [Spec.make(m.shape, m.dtype, placement, [broadcast] * placement.axes) for m in meta]
    if rule.inplace and not outs:  # x[i] = v returns nothing: its result is its target
        outs, op.out = [specs[0]], [op.dims[0]]
    if not op.out:
        op.out = [(None,) * o.ndim for o in outs]
    choice = choose(op, outs, keep=0 if rule.inplace else None)
    if choice is None:
        return _inplace_otherwise(func, rule, specs, tensors)
    return _freeze(func, rule, op, specs, choice, structure, args, kwargs)


def _freeze(func: Any, rule: Rule, op: Op, specs: Sequence[Spec], choice: Choice, structure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    done = Boxed(name_of(func), specs, choice.ins, choice.outs)
    done.inplace, done.view, done.structure = rule.inplace, op.view, structure
    done.single = isinstance(structure, torch.Tensor)
    done.random = op.random
    rank = world().rank
    if not done.outside:
        if op.local is not None:
            done.function = op.local(Split(rank, choice.ins, choice.outs, choice.factors, op))
        if op.random:
            where = specs[0].placement.coordinate(rank) or ()
            along = {a for axes in choice.factors.values() for a in axes}
            done.coordinates = tuple(c if a in along else 0 for a, c in enumerate(where))
    flat = all(isinstance(a, GlobalTensor) or not tensors_in(a, []) for a in (*args, *kwargs.values()))
    if flat and done.single and not rule.inplace and not done.outside and done.coordinates is None and all(r is None for r in done.routes):
        done.direct, done.out = True, choice.outs[0]
        done.shape, done.dtype, done.device = done.out.shape, done.out.dtype, world().device(done.out.placement.type)
    return done


def _on_meta(func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor] | None, Any]:
    """Run the function on meta tensors of the global shapes -> (result tensors, result); None where torch has no meta kernel for it."""
    these = iter([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in specs])
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = func(*replaced(args, these), **replaced(kwargs, these))
    except NotImplementedError:
        return None, None
    return tensors_in(out, []), out


def _attribute(func: Any, args: tuple[Any, ...]) -> Plan:
    """A property of torch.Tensor that no rule knows: asked of the local tensor where it is no tensor itself."""

    def get(x: GlobalTensor) -> Any:
        value = func(x._local)
        if isinstance(value, torch.Tensor):
            if value.shape != x._local.shape:
                raise KernelError(f"the attribute {name_of(func)} of a global tensor is not known; use the method of the same meaning")
            return GlobalTensor.wrap(value, x._spec.replace(dtype=value.dtype))
        return value

    return Through(get)


_WARNED: set[str] = set()


def _unruled(func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """No rule: a Python function of torch runs through its own body; anything else runs on whole tensors, with one warning."""
    name = name_of(func)
    inplace = name.endswith("_") and not name.endswith("__")
    body = body_of(func)
    if body is not None:
        return Through(body)
    meta, structure = _on_meta(func, specs, args, kwargs) if not inplace else (None, None)
    if meta == [] and structure is not None:
        return Answer(structure)
    if inplace and any(e.is_partial for e in specs[0].layout):
        raise _inplace_error(name, specs[0])
    if name not in _WARNED:
        _WARNED.add(name)
        warnings.warn(
            f"no rule for {name}: it runs on whole tensors (every input is made broadcast). Say how it splits with "
            f"globaltensor.rule({name!r}, notation), or run it on local parts with globaltensor.local_map",
            FallbackWarning,
            stacklevel=5,
        )
    return Whole(name, specs, inplace)


def body_of(func: Any) -> Callable[..., Any] | None:
    """A Python function of torch, made to run its own body on global tensors: its inner calls are dispatched one by one."""
    if not isinstance(func, types.FunctionType) or not (func.__module__ or "").startswith("torch"):
        return None
    names = [n for n in func.__code__.co_names if n.startswith("has_torch_function")]
    if not names:
        inner = getattr(func, "__wrapped__", None)
        return body_of(inner) if inner is not None else None
    return _body(func, tuple(names))


def _body(func: types.FunctionType, names: tuple[str, ...]) -> Callable[..., Any]:
    # The body asks first whether an argument overrides the function, and would come back here for ever: in this copy the answer is no.
    own = {**func.__globals__, **dict.fromkeys(names, lambda *a: False)}
    if "overrides" in func.__code__.co_names:
        own["torch"] = _Stand(torch, {"overrides": _Stand(torch.overrides, dict.fromkeys(names, lambda *a: False))})
    copy = types.FunctionType(func.__code__, own, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class _Stand:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, names: dict[str, Any]) -> None:
        self.__dict__.update(names)
        self.__module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__module, name)


def _inplace_error(name: str, spec: Spec) -> InplaceError:
    return InplaceError(
        f"in-place {name} would need the sbp of its target changed, which an in-place op must not do\n"
        f"  target {spec!r}\n"
        f"use the out-of-place form, or bring the target there first: x = x.to_global(sbp=...)"
    )


def _inplace_otherwise(func: Any, rule: Rule, specs: Sequence[Spec], tensors: Sequence[torch.Tensor]) -> Plan:
    """No signature keeps the target's layout: compute on whole tensors and bring the target's part back, unless the target is partial."""
    name = name_of(func)
    if any(e.is_partial for e in specs[0].layout):
        raise _inplace_error(name, specs[0])
    return Whole(name, specs, True)


def _with_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out=``: compute, then copy into the given tensors, in their layout."""
    targets = kwargs.pop("out")
    result = func(*args, **kwargs)
    for target, value in zip(tensors_in(targets, []), tensors_in(result, []), strict=True):
        if isinstance(target, GlobalTensor):
            if target.shape != value.shape:
                raise InplaceError(f"out= has shape {list(target.shape)}, but the result has shape {list(value.shape)}: give a global tensor of that shape")
            with torch.no_grad():
                target.copy_(value)
        else:
            raise InplaceError(f"out= of {name_of(func)} must be a global tensor where an input is one; got a plain tensor. Use the returned value instead")
    return targets


def scalar_functions(functions: Sequence[Any]) -> None:
    """Numbers among the arguments of these functions never matter to their plan."""
    _SCALARS.update(functions)
