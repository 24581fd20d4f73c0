"""The world: the ranks of this job, the rank of this process, and the communicators between ranks.

The world starts automatically at first use, from the variables that torchrun and other launchers
set. Without these variables this process is a world of one. All collectives and channels of the
library are obtained here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._base import torch_private
from ..errors import DivergenceError, WorldError
from ..sharding.spec import Spec
from .backends.select import missing_requirement, register_backend, select_backend
from .backends.shared_memory import SharedMemoryPeers
from .cluster_env import Detected, detect
from .communicator import Channel, Communicator
from .divergence import differs_at_end, end_record
from .file_rendezvous import rendezvous
from .network import choose_gloo_interface, gloo_hint
from .world_base import World, forget_derived

__all__ = [
    "placeholder",
    "reset_world",
    "running",
    "sent",
    "set_world",
    "timeout",
    "world",
]

_TIMEOUT_SECONDS = 600.0
# Prefix of the store's keys under which ranks record what they have run.
_ENDED = "globaltensor_ended"
_STORE_SECONDS = 5.0
# The rank that serves the store waits so long for ranks that end at about the same time.
_LINGER_SECONDS = 2.0
_LAST_MOMENT = 0.05  # seconds for threads that wait for the GIL at interpreter exit


class Closable(Protocol):
    """A resource that a world closes when it ends."""

    def close(self) -> None: ...


class ProcessWorld(World):
    """One rank as one process, over torch.distributed. A world of one needs no process group."""

    def __init__(self, rank: int, size: int, local_rank: int, nodes: int, owned: bool) -> None:
        super().__init__(rank, size, local_rank, nodes)
        self.compares = size > 1
        self.owned = owned  # if True, closing this world destroys torch's process group
        # The thread that runs collectives during the computation, started at first use.
        self.background: Closable | None = None
        self.neighbours: SharedMemoryPeers | None = None  # ranks of this host, once connected
        self.backend = ""  # as torch spells it: "cpu:gloo,cuda:nccl"
        # Device type -> backend, where it is not gloo.
        self.backends: dict[str, str] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.store: Any = None  # the store of the rendezvous
        self.carrier: dist.ProcessGroup | None = None  # the group of all ranks
        if dist.is_available() and dist.is_initialized():
            _Current.joined = True
            self.carrier = _carrier()
            self.store = torch_private.default_store() if size > 1 else None
            self.backend = str(dist.get_backend_config(self.carrier))
            self.backends = dict(
                pair.split(":", 1) for pair in self.backend.split(",") if not pair.endswith(":gloo")
            )

    @property
    def shares(self) -> bool:
        return "nccl" not in self.backends.values()  # NCCL needs one device per rank

    def patience(self) -> float:
        """Return the seconds that a rank waits for other ranks."""
        return (
            timeout().total_seconds()
            if self.carrier is None
            else torch_private.timeout_of(self.carrier).total_seconds()
        )

    def _connect(self, ranks: tuple[int, ...]) -> Communicator:
        from .backends.shared_memory_comm import SharedMemoryCommunicator

        return SharedMemoryCommunicator(self, ranks)

    def _open(self, source: int, target: int, device: torch.device) -> Channel:
        from .backends.p2p_channels import NativeChannel, SharedChannel

        native = self.backends.get(device.type, "mpi") != "mpi"
        return (NativeChannel if native else SharedChannel)(self, source, target, device)

    def pair(self, source: int, target: int, device: torch.device) -> dist.ProcessGroup:
        """Return a torch group for messages in one direction between two ranks.

        The group uses the device's own backend. Raise WorldError if there is no process group any
        more.
        """
        if self.carrier is None:
            raise WorldError(
                f"rank {self.rank} of {self.size} has no process group (any more): it was "
                f"destroyed, or the world was closed"
            )
        name = f"globaltensor_{device.type}_from_{source}_to_{target}"
        return torch_private.new_group(
            sorted((source, target)), self.rank, name, self.backends[device.type], timeout()
        )

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the torch group of these ranks, which must be sorted.

        Only its members create the group, at first use. Raise WorldError if there is no process
        group any more.
        """
        found = self._groups.get(ranks)
        if found is None:
            if self.carrier is None:
                raise WorldError(
                    f"rank {self.rank} of {self.size} has no process group (any more): it was "
                    f"destroyed, or the world was closed"
                )
            name = "globaltensor_" + "_".join(map(str, ranks))
            found = (
                self.carrier
                if len(ranks) == self.size
                else torch_private.new_group(ranks, self.rank, name, self.backend, timeout())
            )
            self._groups[ranks] = found
        return found

    def check_end(self, failed: bool = False) -> None:
        """Compare what this rank has run with the ranks that have ended before it.

        The call is for the end of this rank's program, so the last rank to end compares all of
        them. A rank does not wait for others, with one exception. The rank that serves the store
        waits for a moment for their records. Raise DivergenceError if ranks differ.
        """
        if not self.compares or self.store is None or not self.histories:
            return
        record = end_record(self.histories, failed)
        records = {self.rank: record}
        if self.neighbours is not None:
            records |= self.neighbours.last_words(record)
        if set(records) < set(range(self.size)):
            with contextlib.suppress(RuntimeError):  # the rank that served the store has ended
                records |= self._records(record)
        if text := differs_at_end(self.rank, records):
            raise DivergenceError(text)

    def _records(self, record: bytes) -> dict[int, bytes]:
        """Write this rank's record to the store; return the records that the store has."""
        self.store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self.store.set(f"{_ENDED}/{self.rank}", record)
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        until = time.monotonic() + (_LINGER_SECONDS if serves else 0.0)
        while True:
            there = [
                r for r in range(self.size) if r == self.rank or self.store.check([f"{_ENDED}/{r}"])
            ]
            if len(there) == self.size or time.monotonic() > until:
                return {r: self.store.get(f"{_ENDED}/{r}") for r in there}
            time.sleep(0.01)

    def close(self) -> None:
        super().close()
        self.store = None
        self._groups.clear()
        if self.background is not None:
            self.background.close()
            self.background = None
        if self.neighbours is not None:
            self.neighbours.close()
            self.neighbours = None
        # A remaining reference would keep gloo's threads alive until interpreter exit. A thread
        # that then asks for the GIL aborts the process.
        self.carrier = None
        if self.owned and dist.is_initialized():
            self.owned = False
            dist.destroy_process_group()


