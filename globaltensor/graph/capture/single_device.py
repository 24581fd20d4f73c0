"""The captured graph on one device: the meaning of `build` without ranks.

A program must give the same results. `Graph.single_device_module` calls this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..._base import overridable, torch_private
from ..._ops.methods import gather_global_value
from ..._tensor.global_tensor import GlobalTensor
from ...errors import GraphError
from ..program.nodes import autocast, set_grad_enabled

__all__ = ["SAME", "on_one_device"]

SAME = ("to_global", "global_to_global")


def on_one_device(logical: fx.Graph, constants: Mapping[str, Any], start: Any) -> fx.GraphModule:
    """Return the logical graph as a module of plain tensors.

    The module's arguments are the tensors among build()'s inputs, in order. Its result is the tuple
    of tensors that build() returned. Parameters and buffers are attributes under their own names,
    and hold copies of the full values. ``start`` states whether gradients and autocast are on
    before the module runs. Collective. Raises GraphError for ops without a meaning on one device.
    """
    root: dict[str, Any] = dict(constants)
    copies: dict[int, torch.Tensor] = {}
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    modes = start
    for node in logical.nodes:
        if node.op == "placeholder" and "path" in node.meta:
            path = node.meta["path"]
            root[path] = _full_copy(node.meta["val"], copies)
            made[node] = graph.get_attr(path)
        elif node.op in ("call_function", "call_method"):
            modes = _switch(graph, modes, node.meta.get("modes", modes))
            made[node] = _translate_node(graph, node, made)
        elif node.op == "output":
            _switch(graph, modes, start)
            graph.output(fx.map_arg(node.args[0], made.__getitem__))
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    return fx.GraphModule(root, graph, "OneDevice")


def _full_copy(t: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a copy of a state's full value. Tied states share one copy."""
    full_copy = copies.get(id(t))
    if full_copy is None:
        if torch_private.is_fake(t._stored if isinstance(t, GlobalTensor) else t):
            raise GraphError(
                "a tensor inside build() was made where the graph could not see it: it has no "
                "counterpart on one device"
            )
        value = (
            gather_global_value(t).clone() if isinstance(t, GlobalTensor) else t.detach().clone()
        )
        full_copy = copies[id(t)] = (
            torch.nn.Parameter(value, t.requires_grad)
            if isinstance(t, torch.nn.Parameter)
            else value.requires_grad_(t.requires_grad)
        )
    return full_copy


def _switch(graph: fx.Graph, now: Any, wanted: Any) -> Any:
    if now[0] != wanted[0]:
        graph.call_function(set_grad_enabled, (wanted[0],))
    if now[1] != wanted[1]:
        graph.call_function(autocast, tuple(wanted[1]))
    return wanted


def _translate_node(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    target, where = node.target, node.meta.get("where", "")
    if target in SAME:
        return made[node.args[0]]  # type: ignore[index]
    if target == "to_local":
        spec = node.args[0].meta["val"]._spec  # type: ignore[union-attr]
        if all(e.is_broadcast for e in spec.layout):
            return made[node.args[0]]  # type: ignore[index]
        raise GraphError(
            f"to_local() of {spec!r} is this rank's local tensor: it has no counterpart on one "
            f"device\n  {where}"
        )
    if target in overridable.ALONE:
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("placement", "sbp")}
        return graph.call_function(
            overridable.ALONE[target],
            fx.map_arg(node.args, made.__getitem__),
            fx.map_arg(kwargs, made.__getitem__),
        )
    return graph.node_copy(node, made.__getitem__)
