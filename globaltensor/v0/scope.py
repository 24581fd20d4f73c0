"""``flow.scope``: the devices, view and namespace of the ops in a ``with`` block.

User code enters the scopes inside job functions; the recorder reads the current one for each op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any

from .errors import JobError
from .session.device_layout import Devices

__all__ = [
    "ConsistentView", "MirroredView", "PlacementScope", "Scope", "View", "consistent_view",
    "consistent_view_enabled", "current_scope", "default_view",
    "mirrored_view", "mirrored_view_enabled", "namespace", "placement",
]  # fmt: skip


@dataclass(frozen=True)
class Scope:
    """The current devices, view and namespaces.

    ``devices`` and ``mirrored`` are None where the job's defaults apply. ``names`` are the
    enclosing namespaces, the outermost first.
    """

    devices: Devices | None = None
    mirrored: bool | None = None
    names: tuple[str, ...] = ()

    def named(self, name: str) -> str:
        """Return ``name`` prefixed with the namespaces."""
        return "-".join((*self.names, name))


_current: ContextVar[Scope] = ContextVar("globaltensor.v0.scope", default=Scope())  # noqa: B039 - immutable
# True if the job being recorded has the mirrored view by default.
_default_view: ContextVar[bool] = ContextVar("globaltensor.v0.default_view", default=False)


def current_scope() -> Scope:
    """Return the scope of the next op."""
    return _current.get()


class _Change(contextlib.AbstractContextManager[Any]):
    """A scope to enter with ``with``, any number of times."""

    def __init__(self, **change: Any) -> None:
        self.change = change
        self._tokens: list[Token[Scope]] = []

    def __enter__(self) -> Any:
        self._tokens.append(_current.set(replace(_current.get(), **self.change)))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens.pop())


class PlacementScope(_Change):
    """The scope that `placement` returns."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices=devices)
        self.devices = devices


class View(_Change):
    """The scope that `consistent_view` and `mirrored_view` return."""

    mirrored = False

    def __init__(self) -> None:
        super().__init__(mirrored=self.mirrored)


class ConsistentView(View):
    """The view of one logical device: a job sees global batches."""


class MirroredView(View):
    """The view of each device: every device has its own batch and its own results.

    This is data parallelism by hand.
    """

    mirrored = True


def placement(device_tag: str, machine_device_ids: str | Sequence[str]) -> PlacementScope:
    """Run the ops in this block on these devices: ``with flow.scope.placement("gpu", "0:0-3")``.

    Raise JobError for text that names no devices.
    """
    return PlacementScope(Devices.parse(device_tag, machine_device_ids))


def consistent_view() -> ConsistentView:
    """Give the ops in this block the view of one logical device (the default).

    As a job's ``default_logical_view``, it applies to the whole job.
    """
    return ConsistentView()


def mirrored_view() -> MirroredView:
    """Run the ops in this block on each device's own batch.

    Gradients are averaged over the devices. As a job's ``default_logical_view``, it applies to the
    whole job.
    """
    return MirroredView()


def namespace(name: str) -> contextlib.AbstractContextManager[Any]:
    """Prefix the names of variables and ops in this block with ``name-``.

    Raise JobError if ``name`` is no string or empty.
    """
    if not isinstance(name, str) or not name:
        raise JobError(f"scope.namespace: a name is wanted, got {name!r}")

    @contextlib.contextmanager
    def inside() -> Any:
        token = _current.set(replace(_current.get(), names=(*_current.get().names, name)))
        try:
            yield
        finally:
            _current.reset(token)

    return inside()


@contextlib.contextmanager
def default_view(mirrored: bool) -> Iterator[None]:
    """Set the view that applies in this block where no scope names a view."""
    token = _default_view.set(mirrored)
    try:
        yield
    finally:
        _default_view.reset(token)


def mirrored_view_enabled() -> bool:
    """Return True if ops get the mirrored view here, in a job or outside."""
    mirrored = _current.get().mirrored
    return _default_view.get() if mirrored is None else mirrored


def consistent_view_enabled() -> bool:
    """Return True if ops get the consistent view here, in a job or outside."""
    return not mirrored_view_enabled()
