"""NumPy's numbers, and those of subclasses, as Python's own.

torch's functions accept all of them as numbers. Rules and plans know Python's own types only, so
`dispatch` converts the others first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["OWN_TYPES", "as_python_numbers", "is_number", "key_of_other"]

#: The types of Python's own numbers, and of other arguments that are none.
OWN_TYPES = frozenset((int, float, bool, complex, str, type(None), torch.dtype, torch.device))
#: Python's type -> the types that torch reads as such a number. The first that fits decides: torch
#: reads a np.complex64 as a float, with NumPy's warning.
_KINDS: dict[type, tuple[type, ...]] = {
    int: (int, np.integer),
    complex: (complex,),
    float: (float, np.number),
}


def is_number(value: Any) -> bool:
    """Return True if torch's functions accept a value as a number."""
    return isinstance(value, (int, float, complex, np.number, np.bool_))


def _is_foreign_number(value: Any) -> bool:
    """Return True for a number of another type that torch reads as one of Python's own.

    A np.bool_ is none: torch reads it as a float where it expects a number, but not in an index.
    """
    return isinstance(value, (int, float, complex, np.number)) and type(value) not in OWN_TYPES


def key_of_other(value: Any) -> Any:
    """Return a part of a plan's key for a value of none of OWN_TYPES.

    A number equals numbers of other types, so its key has its type. The plan converts the number,
    so it does not depend on the value.
    """
    if _is_foreign_number(value):
        return (_is_foreign_number, type(value))
    return (np.bool_, bool(value)) if isinstance(value, np.bool_) else value


def as_python_numbers(value: Any) -> Any:
    """Return a pytree of tuples, lists, dicts and slices with Python's own numbers in it.

    A part without other numbers is returned as it is, the same object.

    >>> as_python_numbers((np.float32(1.5), [np.int64(2)]))
    (1.5, [2])
    """
    kind = type(value)
    if kind in OWN_TYPES or isinstance(value, torch.Tensor):
        return value
    if kind is tuple or kind is list:
        parts = [as_python_numbers(v) for v in value]
        return value if all(map(_same, parts, value)) else kind(parts)
    if kind is dict:
        named = {k: as_python_numbers(v) for k, v in value.items()}
        return value if all(map(_same, named.values(), value.values())) else named
    if kind is slice:
        ends = value.start, value.stop, value.step
        parts = [as_python_numbers(v) for v in ends]
        return value if all(map(_same, parts, ends)) else slice(*parts)
    if _is_foreign_number(value):
        return next(own(value) for own, types in _KINDS.items() if isinstance(value, types))
    return value


def _same(one: Any, other: Any) -> bool:
    return one is other
