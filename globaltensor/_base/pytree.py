"""Trees of values that hold tensors: the arguments of a call, and what a graph takes and gives.

Arguments of a call are tuples, lists and dicts (`tensors_in`, `replaced`): these two run at every
call that no plan runs directly. A graph also takes dataclasses and other objects (a batch, a
model's output, a cache): `object_tensors`, `replaced_in_objects`, `skeleton`.
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
    "tensors_in",
]


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
        return (
            type(value)(parts)
            if not isinstance(value, tuple) or type(value) is tuple
            else rebuilt_tuple(value, parts)
        )
    if isinstance(value, dict):
        return {k: replaced(v, these) for k, v in value.items()}
    return value


def rebuilt_tuple(value: tuple[Any, ...], parts: list[Any]) -> Any:
    """A named tuple of the same kind: torch's own take one sequence, Python's take the fields."""
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
#: Objects that are looked at as one value: what they hold is their own affair.
_WHOLE = (
    torch.nn.Module,
    torch.optim.Optimizer,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)


def _parts(value: Any) -> dict[Any, Any] | None:
    """What an object holds, by key or attribute; None where it holds nothing that is looked
    into."""
    if isinstance(value, dict):
        return value
    if isinstance(value, _WHOLE) or isinstance(getattr(value, "__members__", None), dict):
        return None
    return getattr(value, "__dict__", None)


def object_tensors(value: Any, found: list[Any], kind: type = torch.Tensor) -> list[Any]:
    """The tensors in a nest, in order, after those ``found``; of another ``kind`` if that is asked
    for. What is met twice is looked into once, tuples aside."""
    _collect(value, found, kind, set())
    return found


def _collect(value: Any, found: list[Any], kind: type, seen: set[int]) -> None:
    if isinstance(value, kind):
        found.append(value)
    elif isinstance(value, (torch.Tensor, *_PLAIN)):
        pass
    elif isinstance(value, (tuple, list)):
        for v in value:
            _collect(v, found, kind, seen)
    elif id(value) not in seen:
        seen.add(id(value))
        for v in (_parts(value) or {}).values():
            _collect(v, found, kind, seen)


def replaced_in_objects(value: Any, these: Iterator[Any], kind: type = torch.Tensor) -> Any:
    """The same nest with its tensors replaced by ``these``, in the order of `object_tensors`. What
    holds tensors is copied, the rest is shared."""
    return _mapped(value, these, kind, {})


def _mapped(value: Any, these: Iterator[Any], kind: type, memo: dict[int, Any]) -> Any:
    if isinstance(value, kind):
        return next(these)
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return value
    if isinstance(value, (tuple, list)):
        parts = [_mapped(v, these, kind, memo) for v in value]
        if type(value) in (tuple, list):
            return type(value)(parts)
        return (
            type(value)(*parts)
            if isinstance(getattr(value, "_fields", None), tuple)
            else type(value)(parts)
        )
    if id(value) in memo:
        return memo[id(value)]
    held = _parts(value)
    if not held or (type(value) is not dict and not object_tensors(value, [], kind)):
        return value
    out = memo[id(value)] = {} if type(value) is dict else copy.copy(value)
    for k, v in held.items():
        new = _mapped(v, these, kind, memo)
        if isinstance(value, dict):
            dict.__setitem__(out, k, new)
        if not isinstance(value, dict) or k in getattr(
            value, "__dict__", ()
        ):  # what transformers calls a model's output: its entries are attributes too
            object.__setattr__(out, k, new)
    return out


def skeleton(value: Any, describe: Callable[[torch.Tensor], Any]) -> Any:
    """A hashable stand-in for a nest: what of each tensor ``describe`` says, the values that are no
    tensors, the kinds of what holds them."""
    return _skeleton(value, describe, set())


def _skeleton(value: Any, describe: Callable[[torch.Tensor], Any], seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return (type(value), *[_skeleton(v, describe, seen) for v in value])
    held = _parts(value)
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
