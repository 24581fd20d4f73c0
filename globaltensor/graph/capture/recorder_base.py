"""The common base of both recorders: nodes, names, and the current line of the user's code.

`logical_recorder`, `local_recorder` and `autograd_recorder` build on it."""

from __future__ import annotations

import itertools
import operator
import os
import sys
import sysconfig
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from ..._base.pytree import tensors_in
from ..._base.user_code import PACKAGE_ROOT
from ..._tensor.global_tensor import GlobalTensor
from ...errors import GraphError
from ...sharding.spec import Spec
from ..program.nodes import ProgramCall

__all__ = ["Made", "Recorder", "casting", "line", "of_user", "specs_of", "spelled"]

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
#: Operators that torch writes in Python under other names: ``x ** 2`` calls a function named
#: ``pow`` that is in no module.
_OPERATORS: Final = {
    f: n
    for n, f in vars(torch.Tensor).items()
    if n.startswith("__") and callable(f) and getattr(f, "__name__", n) != n
}
_BASIC = (
    int,
    float,
    bool,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(Ellipsis),
)
#: Conversions of subclasses of Python's types to the plain value.
_PLAIN: Final[dict[type, Callable[[Any], Any]]] = {
    int: int,
    float: float,
    complex: complex,
    str: str.__str__,
}


class Recorder(TorchFunctionMode, ABC):
    """A recorder that writes calls into ``graph``.

    A tensor is known by its identity. An unknown tensor is a state, and becomes an input of the
    graph."""

    def __init__(self, fake: Any) -> None:
        super().__init__()
        self.fake = fake
        self.graph = fx.Graph()
        self.known: dict[int, fx.Node] = {}
        self.alive: list[Any] = []  # ids are unique only while their tensors live
        self.states: list[torch.Tensor] = []
        self.constants: dict[str, Any] = {}
        self.path: list[str] = []  # path of the module that runs
        self.stage: int | None = None
        self.region: int | None = None  # number of the region of nodes to be recomputed in backward
        self.call = 0  # number of the user's call that runs
        self._last: fx.Node | None = None  # the last placeholder
        self.names_taken: set[str] = set()  # names of placeholders

    # Nodes

    def placeholder(self, name: str, value: Any) -> fx.Node:
        numbered = itertools.chain([name], (f"{name}__{i}" for i in itertools.count(1)))
        name = next(n for n in numbered if n not in self.names_taken)
        self.names_taken.add(name)
        with (
            self.graph.inserting_after(self._last)
            if self._last is not None
            else self.graph.inserting_before(next(iter(self.graph.nodes), None))
        ):
            node = self._last = self.graph.placeholder(name)
        node.meta["val"] = value
        self.learn(value, node)
        return node

    def learn(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, torch.Tensor):
            self.known[id(value)] = node
            self.alive.append(value)
            return
        for i, v in (
            enumerate(value)
            if isinstance(value, (tuple, list))
            else value.items()
            if isinstance(value, dict)
            else ()
        ):
            if tensors_in(v, []):
                part = self.graph.call_function(operator.getitem, (node, i))
                part.meta.update(node.meta, val=v, effect=False, calls=0)
                self.learn(v, part)

    def node(
        self, target: Any, args: Any, kwargs: Any, value: Any, effect: bool = False, calls: int = 1
    ) -> fx.Node:
        """Add a call to the graph. ``value`` is its result on fake tensors."""
        if isinstance(target, str):
            made = self.graph.call_method(target, args, kwargs)
        else:
            made = self.graph.call_function(target, args, kwargs)
        made.meta.update(
            val=value,
            effect=effect,
            calls=calls,
            module=".".join(self.path),
            stage=self.stage,
            region=self.region,
            call=self.call,
        )
        self.learn(value, made)
        return made

    def arg(self, a: Any) -> Any:
        """Return an argument in the form that fx accepts."""
        if isinstance(a, torch.Tensor):
            return self.of(a)
        if isinstance(a, torch.Size):
            return tuple(a)
        if isinstance(a, (tuple, list)):
            return (
                type(a)([self.arg(v) for v in a])
                if type(a) in (tuple, list)
                else tuple(self.arg(v) for v in a)
            )
        if isinstance(a, dict):
            return {k: self.arg(v) for k, v in a.items()}
        if isinstance(a, slice):
            return slice(self.arg(a.start), self.arg(a.stop), self.arg(a.step))
        if isinstance(a, _BASIC):
            # Programs are printed, and NumPy's numbers and enumeration members have no name there.
            for (
                kind,
                plain,
            ) in _PLAIN.items():
                if isinstance(a, kind) and type(a) not in _BASIC:
                    return plain(a)
            return a
        name = (
            next((n for n, v in self.constants.items() if v is a), None)
            or f"constant_{len(self.constants)}"
        )
        self.constants[name] = a
        return self.graph.get_attr(name)

    def of(self, t: torch.Tensor) -> fx.Node:
        found = self.known.get(id(t))
        return found if found is not None else self.state(t)

    @abstractmethod
    def state(self, t: torch.Tensor) -> fx.Node: ...


def specs_of(args: Any, kwargs: Any) -> list[Spec | None]:
    """Return the specs of a call's tensors, in order; None for a plain tensor."""
    return [
        t._spec if isinstance(t, GlobalTensor) else None
        for t in tensors_in(kwargs, tensors_in(args, []))
    ]


def spelled(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return (target, args) of a torch function as a reader would write the call.

    For example ``x.view(3)`` rather than ``torch.Tensor.view(x, 3)``."""
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None)
    if name == "__get__" and isinstance(owner, types.GetSetDescriptorType):
        return getattr, (args[0], owner.__name__)
    if name == "__set__" and isinstance(owner, types.GetSetDescriptorType):
        return setattr, (args[0], owner.__name__, args[1])
    if name in ("__get__", "__set__") and isinstance(owner, property):
        field = getattr(owner, "__name__", None) or getattr(owner.fget, "__name__", "")
        return (
            (getattr, (args[0], field))
            if name == "__get__"
            else (setattr, (args[0], field, args[1]))
        )
    name = _OPERATORS.get(func, name)
    if name and getattr(torch.Tensor, name, None) is func:
        return _SPELLED.get(name, name), args
    if isinstance(func, types.BuiltinFunctionType) and getattr(torch, name, func) is not func:
        # A kernel. Under its name torch has the Python function that calls it, with other
        # arguments.
        return (
            ProgramCall(func),
            args,
        )
    return func, args


_STANDARD: Final = sysconfig.get_path("stdlib") + os.sep
_INSIDE: Final = (str(Path(torch.__file__).parent), str(PACKAGE_ROOT), "<")


def of_user(path: str) -> bool:
    """Return True if a file is the user's: neither torch's nor this package's."""
    return not path.startswith(_INSIDE)


def _of_python(path: str) -> bool:
    """Return True if a file is of Python's standard library, such as contextlib."""
    return path.startswith(_STANDARD) and f"-packages{os.sep}" not in path


def line() -> str:
    """Return file:line of the user's code that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if of_user(file) and not _of_python(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Made(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: Any, dtype: Any, device: Any, *from_: torch.Tensor
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise GraphError("backward of a graph that is being recorded")


def casting() -> list[tuple[str, bool, torch.dtype]]:
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
