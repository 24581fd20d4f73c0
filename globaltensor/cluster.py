"""Cluster: what moving data costs, by a latency and a bandwidth (the alpha-beta model). Pure; every rank computes the same numbers.

Planners ask it for seconds; the traffic it assumes is that of ring algorithms. The default is a generic machine, the same whatever the backend,
so that a plan does not depend on where it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass

__all__ = ["Cluster", "current_cluster", "use_cluster"]


@dataclass(frozen=True)
class Cluster:
    """Latencies in seconds, bandwidths in bytes per second for each rank; ``launch`` is what a collective costs before its first byte moves, ``latency``
    what each step of its ring adds. ``node_size``: ranks on one machine; 0 where all links are alike.

    >>> c = Cluster()
    >>> c.seconds("all_reduce", 1 << 20, 4) == c.seconds("reduce_scatter", 1 << 20, 4) + c.seconds("all_gather", 1 << 20, 4)
    True
    """

    launch: float = 10e-6
    latency: float = 2e-6
    bandwidth: float = 20e9
    memory_latency: float = 2e-6
    memory_bandwidth: float = 200e9
    node_size: int = 0
    node_latency: float = 5e-6
    node_bandwidth: float = 5e9

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(astuple(self)))

    def __hash__(self) -> int:
        # Part of the key of every plan, so worked out once.
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def seconds(self, kind: str, nbytes: int, ranks: int | Sequence[int]) -> float:
        """Time of one move among ``ranks`` (how many, or which: those on several nodes are joined by the slower link).

        ``nbytes`` is the size of the whole for all_gather (its result), reduce_scatter (its input) and all_reduce; what one rank holds for
        all_to_all; what the busiest rank sends or receives for exchange, whose ``ranks`` are it and its peers; what is read and written for
        slice, pad, mask and copy. Raises KeyError for another kind.
        """
        return _FORMULAS[kind](self, nbytes, ranks)

    def link(self, ranks: int | Sequence[int]) -> tuple[float, float]:
        """(latency, bandwidth) of the slowest link among these ranks."""
        nodes = 1 if isinstance(ranks, int) or not self.node_size else len({r // self.node_size for r in ranks})
        return (self.latency, self.bandwidth) if nodes == 1 else (self.node_latency, self.node_bandwidth)


def _ring(cluster: Cluster, nbytes: int, ranks: int | Sequence[int]) -> float:
    p = ranks if isinstance(ranks, int) else len(ranks)
    latency, bandwidth = cluster.link(ranks)
    return cluster.launch + (p - 1) * latency + nbytes * (p - 1) / p / bandwidth


def _double_ring(cluster: Cluster, nbytes: int, ranks: int | Sequence[int]) -> float:
    return 2 * _ring(cluster, nbytes, ranks)


def _exchange(cluster: Cluster, nbytes: int, ranks: int | Sequence[int]) -> float:
    # One step more than a collective among as many: its peers meet only for it.
    p = ranks if isinstance(ranks, int) else len(ranks)
    latency, bandwidth = cluster.link(ranks)
    return cluster.launch + p * latency + nbytes / bandwidth


def _local(cluster: Cluster, nbytes: int, ranks: int | Sequence[int]) -> float:
    return cluster.memory_latency + nbytes / cluster.memory_bandwidth


_FORMULAS = {
    "all_gather": _ring,
    "all_reduce": _double_ring,
    "reduce_scatter": _ring,
    "all_to_all": _ring,
    "exchange": _exchange,
    "slice": _local,
    "pad": _local,
    "mask": _local,
    "copy": _local,
}

_GENERIC = Cluster()
_cluster: ContextVar[Cluster] = ContextVar("globaltensor_cluster", default=_GENERIC)


def current_cluster() -> Cluster:
    """The cluster that plans are made for."""
    return _cluster.get()


@contextmanager
def use_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """Plan for ``cluster`` in this block. All ranks must name the same one."""
    token = _cluster.set(cluster)
    try:
        yield cluster
    finally:
        _cluster.reset(token)
