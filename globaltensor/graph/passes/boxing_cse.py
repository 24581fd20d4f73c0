"""Common boxings shared: what is boxed twice in the same way is boxed once. Its gradient is then
the sum of both, and moves once as well. So for a split parameter that two calls want whole, unless
it is to be let go of after each (ZeRO's third stage)."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...sharding.spec import StorageSpec
from ..program.nodes import GatherCall
from .alias_analysis import AliasSets, is_boxing, modes, replace

__all__ = ["eliminate_common_boxings"]


def eliminate_common_boxings(graph: fx.Graph) -> None:
    """One node for all boxings of one operand with the same ends and gradient, unless somebody
    writes into it in between, or into one of the results."""
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
        if own.fixed(first, node):  # a result that somebody writes into is his own
            replace(node, first)
        else:
            seen[key] = node
