"""The base of all worlds: the ranks of a job seen by one of them, their communicators and state.

Worlds of processes (`world`), of threads (`simulate`), and of a capture that sends nothing
(graph/capture/dry_world.py) build on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from ..errors import WorldError
from ..sharding.placement import Placement
from ..sharding.tensor_kinds import TensorKind
from .communicator import Channel, Communicator, Traffic
from .divergence import History, Purpose

__all__ = ["World", "forget_derived", "on_forget"]


T = TypeVar("T")


class World(ABC):
    """The ranks of a job, seen by one of them.

    ``node_size`` is the number of machines. ``trace`` is a list to which collectives are appended,
    or None. ``observer`` is a function that is called with each collective before it is sent, or
    None.
    """

    # True if nothing is sent and only the shapes of results are needed. Algorithms of many rounds
    # may then skip these.
    dry = False
    # True if each collective compares what the ranks have run before it (divergence.py).
    compares = False
    # The collective that this rank is in, and the plain tensor that is compared there. Both are for
    # errors.
    kind = plain = ""
    purpose: Purpose = ""  # the purpose of that collective, for errors
    nbytes = 0  # the bytes that this rank sends in its last collective on tensors
    # The kind of the plain tensor that is being compared, if it is not an ordinary tensor.
    odd: TensorKind | None = None
    raised = ""  # the last error of a function that this rank has run, for errors
    # The object of `check_ranks` that compares this rank's ops with those of other ranks
    # (globaltensor._ops.rank_guard), or None.
    pace: Any = None
    # The text of the last error about operations that differ between ranks. The program may have
    # caught the error.
    diverged = ""

    def __init__(self, rank: int, size: int, local_rank: int = 0, nodes: int = 1) -> None:
        self.rank, self.size, self.local_rank, self.node_size = rank, size, local_rank, nodes
        self.trace: list[Traffic] | None = None
        self.observer: Callable[[Traffic], None] | None = None
        self._comms: dict[tuple[int, ...], Communicator] = {}
        self._outside: dict[str, torch.device] = {}
        self._channels: dict[tuple[int, int, str], Channel] = {}
        self.histories: dict[tuple[int, ...], History] = {}  # by their ranks, sorted
        self._histories_of: dict[Any, History] = {}
        self._states: dict[Hashable, Any] = {}

    def state(self, key: Callable[[], T]) -> T:
        """Return this rank's state of the kind ``key``. At the first use ``key()`` creates it.

        ``key`` is a class, or a function that returns an empty state. Modules of this library keep
        all state of one rank here, so that it ends with the world.
        """
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = key()
        return found

    def existing_state(self, key: Callable[[], T]) -> T | None:
        """Return this rank's state of the kind ``key``, or None if it does not exist yet."""
        return self._states.get(key)

    def note_replicated(self, tensor: torch.Tensor, ranks: Sequence[int], purpose: str) -> None:
        """Note a plain tensor that must be the same on ``ranks``, in a world that only captures."""
        return None

    def observe(self, traffic: Traffic) -> None:
        """Append a collective of this rank to ``trace``, and call ``observer`` with it."""
        if self.trace is not None:
            self.trace.append(traffic)
        if self.observer is not None:
            self.observer(traffic)

    def history(self, placements: tuple[Placement, ...]) -> History:
        """Return the history of what this rank has run on tensors of these placements together."""
        history = self._histories_of.get(placements)
        if history is None:
            ranks = tuple(sorted({r for p in placements for r in p.flat}))
            if not self.compares:
                return _IGNORED
            history = self._histories_of[placements] = self.histories.setdefault(
                ranks, History(ranks)
            )
        return history

    def history_of_all(self) -> History:
        """Return the history of what this rank has run among the operations that all ranks run."""
        return self.history_of(tuple(range(self.size)))

    def history_of(self, ranks: tuple[int, ...]) -> History:
        """Return the history of what this rank has run together with these ranks, sorted."""
        if not self.compares:
            return _IGNORED
        history = self.histories.get(ranks)
        if history is None:
            history = self.histories[ranks] = History(ranks)
        return history

    def forget(self) -> None:
        """Restart the digests of what was run.

        All ranks call it at the same point, so that the program may go on after they have diverged.
        """
        self.histories.clear()
        self._histories_of.clear()
        self.kind = self.plain = self.purpose = self.raised = ""
        self.odd = None
        for comm in self._comms.values():
            comm.begin_digests()
        forget_derived(self)

    def comm(self, ranks: tuple[int, ...]) -> Communicator:
        """Return the communicator of these ranks, in this order.

        Raise WorldError unless the ranks are ranks of this job and include this one.
        """
        comm = self._comms.get(ranks)
        if comm is None:
            if self.rank not in ranks or min(ranks) < 0 or max(ranks) >= self.size:
                asked = (
                    f"rank {self.rank} of {self.size} asked for a communicator of ranks "
                    f"{list(ranks)}"
                )
                raise WorldError(f"{asked}: they must be ranks of this job, this one included")
            comm = self._comms[ranks] = self._connect(ranks)
        return comm

    @abstractmethod
    def _connect(self, ranks: tuple[int, ...]) -> Communicator: ...

    def channel(self, source: int, target: int, device: torch.device) -> Channel:
        """Return the channel for this device type from rank ``source`` to rank ``target``.

        Raise WorldError unless they are two ranks of this job and one of them is this rank.
        """
        key = (source, target, device.type)
        channel = self._channels.get(key)
        if channel is None:
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
            channel = self._channels[key] = self._open(source, target, device)
        return channel

    def _open(self, source: int, target: int, device: torch.device) -> Channel:
        raise WorldError(
            f"rank {self.rank} of {self.size}: a {type(self).__name__} does not support messages"
        )

    def device(self, type: str) -> torch.device:
        """Return this rank's device of this type, which its local rank selects.

        Raise WorldError if the machine has no such device. If a machine has fewer GPUs than ranks
        and the backend allows it (``shares``), the ranks share the GPUs in turn. That is slower
        than one GPU for each rank, but enough to try things out.
        """
        if type in ("cpu", "meta"):
            return torch.device(type)
        index = self.index(type)
        if type == "cuda" and index >= (count := torch.cuda.device_count()):
            raise WorldError(
                f"rank {self.rank} (local rank {self.local_rank}) has no cuda device: PyTorch "
                f"finds {count or 'none'} on this machine. "
                + (
                    f"Start at most {count} process{'es' if count > 1 else ''} here, let ranks "
                    'share GPUs with the backend gloo, or use the placement type "cpu"'
                    if count
                    else 'Use the placement type "cpu": flow.placement.all("cpu"). With a GPU, '
                    "check the build of PyTorch and the driver: globaltensor doctor"
                )
            )
        return torch.device(type, index)

    def outside(self, type: str) -> torch.device:
        """Return the device of this rank's empty placeholders for tensors placed on other ranks.

        It is this rank's own device of that type if there is one, else the CPU. So the tensors of
        one placement are on one device type on every rank. Code that sorts tensors by device, such
        as fused optimizers, needs that.
        """
        device = self._outside.get(type)
        if device is None:
            try:
                device = torch.empty(0, device=self.device(type)).device
            # WorldError is ours. torch raises the others for a device type that its build does not
            # support.
            except (
                WorldError,
                RuntimeError,
                AssertionError,
            ):
                device = torch.device("cpu")
            self._outside[type] = device
        return device

    def index(self, type: str) -> int:
        """Return the index of this rank's device of this type, even if no such device exists."""
        count = torch.cuda.device_count() if type == "cuda" else 0
        return self.local_rank % count if count and self.shares else self.local_rank

    @property
    def shares(self) -> bool:
        """True if several ranks may compute on one device."""
        return True

    def close(self) -> None:
        """Drop the communicators and close the channels."""
        self._comms.clear()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


_IGNORED = History.ignored()

_on_forget: list[Callable[[World], None]] = []


def on_forget(callback: Callable[[World], None]) -> Callable[[World], None]:
    """Register ``callback(world)`` for when a world forgets its histories; return it.

    Code that caches a function which records into a history must then ask for a new one.
    """
    _on_forget.append(callback)
    return callback


def forget_derived(of: World) -> None:
    for callback in _on_forget:
        callback(of)
