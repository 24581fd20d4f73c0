"""Write a plan as a single self-contained HTML page.

`Plan.save_html` calls it. This module writes the data, and the files in page/ draw it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, Final

from ...graph.pipeline.schedule import KINDS
from .choices_text import arrangement_text, choice_rows, choice_text, stages
from .cost_text import cost_cards, term_name
from .devices import device_data
from .formatting import seconds
from .plan import Plan
from .report import headline, losses, not_priced, proof, why_gradients_are_summed
from .search_text import choice_sentences, search_sentences

__all__ = ["data", "page"]

_SCRIPTS: Final = (
    "figures",
    "hints",
    "model",
    "devices",
    "tree",
    "about",
    "charts",
    "memory",
    "times",
    "tables",
    "main",
)


def page(plan: Plan, trace: Mapping[str, Any] | None = None) -> str:
    """Return the page as text.

    ``trace`` is a timeline in Chrome's format to show (`Timeline` objects return it). By default
    the page shows one call after the other, as the cost counts them.
    """
    here = files(__package__) / "page"
    style = (here / "page.css").read_text(encoding="utf-8")
    script = "\n".join((here / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    text = (here / "page.html").read_text(encoding="utf-8")
    # In a script element only "</" and "<!--" have a meaning in HTML. JSON allows this escape for a
    # "<".
    written = json.dumps(data(plan, trace), separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )
    contents = {"STYLE": style, "DATA": written, "SCRIPT": script}
    return "".join(
        contents[piece] if i % 2 else piece
        for i, piece in enumerate(re.split(r"/\*([A-Z]+)\*/", text))
    )


def data(plan: Plan, trace: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the data that the page draws."""
    record, line = dataclasses.asdict(plan), trace or plan.timeline
    record |= {"optimal": plan.optimal, "gap": plan.gap}
    record["alternatives"] = [
        {"name": name, **dataclasses.asdict(a), "cost": a.cost if math.isfinite(a.cost) else None}
        for name, a in sorted(plan.alternatives.items(), key=lambda item: item[1].cost)
    ]
    rest = [("prices", f"of {plan.cluster}: {plan.source}")] if plan.source else []
    rest += [("assumes", plan.assumed)] if plan.assumed else []
    rest += [("lost", text) for text in losses(plan)]
    rest += choice_rows(plan)
    internals = [
        (
            name.replace("_", " "),
            seconds(v) if name.endswith("_seconds") else choice_text(v),
        )
        for name, v in plan.search.items()
    ]
    for name in ("choices", "search", "timeline"):
        del record[name]
    how = "simulated" if line else "one operation after another, nothing overlapped"
    words = {
        "title": headline(plan),
        "proof": proof(plan),
        "cards": cost_cards(plan),
        "terms": {name: term_name(name) for name in plan.cost_breakdown},
        "not_priced": not_priced(plan),
        "summed": why_gradients_are_summed(plan),
        "chosen": choice_sentences(plan),
        "searched": search_sentences(plan),
        "rest": rest,
        "internals": internals,
        "stages": stages(plan),
        "timeline": how,
        "arrangement": arrangement_text(plan),
    }
    return {
        "plan": record,
        "trace": line or {"traceEvents": list(_events(plan))},
        "lanes": _lanes(plan),
        "devices": device_data(plan),
        "texts": words,
    }


def _lanes(plan: Plan) -> list[dict[str, Any]]:
    """Return the memory of a rank over the simulated step, for each lane of stages.

    ``steps`` are [(time in microseconds, bytes from then on)].
    """
    records = plan.choices.get("stages") or ()
    if not plan.timeline or not all(isinstance(s, Mapping) and "costs" in s for s in records):
        return []
    names = {
        e["tid"]: e["args"]["name"]
        for e in plan.timeline["traceEvents"]
        if e["name"] == "thread_name"
    }
    # A micro-batch's forward pass allocates activations. Its backward pass frees them, or the later
    # half of a backward pass that runs in two halves.
    spans = [e for e in plan.timeline["traceEvents"] if e["ph"] == "X" and "args" in e]
    last = KINDS["W"] if any(e["cat"] == KINDS["W"] for e in spans) else KINDS["B"]
    lanes = []
    for lane, name in sorted(names.items()):
        own = [s["costs"] for s in records if s["lane"] == lane]
        # the maximum temporary memory of a call may be needed at any time
        permanent_bytes = sum(c["kept"] for c in own) + max(
            (c["passing"] for c in own), default=0.0
        )
        events = []
        for e in spans:
            held = records[e["args"]["stage"]]["costs"]["activations"] if e["tid"] == lane else 0
            if held and e["cat"] == KINDS["F"]:
                events.append((e["ts"], held))
            elif held and e["cat"] == last:
                events.append((e["ts"] + e["dur"], -held))
        steps, level = [(0.0, permanent_bytes)], permanent_bytes
        # at the same moment memory is freed before it is allocated
        for moment, change in sorted((round(moment, 6), change) for moment, change in events):
            level += change
            steps.append((moment, level))
        lanes.append({"name": name, "steps": steps})
    return lanes


def _events(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield trace events of one call after the other, forward and then backward.

    A change of layout comes before the call that needs it.
    """
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "a rank"}}
    for lane, name in enumerate(("computing", "communication")):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": name}}
    first: dict[str, list[Any]] = {}
    for change in plan.changes:
        first.setdefault(change.first, []).append(change)
    now = 0.0

    def span(lane: int, name: str, kind: str, length: float) -> Iterator[dict[str, Any]]:
        nonlocal now
        if length > 0:
            yield {
                "ph": "X",
                "name": name,
                "pid": 0,
                "tid": lane,
                "ts": now * 1e6,
                "dur": length * 1e6,
                "cat": kind,
            }
            now += length

    both = 1 + plan.training
    for call in plan.calls:
        for c in first.get(call.name, ()):
            yield from span(1, f"{c.forward_collectives} {c.value}", "moving", c.forward)
        yield from span(0, f"{call.module} {call.function}".strip(), "forward", call.forward)
        yield from span(1, f"in {call.function}", "moving", call.moving / both)
    for c in first.get("output", ()):
        yield from span(1, f"{c.forward_collectives} {c.value}", "moving", c.forward)
    if plan.training:
        for call in reversed(plan.calls):
            yield from span(0, f"{call.module} {call.function}".strip(), "backward", call.backward)
            yield from span(1, f"in {call.function}", "moving", call.moving / both)
            for c in first.get(call.name, ()):
                yield from span(
                    1, f"{c.backward_collectives} gradient of {c.value}", "moving", c.backward
                )
        yield from span(0, "optimizer", "updating", plan.cost_breakdown.get("updating", 0.0))
