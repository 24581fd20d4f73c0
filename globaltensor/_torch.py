"""The only file that touches torch's private names. Each with its reason; checked with torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch

#: An instance of a tensor subclass with shape, dtype and device but no storage: nothing below the function level can read wrong values from it (1 us).
make_wrapper = torch.Tensor._make_wrapper_subclass


def queue_backward_callback(function: Any) -> None:
    """Run ``function`` when the backward pass under way ends: torch's own reducers finish their buckets so; there is no public hook."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_kernel(func: object) -> bool:
    """Whether a function is an operator of the dispatcher (``torch.ops...``), below the function level."""
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))

#: What torch.meshgrid calls for one list of tensors, without asking them first.
meshgrid_of_list = torch._VF.meshgrid
