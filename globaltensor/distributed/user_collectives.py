"""Functions of torch.distributed that a program calls: what is checked before and during them.

They refuse to add up values that every rank holds in full (`replicated_results`). And the watchdog
of the rank (`watchdog`) knows when the program is in one: a rank that runs an operation on global
tensors alone, before a barrier of all ranks, waits for the others, and they wait for it.
The start and the end of the process group are wrapped too (`agreeing`, `leaving`).
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, Final

import torch.distributed

from .._base import torch_private
from .._base.patches import patch
from .._base.user_code import user_line
from ..errors import GlobalTensorError, WorldError
from .cluster_env import detect
from .replicated_results import ADDING, noted, refuse_replicated
from .watchdog import CONNECTION_CLOSED, current
from .world import refuse_child_of_rank, running, unmark_process

__all__ = ["WATCHED", "install", "watched"]

#: The collectives that the watchdog knows. Some are newer than torch 2.11.
WATCHED: Final = (
    "barrier", "monitored_barrier", "new_group", "all_reduce", "all_gather",
    "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "broadcast", "reduce", "gather", "gather_into_tensor", "gather_single",
    "scatter", "all_to_all", "all_to_all_single",
)  # fmt: skip
_thread: Final = threading.get_ident


def watched(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective with what is checked before and during it.

    A small one takes 10 us, so nothing is read from the arguments unless there is a reason. Where
    one collective calls another one, the watchdog knows the outer one.
    """
    name = collective.__name__
    reads = ADDING.get(name, "")
    parameters = inspect.signature(collective).parameters
    usual = {n: p.default for n, p in parameters.items()}

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        if noted and reads:
            given = usual | dict(zip(parameters, args, strict=False)) | kwargs
            refuse_replicated(name, given.get(reads), given.get("op"), given.get("group"))
        thread, outer = _thread(), current.call
        inside = outer is not None and outer[0] == thread
        if not inside:
            current.number += 1
            current.call = thread, name, args, kwargs
        try:
            return collective(*args, **kwargs)
        except RuntimeError as error:
            if (lost := _lost_rank(name, error)) is None:
                raise
            raise lost from None
        finally:
            if not inside:
                current.call = None

    return call


def _lost_rank(name: str, error: RuntimeError) -> WorldError | None:
    """Return the error for a collective whose other rank has ended, or None for other errors."""
    this_world = running()
    if (
        this_world is None
        or isinstance(error, GlobalTensorError)
        or not CONNECTION_CLOSED.search(str(error))
    ):
        return None
    return WorldError(
        f"{user_line()}\na rank has ended, or the connection to it is lost, while rank "
        f"{this_world.rank} waits for it in torch.distributed.{name}. Its own output shows the "
        f"cause"
    )


def agreeing(start: Callable[..., None]) -> Callable[..., None]:
    """Return torch's ``init_process_group`` as a script may call it after this library's start.

    `flow.placement.all` starts the process group. A call after it, such as a script for DDP has,
    then only has to ask for the same. (torch itself refuses a second call.) Raises WorldError in a
    process that a rank has started: there the call would wait for the others until the timeout.
    """
    parameters = inspect.signature(start).parameters

    @functools.wraps(start)
    def call(*args: Any, **kwargs: Any) -> None:
        if torch.distributed.is_initialized():
            if getattr(running(), "owned", False):
                from .process_groups import init_process_group

                return init_process_group(*args, **kwargs)
        else:
            given = dict(zip(parameters, args, strict=False)) | kwargs
            by_variables = given.get("init_method") in (None, "env://") and not given.get("store")
            place = detect(os.environ) if by_variables else None
            if place is not None and place.world_size > 1:
                refuse_child_of_rank(place)
        return start(*args, **kwargs)

    return call


def leaving(end: Callable[..., None]) -> Callable[..., None]:
    """Return torch's ``destroy_process_group``: the processes that follow may be ranks."""

    @functools.wraps(end)
    def call(*args: Any, **kwargs: Any) -> None:
        end(*args, **kwargs)
        if not torch.distributed.is_initialized():
            unmark_process()

    return call


def install() -> None:
    """Put these checks before the functions of torch.distributed."""
    torch_private.wrap_collectives([*WATCHED], watched)
    for home in ("torch.distributed", "torch.distributed.distributed_c10d"):
        patch(f"{home}:init_process_group", agreeing)
        patch(f"{home}:destroy_process_group", leaving)
