"""The report of a plan for a terminal.

`Plan.report` calls it. The report has price and proof, memory, layouts of parameters, changes of
layout, and the cost of other choices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

from ...boxing.moves import show_bytes
from ..solver import proven
from .choices_text import arrangement_text, choice_rows, stages
from .cost_text import cost_terms
from .formatting import folded, part, pattern, patterns, seconds, table
from .plan import Alternative, LayoutChange, PlacedTensor, Plan, PlannedCall
from .search_text import left_out

__all__ = [
    "folded_changes",
    "headline",
    "label",
    "losses",
    "not_priced",
    "proof",
    "report",
    "summary",
    "why_gradients_are_summed",
]

_MAX_ROWS: Final = 12  # the maximum number of rows of a table in a report
#: The alternatives that `flow.auto.plan` prices.
_NAMED_PLANS: Final = ("data parallel", "tensor parallel", "fully sharded (ZeRO-3)")


def summary(plan: Plan) -> str:
    """Return the head of the report: model and cluster, cost, bound, memory."""
    return "\n".join(_head(plan))


def report(plan: Plan, verbose: bool = False, saved: str | None = None) -> str:
    """Return the report of a plan. See `Plan.report`. ``saved`` is the file that has the plan."""
    parts = [
        _head(plan),
        _alternatives(plan),
        _parameters(plan),
        _changes(plan),
        _calls(plan),
        _choices(plan),
        _left_out(plan),
        _search(plan) if verbose else [],
        _summary(plan, saved),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def proof(plan: Plan) -> str:
    """Return in words what is proven about the cost.

    >>> proof(Plan("generic", (2,), 2.0, 1.5, 2.0, 0, None, True, (), (), ()))
    'gap 25 %: no plan costs less than the bound; a plan that costs less than this one may exist'
    """
    if plan.optimal:
        return "optimal: no plan in the space of the search costs less"
    if proven(plan.cost, plan.bound):
        return (
            "open: no plan in the search costs less, but errors have excluded other plans from "
            "the search, see below"
        )
    return (
        f"gap {part(plan.gap)}: no plan costs less than the bound; a plan that costs less than "
        "this one may exist"
    )


# --------------------------------------------------------------------------------------------- head


def headline(plan: Plan) -> str:
    """Return the headline: the cluster, its mesh, and the number of calls of the plan.

    >>> headline(Plan("generic", (2, 4), 2.0, 1.5, 2.0, 0, None, True, (), (), ()))
    'plan for 8 devices of generic, a mesh of 2 x 4, training, 0 calls'
    """
    devices = (
        max([math.prod(plan.mesh), *(s["ranks"][1] for s in plan.choices["stages"])])
        if len(stages(plan)) > 2
        else math.prod(plan.mesh)
    )
    kind = "training" if plan.training else "forward only"
    return (
        f"plan for {devices} device{'s' * (devices != 1)} of {plan.cluster}, "
        f"{arrangement_text(plan)}, {kind}, {len(plan.calls)} call{'s' * (len(plan.calls) != 1)}"
    )


def _head(plan: Plan) -> list[str]:
    rows = [("cost", f"{seconds(plan.cost)} a step, {proof(plan)}")]
    if plan.cost_breakdown:
        rows.append(("", _cost_text(plan)))
    rows.append(("bound", f"{seconds(plan.bound)} a step"))
    if plan.seconds:
        rows.append(("step time", f"{seconds(plan.seconds)} predicted, overlap included"))
    rows.append(("memory", _memory(plan)))
    if plan.memory_breakdown:
        rows.append(
            (
                "",
                ", ".join(
                    f"{name} {show_bytes(n)}"
                    for name, n in plan.memory_breakdown.items()
                    if n and name != "peak"
                ),
            )
        )
    if plan.source:
        first, *more = f"of {plan.cluster}: {plan.source}".split(". ")
        rows += [("figures", first), *(("", text) for text in more)]
    if plan.assumed:
        rows.append(("assumes", plan.assumed))
    rows += [("lost", text) for text in losses(plan)]
    return [headline(plan), *table(rows)]


def losses(plan: Plan) -> list[str]:
    """List the parts of the search space that were lost to errors, one line each.

    >>> from globaltensor.auto.plan.plan import Lost
    >>> lost = Lost("linear", "KeyError: 'k' (_ops/rules/matmul.py:9)", 6, 2)
    >>> print(*losses(Plan("generic", (2,), 1.0, 1.0, 1.0, 0, None, True, (), (), (), lost=(lost,))))
    6 layouts of the operands of linear (2 calls): its rule failed with KeyError: 'k' (_ops/rules/matmul.py:9)
    """  # noqa: E501
    lines = []
    for x in plan.lost:
        calls = f"{x.calls} call{'s' * (x.calls != 1)}"
        what = (
            f"{x.ways} layout{'s' * (x.ways != 1)} of the operands of {x.function} ({calls})"
            if x.ways
            else f"the work of {x.function} ({calls})"
        )
        lines.append(f"{what}: its rule failed with {x.error}")
    return lines


def _cost_text(plan: Plan) -> str:
    """Return the terms of the cost in words."""
    parts = [f"{name} {seconds(x)}" for name, x in cost_terms(plan)]
    if plan.cost_breakdown.get("hidden"):
        parts.append(f"less {seconds(plan.cost_breakdown['hidden'])} hidden behind computing")
    return ("of all stages together: " if len(stages(plan)) > 2 else "") + (
        ", ".join(parts) or "nothing to do"
    )


def _memory(plan: Plan) -> str:
    used = f"{show_bytes(plan.memory)} a rank at its peak"
    if plan.limit is None:
        return f"{used}, no limit set"
    return (
        f"{used}, {part(plan.memory / plan.limit) if plan.limit else 'all'} of the limit of "
        f"{show_bytes(plan.limit)}"
    )


# ------------------------------------------------------------------------------------- alternatives


def _alternatives(plan: Plan) -> list[str]:
    if not plan.alternatives:
        return []
    ordered = sorted(plan.alternatives.items(), key=lambda item: item[1].cost)
    rows = [("this plan", seconds(plan.cost), "", show_bytes(plan.memory), "")]
    rows += [
        (
            name,
            seconds(a.cost),
            against(plan, a),
            show_bytes(a.memory) if a.memory else "",
            _note(a),
        )
        for name, a in ordered
    ]
    return [
        "alternatives: the best plan of each kind at the same prices, compared with this plan",
        *table(rows, right=(1, 2, 3)),
        *([f"  {text}"] if (text := not_priced(plan)) else []),
    ]


def not_priced(plan: Plan) -> str:
    """Return the named plans that the search has not priced, why, and how to price them.

    >>> not_priced(Plan("generic", (2,), 2.0, 1.5, 2.0, 0, None, True, (), (), ()))[:26]
    'not priced: data parallel,'
    """
    missing = [name for name in _NAMED_PLANS if name not in plan.alternatives]
    if not missing:
        return ""
    return (
        f"not priced: {', '.join(missing)}. The search of graphs and of parallelize prices "
        "data parallel only; flow.auto.plan(model_or_graph, inputs) prices all"
    )


def against(plan: Plan, a: Alternative) -> str:
    """Return in words how much more an alternative costs than the plan."""
    if not plan.cost or a.cost == float("inf"):
        return ""
    more = a.cost / plan.cost - 1
    return "the same" if abs(more) < 5e-4 else f"{'+' if more > 0 else ''}{part(more)}"


def _note(a: Alternative) -> str:
    return a.why if a.fits or not a.why or math.isinf(a.cost) else f"does not fit: {a.why}"


# --------------------------------------------------------------------------------------- parameters


def _parameters(plan: Plan) -> list[str]:
    parameters = [g for g in plan.placed if g.kind == "parameter"]
    rest = [g for g in plan.placed if g.kind != "parameter"]
    where = "a rank" if not stages(plan) else "a rank of each stage, together"
    head = (
        f"parameters and their layouts ({len(parameters)}, "
        f"{show_bytes(sum(g.bytes for g in parameters))} {where})"
    )
    return [
        *([head, *_layout_table(parameters)] if parameters else []),
        *(["inputs and buffers", *_layout_table(rest)] if rest else []),
    ]


def _layout_table(given: Sequence[PlacedTensor]) -> list[str]:
    names = patterns(g.name for g in given)
    groups: dict[Hashable, list[PlacedTensor]] = defaultdict(list)
    for g in given:
        groups[pattern(g.name), g.shape, g.dtype, g.layout].append(g)
    rows = []
    for alike in groups.values():
        g, several = alike[0], len(alike) > 1
        held = f"{show_bytes(g.bytes)} a rank" + (" each" if several else "")
        rows.append(
            (
                folded([a.name for a in alike], names),
                f"{len(alike)} x" if several else "",
                str(list(g.shape)),
                g.dtype,
                " ".join(g.layout),
                held,
            )
        )
    return table(rows, right=(1,))


# --------------------------------------------------------------------- changes of layout, and calls


def label(plan: Plan) -> Mapping[str, str]:
    """Map the name of each call, which is also that of its result, to ``module function``.

    People know the call by this name.
    """
    return {c.name: f"{c.module} {c.function}".strip() for c in plan.calls}


def folded_changes(plan: Plan) -> list[tuple[list[LayoutChange], str, str]]:
    """List (equal changes, the value that changes, the call that takes it), costliest first."""
    names = label(plan)
    groups: dict[Hashable, list[LayoutChange]] = defaultdict(list)
    for c in plan.changes:
        who = pattern(names.get(c.value, c.value)), pattern(names.get(c.first, c.first))
        groups[
            (
                *who,
                c.src,
                c.dst,
                c.bytes,
                c.forward_collectives,
                c.backward_collectives,
                round(c.forward, 12),
                round(c.backward, 12),
            )
        ].append(c)
    made = patterns(names.get(c.value, c.value) for c in plan.changes)
    taken = patterns(names.get(c.first, c.first) for c in plan.changes)
    rows = []
    for alike in groups.values():
        values = list(dict.fromkeys(names.get(c.value, c.value) for c in alike))
        takers = list(dict.fromkeys(names.get(c.first, c.first) for c in alike))
        rows.append((alike, folded(values, made), folded(takers, taken)))
    return sorted(rows, key=lambda row: -sum(c.forward + c.backward for c in row[0]))


def _changes(plan: Plan) -> list[str]:
    if not plan.changes:
        return ["no tensor changes its layout"]
    rows: list[tuple[Any, ...]] = [
        ("", "tensor", "layout", "forward", "gradient", "bytes", "total", "used by")
    ]
    every = folded_changes(plan)
    for alike, value, taker in every[:_MAX_ROWS]:
        c = alike[0]
        how = f"{' '.join(c.src)} -> {' '.join(c.dst)}" if c.src != c.dst else " ".join(c.src)
        forward_collectives, backward_collectives = (
            c.forward_collectives if c.forward else "",
            c.backward_collectives if c.backward else "",
        )
        group_total = seconds(sum(a.forward + a.backward for a in alike))
        rows.append(
            (
                f"{len(alike)} x" if len(alike) > 1 else "",
                value,
                how,
                forward_collectives,
                backward_collectives,
                show_bytes(c.bytes),
                group_total,
                taker,
            )
        )
    total = sum(c.forward + c.backward for c in plan.changes)
    return [
        f"most expensive layout changes ({len(plan.changes)}, {seconds(total)} in total)",
        *table(rows, right=(0, 5, 6)),
        *_omitted_rows_line(len(every)),
        *([f"  {text}"] if (text := why_gradients_are_summed(plan)) else []),
    ]


def why_gradients_are_summed(plan: Plan) -> str:
    """Return why gradients of calls that each rank computes in full are summed, if there are any.

    >>> why_gradients_are_summed(Plan("generic", (2,), 2.0, 1.5, 2.0, 0, None, True, (), (), ()))
    ''
    """
    full = {c.name for c in plan.calls if c.share >= 1}
    if not any(c.backward and c.src == c.dst and full.issuperset(c.takers) for c in plan.changes):
        return ""
    return (
        "the gradient of a replicated tensor is a partial sum, so it is summed also where every "
        "rank computes the complete call (backward from a replicated loss starts on one rank, "
        "with zeros on the others)"
    )


def _calls(plan: Plan) -> list[str]:
    groups: dict[Hashable, list[PlannedCall]] = defaultdict(list)
    for c in plan.calls:
        groups[pattern(c.module), c.function, c.wanted, c.results, c.shapes].append(c)
    modules = patterns(c.module for c in plan.calls)
    every = sorted(groups.values(), key=lambda alike: -sum(map(_time, alike)))
    every = [alike for alike in every if sum(map(_time, alike))]
    rows: list[tuple[Any, ...]] = [("", "call", "total", "share", "inputs", "outputs")]
    for alike in every[:_MAX_ROWS]:
        c = alike[0]
        where = folded(list(dict.fromkeys(a.module for a in alike)), modules)
        takes, gives = (
            ", ".join(" ".join(x) for x in layouts) for layouts in (c.wanted, c.results)
        )
        share = "all" if c.share >= 1 else f"1/{1 / c.share:.3g}"
        rows.append(
            (
                f"{len(alike)} x" if len(alike) > 1 else "",
                f"{where} {c.function}".strip(),
                seconds(sum(map(_time, alike))),
                share,
                takes,
                gives,
            )
        )
    return (
        ["most expensive calls", *table(rows, right=(0, 2, 3)), *_omitted_rows_line(len(every))]
        if every
        else []
    )


def _time(c: PlannedCall) -> float:
    return c.forward + c.backward + c.moving


def _omitted_rows_line(n: int) -> list[str]:
    return [f"  and {n - _MAX_ROWS} more kinds, cheaper ones"] if n > _MAX_ROWS else []


# ------------------------------------------------------------------------ other choices, the search


def _choices(plan: Plan) -> list[str]:
    rows, each = choice_rows(plan), stages(plan)
    return (
        ["other choices", *table(rows), *(["stages", *table(each)] if each else [])]
        if rows or each
        else []
    )


def _left_out(plan: Plan) -> list[str]:
    """List what the search did not look at, and why."""
    facts = left_out(plan)
    return _wrapped("not searched: ", facts) if facts else []


def _search(plan: Plan) -> list[str]:
    """List the times of the search, the size of its problem, and the log of its solver."""
    times = {
        name.removesuffix("_seconds").replace("_", " "): x
        for name, x in plan.search.items()
        if name.endswith("_seconds") and isinstance(x, (int, float))
    }
    facts = [f"{name} {seconds(x)}" for name, x in times.items()]
    if isinstance(plan.search.get("nodes"), int):
        facts.append(f"{plan.search['nodes']} nodes")
    log = plan.search.get("log")
    if isinstance(log, Mapping):
        facts += [
            f"{str(name).replace('_', ' ')} {value}"
            for name, value in log.items()
            if isinstance(value, (int, float, str))
        ]
    return _wrapped("search: ", facts) if facts else []


def _summary(plan: Plan, saved: str | None) -> list[str]:
    """Return the end of the report: cost, memory, layouts, and how to apply the plan."""
    cost = f"{seconds(plan.cost)} a step"
    data = plan.alternatives.get("data parallel")
    if data is not None and not data.fits:
        cost += (
            "; data parallel is not possible"
            if math.isinf(data.cost)
            else "; data parallel does not fit"
        )
    elif data is not None and plan.cost and data.cost / plan.cost >= 1.005:
        cost += f", {data.cost / plan.cost:.3g} times as fast as data parallel"
    file = saved or "plan.json"
    load = f'plan = flow.auto.load_plan("{file}")'
    rows = [
        ("cost", cost),
        ("memory", _memory(plan)),
        ("layouts", _layouts(plan)),
        ("apply", f"{load}; model = flow.parallelize(model, placement, plan)"),
        ("", "in a graph: self.config.use_auto_plan(plan)"),
    ]
    if not saved:
        rows.append(("", f'plan.save("{file}") writes the file, as --save {file} does'))
    return ["in short", *table(rows)]


def _layouts(plan: Plan) -> str:
    """Return in words how many parameters are split, and how many are replicated."""
    layouts = [g.layout for g in plan.placed if g.kind == "parameter"]
    if not layouts:
        return "no parameters"
    replicated = sum(all(x == "B" for x in layout) for layout in layouts)
    split = len(layouts) - replicated
    if not split:
        return f"all {replicated} parameters replicated"
    text = f"{split} of {len(layouts)} parameters split"
    return text if split == len(layouts) else f"{text}, {replicated} replicated"


def _wrapped(head: str, facts: Iterable[str]) -> list[str]:
    lines, line = [], head
    for i, fact in enumerate(facts):
        if len(line) + len(fact) > 150:
            lines.append(line.rstrip())
            line = "  "
        line += ("" if i == 0 or line == "  " else ", ") + fact
    return [*lines, line]
