"""Torch's private names about torch.distributed: groups, stores, backends, state dicts."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from ..patches import patch

__all__ = [
    "collectives",
    "default_store",
    "new_group",
    "processes_are_on",
    "register_mpi",
    "set_timeout",
    "timeout_of",
    "wrap_collectives",
    "wrap_gathered_states",
    "wrap_staged_states",
]


#: The functions of torch.distributed as they are, without the checks put before those that a
#: program calls. The backends of this library call these.
collectives: Final[Any] = types.SimpleNamespace(**vars(torch.distributed))


def default_store() -> Any:
    """Return the store through which the ranks have met.

    torch's public names return groups only.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def new_group(
    ranks: Sequence[int], rank: int, name: str, backend: str, timeout: timedelta
) -> torch.distributed.ProcessGroup:
    """Create a process group by its members alone, under a name they agree on.

    The public function, `dist.new_group(use_local_synchronization=True)`, puts the number of groups
    a process already has into the name. So members with different histories wait for each other for
    ever (seen with torch 2.13).
    """
    c10d: Any = torch.distributed.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        c10d.Backend(backend),
        default_store(),
        name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group  # type: ignore[no-any-return]


def set_timeout(group: torch.distributed.ProcessGroup | None, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives.

    Before 2.14 torch has no public function for a group that exists already.
    """
    (
        getattr(torch.distributed, "set_timeout", None)
        or torch.distributed.distributed_c10d._set_pg_timeout
    )(timeout, group)


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of a gloo group's collectives: torch has no public function for it."""
    return group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[no-any-return]


class _UnbuiltBackendName(str):
    """The name of the MPI backend in torch, which torch's wheels are built without.

    It equals only the value that `Backend()` accepts for "no name given".
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other is torch.distributed.Backend.UNDEFINED

    def __ne__(self, other: object) -> bool:
        return not self == other


def register_mpi(create: Any) -> None:
    """Make ``create`` build the process groups of the backend "mpi".

    torch compares every backend with `Backend.MPI` and has a path of its own for it. That path has
    no store, no timeout and no groups made by their members alone. It raises an error where torch
    was built without MPI. Registered backends have all of these. So that name is removed from the
    comparison. Where torch has its own MPI, this backend replaces it.
    """
    torch.distributed.Backend.register_backend(
        "mpi", create, extended_api=True, devices=["cpu", "cuda"]
    )
    patch("torch.distributed:Backend.MPI", lambda before: _UnbuiltBackendName("mpi"))


def processes_are_on() -> bool:
    """Return True if this process belongs to a job of several."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def wrap_gathered_states(whole: Any) -> None:
    """Call ``whole(value, ranks)`` for each value of a state dict that is gathered in full.

    torch.distributed.checkpoint.state_dict gathers it (full_state_dict=True) on these ranks, or on
    all where ``ranks`` is empty. That function recognizes by class what to gather, and treats any
    other tensor as a full one (torch 2.2).
    """

    def gathering(iterate: Any) -> Any:
        as_it_is = sys.modules[iterate.__module__]._identity_func

        def run(value: Any, sharded: Any, in_parts: Any, plain: Any, **options: Any) -> Any:
            value = (
                whole(value, options.get("ranks_only", ()))
                if plain is as_it_is and in_parts is not as_it_is
                else value
            )
            return iterate(value, sharded, in_parts, plain, **options)

        return run

    patch("torch.distributed._state_dict_utils:_iterate_state_dict", gathering)


def wrap_staged_states(staged: Any) -> None:
    """Call ``staged(copy, x)`` in place of the copy to the CPU in async_save.

    torch.distributed.checkpoint.async_save copies a tensor by its storage (torch 2.9).
    """

    def offloading(original: Any) -> Any:
        def offload(self: Any, x: Any, memo: Any, **options: Any) -> Any:
            return staged(lambda t: original(self, t, memo, **options), x)

        return offload

    patch(
        "torch.distributed.checkpoint._state_dict_stager:StateDictStager._offload_tensor",
        offloading,
    )


def wrap_collectives(
    names: Sequence[str], wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace these collectives of torch.distributed by ``wrapped(collective)``.

    Names that were imported from torch.distributed before this call keep the originals. Names that
    this torch lacks are left out.
    """
    for name in names:
        original = getattr(torch.distributed, name, None)
        if original is None:
            continue
        replacement = wrapped(original)

        def change(before: Any, original: Any = original, replacement: Any = replacement) -> Any:
            # Another library may have replaced one of the two by a function that calls the other.
            return replacement if before is original else before

        for home in ("torch.distributed", "torch.distributed.distributed_c10d"):
            patch(f"{home}:{name}", change)
