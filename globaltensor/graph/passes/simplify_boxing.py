"""Remove and shorten boxings that are not needed.

a -> b -> c becomes a -> c if that costs no more. a -> b -> a is removed, and so is a boxing that
leaves every local tensor as it is.

Each step of boxing keeps the tensor and changes its layout. So does each step of its gradient's
boxing, which is between the dual specs. A boxing with an explicit gradient spec (``grad``) is left
alone. `pass_manager` runs this pass.
"""

from __future__ import annotations

from torch import fx

from ...boxing import plan_boxing
from ...sharding.spec import Spec
from ..program.nodes import BoxingCall
from .alias_analysis import AliasSets, costs, differentiable, is_boxing, modes, plain, replace

__all__ = ["simplify_boxings", "unmoved"]


def simplify_boxings(graph: fx.Graph) -> None:
    """Shorten chains of boxings, in order, so that a chain of any length shortens."""
    memory, mode = AliasSets(graph), modes(graph)
    for node in list(graph.nodes):
        if (
            not is_boxing(node)
            or node.target.grad is not None
            or not plain(node.target.src, node.target.dst)
        ):
            continue
        before = node.args[0]
        if not memory.fixed(node, before):
            continue
        step = node.target
        if unmoved(step.src, step.dst) and differentiable(node) == differentiable(before):
            replace(node, before)
        elif _chained(before) and mode[before] == mode[node] and memory.fixed(before.args[0]):
            node_mode = mode[node]
            made = _shorten(graph, before, node)
            if made is not None:
                mode[made] = node_mode


def unmoved(src: Spec, dst: Spec) -> bool:
    """Return True if every local tensor stays as it is, and so does every local gradient."""
    return src is dst or (
        plan_boxing(src, dst).is_noop and plan_boxing(dst.dual(), src.dual()).is_noop
    )


def _chained(first: fx.Node) -> bool:
    return (
        is_boxing(first) and first.target.grad is None and plain(first.target.src, first.target.dst)
    )


def _shorten(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node | None:
    """Shorten two boxings to one, and return the new node, or None if there is no new node."""
    a, b, c = first.target.src, first.target.dst, second.target.dst
    if a.placement is not c.placement or a.placement is not b.placement:
        return None  # other ranks take part
    if unmoved(a, c) and differentiable(second) == differentiable(first.args[0]):
        replace(second, first.args[0])
        _drop(first)
        return None
    both = differentiable(second)
    now = costs([(b, c)] if len(first.users) > 1 else [(a, b), (b, c)], both)
    if costs([(a, c)], both) > now:
        return None
    with graph.inserting_before(second):
        node = graph.call_function(
            BoxingCall(a, c, None, second.target.why, second.target.alias and first.target.alias),
            (first.args[0],),
        )
    node.meta.update(second.meta, box=(a, c))
    replace(second, node)
    _drop(first)
    return node


def _drop(node: fx.Node) -> None:
    if not node.users:
        node.graph.erase_node(node)
