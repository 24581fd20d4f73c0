"""A clock for the time that a rank spends in collectives, for a block of code.

While a clock runs, the world returns wrapped communicators. `flow.utils.Progress` measures single
steps with a clock, so other steps have no overhead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, cast

import torch

from .communicator import Communicator
from .world import world
from .world_base import World

__all__ = ["CommunicationClock"]

#: The methods of a communicator that send. Those that return a handle are timed in its `wait` too.
_TIMED: Final = frozenset(
    (
        "all_gather",
        "all_gather_into",
        "all_gather_into_async",
        "all_gather_object",
        "all_reduce",
        "all_reduce_async",
        "all_to_all",
        "all_to_all_into",
        "barrier",
        "broadcast",
        "compare_plain",
        "exchange",
        "exchange_async",
        "exchange_into",
        "reduce_scatter",
        "reduce_scatter_async",
    )
)


class CommunicationClock:
    """A clock of the collectives of this rank, from `start` to `stop`.

    Waiting for other ranks counts. A collective that runs during the computation counts as long as
    the computation waits for it. On a GPU the stream's time counts. Messages between the stages of
    a pipeline do not.

    >>> clock = CommunicationClock()
    >>> clock.start()
    >>> share = clock.stop()
    >>> share
    0.0
    """

    def __init__(self) -> None:
        self._world: World | None = None
        self._timed: _TimedComms | None = None
        self._on_gpu = False
        self._intervals: list[tuple[Any, Any]] = []
        self._within = False
        self._began: Any = None

    @property
    def running(self) -> bool:
        """True between `start` and `stop`."""
        return self._world is not None

    def start(self) -> None:
        """Start the clock. It must not be running.

        While another clock of this rank runs, this one does not start.
        """
        this_world = world()
        if isinstance(this_world._comms, _TimedComms):
            return
        self._world, self._intervals, self._within = this_world, [], False
        self._on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        this_world._comms = self._timed = _TimedComms(this_world._comms, self)
        self._began = self._stamp()

    def stop(self) -> float:
        """Stop the clock, and return the share of the time in collectives, from 0 to 1."""
        ended, this_world = self._stamp(), self._world
        assert this_world is not None, "call start() first"
        assert self._timed is not None
        if this_world._comms is self._timed:
            this_world._comms = self._timed.comms
        intervals, self._intervals, self._world, self._timed = self._intervals, [], None, None
        if self._on_gpu:
            for _, end in (*intervals, (None, ended)):  # they may be events of several streams
                end.synchronize()
            inside = sum(start.elapsed_time(end) for start, end in intervals)
            total = self._began.elapsed_time(ended)
        else:
            inside = sum(end - start for start, end in intervals)
            total = ended - self._began
        return min(1.0, max(0.0, inside / total)) if total else 0.0

    def _stamp(self) -> Any:
        """Return the time now, or an event of the current stream if this process uses a GPU."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added to the clock."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._within or not self.running:
                return function(*args, **kwargs)
            self._within = True
            start = self._stamp()
            try:
                return function(*args, **kwargs)
            finally:
                self._within = False
                self._intervals.append((start, self._stamp()))

        return run


class _TimedHandle:
    """A handle of a collective in progress, whose waiting is timed."""

    def __init__(self, handle: Any, clock: CommunicationClock) -> None:
        self._handle = handle
        self.wait = clock.timed(handle.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class _TimedComm:
    """A communicator whose collectives are timed."""

    def __init__(self, comm: Communicator, clock: CommunicationClock) -> None:
        self._comm, self._clock = comm, clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name not in _TIMED:
            return found
        run = self._clock.timed(found)
        if name.endswith("_async"):
            clock = self._clock
            return lambda *args, **kwargs: _TimedHandle(run(*args, **kwargs), clock)
        return run


class _TimedComms(dict[tuple[int, ...], Communicator]):
    """The communicators of a world while a clock runs.

    A new communicator is also added to the world's own dict, ``comms``.
    """

    def __init__(
        self, comms: dict[tuple[int, ...], Communicator], clock: CommunicationClock
    ) -> None:
        self.comms, self._clock = comms, clock
        super().__init__({ranks: self._wrapped(comm) for ranks, comm in comms.items()})

    def _wrapped(self, comm: Communicator) -> Communicator:
        return cast(Communicator, _TimedComm(comm, self._clock))

    def __setitem__(self, ranks: tuple[int, ...], comm: Communicator) -> None:
        self.comms[ranks] = comm
        super().__setitem__(ranks, self._wrapped(comm))

    def clear(self) -> None:
        self.comms.clear()
        super().clear()