def _carrier() -> dist.ProcessGroup:
    """Return the group of all ranks, or a second one if the user's group cannot move CPU tensors.

    The latter is the case with NCCL alone. All ranks call this function at first use.
    """
    group = dist.group.WORLD
    if "cpu:" not in str(dist.get_backend_config(group)):
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert group is not None
    return group


class _Current(threading.local):
    # The class attribute is the world of the process, so that threads started by autograd see it
    # too. A simulated rank sets the attribute of its own thread.
    world: World | None = None
    joined = False  # True once this process has been in a group of several ranks


_current = _Current()
_starting = threading.Lock()


def world() -> World:
    """Return the current world, and start it from the environment at first use.

    Raise WorldError if the environment variables are incomplete.
    """
    found = _current.world
    if found is None:
        with _starting:
            found = _Current.world
            if found is None:
                found = _Current.world = _start()
                atexit.register(_leave)
    return found


def sent(value: torch.Tensor, source: int) -> torch.Tensor:
    """Return the value of rank ``source`` on all ranks. Collective."""
    here = world()
    return here.comm(tuple(range(here.size))).broadcast(value, source)


def placeholder(spec: Spec) -> torch.Tensor:
    """Return the empty tensor that a rank outside the placement holds.

    It has the spec's dtype and the placement's device type.
    """
    return torch.empty(0, dtype=spec.dtype, device=world().outside(spec.placement.type))


def running() -> World | None:
    """Return the current world if it has started, else None. This function never starts a world."""
    return _current.world


