"""The choices of a plan and the work of its search, as sentences for people.

The HTML page calls it. The report has the same facts as tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..solver import proven
from .choices_text import arrangement_text, choice_text, module_names, stages
from .formatting import part, seconds
from .plan import Plan

__all__ = ["choice_sentences", "left_out", "search_sentences"]


def choice_sentences(plan: Plan) -> list[str]:
    """List what the search has chosen, one sentence each.

    >>> plan = Plan("generic", (2, 4), 2.0, 2.0, 2.0, 0, None, True, (), (), ())
    >>> choice_sentences(plan)
    ['The devices form a mesh of 2 x 4.']
    """
    return list(_choices(plan))


def _choices(plan: Plan) -> Iterator[str]:
    choices = plan.choices
    if stages(plan):
        yield f"The model runs in {arrangement_text(plan)}."
    else:
        yield f"The devices form {arrangement_text(plan)}."
    layouts = [g.layout for g in plan.placed if g.kind == "parameter"]
    if layouts:
        replicated = sum(all(entry == "B" for entry in layout) for layout in layouts)
        split = len(layouts) - replicated
        yield (
            f"Of {len(layouts)} parameters, {split} {_is_or_are(split)} split and {replicated} "
            f"{_is_or_are(replicated)} replicated."
        )
    micro_batches = choices.get("micro_batches")
    if isinstance(micro_batches, int) and micro_batches > 1:
        schedule = choices.get("schedule")
        yield f"A step runs {micro_batches} micro-batches" + (
            f" in the schedule {schedule}." if schedule else "."
        )
    if choices.get("recompute"):
        yield f"Backward recomputes {module_names(choices['recompute'])}, to save memory."
    if choices.get("reshard_after_forward"):
        yield (
            "Gathered parameters are freed after each use and gathered again in backward, to save "
            "memory."
        )
    zero = choices.get("zero")
    if isinstance(zero, Mapping) and zero:
        yield f"ZeRO shards {len(zero)} parameter{'s' * (len(zero) != 1)} or their optimizer state."


def _is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


def search_sentences(plan: Plan) -> list[str]:
    """List what the search did and what it has proven, one sentence each.

    >>> plan = Plan("generic", (2,), 2.0, 1.5, 2.0, 0, None, True, (), (), ())
    >>> print(*search_sentences(plan), sep="\\n")
    The search compared the layouts of 0 calls and 0 parameters and inputs.
    The minimum is not proven: a plan that costs up to 25 % less may exist.
    """
    spent = sum(
        x
        for name, x in plan.search.items()
        if name.endswith("_seconds") and isinstance(x, (int, float))
    )
    took = f" in {seconds(spent)}" if spent else ""
    calls = f"{len(plan.calls)} call{'s' * (len(plan.calls) != 1)}"
    sentences = [
        (
            f"The search compared the layouts of {calls} and {len(plan.placed)} parameters and "
            f"inputs{took}."
        )
    ]
    if plan.optimal:
        sentences.append("It has proven that no plan in its search space costs less.")
    elif proven(plan.cost, plan.bound):
        sentences.append(
            "No plan in the search costs less, but errors have excluded other plans from it."
        )
    else:
        sentences.append(
            f"The minimum is not proven: a plan that costs up to {part(plan.gap)} less may exist."
        )
    return sentences + [f"Not searched: {fact}." for fact in left_out(plan)]


def left_out(plan: Plan) -> list[str]:
    """List what the search did not look at, and why."""
    facts = [
        text
        for text in (plan.search.get("one_batch"), plan.search.get("left_out_ways"))
        if isinstance(text, str)
    ]
    facts += [
        f"micro-batches of {rows} rows were left out: {choice_text(why)}"
        for rows, why in (plan.search.get("left_out") or {}).items()
    ]
    return facts
