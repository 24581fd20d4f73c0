"""The signature of a job function, read from its annotations.

It describes the pytree of arrays that go in, and the form in which results are returned.
`JobFunction` checks calls and results with it.
"""

from __future__ import annotations

import inspect
import typing as python_typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..._base.pytree import object_tensors, replaced_in_objects
from ..blob import Blob
from ..errors import JobError
from ..typing import ArrayKind, Bundle, Callback, ListListNumpy, Placeholder, arguments, origin
from .record import BlobRef

__all__ = ["JobSignature", "array_of"]

_NUMPY_OF = {torch.bfloat16: np.float32}


@dataclass(frozen=True)
class JobSignature:
    """The annotations of a job function.

    ``parameters`` maps each name to a pytree of `Placeholder` classes. ``returns`` is the return
    annotation without `Callback`, or None if there is none.
    """

    job: str
    signature: inspect.Signature
    parameters: Mapping[str, Any]
    returns: Any
    callback: bool

    @staticmethod
    def of(function: Callable[..., Any]) -> JobSignature:
        """Read the signature of a function.

        Raise JobError if a parameter has no annotation or an unsupported one, or if the return
        annotation is unsupported.
        """
        job = getattr(function, "__name__", "job")
        signature = inspect.signature(function)
        try:
            hints = python_typing.get_type_hints(function)
        except Exception as error:
            raise JobError(f"job {job}: its annotations cannot be read: {error}") from error
        bare = [name for name in signature.parameters if name not in hints]
        if bare:
            example = "flow.typing.Numpy.Placeholder((100, 10), dtype=flow.float)"
            raise JobError(
                f"job {job}: parameter {bare[0]} has no annotation; annotate every parameter with "
                f"the array it takes, like {bare[0]}: {example}"
            )
        for name, p in signature.parameters.items():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise JobError(
                    f"job {job}: *{name} takes any number of arguments, but the inputs of a job "
                    f"are known beforehand: name them, or use a Tuple"
                )
        parameters = {name: _input(job, name, hints[name]) for name in signature.parameters}
        returns = hints.get("return")
        callback = origin(returns) is Callback
        returns = arguments(returns)[0] if callback else None if returns is type(None) else returns
        if returns is not None:
            _check_output(job, returns)
        return JobSignature(job, signature, parameters, returns, callback)

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return a call's value for each placeholder, in order.

        Raise JobError for a call that does not fit.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise JobError(f"job {self.job}: {error}") from None
        out: list[Any] = []
        for name, wanted in self.parameters.items():
            if name not in bound.arguments:
                raise JobError(f"job {self.job}: no array is given for {name}")
            out += [
                value
                for _, _, value in _match_leaves(self.job, name, wanted, bound.arguments[name])
            ]
        return out

    def placeholders(self) -> Iterator[tuple[str, type[Placeholder]]]:
        """Yield (name, placeholder) in the order of `given`."""
        for name, wanted in self.parameters.items():
            for path, leaf, _ in _match_leaves(self.job, name, wanted, wanted):
                yield path, leaf

    def filled(self, blobs: Sequence[Any]) -> dict[str, Any]:
        """Return the function's arguments, with placeholders replaced by ``blobs``, in order."""
        these = iter(blobs)
        return {name: _fill_structure(wanted, these) for name, wanted in self.parameters.items()}

    def check(self, returned: Any) -> None:
        """Raise JobError if a job function's return value does not match its annotation."""
        if self.returns is None:
            return
        for path, kind, blob in _outputs(self.job, "what it returns", self.returns, returned):
            if not isinstance(blob, Blob):
                raise JobError(
                    f"job {self.job} says that {path} is {kind.__name__}, but it is no blob: "
                    f"{blob!r}"
                )
            if blob.mirrored != kind.mirrored:
                better = "ListNumpy" if blob.mirrored else "Numpy"
                view = (
                    "mirrored: each device has one"
                    if blob.mirrored
                    else "of the consistent view: there is one"
                )
                raise JobError(
                    f"job {self.job} says that {path} is {kind.__name__}, but {blob!r} is {view}; "
                    f"annotate {better}"
                )

    def handed(
        self,
        results: Any,
        pieces: Mapping[int, list[np.ndarray[Any, Any]]],
        mirrored: Mapping[int, bool],
    ) -> Any:
        """Return the caller's result: ``results`` with its Refs replaced by arrays."""
        kinds: dict[int, type[ArrayKind]] = {}
        if self.returns is not None:
            kinds = {
                i: kind
                for i, (_, kind, _) in enumerate(
                    _outputs(self.job, "result", self.returns, results)
                )
            }
        result_arrays = []
        for i, ref in enumerate(object_tensors(results, [], BlobRef)):
            parts = pieces[ref.index]
            if not mirrored[ref.index]:
                result_arrays.append(_join_pieces(parts))
            elif kinds.get(i) is ListListNumpy:
                result_arrays.append([[part[d] for part in parts] for d in range(len(parts[0]))])
            else:
                result_arrays.append(
                    [_join_pieces([part[d] for part in parts]) for d in range(len(parts[0]))]
                )
        return replaced_in_objects(results, iter(result_arrays), BlobRef)


