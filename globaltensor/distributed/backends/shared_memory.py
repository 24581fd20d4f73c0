"""Memory that the ranks of one host share: senders copy data there once, receivers read it there.

`shared_memory_comm` and `p2p_channels` call this module.

Each rank writes into its own memory files, which the other ranks map. The files are memfds: they
have no name, so nothing is left behind whatever happens. Between each two ranks a Unix socket
carries notes, which say which part of a file is for which rank. The socket also shows at once that
a rank has died. Sending never waits until the data is read. So a collective that has started goes
on without attention, and needs no thread.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..watchdog import Deadlock, Wait, Watchdog

__all__ = ["VARIABLE", "PeerLost", "SharedBlock", "SharedMemoryPeers", "host"]

VARIABLE: Final = "GLOBALTENSOR_SHARED_MEMORY"
_FILE: Final = 64 << 20  # bytes of a memory file; only those written take memory
_MIN_BLOCK_BYTES: Final = 4 << 10  # smallest size of a block in bytes; all sizes are powers of two
# Bytes at the start of a block. Each reader has one, which is 1 once it has read its part. Parts
# are aligned to this size too.
_HEAD: Final = 64
# With more unread bytes than this, a patient sender waits before it publishes more.
_UNREAD: Final = 256 << 20
#: Topic, number, digest of the collective, file, the place of the reader's mark, the place of the
#: part, its size in bytes.
_NOTE: Final = struct.Struct("<QQ8sIIQQ")
# Topics: reports of ranks that have diverged, and records of ranks that end.
_REPORTS, _LAST_WORDS = (1 << 64) - 1, (1 << 64) - 2
_HELLO: Final = struct.Struct("<II")  # rank, and the purpose of the connection
_NOTES, _FILES = 0, 1
_LAST_NOTES: Final = 8  # times that the notes of a peer that has gone are read
_SLICE: Final = 0.05  # seconds between checks for notes that another thread has received
_LOOKS: Final = 40  # checks of a socket before sleeping


class PeerLost(RuntimeError):
    """An error: a peer died, or published a block of unexpected size.

    ``gone`` is the rank of a peer that has closed its connection, or None.
    """

    def __init__(self, message: str, gone: int | None = None) -> None:
        super().__init__(message)
        self.gone = gone


def host() -> str:
    """Return a text that is equal in processes that can share memory.

    These have one boot, network namespace and user. Return an empty string if memory cannot be
    shared, or if that is turned off.
    """
    if (
        os.environ.get(VARIABLE, "1") == "0"
        or not hasattr(os, "memfd_create")
        or not hasattr(socket, "send_fds")
    ):
        return ""
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.readlink('/proc/self/ns/net')} {os.getuid()}"
        )
    except OSError:
        return ""


#: Taking a lock is a memory barrier: reads and writes before it are seen before later ones, also on
#: processors with weak memory ordering.
_BARRIER: Final = threading.Lock()


class _File:
    """A mapped memory file."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.bytes = mmap.mmap(descriptor, size)

    def part(self, start: int, nbytes: int) -> Tensor:
        """Return ``nbytes`` bytes of the file, at least one, from ``start`` on."""
        return torch.frombuffer(self.bytes, dtype=torch.uint8, offset=start, count=nbytes)

    def read(self, mark: int) -> None:
        """Mark the part with this mark as read."""
        with _BARRIER:
            pass
        self.bytes[mark] = 1


class _Block(NamedTuple):
    """A block of one of this rank's memory files."""

    number: int
    file: _File
    start: int
    size: int

    def lend(self, readers: int) -> None:
        """Mark the block as unread by its readers."""
        self.file.bytes[self.start : self.start + _HEAD] = _UNREAD_BY[readers]

    @property
    def idle(self) -> bool:
        return self.file.bytes[self.start : self.start + _HEAD] == _ALL_READ


_ALL_READ: Final = b"\1" * _HEAD
#: The head of a block that so many readers have to read.
_UNREAD_BY: Final = [bytes(readers) + b"\1" * (_HEAD - readers) for readers in range(_HEAD + 1)]


