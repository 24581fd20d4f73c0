"""The choice of a node to branch on and the division of its strategies.

`solve.divide` calls it where HiGHS cannot close the gap.
"""

from __future__ import annotations

import numpy as np

from .dual_ascent import Ascent
from .presolve import PresolvedProblem
from .problem import Array


def halves(core: PresolvedProblem, ascent: Ascent) -> tuple[int, tuple[Array, Array]]:
    """Return the node to branch on and its strategies in two parts, the better part first.

    The node is the one with the most neighbours; a tie goes to the node with more strategies. The
    first part is the node's best strategy under the messages, the second part is all its other
    strategies.
    """
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
