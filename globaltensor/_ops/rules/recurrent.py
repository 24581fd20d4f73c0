"""Rules of recurrent layers and their cells."""

from __future__ import annotations

from typing import Any

import torch

from .helpers import register, skip_when_empty
from .notation import Arg, Dims, OpDescription

__all__: list[str] = []


def _cell(op: OpDescription, input: Arg, hx: Any, *weights: Any) -> None:
    lead: Dims = ("n",) if input.ndim == 2 else ()
    for a in (input, *(hx if isinstance(hx, (tuple, list)) else [hx])):
        op.set(a, (*lead, None))
    op.out = [(*lead, None)]


for _name in ("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"):
    register(getattr(torch, _name), _cell)


def _recurrent(function: Any) -> None:
    """Declare a recurrent layer over a sequence, which is parallel over the batch.

    Packed sequences are replicated, as their batch changes from step to step.
    """

    def describe(op: OpDescription, input: Arg, hx: Any, *rest: Any) -> None:
        if isinstance(rest[1], (list, tuple)):  # packed: (data, batch_sizes, hx, weights, ...)
            op.whole_call = True
            return
        _, _, _layers, dropout, training, _, batch_first = rest
        names: Dims = (None,) if input.ndim == 2 else ("n", None) if batch_first else (None, "n")
        op.set(input, (*names, None))
        states = hx if isinstance(hx, (tuple, list)) else [hx]
        for h in states:
            op.set(h, (None, "n", None) if input.ndim == 3 else (None, None))
        hidden: Dims = (None, "n", None) if input.ndim == 3 else (None, None)
        op.out = [(*names, None), *[hidden] * len(states)]
        op.random = bool(training and dropout)
        op.local = skip_when_empty(op, function)

    register(function, describe)


for _name in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
    _recurrent(getattr(torch, _name))
