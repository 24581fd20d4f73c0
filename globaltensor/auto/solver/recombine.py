"""Recombination of two choices: adopt connected parts of another choice that fit and cost less.

`dual_ascent` and `neighborhood_search` call `mix`.
"""

from __future__ import annotations

import time

from .local_search import LocalSearch
from .problem import Array


def components(nodes: list[int], pairs: list[tuple[int, int]]) -> list[list[int]]:
    """Return the nodes grouped by connected component."""
    root = {i: i for i in nodes}

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i, j in pairs:
        root[find(i)] = find(j)
    parts: dict[int, list[int]] = {}
    for i in nodes:
        parts.setdefault(find(i), []).append(i)
    return list(parts.values())


def take(local: LocalSearch, nodes: list[int], target: Array) -> bool:
    """Move these nodes together to the target if that fits and costs less.

    Returns True if the nodes moved.
    """
    before, undone = local.value, []
    for i in nodes:
        undone.append((i, int(local.choice[i])))
        local.move(i, int(target[i]), local.change(i, int(target[i])))
    if local.feasible and local.value < before - 1e-12 * abs(before):
        return True
    for i, k in reversed(undone):
        local.move(i, k, local.change(i, k))
    return False


def differing(local: LocalSearch, target: Array) -> list[list[int]]:
    """Return the connected components of the nodes whose current choice is not the target's."""
    flat = local.flat
    apart = local.choice != target
    between = apart[flat.head] & apart[flat.tail]
    return components(
        apart.nonzero()[0].tolist(),
        list(zip(flat.head[between].tolist(), flat.tail[between].tolist(), strict=True)),
    )


def mix(local: LocalSearch, target: Array, deadline: float) -> None:
    """Adopt parts of another choice into the current feasible choice.

    A part that cannot be adopted in full is tried in halves, quarters and so on.
    """
    waiting = differing(local, target)
    while waiting and time.monotonic() < deadline:
        part = waiting.pop()
        if not take(local, part, target) and len(part) > 1:
            waiting += [part[: len(part) // 2], part[len(part) // 2 :]]
