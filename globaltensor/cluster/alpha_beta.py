"""Costs of moves by latency and bandwidth, within a node and between nodes. Pure.

The cluster model uses these formulas where nothing was measured.

A ring of p ranks sends (p - 1) / p of the bytes in p - 1 steps (Patarasuk & Yuan 2009). Trees and
halving send as much in log2 p steps (Thakur, Rabenseifner & Gropp 2005). A group on several nodes
either runs one ring through all of them, or goes in phases, within the nodes and across. The
cheaper one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from .model import Cluster

__all__ = ["BETWEEN", "LOCAL", "WITHIN", "RankGroup", "group_of"]

#: Moves within the memory of each rank, and the name under which each is measured.
LOCAL: Final = {"slice": "copy", "pad": "copy", "mask": "copy", "copy": "copy"}


class RankGroup(NamedTuple):
    """A group of ``ranks`` ranks on ``nodes`` machines, ``local`` to ``most`` of them on each.

    ``local`` and ``most`` are 0 where there is one machine.
    """

    ranks: int
    nodes: int
    local: int
    most: int


@lru_cache(maxsize=1 << 12)
def group_of(ranks: int | tuple[int, ...], node_size: int) -> RankGroup:
    """Return the group of the ranks on nodes of ``node_size``. A number means the first so many."""
    p = ranks if isinstance(ranks, int) else len(ranks)
    if not node_size:
        return RankGroup(p, 1, 0, 0)
    if isinstance(ranks, int):
        nodes, local, most = -(-ranks // node_size), ranks % node_size or node_size, node_size
    else:
        on = Counter(r // node_size for r in ranks).values()
        nodes, local, most = len(on), min(on, default=0), max(on, default=0)
    return RankGroup(p, nodes, local, most) if nodes > 1 else RankGroup(p, 1, 0, 0)


def _steps(cluster: Cluster, p: int) -> int:
    return (p - 1).bit_length() if cluster.tree else p - 1


def _egress_bandwidth(cluster: Cluster, group: RankGroup, together: int) -> float:
    """Return the bytes per second that leave a node for this group.

    That is the group's share of the node's links, and at most what the group's ranks there can
    send.
    """
    if not together:
        return group.local * cluster.node_bandwidth
    alone = group.local * max(cluster.node_bandwidth, cluster.node_stream)
    return min(alone, cluster.node_size * cluster.node_bandwidth / together)


# ------------------------------------------------------------------------------------ within a node

Parts = tuple[float, float]  # (before the first byte moves, moving the bytes)


def _ring(cluster: Cluster, nbytes: float, p: int) -> Parts:
    return cluster.launch + _steps(cluster, p) * cluster.latency, nbytes * (
        p - 1
    ) / p / cluster.bandwidth


def _double_ring(cluster: Cluster, nbytes: float, p: int) -> Parts:
    fixed, moving = _ring(cluster, nbytes, p)
    return 2 * fixed, 2 * moving


def _all_to_all(cluster: Cluster, nbytes: float, p: int) -> Parts:
    fixed, moving = _ring(cluster, nbytes, p)
    return fixed + (cluster.message * (p - 1) if cluster.tree else 0.0), moving


def _exchange(cluster: Cluster, nbytes: float, p: int) -> Parts:
    # One step more than a collective among as many ranks: its peers meet for it alone.
    return cluster.launch + (_steps(cluster, p) + 1) * cluster.latency, nbytes / cluster.bandwidth


def _broadcast(cluster: Cluster, nbytes: float, p: int) -> Parts:
    return cluster.launch + _steps(
        cluster, p
    ) * cluster.latency, nbytes / cluster.bandwidth if p > 1 else 0.0


def _send(cluster: Cluster, nbytes: float, p: int) -> Parts:
    return cluster.launch + cluster.latency, nbytes / cluster.bandwidth


WITHIN: Final[dict[str, Callable[[Cluster, float, int], Parts]]] = {
    "all_gather": _ring,
    "all_reduce": _double_ring,
    "reduce_scatter": _ring,
    "all_to_all": _all_to_all,
    "exchange": _exchange,
    "broadcast": _broadcast,
    "send": _send,
}

# ------------------------------------------------------------------------------------ between nodes


def _far_ring(cluster: Cluster, nbytes: float, group: RankGroup, together: int) -> float:
    p, nodes, local, most = group
    outwards = _egress_bandwidth(cluster, group, together)
    through_all = (
        cluster.launch
        + _steps(cluster, p) * cluster.node_latency
        + nbytes * (p - 1) / p / min(cluster.bandwidth, outwards)
    )
    if most == 1:
        return through_all
    # In phases: within the nodes on all bytes, then across on each rank's share of them (or the
    # other way round). All local ranks go across at the same time. The phase within is longest
    # where a node has most ranks. The phase across is longest where a node has fewest: these need
    # the most from others, over the fewest links.
    inside = (
        _steps(cluster, most) * cluster.latency + nbytes * (most - 1) / most / cluster.bandwidth
    )
    across = _steps(cluster, nodes) * cluster.node_latency + nbytes * (p - local) / p / outwards
    return min(through_all, cluster.launch + inside + across)


def _far_double_ring(cluster: Cluster, nbytes: float, group: RankGroup, together: int) -> float:
    return 2 * _far_ring(cluster, nbytes, group, together)


def _far_all_to_all(cluster: Cluster, nbytes: float, group: RankGroup, together: int) -> float:
    p, local = group.ranks, group.local
    # The bytes that one node's ranks hold for others leave the node by links that they share.
    leaving = local * nbytes * (p - local) / p / _egress_bandwidth(cluster, group, together)
    if not cluster.tree:
        fixed = cluster.launch + (p - 1) * cluster.node_latency
    else:
        fixed = (
            cluster.launch + _steps(cluster, p) * cluster.node_latency + (p - 1) * cluster.message
        )
    return fixed + max(leaving, nbytes * (p - 1) / p / cluster.bandwidth)


def _stream(cluster: Cluster, group: RankGroup, together: int) -> float:
    """Return the bytes per second that one rank sends to another node."""
    return min(cluster.bandwidth, _egress_bandwidth(cluster, group._replace(local=1), together))


def _far_exchange(cluster: Cluster, nbytes: float, group: RankGroup, together: int) -> float:
    return (
        cluster.launch
        + (_steps(cluster, group.ranks) + 1) * cluster.node_latency
        + nbytes / _stream(cluster, group, together)
    )


def _far_broadcast(cluster: Cluster, nbytes: float, group: RankGroup, together: int) -> float:
    return (
        cluster.launch
        + _steps(cluster, group.ranks) * cluster.node_latency
        + nbytes / min(cluster.bandwidth, _egress_bandwidth(cluster, group, together))
    )


def _far_send(cluster: Cluster, nbytes: float, group: RankGroup, together: int) -> float:
    return cluster.launch + cluster.node_latency + nbytes / _stream(cluster, group, together)


BETWEEN: Final[dict[str, Callable[[Cluster, float, RankGroup, int], float]]] = {
    "all_gather": _far_ring,
    "all_reduce": _far_double_ring,
    "reduce_scatter": _far_ring,
    "all_to_all": _far_all_to_all,
    "exchange": _far_exchange,
    "broadcast": _far_broadcast,
    "send": _far_send,
}
