"""The assignment of a captured graph's ops to pipeline stages. `partition` calls it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from ..._base.pytree import tensors_in
from ..._tensor.global_tensor import GlobalTensor
from ...errors import GraphError
from ...sharding.placement import Placement
from ..capture.capture import CaptureResult
from ..passes.alias_analysis import AliasSets
from ..program.nodes import ProgramCall

__all__ = ["stages_of_nodes"]

_NO_CALL = ("placeholder", "get_attr", "output")


def stages_of_nodes(
    captured: CaptureResult,
    placements: Sequence[Placement],
    inputs: Sequence[torch.Tensor],
    memory: AliasSets,
    boxes: Collection[fx.Node],
) -> dict[fx.Node, int | None]:
    """Return the stage of each node of a rank's program.

    None means no stage: the node is computed wherever it is used. A node belongs to the stage of
    the user's call that it is part of (`_stages_of_calls`), else to the latest stage among its
    operands. A node that follows from plain tensors alone belongs to no stage. Random numbers are
    an exception: they are drawn once, in the first stage that uses them. ``boxes`` are the boxings
    between placements. Raises GraphError for a tensor on a placement without a stage.
    """
    found: dict[fx.Node, int | None] = {}
    nodes = list(captured.program.nodes)
    given = {node: not isinstance(t, GlobalTensor) for node, t in zip(nodes, inputs, strict=False)}
    plain = _plain(nodes, given, memory)
    calls = _stages_of_calls(captured.logical, placements)
    for node in nodes:
        if node.op in _NO_CALL or node in plain:
            found[node] = None
            continue
        own = calls.get(node.meta.get("call", -1), node.meta.get("stage"))
        if own is None:
            own = max(
                (s for a in node.all_input_nodes if (s := found[a]) is not None), default=None
            )
        found[node] = own
    for node in reversed(nodes):
        if found[node] is None and node.meta.get("random") and node not in boxes:
            found[node] = min((s for u in node.users if (s := found[u]) is not None), default=None)
    return found


def _plain(nodes: Sequence[fx.Node], given: dict[fx.Node, bool], memory: AliasSets) -> set[fx.Node]:
    """Return the nodes that follow from constants and plain inputs alone.

    Their values are the same each time. ``given`` states for each input whether it is plain."""
    found: set[fx.Node] = set()
    tainted: set[Any] = set()  # memory that other nodes write to
    while True:
        before = len(tainted)
        found.clear()
        for node in nodes:
            ours = given.get(node, False) or node.op == "get_attr"
            if node.op in ("call_function", "call_method"):
                ours = (
                    not isinstance(node.target, ProgramCall)
                    and not node.meta.get("random")
                    and all(a in found for a in node.all_input_nodes)
                )
                ours = ours and not any(
                    t.requires_grad for t in tensors_in(node.meta.get("val"), [])
                )
                # A node with a spec is a local tensor of a global tensor. It may be the placeholder
                # of a rank outside the placement.
                ours = ours and "spec" not in node.meta
            if ours and memory.of(node) not in tainted:
                found.add(node)
            else:
                tainted |= memory.writes(node)
        if len(tainted) == before:
            return found


def _stages_of_calls(logical: fx.Graph, placements: Sequence[Placement]) -> dict[int, int | None]:
    """Return the stage of each of the user's calls, by its number."""
    found: dict[fx.Node, int | None] = {}
    floating: list[fx.Node] = []
    for node in logical.nodes:
        if node.op not in ("call_function", "call_method"):
            found[node] = node.meta.get("starts")
            continue
        where = _placement(node)
        stage = node.meta.get("stage")
        if stage is None:
            stage = max(
                (
                    s
                    for a in node.all_input_nodes
                    if (s := a.meta.get("starts", found[a])) is not None
                ),
                default=None,
            )
            if stage is not None and where is not None and placements[stage] is not where:
                later = [k for k, p in enumerate(placements) if p is where]
                if not later:
                    raise GraphError(
                        f"{node.name} puts a tensor on {where!r}, but no stage of the pipeline is "
                        f"on that placement\n  {node.meta.get('where', '')}"
                    )
                stage = next((k for k in later if k >= stage), later[0])
        found[node] = stage
        if stage is None and where is not None:
            floating.append(node)
    for node in reversed(floating):
        where = _placement(node)
        first = min((s for u in node.users if (s := found.get(u)) is not None), default=None)
        here = [k for k, p in enumerate(placements) if p is where]
        # the latest possible stage before its users
        found[node] = max(
            (k for k in here if first is not None and k <= first), default=here[0] if here else None
        )
    return {node.meta["call"]: stage for node, stage in found.items() if "call" in node.meta}


def _placement(node: fx.Node) -> Placement | None:
    """Return the placement of the first global tensor that a call returns, or None."""
    return next(
        (
            t._spec.placement
            for t in tensors_in(node.meta.get("val"), [])
            if isinstance(t, GlobalTensor)
        ),
        None,
    )
