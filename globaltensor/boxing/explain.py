"""`explain_boxing`: the boxing between two specs in words and as a drawing, for users."""

from __future__ import annotations

from ..sharding.spec import Spec
from .log import describe
from .moves import show_bytes
from .planner import BoxingPlan, plan_boxing

__all__ = ["BoxingExplanation", "explain_boxing"]


class BoxingExplanation(str):
    """A text that describes a boxing route. Notebooks show it as a drawing.

    ``plan`` is the route itself.
    """

    __slots__ = ("plan",)
    plan: BoxingPlan

    def svg(self) -> str:
        """Return the route as SVG text: each layout, and an arrow with its costs for each move.

        It is 396 px wide, and follows the page's light or dark colours.
        """
        from .boxing_svg import boxing_svg

        return boxing_svg(self.plan)

    def _repr_html_(self) -> str:
        return f'<div class="gt-layout" style="overflow-x:auto">{self.svg()}</div>'

    def __reduce__(self) -> tuple[object, ...]:
        # A plan holds compiled programs, which do not leave the process.
        return str, (str(self),)


def explain_boxing(a: object, b: object) -> BoxingExplanation:
    """Describe the moves that box ``a`` into ``b``, one a line.

    Each of ``a`` and ``b`` is a spec, or a tensor that has one. The text has traffic per rank and
    estimated time. In a notebook it is shown as a drawing, which ``.svg()`` returns. Raises
    BoxingError where shape or dtype differ, TypeError for something without a spec.
    """
    route = plan_boxing(_spec(a), _spec(b))
    head = f"{describe(route.src)} -> {describe(route.dst)}"
    foot = f"total  {show_bytes(route.bytes)} a rank  {route.seconds * 1e3:.3g} ms"
    text = BoxingExplanation(
        "\n".join(
            (
                head,
                *(f"  {move}" for move in route.moves),
                f"  {foot}" if route.moves else "  nothing moves",
            )
        )
    )
    text.plan = route
    return text


def _spec(value: object) -> Spec:
    found = value if isinstance(value, Spec) else getattr(value, "spec", None)
    if not isinstance(found, Spec):
        raise TypeError(f"explain_boxing takes specs or global tensors, not {type(value).__name__}")
    return found
