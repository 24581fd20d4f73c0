"""Boxing: moving a tensor from one placement and sbp to any other.

Conversion, dispatch and graphs call it.
"""

from .autograd import box
from .explain import explain_boxing
from .log import BoxingRecord, ExchangeRecord, boxing_log, check, forbidden, no_boxing
from .moves import Move
from .planner import BoxingPlan, plan_boxing

__all__ = [
    "BoxingPlan",
    "BoxingRecord",
    "ExchangeRecord",
    "Move",
    "box",
    "boxing_log",
    "check",
    "explain_boxing",
    "forbidden",
    "no_boxing",
    "plan_boxing",
]
