"""SVG and HTML drawings of a tensor's layout and of a placement, made from the spec alone.

A rectangle shows two dims of the tensor: those that are split. Each cell is a slice of the tensor,
with the ranks that hold it. Several ranks in a cell hold copies; in a hatched cell each rank
holds a summand. Notebooks call it (``_repr_html_``), and ``flow.sharding_svg``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import product

import numpy as np

from .balanced_split import nested_balanced_split
from .cell_grid import (
    COLUMNS,
    FEWER_ROWS,
    PANELS,
    ROWS,
    DrawnPiece,
    columns_with_room,
    draw_grid,
    left_side,
)
from .cell_holders import Holders, listed
from .holdings_table import MAX_RANKS, rank_rows
from .placement import Placement
from .placement_svg import draw_placement, short_placement
from .sbp import Sbp
from .spec import Spec
from .svg_canvas import PADDING, WIDTH, SvgCanvas

__all__ = ["draw_spec", "drawn_dims", "layout_html", "layout_svg"]

_LOW, _HIGH, _NARROW = 48.0, 240.0, 150.0  # heights and least width of the rectangle


def layout_svg(x: Spec | Placement, title: str = "", where: str = "") -> str:
    """Return a drawing of a tensor's layout, or of a placement, as SVG text.

    It is 396 px wide and has colours for light and for dark pages. ``title`` and ``where`` replace
    the first two lines of a tensor's drawing, which are its spec and its placement.
    """
    if isinstance(x, Placement):
        canvas = SvgCanvas(f"placement on {short_placement(x)}")
        draw_placement(canvas, x)
    else:
        label = f"layout of {title or repr(x)} {where or f'on {short_placement(x.placement)}'}"
        canvas = SvgCanvas(label)
        draw_spec(canvas, x, title=title, where=where)
    return canvas.finish()


def layout_html(x: Spec | Placement, more: str = "") -> str:
    """Return the drawing as HTML, with a table of the ranks of a tensor that can be unfolded.

    ``more``: a sentence below the drawing.
    """
    below = ""
    if isinstance(x, Spec):
        head = "".join(
            f"<th>{name}</th>" for name in ("rank", "coordinate", "local shape", "slice of x")
        )
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rank_rows(x)
        )
        rest = x.placement.size - MAX_RANKS
        below = (
            f"<details><summary>What each rank holds</summary><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table>"
            + (f"<p>and {rest} more ranks</p>" if rest > 0 else "")
            + "</details>"
        )
    note = f"<p><small>{escape(more)}</small></p>" if more else ""
    return f'<div class="gt-layout" style="overflow-x:auto">{layout_svg(x)}{note}{below}</div>'


def draw_spec(
    canvas: SvgCanvas, spec: Spec, *, compact: bool = False, title: str = "", where: str = ""
) -> None:
    """Draw a layout below what is on the canvas. ``compact``: smaller, without explanations.

    ``title`` and ``where`` replace the first two lines.
    """
    canvas.line(title or repr(spec), size=14, bold=True)
    canvas.line(where or f"on {short_placement(spec.placement)}", "soft")
    spec = spec.plain
    if not compact:
        for axis, entry in enumerate(spec.layout):
            ranks = spec.placement.shape[axis]
            canvas.line(
                f"axis {axis}, {ranks} rank{'s' * (ranks > 1)}: {entry.short}, {_describe(entry)}",
                "soft",
            )
    canvas.y += 6
    if not spec.numel:
        _draw_nothing(canvas, spec)
        return
    down, across, others = drawn_dims(spec)
    _draw_legend(canvas, spec, down, across)
    exact = _draw_panels(canvas, spec, down, across, others, compact)
    rest = [d for d in range(spec.ndim) if d not in (down, across, *others)]
    if rest:
        names = ", ".join(f"dim {d} ({spec.shape[d]})" for d in rest)
        canvas.line(f"not drawn: {names}; not split", "soft")
    if empty := _ranks_without_elements(spec):
        canvas.line(f"0 elements on {empty}", "soft")
    if reductions := _reductions(spec):
        canvas.line(
            f"hatched: a cell's value is the {' of the '.join(reductions)} over its ranks", "soft"
        )
    if not exact:
        canvas.line("not to scale", "soft")


def _describe(entry: Sbp) -> str:
    if entry.is_split:
        unit = f", unit {entry.unit}" if entry.unit != 1 else ""
        return f"dim {entry.dim} is split{unit}"
    if entry.is_broadcast:
        return "each rank holds a copy"
    return f"partial {_reduction(entry)}"


def _reduction(entry: Sbp) -> str:
    names = {"sum": "sum", "max": "maximum", "min": "minimum"}
    return names.get(entry.reduce, f"{entry.reduce.removeprefix('norm')}-norm")


def _reductions(spec: Spec) -> list[str]:
    """Return the names of the reductions that give the value, the last one to be done first."""
    names = [
        _reduction(e)
        for e, n in zip(spec.layout, spec.placement.shape, strict=True)
        if e.is_partial and n > 1
    ]
    return [name for i, name in enumerate(names) if not i or name != names[i - 1]]


def drawn_dims(spec: Spec) -> tuple[int | None, int | None, list[int]]:
    """Return the dims drawn downwards and across, and the split dims drawn as more rectangles."""
    split = sorted({e.dim for e in spec.layout if e.is_split})
    if len(split) >= 2:
        return split[-2], split[-1], split[:-2]
    if spec.ndim >= 2:
        return 0, max(1, *split) if split else 1, []
    if spec.ndim == 1:
        pieces = len(_pieces(spec, 0, spec.placement.size + 1))
        return (None, 0, []) if pieces <= COLUMNS else (0, None, [])
    return None, None, []


def _pieces(spec: Spec, dim: int | None, limit: int) -> list[DrawnPiece]:
    """Return the pieces of a dim that have elements; the middle ones folded beyond ``limit``."""
    if dim is None:
        return [DrawnPiece(0, 0, 1)]
    pieces = [
        DrawnPiece(i, offset, length)
        for i, (offset, length) in enumerate(
            nested_balanced_split(spec.shape[dim], spec.chain(dim))
        )
        if length
    ]
    if len(pieces) <= limit:
        return pieces
    first, middle, last = pieces[: limit - 2], pieces[limit - 2 : -1], pieces[-1]
    offset = middle[0].offset
    return [*first, DrawnPiece(-1, offset, last.offset - offset, len(middle)), last]


def _draw_legend(canvas: SvgCanvas, spec: Spec, down: int | None, across: int | None) -> None:
    sides = [
        f"{arrow} dim {dim}: {spec.shape[dim]}"
        + (f" in {len(_pieces(spec, dim, spec.numel))}" if spec.axes_of(dim) else "")
        for arrow, dim in (("\u2193", down), ("\u2192", across))
        if dim is not None
    ]
    canvas.line("   ".join(sides) or "0 dims: one number")
    canvas.y += 2


def _draw_panels(
    canvas: SvgCanvas,
    spec: Spec,
    down: int | None,
    across: int | None,
    others: Sequence[int],
    compact: bool,
) -> bool:
    """Draw one rectangle for each combination of pieces of ``others``; True if all is to scale."""
    combinations = list(product(*(_pieces(spec, d, spec.numel) for d in others)))
    many = compact or spec.placement.size > MAX_RANKS or len(combinations) > 1
    rows = _pieces(spec, down, FEWER_ROWS if many else ROWS)
    ticks = (
        down is not None and bool(spec.axes_of(down)),
        across is not None and bool(spec.axes_of(across)),
    )
    left = left_side(rows, ticks[0])
    shared = not all(e.is_split for e in spec.layout)
    columns = _pieces(spec, across, columns_with_room(spec.placement, left, shared))
    size = _plane_size(spec, down, across, WIDTH - PADDING - left, compact)
    exact = True
    for number, pieces in enumerate(combinations):
        if len(combinations) > PANELS and PANELS - 2 < number < len(combinations) - 1:
            if number == PANELS - 1:
                canvas.line(f"... {len(combinations) - PANELS} more", "soft")
                canvas.y += 4
            continue
        index = {d: piece.index for d, piece in zip(others, pieces, strict=True)}
        if index:
            ranges = (f"dim {d}: {p.range}" for d, p in zip(others, pieces, strict=True))
            canvas.line(", ".join(ranges))

        def holders(row: DrawnPiece, column: DrawnPiece, index: dict[int, int] = index) -> Holders:
            at = dict(index)
            at |= {} if down is None else {down: row.index}
            at |= {} if across is None else {across: column.index}
            return Holders.of(spec, at)

        even, ratio = draw_grid(canvas, rows, columns, holders, size, ticks)
        if down is not None and across is not None:
            even &= abs(math.log(ratio * spec.shape[across] / spec.shape[down])) < 0.1
        exact &= even
    return exact


def _plane_size(
    spec: Spec, down: int | None, across: int | None, room: float, compact: bool
) -> tuple[float, float]:
    """Return (width, height) of the rectangle in px, as near to the shape as there is room."""
    room, high = (min(room, 240.0), 110.0) if compact else (room, _HIGH)
    if down is None:
        return (room if spec.ndim else 180.0), _LOW
    if across is None:
        return 180.0, high
    ratio = spec.shape[down] / spec.shape[across]
    return max(_NARROW, min(room, high / ratio)), max(_LOW, min(high, room * ratio))


def _draw_nothing(canvas: SvgCanvas, spec: Spec) -> None:
    """Draw a tensor with no elements: an empty, dashed rectangle, and the ranks."""
    canvas.box(PADDING, canvas.y, 180, _LOW, "hollow chip", dashed=True)
    canvas.text(PADDING + 90, canvas.y + _LOW / 2 + 4, "0 elements", "soft", 12, "middle")
    canvas.y += _LOW + 6
    canvas.line(f"0 elements on {listed(spec.placement.flat)}", "soft")


def _ranks_without_elements(spec: Spec) -> str:
    """Return the ranks that hold no element of a tensor that has elements, as text."""
    empty = np.zeros(spec.placement.shape, dtype=bool)
    for dim in {e.dim for e in spec.layout if e.is_split}:
        lengths = np.array(
            [length for _, length in nested_balanced_split(spec.shape[dim], spec.chain(dim))]
        )
        axes = spec.axes_of(dim)
        shape = [n if a in axes else 1 for a, n in enumerate(spec.placement.shape)]
        empty |= (lengths == 0).reshape(shape)
    return listed(spec.placement.ranks[empty]) if empty.any() else ""
