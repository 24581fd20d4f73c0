"""Process groups with torch's own signatures, for a world that starts automatically.

User code calls them through ``flow.distributed``. The world and the process group may be created in
either order: the second one adopts the first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from .._base import torch_private
from ..errors import WorldError
from .backends.select import backend_names, missing_requirement, register_backend, select_backend
from .cluster_env import Detected, detect
from .network import choose_gloo_interface, gloo_hint, machine_name
from .world import ProcessWorld, await_all_ranks, meeting, reset_world, running, world
from .world import timeout as default_timeout

__all__ = [
    "destroy_process_group", "get_backend", "get_local_rank", "get_rank", "get_world_size",
    "init_process_group", "is_available", "is_initialized", "new_group",
    "start",
]  # fmt: skip

_HashStore: Any = vars(dist).get("HashStore")


def start() -> ProcessWorld:
    """Return the world with its process group, and start both if needed.

    So a script does not need ``init_process_group``. Raise WorldError on simulated ranks.
    """
    this_world = world()
    if not isinstance(this_world, ProcessWorld):
        raise WorldError(
            "simulated ranks have no process group: call flow.distributed from processes (the "
            "launcher, flow.run), or use global tensors here"
        )
    if not dist.is_initialized() or (this_world.size == 1 < dist.get_world_size()):
        reset_world()  # the group was created or destroyed without the world
        this_world = world()
        assert isinstance(this_world, ProcessWorld)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=_HashStore(), rank=0, world_size=1)
            this_world.owned, this_world.backend = True, "gloo"
    return this_world


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    **more: Any,
) -> None:
    """Initialise the process group as torch does, with these differences.

    - The call is optional.
    - ``backend`` may also be ``"auto"``, which is the same as None, or ``"mpi"``.
    - Rank and world size may come from any launcher that ``flow.env`` knows. Without a launcher
      this process is a world of one.
    - The default of ``timeout`` is the variable GLOBALTENSOR_TIMEOUT (seconds).

    If the world has already started automatically, the call must agree with it. Raise WorldError if
    the call does not, or if the other ranks cannot be joined.
    """
    this_world = running()
    if (
        isinstance(this_world, ProcessWorld)
        and this_world.owned
        and dist.is_initialized()
        and (this_world.size > 1 or max(world_size, rank + 1) <= 1)
    ):
        return _agree(this_world, backend, world_size, rank, timeout)
    if not dist.is_initialized() or (this_world is not None and this_world.size == 1):
        reset_world()
    place = detect(os.environ)
    chosen = select_backend(backend, place)
    register_backend(chosen)
    waits = timeout or default_timeout()
    where: dict[str, Any] = {"rank": rank, "world_size": world_size} | _rendezvous_arguments(
        init_method, store, rank, world_size, place, waits
    )
    master = urlsplit(init_method or "").hostname or (place.addr if place else "localhost")
    choose_gloo_interface(master, place.nodes if place else 1)
    options = {
        "timeout": waits,
        "group_name": group_name,
        "pg_options": pg_options,
        "device_id": device_id,
    } | more
    try:
        with _serve_store(where.get("init_method")):
            dist.init_process_group(chosen, **where, **options)
            await_all_ranks()
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and not missing_requirement(chosen):
            raise  # torch's own error about its arguments
        where_text = ", ".join(
            f"{name} {value}" for name, value in where.items() if name != "store"
        )
        mend = (
            missing_requirement(chosen)
            or gloo_hint(error, master)
            or "are all ranks started, and can they reach each other?"
        )
        raise WorldError(
            f"init_process_group({chosen!r}) with {where_text} failed: {error}; {mend}"
        ) from error
    started = world()
    if isinstance(started, ProcessWorld):
        started.owned = True  # so that it is destroyed at interpreter exit
        if started.size > 1 and (
            place is None or (place.rank, place.world_size) != (started.rank, started.size)
        ):
            _find_nodes(started)
    return None


@contextlib.contextmanager
def _serve_store(url: str | None) -> Iterator[None]:
    """Let rank 0 serve a store at ``url`` unless the launcher already serves that address.

    Under a launcher torch assumes that every address is served already. This holds only for the
    launcher's own address.
    """
    asked, variable = urlsplit(url or ""), "TORCHELASTIC_USE_AGENT_STORE"
    before = os.environ.get(variable)
    elsewhere = asked.scheme == "tcp" and str(asked.port) != os.environ.get("MASTER_PORT")
    if before is None or not elsewhere:
        yield
        return
    del os.environ[variable]
    try:
        yield
    finally:
        os.environ[variable] = before


def _find_nodes(this_world: ProcessWorld) -> None:
    """Exchange host names to find which ranks share a machine. No launcher has provided that."""
    hosts = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        machine_name(), "init_process_group"
    )
    this_world.local_rank, this_world.node_size = (
        hosts[: this_world.rank].count(hosts[this_world.rank]),
        len(set(hosts)),
    )


def _rendezvous_arguments(
    init_method: str | None,
    store: Any,
    rank: int,
    size: int,
    place: Detected | None,
    timeout: timedelta,
) -> dict[str, Any]:
    """Return torch's arguments for finding the other ranks, from the call and the environment."""
    if store is not None:
        return {"store": store}
    who = (
        {}
        if place is None or rank >= 0 or size >= 0
        else {"rank": place.rank, "world_size": place.world_size}
    )
    if init_method not in (None, "env://"):
        return {"init_method": init_method} | ({} if "rank=" in str(init_method) else who)
    if place is None and rank < 0 and size < 0:
        return {"store": _HashStore(), "rank": 0, "world_size": 1}
    if place is not None and rank in (-1, place.rank) and size in (-1, place.world_size):
        return meeting(place, timeout)
    if size == 1:
        return {"store": _HashStore(), "rank": max(rank, 0), "world_size": 1}
    return {"init_method": "env://"}


