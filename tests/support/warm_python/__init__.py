"""A Python interpreter that starts in milliseconds: it has imported torch and the library before.

A process with torch takes almost 2 s of CPU time to start and to end, and many tests start several.
``warm_python()`` returns the path of an executable with the command line of Python. A client
(client.py) hands its arguments, environment, folder, open files, network and signals to a server
(server.py), which forks a process for the program. So a launcher that runs under it also starts its
ranks under it.

Differences from Python: the process is not the one that was started (another pid, and the server is
its parent), hash seeds are equal, and the interpreter is not torn down after the exit functions.
Tests of such things, and of how processes start and die, take ``sys.executable``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from globaltensor.distributed.launcher import parent_death_signal
from support.shared_environment import shared_environment

HERE = Path(__file__).parent
START_SECONDS = 60.0  # torch takes seconds to import, longer when all cores are busy


class _Server:
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(
            prefix="globaltensor_test_", ignore_cleanup_errors=True
        )
        self.executable = Path(self.folder.name, "python")
        client = (HERE / "client.py").read_text()
        self.executable.write_text(f"#!{sys.executable} -IS\n{client}")
        self.executable.chmod(0o755)
        variables = {
            **shared_environment(),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        tied = [sys.executable, "-I", "-S", str(parent_death_signal.__file__), str(os.getpid())]
        server = [sys.executable, str(HERE / "server.py"), self.folder.name]
        self.process = subprocess.Popen(
            [*tied, *server], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        answers, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        if not answers or self.process.stdout.readline() != b"ready\n":
            self.close()
            raise AssertionError(f"the server was not ready after {START_SECONDS:.0f} s")

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.folder.cleanup()


_servers: list[_Server] = []


def warm_python() -> str:
    """Return the path of the executable. The first call starts the server."""
    if not _servers:
        _servers.append(_Server())
        atexit.register(close_warm_python)
    return str(_servers[0].executable)


def warmed(command: Sequence[str]) -> list[str]:
    """Return a command with ``sys.executable`` replaced by ``warm_python()``."""
    return [warm_python() if word == sys.executable else word for word in command]


def close_warm_python() -> None:
    """End the server and the programs that still run."""
    while _servers:
        _servers.pop().close()
