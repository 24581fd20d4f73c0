"""The meshes worth searching: the ways to write a number of devices as a product of one to three
axes, in the order of the nodes they stand on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...cluster import Cluster
from ...sharding.placement import Placement

__all__ = ["divisors", "factorizations", "mesh", "meshes"]


def divisors(n: int) -> list[int]:
    """All of them, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, n + 1) if n % d == 0]


def factorizations(n: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Products of ``axes`` numbers above 1 that are ``n``, in every order.

    >>> list(factorizations(8, 2))
    [(2, 4), (4, 2)]
    """
    if axes == 1:
        if n > 1:
            yield (n,)
        return
    for first in divisors(n)[1:-1]:
        for rest in factorizations(n // first, axes - 1):
            yield (first, *rest)


def mesh(shape: tuple[int, ...], first: int = 0, device: str = "cpu") -> Placement:
    """Consecutive ranks from ``first`` on, the last axis the fastest. The device matters to those
    who run on it, not to the search."""
    return Placement(device, first + np.arange(math.prod(shape)).reshape(shape))


def meshes(devices: int, cluster: Cluster, axes: int = 3, most: int = 40) -> list[Placement]:
    """Meshes of ``devices`` consecutive ranks with up to ``axes`` axes, at most ``most``, those
    with fewer axes first.

    The order of axes matters: neighbours on the last one are consecutive ranks. All but the first
    axis keep to nodes: their groups lie within one, or have no two ranks in the same; others mix
    fast links with slow ones and are left out. The first takes what is left, and may have several
    ranks on a node.
    """
    found = [(devices,)]
    for k in range(2, axes + 1):
        shapes = [
            shape
            for shape in factorizations(devices, k)
            if _keeps_to_nodes(shape, cluster.node_size)
        ]
        # Balanced ones first: an axis of two or three is seldom worth one of its own.
        found += sorted(shapes, key=lambda shape: (-min(shape), shape))
    return [mesh(shape) for shape in found[:most]]


def _keeps_to_nodes(shape: tuple[int, ...], node: int) -> bool:
    stride = math.prod(shape)
    for axis, size in enumerate(shape):
        stride //= size
        within = not node or node % (stride * size) == 0
        across = node and stride % node == 0
        if axis and not within and not across:
            return False
    return True
