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
    stage_of: dict[fx.Node, int | None] = {}
    nodes = list(captured.program.nodes)
    plain_inputs = {
        node: not isinstance(t, GlobalTensor) for node, t in zip(nodes, inputs, strict=False)
    }
    plain = _plain_nodes(nodes, plain_inputs, memory)
    calls = _stages_of_calls(captured.logical, placements)
    for node in nodes:
        if node.op in _NO_CALL or node in plain:
            stage_of[node] = None
            continue
        own = calls.get(node.meta.get("call", -1), node.meta.get("stage"))
        if own is None:
            own = max(
                (s for a in node.all_input_nodes if (s := stage_of[a]) is not None), default=None
            )
        stage_of[node] = own
    for node in reversed(nodes):
        if stage_of[node] is None and node.meta.get("random") and node not in boxes:
            stage_of[node] = min(
                (s for u in node.users if (s := stage_of[u]) is not None), default=None
            )
    return stage_of


def _plain_nodes(
    nodes: Sequence[fx.Node], plain_inputs: dict[fx.Node, bool], memory: AliasSets
) -> set[fx.Node]:
    """Return the nodes that follow from constants and plain inputs alone.

    Their values are the same each time. ``plain_inputs`` states for each input whether it is
    plain."""
    plain_nodes: set[fx.Node] = set()
    tainted: set[Any] = set()  # memory that other nodes write to
    while True:
        before = len(tainted)
        plain_nodes.clear()
        for node in nodes:
            ours = plain_inputs.get(node, False) or node.op == "get_attr"
            if node.op in ("call_function", "call_method"):
                ours = (
                    not isinstance(node.target, ProgramCall)
                    and not node.meta.get("random")
                    and all(a in plain_nodes for a in node.all_input_nodes)
                )
                ours = ours and not any(
                    t.requires_grad for t in tensors_in(node.meta.get("val"), [])
                )
                # A node with a spec is a local tensor of a global tensor. It may be the placeholder
                # of a rank outside the placement.
                ours = ours and "spec" not in node.meta
            if ours and memory.of(node) not in tainted:
                plain_nodes.add(node)
            else:
                tainted |= memory.writes(node)
        if len(tainted) == before:
            return plain_nodes


def _stages_of_calls(logical: fx.Graph, placements: Sequence[Placement]) -> dict[int, int | None]:
    """Return the stage of each of the user's calls, by its number."""
    stage_of: dict[fx.Node, int | None] = {}
    floating: list[fx.Node] = []
    for node in logical.nodes:
        if node.op not in ("call_function", "call_method"):
            stage_of[node] = node.meta.get("starts")
            continue
        where = _placement(node)
        stage = node.meta.get("stage")
        if stage is None:
            stage = max(
                (
                    s
                    for a in node.all_input_nodes
                    if (s := a.meta.get("starts", stage_of[a])) is not None
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
        stage_of[node] = stage
        if stage is None and where is not None:
            floating.append(node)
    for node in reversed(floating):
        where = _placement(node)
        first = min((s for u in node.users if (s := stage_of.get(u)) is not None), default=None)
        candidates = [k for k, p in enumerate(placements) if p is where]
        # the latest possible stage before its users
        stage_of[node] = max(
            (k for k in candidates if first is not None and k <= first),
            default=candidates[0] if candidates else None,
        )
    return {node.meta["call"]: stage for node, stage in stage_of.items() if "call" in node.meta}


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
