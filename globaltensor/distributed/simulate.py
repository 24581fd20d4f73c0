"""A simulated world: n ranks as threads of one process, for tests and for trying things out.

Values, local autograd and collectives are real. The simulated world has the interface and the
arithmetic of the world of processes, so results here hold there too. It is no faster than one
process.
"""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import WorldError, noted
from .communicator import Channel, Communicator, Message
from .world import set_world
from .world_base import World

__all__ = ["SimulatedWorld", "simulate"]

_TIMEOUT_SECONDS: Final = 60.0


class _GarbageCollector:
    """A guard that runs Python's cyclic collector only where simulated ranks meet.

    Before Python 3.12 it may run inside any allocation, also in PyTorch's ``get_rng_state``, which
    holds the generator's mutex then. A finalizer lets another rank's thread run, and if that thread
    waits for the mutex with the GIL held, both wait forever.
    """

    def __init__(self) -> None:
        self._lock, self._simulations, self._enabled = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            self._simulations += 1
            if self._simulations == 1 and sys.version_info < (3, 12):
                self._enabled = gc.isenabled()
                gc.disable()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._simulations -= 1
            if self._simulations == 0 and self._enabled:
                self._enabled = False
                gc.enable()

    def run_if_due(self) -> None:
        """Collect the generations that the automatic collector would collect now."""
        if not self._enabled or gc.isenabled():
            return
        due = [
            count > limit > 0
            for count, limit in zip(gc.get_count(), gc.get_threshold(), strict=True)
        ]
        if due[0]:
            gc.collect(2 if due[1] and due[2] else 1 if due[1] else 0)


_collector: Final = _GarbageCollector()


