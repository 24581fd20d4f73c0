"""``flow.visualize_sharding(x)``: the ranks that hold each shard, drawn for a terminal.

The drawing is made from the spec alone: nothing communicates. Users call it.
"""

from __future__ import annotations

import sys
from typing import Any

from ..sharding.spec import Spec
from .global_tensor import GlobalTensor

__all__ = ["drawing", "visualize_sharding"]

_WIDTH, _MOST_RANKS = 48, 64


def visualize_sharding(x: GlobalTensor | Spec, file: Any = None) -> None:
    """Print which rank holds which shard of ``x`` to ``file`` (standard output by default).

    ``x``: a global tensor or a Spec.

    >>> import globaltensor as flow
    >>> visualize_sharding(Spec.make((4, 6), flow.float32, flow.placement("cpu", [0, 1]), flow.sbp.split(0)))
    f32[4, 6] S(0)  on cpu [0, 1]
      rank 0  [0]  [2, 6]  x[0:2, :]
      rank 1  [1]  [2, 6]  x[2:4, :]
    <BLANKLINE>
          6
       +------+
       |0     |
       |      |
     4 +------+
       |1     |
       |      |
       +------+
    """  # noqa: E501
    print(drawing(x.spec if isinstance(x, GlobalTensor) else x), file=file or sys.stdout)


def drawing(spec: Spec) -> str:
    """Return the text of ``visualize_sharding``."""
    where = spec.placement
    lines = [f"{spec!r}  on {where.type} {where.ranks.tolist()}"]
    shown = where.flat[:_MOST_RANKS]
    rows = [
        (
            f"rank {r}",
            str(list(where.coordinate(r) or ())),
            str(list(spec.local_shape(r))),
            _slices(spec, r),
        )
        for r in shown
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        lines.append(
            "  "
            + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False))
            + "  "
            + row[3]
        )
    if len(shown) < where.size:
        lines.append(f"  and {where.size - len(shown)} more ranks")
    split = sorted({e.dim for e in spec.layout if e.is_split})
    if 1 <= len(split) <= 2 and spec.numel and where.size <= _MOST_RANKS:
        lines += ["", *_picture(spec, split)]
    return "\n".join(lines)


def _slices(spec: Spec, rank: int) -> str:
    offsets, lengths = spec.box(rank)
    parts = [
        ":" if n == whole else f"{a}:{a + n}"
        for a, n, whole in zip(offsets, lengths, spec.shape, strict=True)
    ]
    kinds = sorted({e.short for e in spec.layout if e.is_partial})
    return (f"x[{', '.join(parts)}]" if parts else "x") + (
        f", a summand ({', '.join(kinds)})" if kinds else ""
    )


def _picture(spec: Spec, split: list[int]) -> list[str]:
    """Draw the (at most two) split dims as a rectangle: each shard with the ranks that hold it."""
    down = split[0] if len(split) == 2 or spec.ndim < 2 or split[0] == 0 else 0
    across = (
        split[1] if len(split) == 2 else (None if spec.ndim < 2 else (1 if down == 0 else split[0]))
    )
    if spec.ndim >= 2 and across == down:
        across = None
    held: dict[tuple[int, int], list[int]] = {}
    ends: tuple[set[int], set[int]] = (
        {spec.shape[down]},
        {1 if across is None else spec.shape[across]},
    )
    for r in spec.placement.flat:
        offsets, lengths = spec.box(r)
        x0, x1 = (0, 1) if across is None else (offsets[across], offsets[across] + lengths[across])
        y0, y1 = offsets[down], offsets[down] + lengths[down]
        if x1 > x0 and y1 > y0:
            held.setdefault((y0, x0), []).append(r)
            ends[0].add(y1)
            ends[1].add(x1)
    ys, xs = sorted(ends[0]), sorted(ends[1])
    labels = {k: _ranks(v) for k, v in held.items()}
    cells = []
    for i, x in enumerate(xs):
        start = xs[i - 1] if i else 0
        need = max((len(t) for (_, x0), t in labels.items() if x0 == start), default=1)
        cells.append(
            max(need, min(_WIDTH // len(xs), 6 * (x - start) // max(1, min(6, x - start))))
        )
    rule = "+" + "+".join("-" * w for w in cells) + "+"
    top = "" if across is None else str(spec.shape[across]).center(len(rule))
    out, y0 = [f"   {top}".rstrip(), f"   {rule}"], 0
    for y in ys:
        row, x0 = [], 0
        for w, x in zip(cells, xs, strict=True):
            row.append(labels.get((y0, x0), "").ljust(w))
            x0 = x
        out += [f"   |{'|'.join(row)}|", f"   |{'|'.join(' ' * w for w in cells)}|", f"   {rule}"]
        y0 = y
    middle = 1 + (len(out) - 1) // 2
    out[middle] = f"{spec.shape[down]:>2} " + out[middle][3:]
    return [line for line in out if line]


def _ranks(ranks: list[int]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]},{ranks[1]}..{ranks[-1]}"
