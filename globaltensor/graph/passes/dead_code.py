"""Remove nodes whose results are not used.

Nodes in which other ranks take part stay, because those ranks may need the result. These are
boxings between placements, and steps that communicate directly. `pass_manager` runs these passes.
"""

from __future__ import annotations

from torch import fx

__all__ = ["remove_dead", "remove_idle"]


def remove_dead(graph: fx.Graph) -> None:
    """Remove nodes without an effect and without a user."""
    for node in reversed(list(graph.nodes)):
        box = node.meta.get("box")
        if _is_dead(node) and (box is None or box[0].placement is box[1].placement):
            graph.erase_node(node)


def remove_idle(graph: fx.Graph) -> None:
    """Remove the nodes that remove_dead removes, except boxings.

    Where one rank has no use for a result (the row that it writes is not its own), another rank may
    have."""
    for node in reversed(list(graph.nodes)):
        if _is_dead(node) and "box" not in node.meta:
            graph.erase_node(node)


def _is_dead(node: fx.Node) -> bool:
    return not (
        node.users
        or node.op in ("placeholder", "output")
        or node.meta.get("effect")
        or node.meta.get("meets")
    )
