"""Parts of a program: consecutive nodes made a graph of their own, and put back as one call.

The passes `recompute` and `compile` use them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..._base import torch_private
from ..._base.pytree import object_tensors

__all__ = [
    "Subgraph",
    "constants_first",
    "extract",
    "mutated_operands",
    "operands",
    "put_back",
    "storages",
]


class Subgraph:
    """A run of consecutive nodes, as a graph.

    ``needs`` are its inputs: nodes of the program from outside. ``gives`` are its results, in
    order."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = list(nodes)
        inside = set(self.nodes)
        self.needs = list(
            dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes if a not in inside)
        )
        self.gives = [n for n in self.nodes if any(u not in inside for u in n.users)]

    def graph(self) -> fx.Graph:
        """Return a copy of the nodes as a graph.

        The graph has one placeholder for each of ``needs``, and returns the tuple of ``gives``."""
        made, copies = fx.Graph(), {}
        for node in self.needs:
            copies[node] = made.placeholder(node.name)
            copies[node].meta["val"] = node.meta.get("val")
        for node in self.nodes:
            copies[node] = made.node_copy(node, copies.__getitem__)
        made.output(tuple(copies[n] for n in self.gives))
        return made


def extract(
    graph: fx.Graph, wanted: Callable[[fx.Node], Any]
) -> Iterator[tuple[Any, list[fx.Node]]]:
    """Yield (key, nodes) for runs of consecutive nodes with the same key.

    ``wanted`` returns the key of a node; nodes with None are left out. Constants of the program are
    moved before all runs."""
    constants_first(graph)
    kind: Any = None
    nodes: list[fx.Node] = []
    for node in list(graph.nodes):
        of = wanted(node) if node.op.startswith("call_") else None
        if of != kind and nodes:
            yield kind, nodes
            nodes = []
        kind = of
        if of is not None:
            nodes.append(node)
    if nodes:
        yield kind, nodes


def constants_first(graph: fx.Graph) -> None:
    """Move the constants of a program before its calls."""
    first = next((n for n in graph.nodes if n.op not in ("placeholder", "get_attr")), None)
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        if first is not None:
            first.prepend(node)


def put_back(
    graph: fx.Graph,
    part: Subgraph,
    name: str,
    needs: Sequence[fx.Node] | None = None,
    gives: Sequence[fx.Node] | None = None,
) -> fx.Node:
    """Replace the nodes of a part by one call of the module ``name``.

    The module accepts ``needs`` and returns the tuple of ``gives``."""
    gives = part.gives if gives is None else gives
    inside = set(part.nodes)
    with graph.inserting_after(part.nodes[-1]):
        call = graph.call_module(name, tuple(part.needs if needs is None else needs))
    last = part.nodes[-1].meta
    call.meta.update(
        val=tuple(n.meta.get("val") for n in gives),
        effect=True,
        calls=1,
        region=None,
        stage=last.get("stage"),
        module=last.get("module"),
    )
    at = call
    for i, node in enumerate(gives):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (call, i))
        at.meta.update(node.meta, calls=0, effect=False, region=None, writes=())
        node.replace_all_uses_with(at, delete_user_cb=lambda user: user not in inside)
    for node in reversed(part.nodes):
        graph.erase_node(node)
    return call


# ------------------------------------------------------------------------------------------- memory


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of the tensors that a node is called with, in the order of its arguments."""
    operand_nodes: list[fx.Node] = []
    fx.node.map_arg(
        (node.args, node.kwargs),
        lambda n: operand_nodes.append(n) if object_tensors(n.meta.get("val"), []) else None,
    )
    return operand_nodes


#: Calls that write their running statistics without changing the tensors' versions. Listed are the
#: positions and names of the statistics, and of the argument that turns the writing on.
_STATISTICS: Mapping[str, tuple[tuple[int, str], tuple[int, str], tuple[int, str]]] = {
    "batch_norm": ((1, "running_mean"), (2, "running_var"), (5, "training")),
    "instance_norm": ((1, "running_mean"), (2, "running_var"), (5, "use_input_stats")),
}
_AS_KERNELS: Mapping[Any, tuple[int, int, int]] = {
    torch.batch_norm: (3, 4, 5),
    torch.instance_norm: (3, 4, 5),
}


def mutated_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose memory a node writes to."""
    operand_nodes = operands(node)
    mutated = [operand_nodes[i] for i in node.meta.get("writes", ()) if i < len(operand_nodes)]
    entry = _STATISTICS.get(getattr(node.target, "__name__", ""))
    if entry is not None and node.op == "call_function":
        at = _AS_KERNELS.get(node.target) or tuple(i for i, _ in entry)
        mean, var, when = (
            node.args[i] if i < len(node.args) else node.kwargs.get(name)
            for i, (_, name) in zip(at, entry, strict=True)
        )
        if when or when is None:  # instance_norm's default is True; batch_norm's call always says
            mutated += [n for n in (mean, var) if isinstance(n, fx.Node)]
    return mutated


def storages(node: fx.Node) -> set[int]:
    """Return the keys of the storages of a node's results."""
    return {torch_private.storage_key(t) for t in object_tensors(node.meta.get("val"), [])}
