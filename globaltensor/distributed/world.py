"""The world: the ranks this job runs on, who this process is among them, and the communicators
between them.

It starts by itself, at first use, from the variables torchrun and other launchers set; without them
this process is a world of one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._base import torch_private
from ..errors import DivergenceError, WorldError
from ..sharding.placement import Placement
from ..sharding.spec import Spec
from ..sharding.tensor_kinds import Kind
from .backends.select import missing_requirement, register_backend, select_backend
from .backends.shared_memory import SharedMemoryPeers
from .cluster_env import Detected, detect
from .communicator import Channel, Communicator, Traffic
from .divergence import History, Purpose, differs_at_end, end_record
from .file_rendezvous import rendezvous
from .network import choose_gloo_interface, gloo_hint

__all__ = [
    "World",
    "placeholder",
    "reset_world",
    "running",
    "sent",
    "set_world",
    "timeout",
    "world",
]

_TIMEOUT_SECONDS = 600.0
_ENDED = "globaltensor_ended"  # where in the store a rank leaves what it has run
_STORE_SECONDS = 5.0
_LINGER_SECONDS = (
    2.0  # that the rank which serves the store waits for others that end at about the same time
)
_LAST_MOMENT = 0.05  # seconds for threads that wait for the GIL when the interpreter ends


class World(ABC):
    """The ranks of a job, seen by one of them. ``nodes`` counts machines; ``trace`` is where
    collectives are recorded, if anywhere."""

    # whether nothing is sent, and of what would come only the shape is asked for: what takes many
    # rounds may leave them out
    dry = False
    compares = (
        False  # whether each collective compares what the ranks have run up to it (divergence.py)
    )
    kind = plain = (
        # what the collective is that this rank is in, and which plain tensor is compared there: for
        # errors
        ""
    )
    purpose: Purpose = ""  # and what it is for
    seed_agreed = (
        False  # whether the ranks have made sure that they draw from one seed (_ops/random.py)
    )
    odd: Kind | None = (
        None  # of what kind the plain tensor is that is being compared, if it is no ordinary one
    )
    # what compares this rank's ops with those of the others (globaltensor._ops.rank_guard), if
    # anything
    pace: Any = None
    # what sums this rank's gradients (globaltensor._tensor.gradients.reducer): each gradient of a
    # backward pass asks for it
    reducer: Any = None

    def __init__(self, rank: int, size: int, local_rank: int = 0, nodes: int = 1) -> None:
        self.rank, self.size, self.local_rank, self.node_size = rank, size, local_rank, nodes
        self.trace: list[Traffic] | None = None
        self._comms: dict[tuple[int, ...], Communicator] = {}
        self._outside: dict[str, torch.device] = {}
        self._channels: dict[tuple[int, int, str], Channel] = {}
        self.histories: dict[tuple[int, ...], History] = {}  # by the ranks they are of, sorted
        self._histories_of: dict[Any, History] = {}
        #: Where the program uses plain tensors with global ones: how often, and when to compare
        #: next (_tensor/promote.py).
        self.plain_places: dict[Any, list[int]] = {}

    def history(self, placements: tuple[Placement, ...]) -> History:
        """Return what this rank has run on tensors of these placements together."""
        found = self._histories_of.get(placements)
        if found is None:
            ranks = tuple(sorted({r for p in placements for r in p.flat}))
            if not self.compares:
                return _IGNORED
            found = self._histories_of[placements] = self.histories.setdefault(
                ranks, History(ranks)
            )
        return found

    def history_of_all(self) -> History:
        """Return what this rank has run of what all ranks run."""
        if not self.compares:
            return _IGNORED
        ranks = tuple(range(self.size))
        return self.histories.setdefault(ranks, History(ranks))

    def forget(self) -> None:
        """Begin the digests of what was run anew. All ranks do so at the same point: after they
        have diverged, the program may go on."""
        self.histories.clear()
        self._histories_of.clear()
        self.plain_places.clear()
        self.kind = self.plain = self.purpose = ""
        self.odd = None
        for comm in self._comms.values():
            comm.begin_digests()
        if self.reducer is not None:
            self.reducer.watchers.doubt()
        for forgotten in ON_FORGET:
            forgotten()

    def comm(self, ranks: tuple[int, ...]) -> Communicator:
        """The communicator of these ranks, in this order; this rank must be one of them. Raises
        WorldError."""
        found = self._comms.get(ranks)
        if found is None:
            if self.rank not in ranks or min(ranks) < 0 or max(ranks) >= self.size:
                asked = (
                    f"rank {self.rank} of {self.size} asked for a communicator of ranks "
                    f"{list(ranks)}"
                )
                raise WorldError(f"{asked}: they must be ranks of this job, this one included")
            found = self._comms[ranks] = self._connect(ranks)
        return found

    @abstractmethod
    def _connect(self, ranks: tuple[int, ...]) -> Communicator: ...

    def channel(self, source: int, target: int, device: torch.device) -> Channel:
        """What carries messages of tensors on this type of device from one rank to another; this
        rank must be one of them. Raises WorldError."""
        key = (source, target, device.type)
        found = self._channels.get(key)
        if found is None:
            if (
                self.rank not in (source, target)
                or source == target
                or not 0 <= min(source, target) <= max(source, target) < self.size
            ):
                asked = (
                    f"rank {self.rank} of {self.size} asked for a channel from rank {source} "
                    f"to rank {target}"
                )
                raise WorldError(
                    f"{asked}: they must be two ranks of this job, this one among them"
                )
            found = self._channels[key] = self._open(source, target, device)
        return found

    def _open(self, source: int, target: int, device: torch.device) -> Channel:
        raise WorldError(
            f"rank {self.rank} of {self.size}: a {type(self).__name__} carries no messages"
        )

    def device(self, type: str) -> torch.device:
        """The device of this type that belongs to this rank: of accelerators, the one with the
        number of the local rank. Raises WorldError.

        Ranks beyond the GPUs of a machine share them in turn where nothing forbids it (``shares``):
        slower than one each, but good for trying things out.
        """
        if type in ("cpu", "meta"):
            return torch.device(type)
        index = self.index(type)
        if type == "cuda" and index >= (count := torch.cuda.device_count()):
            raise WorldError(
                f"rank {self.rank} (local rank {self.local_rank}) has no cuda device: this "
                f"machine shows {count}; "
                'use placement("cpu", ...), start at most one process per device'
                + (", or let them share it with the backend gloo" if count else "")
            )
        return torch.device(type, index)

    def outside(self, type: str) -> torch.device:
        """Where this rank keeps the nothing that it holds of others' tensors: on its own device of
        that type, where it has one. So tensors of one placement are on one type of device on every
        rank, as those who sort tensors by their devices want it (fused optimizers)."""
        found = self._outside.get(type)
        if found is None:
            try:
                found = torch.empty(0, device=self.device(type)).device
            except (
                WorldError,
                RuntimeError,
                AssertionError,
            ):  # torch's own, of a type of device that it was not made for
                found = torch.device("cpu")
            self._outside[type] = found
        return found

    def index(self, type: str) -> int:
        """The number of this rank's device among those of this type, whether there is such a device
        or not."""
        count = torch.cuda.device_count() if type == "cuda" else 0
        return self.local_rank % count if count and self.shares else self.local_rank

    @property
    def shares(self) -> bool:
        """Whether several ranks may compute on one device."""
        return True

    def close(self) -> None:
        """Let go of the communicators and channels."""
        self._comms.clear()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


_IGNORED = History.ignored()
#: Called when a world forgets its histories: whoever keeps a function that records into one has to
#: ask for another.
ON_FORGET: list[Callable[[], None]] = []


class Closable(Protocol):
    """Something a world lets go of when it ends."""

    def close(self) -> None: ...


class ProcessWorld(World):
    """One rank, one process, over torch.distributed; a world of one needs no process group."""

    def __init__(self, rank: int, size: int, local_rank: int, nodes: int, owned: bool) -> None:
        super().__init__(rank, size, local_rank, nodes)
        self.compares = size > 1
        self.owned = owned  # closing it ends torch's process group
        self.background: Closable | None = (
            None  # runs collectives beside the computation, once one is wanted
        )
        self.neighbours: SharedMemoryPeers | None = None  # those of this host, once they have met
        self.backend = ""  # as torch spells it: "cpu:gloo,cuda:nccl"
        self.backends: dict[
            str, str
        ] = {}  # of the device types that have one of their own, gloo aside
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.store: Any = None  # by which the ranks have met
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
        return "nccl" not in self.backends.values()  # which wants a device for each of its ranks

    def patience(self) -> float:
        """Seconds that a rank waits for others."""
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
        """A torch group for messages from one rank to another alone, on the device's own
        backend."""
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
        """The torch group of these ranks, which are sorted; made at first use, by its members
        alone."""
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
        """Compare what this rank has run with the ranks that have ended already, when its program
        ends: the last one to end compares all. Waits for nobody, but for a moment where this
        process serves the store in which the others leave their records. Raises DivergenceError."""
        if not self.compares or self.store is None or not self.histories:
            return
        record = end_record(self.histories, failed)
        records = {self.rank: record}
        if self.neighbours is not None:
            records |= self.neighbours.last_words(record)
        if set(records) < set(range(self.size)):
            with contextlib.suppress(RuntimeError):  # who served the store has gone
                records |= self._records(record)
        if text := differs_at_end(self.rank, records):
            raise DivergenceError(text)

    def _records(self, record: bytes) -> dict[int, bytes]:
        """Leave this rank's record in the store; return those that are there."""
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
        # A reference left would keep gloo's threads alive until the interpreter is gone; when one
        # then wants the GIL, the process aborts.
        self.carrier = None
        if self.owned and dist.is_initialized():
            self.owned = False
            dist.destroy_process_group()


