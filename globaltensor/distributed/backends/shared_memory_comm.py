"""Collectives among the processes of one host, through memory that they share.

``World.comm`` creates this communicator. Collectives that shared memory cannot carry run as among
any processes.

Long tensors move in pieces, so that a piece is read while it is still in the cache. Reductions read
the numbers of other ranks in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ...errors import GlobalTensorError
from ..communicator import Handle, ReduceScatterHandle, as_bytes, combine
from ..divergence import how_it_ended
from ..watchdog import Deadlock
from ..world import ProcessWorld
from .process_group_comm import P2PCommunicator, ProcessGroupCommunicator
from .shared_memory import PeerLost, SharedBlock, SharedMemoryPeers, host

__all__ = ["SharedMemoryCommunicator", "stable_hash"]

_MAX_RANKS: Final = 16  # at most so many ranks, as each reads the data of every other
_PIECE: Final = (1 << 24) - (1 << 12)  # bytes that fit into a block of 16 MB
# Largest number of bytes of a collective in progress. All of them occupy memory until its wait().
_AHEAD: Final = 1 << 27
_READ: Final = 1 << 23  # bytes from others up to which each rank adds all of an all-reduce
# A rank waits so long for another rank's report after they have diverged.
_REPORT_SECONDS: Final = 5.0
_HOST_BYTES: Final = 512  # bytes of the message in which a rank sends its host and name

#: Flat bytes, and the indexes of the ranks that get them.
_Left = tuple[Tensor, Sequence[int]]


class SharedMemoryCommunicator(ProcessGroupCommunicator):
    """A communicator of ranks that may all be on one host.

    The ranks find out at their first collective.
    """

    def __init__(self, world: ProcessWorld, ranks: tuple[int, ...]) -> None:
        super().__init__(world, ranks)
        self._others = [i for i in range(self.size) if i != self.index]
        self._topic = stable_hash(ranks)
        self._number = 0
        self._peers: dict[torch.device, SharedMemoryPeers | None] = {}

    def peers(self, device: torch.device) -> SharedMemoryPeers | None:
        """Return the peers of this host.

        Return None unless all ranks are on this host and shared memory can carry tensors on
        ``device``.
        """
        if device not in self._peers:  # a dict by device: reading device.type takes 0.2 us
            self._peers[device] = (
                None
                if device.type != "cpu" or self._native(device) or self.size > _MAX_RANKS
                else self._find_peers()
            )
        return self._peers[device]

    def _find_peers(self) -> SharedMemoryPeers | None:
        peers = neighbours(self.world)
        own_address = pickle.dumps((host(), peers.name) if peers else ("", ""))
        own_bytes = torch.frombuffer(
            bytearray(own_address.ljust(_HOST_BYTES, b"\0")), dtype=torch.uint8
        )
        places = P2PCommunicator(self.world, self.ranks)._all_gather_parts(
            own_bytes, [_HOST_BYTES] * self.size
        )
        addresses = [pickle.loads(place.numpy().tobytes()) for place in places]
        if peers is None or {where for where, _ in addresses} != {host()}:
            return None
        try:
            peers.connect(
                {self.ranks[i]: addresses[i][1] for i in self._others}, self.world.patience
            )
        except PeerLost as error:
            raise self.broken("the first collective", error) from error
        return peers

    # Primitives

    def _publish(
        self, peers: SharedMemoryPeers, number: int, parts: Sequence[_Left], patient: bool = False
    ) -> None:
        try:
            peers.publish(
                self._topic,
                number,
                [(data, [self.ranks[i] for i in to]) for data, to in parts],
                patient,
                self._digest,
            )
        except PeerLost as error:
            raise self._lost_rank_error(peers, error) from error

    def _read(
        self, peers: SharedMemoryPeers, number: int, i: int, nbytes: int, digest: bytes
    ) -> SharedBlock:
        try:
            part = peers.read(self.ranks[i], self._topic, number, None, self.world.patience)
        except (PeerLost, Deadlock) as error:
            raise self._lost_rank_error(peers, error) from error
        if part.digest != digest:
            raise self._diverged(lambda data: self._exchange_reports(peers, data))
        if part.nbytes != nbytes:
            sent = f"rank {self.ranks[i]} has sent {part.nbytes} bytes where {nbytes} were expected"
            raise self._diverged(lambda data: self._exchange_reports(peers, data), sent)
        return part

    def _exchange_reports(self, peers: SharedMemoryPeers, data: bytes) -> list[bytes]:
        peers.report(data)
        return [
            data if i == self.index else peers.read_report(rank, _REPORT_SECONDS)
            for i, rank in enumerate(self.ranks)
        ]

    def _lost_rank_error(
        self, peers: SharedMemoryPeers, error: PeerLost | Deadlock
    ) -> GlobalTensorError:
        """Return the error for a rank that no longer comes.

        That rank may have reported the reason.
        """
        gone = None if isinstance(error, Deadlock) else error.gone
        record = b"" if gone is None else peers.last_words_of(gone)
        if self.world.compares and any(
            peers.has_report(rank) for rank in self.ranks if rank != self.world.rank
        ):
            return self._diverged(lambda data: self._exchange_reports(peers, data))
        if isinstance(error, Deadlock):
            return self.deadlock_error(error)
        if gone is None:
            return self.broken("a collective", error)
        how, early = how_it_ended(record)
        return self.broken("a collective", error, f"rank {gone} {how}", early)

    def _compare(self, device: torch.device) -> None:
        if self.peers(device) is None:
            super()._compare(device)  # otherwise the notes carry the digest

    def _next_number(self) -> int:
        self._number += 1
        return self._number << 20

    def _transfer(
        self, peers: SharedMemoryPeers, sends: Sequence[_Left], recvs: Mapping[int, Tensor]
    ) -> None:
        """Send flat bytes, and fill other flat tensors with the received bytes."""
        number = self._next_number()
        longest = max(
            [0, *(data.numel() for data, _ in sends), *(out.numel() for out in recvs.values())]
        )
        for k, at in enumerate(range(0, longest, _PIECE)):
            if parts := [
                (_slice_piece(data, at, _PIECE), to) for data, to in sends if data.numel() > at
            ]:
                self._publish(peers, number + k, parts, patient=True)
            for i, out in recvs.items():
                if out.numel() > at:
                    piece = _slice_piece(out, at, _PIECE)
                    part = self._read(peers, number + k, i, piece.numel(), self._digest)
                    piece.copy_(part.data)
                    part.done()

    def _reduce(
        self,
        peers: SharedMemoryPeers,
        sends: Mapping[int, Tensor],
        own_flat: Tensor,
        op: str,
        out: Tensor,
    ) -> None:
        """Send flat tensors, and combine ``own_flat`` with the received ones into ``out``.

        ``out`` may be ``own_flat``. If all ranks get the same tensor, it is written once.
        """
        number, size, flats = self._next_number(), own_flat.itemsize, list(sends.values())
        same = len({id(flat) for flat in flats}) == 1
        step = _PIECE // size
        for k, at in enumerate(
            range(0, max(own_flat.numel(), *(flat.numel() for flat in flats)), step)
        ):
            if same:
                parts: list[_Left] = (
                    [(as_bytes(_slice_piece(flats[0], at, step)), self._others)]
                    if flats[0].numel() > at
                    else []
                )
            else:
                parts = [
                    (as_bytes(_slice_piece(flat, at, step)), (i,))
                    for i, flat in sends.items()
                    if flat.numel() > at
                ]
            if parts:
                self._publish(peers, number + k, parts, patient=True)
            if own_flat.numel() > at:
                self._add(
                    peers,
                    number + k,
                    _slice_piece(own_flat, at, step),
                    op,
                    _slice_piece(out, at, step),
                )

    def _add(
        self, peers: SharedMemoryPeers, number: int, own_piece: Tensor, op: str, out: Tensor
    ) -> None:
        received = {
            i: self._read(peers, number, i, own_piece.nbytes, self._digest) for i in self._others
        }
        parts = [
            own_piece if i == self.index else received[i].data.view(own_piece.dtype)
            for i in range(self.size)
        ]
        _combine_into(parts, op, out)
        for part in received.values():
            part.done()

    # Collectives

    def _swap(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> None:
        peers = self.peers(device)
        if peers is None:
            return super()._swap(sends, recvs, device)
        return self._transfer(peers, [(data, (i,)) for i, data in sends.items()], recvs)

    def _swap_async(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> Handle:
        peers = self.peers(device)
        if peers is None:
            return super()._swap_async(sends, recvs, device)
        number = self._next_number()
        if sends:
            self._publish(peers, number, [(data, (i,)) for i, data in sends.items()])

        def read(parts: Sequence[SharedBlock]) -> None:
            for out, part in zip(recvs.values(), parts, strict=True):
                out.copy_(part.data)

        return _PendingRead(
            self, peers, number, [(i, out.nbytes) for i, out in recvs.items()], read
        )

    def _send_to_all(
        self, peers: SharedMemoryPeers, sends: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        into = {i: as_bytes(outs[i]) for i in self._others if outs[i].numel()}
        self._transfer(
            peers, [(as_bytes(sends[i]), (i,)) for i in self._others if sends[i].numel()], into
        )

    def _all_to_all_parts(
        self, sends: Sequence[Tensor], numels: Sequence[int], longest: int | None
    ) -> list[Tensor]:
        own = sends[self.index]
        peers = self.peers(own.device)
        if peers is None:
            return super()._all_to_all_parts(sends, numels, longest)
        parts = [own if i == self.index else own.new_empty(n) for i, n in enumerate(numels)]
        self._send_to_all(peers, sends, parts)
        return parts

    def _all_to_all(
        self, sends: Sequence[Tensor], numels: Sequence[int], out: Tensor, longest: int | None
    ) -> None:
        peers = self.peers(out.device)
        if peers is None:
            return super()._all_to_all(sends, numels, out, longest)
        slots = out.split_with_sizes(list(numels))
        self._send_to_all(peers, sends, slots)
        slots[self.index].copy_(sends[self.index])
        return None

    def _all_gather_parts(self, flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
        peers = self.peers(flat.device)
        if peers is None:
            return super()._all_gather_parts(flat, numels)
        parts = [flat if i == self.index else flat.new_empty(n) for i, n in enumerate(numels)]
        self._gather(peers, flat, parts)
        return parts

    def _all_gather(self, flat: Tensor, numels: Sequence[int], out: Tensor) -> None:
        peers = self.peers(out.device)
        if peers is None:
            return super()._all_gather(flat, numels, out)
        slots = out.split_with_sizes(list(numels))
        self._gather(peers, flat, slots)
        if slots[self.index].data_ptr() != flat.data_ptr():
            slots[self.index].copy_(flat)
        return None

    def _gather(self, peers: SharedMemoryPeers, flat: Tensor, slots: Sequence[Tensor]) -> None:
        self._transfer(
            peers,
            [(as_bytes(flat), self._others)] if flat.numel() else [],
            {i: as_bytes(slots[i]) for i in self._others if slots[i].numel()},
        )

    def _all_gather_async(self, flat: Tensor, numels: Sequence[int], out: Tensor) -> Handle:
        peers = self.peers(out.device) if max(numels) * out.itemsize <= _AHEAD else None
        if peers is None:
            return super()._all_gather_async(flat, numels, out)
        number, slots = self._next_number(), out.split_with_sizes(list(numels))
        if flat.numel():
            self._publish(peers, number, [(as_bytes(flat), self._others)])
        slots[self.index].copy_(flat)
        senders = [i for i in self._others if numels[i]]

        def read(parts: Sequence[SharedBlock]) -> None:
            for i, part in zip(senders, parts, strict=True):
                as_bytes(slots[i]).copy_(part.data)

        return _PendingRead(self, peers, number, [(i, slots[i].nbytes) for i in senders], read)

    def _broadcast(self, flat: Tensor, src: int) -> None:
        peers = self.peers(flat.device)
        if peers is None:
            super()._broadcast(flat, src)
        elif self.index == src:
            self._transfer(peers, [(as_bytes(flat), self._others)], {})
        else:
            self._transfer(peers, [], {src: as_bytes(flat)})

    def _reduce_scatter(self, sends: Sequence[Tensor], op: str) -> Tensor:
        own_chunk = sends[self.index]
        peers = self.peers(own_chunk.device)
        if peers is None:
            return super()._reduce_scatter(sends, op)
        out = torch.empty_like(own_chunk)
        self._reduce(peers, {i: sends[i] for i in self._others}, own_chunk, op, out)
        return out

    def _reduce_scatter_async(self, sends: Sequence[Tensor], op: str) -> ReduceScatterHandle:
        own_chunk = sends[self.index]
        peers = (
            self.peers(own_chunk.device)
            if max(s.nbytes for s in sends) * self.size <= _AHEAD
            else None
        )
        if peers is None:
            return super()._reduce_scatter_async(sends, op)
        number, out = self._next_number(), torch.empty_like(own_chunk)
        if parts := [(as_bytes(sends[i]), (i,)) for i in self._others if sends[i].numel()]:
            self._publish(peers, number, parts)
        senders = self._others if own_chunk.numel() else []
        return ReduceScatterHandle(
            _PendingRead(
                self,
                peers,
                number,
                [(i, own_chunk.nbytes) for i in senders],
                self._reduce_reader(own_chunk, op, out),
            ),
            lambda: out,
        )

    def _all_reduce(self, flat: Tensor, op: str) -> Tensor:
        peers = self.peers(flat.device)
        if peers is None:
            return super()._all_reduce(flat, op)
        if self.size > 2 and flat.nbytes * (self.size - 1) > _READ:
            # The base class runs a reduce-scatter and an all-gather.
            return super(ProcessGroupCommunicator, self)._all_reduce(flat, op)
        out = torch.empty_like(flat)
        self._reduce(peers, dict.fromkeys(self._others, flat), flat, op, out)
        return out

    def _all_reduce_async(self, flat: Tensor, op: str) -> Handle:
        peers = self.peers(flat.device) if flat.nbytes * (self.size - 1) <= _AHEAD else None
        if peers is None:
            return super()._all_reduce_async(flat, op)
        number, own_flat = self._next_number(), flat.detach().view(-1)
        self._publish(peers, number, [(as_bytes(own_flat), self._others)])
        return _PendingRead(
            self,
            peers,
            number,
            [(i, own_flat.nbytes) for i in self._others],
            self._reduce_reader(own_flat, op, own_flat),
        )

    def _reduce_reader(
        self, own_flat: Tensor, op: str, out: Tensor
    ) -> Callable[[Sequence[SharedBlock]], None]:
        def read(blocks: Sequence[SharedBlock]) -> None:
            if not blocks:
                return
            parts = [part.data.view(own_flat.dtype) for part in blocks]
            parts.insert(self.index, own_flat)
            _combine_into(parts, op, out)

        return read


def _slice_piece(flat: Tensor, at: int, size: int) -> Tensor:
    """Return ``size`` elements of a flat tensor from ``at`` on, or up to its end.

    Most tensors fit into one piece, and a slice takes 1 us.
    """
    return flat if at == 0 and flat.numel() <= size else flat[at : at + size]


class _PendingRead:
    """A collective whose data is in transit. ``wait`` passes the data to ``read``."""

    def __init__(
        self,
        comm: SharedMemoryCommunicator,
        peers: SharedMemoryPeers,
        number: int,
        pending: Sequence[tuple[int, int]],
        read: Callable[[Sequence[SharedBlock]], None],
    ) -> None:
        self._comm, self._peers, self._number, self._pending, self._read = (
            comm,
            peers,
            number,
            list(pending),
            read,
        )
        self._digest = comm._digest

    def wait(self) -> None:
        blocks = []
        while self._pending:
            blocks.append(
                self._comm._read(self._peers, self._number, *self._pending[0], self._digest)
            )
            del self._pending[0]
        if blocks:
            self._read(blocks)
        for part in blocks:
            part.done()

    def __del__(self) -> None:
        for i, _ in self._pending:
            self._peers.forget(self._comm.ranks[i], self._comm._topic, self._number)


def _combine_into(parts: list[Tensor], op: str, out: Tensor) -> None:
    """Combine the parts into ``out``, which may be one of them."""
    # An operand after the second would be overwritten before it is read.
    total = combine(parts, op, out=None if any(out is part for part in parts[2:]) else out)
    if total is not out:
        out.copy_(total)


def stable_hash(of: object) -> int:
    """Return a hash of ``repr(of)`` that is the same in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest(), "little")


def neighbours(world: ProcessWorld) -> SharedMemoryPeers | None:
    """Return the peers of this rank on its host, or None if the rank shares no memory."""
    if world.neighbours is None and host():
        with contextlib.suppress(OSError):
            world.neighbours = SharedMemoryPeers(world.rank, world.watchdog)
    return world.neighbours
