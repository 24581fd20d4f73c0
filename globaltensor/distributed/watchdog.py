"""The watchdog of a rank: it finds out that this rank and others wait for each other for ever.

This rank is in an operation on global tensors, and the others are in a collective of
torch.distributed that the program calls, such as a barrier. Each rank notes in the store of the
rendezvous that it has been in such a collective for a second. A rank that waits for long reads
these notes. `user_collectives` calls this module, and so do the backends before they wait.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from .store_liveness import store_answers

__all__ = ["CONNECTION_CLOSED", "BarrierFound", "CurrentCall", "Wait", "Watchdog", "current"]

#: The text of gloo where the other end of a connection is gone.
CONNECTION_CLOSED: Final = re.compile(r"closed by peer|reset by peer|Broken pipe", re.IGNORECASE)

_KEY: Final = "globaltensor_waits"  # prefix of the store's keys under which ranks leave their notes
_TICK_SECONDS: Final = 0.25
# A rank is noted after so many seconds in a collective.
_NOTED_SECONDS: Final = 1.0
# The notes of the other ranks must stay the same for so long.
_UNCHANGED_SECONDS: Final = 1.0
# The seconds for which a rank waits at least. What a thread still sends arrives meanwhile, or the
# rest of the data that other ranks move.
_SECONDS: Final = 3.0
_MOVING_SECONDS: Final = 20.0
#: Collectives that move no data.
_BARRIERS: Final = ("barrier", "monitored_barrier")


class BarrierFound(RuntimeError):
    """An error: a rank waits for this one in a collective of torch.distributed.

    ``rank`` is that rank, and ``collective`` the name of the collective.
    """

    def __init__(self, rank: int, collective: str) -> None:
        super().__init__(f"rank {rank} waits in torch.distributed.{collective}")
        self.rank, self.collective = rank, collective


class UserCall(NamedTuple):
    """A collective of torch.distributed that the program is in, and the thread that called it."""

    thread: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def group(self) -> Any:
        """Return the group that the call was given, or None."""
        at = list(inspect.signature(getattr(dist, self.name)).parameters).index("group")
        return self.args[at] if len(self.args) > at else self.kwargs.get("group")


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
    error; None where the waiting thread itself looks at ``found``. ``found`` is the error to raise,
    or None.
    """

    __slots__ = (
        "_watchdog", "found", "interrupt", "looked_at", "moving", "noted_since", "notes",
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
        self.found: BarrierFound | None = None
        # Of the thread: the number of the wait that it has looked at, since when that lasts, what
        # the other ranks have noted, and since when they have.
        self.looked_at, self.since = 0, 0.0
        self.notes, self.noted_since = list[bytes](), 0.0

    def __enter__(self) -> Wait:
        self.number += 1
        self.found = None
        self._watchdog.begin_wait(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._watchdog.wait = None


class Watchdog:
    """The watchdog of one rank, a thread.

    ``store`` is the store of the rendezvous. Only calls of the main thread are watched: another
    thread does not keep the main thread from sending what other ranks wait for.
    """

    def __init__(self, rank: int, store: Any) -> None:
        self._rank, self._store = rank, store
        self.wait: Wait | None = None  # the wait that the main thread is in
        # The call that was seen last (0: none), since when it lasts, and whether the store has it.
        self._seen, self._since, self._noted = 0, 0.0, False
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
                self._look_at_call()
                if (wait := self.wait) is not None:
                    self._look_at(wait)
                del wait

    def _look_at_call(self) -> None:
        """Note in the store the collective that the program has been in for long, or its end."""
        call, now = current.call, time.monotonic()
        number = 0 if call is None else current.number
        if number != self._seen:
            self._seen, self._since = number, now
            if self._noted and store_answers(self._store, lost=True):
                self._store.set(f"{_KEY}/{self._rank}", b"")
            self._noted = False
        elif (
            call is not None
            and not self._noted
            and now - self._since > _NOTED_SECONDS
            and call[0] == threading.main_thread().ident
        ):
            user_call = UserCall(*call)
            group = user_call.group()
            members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
            text = " ".join([str(number), user_call.name, *map(str, members)])
            self._store.set(f"{_KEY}/{self._rank}", text)
            self._noted = True

    def _look_at(self, wait: Wait) -> None:
        """Set ``wait.found`` if all peers have waited for this rank for long enough."""
        now = time.monotonic()
        if wait.looked_at != wait.number:
            wait.looked_at, wait.since, wait.notes = wait.number, now, []
        if wait.found is not None or now - wait.since < _NOTED_SECONDS:
            return
        notes = [self._note_of(peer) for peer in wait.peers]
        if not all(notes) or notes != wait.notes:
            wait.notes, wait.noted_since = notes, now
            return
        names = [note.decode().split()[1] for note in notes]
        moving = wait.moving or any(name not in _BARRIERS for name in names)
        if (
            now - wait.since > (_MOVING_SECONDS if moving else _SECONDS)
            and now - wait.noted_since > _UNCHANGED_SECONDS
            and self.wait is wait
            and wait.looked_at == wait.number
        ):
            wait.found = BarrierFound(wait.peers[0], names[0])
            if wait.interrupt is not None:
                wait.interrupt()

    def _note_of(self, peer: int) -> bytes:
        """Return what a rank has noted, or empty bytes unless it waits for this rank."""
        key = f"{_KEY}/{peer}"
        if not self._store.check([key]):
            return b""
        note: bytes = self._store.get(key)
        return note if str(self._rank) in note.decode().split()[2:] else b""
