"""Automatic parallelism: candidates, costs, the solver and its searches.

Users call ``flow.auto.plan(model, inputs, cluster)``.
"""

from .apply import graphs as _arrange  # (graphs whose config asks for a search)
from .api import cluster_of, plan
from .apply import modules as _carried  # (flow.parallelize with a plan)
from .calibrate.op_accuracy import calibrate
from .apply.eager import plan_of
from .plan.plan import Plan
from ..errors import PlanError

load_plan = Plan.load

__all__ = ["Plan", "PlanError", "calibrate", "cluster_of", "load_plan", "plan", "plan_of"]
