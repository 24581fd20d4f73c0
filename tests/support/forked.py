"""Whole programs as ranks that end as processes end. ``forked(2, fn, *args)`` returns their exit
codes and output.

A server process has imported the library and forks the ranks (support/forked_server.py), so a
program costs a tenth of a second, not ten. The server starts at first use and dies with pytest.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from globaltensor.distributed.launcher import parent_death

SERVER = Path(__file__).with_name("forked_server.py")
SECONDS = 60.0


class _Server:
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(
            prefix="globaltensor_test_", ignore_cleanup_errors=True
        )
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [
            sys.executable,
            "-I",
            "-S",
            str(parent_death.__file__),
            str(os.getpid()),
            sys.executable,
            str(SERVER),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=variables,
        )

    def run(self, task: dict[str, Any]) -> list[int | None]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.folder.cleanup()


_servers: list[_Server] = []


def forked(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    seconds: float = SECONDS,
    variables: dict[str, str] | None = None,
) -> tuple[list[int | None], list[str]]:
    """Run ``fn(*args)`` as a program on ``n`` ranks. Return (exit codes, each rank's output on both
    streams). A code is -n for signal n, and None for a rank that had to be killed after
    ``seconds``. ``fn`` must be importable and its arguments picklable."""
    if not _servers:
        _servers.append(_Server())
        atexit.register(close_server)
    server = _servers[0]
    call = base64.b64encode(pickle.dumps((fn, args))).decode()
    codes = server.run(
        {
            "ranks": n,
            "call": call,
            "seconds": seconds,
            "variables": variables or {},
            "folder": server.folder.name,
        }
    )
    return codes, [
        Path(server.folder.name, str(rank)).read_text(errors="replace") for rank in range(n)
    ]


def close_server() -> None:
    """End the server."""
    while _servers:
        _servers.pop().close()
