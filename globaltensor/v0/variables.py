"""The variables of job functions: ``get_variable`` and ``assign``.

Variables belong to the session, so jobs that name the same variable share it. User code and layers
call this while a job is recorded; the session's engine creates the parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .._tensor.global_tensor import GlobalTensor
from .blob import Blob, own_step, recording
from .distribute import Distribute, assert_is_valid_distribute, broadcast
from .errors import JobError
from .initializers import Constant, Initializer
from .recording.record import Declared
from .regularizers import Regularizer
from .scope import current_scope
from .session.device_layout import Layout

__all__ = ["assign", "created", "get_variable", "merged"]


def get_variable(
    name: str,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = torch.float32,
    initializer: Initializer | None = None,
    regularizer: Regularizer | None = None,
    trainable: bool | None = None,
    model_name: str | None = None,
    random_seed: int | None = None,
    distribute: Distribute = broadcast(),  # noqa: B008 - a value
    reuse: bool = True,
) -> Blob:
    """Return the variable of this name in the current namespace.

    The first job that names a variable defines it. Without an initializer it starts with zeros. The
    seed is ``random_seed``, else the initializer's; without both, the numbers follow from
    ``torch.manual_seed`` and the name. With ``trainable=False`` this job does not train the
    variable (others may). ``distribute=split(axis)`` splits it over the devices of the scope.

    Raise JobError if a new variable has no shape or dtype, or if a given shape and its dtype differ
    from those of an existing variable. Raise it too if ``reuse=False`` and this job has the
    variable already.
    """
    tape = recording()
    full = current_scope().named(name)
    existing_blob = tape.blobs_of.get(full)
    if existing_blob is not None:
        if not reuse:
            raise JobError(
                f"variable {full} exists already in job {tape.record.name}: give the layers "
                "different names, or share it with reuse=True"
            )
        known = tape.record.variables[full]
        if shape is not None and (tuple(shape), dtype or known.dtype) != (known.shape, known.dtype):
            raise JobError(
                f"variable {full} has shape {list(known.shape)} and {known.dtype}, but is named "
                f"again with {list(shape)} and {dtype}"
            )
        if (
            existing_blob.mirrored == tape.scoped_view()
            and existing_blob.devices == tape.scoped_devices()
        ):
            return existing_blob  # type: ignore[no-any-return]
        shape, dtype, trainable = known.shape, known.dtype, known.trainable
    elif shape is None or dtype is None:
        raise JobError(f"variable {full}: the first get_variable must set its shape and dtype")
    assert_is_valid_distribute(distribute)
    if not all(isinstance(n, (int, np.integer)) and n > 0 for n in shape):
        raise JobError(f"variable {full}: a shape is a tuple of sizes, got {shape!r}")
    if (
        distribute.sbp is not None
        and distribute.sbp.is_split
        and not 0 <= distribute.sbp.dim < len(shape)
    ):
        raise JobError(
            f"variable {full} of shape {list(shape)} has no dim {distribute.sbp.dim} to be split"
        )
    trained = dtype.is_floating_point if trainable is None else bool(trainable)
    if existing_blob is None:
        start = Constant(0) if initializer is None else initializer
        if not isinstance(start, Initializer):
            raise JobError(
                f"variable {full}: the initializer is one of flow.*_initializer, got {start!r}"
            )
        seed = start.seed if random_seed is None else random_seed
        kinds = (
            regularizer or Regularizer(),
            trained,
            distribute,
            tape.scoped_devices(),
            seed,
            model_name,
        )
        tape.declare(Declared(full, tuple(int(n) for n in shape), dtype, start, *kinds))
    blob = own_step(
        "variable", full, trained, shape=shape, dtype=dtype, times=1, name=name, variable=True
    )
    tape.blobs_of[full] = blob
    return (
        blob
        if distribute.sbp is None or distribute.sbp.is_broadcast
        else blob.with_distribute(distribute)
    )


def assign(
    ref: Blob,
    value: Blob,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    keep: float = 0.0,
) -> None:
    """Write a value into a variable, of which a share ``keep`` of the old value remains.

    Raise JobError if ``ref`` is no variable, or if the shapes differ.
    """
    named = {blob.index: full for full, blob in recording().blobs_of.items()}
    if not isinstance(ref, Blob) or ref.index not in named:
        raise JobError(
            f"assign: the first argument is a variable, as get_variable returns it; got {ref!r}"
        )
    if value.shape != ref.shape:
        raise JobError(
            f"assign: variable {named[ref.index]} has shape {list(ref.shape)}, the value "
            f"{list(value.shape)}"
        )
    own_step(
        "assign",
        named[ref.index],
        value,
        keep,
        shape=ref.shape,
        dtype=ref.dtype,
        times=1,
        name=name,
        variable=True,
    )


def merged(records: Sequence[Any]) -> dict[str, Declared]:
    """Return the variables of all jobs by name; the first job that names one defines it.

    Raise JobError for a name with two shapes or dtypes.
    """
    variables: dict[str, Declared] = {}
    for record in records:
        for name, declared in record.variables.items():
            first = variables.setdefault(name, declared)
            if (first.shape, first.dtype) != (declared.shape, declared.dtype):
                conflict = (
                    f"variable {name} is {list(first.shape)} {first.dtype} in one job and "
                    f"{list(declared.shape)} {declared.dtype} in {record.name}"
                )
                raise JobError(f"{conflict}: jobs share variables by name, so they must agree")
    return variables


def created(
    declared: Mapping[str, Declared], trained: set[str], layout: Layout, seed: int
) -> dict[str, torch.nn.Parameter]:
    """Create the variables, as global parameters with their starting values.

    ``trained`` are the names of the variables that some job trains.
    """
    out = {}
    for name, d in declared.items():
        generator = torch.Generator().manual_seed(
            (seed ^ zlib.crc32(name.encode())) & 0x7FFFFFFFFFFFFFFF if d.seed is None else d.seed
        )
        whole = d.initializer.fill(torch.empty(d.shape, dtype=d.dtype), generator)
        sbp = d.distribute.sbp or broadcast().sbp
        value: GlobalTensor = whole.to_global(
            layout.placement(d.devices.__class__("cpu", d.devices.ids)), broadcast().sbp
        )  # type: ignore[attr-defined]
        value = value.to_global(layout.placement(d.devices), sbp).detach().clone()  # type: ignore[attr-defined]
        out[name] = torch.nn.Parameter(value, requires_grad=name in trained)
    return out
