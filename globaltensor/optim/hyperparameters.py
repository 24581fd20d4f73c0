"""The numbers by which an optimizer steps, in a form that is the same on every rank.

The record of what a rank has run (optim/local_step.py) and the settings of a graph
(graph/rank_agreement.py) contain them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from .._base.argument_text import argument_text
from .._tensor.global_tensor import GlobalTensor

__all__ = ["as_numbers", "hyperparameter_tensors", "hyperparameters", "spelled"]


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of each group.

    They are the entries that the optimizer's class defines. A program may keep entries of its own
    in a group, such as names for its log, which may differ by rank."""
    names = optimizer.defaults
    return [{k: v for k, v in group.items() if k in names} for group in optimizer.param_groups]


def spelled(group: Mapping[str, Any]) -> str:
    """Return the numbers of a group as text, equal for equal numbers of different types.

    >>> spelled({"lr": np.float64(0.5), "betas": (0.5, torch.tensor(1.0)), "foreach": None})
    'lr=0.5, betas=(0.5, 1)'
    """
    numbers = {name: as_numbers(value) for name, value in group.items()}
    return ", ".join(f"{k}={argument_text(v)}" for k, v in numbers.items() if v is not None)


def as_numbers(value: Any) -> Any:
    """Return a number, or a tuple of numbers, as Python's own, or None for any other value.

    The number of a tensor is read on its device, so this waits for it."""
    if isinstance(value, np.generic) or (
        isinstance(value, torch.Tensor)
        and not isinstance(value, GlobalTensor)
        and value.numel() == 1
        and not value.is_meta
    ):
        return as_numbers(value.item())
    if isinstance(value, (bool, int, float, complex)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(as_numbers, value))
    return None


def hyperparameter_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors among the hyperparameters, which may be written in place."""
    values = [v for group in hyperparameters(optimizer) for v in group.values()]
    return [
        t
        for v in values
        for t in (v if isinstance(v, (tuple, list)) else (v,))
        if isinstance(t, torch.Tensor) and not t.is_inference()
    ]
