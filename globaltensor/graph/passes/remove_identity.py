"""Calls that give back what they were given: helpers of ours that say something about a global
tensor and nothing about its parts."""

from __future__ import annotations

import torch
from torch import fx

from ..program.nodes import ProgramCall
from .alias_analysis import operands, replace

__all__ = ["remove_identities"]


def remove_identities(graph: fx.Graph) -> None:
    """Remove calls of functions of ours whose result is their operand itself. Torch's own stay:
    what is contiguous here may not be so at run time."""
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or node.meta.get("effect")
            or isinstance(node.target, ProgramCall)
        ):
            continue
        if not str(getattr(node.target, "__module__", "")).startswith(__name__.partition(".")[0]):
            continue
        same = next((n for n in operands(node) if n.meta["val"] is node.meta.get("val")), None)
        if same is not None and isinstance(same.meta["val"], torch.Tensor):
            replace(node, same)
