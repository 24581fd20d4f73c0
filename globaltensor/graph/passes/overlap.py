"""Start collectives early and await them late, so that the nodes in between run meanwhile.

This holds for the forward pass and for the backward pass. A collective starts as soon as its
operand is ready and the collective before it has started, so that their order stays. It is awaited
where its result is first needed. A small collective that depends on inputs alone, such as the
number of targets that count, starts when the program does. `pass_manager` runs this pass.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from ..program.coalesced import CoalescedCollective, StartCollective, WaitCollective, move_of
from ..program.nodes import BoxingCall, GatherCall, ProgramCall, RandomCall, autocast
from .alias_analysis import AliasSets, differentiable, is_border, is_boxing, modes

__all__ = ["ancestors", "overlap_collectives"]

SMALL = 1 << 16  # limit in bytes for results that may wait from the start of a program to its end
_VIEWS = frozenset(
    (
        "view view_as reshape flatten unflatten transpose permute squeeze unsqueeze expand "
        "expand_as "
        "detach size dim t unbind split chunk narrow select"
    ).split()
)


def overlap_collectives(graph: fx.Graph) -> None:
    """Split boxings into a start and a wait where something can run in between."""
    _hoist(graph)
    memory, own, mode = AliasSets(graph), AliasSets(graph, views=False), modes(graph)
    for node in list(graph.nodes):
        if _splittable(node) and own.fixed(*_results(node)):
            _split(graph, node, memory, mode)


def _splittable(node: fx.Node) -> bool:
    """Return True if a node is one move that can be started separately."""
    if isinstance(node.target, CoalescedCollective):
        return all(part.target is operator.getitem for part in node.users)
    return (
        is_boxing(node)
        and node.target.grad is None
        and move_of(node.target.src, node.target.dst) is not None
    )


def _results(node: fx.Node) -> list[fx.Node]:
    return (
        list(node.users) if isinstance(node.target, CoalescedCollective) and node.users else [node]
    )


def _communicates(node: fx.Node) -> bool:
    """Return True if ranks communicate in a node, so that its order must stay."""
    return isinstance(
        node.target, (BoxingCall, GatherCall, CoalescedCollective, StartCollective)
    ) or (
        isinstance(node.target, ProgramCall)
        and not isinstance(node.target, (RandomCall, WaitCollective))
    )


def _computes(node: fx.Node) -> bool:
    """Return True if a node computes something and is not a mere view."""
    if (
        node.op not in ("call_function", "call_method")
        or isinstance(
            node.target, (BoxingCall, StartCollective, WaitCollective, CoalescedCollective)
        )
        or node.target in (operator.getitem, getattr)
    ):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return bool(node.meta.get("calls")) and name not in _VIEWS


def _place_start_and_wait(
    graph: fx.Graph, node: fx.Node, start: fx.Node, wait: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Put the start of a boxing after the node ``start``, and its wait before the node ``wait``."""
    joint = (
        node.target
        if isinstance(node.target, CoalescedCollective)
        else CoalescedCollective([(node.target.src, node.target.dst, node.target.why)])
    )
    with graph.inserting_after(start):
        begun = graph.call_function(StartCollective(joint), node.args)
    begun.meta.update(
        {k: v for k, v in node.meta.items() if k in ("module", "stage", "region")},
        val=None,
        effect=False,
        calls=1,
    )
    with graph.inserting_before(wait):
        ended = graph.call_function(WaitCollective(joint), (begun,))
    ended.meta.update(node.meta, calls=0)
    for part in list(node.users) if isinstance(node.target, CoalescedCollective) else ():
        wait.prepend(part)
    node.replace_all_uses_with(ended)
    graph.erase_node(node)
    return begun, ended


def _split(graph: fx.Graph, node: fx.Node, memory: AliasSets, mode: dict[fx.Node, int]) -> None:
    """Start a boxing as early, and await it as late, as the nodes around it permit."""
    parts, node_mode = _results(node), mode[node]
    own = {node, *parts}
    changed = {memory.of(n) for n in node.all_input_nodes}
    start = node.prev
    while mode.get(start) == node_mode and not is_border(start):
        if start in node.all_input_nodes or _communicates(start) or memory.writes(start) & changed:
            break
        start = start.prev
    wanted = {user for part in parts for user in part.users} - own
    wait = node.next
    while mode.get(wait) == node_mode and wait not in wanted and not is_border(wait):
        wait = wait.next
    at, useful = start.next, False
    while at is not wait:
        useful = useful or (at not in own and _computes(at))
        at = at.next
    if useful:
        mode.update(dict.fromkeys(_place_start_and_wait(graph, node, start, wait), node_mode))


def _hoist(graph: fx.Graph) -> None:
    """Start small boxings when the program begins, if they follow from inputs alone.

    Only plain functions may lead from the inputs to them."""
    nodes = list(graph.nodes)
    memory, own = AliasSets(graph), AliasSets(graph, views=False)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    candidates = [
        n
        for n in nodes
        if _splittable(n) and not differentiable(_results(n)[0]) and n.meta.get("region") is None
    ]
    if not placeholders or len({n.meta.get("stage") for n in nodes if n.op.startswith("call")}) > 1:
        return  # the stages of a pipeline begin on their own
    last, placed, casts = (
        placeholders[-1],
        set(placeholders),
        any(n.target is autocast for n in nodes),
    )
    for node in candidates:
        wanted = {user for part in _results(node) for user in part.users}
        chain = ancestors(node)
        if (
            chain is None
            or not wanted
            or not memory.fixed(*chain)
            or not own.fixed(*_results(node))
        ):
            continue
        if any(_nbytes(n) > SMALL for n in (*node.all_input_nodes, *_results(node))):
            continue
        if any(n.meta.get("region") is not None for n in chain) or (
            casts and any(_floats(n) for n in (*chain, node))
        ):
            continue
        for n in chain:
            if n not in placed:
                last.append(n)
                last = n
                placed.add(n)
        wait = next(n for n in graph.nodes if n in wanted)
        while (
            wait.meta.get("region") is not None
            and wait.prev.meta.get("region") == wait.meta["region"]
        ):
            wait = wait.prev
        last, _ = _place_start_and_wait(graph, node, last, wait)
        placed.add(last)


def ancestors(node: fx.Node) -> list[fx.Node] | None:
    """Return the nodes that lead to a node, in order, or None if they cannot run earlier.

    They cannot if one of them has an effect, communicates, has a gradient, or is a step of this
    package."""
    visited: dict[fx.Node, None] = {}
    todo = list(node.all_input_nodes)
    while todo:
        at = todo.pop()
        if at in visited:
            continue
        if at.meta.get("effect") or isinstance(at.target, ProgramCall) or differentiable(at):
            return None
        if at.op not in ("placeholder", "get_attr"):
            todo.extend(at.all_input_nodes)
        visited[at] = None
    return [n for n in node.graph.nodes if n in visited]


def _nbytes(node: fx.Node) -> int:
    val = node.meta.get("val")
    return sum(
        v.nbytes for v in (val if isinstance(val, tuple) else (val,)) if isinstance(v, torch.Tensor)
    )


def _floats(node: fx.Node) -> bool:
    val = node.meta.get("val")
    found: Iterable[object] = val if isinstance(val, tuple) else (val,)
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in found)
