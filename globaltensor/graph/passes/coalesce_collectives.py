"""Join boxings that do not depend on one another into one collective.

The boxings have one kind, the same ranks and one dtype. Their gradients' boxings are joined too.
`pass_manager` runs this pass."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ...boxing import Move
from ...cluster import current_cluster
from ..program.coalesced import CoalescedCollective, move_of
from .alias_analysis import AliasSets, differentiable, is_boxing, modes

__all__ = ["coalesce_collectives"]


def coalesce_collectives(graph: fx.Graph) -> None:
    """Join groups of boxings where the saved latency pays.

    A boxing waits for the next of its kind until a node needs its result, or writes into its
    operand. The boxings that wait together form a group."""
    memory, own, mode = AliasSets(graph), AliasSets(graph, views=False), modes(graph)
    waiting: dict[Any, list[fx.Node]] = {}
    groups: list[list[fx.Node]] = []
    for node in graph.nodes:
        needs, changed = set(node.all_input_nodes), memory.writes(node)
        for key, group in list(waiting.items()):
            if (
                key[-1] != mode[node]
                or needs.intersection(group)
                or any(memory.of(n.args[0]) in changed for n in group)
            ):
                groups.append(waiting.pop(key))
        if is_boxing(node) and node.target.grad is None and own.fixed(node):
            move = move_of(node.target.src, node.target.dst)
            if move is not None and _is_worthwhile(move):
                src = node.target.src
                key = (
                    move.kind,
                    src.placement,
                    move.axes,
                    src.dtype,
                    differentiable(node),
                    mode[node],
                )
                waiting.setdefault(key, []).append(node)
    for group in [*groups, *waiting.values()]:
        if len(group) > 1:
            _join(graph, group)


def _is_worthwhile(move: Move) -> bool:
    """Return True if a collective's latency costs more than two copies of the data.

    The data is copied into a common buffer and out of it."""
    cluster, ranks = (
        current_cluster(),
        move.src.placement.fiber(move.src.placement.flat[0], move.axes),
    )
    nbytes = move.src.dtype.itemsize * max(move.src.local_numel(), move.dst.local_numel())
    return cluster.seconds(move.kind, 0, ranks) > 2 * cluster.seconds("copy", 2 * nbytes, 1)


def _join(graph: fx.Graph, group: list[fx.Node]) -> None:
    last = group[-1]
    with graph.inserting_after(last):
        joint = graph.call_function(
            CoalescedCollective([(n.target.src, n.target.dst, n.target.why) for n in group]),
            tuple(n.args[0] for n in group),
        )
    joint.meta.update(last.meta, val=tuple(n.meta["val"] for n in group), calls=1)
    del joint.meta["box"]
    after = joint
    for i, node in enumerate(group):
        with graph.inserting_after(after):
            after = part = graph.call_function(operator.getitem, (joint, i))
        part.meta.update(node.meta, calls=0)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
