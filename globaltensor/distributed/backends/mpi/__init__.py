"""The backend "mpi": torch.distributed's process groups over mpi4py, on any build of torch.

Docs: docs/mpi.md. ``register()`` makes ``torch.distributed.init_process_group("mpi")`` known to
torch. `library` starts and ends MPI. `requests` has rounds of messages without blocking waits.
`collectives` are built from rounds, and `reduction` adds up. `progress` drives operations.
`process_group` is the group that torch sees.
"""

from __future__ import annotations

from typing import Any

from ...._base import torch_private
from .library import library

__all__ = ["register"]


def register() -> None:
    """Register the backend "mpi" with torch, and start MPI if it has not started.

    Further calls change nothing. Raise WorldError without mpi4py or an MPI library.
    """
    library()
    torch_private.register_mpi(_create)


def _create(asked: Any, options: object) -> Any:
    from .process_group import MpiGroup

    return MpiGroup(
        asked.store,
        asked.group_rank,
        asked.group_size,
        asked.timeout,
        str(asked.group_id),
        list(asked.global_ranks_in_group),
    )