def _agree(
    this_world: ProcessWorld, backend: str | None, size: int, rank: int, timeout: timedelta | None
) -> None:
    asked = [
        f"{what} {value}"
        for what, value, have in (
            ("world_size", size, this_world.size),
            ("rank", rank, this_world.rank),
        )
        if value not in (-1, have)
    ]
    if backend not in (None, "auto") and not backend_names(
        select_backend(backend)
    ) <= backend_names(this_world.backend):
        asked.append(f"backend {backend!r}")
    if asked:
        raise WorldError(
            f"init_process_group asks for {', '.join(asked)}, but this process already is rank "
            f"{this_world.rank} of {this_world.size} with backend {this_world.backend!r}, "
            "since the first call that needed its rank or a placement: call init_process_group "
            "before such a call, or call destroy_process_group() first"
        )
    if timeout is not None and "mpi" not in backend_names(this_world.backend):
        torch_private.set_timeout(dist.group.WORLD, timeout)


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroy a process group, as torch does.

    Without ``group`` the world ends too, and the next call that needs ranks starts a new one.
    """
    if group is not None and group is not dist.group.WORLD:
        dist.destroy_process_group(group)
        return
    reset_world()
    if dist.is_initialized():
        dist.destroy_process_group()


def new_group(
    ranks: Any = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    **options: Any,
) -> Any:
    """Create a process group, as torch does. ``backend`` may also be ``"mpi"``."""
    start()
    if backend is not None:
        backend = select_backend(backend)
        register_backend(backend)
    return dist.new_group(
        ranks,
        timeout,
        backend,
        pg_options,
        use_local_synchronization,
        group_desc,
        device_id,
        **options,
    )


def is_available() -> bool:
    """Return True if this build of torch can form process groups."""
    return dist.is_available()


def is_initialized() -> bool:
    """Return True if there is a process group.

    It was created by ``init_process_group``, or automatically at the first use of the world.
    """
    return dist.is_available() and dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in the group, or -1 outside it. None is the group of all ranks."""
    return world().rank if group is None else dist.get_rank(group)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks in the group, or -1 outside it. None is the group of all ranks."""
    return world().size if group is None else dist.get_world_size(group)


def get_local_rank() -> int:
    """Return this process's rank among those of its node."""
    return world().local_rank


def get_backend(group: dist.ProcessGroup | None = None) -> str:
    """Return the backend of the group, spelled as torch does."""
    start()
    return str(dist.get_backend(group))
