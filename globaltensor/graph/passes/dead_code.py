"""Nodes whose results nobody uses. What other ranks take part in, who may want it, stays: a boxing
between placements, a step that talks to them by itself."""

from __future__ import annotations

from torch import fx

__all__ = ["remove_dead", "remove_idle"]


def remove_dead(graph: fx.Graph) -> None:
    """Remove what has no effect and no user."""
    for node in reversed(list(graph.nodes)):
        box = node.meta.get("box")
        if _idle(node) and (box is None or box[0].placement is box[1].placement):
            graph.erase_node(node)


def remove_idle(graph: fx.Graph) -> None:
    """As remove_dead, but every boxing stays: where one rank has no use for a result (the row it
    writes is not its own), another may."""
    for node in reversed(list(graph.nodes)):
        if _idle(node) and "box" not in node.meta:
            graph.erase_node(node)


def _idle(node: fx.Node) -> bool:
    return not (
        node.users
        or node.op in ("placeholder", "output")
        or node.meta.get("effect")
        or node.meta.get("meets")
    )
