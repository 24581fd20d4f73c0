"""``flow.scope``: which devices, which view and which namespace the ops in a ``with`` block get."""

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
    """What holds here. ``devices``, ``mirrored``: None where the job's defaults hold; ``names``:
    the namespaces around."""

    devices: Devices | None = None
    mirrored: bool | None = None
    names: tuple[str, ...] = ()

    def named(self, name: str) -> str:
        """A name in this namespace."""
        return "-".join((*self.names, name))


_current: ContextVar[Scope] = ContextVar("globaltensor.v0.scope", default=Scope())  # noqa: B039 - immutable
_default_view: ContextVar[bool] = ContextVar(
    "globaltensor.v0.default_view", default=False
)  # of the job that is being recorded: is it the mirrored one?


def current_scope() -> Scope:
    """The scope that the next op gets."""
    return _current.get()


class _Change(contextlib.AbstractContextManager[Any]):
    """A scope to enter, again and again if wanted."""

    def __init__(self, **change: Any) -> None:
        self.change = change
        self._tokens: list[Token[Scope]] = []

    def __enter__(self) -> Any:
        self._tokens.append(_current.set(replace(_current.get(), **self.change)))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens.pop())


class PlacementScope(_Change):
    """What `placement` returns."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices=devices)
        self.devices = devices


class View(_Change):
    """What `consistent_view` and `mirrored_view` return."""

    mirrored = False

    def __init__(self) -> None:
        super().__init__(mirrored=self.mirrored)


class ConsistentView(View):
    """One logical device: a job sees whole batches."""


class MirroredView(View):
    """Data parallelism by hand: every device has a batch and results of its own."""

    mirrored = True


def placement(device_tag: str, machine_device_ids: str | Sequence[str]) -> PlacementScope:
    """The ops in this block run on these devices: ``with flow.scope.placement("gpu", "0:0-3")``.
    Raises JobError for text that names no devices."""
    return PlacementScope(Devices.parse(device_tag, machine_device_ids))


def consistent_view() -> ConsistentView:
    """The ops in this block, or a job with this as its ``default_logical_view``, see one logical
    device (the default)."""
    return ConsistentView()


def mirrored_view() -> MirroredView:
    """The ops in this block, or a job with this as its ``default_logical_view``, run on each
    device's own batch; gradients are averaged over the devices."""
    return MirroredView()


def namespace(name: str) -> contextlib.AbstractContextManager[Any]:
    """Names of variables and ops in this block begin with ``name-``. Raises JobError for what is no
    name."""
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
    """What holds in this block where no scope names a view."""
    token = _default_view.set(mirrored)
    try:
        yield
    finally:
        _default_view.reset(token)


def mirrored_view_enabled() -> bool:
    """Whether ops get the mirrored view here, in a job or outside."""
    mirrored = _current.get().mirrored
    return _default_view.get() if mirrored is None else mirrored


def consistent_view_enabled() -> bool:
    """Whether ops get the consistent view here, in a job or outside."""
    return not mirrored_view_enabled()
