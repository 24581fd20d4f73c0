"""Run torch's Python functions by their own bodies on global tensors.

The calls inside such a body are dispatched one by one. The dispatcher (_ops) calls these functions.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DROPPED_ARGS", "apply_plainly", "plain_applies", "python_body", "recover_dropped_args"]

#: Arguments that torch's functions drop when they pass a call on to ``__torch_function__`` (2.13;
#: `l1_loss` had no weight before).
DROPPED_ARGS: dict[Any, tuple[str, ...]] = {
    torch.nn.functional.l1_loss: ("weight",),
    torch.chain_matmul: ("out",),
}
_MAX_FRAMES = 16  # maximum number of frames between the function and its override
#: torch's initializers by name. A library that makes a model may replace them meanwhile by its own
#: (transformers: by versions that leave loaded weights alone). torch's initializers pass a call on
#: under the name that they have at that moment.
_INITIALIZERS = {
    name: f
    for name, f in vars(torch.nn.init).items()
    if isinstance(f, types.FunctionType) and name.endswith("_")
}


def recover_dropped_args(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` with the arguments that ``func`` dropped from this call, if any.

    ``func`` is still running, so its frame has these arguments.
    """
    if func not in DROPPED_ARGS or not kwargs.keys().isdisjoint(DROPPED_ARGS[func]):
        return kwargs
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame.f_code is func.__code__:
            given = {name: frame.f_locals.get(name) for name in DROPPED_ARGS[func]}
            found = {name: value for name, value in given.items() if value is not None}
            return {**kwargs, **found} if found else kwargs
        if frame.f_back is None:
            break
        frame = frame.f_back
    return kwargs


def python_body(func: Any) -> Callable[..., Any] | None:
    """Return a copy of a torch function that runs its own body on global tensors.

    The calls inside the body are dispatched one by one. Return None if ``func`` has no such body.
    """
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
    # The body first asks whether an argument overrides the function, and the call would come back
    # here for ever. In this copy the answer is no.
    own = {**func.__globals__, **dict.fromkeys(names, lambda *a: False)}
    if "overrides" in func.__code__.co_names:  # as torch.overrides, or imported by name
        overrides = _ModuleOverlay(torch.overrides, dict.fromkeys(names, lambda *a: False))
        own["torch"] = _ModuleOverlay(torch, {"overrides": overrides})
        own["overrides"] = overrides
    copy = types.FunctionType(
        func.__code__, own, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class _ModuleOverlay:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, names: dict[str, Any]) -> None:
        self.__dict__.update(names)
        self.__module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__module, name)


#: The custom Functions that `apply_plainly` is calling, in all threads.
plain_applies: list[Any] = []


def apply_plainly(
    apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``function.apply`` as torch does, for calls without global arguments.

    This frame shows the dispatcher that it is inside a custom Function's forward. torch has no
    frame of its own there since 2.14. The dispatcher looks for it only while ``plain_applies`` has
    an entry.
    """
    plain_applies.append(function)
    try:
        return apply(function, *args, **kwargs)
    finally:
        plain_applies.pop()
