"""Pytrees that hold tensors: the arguments of a call, and the inputs and outputs of a graph.

Arguments of a call are tuples, lists and dicts (`tensors_in`, `replaced`). These two functions run
at every call that no plan runs directly. A graph also accepts dataclasses and other objects (a
batch, a model's output, a cache): `object_tensors`, `replaced_in_objects`, `skeleton`.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = [
    "object_tensors",
    "rebuilt_tuple",
    "replaced",
    "replaced_in_objects",
    "skeleton",
    "structure",
    "tensors_in",
]


def tensors_in(value: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in a pytree of tuples, lists, slices and dicts, in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (tuple, list)):
        for v in value:
            tensors_in(v, tensors)
    elif isinstance(value, dict):
        for v in value.values():
            tensors_in(v, tensors)
    return tensors


def replaced(value: Any, replacements: Iterator[Any]) -> Any:
    """Return the same pytree with its tensors replaced by ``replacements``, in order."""
    if isinstance(value, torch.Tensor):
        return next(replacements)
    if isinstance(value, (tuple, list)):
        parts = [replaced(v, replacements) for v in value]
        if isinstance(value, torch.Size):
            return value
        return (
            type(value)(parts)
            if not isinstance(value, tuple) or type(value) is tuple
            else rebuilt_tuple(value, parts)
        )
    if isinstance(value, dict):
        return {k: replaced(v, replacements) for k, v in value.items()}
    return value


def structure(value: Any) -> str:
    """Return a text of a pytree's containers, their keys and the places of tensors in them.

    Parts of the pytree that hold no tensor are written as "values". Pytrees of equal text have
    their tensors at equal places, in equal order.

    >>> structure({"x": torch.ones(2), "pair": (torch.ones(1), 3)})
    "{'x': tensor, 'pair': (tensor, values)}"
    """
    if isinstance(value, torch.Tensor):
        return "tensor"
    if not tensors_in(value, []):
        return "values"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {structure(v)}" for k, v in value.items()) + "}"
    parts = ", ".join(map(structure, value))
    if isinstance(value, list):
        return f"[{parts}]"
    return f"{'' if type(value) is tuple else type(value).__name__}({parts})"


def rebuilt_tuple(value: tuple[Any, ...], parts: list[Any]) -> Any:
    """Build a named tuple of the same type as ``value`` from ``parts``.

    torch's own named tuples accept one sequence, Python's accept the fields one by one.
    """
    return (
        type(value)(*parts)
        if isinstance(getattr(value, "_fields", None), tuple)
        else type(value)(parts)
    )


_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.Size,
    torch.Generator,
)
#: Types whose objects are treated as one value: their contents are not searched for tensors.
_WHOLE = (
    torch.nn.Module,
    torch.optim.Optimizer,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)


def _contents(value: Any) -> dict[Any, Any] | None:
    """Return an object's contents by key or attribute, or None if they are not searched."""
    if isinstance(value, dict):
        return value
    if isinstance(value, _WHOLE) or isinstance(getattr(value, "__members__", None), dict):
        return None
    return getattr(value, "__dict__", None)


def object_tensors(value: Any, leaves: list[Any], kind: type = torch.Tensor) -> list[Any]:
    """Append to ``leaves`` the tensors in a pytree, in order, and return the list.

    ``kind`` selects instances of another class instead of tensors. An object that occurs twice is
    searched once, except for tuples and lists.
    """
    _collect(value, leaves, kind, set())
    return leaves


def _collect(value: Any, leaves: list[Any], kind: type, seen: set[int]) -> None:
    if isinstance(value, kind):
        leaves.append(value)
    elif isinstance(value, (torch.Tensor, *_PLAIN)):
        pass
    elif isinstance(value, (tuple, list)):
        for v in value:
            _collect(v, leaves, kind, seen)
    elif id(value) not in seen:
        seen.add(id(value))
        for v in (_contents(value) or {}).values():
            _collect(v, leaves, kind, seen)


def replaced_in_objects(value: Any, replacements: Iterator[Any], kind: type = torch.Tensor) -> Any:
    """Return the same pytree with ``replacements`` as its tensors.

    They come in the order of `object_tensors`. Containers of tensors are copied, everything else is
    shared.
    """
    return _replace_tensors(value, replacements, kind, {})


def _replace_tensors(
    value: Any, replacements: Iterator[Any], kind: type, memo: dict[int, Any]
) -> Any:
    if isinstance(value, kind):
        return next(replacements)
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return value
    if isinstance(value, (tuple, list)):
        parts = [_replace_tensors(v, replacements, kind, memo) for v in value]
        if type(value) in (tuple, list):
            return type(value)(parts)
        return (
            type(value)(*parts)
            if isinstance(getattr(value, "_fields", None), tuple)
            else type(value)(parts)
        )
    if id(value) in memo:
        return memo[id(value)]
    held = _contents(value)
    if not held or (type(value) is not dict and not object_tensors(value, [], kind)):
        return value
    out = memo[id(value)] = {} if type(value) is dict else copy.copy(value)
    for k, v in held.items():
        new = _replace_tensors(v, replacements, kind, memo)
        if isinstance(value, dict):
            dict.__setitem__(out, k, new)
        # The class that transformers uses for a model's output: its entries are attributes too.
        if not isinstance(value, dict) or k in getattr(value, "__dict__", ()):
            object.__setattr__(out, k, new)
    return out


def skeleton(value: Any, describe: Callable[[torch.Tensor], Any]) -> Any:
    """Return a hashable key of a pytree.

    It holds ``describe(t)`` of each tensor, the values that are no tensors, and the types of the
    containers.
    """
    return _skeleton(value, describe, set())


def _skeleton(value: Any, describe: Callable[[torch.Tensor], Any], seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return (type(value), *[_skeleton(v, describe, seen) for v in value])
    held = _contents(value)
    if (
        isinstance(value, dict)
        or dataclasses.is_dataclass(value)
        or (held and object_tensors(value, []))
    ):
        if id(value) in seen:
            return type(value), "again"
        seen.add(id(value))
        return (type(value), *[(k, _skeleton(v, describe, seen)) for k, v in (held or {}).items()])
    return type(value), value