def set_world(value: World | None) -> None:
    """Make ``value`` the world of this thread only. None restores the world of the process."""
    if value is not None:
        _current.world = value
    elif "world" in vars(_current):
        del _current.world


def reset_world() -> None:
    """Close the world of the process; the next use starts a new one.

    The process group is destroyed if the world had created it.
    """
    found, _Current.world = _Current.world, None
    if found is not None:
        found.close()
        forget_derived(found)


def _leave() -> None:
    """Close the world at interpreter exit, and let the threads of remaining process groups finish.

    The program may still hold a group; torch's DDP holds one even after it was destroyed. The
    threads of such a group take the GIL to release a collective's tensors. A thread that asks for
    the GIL once the interpreter is ending aborts the process.
    """
    joined = _Current.joined or (dist.is_available() and dist.is_initialized())
    found, diverged = _Current.world, ""
    if isinstance(found, ProcessWorld):
        try:
            found.check_end(failed=hasattr(sys, "last_value"))
        except DivergenceError as error:
            diverged = f"{type(error).__name__}: {error}\n"
    reset_world()
    if joined:
        time.sleep(_LAST_MOMENT)
    if diverged:  # an exception raised here would leave the exit code at 0
        sys.stdout.flush()
        sys.stderr.write(diverged)
        sys.stderr.flush()
        os._exit(1)


def timeout() -> timedelta:
    """Return how long a rank waits for the other ranks (GLOBALTENSOR_TIMEOUT, 600 s by default)."""
    return timedelta(seconds=float(os.environ.get("GLOBALTENSOR_TIMEOUT", _TIMEOUT_SECONDS)))


def _start() -> World:
    if not dist.is_available():
        return ProcessWorld(0, 1, 0, 1, owned=False)
    place = detect(os.environ)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if place is None or (place.rank, place.world_size) != (rank, size):
            # The group is the user's own. The number of nodes is unknown, so one is assumed.
            return ProcessWorld(rank, size, rank, 1, owned=False)
        return ProcessWorld(rank, size, place.local_rank, place.nodes, owned=False)
    if place is None:
        return ProcessWorld(0, 1, 0, 1, owned=False)
    if place.world_size > 1:
        _join(place)
    found = ProcessWorld(
        place.rank, place.world_size, place.local_rank, place.nodes, owned=place.world_size > 1
    )
    _take_device(found)
    return found


def _take_device(found: ProcessWorld) -> None:
    """Make the rank's own GPU the current device, unless the program has chosen one.

    This is for several GPUs that NCCL serves. ``.cuda()`` then uses that GPU.
    """
    if (
        "nccl" in found.backends.values()
        and 0 < found.local_rank < torch.cuda.device_count()
        and torch.cuda.current_device() == 0
    ):
        torch.cuda.set_device(found.local_rank)


def meeting(place: Detected, timeout: timedelta) -> dict[str, Any]:
    """Return the arguments by which torch's ``init_process_group`` finds the other ranks.

    They name torchrun's own store, a port for launchers that torch does not know, or a store found
    by the job's name. The last one raises WorldError if the ranks do not meet.
    """
    who: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size}
    if {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return {"init_method": "env://"} | who
    if place.port or place.world_size == 1:
        return {"init_method": f"tcp://{place.addr}:{place.port}"} | who
    return {"store": rendezvous(place, timeout)} | who


def _join(place: Detected) -> None:
    backend = select_backend(place=place)
    register_backend(backend)
    choose_gloo_interface(place.addr, place.nodes)
    where = meeting(place, timeout())
    try:
        dist.init_process_group(backend, **where, timeout=timeout())
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {place.rank} of {place.world_size} (started by {place.source}) could not join "
            f"the other ranks at {place.meeting}: {error}; "
            + (
                missing_requirement(backend)
                or gloo_hint(error, place.addr)
                or "are all ranks started, and is the port free and reachable?"
            )
        ) from error
