"""Convolutions, pooling and padding of tensors.

They have 1 to 3 spatial dims, and channels first or last. `nn` and `layers` record these functions,
and use their checks of arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .errors import JobError

__all__ = [
    "channels_last",
    "convolved",
    "from_channels_first",
    "numbers",
    "padding_of",
    "pooled",
    "to_channels_first",
]

_FORMATS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_POOLS = {
    ("max", 1): F.max_pool1d, ("max", 2): F.max_pool2d, ("max", 3): F.max_pool3d,
    ("avg", 1): F.avg_pool1d, ("avg", 2): F.avg_pool2d, ("avg", 3): F.avg_pool3d,
}  # fmt: skip


def channels_last(what: str, data_format: str, dims: int) -> bool:
    """Return True if the format has channels last.

    Raise JobError for a format that does not have ``dims`` spatial dims.
    """
    if not isinstance(data_format, str) or data_format.upper() not in _FORMATS[dims]:
        raise JobError(f"{what}: data_format is {' or '.join(_FORMATS[dims])}, got {data_format!r}")
    return data_format.upper() == _FORMATS[dims][1]


def numbers(what: str, value: Any, dims: int) -> tuple[int, ...]:
    """Return one positive integer for each spatial dim; a single integer is repeated.

    Raise JobError for other values.
    """
    sizes = (
        (value,) * dims
        if isinstance(value, int)
        else tuple(value) * (dims if len(value) == 1 else 1)
        if isinstance(value, (list, tuple))
        else ()
    )
    if len(sizes) != dims or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise JobError(f"{what}: a positive integer, or one for each of {dims} dims; got {value!r}")
    return sizes


def padding_of(
    what: str,
    padding: Any,
    last: bool,
    sizes: Sequence[int],
    windows: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Return (before, after) for each spatial dim.

    "SAME" gives ceil(size / stride) output positions. If the total padding is odd, "SAME" and
    "SAME_LOWER" put the larger half before, "SAME_UPPER" after. "VALID" adds no padding.
    ``padding`` may also be pairs or integers for every dim of the tensor or of space, or one
    integer. Raise JobError for other values.

    >>> padding_of("conv2d", "SAME", False, [28], [5], [1], [1]), padding_of("pool", "SAME", False, [7], [2], [2], [1])
    (((2, 2),), ((1, 0),))
    """  # noqa: E501
    dims = len(sizes)
    if isinstance(padding, str):
        kind = padding.upper()
        if kind == "VALID":
            return ((0, 0),) * dims
        if kind not in ("SAME", "SAME_LOWER", "SAME_UPPER"):
            raise JobError(
                f'{what}: padding is "SAME", "SAME_LOWER", "SAME_UPPER", "VALID", or pairs of '
                f"numbers; got {padding!r}"
            )
        out = []
        for n, k, s, d in zip(sizes, windows, strides, dilations, strict=True):
            total = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
            small, large = total // 2, total - total // 2
            out.append((small, large) if kind == "SAME_UPPER" else (large, small))
        return tuple(out)
    if isinstance(padding, int):
        return ((padding, padding),) * dims
    pairs = (
        [(p, p) if isinstance(p, int) else tuple(p) for p in padding]
        if isinstance(padding, (list, tuple))
        else []
    )
    if len(pairs) == dims + 2:
        pairs = pairs[1:-1] if last else pairs[2:]
    if len(pairs) != dims or any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise JobError(
            f"{what}: padding wants (before, after) for each of {dims} dims of space, or of all "
            f"{dims + 2} dims; got {padding!r}"
        )
    return tuple((int(a), int(b)) for a, b in pairs)


def _padded(
    x: torch.Tensor, padding: Sequence[tuple[int, int]], value: float = 0.0
) -> torch.Tensor:
    flat = [n for pair in reversed(padding) for n in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


def to_channels_first(x: torch.Tensor, last: bool) -> torch.Tensor:
    return x.movedim(-1, 1) if last else x


def from_channels_first(x: torch.Tensor, last: bool) -> torch.Tensor:
    return x.movedim(1, -1) if last else x


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, strides: Sequence[int],
    padding: Sequence[tuple[int, int]], dilations: Sequence[int],
    groups: int, last: bool,
) -> torch.Tensor:  # fmt: skip
    """Apply a convolution. With channels last, the weight is (filters, window..., channels)."""
    even = all(a == b for a, b in padding)
    x = to_channels_first(x, last) if even else _padded(to_channels_first(x, last), padding)
    own = [a for a, _ in padding] if even else 0
    out = _CONVOLUTIONS[len(strides)](
        x, to_channels_first(weight, last), bias, strides, own, dilations, groups
    )  # type: ignore[operator]
    return from_channels_first(out, last)


def pooled(
    x: torch.Tensor,
    kind: str,
    windows: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    ceil_mode: bool,
    last: bool,
) -> torch.Tensor:
    """Apply max or average pooling; the average leaves out the padding."""
    pool: Any = _POOLS[kind, len(windows)]
    x = to_channels_first(x, last)
    windows, strides = list(windows), list(strides)
    fits = all(a == b and 2 * a <= k for (a, b), k in zip(padding, windows, strict=True))
    if fits:
        options: dict[str, Any] = {"padding": [a for a, _ in padding], "ceil_mode": ceil_mode}
        return from_channels_first(
            pool(
                x,
                windows,
                strides,
                **options,
                **({"count_include_pad": False} if kind == "avg" else {}),
            ),
            last,
        )
    if kind == "max":
        return from_channels_first(
            pool(_padded(x, padding, float("-inf")), windows, strides, ceil_mode=ceil_mode), last
        )
    there = pool(_padded(torch.ones_like(x), padding), windows, strides, ceil_mode=ceil_mode)
    return from_channels_first(
        pool(_padded(x, padding), windows, strides, ceil_mode=ceil_mode) / there, last
    )
