"""Operations in progress: driven by the caller that waits, or by a thread during the computation.

`process_group` starts operations. The thread drives those for which no caller waits yet. An
operation is a generator of steps. It advances whenever it is polled. No call blocks inside MPI, so
every wait has an end.
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

__all__ = ["Finished", "Joint", "Operation", "PendingRound", "Steps", "progress", "stop_progress"]

_SPIN: Final = 50e-6  # seconds of polling without pause; a message between cores takes about that
_LOOKS: Final = 50  # about as long, as a number of polls
_YIELD: Final = 1e-3  # seconds up to which each poll yields the core
# After that the thread naps for this share of the time waited so far. So a wait is too long by at
# most that share.
_SHARE: Final = 0.05
_BESIDE: Final = 0.25  # the same share for the progress thread
_LONG_NAP: Final = 1e-3
# The longest nap while a message is in transit. If the kernel does not copy a message between
# processes, it moves in pieces, a few at each poll.
_SHORT_NAP: Final = 1e-4
_MOVING: Final = 1.0  # seconds of polling a moving message without pause, if cores are free
# If every core has its rank, a rank drives what it started until nothing has advanced for so many
# seconds. A thread would wait longer for a core.
_PATIENCE: Final = 1e-3
# After so many seconds of waiting, check the time limit and whether a rank has left.
_LONG: Final = 0.1
_LAZY: Final = 2e-3  # seconds after which the thread drives messages without a waiting caller
_AWAKE: Final = 0.25  # seconds for which the thread then keeps checking for such messages


#: Yield the core to another thread. This call releases Python's lock, which os.sched_yield would
#: hold.
give_way: Final = ctypes.CDLL(None).sched_yield


class PendingRound(Protocol):
    """A condition that an operation waits for: a round of messages, or one message."""

    def finished(self) -> bool: ...

    def awaited(self) -> list[int]: ...

    def moving(self) -> bool:
        """Return True if messages are in transit, as far as this rank can know.

        That is the case once the start of everything that it receives has arrived.
        """

    def left(self) -> list[int]:
        """Return the ranks that abandoned the step, if only these are still waited for."""

    def abandon(self) -> None: ...


Steps = Generator[PendingRound, None, None]


class ProgressGroup(Protocol):
    """The interface of a group that operations use."""

    library: Library

    def describe_operation(self, title: str, outputs: Sequence[Tensor]) -> str:
        """Return a description of the operation and its ranks, for an error."""

    def seconds(self, options: Any) -> float:
        """Return the time limit of an operation in seconds."""


class Operation(dist.Work):
    """A collective or a message in progress, as torch's Work.

    ``outputs`` are the caller's tensors, which are filled once the operation is over.
    """

    def __init__(
        self,
        group: ProgressGroup,
        steps: Steps,
        outputs: Sequence[Tensor],
        title: str,
        options: Any,
        step: PendingRound | None = None,
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.over, self.moves = False, 0
        self.error: BaseException | None = None
        self._group, self._steps, self._title, self._options = group, steps, title, options
        self._lock = group.library.one_at_a_time or threading.Lock()
        self._step = step
        self._last: PendingRound | None = None
        self._inference = bool(outputs) and outputs[0].is_inference()
        self._started = time.perf_counter()
        self._future: Future[Any] | None = None
        self._future_completed = False

    @classmethod
    def at_once(
        cls, group: ProgressGroup, steps: Steps, outputs: Sequence[Tensor], title: str, options: Any
    ) -> Operation | Finished:
        """Run an operation for a caller that waits anyway.

        Return `Finished` if it is over after a few polls, else an `Operation`. Such an operation is
        usually over before an `Operation` object could be created.
        """
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
        """Advance as far as possible without waiting.

        Return True if the operation is over, with or without an error.
        """
        if not self.over and self._lock.acquire(blocking=False):
            try:
                if self._inference:
                    with torch.inference_mode():
                        self._run_steps()
                elif not self.over:
                    self._run_steps()
            finally:
                self._lock.release()
        return self.over

    def _run_steps(self) -> None:
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
        except BaseException as error:  # Ctrl-C must be raised here
            self._fail(f"interrupted by {type(error).__name__}", error)
            raise

    def _fail(self, why: str, cause: BaseException | None = None) -> None:
        """End the operation with an error. The caller must hold the lock."""
        self.error = WorldError(
            f"{self._group.describe_operation(self._title, self.outputs)}: {why}"
        )
        self.error.__cause__ = None if isinstance(cause, WorldError) else cause
        if self._step is not None:
            self._step.abandon()
        self.over = True

    @property
    def moving(self) -> bool:
        """True if the operation advances faster the more often it is polled."""
        step = self._step
        return step is not None and step.moving()

    @property
    def roomy(self) -> bool:
        """True if cores are free for constant polling, in addition to those that compute."""
        library = self._group.library
        return not (library.full or library.crowded)

    def carry_on(self) -> bool:
        """Drive the operation as long as it advances, and a little longer.

        Return True if it is over. This is for a machine where every core has its rank. During the
        computation, nothing would advance there before the scheduler's next time slice.
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
        """End the operation with an error if it is too late, or waits for a rank that has left.

        It is too late after ``limit`` seconds; None means the group's limit.
        """
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
            if gone := self._group.library.departed_ranks(awaited):
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
                if self._group.library.interrupts(began):
                    with self._lock:
                        if not self.over:
                            self._fail("the ranks wait for each other")
            if self.moving and waited < _MOVING:
                give_way()
            else:
                time.sleep(min(_SHARE * waited, _LONG_NAP))

    def complete_future(self) -> None:
        """Complete the future, if a caller has requested one.

        The future's callbacks run in this call.
        """
        with self._lock:
            future, completed = self._future, self._future_completed
            self._future_completed = future is not None
        if future is None or completed:
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(list(self.outputs))

    @property
    def has_future(self) -> bool:
        """True if a caller has requested the future."""
        return self._future is not None

    @property
    def started(self) -> float:
        """The start time, by `time.perf_counter`."""
        return self._started

    def source_rank(self) -> int:
        """Return the index in the group of the rank that sent a received message, or -1."""
        source = getattr(self._last, "source", None)
        return -1 if source is None else int(source)

    _source_rank = source_rank

    # torch's Work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation is over.

        Raise WorldError if it failed, or took longer than ``timeout``. Zero means the group's time
        limit.
        """
        if not self.over:
            seconds = timeout.total_seconds()
            self._drive(seconds if seconds > 0 else None)
            self.complete_future()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Return True if the operation is over. Each call also advances it."""
        return self.advance()

    def is_success(self) -> bool:
        return self.over and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        return self.error

    def result(self) -> list[Tensor]:
        return list(self.outputs)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return a future of the outputs."""
        with self._lock:
            if self._future is None:
                self._future = Future(devices=devices_of(self.outputs))
        if self.advance():
            self.complete_future()
        else:
            progress().see_to(self)
        return self._future


def _ranks(names: Sequence[int]) -> str:
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"


class Finished(dist.Work):
    """A collective that was over before a caller could wait for it."""

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
        """Return a completed future of the outputs."""
        return completed_future(self.outputs)


def completed_future(outputs: Sequence[Tensor]) -> Future[Any]:
    future: Future[Any] = Future(devices=devices_of(outputs))
    future.set_result(list(outputs))
    return future


def devices_of(outputs: Sequence[Tensor]) -> list[Any]:
    return sorted({t.device for t in outputs if t.is_cuda}, key=str)


class Joint(dist.Work):
    """A work that combines several operations."""

    def __init__(self, works: Sequence[Operation]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until all operations are over."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return sum(work.advance() for work in self._works) == len(self._works)  # advance all

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((work.error for work in self._works if work.error is not None), None)

    def result(self) -> list[Tensor]:
        return [t for work in self._works for t in work.outputs]

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return a future of all outputs."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda done: [t for f in done.value() for t in f.value()]
        )


class Progress:
    """A thread that drives operations during the computation.

    It naps while nothing advances, because the core belongs to the computation.
    """

    def __init__(self) -> None:
        self._urgent: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._lazy: deque[tuple[float, Operation]] = deque()
        self._role = threading.Lock()  # guards _serving and _ended
        self._serving: threading.Thread | None = None
        self._ended = False
        self._asleep = False
        self._lazy_until = 0.0

    def see_to(self, operation: Operation) -> None:
        """Drive this operation from now on."""
        self._urgent.put(operation)
        self._serve()

    def see_to_later(self, operation: Operation) -> None:
        """Drive this operation if it is not over in a few milliseconds.

        Callers wait for most messages at once, and a thread takes longer to wake than these
        messages take.
        """
        self._lazy.append((time.perf_counter(), operation))
        if self._asleep:
            self._urgent.put(None)
        self._serve()

    def stop(self) -> None:
        """End the thread, and wait for it for a second at most."""
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
            news = self._accept_operations(under_way)
            before = sum(operation.moves for operation in under_way)
            over = [operation for operation in under_way if operation.advance()]
            news |= bool(over) or before != sum(operation.moves for operation in under_way)
            under_way = [operation for operation in under_way if not operation.over]
            if any(operation.has_future for operation in over) and not self._complete_futures(
                over, under_way
            ):
                return
            now = time.perf_counter()
            moved = now if news else moved
            self._nap(under_way, now - moved)

    def _accept_operations(self, under_way: list[Operation]) -> bool:
        """Accept queued operations, and wait for one if there is no other work.

        Return True if there was a new one.
        """
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

    def _complete_futures(self, over: list[Operation], under_way: list[Operation]) -> bool:
        """Complete futures, and return True if this thread still serves afterwards.

        Callbacks of futures may wait for operations themselves, so another thread may serve in the
        meantime.
        """
        me = self._serving
        for operation in under_way:
            self._urgent.put(operation)
        under_way.clear()
        with self._role:
            self._serving = None
        if not self._urgent.empty():
            self._serve()
        for operation in over:
            operation.complete_future()
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
    """Return the progress thread of this process, created at first use."""
    global _progress
    if _progress is None:
        _progress = Progress()
    return _progress


def stop_progress() -> None:
    """Stop the progress thread, if there is one.

    At interpreter exit no thread may be inside MPI.
    """
    if _progress is not None:
        _progress.stop()
