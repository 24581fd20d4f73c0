"""Balanced splits: how a dim of n is split into parts, as even as possible. Pure arithmetic."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

__all__ = ["balanced_split", "nested_balanced_split"]


@lru_cache(maxsize=1 << 14)
def balanced_split(n: int, parts: int, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Split ``n`` elements over ``parts``, in full groups of ``unit`` -> (offset, length) of each.

    The split is balanced: of g groups the first g mod parts parts hold one more. The last group may
    be short.

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
    """Split ``n`` elements along several axes, each of which splits the pieces of the one before.

    ``chain`` holds (parts, unit) from the outermost axis inwards -> boxes in row-major order.
    """
    boxes: tuple[tuple[int, int], ...] = ((0, n),)
    for parts, unit in chain:
        boxes = tuple(
            (start + a, length)
            for start, size in boxes
            for a, length in balanced_split(size, parts, unit)
        )
    return boxes
