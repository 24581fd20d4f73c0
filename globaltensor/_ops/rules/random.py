"""Rules of functions that draw each element or row separately from given probabilities.

Their numbers come from the op's own stream. `rules` imports this module.
"""

from __future__ import annotations

from typing import Any

import torch

from .notation import Arg, OpDescription, align
from .registry import rule

__all__: list[str] = []


def _elementwise(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.dims, result = align([a.shape for a in op.args])
    op.out, op.random = [result], True


# The rule is declared by function, not by name. bernoulli_ differs: it fills its tensor with the
# numbers of one device.
rule([torch.bernoulli, torch.Tensor.bernoulli, torch.poisson, torch.binomial])(_elementwise)


@rule([torch.multinomial, torch.Tensor.multinomial])
def _multinomial(op: OpDescription, weights: Arg, *args: Any, **kwargs: Any) -> None:
    rows = tuple(range(weights.ndim - 1))
    op.set(weights, (*rows, None))
    op.out, op.random = [(*rows, None)], True
