"""Which backend carries the collectives: NCCL, MPI or Gloo; and making torch know MPI.

Everything that starts a process group goes through these two: ``select_backend`` turns what was
asked for into torch's own spelling, ``register_backend`` registers the ``mpi`` backend
(globaltensor.distributed.backends.mpi) where it is named.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re

import torch
import torch.distributed as dist

from ...errors import WorldError
from ..cluster_env import Detected, Hydra, OpenMPI, Slurm

__all__ = ["VARIABLE", "backend_names", "missing_requirement", "register_backend", "select_backend"]

#: The environment variable by which the launcher's ``--backend`` reaches its ranks.
VARIABLE = "GLOBALTENSOR_BACKEND"
_AUTO = "auto"


def select_backend(requested: str | None = None, place: Detected | None = None) -> str:
    """Return the backend to use, as torch spells it (``"gloo"``, ``"mpi"``,
    ``"cpu:gloo,cuda:nccl"``).

    ``requested``: a name, taken as it is, or ``"auto"``; None: what the environment variable
    GLOBALTENSOR_BACKEND says, else ``"auto"``. Auto is NCCL where there are CUDA devices, MPI in
    ranks that an MPI launcher started (``place``, see detect) if mpi4py is installed, else Gloo.

    Raises WorldError where nobody has made a backend of such a name known to torch.

    >>> select_backend("gloo")
    'gloo'
    """
    wanted = (requested or os.environ.get(VARIABLE) or _AUTO).lower()
    if wanted != _AUTO:
        known = {"mpi", *dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
        if unknown := sorted(backend_names(wanted) - known):
            source = "" if requested else f" (the environment variable {VARIABLE} says so)"
            raise WorldError(
                f"there is no backend {', '.join(map(repr, unknown))}{source}: auto chooses, or "
                f"name one of {', '.join(sorted(known))}"
            )
        return wanted
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "mpi" if _by_mpi(place) and importlib.util.find_spec("mpi4py") else "gloo"


def _by_mpi(place: Detected | None) -> bool:
    if place is None:
        return False
    # srun starts ranks of every kind; with --mpi=pmix it has told MPI's runtime of them too.
    return place.source in (OpenMPI.name, Hydra.name) or (
        place.source == Slurm.name and "PMIX_RANK" in os.environ
    )


def backend_names(backend: str) -> set[str]:
    """Return the backends that a torch spelling names.

    >>> sorted(backend_names("cpu:gloo,cuda:nccl"))
    ['gloo', 'nccl']
    """
    return {part.split(":")[-1].strip() for part in backend.lower().split(",")}


def missing_requirement(backend: str) -> str:
    """Return what a torch spelling needs that is missing here, and what would do instead; empty
    where nothing is known to be missing."""
    if "nccl" in backend_names(backend) and not (
        dist.is_nccl_available() and torch.cuda.is_available()
    ):
        return (
            f"NCCL needs CUDA devices and a torch made for them, but torch {torch.__version__} "
            f"shows none here: use gloo or mpi"
        )
    return ""


def register_backend(backend: str) -> None:
    """Make ready what a torch spelling names: registers ``mpi`` with torch. Call it before the
    process group is made.

    Raises WorldError where mpi4py or an MPI library is missing, or where ``mpi`` shall serve one
    type of device only: it serves all of a group.
    """
    # Functions of this module have the default group of the moment as a default argument. Torch
    # loads it as late as with its compiler: it would then keep our group, and with it gloo's
    # threads, for as long as the interpreter lives; one that lets go of a tensor at its very end
    # aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    if "mpi" not in backend_names(backend):
        return
    if re.search("[:,]", backend):
        raise WorldError(
            f'backend "{backend}": mpi serves the tensors of every device of a group; name it '
            f'alone, backend="mpi"'
        )
    from .mpi import register

    register()
