"""Python functions of torch run by their own bodies on global tensors: the calls inside are
dispatched one by one."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DROPPED_ARGS", "apply_plainly", "python_body", "recover_dropped_args"]

#: Arguments that functions of torch leave out when they hand a call on to who overrides it (2.13;
#: before `l1_loss` had no weight).
DROPPED_ARGS: dict[Any, tuple[str, ...]] = {
    torch.nn.functional.l1_loss: ("weight",),
    torch.chain_matmul: ("out",),
}
_DEEPEST = 16  # frames between the function and who it was handed to
#: torch's initializers by name. While a library makes a model it may put its own in their place
#: (transformers: some that leave loaded weights alone), and torch's hand on a call under the name
#: that they have at that moment.
_INITIALIZERS = {
    name: f
    for name, f in vars(torch.nn.init).items()
    if isinstance(f, types.FunctionType) and name.endswith("_")
}


def recover_dropped_args(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs``; with the arguments of this call that ``func`` has forgotten, if any: it still
    runs, and has them."""
    if func not in DROPPED_ARGS or not kwargs.keys().isdisjoint(DROPPED_ARGS[func]):
        return kwargs
    frame = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame.f_code is func.__code__:
            given = {name: frame.f_locals.get(name) for name in DROPPED_ARGS[func]}
            found = {name: value for name, value in given.items() if value is not None}
            return {**kwargs, **found} if found else kwargs
        if frame.f_back is None:
            break
        frame = frame.f_back
    return kwargs


def python_body(func: Any) -> Callable[..., Any] | None:
    """A Python function of torch, made to run its own body on global tensors: its inner calls are
    dispatched one by one."""
    if not isinstance(func, types.FunctionType):
        return None
    if not (func.__module__ or "").startswith("torch"):
        stands_for = _INITIALIZERS.get(func.__name__)
        return python_body(stands_for) if stands_for is not None else None
    names = [n for n in func.__code__.co_names if n.startswith("has_torch_function")]
    if not names:
        inner = getattr(func, "__wrapped__", None)
        return python_body(inner) if inner is not None else None
    return _body(func, tuple(names))


def _body(func: types.FunctionType, names: tuple[str, ...]) -> Callable[..., Any]:
    # The body asks first whether an argument overrides the function, and would come back here for
    # ever: in this copy the answer is no.
    own = {**func.__globals__, **dict.fromkeys(names, lambda *a: False)}
    if "overrides" in func.__code__.co_names:
        own["torch"] = _Stand(
            torch, {"overrides": _Stand(torch.overrides, dict.fromkeys(names, lambda *a: False))}
        )
    copy = types.FunctionType(
        func.__code__, own, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class _Stand:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, names: dict[str, Any]) -> None:
        self.__dict__.update(names)
        self.__module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__module, name)


def apply_plainly(
    apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``function.apply`` as torch has it, of no global arguments. By this frame dispatch knows that
    it is in a custom Function's forward; torch's own has none since 2.14."""
    return apply(function, *args, **kwargs)
