"""Collectives of torch.distributed that a program calls, made known to the watchdog of the rank.

A rank that runs an operation on global tensors alone, before a barrier of all ranks, waits for the
others, and they wait for it. `watchdog` finds this out, so that it ends with an error after a few
seconds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from .._base import torch_private
from .._base.user_code import user_line
from ..errors import GlobalTensorError, WorldError
from .watchdog import CONNECTION_CLOSED
from .world import ProcessWorld, running

__all__ = ["install", "watched"]

#: Collectives that end on all ranks at about the same time. Others, such as a broadcast, may keep
#: some ranks long after they have ended on one.
_SYMMETRIC: Final = (
    "barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor",
    "reduce_scatter", "reduce_scatter_tensor",
)  # fmt: skip


def watched(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective during which the ranks of its group can know that this rank waits."""
    name = collective.__name__
    at = list(inspect.signature(collective).parameters).index("group")

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        this_world = running()
        if not isinstance(this_world, ProcessWorld) or this_world.watchdog is None:
            return collective(*args, **kwargs)
        group = args[at] if len(args) > at else kwargs.get("group")
        try:
            with this_world.watchdog.user_call(name, group):
                return collective(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, GlobalTensorError) or not CONNECTION_CLOSED.search(str(error)):
                raise
            raise WorldError(
                f"{user_line()}\na rank has ended, or the connection to it is lost, while rank "
                f"{this_world.rank} waits for it in torch.distributed.{name}. Its own output shows "
                f"the cause"
            ) from None

    return call


def install() -> None:
    """Make the watchdog know when a program is in a collective of torch.distributed."""
    torch_private.wrap_collectives(_SYMMETRIC, watched)
