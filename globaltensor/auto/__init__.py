"""Automatic parallelism: candidates, costs, the solver and its searches. ``flow.auto.plan(model, inputs, cluster)``."""

from . import arrange as _arrange  # (graphs whose config asks for a search)
from .api import cluster_of, plan
from . import carried as _carried  # (flow.parallelize with a plan)
from .calibration import calibrate
from .eager import plan_of
from .planned import Plan, PlanError

load_plan = Plan.load

__all__ = ["Plan", "PlanError", "calibrate", "cluster_of", "load_plan", "plan", "plan_of"]
