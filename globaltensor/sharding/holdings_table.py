"""The table of what each rank holds of a tensor, as text. Text, HTML and SVG drawings use it."""

from __future__ import annotations

from .spec import Spec

__all__ = ["MAX_RANKS", "rank_rows", "slices_text"]

#: The maximum number of ranks that a drawing or a table lists.
MAX_RANKS = 64


def rank_rows(spec: Spec) -> list[tuple[str, str, str, str]]:
    """Return (rank, coordinate, local shape, slices) as text of each of the first ranks.

    >>> import torch
    >>> from .placement import Placement
    >>> from .sbp import split
    >>> rank_rows(Spec.make((3, 4), torch.float32, Placement("cpu", [5, 6]), split(0)))
    [('rank 5', '[0]', '[2, 4]', 'x[0:2, :]'), ('rank 6', '[1]', '[1, 4]', 'x[2:3, :]')]
    """
    where = spec.placement
    return [
        (
            f"rank {rank}",
            str(list(where.coordinate(rank) or ())),
            str(list(spec.local_shape(rank))),
            slices_text(spec, rank),
        )
        for rank in where.flat[:MAX_RANKS]
    ]


def slices_text(spec: Spec, rank: int) -> str:
    """Return the slices that ``rank`` holds: ``x[0:2, :]``, or ``x, a summand (P)``."""
    offsets, lengths = spec.box(rank)
    parts = [
        ":" if n == whole else f"{a}:{a + n}"
        for a, n, whole in zip(offsets, lengths, spec.shape, strict=True)
    ]
    kinds = sorted({e.short for e in spec.layout if e.is_partial})
    return (f"x[{', '.join(parts)}]" if parts else "x") + (
        f", a summand ({', '.join(kinds)})" if kinds else ""
    )