def _carrier() -> dist.ProcessGroup:
    """The group of all ranks; where the user's own cannot carry cpu tensors (NCCL alone), a second
    one. All ranks come here at first use."""
    group = dist.group.WORLD
    if "cpu:" not in str(dist.get_backend_config(group)):
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert group is not None
    return group


class _Current(threading.local):
    # The class attribute is the process's world: threads that autograd starts see it too. A
    # simulated rank sets its own thread's.
    world: World | None = None
    joined = False  # whether this process has ever been in a group of several


_current = _Current()
_starting = threading.Lock()


def world() -> World:
    """The current world; started from the environment at first use. Raises WorldError where the
    variables are incomplete."""
    found = _current.world
    if found is None:
        with _starting:
            found = _Current.world
            if found is None:
                found = _Current.world = _start()
                atexit.register(_leave)
    return found


def sent(value: torch.Tensor, source: int) -> torch.Tensor:
    """What rank ``source`` has, on all ranks. Collective."""
    here = world()
    return here.comm(tuple(range(here.size))).broadcast(value, source)


def placeholder(spec: Spec) -> torch.Tensor:
    """What a rank outside the placement holds: nothing, of the right dtype on the right type of
    device."""
    return torch.empty(0, dtype=spec.dtype, device=world().outside(spec.placement.type))


