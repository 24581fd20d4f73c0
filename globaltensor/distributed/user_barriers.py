"""Barriers of torch.distributed that a program calls, made known to the ranks that wait meanwhile.

A rank that runs an operation on global tensors alone, before a barrier of all ranks, waits for the
others, and they wait for it. The ranks of one host that have exchanged data tell each other that
they are in a barrier, so that this ends with an error after a few seconds. At the first exchange,
and between hosts, the rank waits until its timeout.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from .._base import torch_private
from .world import ProcessWorld, running

__all__ = ["install", "known_to_peers"]


def known_to_peers(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """Return a barrier during which the ranks of its group know that this rank waits for them."""

    @functools.wraps(barrier)
    def call(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        with waiting(group):
            return barrier(group, *args, **kwargs)

    return call


def waiting(group: Any) -> AbstractContextManager[None]:
    """Return a block in which the ranks of ``group`` know that this rank waits for them.

    A barrier of another thread does not keep the main thread from sending what they wait for."""
    this_world = running()
    if (
        not isinstance(this_world, ProcessWorld)
        or this_world.neighbours is None
        or threading.current_thread() is not threading.main_thread()
        or not dist.is_initialized()
        or dist.get_rank(group) < 0
    ):
        return contextlib.nullcontext()
    members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    return this_world.neighbours.in_barrier([r for r in members if r != this_world.rank])


def install() -> None:
    """Make the barriers of torch.distributed known to the other ranks of the host."""
    torch_private.wrap_barriers(known_to_peers)
