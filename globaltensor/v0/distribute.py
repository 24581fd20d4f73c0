"""``flow.distribute``: how a blob lies on the devices of its placement; older names of the
views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..sharding.sbp import Sbp
from ..sharding.sbp import broadcast as sbp_broadcast
from ..sharding.sbp import split as sbp_split
from .errors import JobError
from .scope import (
    ConsistentView,
    MirroredView,
    consistent_view,
    consistent_view_enabled,
    mirrored_view,
    mirrored_view_enabled,
)

__all__ = [
    "Distribute", "assert_is_valid_distribute", "auto", "broadcast", "consistent_strategy",
    "consistent_strategy_enabled", "mirrored_strategy",
    "mirrored_strategy_enabled", "split",
]  # fmt: skip


@dataclass(frozen=True)
class Distribute:
    """``sbp``: how it lies; None: as the ops around it choose. Equal ones are interchangeable."""

    sbp: Sbp | None

    def __repr__(self) -> str:
        if self.sbp is None:
            return "distribute.auto()"
        return (
            f"distribute.split({self.sbp.dim})" if self.sbp.is_split else "distribute.broadcast()"
        )


def split(axis: int) -> Distribute:
    """Each device has a piece of dim ``axis``. Raises JobError for what is no dim."""
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise JobError(f"distribute.split: axis is a dim of the blob, got {axis!r}")
    return Distribute(sbp_split(axis))


def broadcast() -> Distribute:
    """Each device has all of it."""
    return Distribute(sbp_broadcast)


def auto() -> Distribute:
    """As the ops around it choose."""
    return Distribute(None)


def assert_is_valid_distribute(distribute: Any) -> None:
    """Raises JobError for what is neither ``distribute.split(axis)`` nor ``broadcast()`` nor
    ``auto()``."""
    if not isinstance(distribute, Distribute):
        raise JobError(
            f"a distribute is wanted: flow.distribute.split(axis), broadcast() or auto(); got "
            f"{distribute!r}"
        )


def consistent_strategy() -> ConsistentView:
    """An older name of ``scope.consistent_view``."""
    return consistent_view()


def mirrored_strategy() -> MirroredView:
    """An older name of ``scope.mirrored_view``."""
    return mirrored_view()


def consistent_strategy_enabled() -> bool:
    """An older name of ``scope.consistent_view_enabled``."""
    return consistent_view_enabled()


def mirrored_strategy_enabled() -> bool:
    """An older name of ``scope.mirrored_view_enabled``."""
    return mirrored_view_enabled()
