"""Share common boxings: a tensor that is boxed twice in the same way is boxed once.

Its gradient is then the sum of both, and is boxed once as well. The same holds for a split
parameter that two calls need in full. A parameter that is freed after each use (ZeRO's third stage)
is not shared. `pass_manager` runs this pass."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...sharding.spec import StorageSpec
from ..program.nodes import GatherCall
from .alias_analysis import AliasSets, is_boxing, modes, replace

__all__ = ["eliminate_common_boxings"]


def eliminate_common_boxings(graph: fx.Graph) -> None:
    """Use one node for all boxings of one operand with the same ends and gradient.

    Boxings are not shared if a node writes into the operand in between, or into one of the results.
    """
    memory, own, mode = AliasSets(graph), AliasSets(graph, views=False), modes(graph)
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        changed = memory.writes(node)
        if changed:
            seen = {key: first for key, first in seen.items() if memory.of(key[0]) not in changed}
        if is_boxing(node):
            step = node.target
            key: Any = (node.args[0], step.src, step.dst, step.grad, mode[node])
        elif isinstance(node.target, GatherCall) and not isinstance(
            node.meta["box"][0], StorageSpec
        ):
            key = (node.args[0], *node.meta["box"], GatherCall, mode[node])
        else:
            continue
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if own.fixed(first, node):  # a result that is written into is not shared
            replace(node, first)
        else:
            seen[key] = node
