"""Halo exchange for ops over a split dim whose results need elements of neighbouring ranks.

The rules of convolution, pooling, interpolation, shifts, slices and scans use these helpers.

A rule states, for an interval of the result, which positions of the operand it needs. The ranks of
the dim exchange these positions and nothing more (boxing/halo_exchange.py). The result is split
evenly in its own size, for any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....boxing.halo_exchange import HaloPlan, Interval, fetch_halo
from ....distributed.world import world
from ....sharding.spec import Spec
from ..notation import LocalContext

__all__ = [
    "Geometry", "Window", "clipped", "fibers", "interval", "is_spread", "laid_out", "moved",
    "padded",
    "pair_up", "reach_of", "settle_windows", "split_room", "weighed",
]  # fmt: skip


def fibers(spec: Spec, rank: int, dim: int) -> tuple[int, ...]:
    """Return the ranks that together hold all of ``dim``, in its order, ``rank`` included."""
    return spec.placement.fiber(rank, spec.axes_of(dim))


def split_room(split: LocalContext) -> list[int]:
    """Return the dims of operand 0 along which its rule exchanges elements here.

    These dims are split over more than one rank.
    """
    return [
        d for d, f in enumerate(split.op.dims[0]) if f in split.op.exchanges and is_spread(split, d)
    ]


def is_spread(split: LocalContext, dim: int) -> bool:
    """Return True if several ranks hold ``dim`` of operand 0."""
    return len(fibers(split.ins[0], split.rank, dim)) > 1


def reach_of(
    split: LocalContext, dim: int, out_dim: int, wanted: Callable[[int, int], Sequence[Interval]]
) -> HaloPlan:
    """Return the plan by which each rank of ``dim`` of operand 0 fetches what it needs.

    ``wanted(a, b)`` returns the intervals of the operand that the elements a to b of result 0 along
    ``out_dim`` need.
    """
    src, dst = split.ins[0], split.outs[0]
    ranks = fibers(src, split.rank, dim)
    parts = [interval(dst, r, out_dim) for r in ranks]
    return HaloPlan(
        ranks,
        split.rank,
        [interval(src, r, dim) for r in ranks],
        [wanted(a, b) if a < b else () for a, b in parts],
    )


def interval(spec: Spec, rank: int, dim: int) -> Interval:
    """Return the interval of ``dim`` that a rank holds."""
    offsets, lengths = spec.box(rank)
    return offsets[dim], offsets[dim] + lengths[dim]


# ------------------------------------------------------------------------------------------ windows


@dataclass(frozen=True)
class Window:
    """A kernel that slides along one dim of ``size`` elements.

    ``left`` is the amount of padding before the elements.
    """

    size: int
    kernel: int
    stride: int
    left: int
    dilation: int = 1

    def span(self, a: int, b: int) -> Interval:
        """Return the interval of positions, padding included, under the windows a to b.

        The interval is empty where there is no window.
        """
        start = a * self.stride - self.left
        return (
            (start, (b - 1) * self.stride - self.left + self.dilation * (self.kernel - 1) + 1)
            if a < b
            else (0, 0)
        )

    def sources(self, a: int, b: int) -> Interval:
        """Return the interval of elements whose spread kernels reach the results a to b.

        A transposed convolution spreads each element over the kernel.
        """
        low = -(-(a + self.left - self.dilation * (self.kernel - 1)) // self.stride)
        return (
            clipped((low, (b - 1 + self.left) // self.stride + 1), self.size) if a < b else (0, 0)
        )


def clipped(interval: Interval, n: int) -> Interval:
    """Return the intersection of an interval with 0 to ``n``."""
    low = min(max(interval[0], 0), n)
    return low, max(low, min(interval[1], n))


@dataclass(frozen=True)
class Geometry:
    """The steps of one rank along one dim: fetch by ``reach``, then pad.

    ``reach`` is None where the rank has all of the dim. The local tensor then covers the positions
    ``start`` to ``stop``.
    """

    dim: int
    reach: HaloPlan | None
    start: int
    stop: int
    left: int
    right: int
    out_interval: Interval  # the windows whose results this rank computes


def settle_windows(
    split: LocalContext, windows: dict[int, Window], split_dims: Sequence[int]
) -> list[Geometry]:
    """Return this rank's geometry for each dim of operand 0 that has windows.

    Dims of the result must have the same positions as those of the operand.
    """
    geometries = []
    for d, w in windows.items():
        out_interval = interval(split.outs[0], split.rank, d)
        start, stop = w.span(*out_interval)
        if d in split_dims:
            reach = reach_of(split, d, d, lambda a, b, w=w: [clipped(w.span(a, b), w.size)])  # type: ignore[misc]
            low, high = clipped((start, stop), w.size)
            left = min(stop - start, max(0, -start))
            geometries.append(
                Geometry(
                    d, reach, start, stop, left, stop - start - left - (high - low), out_interval
                )
            )
        else:
            geometries.append(
                Geometry(d, None, start, stop, -start, max(0, stop - w.size), out_interval)
            )
    return geometries


def laid_out(x: Tensor, geometry: Sequence[Geometry], value: float = 0.0) -> Tensor:
    """Return the local tensor extended by all elements that its windows cover.

    Elements are fetched from neighbours, and the ends of the global tensor are padded.
    """
    for g in geometry:
        if g.reach is not None:
            x = fetch_halo(x, g.dim, g.reach)
    return padded(x, {g.dim: (g.left, g.right) for g in geometry}, value)


def padded(x: Tensor, sides: dict[int, Interval], value: float = 0.0) -> Tensor:
    """Pad (or with negative numbers crop) dims on both sides with a value."""
    sides = {d: s for d, s in sides.items() if s != (0, 0)}
    if not sides:
        return x
    flat = [n for d in range(x.ndim - 1, min(sides) - 1, -1) for n in sides.get(d, (0, 0))]
    return F.pad(x, flat, "constant", value)


def pair_up(value: int | Sequence[int], space: int) -> tuple[int, ...]:
    """Return one number for each dim of space, reading an int or a list as torch does."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return tuple(int(v) for v in (values * space if len(values) == 1 else values))


