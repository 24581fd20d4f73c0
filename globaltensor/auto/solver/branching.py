"""Which node to branch on, and how its strategies are divided."""

from __future__ import annotations

import numpy as np

from .dual_ascent import Ascent
from .presolve import PresolvedProblem
from .problem import Array


def halves(core: PresolvedProblem, ascent: Ascent) -> tuple[int, tuple[Array, Array]]:
    """The node of the most neighbours among those with several strategies, its best strategy by the
    messages, and its others."""
    flat = ascent.flat
    node = int(
        np.argmax(
            np.bincount(np.concatenate([flat.head, flat.tail]), minlength=len(flat.nodes)) * 1000
            + np.minimum(flat.size, 999)
        )
    )
    total = (flat.cost + flat.prices(ascent.best_price) + ascent.messages.incoming)[
        flat.first[node] : flat.first[node + 1]
    ]
    best = int(total.argmin())
    everything = np.arange(len(total))
    return flat.nodes[node], (everything[[best]], np.delete(everything, best))
