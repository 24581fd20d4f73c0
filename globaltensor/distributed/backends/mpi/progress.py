"""Operations under way: driven by whoever waits for them, and by one thread beside the computation
for those that nobody waits for yet.

An operation is a generator of steps. It goes on whenever somebody looks whether it is over; nothing
blocks inside MPI, so every wait has an end.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ....errors import WorldError
from .library import Library

__all__ = ["Finished", "Joint", "Operation", "Step", "Steps", "progress", "stop_progress"]

_SPIN: Final = 50e-6  # seconds of looking again at once: what a message between two cores may take
_LOOKS: Final = 50  # about as long, in numbers of looks
_YIELD: Final = 1e-3  # and then of letting others have the core between two looks
# later: naps of this share of the time waited so far, so that a wait is at most so much too long
_SHARE: Final = 0.05
_BESIDE: Final = 0.25  # the same, for the thread beside the computation
_LONG_NAP: Final = 1e-3
# while a message is on its way: where the kernel does not copy it from process to process it goes
# in pieces, a few at each look
_SHORT_NAP: Final = 1e-4
_MOVING: Final = 1.0  # seconds of looking at it again at once, where there are cores for that
# seconds without a move for which a rank stays with what it started, where every core has its rank:
# a thread waits longer for one
_PATIENCE: Final = 1e-3
_LONG: Final = (
    0.1  # seconds of waiting after which to ask whether it takes too long, or somebody has left
)
_LAZY: Final = 2e-3  # seconds after which the thread sees to single messages that nobody waits for
_AWAKE: Final = 0.25  # and for which it goes on looking out for them


#: Let another thread have the core; it is called without Python's lock, which os.sched_yield keeps.
give_way: Final = ctypes.CDLL(None).sched_yield


class Step(Protocol):
    """What an operation waits for: a round of messages, or one."""

    def finished(self) -> bool: ...

    def awaited(self) -> list[int]: ...

    def moving(self) -> bool:
        """Whether messages are on their way, as far as this rank can know: all that it receives
        have come."""

    def left(self) -> list[int]:
        """The ranks that gave it up, where only they are waited for."""

    def abandon(self) -> None: ...


Steps = Generator[Step, None, None]


class Group(Protocol):
    """What an operation asks its group."""

    library: Library

    def told(self, title: str, outputs: Sequence[Tensor]) -> str:
        """Who does what, for an error."""

    def seconds(self, options: Any) -> float:
        """How long an operation may take."""


class Operation(dist.Work):
    """A collective or a message under way; torch's Work. ``outputs`` are the caller's tensors,
    filled once it is over."""

    def __init__(
        self,
        group: Group,
        steps: Steps,
        outputs: Sequence[Tensor],
        title: str,
        options: Any,
        step: Step | None = None,
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.over, self.moves = False, 0
        self.error: BaseException | None = None
        self._group, self._steps, self._title, self._options = group, steps, title, options
        self._lock = group.library.one_at_a_time or threading.Lock()
        self._step = step
        self._last: Step | None = None
        self._inference = bool(outputs) and outputs[0].is_inference()
        self._started = time.perf_counter()
        self._future: Future[Any] | None = None
        self._told = False

    @classmethod
    def at_once(
        cls, group: Group, steps: Steps, outputs: Sequence[Tensor], title: str, options: Any
    ) -> Operation | Finished:
        """For a caller that waits anyway: mostly it is over before all that an operation needs
        would have been made."""
        step, operation = None, None
        try:
            step = next(steps, None)
            for _ in range(_LOOKS):
                if step is None:
                    return Finished(outputs)
                if step.finished():
                    step = next(steps, None)
        except Exception as error:
            operation = cls(group, steps, outputs, title, options, step)
            operation._fail(
                str(error) if isinstance(error, WorldError) else f"{type(error).__name__}: {error}",
                error,
            )
        return operation or cls(group, steps, outputs, title, options, step)

    def advance(self) -> bool:
        """Go on as far as that is possible without waiting -> whether it is over, well or not."""
        if not self.over and self._lock.acquire(blocking=False):
            try:
                if self._inference:
                    with torch.inference_mode():
                        self._go_on()
                elif not self.over:
                    self._go_on()
            finally:
                self._lock.release()
        return self.over

    def _go_on(self) -> None:
        try:
            while not self.over and (self._step is None or self._step.finished()):
                self._last, self._step = self._step, next(self._steps, None)
                self.moves += 1
                self.over = self._step is None
        except Exception as error:
            self._fail(
                str(error) if isinstance(error, WorldError) else f"{type(error).__name__}: {error}",
                error,
            )
        except BaseException as error:  # Ctrl-C: not ours to keep
            self._fail(f"interrupted by {type(error).__name__}", error)
            raise

    def _fail(self, why: str, cause: BaseException | None = None) -> None:
        """The lock is held."""
        self.error = WorldError(f"{self._group.told(self._title, self.outputs)}: {why}")
        self.error.__cause__ = None if isinstance(cause, WorldError) else cause
        if self._step is not None:
            self._step.abandon()
        self.over = True

    @property
    def moving(self) -> bool:
        """Whether it goes on the quicker the more often somebody looks."""
        step = self._step
        return step is not None and step.moving()

    @property
    def roomy(self) -> bool:
        """Whether there are cores for looking all the time, besides those of the computation."""
        library = self._group.library
        return not (library.full or library.crowded)

    def carry_on(self) -> bool:
        """Drive it as long as it moves, and a little longer -> whether it is over.

        For a machine whose cores all have their rank: beside the computation nothing would move
        there before the scheduler's next slice.
        """
        moves, moved = self.moves, time.perf_counter()
        while not self.advance():
            now = time.perf_counter()
            if moves != self.moves:
                moves, moved = self.moves, now
            if now - moved > _PATIENCE:
                return False
        return True

    def overdue(self, waited: float, limit: float | None = None) -> None:
        """End it with an error if it has taken longer than ``limit`` (none: the group's), or waits
        for a rank that has left."""
        allowed = self._group.seconds(self._options) if limit is None else limit
        with self._lock:
            if self.over:
                return
            awaited = self._step.awaited() if self._step is not None else []
            missing = (
                f"nothing has come from {_ranks(awaited)}"
                if awaited
                else "not all that was sent has been received"
            )
            if gone := self._group.library.gone(awaited):
                self._fail(f"{_ranks(gone)} left; {missing}")
            elif left := self._step.left() if self._step is not None else []:
                self._fail(f"{_ranks(left)} gave up (its own error says why); {missing}")
            elif waited > allowed:
                self._fail(f"timed out after {allowed:g} s: {missing}")

    def _drive(self, limit: float | None) -> None:
        began = moved = time.perf_counter()
        moves, crowded = self.moves, self._group.library.crowded
        while not self.advance():
            now = time.perf_counter()
            if moves != self.moves:
                moves, moved = self.moves, now
            waited = now - moved
            if waited < _YIELD:
                if waited > _SPIN or crowded:
                    give_way()
                continue
            if limit is not None and now - began > limit:
                self.overdue(now - began, limit)
            elif waited > _LONG:
                self.overdue(now - self._started)
            if self.moving and waited < _MOVING:
                give_way()
            else:
                time.sleep(min(_SHARE * waited, _LONG_NAP))

    def tell(self) -> None:
        """Fulfil the future, if somebody asked for one. What hangs on it runs here."""
        with self._lock:
            future, told = self._future, self._told
            self._told = future is not None
        if future is None or told:
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(list(self.outputs))

    @property
    def hooked(self) -> bool:
        """Whether somebody has asked for the future."""
        return self._future is not None

    @property
    def started(self) -> float:
        """By `time.perf_counter`."""
        return self._started

    def source_rank(self) -> int:
        """Of a receive: the index in the group of the rank it came from."""
        source = getattr(self._last, "source", None)
        return -1 if source is None else int(source)

    _source_rank = source_rank

    # torch's Work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is over. Raises WorldError where it failed, or took longer than
        ``timeout`` (none: the group's)."""
        if not self.over:
            seconds = timeout.total_seconds()
            self._drive(seconds if seconds > 0 else None)
            self.tell()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether it is over; it goes on with every question."""
        return self.advance()

    def is_success(self) -> bool:
        return self.over and self.error is None

    def exception(self) -> BaseException | None:
        """What it failed with."""
        return self.error

    def result(self) -> list[Tensor]:
        return list(self.outputs)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future of the outputs."""
        with self._lock:
            if self._future is None:
                self._future = Future(devices=devices_of(self.outputs))
        if self.advance():
            self.tell()
        else:
            progress().see_to(self)
        return self._future


def _ranks(names: Sequence[int]) -> str:
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"


class Finished(dist.Work):
    """A collective that was over before anybody could wait for it."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return list(self.outputs)

    def synchronize(self) -> None:
        return None

    def get_future(self) -> Future[Any]:
        """A future of the outputs, fulfilled."""
        return fulfilled(self.outputs)


def fulfilled(outputs: Sequence[Tensor]) -> Future[Any]:
    future: Future[Any] = Future(devices=devices_of(outputs))
    future.set_result(list(outputs))
    return future


def devices_of(outputs: Sequence[Tensor]) -> list[Any]:
    return sorted({t.device for t in outputs if t.is_cuda}, key=str)


class Joint(dist.Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[Operation]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until all are over."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return sum(work.advance() for work in self._works) == len(self._works)  # each goes on

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((work.error for work in self._works if work.error is not None), None)

    def result(self) -> list[Tensor]:
        return [t for work in self._works for t in work.outputs]

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future of all outputs."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda done: [t for f in done.value() for t in f.value()]
        )


class Progress:
    """A thread that drives operations beside the computation. It naps when nothing moves: the core
    is the computation's."""

    def __init__(self) -> None:
        self._urgent: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._lazy: deque[tuple[float, Operation]] = deque()
        self._role = threading.Lock()  # guards the two below
        self._serving: threading.Thread | None = None
        self._ended = False
        self._asleep = False
        self._lazy_until = 0.0

    def see_to(self, operation: Operation) -> None:
        """Drive this operation from now on."""
        self._urgent.put(operation)
        self._serve()

    def see_to_later(self, operation: Operation) -> None:
        """Drive it if it is not over in a few milliseconds: most messages are waited for at once,
        and a thread takes longer to wake than they take."""
        self._lazy.append((time.perf_counter(), operation))
        if self._asleep:
            self._urgent.put(None)
        self._serve()

    def stop(self) -> None:
        """End the thread; wait for it a little."""
        with self._role:
            self._ended, serving = True, self._serving
        if serving is not None:
            self._urgent.put(None)
            serving.join(1.0)

    def _serve(self) -> None:
        if self._serving is None:
            with self._role:
                if self._serving is None and not self._ended:
                    self._serving = threading.Thread(
                        target=self._run, name="globaltensor mpi", daemon=True
                    )
                    self._serving.start()

    def _run(self) -> None:
        under_way: list[Operation] = []
        moved = time.perf_counter()
        while not self._ended:
            news = self._take(under_way)
            before = sum(operation.moves for operation in under_way)
            over = [operation for operation in under_way if operation.advance()]
            news |= bool(over) or before != sum(operation.moves for operation in under_way)
            under_way = [operation for operation in under_way if not operation.over]
            if any(operation.hooked for operation in over) and not self._tell(over, under_way):
                return
            now = time.perf_counter()
            moved = now if news else moved
            self._nap(under_way, now - moved)

    def _take(self, under_way: list[Operation]) -> bool:
        """Take on what has come; wait for it if there is nothing else to do -> whether something
        came."""
        known = len(under_way)
        try:
            if under_way:
                came = self._urgent.get_nowait()
            else:
                self._asleep = not self._lazy and time.perf_counter() > self._lazy_until
                came = self._urgent.get(timeout=None if self._asleep and not self._lazy else _LAZY)
            while True:
                if came is not None:
                    under_way.append(came)
                came = self._urgent.get_nowait()
        except queue.Empty:
            self._asleep = False
        now = time.perf_counter()
        while self._lazy and now - self._lazy[0][0] > _LAZY:
            self._lazy_until = now + _AWAKE
            operation = self._lazy.popleft()[1]
            if not operation.over:
                under_way.append(operation)
        return len(under_way) > known

    def _tell(self, over: list[Operation], under_way: list[Operation]) -> bool:
        """Fulfil futures. What hangs on them may wait for operations itself, so another thread may
        serve meanwhile -> whether this one still does."""
        me = self._serving
        for operation in under_way:
            self._urgent.put(operation)
        under_way.clear()
        with self._role:
            self._serving = None
        if not self._urgent.empty():
            self._serve()
        for operation in over:
            operation.tell()
        with self._role:
            if self._serving is None and not self._ended:
                self._serving = me
        return self._serving is me

    def _nap(self, under_way: list[Operation], waited: float) -> None:
        if not under_way or waited < _SPIN:
            return
        if waited > _LONG:
            now = time.perf_counter()
            for operation in under_way:
                operation.overdue(now - operation.started)
        moving = any(operation.moving for operation in under_way)
        if waited < (_MOVING if moving and under_way[0].roomy else _YIELD):
            give_way()
            return
        time.sleep(min(_BESIDE * waited, _SHORT_NAP if moving and waited < _MOVING else _LONG_NAP))


_progress: Progress | None = None


def progress() -> Progress:
    """The thread of this process, started when it first has something to do."""
    global _progress
    if _progress is None:
        _progress = Progress()
    return _progress


def stop_progress() -> None:
    """End the thread, if there is one: at the end of the interpreter none may be inside MPI."""
    if _progress is not None:
        _progress.stop()
