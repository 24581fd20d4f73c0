"""The step time of a plan in words: one figure where cost, bound and prediction agree.

The HTML page calls it for its cards. The report shows the same figures.
"""

from __future__ import annotations

from .formatting import part, seconds
from .plan import Plan

__all__ = ["cost_cards", "cost_terms", "term_name"]

#: The terms of a plan's cost, and the words for them.
_TERMS = {
    "moving": "communication",
    "updating": "optimizer",
    "computing and moving": "computing and communication",
}


def term_name(key: str) -> str:
    """Return the word for a term of the cost.

    >>> term_name("moving"), term_name("computing")
    ('communication', 'computing')
    """
    return _TERMS.get(key, key)


def cost_terms(plan: Plan) -> list[tuple[str, float]]:
    """List (name, seconds) of the terms of the cost, without what is hidden.

    >>> plan = Plan("generic", (2,), 2.0, 2.0, 2.0, 0, None, True, (), (), ())
    >>> cost_terms(plan)
    []
    """
    return [
        (term_name(name), x) for name, x in plan.cost_breakdown.items() if x and name != "hidden"
    ]


def cost_cards(plan: Plan) -> list[tuple[str, str, str]]:
    """List (name, figure, sentence) of the cost, its bound and the predicted step time.

    Figures that are shown as the same text share one entry.

    >>> plan = Plan("generic", (2,), 2e-3, 2e-3, 2e-3, 0, None, True, (), (), ())
    >>> cost_cards(plan)
    [('step time', '2 ms', 'proven minimal')]
    >>> import dataclasses
    >>> [card[:2] for card in cost_cards(dataclasses.replace(plan, bound=1e-3))]
    [('step time', '2 ms'), ('lower bound', '1 ms')]
    """
    cost, bound = seconds(plan.cost), seconds(plan.bound)
    predicted = seconds(plan.seconds) if plan.seconds else cost
    if predicted == cost:
        first = [("step time", cost, _optimality(plan) or "predicted; the search minimised it")]
    else:
        first = [
            (
                "cost",
                cost,
                f"the sum of all prices, which the search minimised{_clause(_optimality(plan))}",
            ),
            ("predicted step time", predicted, "simulated, with communication that overlaps"),
        ]
    if bound == cost:
        return first
    return [*first, ("lower bound", bound, "no plan in the search space costs less")]


def _clause(text: str) -> str:
    return f"; {text}" if text else ""


def _optimality(plan: Plan) -> str:
    """Return in a few words what is proven, if the cost and the bound are shown as the same."""
    if plan.optimal:
        return "proven minimal"
    if seconds(plan.cost) != seconds(plan.bound):
        return ""
    if plan.lost:
        return "minimal among the plans that the search could price"
    return f"at most {part(plan.gap)} above the minimum"
