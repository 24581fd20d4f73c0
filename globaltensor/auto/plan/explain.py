"""Explain a part of a plan: its calls and tensors, its traffic, and the cost of other choices.

`Plan.explain` calls it.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final, TypeVar

from ...boxing.moves import show_bytes
from ...errors import PlanError
from ..intra_op.alternatives import moved
from .formatting import folded, pattern, patterns, seconds
from .plan import Layout, LayoutChange, OtherChoice, PlacedTensor, Plan, PlannedCall

__all__ = ["explain", "why"]

_WHOLE: Final = 3  # up to this many calls are listed one by one, more are grouped
T = TypeVar("T")


def explain(plan: Plan, path: str) -> str:
    """Explain the part of a plan at this path. See `Plan.explain`."""
    calls, placed = _find_matches(plan, path)
    if not calls and not placed:
        raise PlanError(_unknown(plan, path))
    names = {c.name for c in calls}
    concerned = [
        c
        for c in plan.changes
        if names & {*c.takers, c.value} or c.value in {g.name for g in placed}
    ]
    computing = sum(c.forward + c.backward for c in calls)
    moving = sum(c.forward + c.backward for c in concerned) + sum(c.moving for c in calls)
    parts = [
        f"{n} {what}{'s' * (n != 1)}"
        for n, what in ((len(calls), "call"), (len(placed), "tensor"))
        if n
    ]
    head = (
        f"{path}: {' and '.join(parts)}{' given' if placed else ''}; computing "
        f"{seconds(computing)}, communication {seconds(moving)} a step"
    )
    paragraphs = [
        _tensor_text(plan, alike)
        for alike in _group_alike(placed, lambda g: (pattern(g.name), g.shape, g.layout))
    ]
    paragraphs += [
        _call(plan, alike)
        for alike in _group_alike(
            calls, lambda c: (pattern(c.module), c.function, c.wanted, c.results, c.shapes)
        )
    ]
    return "\n\n".join([head, *paragraphs])


# ----------------------------------------------------------------------------------- find by a path


def _find_matches(plan: Plan, path: str) -> tuple[list[PlannedCall], list[PlacedTensor]]:
    """Find calls and given tensors by exact name, else by module, else by pattern."""
    exact = [c for c in plan.calls if c.name == path], [g for g in plan.placed if g.name == path]
    if any(exact):
        calls, given = exact
        return calls or [c for c in plan.calls if path in c.operands], given

    def under(name: str) -> bool:
        return name == path or name.startswith(path.rstrip(".") + ".")

    inside = [c for c in plan.calls if under(c.module)], [g for g in plan.placed if under(g.name)]
    if any(inside):
        return inside

    def fits(*names: str) -> bool:
        return any(
            fnmatchcase(name, path) or fnmatchcase(name, f"{path}.*") for name in names if name
        )

    matching = (
        [c for c in plan.calls if fits(c.name, c.module, f"{c.module}.{c.function}")],
        [g for g in plan.placed if fits(g.name)],
    )
    return matching if any(matching) else ([c for c in plan.calls if c.function == path], [])


def _unknown(plan: Plan, path: str) -> str:
    modules = {
        ".".join(c.module.split(".")[:n])
        for c in plan.calls
        for n in range(1, c.module.count(".") + 2)
    } - {""}
    names = sorted(modules | {c.name for c in plan.calls} | {g.name for g in plan.placed})
    near = (
        difflib.get_close_matches(path, names, 6, 0.5)
        or [n for n in names if path.split(".")[-1] in n][:6]
        or sorted(modules)[:6]
        or names[:6]
    )
    return (
        f"the plan has no module, parameter, call or tensor {path!r}; similar names: "
        f"{', '.join(near)}. Patterns such as blocks.*.up are accepted too"
    )


def _group_alike(things: Sequence[T], key: Callable[[T], Hashable]) -> Iterable[list[T]]:
    """Group equal things where there are many; otherwise return each alone."""
    if len(things) <= _WHOLE:
        return [[thing] for thing in things]
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for thing in things:
        groups[key(thing)].append(thing)
    return groups.values()


# ----------------------------------------------------------------------------- text of explanations


def _tensor_text(plan: Plan, alike: Sequence[PlacedTensor]) -> str:
    g = alike[0]
    name = folded([a.name for a in alike], patterns(a.name for a in plan.placed))
    several = f" ({len(alike)} alike)" if len(alike) > 1 else ""
    lines = [
        (
            f"{name}{several}  {g.kind} {g.dtype}{list(g.shape)}  {_layout_text(g.layout)}, "
            f"{show_bytes(g.bytes)} a rank"
        )
    ]
    lines += [
        f"    change  {text}" for text in _moves([c for c in plan.changes if c.value == g.name])
    ]
    return "\n".join([*lines, *why(plan, g.others, _layout_text(g.layout))])


def _call(plan: Plan, alike: Sequence[PlannedCall]) -> str:
    c = alike[0]
    several = (
        f" ({len(alike)} alike: "
        f"{', '.join(a.name for a in alike[:3])}{', ...' if len(alike) > 3 else ''})"
        if len(alike) > 1
        else ""
    )
    operands = ", ".join(
        f"{o} {_layout_text(w)}" for o, w in zip(c.operands, c.wanted, strict=True)
    )
    results = ", ".join(
        f"{list(shape)} {_layout_text(layout)}"
        for shape, layout in zip(c.shapes, c.results, strict=True)
    )
    place = "".join(
        f"  {word} {text}" for word, text in (("in", c.module), ("at", c.where)) if text
    )
    lines = [f"{c.name} = {c.function}({operands}) -> {results}{several}{place}", f"    {_work(c)}"]
    lines += [
        f"    before  {text}" for text in _moves([m for m in plan.changes if c.name in m.takers])
    ]
    lines += [
        f"    after   {text}" for text in _moves([m for m in plan.changes if m.value == c.name])
    ]
    return "\n".join([*lines, *why(plan, c.others, ", ".join(map(_layout_text, c.results)))])


def _work(c: PlannedCall) -> str:
    times = [
        f"{name} {seconds(x)}"
        for name, x in (
            ("forward", c.forward),
            ("backward", c.backward),
            ("its own communication", c.moving),
        )
        if x
    ]
    share = "all of it" if c.share >= 1 else f"1/{1 / c.share:.3g} of it"
    return (
        f"computes {share} on each rank: {', '.join(times)}"
        if times
        else "returns a view of its operand, computes nothing"
    )


def _moves(changes: Sequence[LayoutChange]) -> Iterable[str]:
    for c in changes:
        both = f" + {seconds(c.backward)}" if c.backward and c.forward else ""
        yield f"{moved(c)}: {seconds(c.forward or c.backward)}{both}"


def why(plan: Plan, others: Sequence[OtherChoice], chosen: str) -> list[str]:
    """List what other choices would cost, one line each.

    >>> plan = Plan("generic", (2,), 1.0, 1.0, 1.0, 900, 1000, True, (), (), ())
    >>> print("\\n".join(why(plan, [OtherChoice((), (("B",),), 2e-3, 0, "all_gather of x"), OtherChoice((), (("P",),), -1e-3, 200, "")], "S(0)")))
        why S(0)
          B instead  +2 ms: all_gather of x
          P instead  1 ms less, 200 B a rank more, which does not fit
    """  # noqa: E501
    if not others:
        alone = any(c.others for c in plan.calls) or any(g.others for g in plan.placed)
        return [
            f"    why {chosen}: "
            + (
                "nothing else is possible here"
                if alone
                else "other layouts have not been priced one by one in this plan"
            )
        ]
    ways = [_choice_text(o) for o in others]
    wide = max(map(len, ways))
    return [
        f"    why {chosen}",
        *(
            f"      {way:{wide}} instead  {_price(plan, o)}"
            for way, o in zip(ways, others, strict=True)
        ),
    ]


def _choice_text(other: OtherChoice) -> str:
    return ", ".join(map(_layout_text, other.gives))


def _price(plan: Plan, other: OtherChoice) -> str:
    grown = (
        f", {show_bytes(abs(other.memory))} a rank {'more' if other.memory > 0 else 'less'}"
        if other.memory
        else ""
    )
    over = plan.limit is not None and plan.memory + other.memory > plan.limit
    grown += ", which does not fit" if over else ""
    if other.extra < 0:
        return f"{seconds(-other.extra)} less{grown}" + (
            "" if over else ", as the rest stands: the search was not complete"
        )
    because = f": {other.because}" if other.because else ""
    return (f"+{seconds(other.extra)}" if other.extra else "same cost") + grown + because


def _layout_text(layout: Layout) -> str:
    return " ".join(layout)
