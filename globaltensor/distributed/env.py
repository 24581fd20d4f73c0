"""``flow.env``: the place of this process among the ranks.

The first call starts the world from the environment, unless it has already started.
"""

from __future__ import annotations

from ..sharding.placement import Placement, register_job_size
from .rdma import destroy_rdma, init_rdma, rdma_is_initialized
from .world import world

__all__ = [
    "all_device_placement", "destory_rdma", "destroy_rdma", "get_local_rank", "get_node_size",
    "get_rank", "get_world_size", "init_rdma", "rdma_is_initialized",
]  # fmt: skip

destory_rdma = destroy_rdma  # OneFlow's spelling


def get_rank() -> int:
    """Return this process's rank, from 0 to world size - 1. It is 0 in a world of one."""
    return world().rank


def get_world_size() -> int:
    """Return the number of ranks."""
    return world().size


def get_local_rank() -> int:
    """Return this process's rank among those of its node."""
    return world().local_rank


def get_node_size() -> int:
    """Return the number of nodes."""
    return world().node_size


def all_device_placement(type: str) -> Placement:
    """Return the placement of all ranks of this job on one axis, on devices of ``type``.

    Raise PlacementError for an unknown device type.
    """
    return Placement.all(type)


register_job_size(lambda: (get_world_size(), get_node_size()))