class _Arena:
    """The memory that this rank writes, in blocks that are reused once all readers are done."""

    def __init__(self) -> None:
        self.files: list[tuple[int, int, _File]] = []  # descriptor, size and mapping of each
        self._lent: dict[int, deque[_Block]] = {}
        self.bytes = 0  # size of all blocks
        self._open(_FILE)

    def take(self, nbytes: int) -> _Block:
        """Return an unused block for ``nbytes`` bytes."""
        size = max(_MIN_BLOCK_BYTES, 1 << (nbytes + _HEAD - 1).bit_length())
        lent = self._lent.setdefault(size, deque())
        # Try the oldest blocks, and several of them: one that is read late must not hide the
        # others.
        for _ in range(min(4, len(lent))):
            lent.rotate(-1)
            if lent[-1].idle:
                return lent[-1]
        block = self._append_block(size)
        lent.append(block)
        return block

    def _append_block(self, size: int) -> _Block:
        if self._used + size > self.files[-1][1]:
            self._open(max(_FILE, size))
        block = _Block(len(self.files) - 1, self.files[-1][2], self._used, size)
        self._used += size
        self.bytes += size
        return block

    def _open(self, size: int) -> None:
        descriptor = os.memfd_create("globaltensor")
        os.ftruncate(descriptor, size)
        self.files.append((descriptor, size, _File(descriptor, size)))
        self._used = 0

    def unread(self) -> int:
        """Return the bytes of the blocks that some rank still has to read."""
        return sum(
            block.size for lent in list(self._lent.values()) for block in lent if not block.idle
        )

    def close(self) -> None:
        for descriptor, _, _ in self.files:
            os.close(descriptor)
        self.files, self._lent = [], {}


class SharedBlock:
    """A block that a peer has published for this rank.

    ``data`` are flat bytes in the peer's memory, valid until ``done``. ``digest`` is that of the
    collective to which the block belongs.
    """

    def __init__(self, file: _File, mark: int, start: int, nbytes: int, digest: bytes) -> None:
        self.data, self.nbytes, self.digest = file.part(start, nbytes), nbytes, digest
        self._file, self._mark = file, mark

    def done(self) -> None:
        """Mark the block as read, so that its memory may be written again."""
        self._file.read(self._mark)


class _Peer:
    """The connections with another rank, and the state of what it has sent."""

    def __init__(self) -> None:
        self.notes: socket.socket | None = None
        self.descriptors: socket.socket | None = None
        self.files: list[_File] = []
        self.files_sent = 0  # how many of this rank's files the peer has
        self.rest = b""
        self.left = False
        self.reports = 0  # the peer's reports that were read

    def close(self) -> None:
        for end in (self.notes, self.descriptors):
            if end is not None:
                end.close()
        self.files, self.left = [], True


