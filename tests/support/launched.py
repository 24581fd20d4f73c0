"""Launchers as a user starts them, for tests. Their scripts have ranks that can wait for each
other, and no process is left after a test.

Each process in a test's folder is found by the variable TEST_FOLDER in its environment (in /proc).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.warm_python import warmed

LAUNCH = [sys.executable, "-m", "globaltensor.distributed.launch"]
START_SECONDS = 60.0  # importing torch takes seconds, longer when all cores are busy
PROMPT_SECONDS = 20.0  # for all to end once one has ended

PREAMBLE = """
import json, os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(os.environ["TEST_FOLDER"])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
def wait_for(pattern, n):
    while len(list(folder.glob(pattern))) < n:
        time.sleep(0.01)
def here():
    (folder / f"here.{attempt}.{rank}").touch()
    wait_for(f"here.{attempt}.*", int(os.environ["WORLD_SIZE"]))
def sleep():
    here()
    time.sleep(100)
"""


class Launched:
    """A launcher in a process of its own. Leaving the block ends it and all processes that it has
    started.

    ``warm``: it runs under support/warm_python, and so do its ranks.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        command: list[str] = LAUNCH,
        warm: bool = False,
        **variables: str,
    ) -> None:
        self.folder = folder
        n = len(list(folder.glob("err.*")))
        self._out, self._err = folder / f"out.{n}", folder / f"err.{n}"
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": root, **variables, "TEST_FOLDER": str(folder)}
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [*(warmed(command) if warm else command), *map(str, arguments)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        end(self.folder)

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def code(self, seconds: float = START_SECONDS) -> int:
        """Wait for the end and return the exit code, as a shell gives it."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {seconds:g} s; stderr:\n{self.err}") from None
        return code if code >= 0 else 128 - code

    def says(self, pattern: str) -> None:
        assert re.search(pattern, self.err), f"stderr does not say {pattern!r}:\n{self.err}"

    def wait_for(self, pattern: str, n: int) -> None:
        """Wait until n files, written by the ranks, match."""
        assert within(
            START_SECONDS,
            lambda: len(list(self.folder.glob(pattern))) >= n or self.process.poll() is not None,
        )
        assert len(list(self.folder.glob(pattern))) >= n, f"the launcher ended; stderr:\n{self.err}"


def alive(folder: Path) -> list[int]:
    """Return the live launchers of this folder and their processes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                int(entry.name) != os.getpid()
                and f"TEST_FOLDER={folder}\0" in (entry / "environ").read_text()
            ):
                found.append(int(entry.name))
    return found


def nobody_left(folder: Path, seconds: float = PROMPT_SECONDS) -> bool:
    return within(seconds, lambda: not alive(folder))


def end(folder: Path) -> None:
    """Kill the processes that are left in this folder."""
    for _ in range(50):
        left = alive(folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.05)


def within(seconds: float, condition: Callable[[], object]) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def write_script(folder: Path, body: str, name: str = "script.py") -> str:
    """Write a script with this body after the preamble, and return its path."""
    (folder / name).write_text(PREAMBLE + body)
    return str(folder / name)


def cleared(folder: Path) -> Iterator[Path]:
    """Yield the folder, and kill its processes afterwards."""
    yield folder
    end(folder)