class _Meeting:
    """The meeting point of one communicator: each rank brings a value and leaves with all values.

    Two sets of slots, used in turn, make one wait per meeting enough. A slot is written again only
    after every rank has come to the next meeting, and so has read this one.
    """

    def __init__(self, size: int) -> None:
        self.slots: list[list[Any]] = [[None] * size, [None] * size]
        self._size, self._arrived, self._turn, self._broken = size, 0, 0, False
        self._changed = threading.Condition()

    def wait(self, timeout: float) -> bool:
        """Return True once all ranks have come, or False if a rank will not come or is too late.

        A rank that leaves after the meeting does no harm, as in threading.Barrier.
        """
        with self._changed:
            turn = self._turn
            self._arrived += 1
            if self._arrived == self._size:
                self._arrived, self._turn = 0, turn + 1
                self._changed.notify_all()
            elif not self._broken:
                self._changed.wait_for(lambda: self._turn != turn or self._broken, timeout)
            return self._turn != turn

    def abandon(self) -> None:
        """Wake the ranks that wait, because another rank will not come."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class _Mailbox:
    """The letters that one rank sends another, numbered in the order of sending."""

    def __init__(self) -> None:
        self.letters: dict[int, Tensor] = {}
        self.sent, self.asked = 0, 0
        self.changed = threading.Condition()
        self.closed = False

    def put(self, letter: Tensor) -> None:
        with self.changed:
            self.letters[self.sent] = letter
            self.sent += 1
            self.changed.notify_all()

    def ask(self) -> int:
        """Return the number of the next letter that no receive has asked for."""
        with self.changed:
            self.asked += 1
            return self.asked - 1

    def take(self, number: int, timeout: float) -> Tensor | None:
        """Return a letter, or None if it will not come or is too late."""
        with self.changed:
            self.changed.wait_for(lambda: number in self.letters or self.closed, timeout)
            return self.letters.pop(number, None)

    def close(self) -> None:
        """Wake the threads that wait, because no more letters will come."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class _SimulationState:
    """The state that the ranks of one simulation share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout, self.lock = size, timeout, threading.Lock()
        self.meetings: dict[tuple[int, ...], _Meeting] = {}
        self.mailboxes: dict[tuple[int, int], _Mailbox] = {}
        self.gone: dict[int, str] = {}

    def meeting(self, ranks: tuple[int, ...]) -> _Meeting:
        with self.lock:
            meeting = self.meetings.get(ranks)
            if meeting is None:
                meeting = self.meetings[ranks] = _Meeting(len(ranks))
                if any(r in self.gone for r in ranks):
                    meeting.abandon()
            return meeting

    def mailbox(self, source: int, target: int) -> _Mailbox:
        with self.lock:
            mailbox = self.mailboxes.get((source, target))
            if mailbox is None:
                mailbox = self.mailboxes[source, target] = _Mailbox()
                if source in self.gone:
                    mailbox.close()
            return mailbox

    def leave(self, rank: int, how: str) -> None:
        """Record that a rank has ended, and wake the ranks that wait for it."""
        with self.lock:
            self.gone[rank] = how
            for ranks, meeting in self.meetings.items():
                if rank in ranks:
                    meeting.abandon()
            for (source, _), mailbox in self.mailboxes.items():
                if source == rank:
                    mailbox.close()


class _SimulatedComm(Communicator):
    world: SimulatedWorld

    def __init__(self, world: SimulatedWorld, ranks: tuple[int, ...]) -> None:
        super().__init__(world, ranks)
        self._meeting = world.simulation.meeting(ranks)
        self._turn = 0
        self._announced = False  # True if the next meeting is the first of a collective

    def _compare(self, device: torch.device) -> None:
        self._announced = True

    def _exchange_values(self, value: object) -> list[Any]:
        """Exchange values and return every rank's value.

        The first meeting of a collective also compares its digest.
        """
        announced, self._announced = self._announced, False
        messages = self._exchange((self._digest if announced else b"", value))
        if any(digest != messages[0][0] for digest, _ in messages):
            raise self._diverged(self._exchange)
        return [value for _, value in messages]

    def _exchange(self, value: object) -> list[Any]:
        _collector.run_if_due()
        meeting, self._turn = self._meeting, 1 - self._turn
        slots = meeting.slots[self._turn]
        slots[self.index] = value
        if not meeting.wait(self.world.simulation.timeout):
            gone = {r: how for r, how in self.world.simulation.gone.items() if r in self.ranks}
            why = (
                ", ".join(f"rank {r} has {how}" for r, how in gone.items())
                or f"one of them did not join within {self.world.simulation.timeout:g} s"
            )
            raise WorldError(
                f"rank {self.world.rank} waited in a collective among ranks {list(self.ranks)}, "
                f"but {why}"
            )
        return list(slots)

    def _swap(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> None:
        copies: dict[int, Tensor] = {}
        sent_copies = {i: copies.setdefault(id(s), s.clone()) for i, s in sends.items()}
        everyone = self._exchange_values(sent_copies)
        for i, r in recvs.items():
            r.copy_(everyone[i][self.index])

    def all_gather_unchecked(self, value: object, digest: bytes = b"") -> list[Any]:
        return self._exchange_values(value)


class _SentMessage(Message):
    """A message that is in its mailbox."""

    def over(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _ExpectedMessage(Message):
    """A message that is expected."""

    def __init__(self, channel: _SimulatedChannel, data: Tensor) -> None:
        self._channel, self._data = channel, data
        self._number, self._through = channel.mailbox.ask(), False

    def over(self) -> bool:
        return (
            self._through
            or self._number in self._channel.mailbox.letters
            or self._channel.mailbox.closed
        )

    def wait(self) -> None:
        if self._through:
            return
        source, simulation = self._channel.source, self._channel.world.simulation
        letter = self._channel.mailbox.take(self._number, simulation.timeout)
        if letter is None:
            why = (
                f"it has {simulation.gone[source]}"
                if source in simulation.gone
                else f"no message arrived within {simulation.timeout:g} s"
            )
            raise WorldError(
                f"rank {self._channel.target} waited for a message from rank {source}, but {why}"
            )
        if letter.numel() != self._data.numel():
            raise WorldError(
                f"rank {source} sent {letter.numel()} bytes where rank {self._channel.target} "
                f"expects {self._data.numel()}"
            )
        self._data.copy_(letter)
        self._through = True


class _SimulatedChannel(Channel):
    world: SimulatedWorld

    def __init__(self, world: SimulatedWorld, source: int, target: int) -> None:
        super().__init__(world, source, target)
        self.mailbox = world.simulation.mailbox(source, target)

    def _send(self, data: Tensor) -> _SentMessage:
        self.mailbox.put(data.clone())
        return _SentMessage()

    def _receive(self, data: Tensor) -> _ExpectedMessage:
        return _ExpectedMessage(self, data)


class SimulatedWorld(World):
    """One rank of a simulation.

    ``devices`` replaces device types that this machine lacks: ``{"cuda": "cpu"}``.
    """

    def __init__(self, rank: int, simulation: _SimulationState, devices: Mapping[str, str]) -> None:
        super().__init__(rank, simulation.size, rank, 1)
        self.compares = simulation.size > 1
        self.simulation, self.devices = simulation, devices

    def device(self, type: str) -> torch.device:
        stand_in = self.devices.get(type)
        return super().device(type) if stand_in is None else torch.device(stand_in)

    def _connect(self, ranks: tuple[int, ...]) -> Communicator:
        return _SimulatedComm(self, ranks)

    def _open(self, source: int, target: int, device: torch.device) -> Channel:
        return _SimulatedChannel(self, source, target)


def simulate(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = _TIMEOUT_SECONDS,
    devices: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on ``n`` simulated ranks, and return the results in the order of ranks.

    The first rank to fail ends the others. Its error is raised with a note that names the rank.
    Raise WorldError if a collective waits for a rank longer than ``timeout`` seconds, or if a rank
    has not ended after ten times that.

    >>> from globaltensor.distributed.world import world
    >>> simulate(2, lambda: world().rank)
    [0, 1]
    """
    simulation = _SimulationState(n, timeout)
    results: list[Any] = [None] * n
    errors: list[tuple[int, BaseException]] = []
    grad, context = torch.is_grad_enabled(), contextvars.copy_context()

    def run(rank: int) -> None:
        set_world(SimulatedWorld(rank, simulation, devices or {}))
        torch.set_grad_enabled(grad)
        # On a GPU the backward passes of all ranks would run in one thread, which belongs to none
        # of the ranks.
        torch.autograd.set_multithreading_enabled(False)
        how = "ended"
        try:
            results[rank] = fn(*args)
        except BaseException as error:  # the caller's thread raises any error again
            errors.append((rank, error))
            how = f"failed with {type(error).__name__}"
        simulation.leave(rank, how)

    threads = [
        threading.Thread(
            target=context.copy().run, args=(run, rank), name=f"rank {rank}", daemon=True
        )
        for rank in range(n)
    ]
    with _collector:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 10 * timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    if errors:
        rank, error = next((e for e in errors if not isinstance(e[1], WorldError)), errors[0])
        noted(error, f"(on simulated rank {rank} of {n})")
        raise error
    alive = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if alive:
        raise WorldError(f"simulated ranks {alive} have not ended after {10 * timeout:g} s")
    return results
