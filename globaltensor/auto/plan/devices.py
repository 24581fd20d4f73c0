"""The devices of a plan, and what each of them holds of a tensor, as data and SVG for the page.

The HTML page calls it. The SVG drawings are those of ``flow.sharding_svg``. The data of a device
comes from the same specs, so the two cannot differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ...cluster import Cluster
from ...cluster.presets import PRESETS
from ...errors import SbpError
from ...graph.sharding_plan import entry
from ...sharding.holdings_table import MAX_RANKS
from ...sharding.placement import Placement
from ...sharding.sharding_svg import drawn_dims, layout_svg
from ...sharding.spec import Spec
from ...sharding.svg_canvas import rank_class
from .choices_text import module_names, stage_modules, stages
from .formatting import folded, pattern, patterns
from .plan import Layout, PlacedTensor, Plan

__all__ = ["device_data", "held_slices"]

_MAX_DRAWINGS: Final = 60  # the maximum number of distinct layouts that a page draws
#: An element type for results of calls, of which a plan has no dtype. Drawings do not show it.
_ANY_DTYPE: Final = torch.float32


@dataclass(frozen=True)
class DeviceGroup:
    """The devices that run one or several pipeline stages; all devices without stages."""

    title: str
    modules: str
    placement: Placement
    calls: frozenset[str]


def device_data(plan: Plan) -> dict[str, Any]:
    """Return the devices, the tensors that the page offers, and their drawings.

    ``drawings`` maps a key of (shape, layout, dtype, group) to a drawing. ``tensors`` are those of
    the list, parameters first, the largest first. ``call_groups`` has the group of each call.
    """
    cluster = _preset(plan)
    groups = _groups(plan, cluster.device if cluster else "cpu")
    group_of_call = [_group_of(groups, call.name) for call in plan.calls]
    drawings: dict[str, Any] = {}
    styles: set[str] = set()

    def draw(shape: Sequence[int], layout: Layout, dtype: str, group: int, title: str) -> None:
        key = drawing_key(shape, layout, dtype, group)
        if key in drawings or len(drawings) >= _MAX_DRAWINGS:
            return
        drawing = _drawing(groups[group], shape, layout, dtype, title, bool(cluster))
        if drawing is not None:
            styles.add(drawing.pop("style"))
            drawings[key] = drawing

    tensors = _tensors(plan, groups)
    for t in tensors:
        draw(t["shape"], tuple(t["layout"]), t["dtype"], t["group"], t["name"])
    for call, group in zip(plan.calls, group_of_call, strict=True):
        for shape, layout in zip(call.shapes, call.results, strict=True):
            text = f"{list(shape)} {' '.join(layout)}"
            draw(shape, layout, "", group, text)
    return {
        "groups": [
            {
                "title": g.title,
                "modules": g.modules,
                "mesh": list(g.placement.shape),
                "ranks": list(g.placement.flat),
            }
            for g in groups
        ],
        "node_size": _node_size(cluster, groups),
        "tensors": tensors,
        "first": _first_tensors(tensors),
        "call_groups": group_of_call if len(groups) > 1 else [],
        "drawings": drawings,
        "style": "".join(sorted(styles)),
        "max_ranks": MAX_RANKS,
    }


def drawing_key(shape: Sequence[int], layout: Layout, dtype: str, group: int) -> str:
    """Return the key of a drawing.

    >>> drawing_key((4, 6), ("S(0)", "B"), "float32", 0)
    '4,6|S(0) B|float32|0'
    """
    return f"{','.join(map(str, shape))}|{' '.join(layout)}|{dtype}|{group}"


def held_slices(spec: Spec, rank: int) -> str:
    """Return in words what a rank holds of a tensor.

    >>> from globaltensor.sharding.sbp import broadcast, partial_sum, split
    >>> where = Placement("cpu", [[0, 1], [2, 3]])
    >>> held_slices(Spec.make((5, 4), torch.float32, where, (split(0), broadcast)), 3)
    'rows 3:5'
    >>> held_slices(Spec.make((5, 4), torch.float32, where, (split(0), partial_sum)), 0)
    'a summand of rows 0:3'
    """
    offsets, lengths = spec.box(rank)
    parts = []
    for dim in sorted({e.dim for e in spec.layout if e.is_split}):
        name = _dim_name(dim, spec.ndim)
        begin, length = offsets[dim], lengths[dim]
        parts.append(f"{name} {begin}:{begin + length}" if length else f"no {name}")
    held = ", ".join(parts) or "the full tensor"
    kinds = list(dict.fromkeys(e.reduce for e in spec.layout if e.is_partial))
    names = {"sum": "a summand", "max": "a partial maximum", "min": "a partial minimum"}
    return " of ".join([*(names.get(kind, f"a partial {kind}") for kind in kinds), held])


def _dim_name(dim: int, ndim: int) -> str:
    if ndim == 1:
        return "elements"
    return ("rows", "columns")[dim] if ndim == 2 else f"dim {dim}"


# ------------------------------------------------------------------------------------------ devices


def _preset(plan: Plan) -> Cluster | None:
    """Return the preset of this name. Other clusters are known by their name only."""
    return Cluster.preset(plan.cluster) if plan.cluster in PRESETS else None


def _node_size(cluster: Cluster | None, groups: Sequence[DeviceGroup]) -> int:
    """Return the devices of a node if the plan uses several nodes, otherwise 0."""
    devices = 1 + max(max(g.placement.flat) for g in groups)
    return cluster.node_size if cluster and 0 < cluster.node_size < devices else 0


def _groups(plan: Plan, device: str) -> list[DeviceGroup]:
    """List the groups of devices; each has one or several of the stages."""
    if not stages(plan):
        ranks = np.arange(math.prod(plan.mesh)).reshape(plan.mesh)
        return [DeviceGroup("", "", Placement(device, ranks.tolist()), frozenset())]
    by_ranks: dict[tuple[int, int], list[tuple[int, Mapping[str, Any]]]] = defaultdict(list)
    for number, stage in enumerate(plan.choices["stages"]):
        begin, end = stage.get("ranks", (0, math.prod(plan.mesh)))
        by_ranks[begin, end].append((number, stage))
    groups = []
    for (begin, end), members in sorted(by_ranks.items()):
        numbers = ", ".join(str(number) for number, _ in members)
        mesh = members[0][1].get("mesh") or [end - begin]
        names = [name for _, stage in members for name in stage_modules(stage)]
        groups.append(
            DeviceGroup(
                f"stage{'s' * (len(members) > 1)} {numbers}",
                module_names(names),
                Placement(device, np.arange(begin, end).reshape(mesh).tolist()),
                frozenset(name for _, stage in members for name in _calls_of(plan, stage)),
            )
        )
    return groups


def _calls_of(plan: Plan, stage: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the calls of a stage, from the first to the last one."""
    if bounds := stage.get("calls"):
        names = [call.name for call in plan.calls]
        yield from names[names.index(bounds[0]) : names.index(bounds[1]) + 1]
        return
    inside = stage_modules(stage)
    for call in plan.calls:
        if any(call.module == name or call.module.startswith(f"{name}.") for name in inside):
            yield call.name


