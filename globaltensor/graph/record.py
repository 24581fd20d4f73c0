"""Recording: what `build` does on fake tensors becomes an fx graph. No kernel runs, and no memory is taken.

Two modes look on. `Logical` sees each call that the user's code makes, with global shapes: the logical graph, the same on every rank. `Local`, pushed while
such a call runs, sees what it comes to on this rank's local tensors: torch functions, boxings, and whole steps of ours that communicate. That is the program.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from .. import _torch, draws, functions, gradients, sharded, visible
from ..boxing import box
from ..dispatch import call
from ..distributed.comm import Comm
from ..distributed.simulate import SimulatedWorld
from ..distributed.world import World, world
from ..plans import replaced, tensors_in
from ..rules.quotient import settle
from ..spec import Spec
from ..wrapper import GlobalTensor
from .constants import NotConstant, evaluated
from .errors import GraphError
from .steps import Boxing, Draw, Gather, Step, autocast, backward, set_grad_enabled

__all__ = ["DryWorld", "Local", "Logical", "Recorder"]

_SPELLED: Final = {
    "__add__": operator.add,
    "__sub__": operator.sub,
    "__mul__": operator.mul,
    "__truediv__": operator.truediv,
    "__matmul__": operator.matmul,
    "__getitem__": operator.getitem,
    "__neg__": operator.neg,
    "__pow__": operator.pow,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt,
    "__ge__": operator.ge,
}
#: Operators that torch writes in Python under other names: ``x ** 2`` calls a function named ``pow`` that no module has.
_OPERATORS: Final = {f: n for n, f in vars(torch.Tensor).items() if n.startswith("__") and callable(f) and getattr(f, "__name__", n) != n}
_BASIC = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis))
_RANDOM: Final = ("drop", "rand", "bernoulli", "multinomial", "normal", "poisson", "uniform", "exponential", "cauchy", "geometric")


#: Functions that hand out values, and those that make a tensor from values.
_READING: Final = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.to_dlpack})
_MAKING: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor})


class Untraceable(Exception):
    """A step communicates, or asks for a value, where a recorder looks into it: it has to be kept whole."""


class _DryComm(Comm):
    """A communicator that sends nothing: what a step would receive has the right shape, and that is all that is asked of it."""

    def _swap(self, sends: Any, recvs: Any, device: torch.device) -> None:
        if _torch.function_mode_on():
            raise Untraceable

    def all_gather_object(self, value: object) -> list[Any]:
        """What ranks tell each other about shapes they do tell, while they capture: all run build() at the same time."""
        if len(self.ranks) != self.world.size:
            raise GraphError(
                "inside build() some ranks cannot tell each other what they hold (to_global of a local tensor exchanges shapes: pass check_meta=False, or make "
                "the tensor global before the call)"
            )
        with _torch.real_tensors():
            told = self.world.real.comm(self.ranks).all_gather_object((INSIDE, value))
        away = [r for r, (what, _) in enumerate(told) if what != INSIDE]
        if away:
            raise Left(f"rank {away[0]} has left build(), where this rank asks what the others hold: {told[away[0]][1]}")
        return [v for _, v in told]


INSIDE: Final = "in build()"


class Left(GraphError):
    """Another rank is not in build() any more."""


class DryWorld(World):
    """The world as it is, but nothing is sent."""

    def __init__(self, real: World) -> None:
        super().__init__(real.rank, real.size, real.local_rank, real.node_size)
        self.real = real

    def _connect(self, ranks: tuple[int, ...]) -> Comm:
        return _DryComm(self, ranks)

    def device(self, type: str) -> torch.device:
        return self.real.device(type)


class Recorder(TorchFunctionMode):
    """Writes calls into ``graph``. A tensor is known by its identity; what is not known yet is a state: it becomes an input of the graph."""

    def __init__(self, fake: Any) -> None:
        super().__init__()
        self.fake = fake
        self.graph = fx.Graph()
        self.known: dict[int, fx.Node] = {}
        self.alive: list[Any] = []  # ids are only good while their tensors live
        self.states: list[torch.Tensor] = []
        self.constants: dict[str, Any] = {}
        self.path: list[str] = []  # of modules being run
        self.stage: int | None = None
        self.region: int | None = None  # of nodes to be recomputed in backward
        self.call = 0  # number of the user's call that is being run
        self._last: fx.Node | None = None  # placeholder
        self.names_taken: set[str] = set()  # of placeholders

    # Nodes

    def placeholder(self, name: str, value: Any) -> fx.Node:
        taken = sum(n == name or n.startswith(f"{name}__") for n in self.names_taken)
        name = f"{name}__{taken}" if taken else name
        self.names_taken.add(name)
        with self.graph.inserting_after(self._last) if self._last is not None else self.graph.inserting_before(next(iter(self.graph.nodes), None)):
            node = self._last = self.graph.placeholder(name)
        node.meta["val"] = value
        self.learn(value, node)
        return node

    def learn(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, torch.Tensor):
            self.known[id(value)] = node
            self.alive.append(value)
            return
        for i, v in enumerate(value) if isinstance(value, (tuple, list)) else value.items() if isinstance(value, dict) else ():
            if tensors_in(v, []):
                part = self.graph.call_function(operator.getitem, (node, i))
                part.meta.update(node.meta, val=v, effect=False, calls=0)
                self.learn(v, part)

    def node(self, target: Any, args: Any, kwargs: Any, value: Any, effect: bool = False, calls: int = 1) -> fx.Node:
        """One more call. ``value`` is what it gives (fake)."""
        if isinstance(target, str):
            made = self.graph.call_method(target, args, kwargs)
        else:
            made = self.graph.call_function(target, args, kwargs)
        made.meta.update(val=value, effect=effect, calls=calls, module=".".join(self.path), stage=self.stage, region=self.region, call=self.call)
        self.learn(value, made)
        return made

    def arg(self, a: Any) -> Any:
        """An argument as fx wants it."""
        if isinstance(a, torch.Tensor):
            return self.of(a)
        if isinstance(a, torch.Size):
            return tuple(a)
        if isinstance(a, (tuple, list)):
            return type(a)([self.arg(v) for v in a]) if type(a) in (tuple, list) else tuple(self.arg(v) for v in a)
        if isinstance(a, dict):
            return {k: self.arg(v) for k, v in a.items()}
        if isinstance(a, slice):
            return slice(self.arg(a.start), self.arg(a.stop), self.arg(a.step))
        if isinstance(a, _BASIC):
            return a
        name = next((n for n, v in self.constants.items() if v is a), None) or f"constant_{len(self.constants)}"
        self.constants[name] = a
        return self.graph.get_attr(name)

    def of(self, t: torch.Tensor) -> fx.Node:
        found = self.known.get(id(t))
        return found if found is not None else self.state(t)

    def state(self, t: torch.Tensor) -> fx.Node:
        raise NotImplementedError


def spelled(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """(target, args) of a torch function, as a reader would write the call: ``x.view(3)`` rather than ``torch.Tensor.view(x, 3)``."""
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None)
    if name == "__get__" and isinstance(owner, types.GetSetDescriptorType):
        return getattr, (args[0], owner.__name__)
    if name == "__set__" and isinstance(owner, types.GetSetDescriptorType):
        return setattr, (args[0], owner.__name__, args[1])
    if name in ("__get__", "__set__") and isinstance(owner, property):
        field = owner.fget.__name__ if owner.fget is not None else ""
        return (getattr, (args[0], field)) if name == "__get__" else (setattr, (args[0], field, args[1]))
    name = _OPERATORS.get(func, name)
    if name and getattr(torch.Tensor, name, None) is func:
        return _SPELLED.get(name, name), args
    return func, args


class Local(Recorder):
    """Records what is done to this rank's local tensors."""

    def __init__(self, fake: Any, rank: int, names: Mapping[int, str]) -> None:
        super().__init__(fake)
        self.rank = rank
        self.names = names  # id of a local part -> the path of the parameter or buffer
        self._fakes: dict[int, torch.Tensor] = {}  # real tensor's id -> its stand-in
        self._reals: dict[int, torch.Tensor] = {}  # and back
        self._grad, self._cast = torch.is_grad_enabled(), _autocast()
        self.start = self._grad, self._cast
        here = world()
        self._seed = None if isinstance(getattr(here, "real", here), SimulatedWorld) else torch.default_generator.initial_seed()
        self.boxed: list[tuple[Spec, Spec, str]] = []  # what moves, in order, and why
        self.scale: fx.Node | None = None  # what the gradients of a pass are multiplied by
        self.special: dict[Any, Callable[..., Any]] = {
            box: self._box,
            visible.apply: self._apply,
            draws.run: self._draw,
            draws.filled: self._filled,
            functions.applied: self._applied,
            sharded.gathered: self._gathered,
            gradients.run: self._backward,
            torch.Tensor.backward: self._plain_backward,
            torch.autograd.backward: self._plain_backward,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, GlobalTensor) for t in types):
            with self:
                return call(GlobalTensor, func, types, args, kwargs)
        special = self.special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in visible.SEEN:
            with self:
                return func.__wrapped__(*args, **kwargs)
        return self.record(func, args, kwargs)

    # States

    def standing(self, a: Any) -> Any:
        """The same nest of arguments with stand-ins for real tensors."""
        if isinstance(a, torch.Tensor):
            if _torch.is_fake(a):
                return a
            found = self._fakes.get(id(a))
            if found is None:
                self.of(a)
                found = self._fakes[id(a)]
            return found
        if isinstance(a, (tuple, list)) and tensors_in(a, []):
            parts = [self.standing(v) for v in a]
            return type(a)(parts) if type(a) in (tuple, list) else type(a)(*parts) if isinstance(getattr(a, "_fields", None), tuple) else tuple(parts)
        if isinstance(a, dict):
            return {k: self.standing(v) for k, v in a.items()}
        return a

    def of(self, t: torch.Tensor) -> fx.Node:
        stand = self._fakes.get(id(t), t)
        found = self.known.get(id(stand))
        return found if found is not None else self.state(t)

    def state(self, t: torch.Tensor) -> fx.Node:
        if _torch.is_fake(t):
            raise GraphError("a tensor inside build() was made where the graph could not see it")
        stand = self.fake.from_tensor(t)
        if stand.requires_grad != t.requires_grad:
            stand.requires_grad_(t.requires_grad)
        self._fakes[id(t)], self._reals[id(stand)] = stand, t
        self.alive.append(t)
        self.states.append(t)
        node = self.placeholder(self.names.get(id(t), "constant").replace(".", "_"), stand)
        node.meta["state"] = len(self.states) - 1
        return node

    # Calls

    def _now(self) -> None:
        """Gradients on or off, autocast: where they change, the program says so."""
        grad, cast = torch.is_grad_enabled(), _autocast()
        if grad != self._grad:
            self._grad = grad
            self.node(set_grad_enabled, (grad,), {}, None, effect=True, calls=0)
        if cast != self._cast:
            self._cast = cast
            self.node(autocast, tuple(cast), {}, None, effect=True, calls=0)

    def end(self) -> None:
        """Back to how it was at the start."""
        if self._grad != self.start[0]:
            self.node(set_grad_enabled, (self.start[0],), {}, None, effect=True, calls=0)
        if self._cast != self.start[1]:
            self.node(autocast, tuple(self.start[1]), {}, None, effect=True, calls=0)

    def record(self, func: Any, args: Any, kwargs: Any, target: Any = None, effect: bool = False) -> Any:
        args, kwargs = self.standing(tuple(args)), self.standing(dict(kwargs))
        given = tensors_in(kwargs, tensors_in(args, []))
        before = [0 if t.is_inference() else t._version for t in given]
        try:
            if func in _READING or (func in _MAKING and args and isinstance(args[0], (tuple, list)) and tensors_in(args[0], [])):
                raise _torch.data_dependence()[0](func)
            out = func(*args, **kwargs)
        except _torch.data_dependence() as error:
            try:
                out = self._constant(func, args, kwargs)
            except NotConstant:
                raise error from None
        if _torch.transforming():
            raise GraphError("build() uses a transform of torch.func (vmap, grad): write the batch as a dim, or wrap this part in globaltensor.local_map")
        name = getattr(func, "__name__", "")
        written = tuple(i for i, (t, v) in enumerate(zip(given, before, strict=True)) if not t.is_inference() and t._version != v)
        written = written or ((0,) if name == "__set__" else ())
        effect = effect or bool(written) or any(word in name for word in _RANDOM)
        if not effect and not tensors_in(out, []):
            return out
        self._now()
        if target is None:
            target, args = spelled(func, args)
        made = self.node(target, self.arg(args), self.arg(kwargs), out, effect)
        made.meta["writes"] = written  # which of its tensors
        made.meta["random"] = any(word in name for word in _RANDOM)
        if made.meta["random"]:
            self.unseeded()
        # x += 1 gives the tensor itself: what the user goes on with, or keeps in a module, is no stand-in
        outs = tensors_in(out, [])
        return replaced(out, iter([self._reals.get(id(t), t) for t in outs])) if any(id(t) in self._reals for t in outs) else out

    def unseeded(self) -> None:
        """Raises GraphError where build() has set the generator, which a program does not do. Simulated ranks share one, so there it cannot be told."""
        if self._seed is not None and torch.default_generator.initial_seed() != self._seed:
            raise GraphError(
                "build() seeds torch's generator: it runs once, so only its first step would. Seed before the graph is called, or draw with a generator of "
                f"your own (generator=torch.Generator().manual_seed(...))\n  {_line()}"
            )

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function that wants values, of tensors that follow from the code alone. Raises NotConstant."""
        out = evaluated(self.graph, self.constants, func, self.arg(args), self.arg(kwargs))
        return replaced(out, iter([self.fake.from_tensor(t) for t in tensors_in(out, [])]))

    def _box(self, local: torch.Tensor, src: Spec, dst: Spec, grad: Spec | None = None, why: str = "", alias: bool = True) -> torch.Tensor:
        local = self.standing(local)
        if src is dst and grad is None:
            return local
        inside = self.rank in dst.placement._coordinates
        device = self.fake_device(dst, local)
        shape = dst.local_shape(self.rank) if inside else (0,)
        out = self.made(shape, dst.dtype, device, [local])
        self._now()
        node = self.node(Boxing(src, dst, grad, why, alias), (self.of(local),), {}, out)
        node.meta["box"] = (src, dst)
        self.boxed.append((src, dst, why))
        return out

    def fake_device(self, dst: Spec, local: torch.Tensor) -> torch.device:
        if self.rank not in dst.placement._coordinates:
            return torch.device("cpu")
        return local.device if local.device.type == dst.placement.type else torch.device(dst.placement.type)

    def made(self, shape: Any, dtype: torch.dtype, device: torch.device, from_: list[torch.Tensor]) -> torch.Tensor:
        """A fresh fake tensor that autograd takes for a result of ``from_``."""
        real = dtype.is_floating_point or dtype.is_complex
        with self.fake:
            if real and torch.is_grad_enabled() and any(t.requires_grad for t in from_):
                return _Made.apply(tuple(shape), dtype, device, *from_)  # type: ignore[no-any-return, no-untyped-call]
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def _apply(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a rule runs on the locals: looked into, unless it communicates or asks for values."""
        mark, known = list(self.graph.nodes)[-1] if len(self.graph.nodes) else None, dict(self.known)
        args, kwargs = self.standing(tuple(args)), self.standing(kwargs)
        try:
            with self:
                return function(*args, **kwargs)
        except (Untraceable, *_torch.data_dependence()):
            self._forget(mark)
            self.known = {**{i: node for i, node in self.known.items() if node.op == "placeholder"}, **known}
        return self.record(function, args, kwargs, Step(function), True)

    def _forget(self, mark: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is mark:
                return
            if node.op != "placeholder":
                self.graph.erase_node(node)

    def _draw(self, function: Callable[..., Any], args: Any, kwargs: Any, coordinate: Any) -> Any:
        return self.record(function, args, kwargs, Draw(function, tuple(coordinate)), True)

    def _filled(self, spec: Spec, fill: Any, generator: Any = None) -> torch.Tensor:
        inside = self.rank in spec.placement._coordinates
        device = torch.device(spec.placement.type) if inside else torch.device("cpu")
        out = self.made(spec.local_shape(self.rank) if inside else (0,), spec.dtype, device, [])
        if any(isinstance(a, torch.Tensor) for a in (*fill.args, *fill.kwargs.values())):
            with self:
                return draws.filled.__wrapped__(spec, fill, generator)  # type: ignore[attr-defined,no-any-return]
        self._now()
        step = Step(lambda generator: draws.filled(spec, fill, generator), fill.name)
        self.node(step, (self.arg(generator),), {}, out, effect=True)
        return out

    def _applied(self, function: Any, args: Any, kwargs: Any) -> Any:
        return self.record(function.apply, args, kwargs, Step(function.apply, function.__name__))

    def _gathered(self, leaf: GlobalTensor, src: Spec, dst: Spec, why: str) -> torch.Tensor:
        local = self.standing(leaf._local)
        shape = dst.local_shape(self.rank) if self.rank in dst.placement._coordinates else (0,)
        out = self.made(shape, dst.dtype, self.fake_device(dst, local), [local])
        self._now()
        node = self.node(Gather(leaf, dst, why), (self.of(leaf._local),), {}, out)
        node.meta["box"] = (src, dst)
        self.boxed.append((src, dst, why))
        return out

    def _backward(self, locals_: Any, seeds: Any, retain_graph: Any, create_graph: Any, into: Any) -> None:
        if create_graph or into is not None:
            raise GraphError("inside build(), backward() takes neither create_graph=True nor inputs=: gradients go to the parameters, for the optimizers")
        self._now()
        if self.scale is None:
            self.scale = self.placeholder("scale", 1.0)
        self.node(backward, (self.arg(list(locals_)), self.arg(list(seeds)), self.scale), {"retain_graph": bool(retain_graph)}, None, effect=True)

    def _plain_backward(self, tensors: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None, **_: Any) -> None:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        seeds = [None] * len(tensors) if gradient is None else [gradient] if isinstance(gradient, torch.Tensor) else list(gradient)
        with self:
            seeds = [torch.ones_like(t) if s is None else s for t, s in zip(tensors, seeds, strict=True)]
        self._backward(tensors, seeds, retain_graph, create_graph, inputs)


class Logical(Recorder):
    """Records what the user's code calls, on tensors of global shape, and lets ``local`` see what becomes of it."""

    def __init__(self, fake: Any, local: Local, names: Mapping[int, str]) -> None:
        super().__init__(fake)
        self.local = local
        self.names = names  # id of a parameter or buffer -> its path
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.local.path, self.local.stage, self.local.region = self.path, self.stage, self.region
        self.call = self.local.call = self.call + 1
        with self.local:
            out = func(*args, **kwargs)
            self.values(out)
        if self._beneath(args) or self._beneath(kwargs):
            return out
        name = getattr(func, "__name__", "")
        written = (name.endswith("_") and not name.endswith("__")) or name in _WRITERS or kwargs.get("out") is not None
        if not written and not tensors_in(out, []):
            return out
        if func in visible.SEEN:
            target: Any = func if func in visible.ALONE else func.__name__
        else:
            target, args = spelled(func, args)
        node = self.node(target, self.arg(args), self.arg(kwargs), out, written)
        node.meta.update(where=_line(), modes=(torch.is_grad_enabled(), _autocast()))
        return out

    def values(self, out: Any) -> None:
        """Number what a call gives: the same numbers on every rank, where names of local nodes may differ."""
        for t in tensors_in(out, []):
            if isinstance(t, GlobalTensor):
                node = self.local.known.get(id(settle(t)._local))
                if node is not None and "value" not in node.meta:
                    self.count += 1
                    node.meta.update(value=self.count, spec=t._spec)

    def _beneath(self, given: Any) -> bool:
        """Whether a call is on local parts of global tensors: part of what some function of ours does."""
        tensors = tensors_in(given, [])
        return any(id(t) in self.local.known and id(t) not in self.known for t in tensors if not isinstance(t, GlobalTensor))

    def state(self, t: torch.Tensor) -> fx.Node:
        name = self.names.get(id(t)) or f"constant_{len(self.states)}"
        self.states.append(t)
        node = self.placeholder(name.replace(".", "_"), t)
        node.meta["path"] = name
        return node


_WRITERS: Final = frozenset({"__setitem__", "__set__", "backward", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_INSIDE: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _line() -> str:
    """file:line of the user's code that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_INSIDE) and not frame.f_code.co_filename.startswith("<"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Any, dtype: Any, device: Any, *from_: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise GraphError("backward of a graph that is being recorded")


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
