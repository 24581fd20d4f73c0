"""The ranks that hold a cell of a drawing, and its label: copies, or partials with a reduction.

Drawings of layouts and placements use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .holdings_table import slices_text
from .sbp import Sbp
from .spec import Spec
from .svg_canvas import text_width

__all__ = ["LABEL_SIZE", "Holders", "RankArray", "Token", "listed", "token_width"]

LABEL_SIZE = 11  # px, the font size
RankArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Token = tuple[str, str]  # ("rank", "3") or ("text", "+")


class Holders:
    """The ranks that hold one cell: groups of copies, combined by the reductions of partial axes.

    ``ranks``: an array with an axis for each of ``entries``, partial ones first, copies last.
    """

    def __init__(self, ranks: RankArray, entries: Sequence[Sbp], title: str) -> None:
        self.ranks, self.entries, self.title = ranks, tuple(entries), title

    @staticmethod
    def of(spec: Spec, index: Mapping[int, int]) -> Holders:
        """Return the holders of the slice with these numbers of pieces, {split dim: number}."""
        where: list[slice | int] = [slice(None)] * len(spec.layout)
        for dim, number in index.items():
            axes = spec.axes_of(dim)
            at = np.unravel_index(number, [spec.placement.shape[a] for a in axes]) if axes else ()
            for axis, i in zip(axes, at, strict=True):
                where[axis] = int(i)
        ranks = spec.placement.ranks[tuple(where)]
        rest = [e for e in spec.layout if not e.is_split]
        order = sorted(range(len(rest)), key=lambda a: rest[a].is_broadcast)
        sizes: list[int] = []
        entries: list[Sbp] = []
        for a in order:  # neighbouring axes of one kind become one
            if ranks.shape[a] == 1:
                continue
            if entries and entries[-1] is rest[a]:
                sizes[-1] *= ranks.shape[a]
            else:
                entries.append(rest[a])
                sizes.append(ranks.shape[a])
        ranks = np.transpose(ranks, order).reshape(sizes)
        first = int(ranks.flat[0])
        shape = list(spec.local_shape(first))
        title = f"{slices_text(spec, first)}, shape {shape}, on {listed(ranks.flat)}"
        return Holders(ranks, entries, title)

    @property
    def partial(self) -> bool:
        return any(e.is_partial for e in self.entries)

    def label(self, width: float, lines: int) -> list[list[Token]]:
        """Return the label of the cell in lines that fit, with as many ranks as possible."""
        for limit in (24, 16, 12, 8, 6, 5, 4, 3):
            rows = _break_lines(self._tokens(self.ranks, self.entries, limit), width)
            if rows and len(rows) <= lines:
                return rows
        return [[("text", f"{self.ranks.size} ranks")]]

    def _tokens(self, ranks: RankArray, entries: Sequence[Sbp], limit: int) -> list[Token]:
        if not entries:
            return [("rank", str(int(ranks)))]
        count = ranks.shape[0]
        shown = range(count) if count <= limit else [*range(limit - 2), -1, count - 1]
        groups = [
            [("text", "...")] if i < 0 else self._tokens(ranks[i], entries[1:], limit)
            for i in shown
        ]
        entry = entries[0]
        if entry.is_broadcast:
            copies = [token for group in groups for token in group]
            return [("text", "("), *copies, ("text", ")")] if self.partial else copies
        joined = groups[0]
        for group in groups[1:]:
            joined = [*joined, ("text", "+" if entry.reduce == "sum" else ","), *group]
        if entry.reduce == "sum":
            return joined
        return [("text", f"{entry.reduce}("), *joined, ("text", ")")]


def token_width(token: Token) -> float:
    kind, text = token
    return text_width(text, LABEL_SIZE) + (11 if kind == "rank" else 3)


def _break_lines(tokens: Sequence[Token], width: float) -> list[list[Token]]:
    """Return the tokens in lines of at most ``width`` px; none where there is no room for one.

    A line starts with a rank or an opening bracket.
    """
    rows: list[list[Token]] = [[]]
    used, opened = 0.0, False
    units: list[list[Token]] = []
    for token in tokens:
        opening = token[1].endswith("(")
        if units and (opened or not (opening or token[0] == "rank" or token[1] == "...")):
            units[-1].append(token)
        else:
            units.append([token])
        opened = opening
    for unit in units:
        need = sum(map(token_width, unit))
        if need > width:
            return []
        if used + need > width:
            rows.append([])
            used = 0.0
        rows[-1] += unit
        used += need
    return rows


def listed(ranks: Sequence[int] | RankArray | np.flatiter[RankArray]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0, 1, 2``, ``ranks 0, 1, ..., 63 (64)``."""
    numbers = [int(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) <= 8:
        return f"ranks {', '.join(map(str, numbers))}"
    return f"ranks {numbers[0]}, {numbers[1]}, ..., {numbers[-1]} ({len(numbers)} ranks)"
