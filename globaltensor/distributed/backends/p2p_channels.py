"""Channels between processes: single messages over torch.distributed, during the computation.

``World.channel`` creates them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import WorldError
from ..communicator import Channel, Message
from ..watchdog import Deadlock
from ..world import ProcessWorld
from .process_group_comm import Background
from .shared_memory import PeerLost, SharedBlock, SharedMemoryPeers
from .shared_memory_comm import stable_hash

__all__ = ["MessageChannel", "NativeChannel", "SharedChannel"]

# The tag separates these messages from those of collectives, and from the user's own send and recv.
_TAG = 7003


class _WorkMessage(Message):
    """A work of torch, waited for at most once, with the memory that it needs until it is over."""

    def __init__(self, channel: Channel, work: dist.Work, buffer: Tensor) -> None:
        self._channel, self._buffer = channel, buffer
        # None once it has been waited for: a second wait of gloo would wait for another message.
        self._work: dist.Work | None = work

    def over(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        try:
            if self._work is not None:
                self._work.wait()
        except WorldError:
            raise
        except RuntimeError as error:
            raise _message_error(self._channel, error) from error
        self._work = None


class _BackgroundSend(Message):
    """A send that a thread waits for.

    Gloo cannot report whether a send has finished; it can only wait for it.
    """

    def __init__(self, message: _WorkMessage, thread: Background) -> None:
        self._job = thread.submit(message.wait)

    def over(self) -> bool:
        return self._job.over()

    def wait(self) -> None:
        self._job.wait()


class _StagedReceive(Message):
    """A receive into host memory, then copied to a device that has no backend of its own."""

    def __init__(self, message: _WorkMessage, host: Tensor, data: Tensor) -> None:
        self._message, self._host, self._data = message, host, data

    def over(self) -> bool:
        return self._message.over()

    def arrive(self) -> None:
        self._message.wait()

    def wait(self) -> None:
        self._message.wait()
        self._data.copy_(self._host)


def _message_error(channel: Channel, error: Exception) -> WorldError:
    rank = channel.world.rank
    way = f"to rank {channel.target}" if rank == channel.source else f"from rank {channel.source}"
    return WorldError(
        f"rank {rank}: a message {way} failed: {error}; a rank has died, hangs, or did something "
        f"else"
    )


class MessageChannel(Channel):
    """A channel over the group of all ranks: gloo, or MPI."""

    world: ProcessWorld

    def __init__(self, world: ProcessWorld, source: int, target: int, device: torch.device) -> None:
        super().__init__(world, source, target)
        self._mpi = "mpi" in world.backend
        self._thread: Background | None = None

    def _send(self, data: Tensor) -> Message:
        send_buffer = data if self._mpi else data.cpu()
        try:
            message = _WorkMessage(
                self,
                self.world.require_process_group().send([send_buffer], self.target, _TAG),
                send_buffer,
            )
        except RuntimeError as error:
            raise _message_error(self, error) from error
        if self._mpi:
            return message
        if self._thread is None:
            self._thread = Background()
        return _BackgroundSend(message, self._thread)

    def _receive(self, data: Tensor) -> Message:
        straight = self._mpi or data.device.type == "cpu"
        recv_buffer = data if straight else torch.empty(data.shape, dtype=data.dtype)
        try:
            message = _WorkMessage(
                self,
                self.world.require_process_group().recv([recv_buffer], self.source, _TAG),
                recv_buffer,
            )
        except RuntimeError as error:
            raise _message_error(self, error) from error
        return message if straight else _StagedReceive(message, recv_buffer, data)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None


class SharedChannel(MessageChannel):
    """A channel through memory that the two ranks share, if they are on one host.

    They find that out when they connect. Otherwise it is a `MessageChannel`.
    """

    def __init__(self, world: ProcessWorld, source: int, target: int, device: torch.device) -> None:
        super().__init__(world, source, target, device)
        self._peers: SharedMemoryPeers | None = None
        self._topic, self._number = stable_hash(("channel", source, target, device.type)), 0

    def connect(self) -> None:
        both = self.world.comm((min(self.source, self.target), max(self.source, self.target)))
        self._peers = both.peers(torch.device("cpu"))

    def _send(self, data: Tensor) -> Message:
        if self._peers is None:
            return super()._send(data)
        self._number += 1
        try:
            self._peers.publish(self._topic, self._number, [(data, (self.target,))])
        except PeerLost as error:
            raise _message_error(self, error) from error
        return _PublishedMessage()

    def _receive(self, data: Tensor) -> Message:
        if self._peers is None:
            return super()._receive(data)
        self._number += 1
        return _SharedReceive(self, self._peers, self._topic, self._number, data)


class _PublishedMessage(Message):
    """A message that is already in the memory where its receiver reads it."""

    def over(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _SharedReceive(Message):
    """A message that its sender will publish in shared memory."""

    def __init__(
        self, channel: Channel, near: SharedMemoryPeers, topic: int, number: int, data: Tensor
    ) -> None:
        self._channel, self._peers, self._name, self._data = (
            channel,
            near,
            (channel.source, topic, number),
            data,
        )
        self._waits = True
        self._part: SharedBlock | None = None  # a block that has arrived and is not yet copied

    def over(self) -> bool:
        return not self._waits or self._peers.has_arrived(*self._name)

    def arrive(self) -> None:
        if self._waits:
            self._waits = False
            try:
                patience = self._channel.world.patience  # type: ignore[attr-defined]
                self._part = self._peers.read(*self._name, self._data.numel(), patience)
            except (PeerLost, Deadlock) as error:
                raise _message_error(self._channel, error) from error

    def wait(self) -> None:
        self.arrive()
        part, self._part = self._part, None
        if part is not None:
            self._data.copy_(part.data)
            part.done()

    def __del__(self) -> None:
        if self._waits:
            self._peers.forget(*self._name)
        elif self._part is not None:
            self._part.done()


class NativeChannel(Channel):
    """A channel over a group of the two ranks on the device's own backend, such as NCCL.

    Such a backend runs the messages of a group one after the other, whatever their direction. A
    message whose other side comes late holds up those behind it, so each direction has its own
    group. Only the device waits: the host goes on, and the computation queued next runs after the
    message.
    """

    world: ProcessWorld

    def __init__(self, world: ProcessWorld, source: int, target: int, device: torch.device) -> None:
        super().__init__(world, source, target)
        self._device, self._connected = device, False
        self._group = world.pair(source, target, device)

    def connect(self) -> None:
        # The first message of a group blocks the host until its other side comes. So it must be a
        # message for which both sides come.
        if not self._connected:
            mark = torch.zeros(1, dtype=torch.uint8, device=self._device)
            (self._send if self.world.rank == self.source else self._receive)(mark).wait()
            self._connected = True

    def _start(self, kind: object, data: Tensor, peer: int) -> _WorkMessage:
        try:
            works = dist.batch_isend_irecv([dist.P2POp(kind, data, peer, self._group)])  # type: ignore[arg-type]
        except RuntimeError as error:
            raise _message_error(self, error) from error
        return _WorkMessage(self, works[0], data)

    def _send(self, data: Tensor) -> _WorkMessage:
        return self._start(dist.isend, data, self.target)

    def _receive(self, data: Tensor) -> _WorkMessage:
        return self._start(dist.irecv, data, self.source)
