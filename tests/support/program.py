"""Programs run as a user runs them: in a process group of their own, under a time limit. No process
is left afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.paths import PYTHONPATH
from support.warm_python import warmed

LAUNCH = [sys.executable, "-m", "globaltensor.distributed.launch"]


def run(
    command: Sequence[str],
    seconds: float = 120,
    folder: Path | None = None,
    warm: bool = True,
    **variables: str,
) -> tuple[int, str]:
    """Run a command and return its exit code, and its output on stdout and stderr.

    ``warm``: a Python in the command, and in what it starts, is the one of support/warm_python.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    process = subprocess.Popen(
        warmed(command) if warm else list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
        cwd=folder,
    )
    try:
        out, _ = process.communicate(timeout=seconds)
        return process.returncode, out
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
