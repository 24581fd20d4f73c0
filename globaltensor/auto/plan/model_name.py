"""The model, loss and optimizer of a plan, which its report and its page show.

`flow.auto.plan` and the searches of graphs and of `parallelize` call it.
"""

from __future__ import annotations

import dataclasses

from ...graph.graph import Graph
from .plan import Plan

__all__ = ["named_after"]


def named_after(plan: Plan, model: object, optimizer_state_ratio: float = 2.0) -> Plan:
    """Return the plan with the name of the model's class, and with what the search has assumed.

    The name of a graph is that of its only module, or that of its own class if it has several.

    >>> import torch
    >>> plan = Plan("generic", (2,), 2.0, 1.5, 2.0, 0, None, True, (), (), ())
    >>> named = named_after(plan, torch.nn.Linear(2, 2))
    >>> named.model
    'Linear'
    >>> named.assumed
    'backward from every output of the model, no loss after it; Adam or another optimizer with 2 bytes of state a byte of parameter'
    """  # noqa: E501
    modules = list(model._modules.values()) if isinstance(model, Graph) else []
    named = modules[0] if len(modules) == 1 else model
    own = isinstance(model, Graph) or not plan.training  # a graph has its loss and its optimizer
    assumed = "" if own else f"{_LOSS}; {_optimizer(optimizer_state_ratio)}"
    return dataclasses.replace(plan, model=type(named).__name__, assumed=assumed)


_LOSS = "backward from every output of the model, no loss after it"


def _optimizer(ratio: float) -> str:
    """Return in words which optimizers have so much state.

    >>> _optimizer(0.0)
    'SGD or another optimizer with 0 bytes of state a byte of parameter'
    """
    known = {0.0: "SGD or another", 1.0: "SGD with momentum or another", 2.0: "Adam or another"}
    return f"{known.get(ratio, 'an')} optimizer with {ratio:g} bytes of state a byte of parameter"
