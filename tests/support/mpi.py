"""Pools of processes started by mpirun. ``run_by_mpi(2, fn, *args)`` is ``run_on`` in a world over
MPI."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from globaltensor.distributed.launcher import parent_death_signal
from globaltensor.distributed.launcher.mpirun import find_mpirun, options, room
from globaltensor.errors import WorldError
from support.shared_environment import shared_environment
from support.warm_python import warm_python

from .pool import CALL_SECONDS, START_SECONDS, Pool

WORKER = Path(__file__).with_name("mpi_worker.py")


def missing() -> str:
    """Return what MPI needs and lacks here, "" if nothing is missing."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: make install-mpi"
    try:
        find_mpirun()
    except WorldError as error:
        return str(error)
    return ""


needs_mpi = pytest.mark.skipif(bool(missing()), reason=missing() or "MPI is there")


@functools.cache
def _rooms() -> str:
    """Return a folder that is removed with this process."""
    made = tempfile.TemporaryDirectory(prefix="globaltensor_test_", ignore_cleanup_errors=True)
    atexit.register(made.cleanup)
    return made.name


def mpirun(n: int, *command: str) -> list[str]:
    """Return a command line that runs ``command`` on ``n`` ranks. The ranks die with this process,
    and mpirun's own files are removed."""
    program = find_mpirun()
    own = [f"{name}={value}" for name, value in room(tempfile.mkdtemp(dir=_rooms())).items()]
    started = ["env", *own, program, *options(program), "-n", str(n), *command]
    return [
        sys.executable,
        "-I",
        "-S",
        str(parent_death_signal.__file__),
        str(os.getpid()),
        *started,
    ]


def environment(**more: str) -> dict[str, str]:
    """Return the variables for ranks that mpirun starts, without variables that set rank or
    world."""
    told = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOBALTENSOR_BACKEND",
    )
    kept = {name: value for name, value in shared_environment().items() if name not in told}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **more,
    }


class _Rank:
    """A process that mpirun has started."""

    def __init__(self, pid: int, program: subprocess.Popen[bytes]) -> None:
        self.pid, self._program = pid, program

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float | None = None) -> int:
        """Return mpirun's exit code. mpirun ends all ranks when one fails."""
        return self._program.wait(seconds)


class MpiPool(Pool):
    """A pool of ``n`` ranks of one world over MPI."""

    def __init__(self, n: int) -> None:
        self.n, self._stack = n, contextlib.ExitStack()
        self._connections: list[Connection] = []
        self._processes = []
        said = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed by the stack
        self._said = [said] * n
        self._program: subprocess.Popen[bytes] | None = None
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            door = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            door.bind(f"{folder}/door")
            door.listen(n)
            door.settimeout(START_SECONDS)
            command = mpirun(n, warm_python(), "-u", str(WORKER), f"{folder}/door")
            self._program = subprocess.Popen(
                command,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                process_group=0,
            )
            self._meet(door)
            self._gather(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def _meet(self, door: socket.socket) -> None:
        here: dict[int, tuple[Connection, _Rank]] = {}
        assert self._program is not None
        while len(here) < self.n:
            connection = Connection(door.accept()[0].detach())
            rank, pid = pickle.loads(connection.recv_bytes())
            here[rank] = connection, _Rank(pid, self._program)
        self._connections = [here[rank][0] for rank in range(self.n)]
        self._processes = [here[rank][1] for rank in range(self.n)]  # type: ignore[misc]

    def close(self) -> None:
        """End the processes. They exit when their connections close, or are killed."""
        if _pools.get(self.n) is self:
            del _pools[self.n]
        for connection in self._connections:
            connection.close()
        if self._program is not None:
            try:
                self._program.wait(10)
            except subprocess.TimeoutExpired:
                for process in self._processes:
                    process.send_signal(signal.SIGKILL)
                self._program.kill()
                self._program.wait()
        self._stack.close()


_pools: dict[int, MpiPool] = {}


def run_by_mpi(
    n: int, fn: Callable[..., Any], *args: Any, timeout: float = CALL_SECONDS
) -> list[Any]:
    """Call ``fn(*args)`` on ``n`` ranks that mpirun has started, and return each rank's result."""
    if n not in _pools:
        _pools[n] = MpiPool(n)
    return _pools[n].run(fn, *args, timeout=timeout)


def close_mpi_pools() -> None:
    """End the processes of all pools."""
    for pool in list(_pools.values()):
        pool.close()
