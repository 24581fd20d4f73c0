"""Which rank is this process? Read from the variables of whatever started it. Pure: a mapping in,
numbers out.

One small class for each way to start ranks, asked in the order they stand here; the first that
knows its own variables answers: ``Kubernetes`` (a pod of a PyTorch job that starts the script
itself), ``torchrun`` (the library's own launcher and Ray Train set the same variables, as does
anyone who sets them by hand), ``Open MPI``, ``Hydra`` (MPICH and Intel MPI), ``Slurm``. To add one,
add a class.
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
    """A process's place in the world, and where rank 0 can be met. ``local_*`` count the ranks of
    this process's node.

    ``port`` is 0 where nothing names one and all ranks are on one node: they then meet by the
    ``job``'s name (globaltensor.distributed.file_rendezvous).
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
        """Where the ranks meet, in words."""
        if self.port:
            return f"{self.addr}:{self.port}"
        return f"the file of job {self.job!r}" if self.world_size > 1 else self.addr

    def __post_init__(self) -> None:
        for what, value, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < size:
                told = f"the variables of {self.source} give {what} {value} of {size}"
                raise WorldError(
                    f"{told}: it must be from 0 to {size - 1}; check how the ranks were started"
                )
        if not 0 <= self.port < 1 << 16:
            raise WorldError(
                f"the variables of {self.source} give port {self.port}: a port is from 0 to 65535"
            )


class Environment(ABC):
    """A way to start ranks that leaves its mark in environment variables. Subclasses register
    themselves in order of definition."""

    name: ClassVar[str]
    known: ClassVar[list[type[Environment]]] = []

    def __init_subclass__(cls) -> None:
        cls.known.append(cls)

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables

    @abstractmethod
    def present(self) -> bool:
        """Was this process started this way?"""

    @abstractmethod
    def read(self) -> Detected:
        """This process's place. Raises WorldError where a variable is missing or makes no sense."""

    def number(self, name: str, default: int | None = None) -> int:
        """The integer in variable ``name``."""
        text = self.variables.get(name, "")
        if not text and default is not None:
            return default
        try:
            return int(text)
        except ValueError:
            told = f"is {text!r}, not an integer" if name in self.variables else "is not set"
            mend = (
                f"though this process seems to be started by {self.name}: set it, or start the "
                f"ranks with the launcher"
            )
            raise WorldError(f"the environment variable {name} {told}, {mend}") from None

    def text(self, *names: str) -> str:
        """The first of these variables that is set and not empty."""
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
        """MASTER_ADDR and MASTER_PORT win; else one node meets on itself by the job's name; on
        several the port follows from it, alike on all ranks."""
        nodes = nodes or max(1, -(-world // max(1, local_world)))
        found = self.text("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else addr)
        if not found:
            told = f"{world} ranks on {nodes} nodes were started by {self.name}"
            raise WorldError(
                f"{told}, but nothing says where rank 0 is: set MASTER_ADDR to its host on all "
                f"ranks"
            )
        by_name = bool(job) and nodes == 1 and not self.text("MASTER_PORT")
        port = 0 if by_name else self.number("MASTER_PORT", _port_of(job) if job else None)
        return Detected(
            self.name, rank, world, local, local_world, nodes, found, port, job if by_name else ""
        )


class Kubernetes(Environment):
    """A pod of a PyTorch job that starts the script without a launcher: each pod is one rank, and a
    node of its own.

    The training operator sets RANK and WORLD_SIZE, the trainer PET_NODE_RANK and PET_NNODES. Where
    LOCAL_RANK is set, a launcher runs in the pod.
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
            told = (
                f"this job has {each} processes in each pod (PET_NPROC_PER_NODE), but the pod "
                f"has started the script as one"
            )
            raise WorldError(
                f"{told}: start it with `globaltensor launch script.py` (or torchrun), which "
                f"reads the same variables"
            )
        if self.text("RANK"):
            rank, world = self.number("RANK"), self.number("WORLD_SIZE")
        else:
            rank, world = self.number("PET_NODE_RANK"), self.number("PET_NNODES")
        return self.place(rank, world, 0, 1, world, job="alone" if world == 1 else "")


class Torchrun(Environment):
    """RANK and WORLD_SIZE, as set by the library's launcher, torchrun, Ray Train or by hand.
    Without LOCAL_WORLD_SIZE all ranks are taken to be on one node."""

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
    """Open MPI's mpirun. Its ranks meet by the job's name."""

    name = "Open MPI"

    def present(self) -> bool:
        return "OMPI_COMM_WORLD_RANK" in self.variables

    def read(self) -> Detected:
        local_world = self.number("OMPI_COMM_WORLD_LOCAL_SIZE")
        job = (
            self.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
            or "mpirun"
        )
        # Open MPI 4 tells where mpirun runs, which is where it puts rank 0 unless told otherwise:
        # "jobid.0;tcp://10.0.0.1,10.1.0.1:1234"
        uri = re.search(r"://([^,:;]+)", self.text("OMPI_MCA_orte_hnp_uri"))
        rank, world = self.number("OMPI_COMM_WORLD_RANK"), self.number("OMPI_COMM_WORLD_SIZE")
        # Open MPI 5 numbers the ranks of a node by the cores it binds them to, so not in their
        # order; on one node that serves nobody.
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
        # Hydra names its jobs only where it was told to use a port: two jobs on one node otherwise
        # need MASTER_PORT to tell them apart.
        return self.place(
            self.number("PMI_RANK"),
            world,
            local,
            local_world,
            job=self.text("PMI_PORT") or "mpiexec",
        )


class Slurm(Environment):
    """srun. The first host of the step's node list has rank 0."""

    name = "Slurm"

    def present(self) -> bool:
        # A batch script itself has SLURM_PROCID too, but is one process and no rank: only srun sets
        # the step's number of tasks.
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
    """This process's place in the world by its environment variables; None where nothing started it
    as a rank (a world of one).

    Raises WorldError where the variables are incomplete or contradict each other.

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
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-012,20],login")
    'gpu007'
    """
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _tasks_here(counts: str, node: int) -> int:
    """Number of tasks on a node from Slurm's ``2(x3),1``; 0 where it doesn't say."""
    each: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        each += [int(count)] * int(times or 1)
    return each[node] if node < len(each) else 0


def _port_of(job: str) -> int:
    """A port that follows from the job's name, above the range from which systems hand out
    ports."""
    return 61440 + zlib.crc32(job.encode()) % 4096
