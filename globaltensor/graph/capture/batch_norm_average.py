"""Batch norms whose running statistics are the mean over all batches (``momentum=None``): torch
reads how many there were, which a program counts instead."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._base import torch_private
from ..._base.torch_private import BatchNorm

__all__ = ["averaged"]


@contextlib.contextmanager
def averaged(modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Inside, such layers of ``modules`` ask for no number."""
    parts = dict.fromkeys(part for module in modules.values() for part in module.modules())
    found = [part for part in parts if isinstance(part, BatchNorm) and _counts(part)]
    for norm in found:
        vars(norm)["forward"] = functools.partial(_forward, norm)
    try:
        yield
    finally:
        for norm in found:
            del vars(norm)["forward"]


def _counts(norm: BatchNorm) -> bool:
    own = "forward" in vars(norm) or type(norm).forward is not BatchNorm.forward
    return (
        norm.momentum is None
        and norm.training
        and norm.track_running_stats
        and norm.num_batches_tracked is not None
        and not own
    )


def _forward(norm: BatchNorm, x: Tensor) -> Tensor:
    """As the layer's own: of n batches the last has a share of 1 / n."""
    torch_private.check_input(norm, x)
    assert norm.num_batches_tracked is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.num_batches_tracked.add_(1)
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    out = F.batch_norm(x, mean, variance, norm.weight, norm.bias, True, 1.0, norm.eps)
    for running, batch in ((norm.running_mean, mean), (norm.running_var, variance)):
        running += (batch - running) / norm.num_batches_tracked
    return out
