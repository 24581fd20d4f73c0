"""Rounds of messages to and from some ranks, in progress together. No call here waits.

`collectives` and `process_group` build on rounds. A message is received only once it has arrived
and its length is known to be right. Open MPI 5 writes past the end of a receive that was posted for
fewer bytes than a long message has. This was seen with 5.0.11 between processes of one host.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ....errors import WorldError
from .library import Library

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Inbox", "Round", "Team"]

_NOTHING: Final = torch.empty(0, dtype=torch.uint8)

#: MPI counts bytes with 32 bits, so longer messages are sent in pieces.
_PIECE: Final = 1 << 30


class Team:
    """The ranks that exchange messages: ``members`` of an MPI communicator, in order.

    ``index`` is the index of this rank among them.
    """

    __slots__ = ("comm", "index", "library", "members", "memory", "names", "size", "testall")

    def __init__(
        self,
        library: Library,
        comm: MPI.Intracomm,
        members: Sequence[int],
        names: Sequence[int],
        index: int,
    ) -> None:
        self.library, self.comm, self.members, self.names, self.index, self.size = (
            library,
            comm,
            members,
            names,
            index,
            len(members),
        )
        self.memory, self.testall = library.api.buffer.fromaddress, library.api.Request.Testall

    def part(self, chosen: Sequence[int]) -> Team:
        """Return the team of the ranks at the chosen indexes, which must include this rank."""
        members, names = [self.members[i] for i in chosen], [self.names[i] for i in chosen]
        return Team(self.library, self.comm, members, names, chosen.index(self.index))


def pieces(t: Tensor) -> Sequence[tuple[int, int]]:
    """Return (address, bytes) of a contiguous tensor, in pieces that MPI can count.

    An empty tensor has one piece of no bytes.
    """
    at, nbytes = t.data_ptr(), t.nbytes
    if nbytes <= _PIECE:
        return ((at, nbytes),)
    return [(at + done, min(_PIECE, nbytes - done)) for done in range(0, nbytes, _PIECE)]


def receive(
    team: Team, message: MPI.Message, status: MPI.Status, at: int, want: int, source: int
) -> MPI.Request:
    """Start receiving a message that has arrived.

    Raise WorldError if its length is wrong. The message is then received and dropped, so that its
    sender can go on.
    """
    api = team.library.api
    got = status.Get_count(api.BYTE)
    if got == want:
        return message.Irecv(team.memory(at, want))
    waste = torch.empty(max(0, got), dtype=torch.uint8)
    message.Recv(api.buffer.fromaddress(waste.data_ptr(), waste.nbytes))
    if got == 0:
        raise WorldError(
            f"rank {team.names[source]} sent nothing where {want} bytes are expected: it gave up "
            f"(its own error says why), or sends no elements"
        )
    raise WorldError(
        f"rank {team.names[source]} sent {got} bytes where {want} are expected: the ranks pass "
        f"tensors of different sizes, or run different operations"
    )


def _wait_for_kernels(t: Tensor) -> None:
    """Wait for queued kernels of a CUDA tensor.

    MPI does not know about kernels that write the data to send, or that read the memory to receive
    into.
    """
    if t.is_cuda:
        torch.cuda.current_stream(t.device).synchronize()


class Round:
    """A set of messages with one tag among a team.

    Tensors must be contiguous, and must not be touched until the round is finished. If ``shared``,
    all ranks of the team take part, each with its own rounds.
    """

    __slots__ = ("_arriving", "_buffers", "_requests", "_shared", "_status", "_tag", "_team")

    def __init__(self, team: Team, tag: int, shared: bool = True) -> None:
        self._team, self._tag, self._shared = team, tag, shared
        self._requests: list[MPI.Request] = []
        self._arriving: list[tuple[int, int, int]] = []
        self._buffers: list[Tensor] = []
        self._status = team.library.api.Status()

    @classmethod
    def begun(
        cls,
        team: Team,
        tag: int,
        requests: Sequence[MPI.Request],
        arriving: Sequence[tuple[int, int, int]],
        buffers: Sequence[Tensor],
    ) -> Round:
        """Create a round whose messages have already started."""
        this_round = cls(team, tag)
        this_round._requests, this_round._arriving, this_round._buffers = (
            list(requests),
            list(arriving),
            list(buffers),
        )
        return this_round

    def send(self, t: Tensor, to: int) -> None:
        """Start sending to the rank at this index of the team."""
        team = self._team
        _wait_for_kernels(t)
        self._buffers.append(t)
        for at, nbytes in pieces(t):
            self._requests.append(
                team.comm.Isend(team.memory(at, nbytes), team.members[to], self._tag)
            )

    def receive(self, t: Tensor, source: int) -> None:
        """Receive the next message from the rank at this index of the team."""
        _wait_for_kernels(t)
        self._buffers.append(t)
        for at, nbytes in pieces(t):
            self._arriving.append((source, at, nbytes))

    def finished(self) -> bool:
        """Advance as far as possible without waiting.

        Return True if all messages are complete. Raise WorldError for a message of a wrong length.
        """
        if self._arriving and not self._all_arrived():
            return False
        return not self._requests or self._team.testall(self._requests)

    def _all_arrived(self) -> bool:
        team, status, tag = self._team, self._status, self._tag
        # The pieces from one rank must be received in order. ``silent`` are ranks without a
        # message.
        arriving, silent = (
            self._arriving,
            [],
        )
        at = 0
        while at < len(arriving):
            source, address, want = arriving[at]
            message = (
                None if source in silent else team.comm.Improbe(team.members[source], tag, status)
            )
            if message is None:
                silent.append(source)
                at += 1
            else:
                del arriving[at]
                self._requests.append(receive(team, message, status, address, want, source))
        return not arriving

    def moving(self) -> bool:
        """Return True if everything to be received has begun to arrive and is in transit."""
        return not self._arriving and bool(self._requests)

    def awaited(self) -> list[int]:
        """Return the ranks, by their names, whose messages have not arrived yet."""
        return sorted({self._team.names[entry[0]] for entry in self._arriving})

    def left(self) -> list[int]:
        """Return the ranks, by their names, that have abandoned the round.

        They will not receive what was sent to them. A round of empty messages does not wait long
        enough for this to matter.
        """
        team, status, empty = self._team, self._status, []
        for i, member in enumerate(team.members) if self._shared and not self._arriving else ():
            if (
                i != team.index
                and team.comm.Iprobe(member, self._tag, status)
                and status.Get_count(team.library.api.BYTE) == 0
            ):
                empty.append(team.names[i])
        return empty

    def abandon(self) -> None:
        """Abandon the round, and notify the other ranks.

        The notice is a message of no bytes after the messages sent before.
        """
        self._arriving = []
        with contextlib.suppress(self._team.library.api.Exception):
            for to in range(self._team.size if self._shared else 0):
                if to != self._team.index:
                    self.send(_NOTHING, to)
        self._team.library.abandon(self._requests, self._buffers)


class Inbox:
    """The single messages that ranks of one group send each other.

    Receives get the messages in the order in which the receives were posted.
    """

    def __init__(self, team: Team) -> None:
        self.team, self.lock = team, threading.Lock()
        self._lines: dict[int, list[Letter]] = {}  # by tag

    def ask(self, letter: Letter) -> None:
        """Queue a receive."""
        with self.lock:
            self._lines.setdefault(letter.tag, []).append(letter)

    def leave(self, letter: Letter) -> None:
        """Remove a receive from the queue. The caller must hold the lock."""
        line = self._lines.get(letter.tag, [])
        if letter in line:
            line.remove(letter)
        if not line:
            self._lines.pop(letter.tag, None)

    def look(self, letter: Letter, status: MPI.Status) -> MPI.Message | None:
        """Return the message for this receive if it has arrived, else None.

        A message that an earlier receive must get is left for that one. The caller must hold the
        lock.
        """
        line = self._lines[letter.tag]
        earlier = (
            {other.source for other in line[: line.index(letter)]}
            if line[0] is not letter
            else set()
        )
        if None in earlier or (letter.source is None and not earlier):
            return (
                None
                if earlier
                else self._probe(self.team.library.api.ANY_SOURCE, letter.tag, status)
            )
        wanted = range(self.team.size) if letter.source is None else [letter.source]
        for source in wanted:
            message = (
                None
                if source in earlier
                else self._probe(self.team.members[source], letter.tag, status)
            )
            if message is not None:
                return message
        return None

    def _probe(self, source: int, tag: int, status: MPI.Status) -> MPI.Message | None:
        return self.team.comm.Improbe(source, tag, status)


class Letter:
    """One receive of an inbox, driven like a round.

    ``source`` is the index of the sending rank. It is None for a receive from any rank, until the
    rank is known.
    """

    __slots__ = ("_inbox", "_pieces", "_requests", "_status", "_t", "source", "tag")

    def __init__(self, inbox: Inbox, t: Tensor, source: int | None, tag: int) -> None:
        self._inbox, self._t, self.source, self.tag = inbox, t, source, tag
        self._requests: list[MPI.Request] = []
        self._pieces = list(pieces(t))
        self._status = inbox.team.library.api.Status()
        inbox.ask(self)

    def finished(self) -> bool:
        """Advance without waiting, and return True if the message is complete."""
        if self._pieces:
            with self._inbox.lock:
                while self._pieces and self._take():
                    pass
                if self._pieces:
                    return False
                self._inbox.leave(self)
        return bool(self._inbox.team.testall(self._requests))

    def _take(self) -> bool:
        message = self._inbox.look(self, self._status)
        if message is None:
            return False
        team, (at, want) = self._inbox.team, self._pieces.pop(0)
        if self.source is None:
            # The other pieces are from the same rank.
            self.source = team.members.index(self._status.source)
        self._requests.append(receive(team, message, self._status, at, want, self.source))
        return True

    def moving(self) -> bool:
        """Return True if the message has begun to arrive and is in transit."""
        return not self._pieces and bool(self._requests)

    def awaited(self) -> list[int]:
        """Return the ranks, by their names, from which the message may still come."""
        names = self._inbox.team.names
        return (
            []
            if not self._pieces
            else [n for n in names if n != names[self._inbox.team.index]]
            if self.source is None
            else [names[self.source]]
        )

    def left(self) -> list[int]:
        """Return an empty list, because ranks are not notified of abandoned single messages."""
        return []

    def abandon(self) -> None:
        """Abandon the receive."""
        with self._inbox.lock:
            self._inbox.leave(self)
        self._pieces = []
        self._inbox.team.library.abandon(self._requests, [self._t])
