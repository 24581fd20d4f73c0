"""Blobs, the values that a job function computes with.

A blob is a symbolic value of known shape and dtype. Ops on blobs are recorded as steps of a program
(v0/recording/record.py). Every op of ``flow`` calls `apply` or `own_step` to record itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .._base.pytree import object_tensors, replaced_in_objects
from .distribute import Distribute, assert_is_valid_distribute
from .errors import JobError
from .recording.record import BlobRef, RecordedOp
from .recording.recorder import Tape, taping
from .session.device_layout import Devices

__all__ = ["Blob", "apply", "cast_distribute", "named", "own_step", "recording", "scoped"]


class Blob:
    """A symbolic value of a job.

    ``shape`` is the global shape in the consistent view, and the shape on each device in the
    mirrored view.
    """

    __slots__ = (
        "devices",
        "dtype",
        "index",
        "mirrored",
        "name",
        "shape",
        "tape",
        "times",
        "variable",
    )
    __array_priority__ = 1000

    def __init__(
        self,
        tape: Tape,
        index: int,
        shape: Any,
        dtype: torch.dtype,
        step: RecordedOp,
        variable: bool = False,
    ) -> None:
        self.tape, self.index, self.shape, self.dtype = (
            tape,
            index,
            tuple(int(n) for n in shape),
            dtype,
        )
        self.devices, self.mirrored, self.times, self.name, self.variable = (
            step.devices,
            step.mirrored,
            step.times,
            step.name,
            variable,
        )

    @property
    def op_name(self) -> str:
        return self.name

    @property
    def unique_name(self) -> str:
        return f"{self.name}/out_{self.index}"

    logical_blob_name = unique_name

    @property
    def is_dynamic(self) -> bool:
        """Always False, because shapes are static here."""
        return False

    def with_distribute(self, distribute: Distribute) -> Blob:
        """Return the blob cast to this sbp; ``auto()`` leaves it unchanged."""
        return cast_distribute(self, distribute, None, None)

    def with_gradient_distribute(self, distribute: Distribute) -> Blob:
        """Return the blob with its gradient cast to this sbp; ``auto()`` leaves it unchanged."""
        return cast_distribute(self, None, distribute, None)

    def __len__(self) -> int:
        if not self.shape:
            raise JobError(f"{self!r} has no dims, so no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Blob:
        return apply(operator.getitem, self, index)  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"Blob({self.name}, shape={list(self.shape)}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}{', mirrored' if self.mirrored else ''})"  # noqa: E501
        )

    def _no_value(self, *_: object, **__: object) -> Any:
        raise JobError(
            f"{self!r} has no value while the job is recorded: compute with ops, and return the "
            "blobs whose values the caller needs"
        )

    __bool__ = __float__ = __int__ = __index__ = __array__ = numpy = _no_value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record any torch function as an op."""
        return apply(func, *args, **(kwargs or {}))


