"""Ranks in an MPI world: mpirun starts a shim for each rank, and the shim runs the rank.

The agent calls this module. The shim obeys the launcher, so ranks of every backend are watched in
the same way.

mpirun is needed for one thing only: the connection of the ranks to its PMIx (or PMI) server. A rank
inherits that connection as variables and sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ..._base.extras import install_extra
from ...errors import WorldError
from .log_streams import Pump, Stream
from .workers import Process, Rank, signal_name, stdin, tethered

__all__ = ["Mpirun", "find_mpirun", "room"]

_START_SECONDS: Final = 60.0
_TICK_SECONDS: Final = 0.02
_SHIM: Final = Path(__file__).with_name("mpirun_shim.py")


def find_mpirun() -> str:
    """Return the mpirun in the folder of this Python, else on the PATH.

    Raise WorldError if there is none.
    """
    beside = [Path(sys.executable).parent / name for name in ("mpirun", "mpiexec")]
    mpirun = (
        next((str(path) for path in beside if os.access(path, os.X_OK)), None)
        or shutil.which("mpirun")
        or shutil.which("mpiexec")
    )
    if mpirun is None:
        raise WorldError(
            "--backend mpi needs mpirun, but it is neither in the folder of this Python nor on the "
            "PATH: load an MPI module, or install the extra 'mpi', which has one: "
            f"{install_extra('mpi')}"
        )
    return mpirun


def options(program: str) -> list[str]:
    """Return the options that this mpirun needs to behave like the launcher without MPI.

    They let it start as many ranks as asked, and bind none of them to a core.
    """
    done = subprocess.run(
        [program, "--version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_START_SECONDS,
    )
    if "Open MPI" not in done.stdout and "OpenRTE" not in done.stdout:
        return []  # Hydra (MPICH, Intel MPI) does so by default
    return [
        "--oversubscribe",
        "--bind-to",
        "none",
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
    ]


def room(folder: str) -> dict[str, str]:
    """Return the variables that make Open MPI store its own files in this folder.

    Otherwise mpirun's pid names their folder. An mpirun that was killed leaves its folder behind.
    The next mpirun of that pid then assumes that the server described there is alive. All that it
    reports is that "the PMIx server's listener thread failed to start".
    """
    return {
        "PRTE_MCA_prte_tmpdir_base": folder,
        "OMPI_MCA_orte_tmpdir_base": folder,
    }  # for Open MPI 5 and 4


class Shimmed:
    """A rank that a shim runs; the shim reports how the rank ended."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid, self._connection = pid, connection
        self._code: int | None = None
        connection.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit code, -n if signal n ended the rank, or None while it lives."""
        if self._code is None:
            with contextlib.suppress(BlockingIOError):
                try:
                    exit_code = self._connection.recv(64)
                except ConnectionError:
                    exit_code = b""
                # A killed shim takes its rank with it.
                self._code = int(exit_code) if exit_code else -9
        return self._code

    def close(self) -> None:
        """Let the shim end, which kills what is left of the rank."""
        self._connection.close()


class Mpirun:
    """A starter of ranks through mpirun. ``check`` is called during waits, and may raise."""

    def __init__(self, pump: Pump, check: Callable[[], None]) -> None:
        self._pump, self._check = pump, check
        self._program = find_mpirun()
        self._options = options(self._program)
        self._process: subprocess.Popen[bytes] | None = None
        self._room: tempfile.TemporaryDirectory[str] | None = None
        self._shims: list[Shimmed] = []
        self._said = Stream(None, save_tail=True)

    def start(self, ranks: Sequence[Rank]) -> None:
        """Start these ranks, which must be all ranks of the world.

        Raise WorldError if mpirun cannot.
        """
        self.close()
        self._room = tempfile.TemporaryDirectory(
            prefix="globaltensor_mpi_", ignore_cleanup_errors=True
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(f"{self._room.name}/door")
            door.listen(len(ranks))
            door.settimeout(_TICK_SECONDS)
            self._begin(len(ranks), self._room.name)
            until = time.monotonic() + _START_SECONDS
            waiting = {str(rank.rank): rank for rank in ranks}
            while waiting:
                self._check()
                if self.died or time.monotonic() > until:
                    raise WorldError(self._start_failure_text(len(waiting), len(ranks)))
                with contextlib.suppress(TimeoutError):
                    connection, _ = door.accept()
                    connection.settimeout(_START_SECONDS)
                    rank = waiting.pop(connection.recv(64).decode().strip())
                    rank.process = self._hand_over(connection, rank)

    def _begin(self, n: int, folder: str) -> None:
        self._said = Stream(None, save_tail=True)
        self._said.open()
        self._pump.add(self._said)
        shim = [sys.executable, "-I", "-S", str(_SHIM), f"{folder}/door"]
        command = tethered([self._program, *self._options, "-n", str(n), *shim])
        variables = {**os.environ, **room(folder)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._said.theirs,
            stderr=self._said.theirs,
            env=variables,
        )
        self._said.started()

    def _hand_over(self, connection: socket.socket, rank: Rank) -> Process:
        reads = os.open(os.devnull, os.O_RDONLY) if stdin() is not None else os.dup(0)
        streams = [
            reads,
            1 if rank.out.theirs is None else rank.out.theirs,
            2 if rank.err.theirs is None else rank.err.theirs,
        ]
        order = json.dumps({"command": list(rank.command), "variables": dict(rank.variables)})
        try:
            socket.send_fds(connection, [b"{"], streams)
            connection.sendall(f"{order[1:]}\n".encode())
        finally:
            os.close(reads)
        shim = Shimmed(connection, int(connection.recv(64)))
        self._shims.append(shim)
        return shim

    @property
    def died(self) -> bool:
        """True if mpirun has ended without a request."""
        return self._process is not None and self._process.poll() is not None

    def epitaph(self) -> tuple[int, str]:
        """Return (exit code for the launcher, how mpirun ended), once it has ended."""
        code = self._process.returncode if self._process is not None else 1
        how = (
            f"was ended by {signal_name(-code)} (signal {-code})"
            if code < 0
            else f"ended with exit code {code} before its ranks"
        )
        return 128 - code if code < 0 else code or 1, f"{self._program} {how}"

    def _start_failure_text(self, missing: int, n: int) -> str:
        how = (
            f"ended with code {self._process.returncode}"
            if self._process and self.died
            else f"had not started all ranks after {_START_SECONDS:g} s"
        )
        self._pump.settle()
        words = self._said.tail().decode(errors="replace").strip()
        return f"{self._program} {how}, with {missing} of {n} ranks missing" + (
            f". Its output:\n{words}" if words else ""
        )

    def close(self) -> None:
        """Let the shims and mpirun end, and kill mpirun if that takes long."""
        for shim in self._shims:
            shim.close()
        self._shims.clear()
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            self._pump.drop(self._said)
        if self._room is not None:
            self._room.cleanup()
            self._room = None
