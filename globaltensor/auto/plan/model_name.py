"""The name of the model that a plan is for, which its report and its page show.

`flow.auto.plan` and the searches of graphs and of `parallelize` call it.
"""

from __future__ import annotations

import dataclasses

from ...graph.graph import Graph
from .assumptions import assumptions
from .plan import Plan

__all__ = ["named_after"]


def named_after(plan: Plan, model: object, optimizer_state_ratio: float = 2.0) -> Plan:
    """Return the plan with the name of the model's class, and with what the search has assumed.

    The name of a graph is that of its only module, or that of its own class if it has several.

    >>> import torch
    >>> plan = Plan("generic", (2,), 2.0, 1.5, 2.0, 0, None, True, (), (), ())
    >>> named_after(plan, torch.nn.Linear(2, 2)).model
    'Linear'
    """
    modules = list(model._modules.values()) if isinstance(model, Graph) else []
    named = modules[0] if len(modules) == 1 else model
    own = isinstance(model, Graph) or not plan.training  # a graph has its loss and its optimizer
    assumed = "" if own else assumptions(optimizer_state_ratio)
    return dataclasses.replace(plan, model=type(named).__name__, assumed=assumed)
