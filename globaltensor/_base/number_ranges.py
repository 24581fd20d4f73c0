"""Sets of numbers, such as ranks and layers, as text for people."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["show_ranges"]


def show_ranges(numbers: Iterable[int], comma: str = ", ") -> str:
    """Return numbers as text in ascending order, consecutive ones as a range.

    >>> show_ranges((6, 0, 1, 2)), show_ranges((0, 1, 3), comma=",")
    ('0-2, 6', '0-1,3')
    """
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return comma.join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
