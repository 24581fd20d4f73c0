"""One choice made better by parts of another: where two choices differ, connected parts are taken
over that fit and pay."""

from __future__ import annotations

import time

from .local_search import LocalSearch
from .problem import Array


def components(nodes: list[int], pairs: list[tuple[int, int]]) -> list[list[int]]:
    """The nodes by connected component."""
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
    """Move these nodes together if that fits and costs less, or leave them; whether they moved."""
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
    """The connected parts of the nodes that the choice at hand and another one choose differently
    for."""
    flat = local.flat
    apart = local.choice != target
    between = apart[flat.head] & apart[flat.tail]
    return components(
        apart.nonzero()[0].tolist(),
        list(zip(flat.head[between].tolist(), flat.tail[between].tolist(), strict=True)),
    )


def mix(local: LocalSearch, target: Array, deadline: float) -> None:
    """Take over parts of another choice into the feasible one at hand; of a part that is too much
    as a whole, halves, quarters and so on."""
    waiting = differing(local, target)
    while waiting and time.monotonic() < deadline:
        part = waiting.pop()
        if not take(local, part, target) and len(part) > 1:
            waiting += [part[: len(part) // 2], part[len(part) // 2 :]]
