"""A canvas for SVG drawings of layouts: text, boxes and hatches in light and dark colours.

Drawings of specs, placements and boxing routes use it. The width of a drawing is fixed, so text is
never scaled. A drawing fits the screen of a phone. Each colour is a class with a second value for
``prefers-color-scheme: dark``. No element has an id, so one page can have several drawings.
"""

from __future__ import annotations

import math
import textwrap
from html import escape
from typing import Final

__all__ = ["COLOURS", "PADDING", "WIDTH", "SvgCanvas", "rank_class", "text_width"]

WIDTH: Final = 396  # of a drawing, in px
PADDING: Final = 12  # between the frame of a drawing and its contents, in px
_CHARACTER = 0.605  # the width of a monospaced character, as a fraction of the font size

# The fill colours of ranks: rank r has colour r modulo their number. Neighbouring ranks differ in
# hue. Text on a fill has a contrast of at least 7:1. The colours are OKLCH (L 0.86, C 0.085) and
# (L 0.393, C 0.088), with hue 250 + 150 i.
_LIGHT = "a7d6ff ffbfa7 8ce3dd f8bce3 bfdda2 c5ccff f5c894 8fdff8 ffbac4 a0e3be e2c2fb ded392"
_DARK = "1b4873 6c331e 005450 643155 364f16 3d3f74 633c00 005066 6c2f3b 025435 543769 514600"
COLOURS: Final = len(_LIGHT.split())

# class -> (property, light, dark)
_PAINTS: Final = {
    "ground": ("fill", "fcfcfb", "161615"),
    "ink": ("fill", "1d1d1b", "ecebe6"),
    "soft": ("fill", "5f5d57", "b5b2a9"),
    "mark": ("fill", "0b5fb0", "7db8f2"),
    "many": ("fill", "f0efea", "2a2a28"),
    "chip": ("stroke", "5f5d57", "a9a69d"),
    "edge": ("stroke", "3d3c38", "d0cec6"),
    "frame": ("stroke", "dedcd6", "3a3935"),
    "hatch": ("stroke", "55534d", "c4c1b7"),
    "arrow": ("stroke", "0b5fb0", "7db8f2"),
} | {
    f"r{i}": ("fill", light, dark)
    for i, (light, dark) in enumerate(zip(_LIGHT.split(), _DARK.split(), strict=True))
}


def _style() -> str:
    light, dark = (
        "".join(f".gt-svg .{name}{{{p[0]}:#{p[shade]}}}" for name, p in _PAINTS.items())
        for shade in (1, 2)
    )
    return (
        "<style>.gt-svg text{font-family:ui-monospace,'SF Mono',Menlo,Consolas,"
        "'DejaVu Sans Mono',monospace;white-space:pre}.gt-svg .hollow{fill:none}"
        f"{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"
    )


def rank_class(rank: int) -> str:
    """Return the class of the colour of a rank, which is the same in every drawing."""
    return f"r{rank % COLOURS}"


def text_width(text: str, size: float) -> float:
    """Return the width of a line of text in px, at a font size in px."""
    return len(text) * _CHARACTER * size


class SvgCanvas:
    """A drawing that grows downwards. ``y`` is the top of the next line. All lengths are in px.

    >>> canvas = SvgCanvas("an example")
    >>> canvas.line("hello")
    >>> canvas.finish().startswith("<svg")
    True
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.y: float = PADDING
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        style: str = "ink",
        size: float = 11,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Draw a text whose baseline is at ``y``. ``anchor``: start, middle or end."""
        self._parts.append(
            f'<text x="{x:.4g}" y="{y:.5g}" class="{style}" font-size="{size:g}"'
            + (f' text-anchor="{anchor}"' if anchor != "start" else "")
            + (' font-weight="600"' if bold else "")
            + f">{escape(text)}</text>"
        )

    def line(
        self, text: str, style: str = "ink", size: float = 12, bold: bool = False, indent: float = 0
    ) -> None:
        """Draw a text below the earlier elements, wrapped to at most four lines."""
        room = int((WIDTH - 2 * PADDING - indent) / (_CHARACTER * size))
        for row in textwrap.wrap(
            text, room, max_lines=4, placeholder=" ...", subsequent_indent="  "
        ):
            self.text(PADDING + indent, self.y + size, row, style, size, bold=bold)
            self.y += size * 1.45

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        style: str,
        *,
        radius: float = 0,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle. The classes in ``style`` set its fill and its stroke."""
        self._parts.append(
            f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height}" '
            f'class="{style}"'
            + (f' rx="{radius:g}"' if radius else "")
            + (' stroke-dasharray="4 3"' if dashed else "")
            + "/>"
        )

    def hatch(self, x: float, y: float, width: float, height: float) -> None:
        """Draw diagonal lines inside a rectangle."""
        lines = []
        start = x - height + 4
        while start < x + width:
            left, right = max(start, x), min(start + height, x + width)
            if right - left > 1:
                lines.append(
                    f"M{left:.5g} {y + height - left + start:.5g}"
                    f"L{right:.5g} {y + height - right + start:.5g}"
                )
            start += 8
        self.path("".join(lines), "hatch hollow", opacity=0.55)

    def path(self, points: str, style: str, width: float = 1, opacity: float = 1) -> None:
        """Draw a path. ``points`` is the value of SVG's attribute ``d``."""
        self._parts.append(
            f'<path d="{points}" class="{style}" stroke-width="{width:g}"'
            + (f' opacity="{opacity:g}"' if opacity != 1 else "")
            + "/>"
        )

    def open_group(self, tooltip: str) -> None:
        """Start a group of elements that shows ``tooltip`` under the pointer."""
        self._parts.append(f"<g><title>{escape(tooltip)}</title>")

    def close_group(self) -> None:
        """End the group."""
        self._parts.append("</g>")

    def finish(self) -> str:
        """Return the SVG as ASCII text, which is valid in a file of any encoding."""
        height = math.ceil(self.y + PADDING)
        frame = (
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" '
            f'class="ground frame"/>'
        )
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="gt-svg" role="img" '
            f'aria-label="{escape(self.label)}" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" style="max-width:100%;height:auto">'
            f"{_style()}{frame}{''.join(self._parts)}</svg>"
        )
        return svg.encode("ascii", "xmlcharrefreplace").decode()
