"""The speed of kernels on a rank while all ranks compute.

`measure` calls it. It measures matmuls by dtype and size, copies by size, and the minimum cost of a
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ...cluster import Curve
from .clock import Case, Clock

__all__ = ["measure_kernels"]

_DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
_SIDES: Final = {
    "cpu": (32, 64, 128, 256, 512, 1024),
    "cuda": (128, 256, 512, 1024, 2048, 4096, 8192),
}
_FEW_SIDES: Final = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096)}
_COPIES: Final = tuple(1 << k for k in (12, 15, 18, 21, 24, 25, 26, 27))
_FEW_COPIES: Final = tuple(1 << k for k in (12, 18, 22, 25))
_UNCACHED: Final = 1 << 24  # bytes that are too many for caches
_TINY: Final = 8
_MAX_CALL_SECONDS: Final = 0.25  # the maximum seconds of one call


def measure_kernels(clock: Clock, seconds: float, hurried: bool = False) -> dict[str, Any]:
    """Measure the fields of a Cluster that give the costs of kernels, and the curve of copies.

    ``hurried``: measure fewer sizes.
    """
    device = clock.device
    small, other = (torch.ones(_TINY, device=device) for _ in range(2))
    cases = [Case("kernel", 0, lambda: torch.add(small, other))]
    cases += [_copy(n, device) for n in (_FEW_COPIES if hurried else _COPIES)]
    for dtype in _DTYPES:
        cases += [
            _matmul(dtype, side, device)
            for side in (_FEW_SIDES if hurried else _SIDES)[device.type]
        ]
    seconds_of_case = {
        (cases[i].name, cases[i].size): took
        for i, took in clock.time(cases, seconds, min(_MAX_CALL_SECONDS, seconds / 40)).items()
    }
    kernel = seconds_of_case["kernel", 0]
    flops, saturation = {}, {}
    for dtype in _DTYPES:
        flops[dtype], saturation[dtype] = fitted(
            [(size, took) for (name, size), took in seconds_of_case.items() if name == dtype],
            kernel,
        )
    copies = [(int(size), took) for (name, size), took in seconds_of_case.items() if name == "copy"]
    return {
        "kernel": kernel,
        "flops": flops,
        "saturation": saturation,
        "memory_latency": min(took for _, took in copies),
        "memory_bandwidth": max(
            [n / took for n, took in copies if n >= _UNCACHED] or [max(copies)[0] / max(copies)[1]]
        ),
        "measured": (Curve("copy", 1, 1, tuple(copies)),),
    }


def _copy(n: int, device: torch.device) -> Case:
    """Make the case that copies into new memory, as kernels do.

    ``n`` is the bytes moved: half of them are read and half are written.
    """
    some = torch.ones(n // 2, dtype=torch.uint8, device=device)
    return Case("copy", n, some.clone)


def _matmul(dtype: str, side: int, device: torch.device) -> Case:
    a, b = (torch.ones(side, side, dtype=getattr(torch, dtype), device=device) for _ in range(2))
    return Case(dtype, 2.0 * side**3, lambda: a @ b)


def fitted(points: Sequence[tuple[float, float]], kernel: float) -> tuple[float, float]:
    """Fit (rate r, saturation s) of matmuls to pairs of (operations f, seconds t).

    The model is t = kernel + f / r + (s f^2)^(1/3) / r. The fit minimises the squares of the
    relative errors.

    >>> r, s = fitted([(f, 1e-6 + f / 1e9 * (1 + (1e6 / f) ** (1 / 3))) for f in (1e5, 1e6, 1e8, 1e9)], 1e-6)
    >>> round(r / 1e9, 6), round(s / 1e6, 6)
    (1.0, 1.0)
    """  # noqa: E501
    best = max(f / t for f, t in points)
    rows = [(f / t, f ** (2 / 3) / t, max(t - kernel, 0.05 * t) / t) for f, t in points]
    aa, ab, bb = (
        sum(x * y for x, y in pairs)
        for pairs in (
            ((a, a) for a, _, _ in rows),
            ((a, b) for a, b, _ in rows),
            ((b, b) for _, b, _ in rows),
        )
    )
    ay, by = sum(a * y for a, _, y in rows), sum(b * y for _, b, y in rows)
    determinant = aa * bb - ab * ab
    if len(points) < 2 or determinant <= 1e-12 * aa * bb:
        return best, 0.0
    slope, side = (ay * bb - by * ab) / determinant, (aa * by - ab * ay) / determinant
    # the rate does not saturate, or the largest size is far from saturation
    if side <= 0 or slope <= 0 or 1 / slope > 2 * best:
        slope, side = ay / aa, 0.0
        return max(best, 1 / slope), 0.0
    return 1 / slope, (side / slope) ** 3
