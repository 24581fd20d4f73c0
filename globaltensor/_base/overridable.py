"""What of ours is seen whole by whoever records a program (graph/capture/recorders.py): functions
that torch's own interception would look straight through."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.overrides import handle_torch_function

from . import torch_private

__all__ = ["ALONE", "SEEN", "apply", "shown", "visible"]

Function = TypeVar("Function", bound=Callable[..., Any])


def shown(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let the mode that looks on answer the call: for functions that ask `_torch.function_mode_on`
    first."""
    return handle_torch_function(function, (), *args, **kwargs)


#: Functions that `visible` has made; and what those among them that are no methods are on one
#: device.
SEEN: set[Callable[..., Any]] = set()
ALONE: dict[Callable[..., Any], Callable[..., Any]] = {}


def visible(
    function: Function, name: str = "", alone: Callable[..., Any] | None = None
) -> Function:
    """A function that modes see as they see torch's own; its body is ``__wrapped__``. ``alone``, of
    one that is no method: what it is on one device, without ``placement`` and ``sbp``."""

    recording = (
        torch_private.recording
    )  # asked first: mostly nobody looks on, and each read of a gradient comes here

    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        if recording.looks and torch_private.looked_at():
            return shown(seen, *args, **kwargs)
        return function(*args, **kwargs)

    if name:
        seen.__name__ = name
    SEEN.add(seen)
    if alone is not None:
        ALONE[seen] = alone
    return cast(Function, seen)


@visible
def apply(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call what a rule runs on the local tensors: a recorder may look into it, or keep it as one
    step where it communicates."""
    return function(*args, **kwargs)