def array_of(
    job: str, path: str, leaf: type[Placeholder], value: Any, devices: int
) -> np.ndarray[Any, Any]:
    """Return the array for a placeholder.

    In the mirrored view, the devices' arrays are stacked along a new first dim. Raise JobError for
    another shape or kind of dtype.
    """
    if not leaf.kind.mirrored:
        return _array(f"job {job}: {path}", leaf, value)
    if not isinstance(value, (list, tuple)) or len(value) != devices:
        got = (
            f"{len(value)} of them"
            if isinstance(value, (list, tuple))
            else f"a {type(value).__name__}"
        )
        raise JobError(
            f"job {job}: {path} is {leaf.kind.__name__}: a list with one entry for each of "
            f"{devices} devices is wanted, got {got}"
        )
    if leaf.kind is ListListNumpy:
        value = [
            _concat_pieces(f"job {job}: {path} of device {d}", leaf, parts)
            for d, parts in enumerate(value)
        ]
    return np.stack(
        [_array(f"job {job}: {path} of device {d}", leaf, part) for d, part in enumerate(value)]
    )


def _concat_pieces(where: str, leaf: type[Placeholder], parts: Any) -> np.ndarray[Any, Any]:
    if not isinstance(parts, (list, tuple)) or not parts:
        got = "an empty one" if isinstance(parts, (list, tuple)) else f"a {type(parts).__name__}"
        raise JobError(
            f"{where} is {leaf.kind.__name__}: a list of one or more arrays is wanted, which "
            f"together have its shape; got {got}"
        )
    arrays = [np.asarray(part) for part in parts]
    try:
        return np.concatenate(arrays, leaf.batch_axis or 0)
    except ValueError as error:
        shapes = ", ".join(str(list(a.shape)) for a in arrays)
        raise JobError(
            f"{where}: pieces of shapes {shapes} do not make one array: {error}"
        ) from error


def _array(where: str, leaf: type[Placeholder], value: Any) -> np.ndarray[Any, Any]:
    wanted = np.dtype(_NUMPY_OF.get(leaf.dtype) or torch.empty(0, dtype=leaf.dtype).numpy().dtype)
    array = np.asarray(value)
    if array.shape != leaf.shape:
        raise JobError(
            f"{where} takes an array of shape {list(leaf.shape)}, got {list(array.shape)}"
        )
    if array.dtype != wanted and not np.can_cast(array.dtype, wanted, "same_kind"):
        raise JobError(
            f"{where} takes {wanted}, got {array.dtype}: convert it with .astype(np.{wanted}) if "
            "that is intended"
        )
    return np.ascontiguousarray(array, dtype=wanted).reshape(leaf.shape)


