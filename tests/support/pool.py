"""Real processes for tests: one pool of each size, started at first use and shared by the whole
run.

    def sum_of_ranks(start):            # any function that can be imported: it runs on every rank, in a world of n
        ...
    def test_sum():
        assert run_on(2, sum_of_ranks, 10) == [11, 11]

A call has a time limit. A rank that fails, or doesn't answer in time, fails the test with every
rank's traceback (and the calls it was running). Such a failure ends the pool, and the next call
starts a new one. The processes die with pytest, even if pytest is killed.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from globaltensor.distributed.launch import reserved_port
from globaltensor.distributed.launcher import parent_death_signal
from support.shared_environment import shared_environment
from support.warm_python import warm_python

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 60.0  # torch takes seconds to import, longer when all cores are busy
CALL_SECONDS = 60.0
_AFTER_A_FAILURE = 5.0  # the other ranks may fail too, or wait forever


class RanksFailed(AssertionError):
    """The error that names each rank that failed, with its failure."""


class Pool:
    """A pool of ``n`` processes, the ranks of one world over gloo.

    ``warm``: they run under support/warm_python, which starts four processes in the time of one.
    Of the shared pool of two the first process does not. So the two have different hash seeds,
    which shows where ranks go through sets in different orders.
    """

    def __init__(self, n: int, warm: bool = False, first_is_warm: bool = True) -> None:
        self.n = n
        python = warm_python() if warm else sys.executable
        self._pythons = [python if first_is_warm else sys.executable, *[python] * (n - 1)]
        self._stack = contextlib.ExitStack()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._said = [self._stack.enter_context(tempfile.TemporaryFile()) for _ in range(n)]  # noqa: SIM115 - closed by the stack
        try:
            port = self._stack.enter_context(reserved_port())
            for rank in range(n):
                self._start(rank, port)
            self._gather(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, port: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            world = {
                "RANK": rank,
                "WORLD_SIZE": self.n,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": self.n,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            variables = {
                **shared_environment(),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                **{k: str(v) for k, v in world.items()},
            }
            command = [
                sys.executable,
                "-I",
                "-S",
                str(parent_death_signal.__file__),
                str(os.getpid()),
                self._pythons[rank],
                "-u",
                str(WORKER),
                str(theirs.fileno()),
            ]
            said = self._said[rank]
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = CALL_SECONDS) -> list[Any]:
        """Call ``fn(*args)`` on every rank and return each rank's result. Raises RanksFailed, after
        which the pool is closed."""
        message = pickle.dumps((fn, args))
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            return self._gather(timeout)
        except BaseException:
            self.close()
            raise

    def _gather(self, timeout: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + timeout
        while len(answers) < self.n and time.monotonic() < end:
            missing = {self._connections[r]: r for r in range(self.n) if r not in answers}
            for ready in wait(list(missing), max(0.0, end - time.monotonic())):
                rank = missing[ready]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = (
                        False,
                        (
                            f"the process ended with code "
                            f"{self._processes[rank].wait(10)}\n{self._last_words(rank)}"
                        ),
                    )
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + _AFTER_A_FAILURE)
        late = [r for r in range(self.n) if r not in answers]
        if not late and all(good for good, _ in answers.values()):
            return [answers[r][1] for r in range(self.n)]
        stacks = self._stacks(late)
        lines = [
            f"rank {r} of {self.n}: {text}"
            for r, (good, text) in sorted(answers.items())
            if not good
        ]
        lines += [
            f"rank {r} of {self.n}: no answer within {timeout:g} s, or after another's failure; "
            f"it was here:\n{stacks[r]}"
            for r in late
        ]
        raise RanksFailed("\n".join(lines))

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return the stacks of these ranks."""
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5 if ranks else 0)
        return {rank: self._last_words(rank) for rank in ranks}

    def _last_words(self, rank: int, limit: int = 8192) -> str:
        file = self._said[rank]
        return os.pread(
            file.fileno(), limit, max(0, os.fstat(file.fileno()).st_size - limit)
        ).decode(errors="replace")

    def close(self) -> None:
        """End the processes. The next call of ``run_on`` starts others."""
        if _pools.get(self.n) is self:
            del _pools[self.n]
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._stack.close()


_pools: dict[int, Pool] = {}


def run_on(n: int, fn: Callable[..., Any], *args: Any, timeout: float = CALL_SECONDS) -> list[Any]:
    """Call ``fn(*args)`` on ``n`` real processes, the ranks of one world, and return each rank's
    result. ``fn`` and the values must be picklable."""
    if n not in _pools:
        _pools[n] = Pool(n, warm=True, first_is_warm=n > 2)
    return _pools[n].run(fn, *args, timeout=timeout)


def close_pools() -> None:
    """End the processes of all pools."""
    for pool in list(_pools.values()):
        pool.close()