def _operator(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def run(self: Blob, other: Any) -> Any:
        if not isinstance(other, (Blob, int, float, bool, np.number)):
            return NotImplemented
        other = other.item() if isinstance(other, np.number) else other
        return apply(function, other, self) if swapped else apply(function, self, other)

    return run


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Blob, f"__{_name}__", _operator(getattr(operator, _name)))
    setattr(Blob, f"__r{_name}__", _operator(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Blob, f"__{_name}__", _operator(getattr(operator, _name)))
Blob.__neg__ = lambda self: apply(operator.neg, self)  # type: ignore[attr-defined]
Blob.__abs__ = lambda self: apply(torch.abs, self)  # type: ignore[attr-defined]
Blob.__hash__ = object.__hash__  # type: ignore[method-assign]


def named(function: Callable[..., Any], name: str, text: str) -> Callable[..., Any]:
    """Give a generated function its own name and docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function


def recording() -> Tape:
    """Return the tape of the job that is being recorded.

    Raise JobError outside of job functions.
    """
    tape = taping()
    if tape is None:
        raise JobError(
            "ops and variables must be used inside a job function: a function with "
            "@flow.global_function(...) before it"
        )
    return tape


def apply(op: Callable[..., Any], *args: Any, op_name: str | None = None, **kwargs: Any) -> Any:
    """Record an op, a function of tensors and plain values.

    Return its results, with blobs in place of tensors. Raise JobError if the op refuses its
    arguments.
    """
    tape = recording()
    blobs = [tape.seen(b) for b in object_tensors((args, kwargs), [], Blob)]
    blobs = [scoped(b) for b in blobs]
    try:
        given = [torch.empty(b.shape, dtype=b.dtype, device="meta") for b in blobs]
        args_, kwargs_ = replaced_in_objects((args, kwargs), iter(given), Blob)
        out = op(*args_, **kwargs_)
    except Exception as error:
        shown = ", ".join(map(repr, blobs)) or "no blobs"
        told = op_name or getattr(op, "__name__", str(op)).lstrip("_")
        raise JobError(f"{told} of {shown}: {error}") from error
    made = object_tensors(out, [])
    refs = replaced_in_objects((args, kwargs), iter([BlobRef(b.index) for b in blobs]), Blob)
    step = tape.add(op, *refs, len(made), _times(blobs), op_name)
    return replaced_in_objects(
        out,
        iter([Blob(tape, i, t.shape, t.dtype, step) for i, t in zip(step.outs, made, strict=True)]),
    )


def own_step(
    op: str, *args: Any, shape: Any, dtype: torch.dtype, times: int | None = None,
    name: str | None = None, devices: Devices | None = None,
    mirrored: bool | None = None, variable: bool = False,
) -> Blob:  # fmt: skip
    """Record one of the replay's own steps, with one result of this shape and dtype.

    ``mirrored`` sets the view of the result. If it is None, the view is that of the first input
    blob, from which ``shape`` was computed. If there are no input blobs, the view is the scope's.
    """
    tape = recording()
    blobs = [tape.seen(b) for b in object_tensors(args, [], Blob)]
    refs = replaced_in_objects(args, iter([BlobRef(b.index) for b in blobs]), Blob)
    if mirrored is None and blobs:
        mirrored = blobs[0].mirrored
    step = tape.add(
        op, refs, {}, 1, _times(blobs) if times is None else times, name, devices, mirrored
    )
    return Blob(tape, step.outs[0], shape, dtype, step, variable)


def cast_distribute(
    blob: Blob, distribute: Distribute | None, gradient: Distribute | None, name: str | None
) -> Blob:
    """Cast a blob to one sbp and its gradient to another.

    None or ``auto()`` leaves the sbp unchanged. Return mirrored blobs as they are. Raise JobError
    for a dim that the blob does not have.
    """
    for given in (distribute, gradient):
        if given is not None:
            assert_is_valid_distribute(given)
    sbp, grad = (None if d is None else d.sbp for d in (distribute, gradient))
    if (sbp is None and grad is None) or blob.mirrored:  # on one device alone: no sbp
        return blob
    for wanted in (sbp, grad):
        if (
            wanted is not None
            and wanted.is_split
            and not -len(blob.shape) <= wanted.dim < len(blob.shape)
        ):
            raise JobError(f"{blob!r} has no dim {wanted.dim} to be split")
    return own_step(
        "cast",
        blob,
        sbp,
        grad,
        shape=blob.shape,
        dtype=blob.dtype,
        name=name,
        devices=blob.devices,
        variable=blob.variable,
    )


def scoped(blob: Blob) -> Blob:
    """Convert the blob to the view of the current scope."""
    mirrored = recording().scoped_view()
    return blob if blob.mirrored == mirrored else _convert_view(blob, mirrored)


def _convert_view(blob: Blob, mirrored: bool) -> Blob:
    """Convert the blob to the other view.

    The mirrored view splits a batch over the devices along dim 0. The consistent view concatenates
    the devices' batches along dim 0. A variable keeps its shape. Raise JobError for a batch that
    does not divide by the number of devices.
    """
    devices = blob.tape.layout.size
    if mirrored and not blob.variable:
        if not blob.shape or blob.shape[0] % devices:
            raise JobError(
                f"{blob!r} cannot be cut for the mirrored view: dim 0 must divide by the "
                f"{devices} devices"
            )
        shape = (blob.shape[0] // devices, *blob.shape[1:])
    elif mirrored or blob.variable:
        shape = blob.shape
    else:
        shape = (blob.shape[0] * devices, *blob.shape[1:]) if blob.shape else (devices,)
    kind = "own" if mirrored else "joined"
    return own_step(
        kind,
        blob,
        blob.variable,
        shape=shape,
        dtype=blob.dtype,
        name=f"{blob.name}-{kind}",
        mirrored=mirrored,
        variable=blob.variable,
    )


def _times(blobs: list[Blob]) -> int:
    piece_counts = {b.times for b in blobs if b.times > 1}
    if len(piece_counts) > 1:
        pieces_text = ", ".join(f"{b!r} comes in {b.times} pieces" for b in blobs if b.times > 1)
        raise JobError(
            f"an op of blobs in different numbers of pieces: {pieces_text}; flow.pack or flow.acc "
            f"brings pieces together, flow.repeat repeats a blob"
        )
    return piece_counts.pop() if piece_counts else 1
