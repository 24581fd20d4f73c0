"""SVG drawing of a boxing route: the layouts before, between and after, and the moves.

``explain_boxing`` calls it.
"""

from __future__ import annotations

from ..sharding.sharding_svg import draw_spec
from ..sharding.svg_canvas import PADDING, SvgCanvas
from .moves import LOCAL, Move, show_bytes
from .planner import BoxingPlan

__all__ = ["boxing_svg"]

_ARROW = 40.0  # px


def boxing_svg(route: BoxingPlan) -> str:
    """Return a drawing of a boxing route as SVG text, 396 px wide.

    An arrow for each move has its kind, its placement axes, the bytes of the busiest rank and the
    estimated time.

    >>> from globaltensor.boxing import plan_boxing
    >>> from globaltensor.sbp import broadcast, split
    >>> from globaltensor.sharding.placement import placement
    >>> from globaltensor.sharding.spec import Spec
    >>> import torch
    >>> line = placement("cpu", [0, 1])
    >>> src, dst = (Spec.make((4, 4), torch.float32, line, e) for e in (split(0), broadcast))
    >>> "all_gather" in boxing_svg(plan_boxing(src, dst))
    True
    """
    canvas = SvgCanvas(f"boxing of {route.src!r} into {route.dst!r}")
    draw_spec(canvas, route.src, compact=True)
    for move in route.moves:
        _draw_move(canvas, move)
        draw_spec(canvas, move.dst, compact=True)
    canvas.y += 6
    if not route.moves:
        canvas.line("nothing moves: both layouts are the same", bold=True)
    elif len(route.moves) > 1:
        total = f"{show_bytes(route.bytes)} a rank, {route.seconds * 1e3:.3g} ms"
        canvas.line(f"{len(route.moves)} moves: {total}", bold=True)
    return canvas.finish()


def _draw_move(canvas: SvgCanvas, move: Move) -> None:
    """Draw an arrow downwards with the name and the cost of a move at its right."""
    x, top = PADDING + 10.0, canvas.y + 6
    tip = top + _ARROW
    canvas.path(f"M{x:g} {top:g}V{tip:g}M{x - 6:g} {tip - 8:g}L{x:g} {tip:g}L{x + 6:g} "
                f"{tip - 8:g}", "arrow hollow", 2)  # fmt: skip
    names = ", ".join(map(str, move.axes))
    where = f" on ax{'i' if len(move.axes) == 1 else 'e'}s {names}" if move.axes else ""
    canvas.text(x + 18, top + 17, move.kind + where, "mark", 13, bold=True)
    cost = (
        "no traffic"
        if move.kind in LOCAL
        else f"{show_bytes(move.bytes)} a rank, {move.seconds * 1e3:.3g} ms"
    )
    canvas.text(x + 18, top + 34, cost, "soft", 12)
    canvas.y = tip + 8
