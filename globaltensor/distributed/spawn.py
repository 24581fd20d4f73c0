"""Starting ranks from Python: ``spawn`` is torch's own, ``run`` is made for notebooks.

``run`` starts fresh interpreters (through tether.py), where torch.multiprocessing would run the main module again, set a rank's variables after torch was
imported, and leave a rank that waits in a collective alive when its parent dies; and where torch elastic's processes take over the signals of this one.
A fork is no way out: CUDA and torch's threads do not survive it.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from ..errors import WorldError, noted
from .detect import detect
from .errand import Call, Failure
from .parcel import assembled, load, pack, unpack

__all__ = ["run", "spawn"]

GRACE_SECONDS: Final = 5.0  # between the request to end (SIGTERM) and the end (SIGKILL)
_TICK_SECONDS: Final = 0.05
_SETTLE_SECONDS: Final = 0.3  # for others to be found dead of the same cause
_STACK_SECONDS: Final = 0.5  # for a rank to say where it is
_TAIL_BYTES: Final = 8192
_TAIL_LINES: Final = 15
_TETHER: Final = Path(__file__).with_name("tether.py")
_PROGRAM: Final = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
sys.path[:] = json.loads((folder / "path.json").read_text())
from globaltensor.distributed.errand import main
main(folder, {rank}, {parent})
"""
_STARTED_OTHERWISE: Final = ("TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_COMM_WORLD_", "PMIX_", "PMI_")  # variables that would say something else

T = TypeVar("T")


def run(fn: Callable[..., T], *args: Any, nprocs: int = 2, backend: str = "auto", timeout: float | None = None, start_timeout: float = 120.0) -> list[T]:
    """Call ``fn(*args)`` on ``nprocs`` new processes of this machine, the ranks of one world -> what each returned, in the order of ranks.

    For notebooks and interactive sessions; it blocks until all ranks have returned. Functions defined there, lambdas and closures travel by value, with the
    globals they use; what ranks change in those stays with them. Arguments and results are copies: ordinary tensors arrive on the CPU (a leaf keeps
    ``requires_grad``), a global tensor comes back as an ordinary one with the whole value. What ranks print appears in ``sys.stdout`` and ``sys.stderr``.

    ``backend``: what the process group is made with where ``fn`` says nothing else; "auto" as everywhere. ``timeout``: seconds for all of it, None for no
    limit; ``start_timeout``: seconds until every rank has begun with ``fn``.

    Raises the exception of the first rank that failed, caused by a WorldError with that rank's traceback, or a WorldError alone where it cannot be pickled;
    WorldError where a rank dies, time runs out, ``fn`` or a result cannot be pickled, or this process is itself one of several ranks. The other ranks
    have ended by then, as they have after an interrupt.

    >>> run(pow, 2, 5, nprocs=1)
    [32]
    """
    _check(nprocs, timeout, start_timeout)
    from .launch import reserved_port  # here, so that `python -m globaltensor.distributed.launch` finds it not imported yet

    with tempfile.TemporaryDirectory(prefix="globaltensor_run_") as name, reserved_port() as port:
        folder = Path(name)
        (folder / "path.json").write_text(json.dumps(sys.path))
        torch.save(_call(fn, args), folder / "call")
        with _Team(folder, nprocs, port, {} if backend == "auto" else {"GLOBALTENSOR_BACKEND": backend}) as team:
            team.wait(timeout, start_timeout)
        return assembled([load(folder / f"result.{rank}") for rank in range(nprocs)])


def _check(nprocs: int, timeout: float | None, start_timeout: float) -> None:
    if nprocs < 1:
        raise WorldError(f"nprocs={nprocs}: at least 1 process must be started")
    for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
        if seconds is not None and not seconds > 0:
            raise WorldError(f"{name}={seconds}: a positive number of seconds")
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        place = detect(os.environ)
        rank, size = (place.rank, place.world_size) if place else (0, 1)
    if size > 1:
        told = f"globaltensor.run was called on rank {rank} of {size}, but it starts a world of its own"
        raise WorldError(f"{told}: call the function itself, as every rank does, or call run from a process that is no rank")


