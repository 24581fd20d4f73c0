"""Nodes whose results nobody uses. A boxing between placements stays: other ranks take part in it, who may want it."""

from __future__ import annotations

from torch import fx

__all__ = ["remove_dead"]


def remove_dead(graph: fx.Graph) -> None:
    """Remove what has no effect and no user."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output") or node.meta.get("effect"):
            continue
        box = node.meta.get("box")
        if box is not None and box[0].placement is not box[1].placement:
            continue
        graph.erase_node(node)
