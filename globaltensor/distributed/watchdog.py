"""The watchdog of a rank: it finds out that this rank and others wait for each other for ever.

Such ranks are in operations on different ranks, or one is in an operation on global tensors, and
another in a collective of torch.distributed that the program calls, such as a barrier. Each rank
notes in the store of the rendezvous that it has waited for a second, where, and for which ranks. A
rank that waits for long reads these notes. `user_collectives` calls this module, and so do the
backends before they wait.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from .._base.pytree import tensors_in
from .._base.user_code import user_line
from .store_liveness import store_answers

__all__ = ["CONNECTION_CLOSED", "CurrentCall", "Deadlock", "Wait", "Watchdog", "current"]

#: The text of gloo where the other end of a connection is gone.
CONNECTION_CLOSED: Final = re.compile(r"closed by peer|reset by peer|Broken pipe", re.IGNORECASE)

_KEY: Final = "globaltensor_waits"  # prefix of the store's keys under which ranks leave their notes
_TICK_SECONDS: Final = 0.25
# A rank writes its note again after so many ticks, which shows that the note still holds.
_BEAT_TICKS: Final = 4
# The last beat of a note must not be older.
_FRESH_SECONDS: Final = 3.0
# A rank reads so many notes of others at each tick, and more of them more rarely.
_NOTES_PER_TICK: Final = 8
# A rank is noted after so many seconds in a collective.
_NOTED_SECONDS: Final = 1.0
# The notes of the other ranks must stay the same for so long.
_UNCHANGED_SECONDS: Final = 1.0
# The seconds for which a rank waits at least. What a thread still sends arrives meanwhile, or the
# rest of the data that other ranks move.
_SECONDS: Final = 3.0
_MOVING_SECONDS: Final = 20.0
# The same where ranks are in collectives that others may have left while data still moves.
_PEERS_MOVING_SECONDS: Final = 60.0
# The bytes of a collective that surely move in a second. A rank may have done its share of a
# broadcast while others still pass the data on.
_BYTES_PER_SECOND: Final = 10_000_000
#: Collectives that move no data.
_BARRIERS: Final = ("barrier", "monitored_barrier", "new_group")
#: Collectives that end on all ranks at about the same time.
_SYMMETRIC: Final = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single",
)  # fmt: skip
# The names that a note has for an operation on global tensors: one whose messages may be under way,
# and one that waits for ranks which have sent nothing yet.
_OPERATION: Final = "operation"
_MESSAGE: Final = "message"


class Deadlock(RuntimeError):
    """An error: this rank and others wait for each other for ever.

    ``waits`` has the places where other ranks wait: rank -> text.
    """

    def __init__(self, waits: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank} waits in {text}" for rank, text in waits.items()))
        self.waits = dict(waits)


class UserCall(NamedTuple):
    """A collective of torch.distributed that the program is in, and the thread that called it."""

    thread: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def members(self) -> list[int]:
        """Return the ranks that must make this call."""
        given = inspect.signature(getattr(dist, self.name)).bind(*self.args, **self.kwargs)
        if self.name == "new_group" and (ranks := given.arguments.get("ranks")) is not None:
            return list(ranks)  # others leave the call at once
        group = given.arguments.get("group")
        return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)

    def nbytes(self) -> int:
        """Return the bytes of the tensors that the call was given."""
        return sum(t.nbytes for t in tensors_in([self.args, self.kwargs], []))


class WaitNote(NamedTuple):
    """A note that a rank leaves in the store while it waits.

    ``number`` counts the rank's waits, ``name`` is that of the collective, ``nbytes`` the size of
    its tensors, and ``members`` are the ranks that the collective needs. ``place`` is the place
    where the rank waits, as errors show it.
    """

    number: int
    name: str
    nbytes: int
    members: tuple[int, ...]
    place: str

    def text(self) -> str:
        """Return the note as the store keeps it."""
        numbers = " ".join(map(str, (self.number, self.name, self.nbytes, *self.members)))
        return f"{numbers}\n{self.place}"

    def of_same_collective(self, other: WaitNote) -> bool:
        """Return True if another rank's note is on the same collective."""
        return (self.name, self.members) == (other.name, other.members)

    @staticmethod
    def read(text: str) -> WaitNote:
        """Return the note with this text."""
        numbers, _, place = text.partition("\n")
        number, name, nbytes, *members = numbers.split()
        return WaitNote(int(number), name, int(nbytes), tuple(map(int, members)), place)

    @property
    def moving_seconds(self) -> float:
        """The seconds for which the data of the collective may still move, without the rank."""
        if self.name in (_MESSAGE, *_BARRIERS):
            return 0.0
        pair = self.name == _OPERATION and len(self.members) == 2
        least = _MOVING_SECONDS if pair or self.name in _SYMMETRIC else _PEERS_MOVING_SECONDS
        return least + self.nbytes / _BYTES_PER_SECOND


