"""Remove calls that return their operand.

Such calls are helpers of this package that change a global tensor's annotations but not its local
tensor. `pass_manager` runs this pass."""

from __future__ import annotations

import torch
from torch import fx

from ..program.nodes import ProgramCall
from .alias_analysis import operands, replace

__all__ = ["remove_identities"]


def remove_identities(graph: fx.Graph) -> None:
    """Remove calls of this package's functions whose result is their operand itself.

    Torch's own calls stay: a tensor that is contiguous here may not be so at run time."""
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
