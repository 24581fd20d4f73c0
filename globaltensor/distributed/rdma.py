"""RDMA of the backends: checks that it can be used, and the reason if not.

`env` exports these functions. NCCL and MPI's UCX use InfiniBand or RoCE devices automatically.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from ..errors import WorldError
from .backends.select import backend_names
from .process_groups import start
from .world import running
from .world_base import World

__all__ = ["destroy_rdma", "devices", "init_rdma", "rdma_is_initialized"]

_DEVICES: Final = Path("/sys/class/infiniband")
_OFF: Final = "NCCL_IB_DISABLE"
_STARTED: weakref.WeakSet[World] = weakref.WeakSet()


def devices(folder: Path = _DEVICES) -> list[str]:
    """Return the InfiniBand and RoCE devices with an active port, as ``mlx5_0:1 (InfiniBand)``."""
    active_ports = []
    for port in sorted(folder.glob("*/ports/*")):
        if "ACTIVE" in _text(port / "state"):
            kind = "RoCE" if _text(port / "link_layer") == "Ethernet" else "InfiniBand"
            active_ports.append(f"{port.parent.parent.name}:{port.name} ({kind})")
    return active_ports


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _missing_for_rdma(backend: str, folder: Path) -> str:
    """Return what this rank lacks for RDMA, or "" if it lacks nothing."""
    if not devices(folder):
        seen = ", ".join(sorted(p.name for p in folder.glob("*"))) or "none"
        return (
            f"an InfiniBand or RoCE device with an active port (looked in {folder}; devices "
            f"there: {seen})"
        )
    if not backend_names(backend) & {"nccl", "mpi", "ucc"}:
        nccl = "is" if dist.is_nccl_available() and torch.cuda.is_available() else "is not"
        return (
            f"a backend that uses RDMA: this world's is {backend or 'gloo'}, which speaks TCP; "
            f"NCCL {nccl} available here, mpi needs an MPI built with UCX"
        )
    if "nccl" in backend_names(backend) and os.environ.get(_OFF, "0") != "0":
        return f"permission for NCCL to use RDMA: {_OFF} is set; unset it"
    return ""


def init_rdma(folder: Path = _DEVICES) -> None:
    """Check that data between nodes can move by RDMA.

    The call is collective: all ranks must make it before they first communicate on devices. Raise
    WorldError on every rank if something is missing; the error says what is missing on which rank.
    """
    this_world = start()
    missing_by_rank = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        _missing_for_rdma(this_world.backend, folder), "init_rdma"
    )
    lacking = {f"rank {rank} lacks {what}" for rank, what in enumerate(missing_by_rank) if what}
    if lacking:
        raise WorldError(
            f"init_rdma: {'; '.join(sorted(lacking))}. Without RDMA data goes over TCP, and "
            f"nothing else changes"
        )
    _STARTED.add(this_world)


def rdma_is_initialized() -> bool:
    """Return True if ``init_rdma`` has succeeded in this world."""
    this_world = running()
    return this_world is not None and this_world in _STARTED


def destroy_rdma() -> None:
    """Turn RDMA off for communicators that are created from now on.

    This works for NCCL. With MPI, UCX_TLS selects the transport before MPI starts.
    """
    this_world = running()
    if this_world is not None and this_world in _STARTED:
        _STARTED.discard(this_world)
        os.environ[_OFF] = "1"
