"""Delay the mean loss's target count until after the backward pass, as eager mode does.

The count is then reduced together with the gradients (_ops/rules/deferred_mean.py). `pass_manager`
runs this pass.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..._ops.rules.loss import weight_of_kept
from ...distributed.world import world
from ..program.nodes import (
    BoxingCall,
    ProgramCall,
    RandomCall,
    autocast,
    backward,
    count_of,
    counted,
    set_grad_enabled,
)
from .alias_analysis import AliasSets, is_boxing
from .overlap import ancestors

__all__ = ["defer_mean_count"]

_DIVISIONS = (operator.truediv, torch.div, "div", "true_divide")
_LIKE_FUNCTIONS = (torch.ones_like, torch.zeros_like)


def defer_mean_count(graph: fx.Graph) -> None:
    """Start backward from the sum of the losses, and divide by the count later.

    The gradients are divided when they are reduced, and the loss itself after backward. The pass
    applies only if no code can see gradients before they are summed over the ranks. Only the
    program's result may depend on the loss."""
    passes = [n for n in graph.nodes if n.target is backward]
    if (
        len(passes) != 1
        or passes[0].meta.get("watched", True)
        or any(_may_see_gradients(n) for n in graph.nodes)
    ):
        return
    back = passes[0]
    (losses, seeds), own = back.args[:2], AliasSets(graph, views=False)
    if (
        len(losses) != 1
        or back.kwargs.get("retain_graph")
        or losses[0].target not in _DIVISIONS
        or len(losses[0].args) != 2
        or losses[0].kwargs
    ):
        return
    loss, seed = losses[0], seeds[0]
    total, box = loss.args
    if (
        not isinstance(box, fx.Node)
        or not is_boxing(box)
        or set(box.users) != {loss}
        or seed.target not in _LIKE_FUNCTIONS
        or seed.args != (loss,)
        or seed.kwargs
    ):
        return
    part, (most, weight), everyone = (
        box.args[0],
        _counts(box.args[0]),
        len(box.target.src.placement.flat) == world().size,
    )
    if (
        not (most and everyone)
        or weight is not None
        or not own.fixed(loss, box, part, seed)
        or total.meta["val"].dtype != loss.meta["val"].dtype
    ):
        return
    places = {node: i for i, node in enumerate(graph.nodes)}
    between = [n for n in graph.nodes if places[loss] < places[n] < places[back]]
    if any(n.target in (set_grad_enabled, autocast) for n in between) or any(
        places[u] < places[back] for u in loss.users if u is not seed
    ):
        return
    with graph.inserting_after(part):
        count = graph.call_function(ProgramCall(counted(box.target.src, most), "count"), (part,))
    count.meta.update(box.meta, val=None, effect=True, calls=1)
    count.meta.pop("box", None)
    seed.args = (total,)
    back.args = ([total], [seed], *back.args[2:], count)
    with graph.inserting_after(back):
        arrived = graph.call_function(ProgramCall(count_of, "counted"), (count,))
    arrived.meta.update(box.meta, calls=1)
    arrived.meta.pop("box", None)
    arrived.append(loss)
    loss.args = (total, arrived)
    graph.erase_node(box)
    _hoist(graph, count)


def _hoist(graph: fx.Graph, count: fx.Node) -> None:
    """Move the count to the program's start if it depends on the program's inputs alone.

    If gradients of several passes are added up, the count's own reduction starts there."""
    chain, placeholders = ancestors(count), [n for n in graph.nodes if n.op == "placeholder"]
    if (
        chain is None
        or not placeholders
        or not AliasSets(graph).fixed(*chain)
        or any(n.meta.get("region") is not None or n.target is autocast for n in graph.nodes)
    ):
        return
    last = placeholders[-1]
    for node in (*[n for n in chain if n.op != "placeholder"], count):
        last.append(node)
        last = node


def _counts(node: fx.Node) -> tuple[int, object]:
    """Return (number of targets on all ranks, their weights) if ``node`` counts targets.

    Targets that are ignored are not counted. For other nodes, return (0, None)."""
    if node.target is not weight_of_kept or len(node.args) < 4:
        return 0, None
    return node.args[3], node.args[1]  # type: ignore[return-value]


def _may_see_gradients(node: fx.Node) -> bool:
    """Return True if a node may see gradients: of a tensor, of a parameter, or not yet reduced."""
    if isinstance(node.target, ProgramCall):
        return not isinstance(node.target, (BoxingCall, RandomCall))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        name in ("register_hook", "register_post_accumulate_grad_hook")
        or node.target is torch.autograd.grad
    )
