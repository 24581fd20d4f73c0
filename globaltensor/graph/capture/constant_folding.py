"""Values that follow from the code alone.

A mask made of ``torch.ones`` and ``triu`` is not data, so build() may ask whether the mask is
causal. The recorders call this module when a function needs values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..._base import torch_private
from ..._base.pytree import tensors_in
from ..program.nodes import ProgramCall

__all__ = ["NotConstant", "evaluated", "nodes_in"]


class NotConstant(Exception):
    """A sign that a value depends on an input, a state, a random number or another rank."""


def evaluated(
    graph: fx.Graph, constants: dict[str, Any], func: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call ``func`` on real tensors now, with nodes among its arguments replaced by their values.

    Raises NotConstant if a value is not constant."""
    wanted = [n for n in nodes_in([args, kwargs]) if isinstance(n, fx.Node)]
    needed = _needed(graph, wanted)
    with torch_private.real_tensors(), torch.no_grad():
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node in needed:
                values[node] = _run(node, values, constants)
        return func(*fx.map_arg(args, values.__getitem__), **fx.map_arg(kwargs, values.__getitem__))


def nodes_in(value: Any) -> list[Any]:
    """Return the nodes in a pytree of arguments."""
    found: list[Any] = []
    fx.map_arg(value, lambda n: found.append(n))
    return found


def _run(node: fx.Node, values: dict[fx.Node, Any], constants: dict[str, Any]) -> Any:
    if node.op == "get_attr":
        return constants[node.target]  # type: ignore[index]
    args, kwargs = (
        fx.map_arg(node.args, values.__getitem__),
        fx.map_arg(node.kwargs, values.__getitem__),
    )
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _needed(graph: fx.Graph, wanted: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that ``wanted`` depend on, including those that write into their memory.

    Raises NotConstant if such a node is not constant."""
    writers = [(n, _written_storages(n)) for n in graph.nodes if n.meta.get("writes")]
    dependencies: set[fx.Node] = set()
    memories: set[int] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node in dependencies:
            continue
        if (
            node.op == "placeholder"
            or isinstance(node.target, ProgramCall)
            or node.meta.get("random")
        ):
            raise NotConstant
        dependencies.add(node)
        todo += node.all_input_nodes
        new = {
            torch_private.storage_key(t) for t in tensors_in(node.meta.get("val"), [])
        } - memories
        memories |= new
        todo += [w for w, into in writers if into & new]
    return dependencies


def _written_storages(node: fx.Node) -> set[int]:
    """Return the storages that a node writes into."""
    given = [
        t for n in nodes_in([node.args, node.kwargs]) for t in tensors_in(n.meta.get("val"), [])
    ]
    return {torch_private.storage_key(given[i]) for i in node.meta["writes"] if i < len(given)}