# ---------------------------------------------------------------------- moved and weighted elements


def moved(
    split: LocalContext, dim: int, positions: Callable[[int, int], np.ndarray], value: float = 0.0
) -> Callable[[Tensor], Tensor]:
    """Return the function that computes a rank's local result by moving elements along ``dim``.

    ``positions(a, b)`` returns, for the elements a to b of the result, their positions in the
    operand. A position of -1 stands for ``value``, and may occur at the ends only.
    """

    reach = reach_of(
        split, dim, dim, lambda a, b: _to_intervals(_unique_positions(positions(a, b)))
    )
    a, b = interval(split.outs[0], split.rank, dim)
    here = positions(a, b) if a < b else np.empty(0, dtype=np.int64)
    filled = here < 0
    left = len(here) if filled.all() else int(np.argmin(filled))
    right = len(here) - left - int((~filled).sum())
    order = np.searchsorted(_unique_positions(here), here[left : len(here) - right])
    straight = np.array_equal(order, np.arange(reach.length))
    back = np.array_equal(order, np.arange(reach.length)[::-1])
    index = torch.from_numpy(order).to(world().device(split.outs[0].placement.type))

    def run(x: Tensor) -> Tensor:
        x = fetch_halo(x, dim, reach)
        if not straight:
            x = x.flip(dim) if back else x.index_select(dim, index)
        return padded(x, {dim: (left, right)}, value)

    return run


def weighed(
    split: LocalContext, dim: int, taps: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
) -> Callable[[Tensor], Tensor]:
    """Return the function that computes a rank's local result as weighted sums along ``dim``.

    ``taps(a, b)`` returns, for the elements a to b of the result, positions in the operand and
    their weights, both [taps, b - a].
    """
    reach = reach_of(split, dim, dim, lambda a, b: _to_intervals(_unique_positions(taps(a, b)[0])))
    positions, weights = taps(*interval(split.outs[0], split.rank, dim))
    device, shape = (
        world().device(split.outs[0].placement.type),
        [-1 if d == dim else 1 for d in range(len(split.outs[0].shape))],
    )
    places = torch.from_numpy(np.searchsorted(_unique_positions(positions), positions)).to(device)
    shares = torch.from_numpy(weights).to(device)

    def run(x: Tensor) -> Tensor:
        dtype = x.dtype
        x = fetch_halo(x, dim, reach)
        x = x.float() if dtype.itemsize < 4 else x
        out = torch.zeros((), dtype=x.dtype, device=x.device)
        for at, share in zip(places, shares.to(x.dtype), strict=True):
            out = out + x.index_select(dim, at) * share.view(shape)
        return out.to(dtype)

    return run


def _to_intervals(needed: np.ndarray) -> list[Interval]:
    """Return ascending positions as intervals."""
    breaks = np.flatnonzero(np.diff(needed) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(needed, breaks) if len(run)]


def _unique_positions(positions: np.ndarray) -> np.ndarray:
    found = np.unique(positions)
    return found[found >= 0]
