"""The rule of interpolate, which is parallel over batch and channels; `rules` imports it.

A split dim of space is resampled from the local tensor and a halo. Dims are resampled one by one,
as the modes are products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...._base import torch_private
from ..helpers import register, skip_when_empty, zeros_connected
from ..notation import Arg, LocalContext, OpDescription
from .halo import moved, split_room, weighed

__all__: list[str] = []

_NEAREST, _LINEAR = ("nearest", "nearest-exact"), ("linear", "bilinear", "trilinear")
_CUBIC = -0.75  # the free coefficient of the cubic kernel, torch's choice (Keys 1981 has -0.5)


def _interpolate(
    op: OpDescription,
    input: Arg,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> None:
    space = range(2, input.ndim)
    split_dims = {d for d in space if input.is_split(d)}
    if mode == "area" and split_dims:
        pool = getattr(F, f"adaptive_avg_pool{len(space)}d")
        op.compose(
            lambda input, *args, **kwargs: pool(
                input, _output_sizes(input.shape[2:], size, scale_factor)
            )
        )
    if mode in (*_NEAREST, *_LINEAR, "bicubic") and not antialias:
        op.exchanges = split_dims
    op.set(input, ("n", "c", *[d if d in op.exchanges else None for d in space]))
    op.out = [op.dims[input.index]]
    op.local = skip_when_empty(op, F.interpolate)
    whole = op.local
    factors = (
        [None] * len(space)
        if scale_factor is None or recompute_scale_factor
        else _per_dim(scale_factor, len(space))
    )
    align = bool(align_corners)

    def local(split: LocalContext) -> Callable[..., Any]:
        over = split_room(split)
        if not over:
            return whole(split)
        steps = [_resize_dim(split, d, mode, align, factors[d - 2]) for d in over]
        rest = len(over) < len(space)

        def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            given = input
            for step in steps:
                input = step(input)
            if not rest:
                # torch returns a copy even where every element keeps its position
                return input.clone() if torch_private.shares_memory(input, given) else input
            if 0 in split.out_shape():
                return zeros_connected(split.out_shape(), split.outs[0].dtype, [input])
            # Dims that are already resampled keep their size.
            size_kwargs: dict[str, Any] = {"size": split.out_shape()[2:]}
            if any(f is not None for f in factors):
                size_kwargs = {
                    "scale_factor": [
                        1.0 if d in over else f for d, f in zip(space, factors, strict=True)
                    ],
                    "recompute_scale_factor": False,
                }
            return F.interpolate(input, mode=mode, align_corners=align_corners, **size_kwargs)

        return run

    op.local = local


def _per_dim(value: Any, n: int) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value] * n


def _output_sizes(shape: Sequence[int], size: Any, scale_factor: Any) -> list[int]:
    if size is not None:
        return _per_dim(size, len(shape))
    return [
        math.floor(float(n * s))
        for n, s in zip(shape, _per_dim(scale_factor, len(shape)), strict=True)
    ]


def _resize_dim(
    split: LocalContext, d: int, mode: str, align: bool, factor: float | None
) -> Callable[[Tensor], Tensor]:
    n, m = split.ins[0].shape[d], split.outs[0].shape[d]
    if mode in _NEAREST:
        return moved(split, d, lambda a, b: _nearest(n, m, mode, factor)[a:b])
    return weighed(split, d, lambda a, b: _taps(n, m, mode == "bicubic", align, factor, a, b))


@lru_cache(maxsize=64)
def _nearest(n: int, m: int, mode: str, factor: float | None) -> np.ndarray:
    """Return the positions that torch picks for nearest, rounding included.

    torch itself is asked for them.
    """
    size_kwargs: dict[str, Any] = (
        {"size": m} if factor is None else {"scale_factor": factor, "recompute_scale_factor": False}
    )
    found = F.interpolate(
        torch.arange(n, dtype=torch.float64).view(1, 1, n), mode=mode, **size_kwargs
    )
    return found.view(-1).long().numpy()  # type: ignore[no-any-return]


def _taps(
    n: int, m: int, cubic: bool, align: bool, factor: float | None, a: int, b: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and weights of the results a to b of ``m``, from ``n`` elements."""
    o = np.arange(a, b, dtype=np.float64)
    if align:
        at = o * ((n - 1) / (m - 1) if m > 1 else 0.0)
    else:
        at = (o + 0.5) * (n / m if factor is None else 1.0 / factor) - 0.5
    if not cubic:
        at = at.clip(0.0)
        low = np.minimum(np.floor(at).astype(np.int64), n - 1)
        t = at - low
        return np.stack([low, np.minimum(low + 1, n - 1)]), np.stack([1 - t, t])
    low = np.floor(at).astype(np.int64)
    t = at - low
    near = [((_CUBIC + 2) * u - (_CUBIC + 3)) * u * u + 1 for u in (t, 1 - t)]
    far = [((_CUBIC * u - 5 * _CUBIC) * u + 8 * _CUBIC) * u - 4 * _CUBIC for u in (1 + t, 2 - t)]
    return np.stack([(low + k).clip(0, n - 1) for k in (-1, 0, 1, 2)]), np.stack(
        [far[0], near[0], near[1], far[1]]
    )


register(F.interpolate, _interpolate)
