"""Plain values from outside that build() uses as replicated: the same on every rank.

During capture no values are compared. `DryWorld` notes each plain tensor that is used with global
ones, and `replicated_uses` finds the values from outside that it follows from. `Graph` compares
these at its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from ..._tensor.plain_operands import compare_replicated, comparison_due, record_replicated
from ...distributed.simulate import SimulatedWorld
from ...distributed.world import world

__all__ = ["NotedUse", "ReplicatedUse", "compare_uses", "replicated_uses"]


class NotedUse(NamedTuple):
    """A plain tensor, often fake, that build() uses with global ones on ``ranks``."""

    tensor: torch.Tensor
    ranks: tuple[int, ...]
    purpose: str


class ReplicatedUse(NamedTuple):
    """A value from outside that must be the same on ``ranks``, and its use in build().

    ``value`` is a tensor, an array, a random number generator, or the position of an input."""

    value: torch.Tensor | np.ndarray[Any, Any] | torch.Generator | int
    ranks: tuple[int, ...]
    purpose: str


def replicated_uses(
    noted: Iterable[NotedUse],
    nodes: Mapping[int, fx.Node],
    inputs: Sequence[torch.Tensor | None],
    states: Sequence[torch.Tensor | None],
    constants: Mapping[str, Any],
) -> list[ReplicatedUse]:
    """Return the values from outside that noted tensors follow from, each once.

    ``nodes`` holds the node of each tensor, by its position in ``noted``. ``inputs`` and
    ``states`` are the values of the program's inputs; None for local tensors of global ones. The
    search ends at nodes that communicate: their results are the same on every rank or not, whatever
    the rank's own values are."""
    uses: list[ReplicatedUse] = []
    seen: set[tuple[fx.Node, tuple[int, ...]]] = set()
    for i, (_, ranks, purpose) in enumerate(noted):
        todo = [nodes[i]] if i in nodes else []
        while todo:
            node = todo.pop()
            if (node, ranks) in seen:
                continue
            seen.add((node, ranks))
            if node.op == "placeholder":
                position, number = node.meta.get("state"), node.meta.get("input")
                if position is not None and (state := states[position]) is not None:
                    uses.append(ReplicatedUse(state, ranks, purpose))
                elif number is not None and inputs[number] is not None:
                    uses.append(ReplicatedUse(number, ranks, purpose))
            elif node.op == "get_attr":
                value = constants.get(str(node.target))
                if isinstance(value, (np.ndarray, torch.Generator)):
                    uses.append(ReplicatedUse(value, ranks, purpose))
            elif "box" not in node.meta and not node.meta.get("meets"):
                todo += reversed(node.all_input_nodes)
    return uses


def compare_uses(
    uses: Sequence[ReplicatedUse], inputs: Sequence[torch.Tensor], name: str, program: bytes
) -> None:
    """Compare the values with those of the other ranks, or record them (`check_replicated`).

    ``inputs`` are the call's inputs that the graph has not compared yet, or none. ``name`` is the
    graph's name, and ``program`` the digest of the program that uses the values. Collective. Raises
    DivergenceError on every rank."""
    this_world = world()
    if not uses or not this_world.compares:
        return
    compare = compare_replicated if comparison_due((name, program)) else record_replicated
    for value, ranks, purpose in uses:
        if this_world.rank not in ranks:
            continue
        if isinstance(value, torch.Tensor):
            compared = value
        elif isinstance(value, np.ndarray):
            compared = torch.as_tensor(value)
        elif isinstance(value, torch.Generator):
            if isinstance(this_world, SimulatedWorld):  # simulated ranks share generators
                continue
            compared = value.get_state()
        elif inputs:
            compared = inputs[value]
        else:
            continue
        compare(compared, ranks, f"{purpose} (captured by {name})")
