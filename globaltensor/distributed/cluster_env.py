"""The place of this process among the ranks, read from the variables of its launcher.

``world`` and the launcher call `detect`. This module is pure: it maps variables to numbers.

Each launcher has one small class. The classes are asked in the order of this file, and the first
that recognises its own variables answers:

- ``Kubernetes``: a pod of a PyTorch job that starts the script itself.
- ``torchrun``: also the library's own launcher, Ray Train, and variables set by hand. All of
  them set the same variables.
- ``Open MPI``.
- ``Hydra``: MPICH and Intel MPI.
- ``Slurm``.

To add a launcher, add a class.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..errors import WorldError

__all__ = ["Detected", "Environment", "detect", "first_host"]


@dataclass(frozen=True, slots=True)
class Detected:
    """The place of a process in the world, and the address of rank 0.

    ``local_rank`` and ``local_world_size`` count the ranks of this process's node. ``port`` is 0 if
    no variable names one and all ranks are on one node. The ranks then meet by the name in ``job``
    (globaltensor.distributed.file_rendezvous).
    """

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    nodes: int
    addr: str
    port: int
    job: str = ""

    @property
    def meeting(self) -> str:
        """The meeting point of the ranks, in words for errors."""
        if self.port:
            return f"{self.addr}:{self.port}"
        return f"the file of job {self.job!r}" if self.world_size > 1 else self.addr

    def __post_init__(self) -> None:
        for what, value, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < size:
                problem = f"the variables of {self.source} give {what} {value} of {size}"
                raise WorldError(
                    f"{problem}: it must be from 0 to {size - 1}; check how the ranks were started"
                )
        if not 0 <= self.port < 1 << 16:
            raise WorldError(
                f"the variables of {self.source} give port {self.port}: a port is from 0 to 65535"
            )


class Environment(ABC):
    """A launcher that can be recognised by its environment variables.

    Subclasses register themselves in order of definition.
    """

    name: ClassVar[str]
    known: ClassVar[list[type[Environment]]] = []

    def __init_subclass__(cls) -> None:
        cls.known.append(cls)

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables

    @abstractmethod
    def present(self) -> bool:
        """Return True if this launcher started this process."""

    @abstractmethod
    def read(self) -> Detected:
        """Return the place of this process.

        Raise WorldError if a variable is missing or makes no sense.
        """

    def number(self, name: str, default: int | None = None) -> int:
        """Return the integer in variable ``name``, or ``default`` if the variable is not set.

        Raise WorldError if it is not an integer, or if it is not set and there is no default.
        """
        text = self.variables.get(name, "")
        if not text and default is not None:
            return default
        try:
            return int(text)
        except ValueError:
            problem = f"is {text!r}, not an integer" if name in self.variables else "is not set"
            mend = (
                f"though this process seems to be started by {self.name}: set it, or start the "
                f"ranks with the launcher"
            )
            raise WorldError(f"the environment variable {name} {problem}, {mend}") from None

    def text(self, *names: str) -> str:
        """Return the first of these variables that is set and not empty, else an empty string."""
        return next((self.variables[name] for name in names if self.variables.get(name)), "")

    def place(
        self,
        rank: int,
        world: int,
        local: int,
        local_world: int,
        nodes: int | None = None,
        addr: str = "",
        job: str = "",
    ) -> Detected:
        """Return the place of a process, after choosing the meeting point.

        MASTER_ADDR and MASTER_PORT take precedence. Otherwise the ranks of a single node meet on
        that node by the job's name. On several nodes the port is computed from the job's name, so
        that it is equal on all ranks. Raise WorldError if the address of rank 0 is unknown.
        """
        nodes = nodes or max(1, -(-world // max(1, local_world)))
        master_addr = self.text("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else addr)
        if not master_addr:
            problem = f"{world} ranks on {nodes} nodes were started by {self.name}"
            raise WorldError(
                f"{problem}, but no variable gives the address of rank 0: set MASTER_ADDR to the "
                f"host of rank 0 on all ranks"
            )
        by_name = bool(job) and nodes == 1 and not self.text("MASTER_PORT")
        port = 0 if by_name else self.number("MASTER_PORT", _port_of(job) if job else None)
        return Detected(
            self.name,
            rank,
            world,
            local,
            local_world,
            nodes,
            master_addr,
            port,
            job if by_name else "",
        )


class Kubernetes(Environment):
    """A pod of a PyTorch job that starts the script without a launcher.

    Each pod is one rank and counts as one node. The training operator sets RANK and WORLD_SIZE, the
    trainer sets PET_NODE_RANK and PET_NNODES. If LOCAL_RANK is set, a launcher runs in the pod.
    """

    name = "Kubernetes"

    def __init__(self, variables: Mapping[str, str]) -> None:
        addr, port = variables.get("PET_MASTER_ADDR", ""), variables.get("PET_MASTER_PORT", "")
        master = {
            name: value for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if value
        }
        super().__init__({**master, **variables})

    def present(self) -> bool:
        if not self.text("KUBERNETES_SERVICE_HOST") or self.text(
            "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK"
        ):
            return False
        by_hand = self.text("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1")
        if self.text("RANK"):
            return bool(self.text("WORLD_SIZE")) and not by_hand
        return self.text("PET_NNODES") not in ("", "1", "1:1")

    def read(self) -> Detected:
        each = self.text("PET_NPROC_PER_NODE") or "1"
        if each != "1":
            problem = (
                f"this job has {each} processes in each pod (PET_NPROC_PER_NODE), but the pod "
                f"has started the script as a single process"
            )
            raise WorldError(
                f"{problem}: start it with `globaltensor launch script.py` (or torchrun), which "
                f"reads the same variables"
            )
        if self.text("RANK"):
            rank, world = self.number("RANK"), self.number("WORLD_SIZE")
        else:
            rank, world = self.number("PET_NODE_RANK"), self.number("PET_NNODES")
        return self.place(rank, world, 0, 1, world, job="alone" if world == 1 else "")


class Torchrun(Environment):
    """The variables RANK and WORLD_SIZE, set by our launcher, torchrun, Ray Train or by hand.

    Without LOCAL_WORLD_SIZE all ranks are taken to be on one node.
    """

    name = "torchrun"

    def present(self) -> bool:
        return bool(self.text("RANK") and self.text("WORLD_SIZE"))

    def read(self) -> Detected:
        rank, world = self.number("RANK"), self.number("WORLD_SIZE")
        nodes = self.number("GROUP_WORLD_SIZE", 0)
        local_world = self.number("LOCAL_WORLD_SIZE", -(-world // nodes) if nodes else world)
        local = self.number("LOCAL_RANK", rank % max(1, local_world))
        # A world of one needs no meeting point: only then may the address and the port be left out.
        return self.place(rank, world, local, local_world, nodes, job="alone" if world == 1 else "")


class OpenMPI(Environment):
    """The mpirun of Open MPI. Its ranks meet by the job's name."""

    name = "Open MPI"

    def present(self) -> bool:
        return "OMPI_COMM_WORLD_RANK" in self.variables

    def read(self) -> Detected:
        local_world = self.number("OMPI_COMM_WORLD_LOCAL_SIZE")
        job = (
            self.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
            or "mpirun"
        )
        # Open MPI 4 names the host of mpirun. mpirun puts rank 0 on that host unless its options
        # say otherwise. Example: "jobid.0;tcp://10.0.0.1,10.1.0.1:1234"
        uri = re.search(r"://([^,:;]+)", self.text("OMPI_MCA_orte_hnp_uri"))
        rank, world = self.number("OMPI_COMM_WORLD_RANK"), self.number("OMPI_COMM_WORLD_SIZE")
        # Open MPI 5 numbers a node's ranks by the cores to which they are bound, not in the order
        # of ranks. On one node such numbers have no use.
        local = rank if local_world == world else self.number("OMPI_COMM_WORLD_LOCAL_RANK")
        return self.place(rank, world, local, local_world, addr=uri[1] if uri else "", job=job)


