"""Torch's functions of control flow, `cond` and `while_loop`, on global tensors.

Torch compiles what they call. With global tensors it runs uncompiled (_tensor/compiler_guard.py),
and reaches these handlers: the condition is read, as ``bool(x)`` reads it, on every rank. The
package imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    condition, body, carried, others = args
    while condition(*carried, *others):
        carried = body(*carried, *others)
        if len(carried) != len(args[2]):
            raise RuntimeError(
                f"while_loop: the body returns {len(carried)} values, but takes {len(args[2])}"
            )
    return tuple(x.clone() if x is first else x for x, first in zip(carried, args[2], strict=True))


register_handlers(
    {torch_private.COND: _cond, torch_private.WHILE_LOOP: _while_loop}, "control flow"
)