def _group_of(groups: Sequence[DeviceGroup], call: str) -> int:
    return next((i for i, group in enumerate(groups) if call in group.calls), len(groups) - 1)


# ------------------------------------------------------------------------------------------ tensors


def _tensors(plan: Plan, groups: Sequence[DeviceGroup]) -> list[dict[str, Any]]:
    """List the parameters, inputs and buffers; repeated layers share one entry."""
    users: dict[str, list[int]] = defaultdict(list)
    for call in plan.calls:
        for operand in call.operands:
            users[operand].append(_group_of(groups, call.name))
    names = patterns(g.name for g in plan.placed)
    alike: dict[Hashable, list[PlacedTensor]] = defaultdict(list)
    for g in plan.placed:
        group = min(users[g.name], default=0)
        alike[pattern(g.name), g.kind, g.shape, g.dtype, g.layout, group].append(g)
    order = {"parameter": 0, "input": 1}
    tensors = []
    for (*_, group), members in alike.items():  # type: ignore[misc]
        g = members[0]
        tensors.append(
            {
                "name": folded([m.name for m in members], names),
                "names": [m.name for m in members],
                "kind": g.kind,
                "shape": g.shape,
                "dtype": g.dtype,
                "layout": g.layout,
                "group": group,
                "bytes": g.bytes,
                "note": " ".join(_notes(plan, g, groups, users)),
            }
        )
    return sorted(tensors, key=lambda t: (order.get(t["kind"], 2), -math.prod(t["shape"])))


