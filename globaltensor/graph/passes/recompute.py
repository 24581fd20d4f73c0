"""Recomputation: backward computes intermediate values of a region again instead of saving them.

The method is from Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", 2016.
Nodes with the same ``meta["region"]`` form a region. A region is a module with
``activation_checkpointing``, a call of ``torch.utils.checkpoint`` in the model's code, or a choice
of `memory_budget`. `lower` calls `fold`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...errors import GraphError
from ..program.nodes import RandomCall, backward
from .subgraph import Subgraph, extract, mutated_operands, put_back, storages

__all__ = ["Recomputed", "fold"]


class Recomputed(torch.nn.Module):
    """A module that runs ``body`` and saves only the inputs for backward.

    Backward runs ``body`` again with the same random numbers. All ranks run the same boxings again.

    ``copied``: the positions of inputs that this module or a later node writes to. The second run
    starts from copies of their former values. It writes to the copies, so running statistics and
    counters change once.
    """

    def __init__(self, body: fx.GraphModule, copied: Sequence[int], random: bool) -> None:
        super().__init__()
        self.body, self.copied, self.random = body, tuple(copied), random
        # If True, the second run does not stop at the last value that is needed. torch stops it by
        # an exception, which compiled code cannot raise.
        self.runs_modules = False

    def forward(self, *args: Any) -> Any:
        if not self.copied or not torch.is_grad_enabled():
            return self._checkpoint(self.body.forward, args)
        # Autograd would notice that the copied inputs have changed, so they bypass autograd.
        rest = [a for i, a in enumerate(args) if i not in self.copied]
        return self._checkpoint(self._replayable_body(args), rest)

    def _checkpoint(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        with set_checkpoint_early_stop(False) if self.runs_modules else contextlib.nullcontext():
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=self.random)

    def _replayable_body(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Return the function that runs the body for one call.

        Its first run uses the inputs themselves. Each later run uses copies of the former values of
        the inputs that are written to."""
        count = len(args)
        now = {i: args[i] for i in self.copied}
        saved_copies = {i: (a.detach().clone(), a.requires_grad) for i, a in now.items()}

        def run(*rest: Any) -> Any:
            # Autograd forbids writing to a leaf. So each copy is not a leaf, but part of a graph if
            # the input is.
            mutated_inputs = dict(now) or {
                i: a.detach().requires_grad_(needs).clone()
                for i, (a, needs) in saved_copies.items()
            }
            others = iter(rest)
            every = [
                mutated_inputs[i] if i in mutated_inputs else next(others) for i in range(count)
            ]
            now.clear()
            return self.body.forward(*every)

        return run

    def __repr__(self) -> str:
        return f"Recomputed({', '.join(f'input {i} as it was' for i in self.copied)}\n{self.body.code.strip()}\n)"  # noqa: E501


def fold(graph: fx.Graph, constants: dict[str, Any]) -> None:
    """Replace each region by one call of a module ``recomputed_<n>``, added to ``constants``.

    If there are other nodes between those of a region, each consecutive run of the region's nodes
    is recomputed separately. Raises GraphError for a region that cannot run twice. Such a region
    contains a backward pass, or writes to memory that it reads under several names."""
    runs = list(extract(graph, lambda node: node.meta.get("region")))
    if not runs:
        return
    writes = [
        (node, set().union(*map(storages, targets)))
        for node in graph.nodes
        if (targets := mutated_operands(node))
    ]
    order = {node: i for i, node in enumerate(graph.nodes)}
    for _, nodes in runs:
        part = Subgraph(nodes)
        if not part.gives and not any(n.meta.get("effect") for n in nodes):
            continue
        _check(part)
        copied = _inputs_to_copy(
            part,
            [w for node, w in writes if order[node] >= order[nodes[0]]],
            [w for node, w in writes if node in set(nodes)],
        )
        name = f"recomputed_{sum(key.startswith('recomputed_') for key in constants)}"
        body = fx.GraphModule(constants, part.graph(), name)
        constants[name] = Recomputed(body, copied, any(_random(n) for n in nodes))
        put_back(graph, part, name)
    graph.lint()


def _check(part: Subgraph) -> None:
    for node in part.nodes:
        if node.target is backward:
            raise GraphError(
                "a part that is recomputed calls backward() (in "
                f"{node.meta.get('module') or 'build()'}): the part cannot run again in the "
                "backward pass that it starts; remove activation_checkpointing from the module "
                "that calls backward(), or call backward() in build()"
            )


def _inputs_to_copy(
    part: Subgraph, later: Sequence[set[int]], own_writes: Sequence[set[int]]
) -> list[int]:
    """Return the positions of the inputs that this part or a later node writes to.

    ``later``: the memory that each of these nodes writes to. ``own_writes``: the same for the
    nodes of the part. Raises GraphError if two inputs share memory that the part writes to."""
    changed: set[int] = set().union(*later) if later else set()
    own_memory: set[int] = set().union(*own_writes) if own_writes else set()
    where = [storages(n) for n in part.needs]
    positions = [i for i, keys in enumerate(where) if keys & changed]
    for i in positions:
        twin = next(
            (j for j in range(len(where)) if j != i and where[j] & where[i] & own_memory), None
        )
        if twin is not None:
            raise GraphError(
                f"a part that is recomputed (in {part.nodes[0].meta.get('module') or 'build()'}) "
                f"writes to memory that it reads as {part.needs[i].name} and as "
                f"{part.needs[twin].name}: it cannot run twice; write out of place (x + y instead "
                f"of x += y), or clone one of them before"
            )
    return positions


def _random(node: fx.Node) -> bool:
    """Return True if a node may draw different random numbers when it runs again.

    Such a node has an effect although it writes to none of its operands."""
    if isinstance(node.target, RandomCall):
        return not node.target.repeats
    return bool(node.meta.get("effect") and not node.meta.get("writes"))
