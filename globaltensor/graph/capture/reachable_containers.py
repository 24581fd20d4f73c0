"""Containers outside of build() in which its code can find or leave tensors.

These are the attributes of the graph and of its modules, variables of enclosing functions, global
variables, and the lists, dicts, objects and classes that these refer to. `side_effects` restores
them after build(), and `Graph` compares at each call the tensors that a program has read there."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch

from ..._base import torch_private
from ..._base.pytree import tensors_in
from ..._base.user_code import is_user_code
from ..._tensor.global_tensor import GlobalTensor
from .recorder_base import of_user

__all__ = [
    "Containers",
    "TensorContainer",
    "contents",
    "entry",
    "identity",
    "items",
    "named",
    "put_back",
]

#: Attributes of a module in which the graph's own modules keep their tensors (`ModuleState`).
_OWN: Final = ("_parameters", "_buffers", "_modules")
_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module())) - set(_OWN)
# Bounds of what is searched behind variables: larger lists hold data, not a model's tensors.
_MAX_ENTRIES = 1 << 14
_MAX_CONTAINERS = 1 << 14
_ABSENT: Final = object()
_CALLED: Final = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    staticmethod,
    classmethod,
    property,
)
_NO_OBJECTS: Final = (
    type,
    torch.Tensor,
    torch.nn.Module,
    dict,
    list,
    tuple,
    deque,
    types.ModuleType,
    *_CALLED,
)

_READERS: Final = frozenset((dict.items, dict.values, OrderedDict.items, OrderedDict.values))

#: A dict, list, deque, class, or the cell of a variable of an enclosing function.
Held = Any


class TensorContainer:
    """A container in which build() may find or leave a tensor, and its contents before.

    ``keys`` restricts a container to some entries. ``skipped`` names entries that are left out.
    ``origin`` is the (container, key) under which the container was found."""

    def __init__(
        self,
        path: str,
        held: Held,
        skipped: Iterable[str] = (),
        keys: set[str] | None = None,
        origin: tuple[TensorContainer, Any] | None = None,
    ) -> None:
        self.path, self.held, self.skipped, self.keys = path, held, skipped, keys
        self.origin = origin
        self.then: dict[Any, Any] = dict(self.items())

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield the keys and values that are watched, as they are now."""
        for k, v in items(self.held):
            if (
                k not in self.skipped
                and (self.keys is None or k in self.keys)
                and not _computes_entries(v)
            ):
                yield k, v

    def watch(self, keys: set[str]) -> None:
        """Watch more entries of a container that is restricted to some."""
        if self.keys is not None and not keys <= self.keys:
            self.keys |= keys
            self.then = dict(self.items())

    def changed(self) -> dict[Any, Any]:
        """Return the entries with tensors that are not what they were."""
        return {k: v for k, v in self.items() if self.then.get(k) is not v and tensors_in(v, [])}

    def slots(self, k: Any) -> Iterator[tuple[Held, Any]]:
        """Yield the entry ``k`` as (container, key), and the entries that lead to the container."""
        yield self.held, k
        if self.origin is not None:
            container, key = self.origin
            yield from container.slots(key)


class _ReachedValue(NamedTuple):
    """A value that the search has reached, and the entry of a container that refers to it.

    ``bounded``: it was reached through a variable of a function, which may refer to anything."""

    path: str
    value: Any
    origin: tuple[TensorContainer, Any] | None
    bounded: bool