def _notes(
    plan: Plan, g: PlacedTensor, groups: Sequence[DeviceGroup], users: Mapping[str, list[int]]
) -> Iterator[str]:
    """Yield sentences on what the drawing of a tensor does not show."""
    own, *others = sorted(set(users.get(g.name, ()))) or [0]
    if others:
        titles = ", ".join(groups[i].title for i in others)
        yield f"The drawing shows {groups[own].title}; {titles} also use the tensor."
    zero = plan.choices.get("zero")
    sharing = zero.get(g.name) if isinstance(zero, Mapping) else None
    if isinstance(sharing, Mapping):
        shares = " ".join(sharing.get("shares") or ())
        yield (
            f"ZeRO stage {sharing.get('stage')} stores it as {shares}; the drawing shows the "
            "layout that calls use."
            if sharing.get("stage") == 3
            else f"ZeRO stage {sharing.get('stage')} stores its optimizer state as {shares}."
        )


def _first_tensors(tensors: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the tensors that the page shows first: the largest parameter and the largest input."""
    first = [
        next((i for i, t in enumerate(tensors) if t["kind"] == kind), -1)
        for kind in ("parameter", "input")
    ]
    return [i for i in first if i >= 0] or list(range(min(1, len(tensors))))


def _drawing(
    group: DeviceGroup,
    shape: Sequence[int],
    layout: Layout,
    dtype: str,
    title: str,
    exact: bool,
) -> dict[str, Any] | None:
    """Return the drawing of a layout on a group of devices; None if the layout is not valid.

    ``exact``: the type of the devices is known, so that the drawing names it.
    """
    kind = getattr(torch, dtype, None) if dtype else _ANY_DTYPE
    try:
        spec = Spec.make(
            tuple(shape),
            kind if isinstance(kind, torch.dtype) else _ANY_DTYPE,
            group.placement,
            tuple(map(entry, layout)),
        )
    except (SbpError, ValueError):
        return None
    where = "" if exact else f"on devices {_ranks_text(group.placement)}"
    svg = layout_svg(spec, "" if dtype else title, where)
    head, style, rest = _without_style(svg)
    plain = spec.plain
    down, across, _ = drawn_dims(plain)
    return {
        "svg": head + rest,
        "style": style,
        "plane": [down, across],
        "shape": list(shape),
        "partial": any(e.is_partial for e in plain.layout),
        "cells": [
            [
                rank,
                rank_class(rank),
                held_slices(plain, rank),
                [list(part) for part in plain.box(rank)],
            ]
            for rank in group.placement.flat[:MAX_RANKS]
        ],
    }


def _ranks_text(placement: Placement) -> str:
    ranks = placement.flat
    return str(placement.ranks.tolist()) if len(ranks) <= 16 else f"{min(ranks)} to {max(ranks)}"


def _without_style(svg: str) -> tuple[str, str, str]:
    """Split an SVG into (before its style element, the style, after the element)."""
    head, _, rest = svg.partition("<style>")
    style, _, rest = rest.partition("</style>")
    return head, style, rest