def _call(fn: Callable[..., Any], args: Sequence[Any]) -> Call:
    sources = {name: found[2] for name, found in list(linecache.cache.items()) if len(found) == 4 and not os.path.exists(name)}
    try:
        return Call(pack((fn, args)), list(sys.argv), sources)
    except Exception as error:
        told = f"globaltensor.run cannot send {getattr(fn, '__name__', fn)} and its arguments to the ranks: {type(error).__name__}: {error}"
        mend = "make what cannot be pickled (locks, open files, process groups, generators) inside the function"
        if "cloudpickle" not in sys.modules:
            mend = "functions of a notebook, lambdas and closures need cloudpickle (pip install cloudpickle)"
        raise WorldError(f"{told}; {mend}") from error


@dataclass
class _Rank:
    """One process, with our ends of what it writes."""

    rank: int
    process: subprocess.Popen[bytes]
    folder: Path
    said: bytes = b""  # the last it wrote to stderr
    unfinished: dict[int, bytes] = field(default_factory=dict)  # by file descriptor, the start of a line, not passed on yet

    @property
    def returned(self) -> bool:
        return (self.folder / f"result.{self.rank}").exists()

    @property
    def failed(self) -> bool:
        ended = self.process.poll() is not None  # first: it answers before it ends
        return (self.folder / f"failure.{self.rank}").exists() or (ended and not self.returned)

    @property
    def failure(self) -> Failure | None:
        """How it says that it has failed; None where it died without a word."""
        path = self.folder / f"failure.{self.rank}"
        if not path.exists():
            return None
        found: Failure = pickle.loads(path.read_bytes())
        return found

    def signal(self, number: int) -> None:
        """Send a signal to the process and to all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def epitaph(self) -> str:
        code = self.process.wait()
        how = f"ended with exit code {code} before the function returned"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-code).name} (signal {-code})"
            if -code == signal.SIGKILL:
                how += ", as the system does when memory runs out"
        words = self.said.decode(errors="replace").rstrip().splitlines()[-_TAIL_LINES:]
        return "\n".join([how, *(f"| {line}" for line in words)])


class _Team:
    """The processes of one call. Leaving the block ends those that are left."""

    def __init__(self, folder: Path, n: int, port: int, variables: Mapping[str, str]) -> None:
        self.folder, self.n, self.ranks = folder, n, list[_Rank]()
        self._selector = selectors.DefaultSelector()
        try:
            for rank in range(n):
                self._start(rank, {**_variables(rank, n, port), **variables})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> _Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int, variables: Mapping[str, str]) -> None:
        program = [os.fsdecode(get_executable()), "-u", "-c", _PROGRAM.format(rank=rank, parent=os.getpid()), str(self.folder)]
        command = [program[0], "-I", "-S", str(_TETHER), str(os.getpid()), *program]
        # In a session of its own a terminal's Ctrl-C does not reach it: who called run decides.
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
        started = _Rank(rank, process, self.folder)
        self.ranks.append(started)
        for ours, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert ours is not None
            self._selector.register(ours, selectors.EVENT_READ, (started, stream))

    def wait(self, timeout: float | None, start_timeout: float) -> None:
        """Pass on what the ranks write until all have returned. Raises what ``run`` raises."""
        now = time.monotonic()
        start, end = now + start_timeout, None if timeout is None else now + timeout
        while not all(rank.returned for rank in self.ranks):
            self._forward(_TICK_SECONDS)
            if any(rank.failed for rank in self.ranks):
                self._forward_for(_SETTLE_SECONDS, lambda: False)
                self._raise()
            now = time.monotonic()
            if end is not None and now > end:
                self._late([rank for rank in self.ranks if not rank.returned], f"had not returned after {timeout:g} s (timeout)")
            if now > start:
                missing = [rank for rank in self.ranks if not (self.folder / f"here.{rank.rank}").exists()]
                if missing:
                    self._late(missing, f"had not begun after {start_timeout:g} s (start_timeout)")
                start = float("inf")
        self._forward_for(GRACE_SECONDS, self._all_ended)

    def _raise(self) -> None:
        """Raise the error of the rank that failed first. One that died without a word did not fail because the others did."""
        found = [(failure.at if failure else 0.0, rank, failure) for rank in self.ranks if rank.failed for failure in [rank.failure]]
        _, rank, failure = min(found, key=lambda entry: entry[:1])
        who = f"rank {rank.rank} of {self.n}"
        if failure is None:
            raise WorldError(f"{who} (pid {rank.process.pid}) {rank.epitaph()}")
        told = WorldError(f"{who} failed:\n{failure.traceback.rstrip()}")
        if failure.error is None:
            raise told
        try:
            error: Exception = unpack(failure.error)
        except Exception:  # it may need what only the ranks have
            raise told from None
        noted(error, f"(on {who}, in globaltensor.run)")
        raise error from told

    def _late(self, ranks: Sequence[_Rank], how: str) -> None:
        for rank in ranks:
            if hasattr(signal, "SIGUSR1") and (self.folder / f"here.{rank.rank}").exists():
                os.kill(rank.process.pid, signal.SIGUSR1)
        self._forward_for(_STACK_SECONDS, lambda: False)
        lines = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank.rank) for rank in ranks)} of {self.n} {how}, and the run was ended"]
        for rank in ranks:
            with contextlib.suppress(OSError):
                where = (self.folder / f"stack.{rank.rank}").read_text().rstrip()
                lines += [f"rank {rank.rank} was here:", where] if where else []
        raise WorldError("\n".join(lines))

    def close(self) -> None:
        """End the processes and what they have started."""
        try:
            if not self._all_ended():
                for rank in self.ranks:
                    rank.signal(signal.SIGTERM)
                self._forward_for(GRACE_SECONDS, self._all_ended)
        finally:
            for rank in self.ranks:
                rank.signal(signal.SIGKILL)
            for rank in self.ranks:
                rank.process.wait()
            self._forward_for(_SETTLE_SECONDS, lambda: not self._selector.get_map())
            self._selector.close()
            for rank in self.ranks:
                for pipe in (rank.process.stdout, rank.process.stderr):
                    assert pipe is not None
                    pipe.close()

    def _all_ended(self) -> bool:
        return all(rank.process.poll() is not None for rank in self.ranks)

    def _forward_for(self, seconds: float, enough: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not enough() and time.monotonic() < end:
            self._forward(_TICK_SECONDS)

    def _forward(self, seconds: float) -> None:
        """Pass on what the ranks have written, in whole lines, waiting at most so long for it."""
        if not self._selector.get_map():
            time.sleep(seconds)
        for key, _ in self._selector.select(seconds) if self._selector.get_map() else []:
            rank, stream = key.data
            chunk = os.read(key.fd, 1 << 16)
            if not chunk:
                self._selector.unregister(key.fileobj)
            if key.fileobj is rank.process.stderr:
                rank.said = (rank.said + chunk)[-_TAIL_BYTES:]
            text = rank.unfinished.pop(key.fd, b"") + chunk
            cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 if chunk else len(text)
            rank.unfinished[key.fd] = text[cut:]
            if cut and stream is not None:
                with contextlib.suppress(OSError, ValueError):  # nobody may be listening: no reason to end the ranks
                    stream.write(text[:cut].decode(errors="replace"))
                    stream.flush()


def _variables(rank: int, n: int, port: int) -> Mapping[str, str]:
    """The environment of a rank: this process's, and who the rank is."""
    common = {name: value for name, value in os.environ.items() if not name.startswith(_STARTED_OTHERWISE)}
    if n > 1:
        common.setdefault("OMP_NUM_THREADS", "1")  # as many threads as cores in each of n processes would fight for the cores
    common.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that crashes in native code shows where
    common.setdefault("PYTHONIOENCODING", "utf-8")
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    return {**common, **{name: str(value) for name, value in told.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