class SharedMemoryPeers:
    """The ranks of this host as seen by one of them, with the blocks that they publish.

    Both sides know the topic and number of each block. The constructor raises OSError if the system
    refuses the resources.
    """

    def __init__(self, rank: int, watchdog: Watchdog | None = None) -> None:
        self.rank, self.name = rank, secrets.token_hex(16)
        self._watchdog, self._waits = watchdog, dict[int, Wait]()
        self._arena, self._peers = _Arena(), dict[int, _Peer]()
        self._arrived: dict[tuple[int, int, int], tuple[bytes, int, int, int, int]] = {}
        self._reports = 0  # this rank's reports that were sent
        self._records: dict[int, bytes] = {}  # of ranks that have ended
        self._unwanted: set[tuple[int, int, int]] = set()
        self._lock = threading.RLock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0globaltensor-{self.name}")
        self._listener.listen(256)
        self._ready = select.epoll()
        _ALL.add(self)

    def connect(self, names: Mapping[int, str], seconds: Callable[[], float]) -> None:
        """Connect with the ranks of these names, which do the same.

        The higher rank calls, and the lower one answers. Raise PeerLost if a rank does not come.
        """
        with self._lock:
            for rank, name in names.items():
                if rank < self.rank and rank not in self._peers:
                    peer = self._peers[rank] = _Peer()
                    for purpose in (_NOTES, _FILES):
                        self._keep_socket(peer, purpose, self._connect_socket(name, purpose, rank))
            end = time.monotonic() + seconds()
            while missing := [
                rank for rank in names if rank > self.rank and not self._is_connected(rank)
            ]:
                self._listener.settimeout(max(0.001, end - time.monotonic()))
                try:
                    self._accept_connection()
                except TimeoutError:
                    raise PeerLost(
                        f"rank {missing[0]}, of the same host, did not connect within "
                        f"{seconds():.0f} s"
                    ) from None

    def _is_connected(self, rank: int) -> bool:
        peer = self._peers.get(rank)
        return peer is not None and None not in (peer.notes, peer.descriptors)

    def _connect_socket(self, name: str, purpose: int, rank: int) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(f"\0globaltensor-{name}")
            end.sendall(_HELLO.pack(self.rank, purpose))
        except OSError as error:
            end.close()
            raise PeerLost(f"rank {rank}, of the same host, cannot be reached: {error}") from error
        return end

    def _accept_connection(self) -> None:
        end, _ = self._listener.accept()
        _, uid, _ = struct.unpack(
            "iii", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iii"))
        )
        end.settimeout(10.0)
        hello = b""
        if uid == os.getuid():
            with contextlib.suppress(OSError):
                hello = end.recv(_HELLO.size, socket.MSG_WAITALL)
        if len(hello) < _HELLO.size:
            end.close()  # the caller is not one of our ranks
            return
        rank, purpose = _HELLO.unpack(hello)
        self._keep_socket(self._peers.setdefault(rank, _Peer()), purpose, end)

    def _keep_socket(self, peer: _Peer, purpose: int, end: socket.socket) -> None:
        if purpose == _FILES:
            end.settimeout(None)
            peer.descriptors = end
        else:
            end.setblocking(False)
            peer.notes = end
            self._ready.register(end, select.EPOLLIN)

    # Publishing

    def publish(
        self,
        topic: int,
        number: int,
        parts: Sequence[tuple[Tensor, Sequence[int]]],
        patient: bool = False,
        digest: bytes = b"",
    ) -> None:
        """Publish flat bytes for the ranks given with them.

        If ``patient`` and much is still unread, wait first until it is read. ``digest`` is 8 bytes
        that are sent along. Raise PeerLost if a rank has gone.
        """
        total = readers = 0
        for data, ranks in parts:
            total += -(-data.numel() // _HEAD) * _HEAD
            readers += len(ranks)
        with self._lock:
            if patient and self._arena.bytes > _UNREAD and self._arena.unread() > _UNREAD:
                self._wait_for_readers()
            block = self._arena.take(total)
            block.lend(readers)
            at, mark, notes = block.start + _HEAD, block.start, []
            for data, ranks in parts:
                n = data.numel()
                block.file.part(at, n).copy_(data)
                for rank in ranks:
                    notes.append(
                        (rank, _NOTE.pack(topic, number, digest, block.number, mark, at, n))
                    )
                    mark += 1
                at += -(-n // _HEAD) * _HEAD
            with _BARRIER:
                pass
            for rank, note in notes:
                self._send_note(rank, note)

    def _send_note(self, rank: int, note: bytes) -> None:
        peer = self._peers[rank]
        if peer.left or peer.notes is None or peer.descriptors is None:
            raise PeerLost(f"rank {rank} has gone", rank)
        try:
            while peer.files_sent < len(self._arena.files):
                descriptor, size, _ = self._arena.files[peer.files_sent]
                socket.send_fds(peer.descriptors, [size.to_bytes(8, "little")], [descriptor])
                peer.files_sent += 1
            while note:
                try:
                    sent = peer.notes.send(note)
                    if sent == len(note):
                        return
                    note = note[sent:]
                except BlockingIOError:
                    # The peer has many notes to read, and may itself be waiting until this rank
                    # reads its notes.
                    self._read_all_notes()
                    select.select([], [peer.notes], [], 0.001)
        except OSError as error:
            self._mark_lost(rank, peer)
            raise PeerLost(f"rank {rank} has gone: {error}", rank) from error

    def _wait_for_readers(self) -> None:
        while self._arena.unread() > _UNREAD // 2:
            self._read_all_notes()
            if gone := [rank for rank, peer in self._peers.items() if peer.left]:
                raise PeerLost(f"rank {gone[0]} has gone", gone[0])
            time.sleep(0.0005)

    # Reading

    def has_arrived(self, rank: int, topic: int, number: int) -> bool:
        """Return True if that block has arrived or can no longer arrive, without waiting."""
        wanted, peer = (rank, topic, number), self._peers[rank]
        if wanted not in self._arrived and not peer.left:
            with self._lock:
                self._read_notes(rank, peer)
        return wanted in self._arrived or peer.left

    def read(
        self, rank: int, topic: int, number: int, nbytes: int | None, seconds: Callable[[], float]
    ) -> SharedBlock:
        """Return the block that ``rank`` publishes, and wait for it if needed.

        Raise PeerLost if it does not come in time, or if ``nbytes`` is given and its size differs.
        """
        wanted = rank, topic, number
        arrival = self._arrived.pop(wanted, None)
        if arrival is None:
            arrival = self._wait_for_note(wanted, seconds)
        digest, file, mark, start, size = arrival
        if nbytes is not None and size != nbytes:
            raise PeerLost(
                f"rank {rank} has sent {size} bytes where {nbytes} were expected: the ranks run "
                f"different operations"
            )
        return SharedBlock(self._file(rank, file), mark, start, size, digest)

    # Reports

    def last_words(self, data: bytes) -> dict[int, bytes]:
        """Publish this rank's record at its end, and return the records of ranks that ended before.

        This function does not wait.
        """
        self._publish_to_all(_LAST_WORDS, 0, data)
        return self.records_at_end()

    def records_at_end(self) -> dict[int, bytes]:
        """Return the records of the ranks that have ended.

        This function does not wait.
        """
        with self._lock:
            self._read_all_notes()
        return {rank: data for rank in self._peers if (data := self._record_of(rank))}

    def last_words_of(self, rank: int) -> bytes:
        """Return the record that a rank has left at its end, or empty bytes.

        Notes that a peer sent before it closed its connection are read first.
        """
        self._read_last_notes(rank)
        return self._record_of(rank)

    def _record_of(self, rank: int) -> bytes:
        if (rank, _LAST_WORDS, 0) in self._arrived:
            block = self.read(rank, _LAST_WORDS, 0, None, lambda: 0.0)
            self._records[rank] = block.data.numpy().tobytes()
        return self._records.get(rank, b"")

    def left_silently(self) -> set[int]:
        """Return the ranks that have closed their connection and have left no record."""
        for rank in list(self._peers):
            self._read_last_notes(rank)
        return {r for r, peer in self._peers.items() if peer.left and not self._record_of(r)}

    def _read_last_notes(self, rank: int) -> None:
        """Read the notes that a peer sent before it closed its connection."""
        peer = self._peers[rank]
        with self._lock, contextlib.suppress(OSError):
            for _ in range(_LAST_NOTES):
                if peer.notes is not None:
                    self._read_notes(rank, peer)

    def _publish_to_all(self, topic: int, number: int, data: bytes) -> None:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for rank, peer in list(self._peers.items()):
            if not peer.left:
                with contextlib.suppress(PeerLost):
                    self.publish(topic, number, [(flat, [rank])])

    def report(self, data: bytes) -> None:
        """Publish a report of this rank for each connected rank, except those that have gone."""
        self._publish_to_all(_REPORTS, self._reports, data)
        self._reports += 1

    def has_report(self, rank: int) -> bool:
        """Return True if a report of that rank can be read now."""
        peer = self._peers.get(rank)
        return peer is not None and (rank, _REPORTS, peer.reports) in self._arrived

    def read_report(self, rank: int, seconds: float) -> bytes:
        """Return the next report of a rank, or empty bytes if it does not come in ``seconds``."""
        peer = self._peers.get(rank)
        if peer is None:
            return b""
        try:
            part = self.read(rank, _REPORTS, peer.reports, None, lambda: seconds)
        except (PeerLost, Deadlock):
            return b""
        peer.reports += 1
        data: bytes = part.data.numpy().tobytes()
        part.done()
        return data

    def forget(self, rank: int, topic: int, number: int) -> None:
        """Discard a block that no code will read, now or when it arrives."""
        wanted = rank, topic, number
        with self._lock:
            arrival = self._arrived.pop(wanted, None)
            if arrival is None:
                self._unwanted.add(wanted)
            elif not self._peers[rank].left:
                self._file(rank, arrival[1]).read(arrival[2])

    def _wait_for_note(
        self, wanted: tuple[int, int, int], seconds: Callable[[], float]
    ) -> tuple[bytes, int, int, int, int]:
        rank = wanted[0]
        peer = self._peers[rank]
        for _ in range(_LOOKS):
            with self._lock:
                self._read_notes(rank, peer)
                arrival = self._arrived.pop(wanted, None)
            if arrival is not None:
                return arrival
            if peer.left:
                raise PeerLost(f"rank {rank} has gone", rank)
            os.sched_yield()
        end = time.monotonic() + seconds()
        with self._watched_wait(rank) as wait:
            while True:
                # A peer whose notes are not read cannot go on, and this rank may be waiting for a
                # result of that peer.
                with self._lock:
                    self._read_all_notes()
                    arrival = self._arrived.pop(wanted, None)
                if arrival is not None:
                    return arrival
                if peer.left:
                    raise PeerLost(f"rank {rank} has gone", rank)
                if wait is not None and wait.found is not None:
                    raise wait.found
                now = time.monotonic()
                if now > end:
                    raise PeerLost(
                        f"nothing has come from rank {rank} for {seconds():.0f} s: timed out"
                    )
                self._ready.poll(min(_SLICE, end - now + 0.001))

    def _watched_wait(self, rank: int) -> AbstractContextManager[Wait | None]:
        """Return the block in which the main thread waits for a rank, for the watchdog."""
        if self._watchdog is None or threading.current_thread() is not threading.main_thread():
            return contextlib.nullcontext()
        wait = self._waits.get(rank)
        if wait is None:
            wait = self._waits[rank] = Wait(self._watchdog, [rank])
        return wait

    def _read_all_notes(self) -> None:
        for rank, peer in list(self._peers.items()):
            if not peer.left:
                self._read_notes(rank, peer)

    def _read_notes(self, rank: int, peer: _Peer) -> None:
        assert peer.notes is not None
        try:
            heard = peer.notes.recv(_NOTE.size << 8)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not heard:
            self._mark_lost(rank, peer)
            return
        if peer.rest or len(heard) % _NOTE.size:
            heard = peer.rest + heard
            whole = len(heard) // _NOTE.size * _NOTE.size
            heard, peer.rest = heard[:whole], heard[whole:]
        for topic, number, digest, file, mark, start, size in _NOTE.iter_unpack(heard):
            name = rank, topic, number
            if name in self._unwanted:
                self._unwanted.discard(name)
                self._file(rank, file).read(mark)
            else:
                self._arrived[name] = digest, file, mark, start, size

    def _file(self, rank: int, number: int) -> _File:
        peer = self._peers[rank]
        with self._lock:
            while len(peer.files) <= number:
                assert peer.descriptors is not None
                data, (descriptor, *_), _, _ = socket.recv_fds(peer.descriptors, 8, 1)
                peer.files.append(_File(descriptor, int.from_bytes(data, "little")))
                os.close(descriptor)
            return peer.files[number]

    def _mark_lost(self, rank: int, peer: _Peer) -> None:
        """Record that a peer has closed its connection.

        Blocks that it published before can still be read.
        """
        peer.left = True
        assert peer.notes is not None
        with contextlib.suppress(OSError, ValueError):
            self._ready.unregister(peer.notes)

    def close(self) -> None:
        """Close the connections and release the memory."""
        self._listener.close()
        self._ready.close()
        for peer in self._peers.values():
            peer.close()
        self._arena.close()


def _leave_to_parent() -> None:
    """Close the connections in a child of a fork, such as a data loader's worker.

    Otherwise the peers would not notice it when the parent ends.
    """
    for each in list(_ALL):
        each.close()


_ALL: Final[weakref.WeakSet[SharedMemoryPeers]] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
