"""Batch norms whose running statistics are the mean over all batches (``momentum=None``).

torch's layer reads the number of batches as a Python value. A program counts the batches in a
tensor instead. `module_hooks` enters `averaged` around build()."""

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
    """Replace the forward of such layers of ``modules``, so that they read no value of a tensor."""
    parts = dict.fromkeys(part for module in modules.values() for part in module.modules())
    norms = [part for part in parts if isinstance(part, BatchNorm) and _counts(part)]
    for norm in norms:
        vars(norm)["forward"] = functools.partial(_forward, norm)
    try:
        yield
    finally:
        for norm in norms:
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
    """Run the layer's forward. The last of n batches has the weight 1 / n in the statistics."""
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
