"""Whole programs as ranks that end by themselves. ``forked(2, fn, *args)`` returns their exit codes
and output.

The ranks run under support/warm_python, so a program costs a tenth of a second, not ten.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from globaltensor.distributed.launch import reserved_port
from support.warm_python import warm_python

SECONDS = 60.0
PROGRAM = "import base64, pickle, sys; fn, args = pickle.loads(base64.b64decode({!r})); fn(*args)"


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
    program = PROGRAM.format(base64.b64encode(pickle.dumps((fn, args))).decode())
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        **(variables or {}),
    }
    with reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(n)]
        ranks = []
        for rank, output in enumerate(outputs):
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            with output.open("wb") as file:
                ranks.append(
                    subprocess.Popen(
                        [warm_python(), "-W", "error", "-c", program],
                        env=common | world,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                    )
                )
        until = time.monotonic() + seconds
        codes = [ended(rank, until) for rank in ranks]
        return codes, [output.read_text(errors="replace") for output in outputs]


def ended(rank: subprocess.Popen[bytes], until: float) -> int | None:
    """Return a process's exit code, -n for signal n. Kill it if it is alive at ``until``, and
    return None."""
    try:
        return rank.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        rank.kill()
        rank.wait()
        return None
