"""The record of a job function: a list of steps on numbered values.

A record is pure data and the same on every machine. The recorder writes it, and devices replay it
in a graph (execute.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..._base.pytree import object_tensors
from ..distribute import Distribute
from ..session.device_layout import Devices

__all__ = ["BlobRef", "Declared", "Given", "Record", "RecordedOp"]


class BlobRef(NamedTuple):
    """A reference to a value of a record."""

    index: int


@dataclass(frozen=True)
class RecordedOp:
    """A step of a record.

    ``op`` is a function of tensors, or the name of one of the replay's own steps. ``times`` is the
    number of runs per call (one for each piece of an unpacked blob).
    """

    op: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]
    devices: Devices
    mirrored: bool
    times: int
    name: str

    def __str__(self) -> str:
        op = self.op if isinstance(self.op, str) else _argument_text(self.op)
        told = [
            *map(_argument_text, self.args),
            *(f"{k}={_argument_text(v)}" for k, v in self.kwargs.items()),
        ]
        outs = ", ".join(f"%{i}" for i in self.outs)
        return (
            f"{outs} = {op}({', '.join(told)}) on "
            f"{self.devices}{' mirrored' if self.mirrored else ''}  # {self.name}"
        )


def _argument_text(value: Any) -> str:
    """Format a value identically in every process.

    Functions, which some steps have as arguments, are named instead of printed with their address.
    """
    if isinstance(value, (list, tuple)) and not isinstance(value, BlobRef):
        return f"({', '.join(map(_argument_text, value))})"
    return str(getattr(value, "__qualname__", None) or repr(value))


@dataclass(frozen=True)
class Declared:
    """A variable as the first job that names it declares it.

    ``regularizer`` has the factors of |w| and w**2 / 2 in the loss. ``seed`` is that of the
    starting values; None derives it from the name. ``model_name`` is for example "weight" or
    "bias"; older settings have a separate learning rate for "bias".
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    initializer: Any
    regularizer: tuple[float, float]
    trainable: bool
    distribute: Distribute
    devices: Devices
    seed: int | None = None
    model_name: str | None = None


@dataclass(frozen=True)
class Given:
    """An input of a job: an array of this shape, or in the mirrored view one array per device.

    ``split`` is the dim that is split over the devices.
    """

    name: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    mirrored: bool
    split: int | None
    devices: Devices


@dataclass
class Record:
    """A recorded job.

    ``results`` is the function's return value with blobs replaced by `BlobRef`s. ``optimizer`` is
    an `optimizer.Optimizer` if the job trains.
    """

    name: str
    training: bool
    inputs: list[Given] = field(default_factory=list)
    steps: list[RecordedOp] = field(default_factory=list)
    variables: dict[str, Declared] = field(default_factory=dict)
    losses: list[BlobRef] = field(default_factory=list)
    mirrored_of: dict[int, bool] = field(default_factory=dict)
    optimizer: Any = None
    results: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> list[str]:
        """The names of the variables that this job trains."""
        return [
            name
            for name, declared in self.variables.items()
            if declared.trainable and declared.dtype.is_floating_point
        ]

    @property
    def returned(self) -> list[BlobRef]:
        """The values that the function returned, in order."""
        found: Sequence[BlobRef] = object_tensors(self.results, [], BlobRef)
        return list(found)

    def lines(self) -> list[str]:
        """Format the record as text, one list item per line."""
        kind = "train" if self.training else "predict"
        out = [
            (
                f"{kind} job "
                f"{self.name}({', '.join(f'%{g.index}: {g.name} {list(g.shape)} {g.dtype}' for g in self.inputs)})"  # noqa: E501
            )
        ]
        out += [f"variable {d}" for d in self.variables.values()]
        out += [str(step) for step in self.steps]
        return [
            *out,
            (
                f"losses {self.losses}, optimizer {self.optimizer!r}, returns {self.results!r}, "
                f"{self.options!r}"
            ),
        ]

    def digest(self) -> str:
        """Return a hash that is equal for records that do the same."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()[:16]
