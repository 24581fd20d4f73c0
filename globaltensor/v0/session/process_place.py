"""A process's place in the world of a session, and the device processes on this machine.

Each process gets its place through the environment variables that every launcher sets. The session
and the worker pool use this.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...distributed.launcher.workers import tethered
from .device_layout import Layout

__all__ = ["SessionAddress", "Workers", "as_rank"]

_GRACE_SECONDS: Final = 5.0
_PROGRAM: Final = """
import json, sys
sys.path[:] = json.loads(sys.stdin.buffer.readline())
from globaltensor.v0.session.device_worker import main
main()
"""


@dataclass(frozen=True)
class SessionAddress:
    """The address at which all devices of a session meet, and their layout."""

    layout: Layout
    addr: str
    port: int

    def variables(self, rank: int) -> dict[str, str]:
        each = self.layout.each
        rank_variables = {
            "RANK": rank,
            "WORLD_SIZE": self.layout.size,
            "LOCAL_RANK": rank % each,
            "LOCAL_WORLD_SIZE": each,
            "GROUP_RANK": rank // each,
            "GROUP_WORLD_SIZE": self.layout.machines,
            "MASTER_ADDR": self.addr,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in rank_variables.items()}


@contextlib.contextmanager
def as_rank(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables in the block, and restore the old values afterwards.

    Processes that the script starts later must not take themselves for ranks.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Workers:
    """The processes of this machine's devices from 1 on.

    They end with this process, however it ends.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def launch(self, devices: int) -> None:
        """Start ``devices`` processes, which does not count this process's own device.

        They import torch meanwhile, then wait for `tell`.
        """
        threads = {}
        if devices and "OMP_NUM_THREADS" not in os.environ:
            threads["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (devices + 1)))
        for _ in range(devices):
            # The script does not run in these processes, so discard their stdout, but show errors.
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            process = subprocess.Popen(
                tethered([sys.executable, "-u", "-c", _PROGRAM]),
                env={**os.environ, **threads},
                **streams,
            )
            self.processes.append(process)
            self._write(process, json.dumps(sys.path).encode() + b"\n")

    def tell(self, place: SessionAddress, first: int, instruction: Any) -> None:
        """Send every process its rank and the instruction that all devices get.

        ``first`` is this process's rank; the other processes have the ranks after it.
        """
        parcel = _packed(instruction) if self.processes else b""
        for rank, process in enumerate(self.processes, first + 1):
            self._write(
                process, pickle.dumps((rank, place.variables(rank), dict(_interfaces()))) + parcel
            )
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _write(self, process: subprocess.Popen[bytes], content: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its watcher reports
            process.stdin.write(content)
            process.stdin.flush()

    def dead(self) -> dict[int, int]:
        """Return the exit codes of the processes that have ended, by device."""
        codes = {device: p.poll() for device, p in enumerate(self.processes, 1)}
        return {device: code for device, code in codes.items() if code is not None}

    def end(self, grace: float = _GRACE_SECONDS) -> None:
        """Wait ``grace`` seconds for the processes to end, then kill those that have not."""
        until = time.monotonic() + grace
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self.processes.clear()


def _interfaces() -> Iterator[tuple[str, str]]:
    """Return the variables that name the network interfaces of the backends.

    They were set after the worker processes had started.
    """
    return ((name, value) for name, value in os.environ.items() if name.endswith("_SOCKET_IFNAME"))


def _packed(instruction: Any) -> bytes:
    """Serialise an instruction, with cloudpickle if it is installed.

    Jobs may hold functions of the script, which only cloudpickle sends by value.
    """
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(instruction)
    serialised: bytes = cloudpickle.dumps(instruction)
    return serialised
