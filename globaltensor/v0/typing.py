"""``flow.typing``: annotations of job functions. Parameters say what arrays they take, the return
annotation what the caller gets.

========================  ==================================================================================================
``Numpy``                 one array: the whole batch (consistent view)
``ListNumpy``             a list of one array for each device (mirrored view)
``ListListNumpy``         a list for each device of the pieces in which a blob comes: one, or as many as ``unpack`` makes
``Tuple``, ``Dict``       several of them, as in Python's typing
``Bundle[T]``             any nest of tuples, lists and dicts of ``T``
``Callback[T]``           the call returns at once a function that takes yours, which is called with a ``T`` once it is there
========================  ==================================================================================================
"""  # noqa: E501

from __future__ import annotations

import typing
from typing import Any, Dict, Generic, Tuple, TypeVar  # noqa: UP035 - these are the names that the interface has

import torch

from .errors import JobError

__all__ = [
    "Bundle",
    "Callback",
    "Dict",
    "Kind",
    "ListListNumpy",
    "ListNumpy",
    "Numpy",
    "Placeholder",
    "Tuple",
]

T = TypeVar("T")


class Placeholder:
    """An annotation of a parameter: arrays of this shape and dtype. ``batch_axis``: the dim that is
    cut over the devices, None for none."""

    kind: type[Kind]
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_axis: int | None


class Kind:
    """How arrays are handed over."""

    mirrored = False

    @classmethod
    def Placeholder(
        cls, shape: Any, dtype: torch.dtype = torch.float32, batch_axis: int | None = 0
    ) -> type[Placeholder]:
        """A class to annotate a parameter with. Raises JobError for a shape that is no tuple of
        sizes, or no dtype."""
        if not isinstance(shape, (tuple, list)) or not all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape
        ):
            raise JobError(
                f"{cls.__name__}.Placeholder: the shape is a tuple of sizes, like (100, 1, 28, "
                f"28); got {shape!r}"
            )
        if not isinstance(dtype, torch.dtype):
            raise JobError(
                f"{cls.__name__}.Placeholder: the dtype is one like flow.float or flow.int32, got "
                f"{dtype!r}"
            )
        if batch_axis is not None and shape and not -len(shape) <= batch_axis < len(shape):
            raise JobError(
                f"{cls.__name__}.Placeholder: a shape of {len(shape)} dims has no batch_axis "
                f"{batch_axis}"
            )
        axis = None if batch_axis is None or not shape else batch_axis % len(shape)
        known = {
            "kind": cls,
            "shape": tuple(shape),
            "dtype": dtype,
            "batch_axis": axis,
            "__module__": __name__,
        }
        return type(f"{cls.__name__}.Placeholder{tuple(shape)}", (Placeholder,), known)


class Numpy(Kind):
    """One array, whole."""


class ListNumpy(Kind):
    """A list with one array for each device. A parameter's array has the placeholder's shape on
    each."""

    mirrored = True


class ListListNumpy(Kind):
    """A list for each device of the pieces of its array along dim 0. A parameter takes pieces that
    together have the placeholder's shape."""

    mirrored = True


class Bundle(Generic[T]):
    """Any nest of tuples, lists and dicts of ``T``."""


class Callback(Generic[T]):
    """A function that takes the user's: that is called with a ``T`` when it has been computed."""


def origin(annotation: Any) -> Any:
    """``Bundle`` of ``Bundle[Numpy]``; None for what has no brackets."""
    return typing.get_origin(annotation)


def arguments(annotation: Any) -> tuple[Any, ...]:
    """``(Numpy,)`` of ``Bundle[Numpy]``."""
    return typing.get_args(annotation)
