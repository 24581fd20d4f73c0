"""Start ranks from Python: ``spawn`` is torch's own, ``run`` is made for notebooks.

User code calls both through ``flow``. ``run`` starts fresh interpreters, as the launcher does. The
processes of torch.multiprocessing would run the main module again, and get a rank's variables after
torch is loaded. They would also outlive a parent that is killed while they wait in a collective. A
fork is no alternative: CUDA and torch's threads do not survive it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import linecache
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from ...errors import WorldError, noted
from ..backends.select import VARIABLE, backend_names, select_backend
from ..cluster_env import detect
from ..launcher.log_streams import Pump, Stream
from ..launcher.mpirun import Mpirun
from ..launcher.workers import LocalWorkers, OrphanReaper, Rank, tethered
from .serialize import assembled, load, pack, unpack
from .worker import Failure, RemoteCall

__all__ = ["run", "spawn"]

GRACE_SECONDS: Final = 5.0  # between the request to end (SIGTERM) and SIGKILL
_TICK_SECONDS: Final = 0.03
_SETTLE_SECONDS: Final = 0.3  # so that other ranks that die of the same cause are found too
_STACK_SECONDS: Final = 0.5  # for a rank to write its stack
_PROGRAM: Final = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
sys.path[:] = json.loads((folder / "path.json").read_text())
from globaltensor.distributed.run.worker import main
main(folder, {rank}, {parent})
"""
# Prefixes of variables that describe how this process was started.
_STARTED_OTHERWISE: Final = (
    "TORCHELASTIC_",
    "ROLE_",
)

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    *args: Any,
    nprocs: int = 2,
    backend: str = "auto",
    timeout: float | None = None,
    start_timeout: float = 120.0,
) -> list[T]:
    """Call ``fn(*args)`` on ``nprocs`` new processes of this machine, the ranks of one world.

    Return the result of each rank, in the order of ranks. ``run`` is for notebooks and interactive
    sessions, and blocks until all ranks have returned. Functions defined there, lambdas and
    closures are sent by value, with the globals that they use. Changes that ranks make to those
    globals stay in the ranks. Arguments and results are copies. Ordinary tensors arrive on the CPU,
    and a leaf keeps ``requires_grad``. A global tensor comes back as an ordinary one with the full
    value. Output of ranks appears in ``sys.stdout`` and ``sys.stderr``.

    ``backend`` is as for ``init_process_group``; "mpi" needs mpirun. ``timeout`` is the limit in
    seconds for the whole run, or None for no limit. ``start_timeout`` is the limit in seconds until
    every rank has begun with ``fn``.

    Raise the exception of the first rank that failed, caused by a WorldError with that rank's
    traceback. If the exception cannot be pickled, raise the WorldError alone. Also raise WorldError
    if a rank dies or time runs out, if ``fn`` or a result cannot be pickled, or if this process is
    one of several ranks. By then the other ranks have ended, as they have after an interrupt.

    >>> run(pow, 2, 5, nprocs=1)
    [32]
    """
    _check(nprocs, timeout, start_timeout)
    call = _call(fn, args)
    # Imported here, so that `python -m globaltensor.distributed.launch` does not find it imported
    # already.
    from ..launch import reserved_port

    with (
        tempfile.TemporaryDirectory(prefix="globaltensor_run_") as name,
        reserved_port() as port,
        OrphanReaper() as keeper,
        Pump() as pump,
    ):
        folder, chosen = Path(name), select_backend(None if backend == "auto" else backend)
        (folder / "path.json").write_text(json.dumps(sys.path))
        torch.save(call, folder / "call")
        ranks = [_make_rank(folder, rank, nprocs, port, chosen) for rank in range(nprocs)]
        with contextlib.ExitStack() as stack:
            team = LocalWorkers(ranks, pump, keeper, _starter(chosen, pump, stack))
            stack.callback(team.close)
            stack.callback(team.end, grace=GRACE_SECONDS)
            team.start()
            RunningCall(team, folder).wait(timeout, start_timeout)
        return assembled([load(folder / f"result.{rank}") for rank in range(nprocs)])


