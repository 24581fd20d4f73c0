"""MPI in this process: started at first use, told of ranks that leave, ended so that no other rank
waits for one that is gone."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import types
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from ....errors import WorldError
from ...cluster_env import detect

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import Tensor

__all__ = ["Library", "library"]

_INSTALL: Final = (
    "pip install globaltensor[mpi] brings mpi4py and an Open MPI; with another MPI "
    "on this machine pip install mpi4py is enough"
)
#: Seconds between a rank's farewell and the error of those who still wait for it: what it had sent
#: before may be on its way.
_GRACE: Final = 1.0


class Library:
    """MPI as this process has it; ``rank`` and ``size`` are those of MPI's world."""

    def __init__(self) -> None:
        before = sys.modules.get("mpi4py.MPI")
        self.api, self._ends_mpi = _load(), before is None
        api, level = self.api, self.api.Query_thread()
        if level < api.THREAD_SERIALIZED:
            raise WorldError(
                "MPI was started without support for threads, of which torch has several: let "
                "globaltensor start it, "
                'or set mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported'
            )
        #: Held around every call of MPI where it cannot bear two threads at once.
        self.one_at_a_time = None if level == api.THREAD_MULTIPLE else threading.Lock()
        self.rank, self.size = api.COMM_WORLD.rank, api.COMM_WORLD.size
        ranks, cores = (
            _ranks_here(self.size),
            len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        )
        #: Whether the ranks of this machine are more than its cores: who waits must let others run
        #: then.
        self.crowded = ranks > cores
        #: Whether each has a core, but not all a second one: a thread beside the computation waits
        #: for it to pause.
        self.full = ranks <= cores < 2 * ranks
        self.cuda_aware = _cuda_aware(api)
        self.tags = int(api.COMM_WORLD.Get_attr(api.TAG_UB) or 32767)
        self.timeout = timedelta(minutes=10)
        #: Messages that nobody waits for any more, with the memory that MPI may still read.
        self.abandoned: list[tuple[list[MPI.Request], list[Tensor]]] = []
        #: Where in MPI's world the ranks are that torch counts.
        self.places: dict[int, int] = {}
        self._farewells: MPI.Intracomm | None = None
        self._left: dict[int, float] = {}  # rank -> when its farewell was seen
        self._failed = False
        self._process = os.getpid()
        self._watch_for_failure()
        atexit.register(self._leave)

    def _watch_for_failure(self) -> None:
        """Note whether this process is about to end by an exception: it must not wait for the
        others then."""
        show = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
        ) -> None:
            self._failed = True
            show(kind, error, trace)

        sys.excepthook = hook

    def listen(self) -> None:
        """From now on ranks tell each other when they leave. All ranks of MPI's world come here
        together, once."""
        if self._farewells is None and self.size > 1:
            self._farewells = self.api.COMM_WORLD.Dup()

    def gone(self, ranks: Iterable[int] = ()) -> list[int]:
        """Those of these ranks, as torch counts them, that have left, and so long ago that nothing
        of theirs can still be on its way."""
        comm, status = self._farewells, self.api.Status()
        # Not Iprobe and Recv: another thread may be here too.
        while (
            comm is not None
            and (message := comm.Improbe(self.api.ANY_SOURCE, 0, status)) is not None
        ):
            message.Recv([bytearray(1), self.api.BYTE])
            self._left[status.source] = time.monotonic()
        now = time.monotonic()
        return [rank for rank in ranks if now - self._left.get(self.places[rank], now) > _GRACE]

    def abandon(self, requests: list[MPI.Request], kept: list[Tensor]) -> None:
        """Keep what MPI still works on alive; what has ended meanwhile is let go."""
        self.abandoned = [
            (r, k) for r, k in [*self.abandoned, (requests, kept)] if not self._over(r)
        ]

    def _over(self, requests: list[MPI.Request]) -> bool:
        with contextlib.suppress(self.api.Exception):
            return bool(self.api.Request.Testall(requests))
        return False

    def _leave(self) -> None:
        """Say farewell, wait for the others' farewells, and end MPI. After an exception don't wait:
        the launcher ends the others, or the farewell does."""
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
        elif self._all_left() and self._ends_mpi and self._over(said):
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

    def _all_left(self) -> bool:
        if self._farewells is None:
            return True
        end = time.monotonic() + self.timeout.total_seconds()
        while time.monotonic() < end:
            self.gone()
            if len(self._left) == self.size - 1:
                return True
            time.sleep(0.002)
        return False


@functools.cache
def library() -> Library:
    """MPI in this process, started at the first call. Raises WorldError where mpi4py or an MPI
    library is missing, or MPI cannot bear threads."""
    return Library()


def _load() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        raise WorldError(
            f"the backend mpi needs mpi4py, which is not installed: {_INSTALL}"
        ) from error
    if "mpi4py.MPI" not in sys.modules:
        # Messages of a few KB go at once, rather than by a question and an answer: an all-reduce of
        # 4 KB between two ranks takes a third less.
        os.environ.setdefault("OMPI_MCA_btl_sm_eager_limit", "32768")
        mpi4py.rc.finalize = (
            False  # Library._leave does it: mpi4py would wait for ranks that have failed
        )
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
    """Whether MPI takes the addresses of CUDA memory, by the question that Open MPI and MPICH
    offer."""
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(api.__file__).MPIX_Query_cuda_support())
    return False
