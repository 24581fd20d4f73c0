"""Balanced splits: the division of a dim of n elements into parts of nearly equal size.

This module is pure arithmetic.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

__all__ = ["balanced_split", "nested_balanced_split"]


@lru_cache(maxsize=1 << 14)
def balanced_split(n: int, parts: int, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Split ``n`` elements into ``parts``, and return the (offset, length) of each part.

    A part consists of groups of ``unit`` elements; the last group may be shorter. The number of
    groups in two parts differs by at most one, and the first parts have the additional groups.

    >>> balanced_split(5, 3)
    ((0, 2), (2, 2), (4, 1))
    >>> balanced_split(12, 2, 4)
    ((0, 8), (8, 4))
    """
    quotient, more = divmod(-(-n // unit), parts)
    starts = [min(n, unit * (i * quotient + min(i, more))) for i in range(parts + 1)]
    return tuple((a, b - a) for a, b in pairwise(starts))


@lru_cache(maxsize=1 << 14)
def nested_balanced_split(
    n: int, chain: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Split ``n`` elements along several axes, and return the (offset, length) of each piece.

    Each axis splits the pieces of the axis before it. ``chain`` holds the (parts, unit) of each
    axis, from the outermost to the innermost. The pieces are in row-major order.
    """
    boxes: tuple[tuple[int, int], ...] = ((0, n),)
    for parts, unit in chain:
        boxes = tuple(
            (start + a, length)
            for start, size in boxes
            for a, length in balanced_split(size, parts, unit)
        )
    return boxes
