"""``flow.distribute``: the sbp of a blob on its placement, and older names of the views.

User code passes these values to ops, layers and variables.
"""

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
    """The sbp of a blob; ``sbp=None`` leaves the choice to the surrounding ops.

    Equal values are interchangeable.
    """

    sbp: Sbp | None

    def __repr__(self) -> str:
        if self.sbp is None:
            return "distribute.auto()"
        return (
            f"distribute.split({self.sbp.dim})" if self.sbp.is_split else "distribute.broadcast()"
        )


def split(axis: int) -> Distribute:
    """Return a `Distribute` that shards dim ``axis`` over the devices.

    Raise JobError if ``axis`` is no integer.
    """
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise JobError(f"distribute.split: axis is a dim of the blob, got {axis!r}")
    return Distribute(sbp_split(axis))


def broadcast() -> Distribute:
    """Return a `Distribute` that replicates a blob on every device."""
    return Distribute(sbp_broadcast)


def auto() -> Distribute:
    """Return a `Distribute` that leaves the sbp to the surrounding ops."""
    return Distribute(None)


def assert_is_valid_distribute(distribute: Any) -> None:
    """Raise JobError unless the argument is ``split(axis)``, ``broadcast()`` or ``auto()``."""
    if not isinstance(distribute, Distribute):
        raise JobError(
            f"a distribute is wanted: flow.distribute.split(axis), broadcast() or auto(); got "
            f"{distribute!r}"
        )


def consistent_strategy() -> ConsistentView:
    """Return ``scope.consistent_view()``; an older name of that function."""
    return consistent_view()


def mirrored_strategy() -> MirroredView:
    """Return ``scope.mirrored_view()``; an older name of that function."""
    return mirrored_view()


def consistent_strategy_enabled() -> bool:
    """Return ``scope.consistent_view_enabled()``; an older name of that function."""
    return consistent_view_enabled()


def mirrored_strategy_enabled() -> bool:
    """Return ``scope.mirrored_view_enabled()``; an older name of that function."""
    return mirrored_view_enabled()
