"""Formatting of numbers, of names and of tables for people.

The report, the explanation and the HTML page of a plan call it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..._base.number_ranges import show_ranges

__all__ = ["folded", "part", "pattern", "patterns", "seconds", "table"]


def seconds(x: float) -> str:
    """Format a time in the unit that suits it.

    >>> seconds(0.0012345), seconds(3.2e-7), seconds(75), seconds(0)
    ('1.23 ms', '0.32 us', '75 s', '0 s')
    """
    if not math.isfinite(x):
        return "never"
    size = abs(x)
    unit, scale = (
        next(
            ((u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if size * s >= 0.9995),
            ("us", 1e6),
        )
        if size
        else ("s", 1.0)
    )
    return f"{_significant(x * scale)} {unit}"


def _significant(x: float) -> str:
    """Format a number with three digits, never with an exponent.

    >>> [_significant(v) for v in (1234.6, 12.345, 0.00123, -5.0)]
    ['1235', '12.3', '0.00123', '-5']
    """
    if not x:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(x))))
    text = f"{x:.{min(digits, 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def part(x: float) -> str:
    """Format a fraction in percent.

    >>> part(0.104), part(0.99996), part(-0.5), part(1e-5)
    ('10.4 %', '100 %', '-50 %', 'under 0.1 %')
    """
    if 0 < x < 0.0005:
        return "under 0.1 %"
    return f"{_significant(round(100 * x, 1 if abs(x) < 1 else 0))} %"


def pattern(path: str) -> str:
    """Replace the numbers of a path by stars, so that repeated layers have the same pattern.

    >>> pattern("blocks.3.up.weight"), pattern("linear_12"), pattern("blocks.0 add")
    ('blocks.*.up.weight', 'linear_*', 'blocks.* add')
    """
    return re.sub(r"(^|[. ]|_)\d+(?=[. ]|$)", r"\1*", path)


def patterns(paths: Iterable[str]) -> Counter[str]:
    """Count for each pattern how many of these paths it matches."""
    return Counter(map(pattern, set(paths)))


def folded(paths: Sequence[str], among: Counter[str]) -> str:
    """Fold several paths of the same pattern into one name.

    ``among`` counts all existing paths by `patterns`. A star stands for all of the matching ones;
    otherwise numbers are written out.

    >>> few, all_ = ["h.0.w", "h.1.w", "h.3.w"], patterns(f"h.{i}.w" for i in range(4))
    >>> folded(few, all_), folded(few, patterns(few))
    ('h.{0-1,3}.w', 'h.*.w')
    """
    if len(paths) == 1:
        return paths[0]
    whole = pattern(paths[0])
    if len(set(paths)) == among[whole]:
        return whole
    columns = list(zip(*(re.split(r"([. ])", p) for p in paths), strict=True))
    return "".join(c[0] if len(set(c)) == 1 else f"{{{_ranges(c)}}}" for c in columns)


def _ranges(parts: Sequence[str]) -> str:
    stem = re.sub(r"\d+$", "", parts[0])
    if any(not p.removeprefix(stem).isdigit() for p in parts):
        return ",".join(dict.fromkeys(parts))
    return stem + show_ranges((int(p.removeprefix(stem)) for p in parts), comma=",")


def table(
    rows: Sequence[Sequence[Any]], right: Iterable[int] = (), indent: str = "  "
) -> list[str]:
    """Format rows as columns; those in ``right`` are flush right.

    >>> table([["a", 1], ["bcd", 22]], right=[1])
    ['  a     1', '  bcd  22']
    """
    if not rows:
        return []
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    flush = set(right)

    def pad(i: int, c: str) -> str:
        return c.rjust(widths[i]) if i in flush else c.ljust(widths[i])

    return [(indent + "  ".join(pad(i, c) for i, c in enumerate(row))).rstrip() for row in cells]
