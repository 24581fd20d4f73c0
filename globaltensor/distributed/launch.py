"""The launcher: starts this node's ranks, watches over them, and leaves nothing behind.

``python -m globaltensor.distributed.launch --nproc_per_node 2 script.py``, or ``globaltensor launch ...``. Each rank is a process in a group of its own,
told who it is by the variables that torchrun sets too. When one fails the others end, and the launcher says which rank it was, how it
ended and what it said last. Docs: docs/environment.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import WorldError
from .supervise import Rank, supervise

__all__ = ["Job", "launch", "main", "parser"]


@dataclass(frozen=True)
class Job:
    """What to start on this node. ``port`` 0: one that is free (with one node only)."""

    command: Sequence[str]
    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    addr: str = "127.0.0.1"
    port: int = 0
    logdir: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.nproc_per_node < 1:
            raise WorldError(f"--nproc_per_node {self.nproc_per_node}: at least 1 process must be started")
        if self.nnodes < 1:
            raise WorldError(f"--nnodes {self.nnodes}: there is at least 1 node")
        if not 0 <= self.node_rank < self.nnodes:
            raise WorldError(f"--node_rank {self.node_rank} is out of range: with --nnodes {self.nnodes} it must be from 0 to {self.nnodes - 1}")
        if not 0 <= self.port < 1 << 16:
            raise WorldError(f"--master_port {self.port}: a port is from 1 to 65535")
        if self.nnodes > 1 and not self.port:
            which = "the same port, free on node 0, in the launch of every node (and --master_addr, node 0's address)"
            raise WorldError(f"--nnodes {self.nnodes} needs --master_port: {which}")

    def ranks(self, port: int) -> list[Rank]:
        """This node's ranks, with the variables that tell each who it is."""
        n, common = self.nproc_per_node, {**os.environ, **self.variables}
        if n > 1:
            # As many threads as cores in each of n processes would fight for the cores.
            common.setdefault("OMP_NUM_THREADS", "1")
        common.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that crashes in native code shows where
        shared = {"MASTER_ADDR": self.addr, "MASTER_PORT": str(port), "WORLD_SIZE": str(n * self.nnodes), "LOCAL_WORLD_SIZE": str(n)}
        shared |= {"GROUP_RANK": str(self.node_rank), "GROUP_WORLD_SIZE": str(self.nnodes)}
        ranks = []
        for local in range(n):
            rank = self.node_rank * n + local
            logs = None if self.logdir is None else self.logdir / f"local_rank_{local}"
            ranks.append(Rank(rank, local, list(self.command), {**common, **shared, "RANK": str(rank), "LOCAL_RANK": str(local)}, logs))
        return ranks


def launch(job: Job) -> int:
    """Run the job's ranks on this node to their end -> the exit code: 0, that of the first rank that failed, or 128 + n where signal n ended it.

    Raises WorldError where the ranks cannot be started (the port is taken, ...).
    """
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port(job.port)) if job.node_rank == 0 else job.port
        return supervise(job.ranks(port))


@contextlib.contextmanager
def reserved_port(port: int = 0) -> Iterator[int]:
    """A port kept for rank 0 to listen on: no other launcher gets it meanwhile. 0: any that is free. Raises WorldError where it is in use."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("", port))
        except OSError as error:
            why = f"is in use or not allowed on this machine ({error.strerror})"
            raise WorldError(f"--master_port {port} {why}: name another, or none to get a free one") from error
        number = int(held.getsockname()[1])
        if sys.platform != "linux":
            held.close()  # elsewhere a bound socket keeps rank 0 from listening, even with SO_REUSEADDR
        yield number


def parser(prog: str = "python -m globaltensor.distributed.launch") -> argparse.ArgumentParser:
    """The launcher's command line."""
    what = "Start a script on several processes, on this machine and others, and watch over them."
    out = argparse.ArgumentParser(prog=prog, description=what, allow_abbrev=False)
    add = out.add_argument
    add("--nnodes", type=int, default=1, help="number of nodes (machines); start the launcher on each (default 1)")
    add("--node_rank", "--node-rank", type=int, default=0, help="this node's number, from 0 (default 0)")
    add("--nproc_per_node", "--nproc-per-node", type=int, default=1, help="number of processes on this node; with GPUs, as many as GPUs (default 1)")
    add("--master_addr", "--master-addr", default="127.0.0.1", help="address of node 0, where rank 0 listens (default 127.0.0.1)")
    add("--master_port", "--master-port", type=int, default=0, help="a free port on node 0; needed with several nodes (default: one that is free)")
    add("-m", "--module", action="store_true", help="the script is the name of a module, run as `python -m` does")
    add("--no_python", "--no-python", action="store_true", help="the script is a program of its own: run it without python")
    add("--redirect_stdout_and_stderr", action="store_true", help="write each rank's output to LOGDIR/local_rank_<i>/stdout and stderr instead of the console")
    add("--logdir", default="log", help="where to, with --redirect_stdout_and_stderr; earlier logs there are overwritten (default log)")
    add("training_script", help="the script (or module, or program) that every rank runs")
    add("training_script_args", nargs=argparse.REMAINDER, help="all that follows is given to the script")
    return out


def job_of(options: argparse.Namespace) -> Job:
    """The parsed command line as a job. Raises WorldError where it makes no sense."""
    script, arguments = options.training_script, options.training_script_args
    if options.no_python and options.module:
        raise WorldError("--no_python and --module exclude each other: a module needs python to run it")
    if options.no_python:
        command = [script, *arguments]
    elif options.module:
        command = [sys.executable, "-u", "-m", script, *arguments]
    elif os.path.exists(script):
        command = [sys.executable, "-u", script, *arguments]
    else:
        raise WorldError(f"{script} does not exist (looked from {os.getcwd()}): name a script, or a module with -m")
    logdir = Path(options.logdir) if options.redirect_stdout_and_stderr else None
    return Job(command, options.nproc_per_node, options.nnodes, options.node_rank, options.master_addr, options.master_port, logdir)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m globaltensor.distributed.launch") -> int:
    """The launcher as a command -> its exit code."""
    options = parser(prog).parse_args(arguments)
    try:
        return launch(job_of(options))
    except WorldError as error:
        sys.stderr.write(f"globaltensor.launch: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
