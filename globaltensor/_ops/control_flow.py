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
from .._tensor.global_tensor import GlobalTensor
from .dispatch import register_handlers

__all__: list[str] = []


def _cond(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _choose(*args, **kwargs)


def _choose(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _cond_of_nested(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    values, _ = torch_private.tree_flatten((args, kwargs))
    if any(isinstance(v, GlobalTensor) for v in values):
        return _choose(*args, **kwargs)
    return original(*args, **kwargs)


def _while_loop(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    condition, body, first, others = args
    carried, results = first, None
    while condition(*carried, *others):
        results = body(*carried, *others)
        carried, shape = torch_private.tree_flatten(results)
        if not isinstance(results, (tuple, list)) or len(carried) != len(first):
            raise RuntimeError(
                f"while_loop: the body must return a tuple of as many values as it takes "
                f"({len(first)}), got a {type(results).__name__} of {len(carried)}"
            )
    copied = [
        x.clone() if isinstance(x, torch.Tensor) and any(x is f for f in first) else x
        for x in carried
    ]
    if results is None:
        return torch_private.nest_carried(body, copied)
    return tuple(torch_private.tree_unflatten(copied, shape))


register_handlers(
    {torch_private.COND: _cond, torch_private.WHILE_LOOP: _while_loop}, "control flow"
)
torch_private.wrap_cond(_cond_of_nested)
