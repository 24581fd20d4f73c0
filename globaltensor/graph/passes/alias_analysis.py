"""Analyses of a program for the passes.

They answer which nodes read and write which memory, where gradients are on, and how far a node may
move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..._base import torch_private
from ...boxing import plan_boxing
from ...sharding.spec import Spec
from ..program.nodes import BoxingCall, autocast, backward, set_grad_enabled
from .subgraph import mutated_operands, operands

__all__ = [
    "AliasSets",
    "costs",
    "differentiable",
    "is_border",
    "is_boxing",
    "modes",
    "mutated_operands",
    "operands",
    "plain",
    "replace",
]


def is_boxing(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, BoxingCall)


def plain(*specs: Spec) -> bool:
    """Return True if boxing between the specs is linear.

    Partial maxima, minima and norms are not linear. Tensors that are stored in another layout than
    shown do not count as linear."""
    return all(
        s.shown is s and all(e.kind != "partial" or e.reduce == "sum" for e in s.layout)
        for s in specs
    )


def differentiable(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.requires_grad


def costs(routes: Sequence[tuple[Spec, Spec]], both: bool) -> float:
    """Return the seconds of boxings, including those of their gradients if ``both``."""
    there = sum(plan_boxing(a, b).seconds for a, b in routes)
    return there + (
        sum(plan_boxing(b.dual(), a.dual()).seconds for a, b in routes) if both else 0.0
    )


def is_border(node: fx.Node) -> bool:
    """Return True if no node may move across this one: it changes a mode or runs backward."""
    return node.target in (set_grad_enabled, autocast, backward) or node.op in (
        "placeholder",
        "output",
    )


def modes(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return a number for each node, equal for nodes that may move past each other.

    Two nodes have the same number if nothing between them changes what they would do. Such changes
    are a mode, a backward pass, another stage or another region."""
    mode_of, number = {}, 0
    last: Any = None
    for node in graph.nodes:
        where = node.meta.get("stage"), node.meta.get("region")
        if (is_border(node) and node.op != "placeholder") or (
            last is not None and node.op not in ("placeholder", "get_attr") and where != last
        ):
            number += 1
        if node.op not in ("placeholder", "get_attr"):
            last = where
        mode_of[node] = number
    return mode_of


class AliasSets:
    """The sets of nodes that may share memory.

    Nodes share memory if their fake tensors do. With ``views``, a boxing's result may also share
    memory with its operand."""

    def __init__(self, graph: fx.Graph, views: bool = True) -> None:
        self._parent: dict[Any, Any] = {}
        for node in graph.nodes if views else ():
            if is_boxing(node) and node.target.alias:
                self._join(self._key(node), self._key(node.args[0]))  # a slice is a view
        self.written = {self.of(w) for node in graph.nodes for w in mutated_operands(node)}

    def _key(self, node: fx.Node) -> Any:
        val = node.meta.get("val")
        return torch_private.storage_key(val) if isinstance(val, torch.Tensor) else node

    def _join(self, a: Any, b: Any) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[a] = b

    def _root(self, key: Any) -> Any:
        while key in self._parent:
            key = self._parent[key]
        return key

    def of(self, node: fx.Node) -> Any:
        """Return a key that is equal for nodes that may share memory."""
        return self._root(self._key(node))

    def writes(self, node: fx.Node) -> set[Any]:
        return {self.of(w) for w in mutated_operands(node)}

    def fixed(self, *nodes: fx.Node) -> bool:
        """Return True if no node ever writes into the memory of these nodes."""
        return not any(self.of(n) in self.written for n in nodes)


def replace(node: fx.Node, by: fx.Node) -> None:
    """Replace all uses of ``node`` by ``by``, and erase ``node``."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
