"""A grid of cells in an SVG drawing: slices of a tensor, or ranks of a placement.

Drawings of layouts and placements use it. If there are too many rows or columns, the drawing folds
some of them into one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cell_holders import LABEL_SIZE, Holders, Token, token_width
from .placement import Placement
from .svg_canvas import PADDING, WIDTH, SvgCanvas, rank_class, text_width

__all__ = [
    "COLUMNS",
    "FEWER_ROWS",
    "FOLDED_COLUMN",
    "FOLDED_ROW",
    "PANELS",
    "ROWS",
    "DrawnPiece",
    "columns_with_room",
    "draw_grid",
    "left_side",
]

COLUMNS, ROWS, FEWER_ROWS = 8, 16, 8  # the maximum number of cells that are drawn
PANELS = 4  # the maximum number of grids, for a tensor or placement with more than two dims
FOLDED_ROW, FOLDED_COLUMN = 22.0, 54.0  # height and width in px
_TICK = 10.5  # the font size of ranges, in px
_CHIP_HEIGHT, _LINE_HEIGHT = 16, 20  # in px
_SHARED_COLUMN = 60.0  # the width in px that "64 ranks" or "63 +" needs


@dataclass(frozen=True, slots=True)
class DrawnPiece:
    """A piece of a dim in a drawing. With ``index`` -1 it is ``count`` pieces, folded into one."""

    index: int
    offset: int
    length: int
    count: int = 1

    @property
    def folded(self) -> bool:
        return self.index < 0

    @property
    def range(self) -> str:
        return f"{self.offset}:{self.offset + self.length}"


def draw_grid(
    canvas: SvgCanvas,
    rows: Sequence[DrawnPiece],
    columns: Sequence[DrawnPiece],
    holders: Callable[[DrawnPiece, DrawnPiece], Holders],
    size: tuple[float, float],
    ticks: tuple[bool, bool],
) -> tuple[bool, float]:
    """Draw a rectangle of cells. Return (True if both sides are to scale, height / width).

    ``size`` is (width, height) of the rectangle. ``ticks`` is (True if rows have labels, True if
    columns have labels).
    """
    left = left_side(rows, ticks[0])
    cells = {(r, c): holders(r, c) for r in rows for c in columns if not (r.folded or c.folded)}
    least = max(_least_width(int(h.ranks.max()), shared=h.ranks.size > 1) for h in cells.values())
    widths, wide = _lengths(columns, size[0], [least] * len(columns), FOLDED_COLUMN)
    most = 4 if len(rows) <= 4 else 2 if len(rows) <= 8 else 1
    labels = {(r, c): h.label(widths[columns.index(c)] - 6, most) for (r, c), h in cells.items()}
    needs = [max((len(labels[r, c]) for c in columns if (r, c) in labels), default=1) for r in rows]
    heights, high = _lengths(rows, size[1], [n * _LINE_HEIGHT + 6.0 for n in needs], FOLDED_ROW)
    if ticks[1] and len(columns) > 1:
        _draw_ticks(canvas, columns, widths, left)
    top = canvas.y
    y = top
    for row, height in zip(rows, heights, strict=True):
        x = left
        if left > PADDING:
            canvas.text(left - 5, y + height / 2 + 3.5, row.range, "soft", _TICK, "end")
        for column, cell_width in zip(columns, widths, strict=True):
            place = (x, y, cell_width, height)
            if (row, column) in cells:
                _draw_cell(canvas, cells[row, column], labels[row, column], place)
            else:
                _draw_folded(canvas, row, column, place)
            x += cell_width
        y += height
    canvas.box(left, top, sum(widths), sum(heights), "hollow edge")
    canvas.y = y + 8
    return wide and high, sum(heights) / sum(widths)


def left_side(rows: Sequence[DrawnPiece], ticks: bool) -> float:
    """Return the x coordinate of the left side of the rectangle, right of the row labels."""
    if not ticks or len(rows) == 1:
        return PADDING
    return PADDING + max(text_width(row.range, _TICK) for row in rows) + 8


def _least_width(rank: int, shared: bool) -> float:
    """Return the minimum width of a cell of a rank. ``shared``: other ranks have the cell too."""
    return max(text_width(str(rank), LABEL_SIZE) + 17, _SHARED_COLUMN if shared else 0)


def columns_with_room(placement: Placement, left: float, shared: bool) -> int:
    """Return the number of columns that fit right of ``left``, including a folded column."""
    room = WIDTH - PADDING - left - FOLDED_COLUMN
    return max(3, min(COLUMNS, 1 + int(room / _least_width(max(placement.flat), shared))))


def _lengths(
    pieces: Sequence[DrawnPiece], total: float, least: Sequence[float], folded: float
) -> tuple[list[float], bool]:
    """Return the length of each piece in px, and True if the lengths are to scale.

    A folded piece has the length ``folded``. The others divide the rest of ``total`` in proportion
    to their sizes. Each has at least its length in ``least``.
    """
    fixed = {i: folded for i, p in enumerate(pieces) if p.folded}
    while True:
        free = [i for i in range(len(pieces)) if i not in fixed]
        room = total - sum(fixed.values())
        elements = sum(pieces[i].length for i in free)
        share = {i: room * pieces[i].length / elements for i in free}
        small = [i for i in free if share[i] < least[i] - 1e-6]
        if not small:
            lengths = [fixed.get(i, share.get(i, 0.0)) for i in range(len(pieces))]
            scales = [n / p.length for n, p in zip(lengths, pieces, strict=True)]
            return lengths, max(scales) < 1.05 * min(scales)
        fixed |= {i: least[i] for i in small}


def _draw_ticks(
    canvas: SvgCanvas, columns: Sequence[DrawnPiece], widths: Sequence[float], left: float
) -> None:
    """Draw the range of each column above the column, or its size if the ranges do not fit."""
    ranges = [p.range for p in columns]
    sizes = [str(p.length) for p in columns]
    for texts in (ranges, sizes):
        if all(text_width(t, _TICK) <= w for t, w in zip(texts, widths, strict=True)):
            x = left
            for text, width in zip(texts, widths, strict=True):
                canvas.text(x + width / 2, canvas.y + 10, text, "soft", _TICK, "middle")
                x += width
            canvas.y += 15
            return


def _draw_cell(
    canvas: SvgCanvas,
    holders: Holders,
    label: Sequence[Sequence[Token]],
    place: tuple[float, float, float, float],
) -> None:
    x, y, width, height = place
    alone = holders.ranks.size == 1
    canvas.open_group(holders.title)
    style = rank_class(int(holders.ranks.flat[0])) if alone else "many"
    canvas.box(x, y, width, height, f"{style} edge")
    if holders.partial:
        canvas.hatch(x, y, width, height)
    middle = y + height / 2 - (len(label) - 1) * _LINE_HEIGHT / 2
    if alone:
        text = f"rank {label[0][0][1]}"
        text = text if text_width(text, LABEL_SIZE) + 8 <= width else label[0][0][1]
        canvas.text(x + width / 2, middle + 4, text, "ink", LABEL_SIZE, "middle", bold=True)
    else:
        for row in label:
            _draw_tokens(canvas, row, x + width / 2, middle, holders.partial)
            middle += _LINE_HEIGHT
    canvas.close_group()


def _draw_tokens(
    canvas: SvgCanvas, row: Sequence[Token], centre: float, middle: float, backed: bool
) -> None:
    """Draw a line of ranks and signs. ``backed``: draw a background behind it, on a hatch."""
    widths = [token_width(token) for token in row]
    x = centre - sum(widths) / 2
    if backed:
        canvas.box(x - 2, middle - _LINE_HEIGHT / 2, sum(widths) + 4, _LINE_HEIGHT, "many")
    for (kind, text), width in zip(row, widths, strict=True):
        if kind == "rank":
            canvas.box(
                x + 2,
                middle - _CHIP_HEIGHT / 2,
                width - 4,
                _CHIP_HEIGHT,
                f"{rank_class(int(text))} chip",
                radius=4,
            )
        canvas.text(x + width / 2, middle + 4, text, "ink", LABEL_SIZE, "middle", kind == "rank")
        x += width


def _draw_folded(
    canvas: SvgCanvas,
    row: DrawnPiece,
    column: DrawnPiece,
    place: tuple[float, float, float, float],
) -> None:
    x, y, width, height = place
    canvas.box(x, y, width, height, "ground chip", dashed=True)
    piece = row if row.folded else column
    for text in (f"{piece.count} more", f"+{piece.count}", "..."):
        if text_width(text, _TICK) <= width - 6:
            canvas.text(x + width / 2, y + height / 2 + 4, text, "soft", _TICK, "middle")
            return
