"""A table of a measured cluster for people.

The command line and users call `describe`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...boxing.moves import show_bytes
from ...cluster import Cluster

__all__ = ["describe"]

_UNITS = ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms"))


def describe(cluster: Cluster) -> str:
    """Return a table of the cluster as text.

    It has the devices, the costs of kernels, and a row for each kind of move and group, with a
    column for each measured size.
    """
    return "\n".join(_lines(cluster))


def _lines(c: Cluster) -> Iterator[str]:
    nodes = f", {c.node_size} on each of {c.nodes} nodes" if c.node_size and c.size else ""
    yield f"{c.name}: {c.size or 'any number of'} {c.device} devices{nodes}" + (
        f", {show_bytes(c.memory)} each" if c.memory else ""
    )
    yield (
        f"kernel  {_seconds(c.kernel)} at least; memory {c.memory_bandwidth / 1e9:.3g} GB/s; "
        f"communication and computation at the same time: {c.overlap:.2f} times as slow"
    )
    for dtype, rate in c.flops.items():
        half = round((c.saturation.get(dtype, 0.0) / 2) ** (1 / 3))
        yield f"matmul  {dtype:9} {rate / 1e9:10.4g} GFLOP/s" + (
            f"   half of that rate at {half} x {half} x {half}" if half else ""
        )
    yield (
        f"links   {_seconds(c.launch)} + {_seconds(c.latency)} a step, {c.bandwidth / 1e9:.3g} GB/s"
        + (
            f"; between nodes {_seconds(c.node_latency)}, {c.node_bandwidth / 1e9:.3g} GB/s"
            if c.node_size
            else ""
        )
        + (f"; ranks wait {_seconds(c.rank_skew)} for one another" if c.rank_skew else "")
    )
    sizes = sorted({n for curve in c.measured for n, _ in curve.points})
    if sizes:
        yield ""
        yield f"{'measured':15}{'ranks':>6}{'nodes':>6}" + "".join(
            f"{show_bytes(n).replace('.0', ''):>10}" for n in sizes
        )
    for curve in c.measured:
        points = dict(curve.points)
        yield f"{curve.kind:15}{curve.ranks:6}{curve.nodes:6}" + "".join(
            f"{_seconds(points[n]) if n in points else '':>10}" for n in sizes
        )
    if c.ops:
        yield f"\n{len(c.ops)} ops were measured"


def _seconds(t: float) -> str:
    """Format a time with its unit, such as ``12.3 us``."""
    for limit, scale, unit in _UNITS:
        if t < limit:
            return f"{t * scale:.3g} {unit}"
    return f"{t:.3g} s"
