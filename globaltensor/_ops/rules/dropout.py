"""Rules of dropout and of the activations that are no pointwise functions."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from .helpers import dims_of, reduced, register
from .notation import Arg, OpDescription
from .registry import rule

__all__: list[str] = []


def _dropout(function: Any, whole: int | None = None) -> None:
    """Declare a dropout: random in training, otherwise the identity, which passes any partial.

    ``whole``: the last ``whole`` dims are dropped together.
    """
    signature = inspect.signature(function) if inspect.isfunction(function) else None

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        if signature is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            call = bound.arguments
            x, p, training = call["input"], call["p"], call.get("training", call.get("train"))
        else:
            x, p, training = (*args, *kwargs.values())[:3]
        names = tuple(range(x.ndim))
        op.set(x, names)
        op.out = [names]
        if not training or p == 0:
            op.linear, op.carries = [frozenset([0])], True
            return
        op.random = True
        if whole is not None:
            lead = max(0, x.ndim - whole)
            op.whole = set(range(lead, x.ndim))

    register(function, describe)


for _name, _whole in (
    ("dropout", None), ("alpha_dropout", None), ("dropout1d", 1), ("dropout2d", 2),
    ("dropout3d", 3), ("feature_dropout", 9), ("feature_alpha_dropout", 9),
):  # fmt: skip
    for _where in (F, torch):
        if callable(_f := getattr(_where, _name, None)):
            _dropout(_f, _whole)


@rule([F.rrelu, torch.rrelu])
def _rrelu(
    op: OpDescription,
    input: Arg,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: Any = False,
) -> None:
    names = tuple(range(input.ndim))
    op.set(input, names)
    op.out, op.random = [names], bool(training)


@rule([F.glu])
def _glu(op: OpDescription, input: Arg, dim: int = -1) -> None:
    reduced(op, input, dims_of(input, dim), True, None)


@rule("prelu")
def _prelu(op: OpDescription, input: Arg, weight: Arg) -> None:
    names = tuple(range(input.ndim))
    op.set(input, names)
    op.out = [names]
    if weight.ndim == 1 and weight.shape[0] > 1:
        op.set(weight, (1 if input.ndim > 1 else 0,))