class CurrentCall:
    """The place where `user_collectives` leaves the call that the program is in, or None.

    ``number`` counts the calls. Nothing else is done there: a small collective takes 10 us.
    """

    __slots__ = ("call", "number")

    def __init__(self) -> None:
        self.call: tuple[int, str, tuple[Any, ...], dict[str, Any]] | None = None
        self.number = 0


current: Final = CurrentCall()


class Wait:
    """A wait of this rank for certain other ranks in an operation of this library.

    The object serves one wait after the other, each a block ``with wait:``. ``moving``: data that
    another rank has sent before may still be under way. ``interrupt`` makes the wait end with an
    error; None where the waiting thread itself looks at ``found``: there no message is under way.
    ``found`` is the error to raise, or None.
    """

    __slots__ = (
        "_watchdog", "beats", "found", "interrupt", "looked_at", "moving", "noted_since", "notes",
        "number", "peers", "since",
    )  # fmt: skip

    def __init__(
        self,
        watchdog: Watchdog,
        peers: Sequence[int],
        moving: bool = False,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self.peers, self.moving, self.interrupt = peers, moving, interrupt
        self._watchdog, self.number = watchdog, 0
        self.found: Deadlock | None = None
        # Of the thread: the number of the wait that it has looked at, since when that lasts, what
        # the ranks have noted, since when they have, and the last beat of each with its time.
        self.looked_at, self.since = 0, 0.0
        self.notes, self.noted_since = dict[int, WaitNote](), 0.0
        self.beats: dict[int, tuple[int, float]] = {}

    def __enter__(self) -> Wait:
        self.number += 1
        self.found = None
        self._watchdog.begin_wait(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._watchdog.wait = None


class Watchdog:
    """The watchdog of one rank, a thread.

    ``store`` is the store of the rendezvous. ``operation`` returns the operation that this rank is
    in, as errors show it, and the bytes that it sends. Only calls of the main thread are watched:
    another thread does not keep the main thread from sending what other ranks wait for.
    """

    def __init__(self, rank: int, store: Any, operation: Callable[[], tuple[str, int]]) -> None:
        self._rank, self._store = rank, _own_connection(store)
        self._operation = operation
        self.wait: Wait | None = None  # the wait that the main thread is in
        # The call that was seen last (0: none), and since when it lasts.
        self._seen, self._since = 0, 0.0
        self._noted: WaitNote | None = None  # what the store has
        self._ticks = self._next_look = 0  # the ticks so far, and the one of the next look
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="globaltensor watchdog", daemon=True)
        self._thread.start()

    def begin_wait(self, wait: Wait) -> None:
        """Watch a wait until ``self.wait`` is None again."""
        self.wait = wait

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        # The store fails once the rank that serves it has ended.
        with contextlib.suppress(RuntimeError):
            while not self._stop.wait(_TICK_SECONDS):
                wait = self.wait
                self._ticks += 1
                self._note(self._long_call() or self._long_wait(wait))
                if wait is not None:
                    self._look_at(wait)
                del wait

    def _note(self, note: WaitNote | None) -> None:
        """Put a note into the store, with the time in ticks, or take the last one away."""
        if note == self._noted and (note is None or self._ticks % _BEAT_TICKS):
            return
        if note is not None:
            self._store.set(f"{_KEY}/{self._rank}", f"{self._ticks} {note.text()}")
        elif store_answers(self._store, lost=True):
            self._store.set(f"{_KEY}/{self._rank}", b"")
        self._noted = note

    def _long_call(self) -> WaitNote | None:
        """Return a note on the collective that the program has been in for long, or None."""
        call, now = current.call, time.monotonic()
        number = 0 if call is None else current.number
        if number != self._seen:
            self._seen, self._since = number, now
        if (
            call is None
            or now - self._since <= _NOTED_SECONDS
            or call[0] != threading.main_thread().ident
        ):
            return None
        if self._noted is not None and self._noted[:2] == (number, call[1]):
            return self._noted
        user_call = UserCall(*call)
        place = f"torch.distributed.{user_call.name}  ({_line_of_program()})"
        try:
            members, nbytes = tuple(user_call.members()), user_call.nbytes()
        except Exception:  # arguments of which torch will say what is wrong, or sparse tensors
            return None
        return WaitNote(number, user_call.name, nbytes, members, place)

    def _long_wait(self, wait: Wait | None) -> WaitNote | None:
        """Return a note on the operation that this rank has been in for long, or None."""
        if wait is None:
            return None
        now = time.monotonic()
        if wait.looked_at != wait.number:
            wait.looked_at, wait.since, wait.notes = wait.number, now, {}
        if now - wait.since <= _NOTED_SECONDS:
            return None
        name = _MESSAGE if wait.interrupt is None else _OPERATION
        members = tuple(sorted([self._rank, *wait.peers]))
        operation, nbytes = self._operation()
        if self._noted is not None and self._noted[:4] == (wait.number, name, nbytes, members):
            return self._noted
        place = f"{operation}  ({_line_of_program()})"
        return WaitNote(wait.number, name, nbytes, members, place)

    def _look_at(self, wait: Wait) -> None:
        """Set ``wait.found`` if the ranks have waited for each other for long enough."""
        now, own = time.monotonic(), self._noted
        if wait.found is not None or own is None or own.name not in (_OPERATION, _MESSAGE):
            return
        if self._ticks < self._next_look:
            return
        notes, beats = self._notes_of_waiting(own)
        self._next_look = self._ticks + 1 + len(beats) // _NOTES_PER_TICK
        if not notes or notes != wait.notes:
            wait.notes, wait.noted_since = notes, now
            wait.beats = {rank: (beat, 0.0) for rank, beat in beats.items()}
            return
        for rank, beat in beats.items():
            if beat != wait.beats[rank][0]:
                wait.beats[rank] = beat, now
        others = {rank: note for rank, note in notes.items() if rank != self._rank}
        if (
            now - wait.since > (_MOVING_SECONDS if wait.moving else _SECONDS)
            and now - wait.noted_since
            > max([_UNCHANGED_SECONDS, *(note.moving_seconds for note in others.values())])
            and all(now - since < _FRESH_SECONDS for _, since in wait.beats.values())
            and self.wait is wait
            and wait.looked_at == wait.number
        ):
            wait.found = Deadlock({rank: note.place for rank, note in others.items()})
            if wait.interrupt is not None:
                wait.interrupt()

    def _notes_of_waiting(self, own: WaitNote) -> tuple[dict[int, WaitNote], dict[int, int]]:
        """Return the notes of the ranks that wait for this one, and that it waits for.

        Where all other members of the operation are in collectives that cannot end without this
        rank, those are all. Otherwise they are all ranks that this one waits for, also through
        others. Return none if one of them does not wait, or if all members of a collective are in
        it. The second value has the time of each note that was read, in ticks of its rank.
        """
        notes, beats = {self._rank: own}, dict[int, int]()
        missing = dict.fromkeys(r for r in own.members if r != self._rank)  # a set, with an order
        peers = len(missing)
        while missing:
            rank = next(iter(missing))
            del missing[rank]
            note, beats[rank] = self._note_of(rank)
            if note is None:
                return {}, beats
            notes[rank] = note
            missing |= dict.fromkeys(r for r in note.members if r not in notes)
            if len(notes) == 1 + peers and all(
                self._rank in n.members and n.name in (*_SYMMETRIC, *_BARRIERS)
                for r, n in notes.items()
                if r != self._rank
            ):
                break
        else:
            for note in notes.values():
                if note.name != _MESSAGE and all(
                    note.of_same_collective(notes[r]) for r in note.members
                ):
                    return {}, beats
        return dict(sorted(notes.items())), beats

    def _note_of(self, rank: int) -> tuple[WaitNote | None, int]:
        key = f"{_KEY}/{rank}"
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        beat, _, note = text.partition(" ")
        return (WaitNote.read(note), int(beat)) if note else (None, 0)


def _line_of_program() -> str:
    """Return the user's line that the main thread is at."""
    return user_line(sys._current_frames().get(threading.main_thread().ident or 0))


def _own_connection(store: Any) -> Any:
    """Return the same store over another connection, which no wait of another thread blocks."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # a store of the user's, or of an older torch
        return store
