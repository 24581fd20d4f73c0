"""`explain_boxing`: the boxing between two specs in words, for users."""

from __future__ import annotations

from ..sharding.spec import Spec
from .log import describe
from .moves import show_bytes
from .planner import plan_boxing

__all__ = ["explain_boxing"]


def explain_boxing(a: object, b: object) -> str:
    """Describe the moves that box ``a`` into ``b``, one a line.

    Each of ``a`` and ``b`` is a spec, or a tensor that has one. The text has traffic per rank and
    estimated time. Raises BoxingError where shape or dtype differ, TypeError for something without
    a spec.
    """
    route = plan_boxing(_spec(a), _spec(b))
    head = f"{describe(route.src)} -> {describe(route.dst)}"
    foot = f"total  {show_bytes(route.bytes)} a rank  {route.seconds * 1e3:.3g} ms"
    return "\n".join(
        (
            head,
            *(f"  {move}" for move in route.moves),
            f"  {foot}" if route.moves else "  nothing moves",
        )
    )


def _spec(value: object) -> Spec:
    found = value if isinstance(value, Spec) else getattr(value, "spec", None)
    if not isinstance(found, Spec):
        raise TypeError(f"explain_boxing takes specs or global tensors, not {type(value).__name__}")
    return found
