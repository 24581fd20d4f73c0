"""The choice of the backend for collectives (NCCL, MPI or Gloo), and the registration of MPI.

All code that creates a process group calls two functions. ``select_backend`` turns the user's
choice into torch's own spelling. ``register_backend`` registers the ``mpi`` backend
(globaltensor.distributed.backends.mpi) if the spelling names it.
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

#: The environment variable that carries the launcher's ``--backend`` to its ranks.
VARIABLE = "GLOBALTENSOR_BACKEND"
_AUTO = "auto"


def select_backend(requested: str | None = None, place: Detected | None = None) -> str:
    """Return the backend to use, in torch's spelling.

    Examples are ``"gloo"``, ``"mpi"`` and ``"cpu:gloo,cuda:nccl"``. ``requested`` is a name, which
    is used unchanged, or ``"auto"``. None means the value of the environment variable
    GLOBALTENSOR_BACKEND, else ``"auto"``.

    Auto is NCCL if there are CUDA devices. It is MPI on ranks that an MPI launcher started
    (``place``, see detect), if mpi4py is installed. Otherwise it is Gloo.

    Raise WorldError if torch knows no backend of that name.

    >>> select_backend("gloo")
    'gloo'
    """
    wanted = (requested or os.environ.get(VARIABLE) or _AUTO).lower()
    if wanted != _AUTO:
        known = {"mpi", *dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
        if unknown := sorted(backend_names(wanted) - known):
            source = "" if requested else f" (set by the environment variable {VARIABLE})"
            raise WorldError(
                f"there is no backend {', '.join(map(repr, unknown))}{source}: use auto, or "
                f"one of {', '.join(sorted(known))}"
            )
        return wanted
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "mpi" if _by_mpi(place) and importlib.util.find_spec("mpi4py") else "gloo"


def _by_mpi(place: Detected | None) -> bool:
    if place is None:
        return False
    # srun starts ranks of every kind. With --mpi=pmix it has announced them to MPI's runtime too.
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
    """Return what a torch spelling needs that is missing here, with an alternative.

    Return an empty string if nothing is known to be missing.
    """
    if "nccl" in backend_names(backend) and not (
        dist.is_nccl_available() and torch.cuda.is_available()
    ):
        return (
            f"NCCL needs CUDA devices and a torch made for them, but torch {torch.__version__} "
            f"shows none here: use gloo or mpi"
        )
    return ""


def register_backend(backend: str) -> None:
    """Register the ``mpi`` backend with torch, if the torch spelling names it.

    Call it before the process group is created. Raise WorldError if mpi4py or an MPI library is
    missing. Also raise it if ``mpi`` is named for one device type only, as it serves all devices of
    a group.
    """
    # Functions of this module have the current default group as a default argument. torch loads the
    # module late, for example with its compiler. It would then hold our group, and with it gloo's
    # threads, for the life of the interpreter. A thread that releases a tensor at interpreter exit
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