def _join_pieces(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts[0].ndim else np.stack(parts)


def _input(job: str, name: str, annotation: Any) -> Any:
    """Return the pytree of placeholders of a parameter's annotation.

    Raise JobError for another annotation.
    """
    if isinstance(annotation, type) and issubclass(annotation, Placeholder):
        return annotation
    if origin(annotation) is tuple:
        return tuple(_input(job, f"{name}[{i}]", a) for i, a in enumerate(arguments(annotation)))
    shown = getattr(annotation, "__name__", repr(annotation))
    kinds = (
        "flow.typing.Numpy.Placeholder(shape, dtype), ListNumpy.Placeholder, "
        "ListListNumpy.Placeholder or a Tuple of them"
    )
    raise JobError(
        f"job {job}: parameter {name} is annotated {shown}; annotate an input with {kinds}"
    )


def _check_output(job: str, annotation: Any) -> None:
    if isinstance(annotation, type) and issubclass(annotation, ArrayKind):
        return
    if origin(annotation) in (tuple, list, dict, Bundle):
        inner = arguments(annotation)
        for a in inner[1:] if origin(annotation) is dict else inner:
            if a is not Ellipsis:
                _check_output(job, a)
        return
    shown = getattr(annotation, "__name__", repr(annotation))
    raise JobError(
        f"job {job}: its return annotation is {shown}; annotate results with Numpy, ListNumpy or "
        "ListListNumpy of flow.typing, in a Tuple, Dict, Bundle or Callback"
    )


def _match_leaves(
    job: str, path: str, wanted: Any, value: Any
) -> Iterator[tuple[str, type[Placeholder], Any]]:
    if not isinstance(wanted, tuple):
        yield path, wanted, value
        return
    if not isinstance(value, (tuple, list)) or len(value) != len(wanted):
        got = f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}"  # noqa: E501
        raise JobError(f"job {job}: {path} takes a tuple of {len(wanted)}, got {got}")
    for i, (w, v) in enumerate(zip(wanted, value, strict=True)):
        yield from _match_leaves(job, f"{path}[{i}]", w, v)


def _fill_structure(wanted: Any, leaves: Iterator[Any]) -> Any:
    return (
        tuple(_fill_structure(w, leaves) for w in wanted)
        if isinstance(wanted, tuple)
        else next(leaves)
    )


def _outputs(
    job: str, path: str, annotation: Any, value: Any
) -> Iterator[tuple[str, type[ArrayKind], Any]]:
    """Yield (path, kind, blob) for each returned value, in the order of the pytree.

    Raise JobError if the value does not match the annotation.
    """
    kind = origin(annotation)
    if kind is None:
        yield path, annotation, value
    elif kind is Bundle:
        yield from (
            (path, arguments(annotation)[0], blob)
            for blob in object_tensors(value, [], (Blob, BlobRef))
        )  # type: ignore[arg-type]
    elif kind is dict:
        if not isinstance(value, dict):
            raise JobError(
                f"job {job} says that {path} is a Dict, but it is {type(value).__name__}"
            )
        for k, v in value.items():
            yield from _outputs(job, f"{path}[{k!r}]", arguments(annotation)[1], v)
    else:
        inner = arguments(annotation)
        if not isinstance(value, (tuple, list)):
            raise JobError(
                f"job {job} says that {path} has several values, but it is {type(value).__name__}"
            )
        kinds = (
            inner * len(value)
            if kind is list
            else (inner[0],) * len(value)
            if inner[-1:] == (Ellipsis,)
            else inner
        )
        if len(kinds) != len(value):
            raise JobError(
                f"job {job} says that {path} has {len(kinds)} values, but it has {len(value)}"
            )
        for i, (a, v) in enumerate(zip(kinds, value, strict=True)):
            yield from _outputs(job, f"{path}[{i}]", a, v)
