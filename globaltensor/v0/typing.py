"""``flow.typing``: the annotations of job functions.

User code annotates parameters with the arrays that a job accepts. The return annotation says what
the caller gets.

========================  ==================================================================================================
``Numpy``                 one array: the global batch (consistent view)
``ListNumpy``             a list of one array for each device (mirrored view)
``ListListNumpy``         for each device a list of a blob's pieces: one, or as many as ``unpack`` makes
``Tuple``, ``Dict``       several of them, as in Python's typing
``Bundle[T]``             any pytree of tuples, lists and dicts of ``T``
``Callback[T]``           the call returns a function at once; pass it yours, which is called with the ``T`` once computed
========================  ==================================================================================================
"""  # noqa: E501

from __future__ import annotations

import typing
from typing import Any, Dict, Generic, Tuple, TypeVar  # noqa: UP035 - these are the names that the interface has

import torch

from .errors import JobError

__all__ = [
    "ArrayKind",
    "Bundle",
    "Callback",
    "Dict",
    "ListListNumpy",
    "ListNumpy",
    "Numpy",
    "Placeholder",
    "Tuple",
]

T = TypeVar("T")


class Placeholder:
    """An annotation of a parameter: arrays of this shape and dtype.

    ``batch_axis`` is the dim that is split over the devices, or None.
    """

    kind: type[ArrayKind]
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_axis: int | None


class ArrayKind:
    """A kind of array annotation, the base class of `Numpy`, `ListNumpy` and `ListListNumpy`."""

    mirrored = False

    @classmethod
    def Placeholder(
        cls, shape: Any, dtype: torch.dtype = torch.float32, batch_axis: int | None = 0
    ) -> type[Placeholder]:
        """Return a class to annotate a parameter with.

        Raise JobError if ``shape`` is no tuple of sizes, ``dtype`` no dtype, or ``batch_axis`` no
        dim.
        """
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


class Numpy(ArrayKind):
    """The annotation of one global array."""


class ListNumpy(ArrayKind):
    """The annotation of a list with one array for each device.

    A parameter's array has the placeholder's shape on each device.
    """

    mirrored = True


class ListListNumpy(ArrayKind):
    """The annotation of a list that holds, for each device, the pieces of its array along dim 0.

    A parameter accepts pieces that together have the placeholder's shape.
    """

    mirrored = True


class Bundle(Generic[T]):
    """The annotation of any pytree of tuples, lists and dicts of ``T``."""


class Callback(Generic[T]):
    """The annotation of a result that is delivered to a function of the user.

    The call returns at once. Its result accepts a function, which is called with a ``T`` once that
    has been computed.
    """


def origin(annotation: Any) -> Any:
    """Return ``Bundle`` for ``Bundle[Numpy]``, and None for an annotation without brackets."""
    return typing.get_origin(annotation)


def arguments(annotation: Any) -> tuple[Any, ...]:
    """Return ``(Numpy,)`` for ``Bundle[Numpy]``."""
    return typing.get_args(annotation)
