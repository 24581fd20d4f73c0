"""SVG drawing of a placement: its ranks, with the last axis across and the one before it downwards.

The drawing of notebooks (``Placement._repr_html_``) and ``flow.sharding_svg`` use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .cell_grid import (
    COLUMNS,
    FEWER_ROWS,
    FOLDED_COLUMN,
    FOLDED_ROW,
    PANELS,
    ROWS,
    DrawnPiece,
    columns_with_room,
    draw_grid,
)
from .cell_holders import Holders
from .holdings_table import MAX_RANKS
from .placement import Placement
from .svg_canvas import PADDING, SvgCanvas

__all__ = ["draw_placement", "short_placement"]


def short_placement(placement: Placement) -> str:
    """Return a placement as text: ``cpu [0, 1]``; of many ranks ``cuda, 64 x 8 ranks, 0 to 511``.

    >>> short_placement(Placement("cpu", [[0, 1], [2, 3]]))
    'cpu [[0, 1], [2, 3]]'
    """
    if placement.size <= 16:
        return f"{placement.type} {placement.ranks.tolist()}"
    sizes = " x ".join(map(str, placement.shape))
    return f"{placement.type}, {sizes} ranks, {min(placement.flat)} to {max(placement.flat)}"


def draw_placement(canvas: SvgCanvas, placement: Placement) -> None:
    """Draw the ranks of a placement: the last axis across, the one before it downwards."""
    sizes = " x ".join(map(str, placement.shape))
    total = f" = {placement.size}" if placement.axes > 1 else ""
    ranks = f"{sizes}{total} rank{'s' * (placement.size > 1)}"
    canvas.line(f"placement on {placement.type}, {ranks}", size=14, bold=True)
    if placement.axes == 1:
        _draw_line_of_ranks(canvas, placement)
        return
    down, across = placement.axes - 2, placement.axes - 1
    canvas.line(
        f"\u2193 axis {down}: {placement.shape[down]}   "
        f"\u2192 axis {across}: {placement.shape[across]}"
    )
    canvas.y += 2
    blocks = list(np.ndindex(*placement.shape[:-2]))
    few = placement.size > MAX_RANKS or len(blocks) > 1
    rows = _folded_indices(placement.shape[down], FEWER_ROWS if few else ROWS)
    columns = _folded_indices(placement.shape[across], columns_with_room(placement, PADDING, False))
    for number, block in enumerate(blocks):
        if len(blocks) > PANELS and PANELS - 2 < number < len(blocks) - 1:
            if number == PANELS - 1:
                canvas.line(f"... {len(blocks) - PANELS} more", "soft")
                canvas.y += 4
            continue
        if block:
            canvas.line(", ".join(f"axis {a} = {i}" for a, i in enumerate(block)))

        def holders(row: DrawnPiece, column: DrawnPiece, block: tuple[int, ...] = block) -> Holders:
            coordinate = (*block, row.index, column.index)
            rank = placement.ranks[coordinate]
            return Holders(np.array(rank), (), f"rank {rank} at {list(coordinate)}")

        draw_grid(canvas, rows, columns, holders, grid_size(rows, columns), (False, False))


def _draw_line_of_ranks(canvas: SvgCanvas, placement: Placement) -> None:
    """Draw the ranks of one axis, eight in a row."""
    canvas.line(
        f"\u2192 axis 0: {placement.size}"
        + (f", {COLUMNS} ranks a row" if placement.size > COLUMNS else "")
    )
    canvas.y += 2
    flat = placement.flat
    folded = len(flat) > MAX_RANKS
    shown = len(flat) if not folded else MAX_RANKS - COLUMNS
    starts = [*range(0, shown, COLUMNS)]
    for start in starts:
        columns = [DrawnPiece(i, i, 1) for i in range(start, min(start + COLUMNS, shown))]
        _draw_row_of_ranks(canvas, flat, columns)
    if folded:
        last = len(flat) - COLUMNS
        canvas.text(PADDING + 4, canvas.y + 13, f"... {last - shown} more", "soft", 10.5)
        canvas.y += 20
        _draw_row_of_ranks(canvas, flat, [DrawnPiece(i, i, 1) for i in range(last, len(flat))])
    canvas.y += 8


def _draw_row_of_ranks(
    canvas: SvgCanvas, flat: Sequence[int], columns: Sequence[DrawnPiece]
) -> None:
    def holders(row: DrawnPiece, column: DrawnPiece) -> Holders:
        rank = flat[column.index]
        return Holders(np.array(rank), (), f"rank {rank} at [{column.index}]")

    row = [DrawnPiece(0, 0, 1)]
    draw_grid(canvas, row, columns, holders, grid_size(row, columns), (False, False))
    canvas.y -= 8


def _folded_indices(count: int, limit: int) -> list[DrawnPiece]:
    """Return the indices of an axis, the middle ones folded beyond ``limit``."""
    if count <= limit:
        return [DrawnPiece(i, i, 1) for i in range(count)]
    first = [DrawnPiece(i, i, 1) for i in range(limit - 2)]
    middle = count - limit + 1
    return [*first, DrawnPiece(-1, limit - 2, middle, middle), DrawnPiece(count - 1, count - 1, 1)]


def grid_size(rows: Sequence[DrawnPiece], columns: Sequence[DrawnPiece]) -> tuple[float, float]:
    across = sum(FOLDED_COLUMN if c.folded else 46.0 for c in columns)
    return across, sum(FOLDED_ROW if r.folded else 28.0 for r in rows)
