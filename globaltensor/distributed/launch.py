"""The launcher: it starts this node's ranks, watches them, and leaves no process behind.

Its command is ``python -m globaltensor.distributed.launch --nproc_per_node 2 script.py``, or
``globaltensor launch ...``. It is torch's elastic agent (distributed/launcher/elastic_agent.py)
with its own processes (distributed/launcher/workers.py). Each rank is a process in its own process
group, and gets its rank from the variables that torchrun sets too. If a rank fails, the others are
ended. The launcher then reports which rank failed, how it ended and its last output. Docs:
docs/environment.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import string
import sys
from collections.abc import Callable, Iterator, Sequence

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)

from .._base.error_line import in_one_line
from ..errors import WorldError
from .launcher.elastic_agent import NodeAgent, Signals
from .launcher.job import Job
from .launcher.log_streams import Pump, say
from .launcher.node_rendezvous import bound
from .launcher.options import job_of, parser
from .launcher.workers import OrphanReaper, signal_name

__all__ = ["Job", "launch", "main", "parser", "reserved_port", "run"]


def launch(job: Job) -> int:
    """Run the job's ranks on this node to their end, and return the exit code.

    The code is 0, that of the first rank that failed, or 128 + n if signal n ended the job. Raise
    WorldError if the ranks cannot be started: the port is taken, other nodes do not come or were
    started with other options, ...
    """
    with Signals() as signals, Pump() as pump, OrphanReaper() as keeper:
        try:
            return _run(job, signals, pump, keeper)
        except SignalException as ended:
            say(
                f"{signal_name(ended.sigval)} received: ended {job.nproc_per_node} "
                f"rank{'s' if job.nproc_per_node > 1 else ''}"
            )
            return 128 + int(ended.sigval)


def _run(job: Job, signals: Signals, pump: Pump, keeper: OrphanReaper) -> int:
    handler = job.rendezvous(signals)
    spec = WorkerSpec(
        role=job.role,
        local_world_size=job.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=str(job.command[0]),
        args=tuple(job.command[1:]),
        max_restarts=job.max_restarts,
        monitor_interval=job.monitor_interval,
    )
    template = string.Template(
        os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or "[${role_name}${local_rank}]:"
    )

    def prefix(rank: int, local_rank: int) -> str:
        return template.safe_substitute(role_name=job.role, rank=rank, local_rank=local_rank)

    own = (
        list(job.command),
        job.environment(),
        job.output.specs(),
        prefix,
        job.backend == "mpi",
        job.shutdown_timeout,
        job.beat(),
    )
    agent = NodeAgent(spec, *own, pump, keeper, signals)
    try:
        if agent.run() is None:
            say("this node was not needed: the other nodes have finished")
        return agent.code
    except RendezvousGracefulExitError:
        return 0
    except (RendezvousError, DistError) as error:
        raise WorldError(
            f"the rendezvous of the nodes at {job.rdzv_endpoint or job.addr} failed: "
            f"{in_one_line(error)}"
        ) from error
    finally:
        if not signals.received:  # after a signal, an elastic job goes on with the other nodes
            with contextlib.suppress(RendezvousConnectionError):
                handler.shutdown()


@contextlib.contextmanager
def reserved_port(port: int = 0) -> Iterator[int]:
    """Reserve a port on which rank 0 will listen, so that no other launcher gets it.

    Port 0 means any free port. Raise WorldError if the port is in use.
    """
    with bound(port) as held:
        number = int(held.getsockname()[1])
        if sys.platform != "linux":
            # On other systems a bound socket keeps rank 0 from listening, even with SO_REUSEADDR.
            held.close()
        yield number


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m globaltensor.distributed.launch"
) -> int:
    """Run the launcher as a command, and return its exit code."""
    options = parser(prog).parse_args(arguments)
    return run(lambda: job_of(options))


def run(job: Callable[[], Job]) -> int:
    """Launch the job that ``job`` returns, report errors on stderr, and return the exit code."""
    if "LOGLEVEL" not in os.environ:
        # The launcher itself reports what this logger would warn of.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        return launch(job())
    except WorldError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
