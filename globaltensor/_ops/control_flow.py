"""Torch's functions of control flow, `cond` and `while_loop`, on global tensors.

Torch compiles the functions that a program passes to them. On global tensors these functions run
uncompiled (_tensor/compiler_guard.py), by the handlers here. Every rank reads the condition, as in
``bool(x)``. The package imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._base import torch_private
from .dispatch import register_handlers

__all__: list[str] = []


def _cond(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _choose(*args, **kwargs)


def _choose(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    condition, body, first, others = args
    carried = first
    while condition(*carried, *others):
        carried = body(*carried, *others)
        if not isinstance(carried, (tuple, list)) or len(carried) != len(first):
            raise RuntimeError(
                f"while_loop: the body must return as many values as it takes ({len(first)}), in a "
                f"tuple, got {type(carried).__name__}"
            )
    return tuple(
        x.clone() if isinstance(x, torch.Tensor) and any(x is f for f in first) else x
        for x in carried
    )


register_handlers(
    {torch_private.COND: _cond, torch_private.WHILE_LOOP: _while_loop}, "control flow"
)
