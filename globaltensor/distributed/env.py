"""env: who is this process among the ranks. The first question starts the world (from the
environment) if it isn't started yet."""

from __future__ import annotations

from ..sharding.placement import Placement, register_job_size
from .rdma import destroy_rdma, init_rdma, rdma_is_initialized
from .world import world

__all__ = [
    "all_device_placement", "destory_rdma", "destroy_rdma", "get_local_rank", "get_node_size",
    "get_rank", "get_world_size", "init_rdma", "rdma_is_initialized",
]  # fmt: skip

destory_rdma = destroy_rdma  # as OneFlow spells it


def get_rank() -> int:
    """This process's rank: 0 to world size - 1; 0 in a world of one."""
    return world().rank


def get_world_size() -> int:
    """Number of ranks."""
    return world().size


def get_local_rank() -> int:
    """This process's rank among those of its node."""
    return world().local_rank


def get_node_size() -> int:
    """Number of nodes."""
    return world().node_size


def all_device_placement(type: str) -> Placement:
    """All ranks of this job on one axis, on devices of ``type``. Raises PlacementError for an
    unknown device type."""
    return Placement.all(type)


register_job_size(lambda: (get_world_size(), get_node_size()))
