"""A job as a value: the command to start on this node, the other nodes, and the output.

`options` makes it from the command line, and ``distributed.launch`` runs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    Std,
    to_map,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ..._base.atomic_file import check_writable
from ..._base.error_line import in_one_line
from ...errors import WorldError
from ..network import is_here, own_address
from .elastic_agent import Signals
from .node_rendezvous import CONNECT_SECONDS, Interruptible, StaticRendezvous

__all__ = ["ROLE", "Job", "Output"]

ROLE: Final = "default"


@dataclass(frozen=True)
class Output:
    """The destinations of the ranks' output, other than the console.

    ``folder`` selects OneFlow's layout of files. ``redirects``, ``tee`` and ``log_dir`` are
    torchrun's options. ``shown`` are the local ranks whose output is shown, or None for all.
    """

    folder: Path | None = None
    redirects: Std | dict[int, Std] = Std.NONE
    tee: Std | dict[int, Std] = Std.NONE
    log_dir: str | None = None
    shown: frozenset[int] | None = None

    def specs(self) -> LogsSpecs:
        """Return this as torch's LogsSpecs.

        Raise WorldError if the folder cannot be created or written to.
        """
        for option, folder in (("--logdir", self.folder), ("--log_dir", self.log_dir)):
            if folder is not None:
                try:
                    os.makedirs(folder, exist_ok=True)
                    check_writable(os.path.join(folder, f".{os.getpid()}"))
                except OSError as error:
                    raise WorldError(
                        f"{option} {folder}: no files can be written there "
                        f"({error.strerror or error}): name another folder"
                    ) from error
        shown = None if self.shown is None else set(self.shown)
        if self.folder is None and (self.log_dir or self.redirects or self.tee):
            return DefaultLogsSpecs(self.log_dir, self.redirects, self.tee, shown)
        return _Folders(
            str(self.folder or ""), Std.ALL if self.folder else Std.NONE, self.tee, shown
        )


class _Folders(LogsSpecs):
    """A layout of output files: ``LOGDIR/local_rank_<i>/stdout`` and ``stderr``.

    Without a folder everything is written to the console.
    """

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        to = LogsDest()
        tee = to_map(self._tee, len(envs))
        for i in envs:
            shown = self._local_ranks_filter is None or i in self._local_ranks_filter
            for name, paths, teed, bit in (
                ("stdout", to.stdouts, to.tee_stdouts, Std.OUT),
                ("stderr", to.stderrs, to.tee_stderrs, Std.ERR),
            ):
                paths[i] = (
                    os.path.join(self.root_log_dir, f"local_rank_{i}", name)
                    if self._redirects
                    else ""
                    if shown
                    else os.devnull
                )
                if shown and self._redirects and tee[i] & bit:
                    teed[i] = paths[i]
        return to


@dataclass(frozen=True)
class Job:
    """A job on this node: its command, its ranks and how it meets the other nodes.

    ``nproc_per_node`` is the number of ranks on this node. ``nnodes`` is the minimum and maximum
    number of nodes. ``port`` 0 means any free port, with one node only. Times are in seconds. The
    constructor raises WorldError for values that make no sense.
    """

    command: Sequence[str]
    nproc_per_node: int = 1
    nnodes: tuple[int, int] = (1, 1)
    node_rank: int = 0
    addr: str = "127.0.0.1"
    port: int = 0
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    local_addr: str = ""
    max_restarts: int = 0
    monitor_interval: float = 0.1
    role: str = ROLE
    shutdown_timeout: float = 10.0
    backend: str = ""
    output: Output = Output()
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least, most = self.nnodes
        node_range = str(most) if least == most else f"{least}:{most}"
        if self.nproc_per_node < 1:
            raise WorldError(
                f"--nproc_per_node {self.nproc_per_node}: at least 1 process must be started"
            )
        if not 1 <= least <= most:
            raise WorldError(
                f"--nnodes {node_range}: must be a number of nodes (machines), at least 1, or "
                f"MIN:MAX"
            )
        if not 0 <= self.port < 1 << 16:
            raise WorldError(f"--master_port {self.port}: a port is from 1 to 65535")
        if self.max_restarts < 0 or self.monitor_interval <= 0 or self.shutdown_timeout < 0:
            raise WorldError(
                "--max_restarts and --shutdown_timeout must not be negative, --monitor_interval "
                "must be more than 0"
            )
        if self.rdzv_backend == "static":
            if least != most:
                raise WorldError(
                    f"--nnodes {node_range} needs --rdzv_backend c10d and --rdzv_endpoint "
                    f"HOST:PORT: a static rendezvous has a fixed number of nodes"
                )
            if not 0 <= self.node_rank < most:
                raise WorldError(
                    f"--node_rank {self.node_rank} is out of range: with --nnodes {most} it must "
                    f"be from 0 to {most - 1}"
                )
            if most > 1 and not self.port:
                which = (
                    "pass the same port, free on node 0, to the launcher of every node (and "
                    "--master_addr, the address of node 0)"
                )
                raise WorldError(f"--nnodes {most} needs --master_port: {which}")
        if self.backend == "mpi" and most > 1:
            mend = (
                "start the script itself, by `mpirun -n <ranks> --host a,b python script.py` "
                "or by srun"
            )
            raise WorldError(
                f"--backend mpi with --nnodes {node_range}: the launcher makes an MPI world on one "
                f"node only; {mend}"
            )

    def rendezvous(self, signals: Signals) -> RendezvousHandler:
        """Return the handler by which this node meets the others.

        Raise WorldError if it cannot be set up.
        """
        wait = self._seconds("timeout", _timeout())
        if self.rdzv_backend == "static":
            connect = self._seconds("connect_timeout", min(CONNECT_SECONDS, wait))
            return StaticRendezvous(
                self.addr,
                self.port,
                self.node_rank,
                self.nnodes[1],
                self.nproc_per_node,
                self.rdzv_id or "none",
                signals.check,
                connect,
                wait,
            )
        if not self.rdzv_endpoint:
            raise WorldError(
                f"--rdzv_backend {self.rdzv_backend} needs --rdzv_endpoint HOST:PORT: the "
                f"address of one of the nodes, or of a server"
            )
        conf: dict[str, Any] = {"join_timeout": int(wait), **self.rdzv_conf}
        endpoint, local = self.rdzv_endpoint, self.local_addr
        host, _, port = endpoint.rpartition(":")
        # torch uses this node's own name, which other nodes may not know. On Debian it resolves to
        # 127.0.1.1.
        if host and is_here(host.strip("[]")):
            endpoint, local = (
                f"localhost:{port}" if self.rdzv_backend == "c10d" else endpoint,
                local or host.strip("[]"),
            )
        local = local or own_address(host.strip("[]") or endpoint)
        parameters = RendezvousParameters(
            self.rdzv_backend,
            endpoint,
            self.rdzv_id or "none",
            *self.nnodes,
            local_addr=local or None,
            **conf,
        )
        try:
            with signals.at_once():
                return Interruptible(get_rendezvous_handler(parameters), signals.at_once)
        except (RendezvousError, ValueError, ImportError) as error:
            raise WorldError(
                f"--rdzv_backend {self.rdzv_backend} at {self.rdzv_endpoint}: {in_one_line(error)}"
            ) from error

    def beat(self) -> tuple[float, int]:
        """Return the seconds between a launcher's signs of life, and how many it may miss."""
        return self._seconds("keep_alive_interval", 5.0), int(
            self._seconds("keep_alive_max_attempt", 3)
        )

    def _seconds(self, name: str, default: float) -> float:
        try:
            return float(self.rdzv_conf.get(name, default))
        except ValueError:
            raise WorldError(
                f"--rdzv_conf {name}={self.rdzv_conf[name]}: a number is needed"
            ) from None

    def environment(self) -> dict[str, str]:
        """Return the variables that the ranks of this job get.

        They are added to the launcher's own variables and to those of a rank's place.
        """
        out = dict(self.variables)
        if self.nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
            # With as many threads as cores in each of n processes, the threads would compete for
            # cores.
            out.setdefault("OMP_NUM_THREADS", "1")
        # A rank that crashes in native code then shows where.
        out.setdefault("PYTHONFAULTHANDLER", os.environ.get("PYTHONFAULTHANDLER", "1"))
        out.setdefault(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        )
        if self.backend:
            out["GLOBALTENSOR_BACKEND"] = self.backend
        return out


def _timeout() -> float:
    text = os.environ.get("GLOBALTENSOR_TIMEOUT", "600")
    try:
        return float(text)
    except ValueError:
        raise WorldError(
            f"the environment variable GLOBALTENSOR_TIMEOUT is {text!r}: a number of seconds is "
            f"needed"
        ) from None
