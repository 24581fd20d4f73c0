"""Python functions of torch run by their own bodies on global tensors: the calls inside are dispatched one by one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["apply_plainly", "body_of"]


def body_of(func: Any) -> Callable[..., Any] | None:
    """A Python function of torch, made to run its own body on global tensors: its inner calls are dispatched one by one."""
    if not isinstance(func, types.FunctionType) or not (func.__module__ or "").startswith("torch"):
        return None
    names = [n for n in func.__code__.co_names if n.startswith("has_torch_function")]
    if not names:
        inner = getattr(func, "__wrapped__", None)
        return body_of(inner) if inner is not None else None
    return _body(func, tuple(names))


def _body(func: types.FunctionType, names: tuple[str, ...]) -> Callable[..., Any]:
    # The body asks first whether an argument overrides the function, and would come back here for ever: in this copy the answer is no.
    own = {**func.__globals__, **dict.fromkeys(names, lambda *a: False)}
    if "overrides" in func.__code__.co_names:
        own["torch"] = _Stand(torch, {"overrides": _Stand(torch.overrides, dict.fromkeys(names, lambda *a: False))})
    copy = types.FunctionType(func.__code__, own, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class _Stand:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, names: dict[str, Any]) -> None:
        self.__dict__.update(names)
        self.__module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__module, name)


def apply_plainly(apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function.apply`` as torch has it, of no global arguments. By this frame dispatch knows that it is in a custom Function's forward; torch's own has none
    since 2.14."""
    return apply(function, *args, **kwargs)
