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
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._base import torch_private
from .._base.user_code import user_line
from ..errors import DivergenceError, WorldError
from ..sharding.spec import Spec
from .backends.select import missing_requirement, register_backend, select_backend
from .backends.shared_memory import SharedMemoryPeers
from .cluster_env import Detected, detect
from .communicator import Channel, Communicator
from .divergence import collective_of, differs_at_end, end_record, spelled
from .file_rendezvous import rendezvous
from .network import choose_gloo_interface, gloo_hint
from .store_liveness import store_answers
from .watchdog import Watchdog
from .world_base import World, forget_derived

__all__ = [
    "await_all_ranks",
    "placeholder",
    "refuse_child_of_rank",
    "reset_world",
    "running",
    "sent",
    "set_world",
    "timeout",
    "unmark_process",
    "world",
]

_TIMEOUT_SECONDS = 600.0
# Prefix of the store's keys under which ranks record what they have run.
_ENDED = "globaltensor_ended"
_STORE_SECONDS = 5.0
# The rank that serves the store waits so long for ranks that end at about the same time.
_LINGER_SECONDS = 2.0
_LAST_MOMENT = 0.05  # seconds for threads that wait for the GIL at interpreter exit
# Which process is which rank: a variable that the processes it starts inherit.
_RANK_PROCESS = "_GLOBALTENSOR_RANK_PROCESS"


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
        self.watchdog: Watchdog | None = None  # of a rank among several
        self.process_group: dist.ProcessGroup | None = None  # of all ranks
        self.forked = False  # True in a child that os.fork has made of this rank
        if dist.is_available() and dist.is_initialized():
            _Current.joined = True
            self.process_group = _group_of_all_ranks()
            self.store = torch_private.default_store() if size > 1 else None
            if self.store is not None:
                self.watchdog = Watchdog(rank, self.store, self._operation)
            self.backend = str(dist.get_backend_config(self.process_group))
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
            if self.process_group is None
            else torch_private.timeout_of(self.process_group).total_seconds()
        )

    def _operation(self) -> tuple[str, int]:
        """Return the operation that this rank is in, as errors show it, and its bytes."""
        return collective_of(self.kind, spelled(self.purpose)), self.nbytes

    def leave_to_parent(self) -> None:
        """Give up all connections, in a child that os.fork has made: the parent is the rank."""
        self.forked = True
        self._comms.clear()
        # Not closed: the connections belong to the parent.
        self.store = self.neighbours = self.process_group = self.watchdog = None
        self.owned = False

    def _connect(self, ranks: tuple[int, ...]) -> Communicator:
        if self.forked:
            raise WorldError(
                f"{user_line()}\nthis process is a child that os.fork made of rank {self.rank}. "
                f"Only the rank itself can exchange data with other ranks. Give the child values "
                f"(x.numpy() before the fork), or run this line in the rank"
            )
        from .backends.shared_memory_comm import SharedMemoryCommunicator

        return SharedMemoryCommunicator(self, ranks)

    def _open(self, source: int, target: int, device: torch.device) -> Channel:
        from .backends.p2p_channels import NativeChannel, SharedChannel

        native = self.backends.get(device.type, "mpi") != "mpi"
        return (NativeChannel if native else SharedChannel)(self, source, target, device)

    def require_process_group(self) -> dist.ProcessGroup:
        """Return the group of all ranks. Raise WorldError if there is no process group any more."""
        if self.process_group is None:
            raise WorldError(
                f"rank {self.rank} of {self.size} has no process group (any more): it was "
                f"destroyed, or the world was closed"
            )
        return self.process_group

    def pair(self, source: int, target: int, device: torch.device) -> dist.ProcessGroup:
        """Return a torch group for messages in one direction between two ranks.

        The group uses the device's own backend. Raise WorldError if there is no process group any
        more.
        """
        self.require_process_group()
        name = f"globaltensor_{device.type}_from_{source}_to_{target}"
        return torch_private.new_group(
            sorted((source, target)), self.rank, name, self.backends[device.type], timeout()
        )

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the torch group of these ranks, which must be sorted.

        Only its members create the group, at first use. Raise WorldError if there is no process
        group any more.
        """
        process_group = self._groups.get(ranks)
        if process_group is None:
            everyone = self.require_process_group()
            name = "globaltensor_" + "_".join(map(str, ranks))
            process_group = (
                everyone
                if len(ranks) == self.size
                else torch_private.new_group(ranks, self.rank, name, self.backend, timeout())
            )
            self._groups[ranks] = process_group
        return process_group

    def groups_of(self, ranks: Sequence[int]) -> list[dist.ProcessGroup]:
        """Return the torch group of these ranks in a list, which is empty if there is none yet."""
        group = self._groups.get(tuple(sorted(ranks)))
        return [] if group is None else [group]

    def check_end(self, failed: bool = False) -> None:
        """Compare what this rank has run with the ranks that have ended before it.

        The call is for the end of this rank's program, so the last rank to end compares all of
        them. A rank does not wait for others, with one exception. The rank that serves the store
        waits for a moment for their records. Raise DivergenceError if ranks differ, or if they have
        diverged before and the program went on.
        """
        if self.diverged and self.neighbours is not None:
            self.neighbours.last_words(end_record({}, failed=True))
        if self.diverged and not failed:
            raise DivergenceError(
                "the ranks diverged while the program ran. It caught the error and went on, so "
                f"numbers after that may be wrong. The error was:\n{self.diverged}"
            )
        if not self.compares or self.store is None or not self.histories:
            return
        record = end_record(self.histories, failed)
        records = {self.rank: record}
        if self.neighbours is not None:
            records |= self.neighbours.last_words(record)
        if set(records) < set(range(self.size)):
            with contextlib.suppress(RuntimeError):  # the rank that served the store has ended
                self._add_records(records, failed)
        if text := differs_at_end(self.rank, records):
            raise DivergenceError(text)
        if self.neighbours is not None and not failed:
            self._check_left(self.neighbours.left_silently() - set(records))

    def _check_left(self, silent: set[int]) -> None:
        """Raise DivergenceError if this rank ran operations after ranks left without a record.

        A collective has compared everything before it.
        """
        compared = [(c._own, c._digest) for c in self._comms.values()]
        for ranks, history in self.histories.items():
            gone = sorted(silent & set(ranks))
            if gone and (history, history.digest()) not in compared:
                raise DivergenceError(
                    f"rank {gone[0]} has died, with no end of its program: it was killed by a "
                    f"signal, crashed, or called os._exit. Rank {self.rank} has run operations on "
                    f"global tensors after its last exchange with rank {gone[0]}, so it is unknown "
                    f"whether rank {gone[0]} has run the same. This was found when the program "
                    f"ended. End every rank by its last line or by sys.exit"
                )

    def _add_records(self, records: dict[int, bytes], failed: bool) -> None:
        """Write this rank's record to the store, and add those of the ranks that have ended.

        A rank with the records of all neighbours writes none to the store, so this rank also reads
        what its neighbours publish meanwhile.
        """
        if self.rank != 0 and not store_answers(self.store, lost=failed):
            return
        self.store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self.store.set(f"{_ENDED}/{self.rank}", records[self.rank])
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        until = time.monotonic() + (_LINGER_SECONDS if serves else 0.0)
        while True:
            if self.neighbours is not None:
                records |= self.neighbours.records_at_end()
            for r in set(range(self.size)) - set(records):
                if self.store.check([f"{_ENDED}/{r}"]):
                    records[r] = self.store.get(f"{_ENDED}/{r}")
            if len(records) == self.size or time.monotonic() > until:
                return
            time.sleep(0.01)

    def close(self) -> None:
        super().close()
        if self.watchdog is not None:
            self.watchdog.close()
        self.store = self.watchdog = None
        self._groups.clear()
        if self.background is not None:
            self.background.close()
            self.background = None
        if self.neighbours is not None:
            self.neighbours.close()
            self.neighbours = None
        # A remaining reference would keep gloo's threads alive until interpreter exit. A thread
        # that then asks for the GIL aborts the process.
        self.process_group = None
        if self.owned and dist.is_initialized():
            self.owned = False
            dist.destroy_process_group()


def _group_of_all_ranks() -> dist.ProcessGroup:
    """Return the group of all ranks, or a second one if the user's group cannot move CPU tensors.

    The latter is the case with NCCL alone. All ranks call this function at first use.
    """
    group = dist.group.WORLD
    if "cpu:" not in str(dist.get_backend_config(group)):
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert group is not None
    return group


def _leave_to_parent() -> None:
    if isinstance(_Current.world, ProcessWorld) and _Current.world.size > 1:
        _Current.world.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


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
    this_world = _current.world
    if this_world is None:
        with _starting:
            this_world = _Current.world
            if this_world is None:
                this_world = _Current.world = _start()
                atexit.register(_close_at_exit)
    return this_world


def sent(value: torch.Tensor, source: int) -> torch.Tensor:
    """Return the value of rank ``source`` on all ranks. Collective."""
    this_world = world()
    return this_world.comm(tuple(range(this_world.size))).broadcast(value, source)


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
    this_world, _Current.world = _Current.world, None
    unmark_process()
    if this_world is not None:
        this_world.close()
        forget_derived(this_world)


def _close_at_exit() -> None:
    """Close the world at interpreter exit, and let the threads of remaining process groups finish.

    The program may still hold a group; torch's DDP holds one even after it was destroyed. The
    threads of such a group take the GIL to release a collective's tensors. A thread that asks for
    the GIL once the interpreter is ending aborts the process.
    """
    joined = _Current.joined or (dist.is_available() and dist.is_initialized())
    this_world, diverged = _Current.world, ""
    if isinstance(this_world, ProcessWorld):
        try:
            this_world.check_end(failed=hasattr(sys, "last_value"))
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
        _mark_process(place)
        return ProcessWorld(rank, size, place.local_rank, place.nodes, owned=False)
    if place is None:
        return ProcessWorld(0, 1, 0, 1, owned=False)
    if place.world_size > 1:
        refuse_child_of_rank(place)
        _join(place)
        _mark_process(place)
    this_world = ProcessWorld(
        place.rank, place.world_size, place.local_rank, place.nodes, owned=place.world_size > 1
    )
    _take_device(this_world)
    return this_world


def _take_device(this_world: ProcessWorld) -> None:
    """Make the rank's own GPU the current device, unless the program has chosen one.

    This is for several GPUs that NCCL serves. ``.cuda()`` then uses that GPU.
    """
    if (
        "nccl" in this_world.backends.values()
        and 0 < this_world.local_rank < torch.cuda.device_count()
        and torch.cuda.current_device() == 0
    ):
        torch.cuda.set_device(this_world.local_rank)


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


def await_all_ranks() -> None:
    """Wait until all ranks have joined torch's group of all ranks, if gloo connects them.

    Gloo's connections are complete on one rank before they are on another. If that rank ended at
    once, the others could not join: they would find the connection closed.
    """
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        return
    if "cpu:gloo" in str(dist.get_backend_config(group)):
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        group.barrier(options).wait()


def _identity(place: Detected) -> str:
    return f"{place.rank} {place.world_size} {place.meeting}"


def _mark_process(place: Detected) -> None:
    """Note that this process is a rank, for the processes that it starts."""
    if place.world_size > 1:
        os.environ[_RANK_PROCESS] = f"{os.getpid()} {_identity(place)}"


def unmark_process() -> None:
    """Take back the note that this process is a rank. It has left the others."""
    os.environ.pop(_RANK_PROCESS, None)


def refuse_child_of_rank(place: Detected) -> None:
    """Raise WorldError in a process that a rank has started, and that has the rank's variables.

    It would join as a second process of that rank, and wait for the others until the timeout.
    """
    pid, _, identity = os.environ.get(_RANK_PROCESS, "").partition(" ")
    if identity != _identity(place) or int(pid) == os.getpid() or not _is_alive(int(pid)):
        return
    raise WorldError(
        f"{user_line()}\nthis process ({os.getpid()}) was started by rank {place.rank} (process "
        f"{pid}), and is not a rank itself: it cannot use global tensors. Give it values, such as "
        f"x.numpy() or x.to_local(), or run this line in the rank. To let it work alone, start it "
        f"without the variables RANK and WORLD_SIZE (or those of {place.source})"
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _join(place: Detected) -> None:
    backend = select_backend(place=place)
    register_backend(backend)
    choose_gloo_interface(place.addr, place.nodes)
    where = meeting(place, timeout())
    try:
        dist.init_process_group(backend, **where, timeout=timeout())
        await_all_ranks()
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
