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
    return _without_aliases((true_fn if pred else false_fn)(*operands), operands)


def _without_aliases(results: Any, operands: Any) -> Any:
    """Return results of which none is, or shares memory with, an operand or another result.

    On one device torch refuses results that do."""
    leaves, shape = torch_private.tree_flatten(results)
    seen = set(map(id, torch_private.tree_flatten(operands)[0]))
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor):
            shares = x._memory is not None if isinstance(x, GlobalTensor) else x._is_view()
            if shares or id(x) in seen:
                leaves[i] = x.clone()
            seen.add(id(x))
    return torch_private.tree_unflatten(leaves, shape)


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
        carried, _ = torch_private.tree_flatten(results)
        if not isinstance(results, (tuple, list)) or len(carried) != len(first):
            raise RuntimeError(
                f"while_loop: the body must return a tuple of as many values as it takes "
                f"({len(first)}), got a {type(results).__name__} of {len(carried)}"
            )
    if results is None:
        results = torch_private.nest_carried(body, carried)
    return _without_aliases(tuple(results), (first, others))


register_handlers(
    {torch_private.COND: _cond, torch_private.WHILE_LOOP: _while_loop}, "control flow"
)
torch_private.wrap_cond(_cond_of_nested)