class Hydra(Environment):
    """The mpiexec of MPICH and Intel MPI."""

    name = "Hydra (MPICH, Intel MPI)"

    def present(self) -> bool:
        return "PMI_RANK" in self.variables and "PMI_SIZE" in self.variables

    def read(self) -> Detected:
        world = self.number("PMI_SIZE")
        local_world = self.number("MPI_LOCALNRANKS", world)
        local = self.number("MPI_LOCALRANKID", self.number("PMI_RANK") % max(1, local_world))
        # Hydra names its jobs only if an option made it use a port. Otherwise two jobs on one node
        # need different values of MASTER_PORT.
        return self.place(
            self.number("PMI_RANK"),
            world,
            local,
            local_world,
            job=self.text("PMI_PORT") or "mpiexec",
        )


class Slurm(Environment):
    """The launcher srun of Slurm. The first host of the step's node list has rank 0."""

    name = "Slurm"

    def present(self) -> bool:
        # A batch script itself has SLURM_PROCID too, but it is one process and not a rank. Only
        # srun sets the step's number of tasks.
        return "SLURM_PROCID" in self.variables and "SLURM_STEP_NUM_TASKS" in self.variables

    def read(self) -> Detected:
        nodes = self.number("SLURM_STEP_NUM_NODES", 1)
        rank, world = self.number("SLURM_PROCID"), self.number("SLURM_STEP_NUM_TASKS")
        local_world = _tasks_here(
            self.text("SLURM_STEP_TASKS_PER_NODE"), self.number("SLURM_NODEID", 0)
        ) or -(-world // nodes)
        job = f"{self.text('SLURM_JOB_ID', 'SLURM_JOBID')}.{self.text('SLURM_STEP_ID')}"
        addr = first_host(self.text("SLURM_STEP_NODELIST", "SLURM_NODELIST"))
        return self.place(
            rank, world, self.number("SLURM_LOCALID"), local_world, nodes, addr=addr, job=job
        )


def detect(variables: Mapping[str, str]) -> Detected | None:
    """Return the place of this process, read from its environment variables.

    Return None if the process was not started as a rank (a world of one). Raise WorldError if the
    variables are incomplete or contradict each other.

    >>> detect({}) is None
    True
    >>> detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}).local_rank
    1
    """  # noqa: E501
    for kind in Environment.known:
        environment = kind(variables)
        if environment.present():
            return environment.read()
    return None


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[007-012,20],login")
    'gpu007'
    """
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _tasks_here(counts: str, node: int) -> int:
    """Return the number of tasks on a node from Slurm's ``2(x3),1``, or 0 if it is unknown."""
    each: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        each += [int(count)] * int(times or 1)
    return each[node] if node < len(each) else 0


def _port_of(job: str) -> int:
    """Return a port computed from the job's name.

    It is above the ports that systems assign automatically.
    """
    return 61440 + zlib.crc32(job.encode()) % 4096