def running() -> World | None:
    """The current world if it has started; None otherwise, without starting it."""
    return _current.world


def set_world(value: World | None) -> None:
    """Make ``value`` the world of this thread alone; None: the process's world again."""
    if value is not None:
        _current.world = value
    elif "world" in vars(_current):
        del _current.world


def reset_world() -> None:
    """Close the process's world; the next use starts a new one. Destroys the process group if the
    world had made it."""
    found, _Current.world = _Current.world, None
    if found is not None:
        found.close()
        for forgotten in ON_FORGET:
            forgotten()


def _leave() -> None:
    """The interpreter ends. A group that the program still holds (torch's DDP does, of one that was
    destroyed too) keeps its threads: let them finish.

    They take the GIL to let go of a collective's tensors; one that asks for it once the interpreter
    is ending aborts the process.
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
    if diverged:  # an exception that is raised here would leave the exit code 0
        sys.stdout.flush()
        sys.stderr.write(diverged)
        sys.stderr.flush()
        os._exit(1)


def timeout() -> timedelta:
    """How long a rank waits for the others."""
    return timedelta(seconds=float(os.environ.get("GLOBALTENSOR_TIMEOUT", _TIMEOUT_SECONDS)))


def _start() -> World:
    if not dist.is_available():
        return ProcessWorld(0, 1, 0, 1, owned=False)
    place = detect(os.environ)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if place is None or (place.rank, place.world_size) != (rank, size):
            return ProcessWorld(
                rank, size, rank, 1, owned=False
            )  # the user's own group: nothing tells of nodes, so one is assumed
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
    """Of several GPUs that NCCL serves the rank's own becomes the current one, where the program
    has chosen none: ``.cuda()`` then goes there."""
    if (
        "nccl" in found.backends.values()
        and 0 < found.local_rank < torch.cuda.device_count()
        and torch.cuda.current_device() == 0
    ):
        torch.cuda.set_device(found.local_rank)


def meeting(place: Detected, timeout: timedelta) -> dict[str, Any]:
    """How torch shall find the others: torchrun's own store, a port for launchers torch does not
    know, or the job's name. Raises WorldError (the last)."""
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
            f"the others at {place.meeting}: {error}; "
            + (
                missing_requirement(backend)
                or gloo_hint(error, place.addr)
                or "are all ranks started, and is the port free and reachable?"
            )
        ) from error
