"""The meshes worth searching for a number of devices.

They are the factorizations of that number into one to three axes, with ranks in the order of their
nodes. The search in `auto/inter_op` uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...cluster import Cluster
from ...sharding.placement import Placement

__all__ = ["divisors", "factorizations", "mesh", "meshes"]


def divisors(n: int) -> list[int]:
    """Return all divisors of n in increasing order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, n + 1) if n % d == 0]


def factorizations(n: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield the tuples of ``axes`` numbers above 1 whose product is ``n``, in every order.

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
    """Return a placement of consecutive ranks from ``first`` on, the last axis the fastest.

    The device matters only for running on the placement, not for the search.
    """
    return Placement(device, first + np.arange(math.prod(shape)).reshape(shape))


def meshes(devices: int, cluster: Cluster, axes: int = 3, most: int = 40) -> list[Placement]:
    """Return meshes of ``devices`` consecutive ranks, those with fewer axes first.

    They have up to ``axes`` axes, and there are at most ``most``.

    The order of axes matters: neighbours on the last axis are consecutive ranks. Each axis except
    the first respects node boundaries: its groups are within one node, or have no two ranks in the
    same node. Meshes without this property mix fast links with slow ones and are left out. The
    first axis has the remaining size, and may have several ranks on a node.
    """
    mesh_shapes = [(devices,)]
    for k in range(2, axes + 1):
        shapes = [
            shape
            for shape in factorizations(devices, k)
            if _keeps_to_nodes(shape, cluster.node_size)
        ]
        # Balanced meshes first: an axis of only two or three ranks is seldom useful.
        mesh_shapes += sorted(shapes, key=lambda shape: (-min(shape), shape))
    return [mesh(shape) for shape in mesh_shapes[:most]]


def _keeps_to_nodes(shape: tuple[int, ...], node: int) -> bool:
    stride = math.prod(shape)
    for axis, size in enumerate(shape):
        stride //= size
        within = not node or node % (stride * size) == 0
        across = node and stride % node == 0
        if axis and not within and not across:
            return False
    return True