class Containers:
    """The containers that some attributes and functions refer to, by id.

    ``parts`` are the modules of the graph: what they hold is not searched through variables."""

    def __init__(self, parts: Iterable[torch.nn.Module]) -> None:
        self.found: dict[int, TensorContainer] = {}
        #: (container, key) of entries that are a module of the graph.
        self.modules: list[tuple[Held, Any]] = []
        self._parts = set(map(id, parts))
        self._functions: set[int] = set()
        self._kept: list[Any] = []  # ids are unique only while the objects live

    def add_attributes(self, path: str, attributes: dict[str, Any]) -> None:
        """Add the attributes of the graph or of one of its modules, and what they refer to."""
        self._search(path, attributes, bounded=False)

    def add_function(self, function: Any) -> None:
        """Add the variables that a function, or the methods of a class, refer to."""
        self._search("", function, bounded=True)

    def _search(self, path: str, value: Any, bounded: bool) -> None:
        todo = deque([_ReachedValue(path, value, None, bounded)])
        while todo:
            reached = todo.popleft()
            value = reached.value
            if reached.bounded and len(self.found) > _MAX_CONTAINERS:
                continue
            if isinstance(value, _CALLED):
                todo += self._variables(value)
            elif isinstance(value, tuple):
                todo += [
                    reached._replace(path=named(reached.path, value, k), value=v)
                    for k, v in enumerate(value)
                    if _may_hold(v)
                ]
            elif isinstance(value, torch.nn.Module) and (
                not reached.bounded or id(value) in self._parts
            ):
                if reached.bounded and reached.origin is not None:
                    self.modules.append((reached.origin[0].held, reached.origin[1]))
            else:
                todo += self._open_container(reached)

    def _open_container(self, reached: _ReachedValue) -> list[_ReachedValue]:
        """Add the container of a value, and return its entries, to be searched."""
        path, value, origin, bounded = reached
        held = contents(value)
        if held is None or id(held) in self.found:
            return []
        skipped: Iterable[str] = ()
        if bounded and len(items(held)) > _MAX_ENTRIES:
            return []
        if isinstance(value, torch.nn.Module):
            skipped = _OF_EVERY_MODULE
        elif not bounded:
            skipped = _OWN
        if (
            isinstance(held, dict) and "_flat_weights_names" in held
        ):  # the attributes of a recurrent layer
            skipped = {*skipped, *torch_private.DERIVED_FROM_PARAMETERS}
        container = self.found[id(held)] = TensorContainer(path, held, skipped, None, origin)
        entries = _children(container, bounded)
        kinds: tuple[type, ...] = ()  # the methods of classes refer to variables
        if isinstance(value, type):
            kinds = value.__mro__[1:-1]
        elif bounded and held is not value:
            kinds = type(value).__mro__[:-1]
        return entries + [_ReachedValue(kind.__name__, kind, None, True) for kind in kinds]

    def _variables(self, function: Any) -> list[_ReachedValue]:
        """Add the variables of a function, and return their values, to be searched."""
        if isinstance(function, functools.partial):
            bound = function.func, *function.args, *function.keywords.values()
            return [_ReachedValue("", v, None, True) for v in bound]
        if isinstance(function, types.MethodType):
            owner = function.__self__
            kind = owner if isinstance(owner, type) else type(owner)
            reached = ("", function.__func__), ("", owner), (kind.__name__, kind)
            return [_ReachedValue(path, v, None, True) for path, v in reached]
        if isinstance(function, (staticmethod, classmethod)):
            return [_ReachedValue("", function.__func__, None, True)]
        if isinstance(function, property):
            return [_ReachedValue("", function.fget, None, True)]
        if id(function) in self._functions or not is_user_code(function.__code__):
            return []
        self._functions.add(id(function))
        self._kept.append(function)
        code = function.__code__
        variables: list[TensorContainer] = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self.found:
                variables.append(TensorContainer(name, cell))
                self.found[id(cell)] = variables[-1]
        names = set(_names(code))
        outside = [("", function.__globals__)]
        outside += [
            (name, vars(module))
            for name in names
            if isinstance(module := function.__globals__.get(name), types.ModuleType)
            and of_user(getattr(module, "__file__", None) or "<")
        ]
        for path, held in outside:
            container = self.found.get(id(held))
            if container is None:
                container = self.found[id(held)] = TensorContainer(path, held, (), set(names))
            else:
                container.watch(names)
            variables.append(container)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return [
            *(child for container in variables for child in _children(container, True)),
            *(_ReachedValue("", v, None, True) for v in defaults if _may_hold(v)),
        ]


