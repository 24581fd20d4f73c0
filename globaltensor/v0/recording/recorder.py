"""The recorder: the tape of the job that is being recorded.

`JobFunction.recorded` creates a tape; ops add steps to it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from ..errors import JobError
from ..scope import Scope, current_scope, default_view, mirrored_view_enabled
from ..session.device_layout import Devices, Layout
from .record import Declared, Given, Record, RecordedOp

__all__ = ["Tape", "taping"]

_current: ContextVar[Tape | None] = ContextVar("globaltensor.v0.recording.recorder", default=None)


def taping() -> Tape | None:
    """Return the tape of the job that is being recorded here, or None outside of job functions."""
    return _current.get()


class Tape:
    """A recorder of one job.

    ``devices``, ``mirrored`` and ``dtype`` are the defaults of ops where no scope says otherwise.
    """

    def __init__(
        self, record: Record, layout: Layout, devices: Devices, mirrored: bool, dtype: Any
    ) -> None:
        self.record, self.layout, self.devices, self.mirrored, self.dtype = (
            record,
            layout,
            layout.check(devices),
            mirrored,
            dtype,
        )
        self.blobs_of: dict[str, Any] = {}  # variables by name
        self.loss_shape: tuple[int, ...] = ()
        self._values = itertools.count()
        self._used: dict[str, int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record all ops on blobs in this block on this tape."""
        token = _current.set(self)
        try:
            with default_view(self.mirrored):
                yield
        finally:
            _current.reset(token)

    def scoped_view(self) -> bool:
        """Return True if the next op gets the mirrored view."""
        return mirrored_view_enabled()

    def scoped_devices(self) -> Devices:
        """Return the devices of the next op. Raise JobError if the session does not have them."""
        devices = current_scope().devices
        return self.devices if devices is None else self.layout.check(devices)

    def input(self, job_input: Given, blob: Any) -> Any:
        """Create the blob of an input; ``blob`` is the class `Blob`."""
        self.record.mirrored_of[job_input.index] = job_input.mirrored
        step = RecordedOp(
            "input",
            (),
            {},
            (job_input.index,),
            job_input.devices,
            job_input.mirrored,
            1,
            job_input.name,
        )
        return blob(self, job_input.index, job_input.shape, job_input.dtype, step)

    def number(self) -> int:
        return next(self._values)

    def seen(self, blob: Any) -> Any:
        """Return the blob. Raise JobError if it belongs to another job."""
        if blob.tape is not self:
            raise JobError(
                f"{blob!r} is of job {blob.tape.record.name}, but is used in {self.record.name}: "
                f"jobs share variables, by name, not blobs"
            )
        return blob

    def add(
        self,
        op: Any,
        args: Any,
        kwargs: Any,
        outs: int,
        times: int,
        name: str | None,
        devices: Devices | None = None,
        mirrored: bool | None = None,
    ) -> RecordedOp:
        """Record a step on the values ``args``, with ``outs`` results.

        Raise JobError for a step in the mirrored view that is not placed on all devices.
        """
        mirrored = self.scoped_view() if mirrored is None else mirrored
        devices = devices or self.scoped_devices()
        if mirrored and len(devices.ids) != self.layout.size:
            told = (
                f"the mirrored view runs on all devices, but placement({devices}) names "
                f"{len(devices.ids)} of {self.layout.size}"
            )
            raise JobError(f"{told}: use the consistent view for ops on some of them")
        numbers = tuple(self.number() for _ in range(outs))
        step = RecordedOp(op, args, kwargs, numbers, devices, mirrored, times, self._name(op, name))
        self.record.steps.append(step)
        self.record.mirrored_of.update(dict.fromkeys(numbers, mirrored))
        return step

    def declare(self, declared: Declared) -> None:
        self.record.variables[declared.name] = declared

    def _name(self, op: Any, name: str | None) -> str:
        scope: Scope = current_scope()
        base = scope.named(name or (op if isinstance(op, str) else getattr(op, "__name__", "op")))
        n = self._used[base] = self._used.get(base, -1) + 1
        return f"{base}_{n}" if n else base
