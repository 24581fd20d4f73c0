"""Gradient clipping by the settings of parameter groups (OneFlow's names).

`Graph` calls it once the gradients of a step are complete. torch's `clip_grad_norm_` works on
global tensors as it is: `foreach_norm` (_ops/foreach.py) gives it norms over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["CLIP_OPTIONS", "clip"]

#: The entries of a parameter group that are for `clip`, not for the optimizer.
CLIP_OPTIONS = ("clip_grad_max_norm", "clip_grad_norm_type")


def clip(optimizer: Optimizer, scaler: Any = None) -> None:
    """Clip the gradients of each group with ``clip_grad_max_norm`` to that norm.

    ``clip_grad_norm_type`` of the group is the order of the norm. ``scaler`` is the gradient
    scaler, by whose scale the gradients are still multiplied."""
    asking = [
        group for group in optimizer.param_groups if group.get("clip_grad_max_norm") is not None
    ]
    if asking and scaler is not None:
        scaler.unscale_(optimizer)
    for group in asking:
        torch.nn.utils.clip_grad_norm_(
            group["params"], group["clip_grad_max_norm"], group.get("clip_grad_norm_type", 2.0)
        )