def _children(container: TensorContainer, bounded: bool) -> list[_ReachedValue]:
    return [
        _ReachedValue(named(container.path, container.held, k), v, (container, k), bounded)
        for k, v in container.then.items()
        if _may_hold(v)
    ]


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code refers to, with those of inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def items(held: Held) -> list[tuple[Any, Any]]:
    """Return the keys and values of a container."""
    if isinstance(held, dict):
        return list(held.items())
    if isinstance(held, types.CellType):
        return [] if held == types.CellType() else [("", held.cell_contents)]
    if isinstance(held, type):
        return [(k, v) for k, v in vars(held).items() if not k.startswith("__")]
    return list(enumerate(held))


def entry(held: Held, k: Any) -> Any:
    """Return an entry of a container as it is now, or None if there is no such entry."""
    if isinstance(held, dict):
        return held.get(k)
    if isinstance(held, types.CellType):
        return None if held == types.CellType() else held.cell_contents
    if isinstance(held, type):
        return vars(held).get(k)
    return held[k] if k < len(held) else None


def put_back(container: TensorContainer, keys: Collection[Any]) -> None:
    """Restore the entries ``keys`` of a container, or all of a list."""
    held, then = container.held, container.then
    if isinstance(held, (list, deque)):
        if keys:
            held.clear()
            held.extend(then.values())
        return
    for k in keys:
        old = then.get(k, _ABSENT)
        if isinstance(held, types.CellType):
            if old is _ABSENT:
                del held.cell_contents
            else:
                held.cell_contents = old
        elif isinstance(held, type):
            if old is _ABSENT:
                delattr(held, k)
            else:
                setattr(held, k, old)
        elif old is _ABSENT:
            del held[k]
        else:
            held[k] = old


def identity(held: Held, k: Any) -> int | tuple[int, ...]:
    """Return the ids of the tensors in an entry, or of its container if it has no tensor itself.

    The layout of a global tensor counts too, since it may change in place."""
    value = held.get(k) if type(held) is dict else entry(held, k)
    if isinstance(value, torch.Tensor):
        return id(value) if not isinstance(value, GlobalTensor) else (id(value), id(value._spec))
    if isinstance(value, torch.nn.Module):
        return id(value.__dict__)
    tensors = tensors_in(value, [])
    if tensors:
        return tuple(map(id, tensors))
    inner = contents(value)
    if isinstance(inner, (list, deque, tuple)):
        return id(inner), len(inner)
    return (id(value if inner is None else inner),)


def contents(value: Any) -> Held | None:
    """Return the container of a value's entries, or None for a value that is not searched."""
    if isinstance(value, (dict, list, deque, tuple)):
        return None if _computes_entries(value) else value
    if isinstance(value, type):
        return value if of_user(_file_of(value)) else None
    if _is_object(value) or isinstance(value, torch.nn.Module):
        return vars(value)
    return None


def _computes_entries(value: Any) -> bool:
    """Return True for a dict whose class computes its entries when they are read.

    To read them may load other modules, as in the tables of models of transformers."""
    kind = type(value)
    return isinstance(value, dict) and not _READERS.issuperset((kind.items, kind.values))


def named(path: str, held: Held, k: Any) -> str:
    """Return the name of an entry of a container in errors."""
    if isinstance(held, types.CellType):
        return path
    if isinstance(held, (dict, type)):
        return f"{path}.{k}".lstrip(".")
    return f"{path}[{k}]"


def _may_hold(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return is_user_code(value.__code__)
    return isinstance(value, (*_CALLED, torch.nn.Module)) or contents(value) is not None


def _is_object(value: Any) -> bool:
    if (
        not hasattr(value, "__dict__")
        or isinstance(value, _NO_OBJECTS)
        or "_modules" in vars(value)
    ):
        return False
    return of_user(_file_of(type(value)))


def _file_of(kind: type) -> str:
    """Return the file of a class; classes of an interactive session have none."""
    if kind.__module__ == "__main__":
        return "__main__"
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
