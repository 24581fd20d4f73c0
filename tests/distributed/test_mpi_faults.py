"""Tests of programs that mpirun runs and of their failures. Each program ends in bounded time,
reports the failure, and leaves no process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.mpi import environment, mpirun, needs_mpi
from support.warm_python import warm_python

pytestmark = needs_mpi

LIMIT = 90.0  # seconds, most of which go into importing torch on a busy machine
START = """
import atexit, datetime, os, signal, sys, time
import torch
import torch.distributed as dist
import globaltensor as flow

rank = flow.env.get_rank()
open(sys.argv[1] + f"/{rank}.{os.getpid()}", "w").close()
x = torch.ones(10)
dist.all_reduce(x)
"""


@dataclass
class Ended:
    """The outcome of a program."""

    code: int
    said: str
    seconds: float
    ranks: list[int] = field(default_factory=list)  # the ranks' process ids


@contextlib.contextmanager
def group(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process group of `process` when the block ends."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(folder: Path, body: str, n: int = 2, first: str = "", **variables: str) -> Ended:
    """Run the program on ``n`` ranks, in an MPI world that has begun. ``first`` holds lines that
    run before it begins."""
    script = folder / "script.py"
    script.write_text(first + START + textwrap.dedent(body))
    python = sys.executable if first else warm_python()
    started = time.monotonic()
    variables = {"GLOBALTENSOR_TIMEOUT": "60", **variables}
    command = mpirun(n, python, str(script), str(folder))
    process = subprocess.Popen(
        command,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    with group(process):
        said = process.communicate(timeout=LIMIT)[0]
    marks = list(folder.glob("[0-9].*"))
    assert len(marks) == n, said
    ranks = [int(mark.name.split(".")[1]) for mark in marks]
    for mark in marks:
        mark.unlink()
    return Ended(process.returncode, said, time.monotonic() - started, ranks)


def nobody_left(ended: Ended) -> None:
    end = time.monotonic() + 10
    while alive := [pid for pid in ended.ranks if running(pid)]:
        assert time.monotonic() < end, f"{alive} are still there"
        time.sleep(0.1)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    ended = run(tmp_path, "if rank == 1: raise ValueError('the sky fell')\ndist.all_reduce(x)")
    assert ended.code == 1
    assert "ValueError: the sky fell" in ended.said
    assert ended.seconds < 60, "it ended with the time limit only"
    nobody_left(ended)


@pytest.mark.extended
def test_a_rank_that_leaves_early_fails_those_who_wait_for_it(tmp_path: Path) -> None:
    ended = run(tmp_path, "if rank == 1: sys.exit(3)\ndist.all_reduce(x)")
    assert ended.code != 0
    assert (
        "rank 0: mpi group 0 of ranks [0, 1]: all_reduce of float32 [10]: rank 1 left; nothing "
        "has come from rank 1" in ended.said
    )
    assert ended.seconds < 60
    nobody_left(ended)


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    ended = run(tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(x)")
    assert ended.code != 0
    assert "signal 9" in ended.said
    assert ended.seconds < 60
    nobody_left(ended)


@pytest.mark.extended
def test_a_hung_rank_ends_with_the_time_limit(tmp_path: Path) -> None:
    ended = run(
        tmp_path, "if rank == 1: time.sleep(300)\ndist.all_reduce(x)", GLOBALTENSOR_TIMEOUT="3"
    )
    assert ended.code == 1
    assert (
        "all_reduce of float32 [10]: timed out after 3 s: nothing has come from rank 1"
        in ended.said
    )
    nobody_left(ended)


def test_other_sizes_end_with_an_error(tmp_path: Path) -> None:
    ended = run(tmp_path, "dist.all_reduce(torch.ones(300_000 + rank))")
    assert ended.code == 1
    assert "the ranks pass tensors of different sizes" in ended.said
    assert ended.seconds < 60
    nobody_left(ended)


@pytest.mark.extended
def test_ranks_may_end_at_different_times_with_work_under_way(tmp_path: Path) -> None:
    body = """
    works = [dist.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(4)]
    dist.isend(x, 1 - rank)
    dist.recv(torch.empty(10), 1 - rank)
    if rank == 0:
        time.sleep(2)
    atexit.register(print, f"rank {rank} ended")
    """
    ended = run(tmp_path, body)
    assert ended.code == 0, ended.said
    assert all(f"rank {rank} ended" in ended.said for rank in range(2))
    nobody_left(ended)


@pytest.mark.extended
def test_an_exception_after_the_group_was_destroyed(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "work = dist.all_reduce(x, async_op=True)\nwork.wait()\ndist.destroy_process_group()\nif "
        "rank == 0: raise KeyError('late')",
    )
    assert ended.code == 1
    assert "KeyError: 'late'" in ended.said
    nobody_left(ended)


@pytest.mark.extended
def test_mpi4py_may_be_the_programs_own(tmp_path: Path) -> None:
    """The program may import mpi4py before this library does; mpi4py then also ends MPI."""
    ended = run(
        tmp_path,
        "if rank == 1: raise ValueError('the sky fell')\ndist.all_reduce(x)",
        first="from mpi4py import MPI\n",
    )
    assert ended.code == 1
    assert "ValueError: the sky fell" in ended.said
    nobody_left(ended)
    assert run(tmp_path, "dist.all_reduce(x)", first="from mpi4py import MPI\n").code == 0


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.sweep(2)
def test_mpirun_starts_ranks_of_any_backend(tmp_path: Path, backend: str) -> None:
    ended = run(
        tmp_path,
        "print('backend', dist.get_backend_config())\nassert x.tolist() == [2.0] * 10",
        GLOBALTENSOR_BACKEND=backend,
    )
    assert ended.code == 0, ended.said
    assert f"backend cpu:{backend}," in ended.said
