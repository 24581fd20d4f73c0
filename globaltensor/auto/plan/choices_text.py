"""The text of a plan's choices other than layouts.

These are stages, micro-batches, schedule, recomputation and ZeRO. The report and the HTML page call
it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ...boxing.moves import show_bytes
from .formatting import folded, pattern
from .plan import Plan

__all__ = [
    "arrangement_text",
    "choice_rows",
    "choice_text",
    "module_names",
    "stage_modules",
    "stages",
]


def stages(plan: Plan) -> list[tuple[str, ...]]:
    """List the rows of a table of the pipeline stages, below a row of titles.

    The list is empty for a plan without stages.
    """
    records = plan.choices.get("stages") or ()
    if not (len(records) > 1 and all(isinstance(s, Mapping) for s in records)):
        return []
    rows: list[tuple[str, ...]] = [
        ("stage", "lane", "ranks", "mesh", "holds", "recomputed", "memory a rank")
    ]
    for i, s in enumerate(records):
        first, end = s.get("ranks", (0, 0))
        again = s.get("recompute") or ()
        memory = show_bytes(s["memory"]) if "memory" in s else ""
        rows.append(
            (
                str(i),
                str(s.get("lane", i)),
                f"{first}-{end - 1}",
                choice_text(s.get("mesh"), "x"),
                module_names(stage_modules(s)),
                module_names(again) or "nothing",
                memory,
            )
        )
    return rows


def stage_modules(stage: Mapping[str, Any]) -> list[str]:
    """List the modules of a stage, without those inside other modules of the list.

    >>> stage_modules({"modules": ["0.up", "0", "1.up", ""], "segments": ["1"]})
    ['0', '1.up']
    """
    names = [name for name in stage.get("modules") or stage.get("segments") or () if name]
    listed = set(names)

    def inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:n]) in listed for n in range(1, len(parts)))

    return [name for name in dict.fromkeys(names) if not inside(name)]


def arrangement_text(plan: Plan) -> str:
    """Return the arrangement of the devices in words.

    >>> arrangement_text(Plan("generic", (2, 4), 2.0, 1.5, 2.0, 0, None, True, (), (), ()))
    'a mesh of 2 x 4'
    """
    if len(stages(plan)) <= 2:
        return f"a mesh of {_shape_text(plan.mesh)}" if len(plan.mesh) > 1 else "one axis"
    records = plan.choices["stages"]
    mesh, count = records[0].get("mesh", plan.mesh), len(records)
    groups = len({s.get("lane", k) for k, s in enumerate(records)})
    size = math.prod(mesh)
    each = f"{size} device{'s' * (size != 1)} each" + (
        f" (a mesh of {_shape_text(mesh)})" if len(mesh) > 1 else ""
    )
    if groups == count:
        return f"{count} pipeline stages of {each}"
    return f"{count} pipeline stages on {groups} group{'s' * (groups != 1)} of {each}"


def _shape_text(mesh: Sequence[int]) -> str:
    return " x ".join(map(str, mesh))


def choice_rows(plan: Plan) -> list[tuple[str, str]]:
    """List (name, choice) of all choices except stages."""
    choices = dict(plan.choices)
    if stages(plan):
        choices["stages"] = len(choices["stages"])
    rows = []
    for name, value in choices.items():
        if name == "mesh" or (name == "stages" and not isinstance(value, int)):
            continue  # one stage is no choice, and the headline has the mesh
        if name == "reshard_after_forward":
            rows.append(("gathered parameters", "freed after each use, gathered again in backward"))
            continue
        text = (
            _zero(value)
            if name == "zero" and isinstance(value, Mapping)
            else module_names(value)
            if name == "recompute"
            else choice_text(value)
        )
        if text:
            rows.append((str(name).replace("_", " "), text))
    return rows


def _zero(shared: Mapping[str, Any]) -> str:
    """Return the sharded parameters in words; those with the same sharding are grouped."""
    groups: dict[str, list[str]] = defaultdict(list)
    for path, how in shared.items():
        groups[choice_text(how)].append(path)
    return "; ".join(f"{module_names(paths)} ({how})" for how, paths in groups.items())


def module_names(names: Any) -> str:
    """Join the names of modules, with consecutive layers folded: ``token, blocks.{0-3}``."""
    if not isinstance(names, Sequence) or isinstance(names, str):
        return choice_text(names)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in filter(None, dict.fromkeys(map(str, names))):
        groups[pattern(name)].append(name)
    # Numbers and no star, because other stages have more of these names.
    return choice_text([folded(alike, Counter()) for alike in groups.values()])


def choice_text(value: Any, between: str = ", ") -> str:
    """Return a choice as one line.

    >>> choice_text({"stage": 3, "shares": ["S(0)", "B"]}), choice_text(None)
    ('stage 3, shares S(0), B', '')
    >>> choice_text(0.123456), choice_text(range(20))
    ('0.1235', '0, 1, 2, 3, ... 19 (20)')
    """
    if isinstance(value, Mapping):
        return between.join(f"{k} {choice_text(v)}" for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        texts = [choice_text(v) for v in value]
        return (
            between.join(texts)
            if len(texts) <= 8
            else f"{between.join(texts[:4])}, ... {texts[-1]} ({len(texts)})"
        )
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
