"""Boxing: moving a tensor from one placement and sbp to any other."""

from .autograd import box
from .explain import explain_boxing
from .log import Boxing, Exchange, boxing_log, check, forbidden, no_boxing
from .moves import Move
from .planner import Plan, plan

__all__ = ["Boxing", "Exchange", "Move", "Plan", "box", "boxing_log", "check", "explain_boxing", "forbidden", "no_boxing", "plan"]