def _check(nprocs: int, timeout: float | None, start_timeout: float) -> None:
    if nprocs < 1:
        raise WorldError(f"nprocs={nprocs}: at least 1 process must be started")
    for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
        if seconds is not None and not seconds > 0:
            raise WorldError(f"{name}={seconds}: must be a positive number of seconds")
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        place = detect(os.environ)
        rank, size = (place.rank, place.world_size) if place else (0, 1)
    if size > 1:
        problem = (
            f"globaltensor.run was called on rank {rank} of {size}, but it starts a world of "
            f"its own"
        )
        raise WorldError(
            f"{problem}: call the function itself, as every rank does, or call run from a process "
            f"that is no rank"
        )


def _call(fn: Callable[..., Any], args: Sequence[Any]) -> RemoteCall:
    sources = {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
    try:
        return RemoteCall(pack((fn, args)), list(sys.argv), sources)
    except Exception as error:
        problem = (
            f"globaltensor.run cannot send {getattr(fn, '__name__', fn)} and its arguments to "
            f"the ranks: {type(error).__name__}: {error}"
        )
        mend = (
            "create objects that cannot be pickled (locks, open files, process groups, generators) "
            "inside the function"
        )
        if importlib.util.find_spec("cloudpickle") is None:
            mend = (
                "functions of a notebook, lambdas and closures need cloudpickle (pip install "
                "cloudpickle)"
            )
        raise WorldError(f"{problem}; {mend}") from error


@dataclass
class _ConsoleStream(Stream):
    """The output of a rank, shown where this process's ``print`` writes.

    In a notebook that is not a file descriptor.
    """

    where: TextIO | None = None

    def _show(self, text: bytes) -> None:
        if text and self.where is not None:
            # Ranks should not end only because no one reads their output.
            with contextlib.suppress(OSError, ValueError):
                self.where.write(text.decode(errors="replace"))
                self.where.flush()


def _make_rank(folder: Path, rank: int, n: int, port: int, backend: str) -> Rank:
    parent = "None" if "mpi" in backend_names(backend) else os.getpid()
    command = [
        os.fsdecode(get_executable()),
        "-u",
        "-c",
        _PROGRAM.format(rank=rank, parent=parent),
        str(folder),
    ]
    rank_variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_PORT": port,
    }
    # A rank that crashes in native code then shows where.
    defaults = {
        "PYTHONFAULTHANDLER": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    if n > 1:
        # With as many threads as cores in each of n processes, the threads would compete for cores.
        defaults["OMP_NUM_THREADS"] = "1"
    variables = {name: value for name, value in defaults.items() if name not in os.environ}
    variables |= {name: "" for name in os.environ if name.startswith(_STARTED_OTHERWISE)}
    variables |= {
        "MASTER_ADDR": "127.0.0.1",
        VARIABLE: backend,
        **{name: str(value) for name, value in rank_variables.items()},
    }
    return Rank(
        rank,
        rank,
        command,
        variables,
        _ConsoleStream(None, save_tail=True, where=sys.stdout),
        _ConsoleStream(None, save_tail=True, where=sys.stderr),
    )


def _starter(
    backend: str, pump: Pump, stack: contextlib.ExitStack
) -> Callable[[Sequence[Rank]], None]:
    """Return the function that starts the ranks' processes.

    It uses mpirun if they must form an MPI world.
    """
    if "mpi" not in backend_names(backend):
        return _start
    mpirun = Mpirun(pump, lambda: None)
    stack.callback(mpirun.close)
    return mpirun.start


def _start(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        variables = {**os.environ, **rank.variables}
        # The ranks do not get this process's stdin: the program or the user's input may come from
        # it.
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": rank.out.theirs,
            "stderr": rank.err.theirs,
        }
        rank.process = subprocess.Popen(tethered(rank.command), env=variables, **streams)


class RunningCall:
    """A call in progress.

    The files in its folder show which ranks have begun, returned or failed
    (distributed/run/worker.py).
    """

    def __init__(self, team: LocalWorkers, folder: Path) -> None:
        self.team, self.folder, self.n = team, folder, len(team.ranks)

    def wait(self, timeout: float | None, start_timeout: float) -> None:
        """Wait until all ranks have returned and ended. Raise the errors that ``run`` raises."""
        began = time.monotonic()
        while not all(self._has_file("result", rank) for rank in self.team.ranks):
            if any(self._failed(rank) for rank in self.team.ranks):
                time.sleep(_SETTLE_SECONDS)
                self._raise()
            waited = time.monotonic() - began
            if timeout is not None and waited > timeout:
                self._raise_late_start(
                    [rank for rank in self.team.ranks if not self._has_file("result", rank)],
                    f"had not returned after {timeout:g} s (timeout)",
                )
            if waited > start_timeout and (
                missing := [rank for rank in self.team.ranks if not self._has_file("here", rank)]
            ):
                self._raise_late_start(
                    missing, f"had not begun after {start_timeout:g} s (start_timeout)"
                )
            time.sleep(_TICK_SECONDS)
        until = time.monotonic() + GRACE_SECONDS
        while self.team.alive and time.monotonic() < until:
            time.sleep(_TICK_SECONDS)

    def _has_file(self, what: str, rank: Rank) -> bool:
        # os.access raises no error. An interrupt would show an error caught here in its traceback.
        return os.access(self.folder / f"{what}.{rank.rank}", os.F_OK)

    def _failed(self, rank: Rank) -> bool:
        ended = rank.code is not None  # read first, because a rank writes its answer before it ends
        return self._has_file("failure", rank) or (ended and not self._has_file("result", rank))

    def _raise(self) -> None:
        """Raise the error of the rank that failed first.

        A rank that died without a failure file counts as first, as it did not fail because of the
        others.
        """
        failures = [(self._failure(rank), rank) for rank in self.team.ranks if self._failed(rank)]
        failure, rank = min(failures, key=lambda found: found[0].at if found[0] else 0.0)
        if failure is None:
            words = "".join(f"\n| {line}" for line in rank.last_words())
            raise WorldError(f"{rank.epitaph()}; the function had not returned{words}")
        rank_error = WorldError(
            f"rank {rank.rank} of {self.n} failed:\n{failure.traceback.rstrip()}"
        )
        if failure.error is None:
            raise rank_error
        try:
            error: Exception = unpack(failure.error)
        except Exception:  # unpickling may need objects that only the ranks have
            raise rank_error from None
        noted(error, f"(on rank {rank.rank} of {self.n}, in globaltensor.run)")
        raise error from rank_error

    def _failure(self, rank: Rank) -> Failure | None:
        """Return the failure that a rank has written, or None if it died without writing one."""
        if not self._has_file("failure", rank):
            return None
        failure: Failure = pickle.loads((self.folder / f"failure.{rank.rank}").read_bytes())
        return failure

    def _raise_late_start(self, ranks: Sequence[Rank], how: str) -> None:
        for rank in ranks:
            if (
                self._has_file("here", rank)
                and rank.process is not None
                and hasattr(signal, "SIGUSR1")
            ):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        lines = [
            (
                f"rank{'s' if len(ranks) > 1 else ''} "
                f"{', '.join(str(rank.rank) for rank in ranks)} "
                f"of {self.n} {how}, and the run was ended"
            )
        ]
        for rank in ranks:
            with contextlib.suppress(OSError):
                where = (self.folder / f"stack.{rank.rank}").read_text().rstrip()
                lines += [f"rank {rank.rank} was here:", where] if where else []
        raise WorldError("\n".join(lines))
