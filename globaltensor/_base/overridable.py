"""Make this library's functions overridable by torch-function modes.

A recorder (graph/capture/local_recorder.py) then sees each as one call. torch's own interception
would not see these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.overrides import handle_torch_function

from . import torch_private

__all__ = ["ALONE", "SEEN", "apply", "shown", "visible"]

Function = TypeVar("Function", bound=Callable[..., Any])


def shown(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the active torch-function mode for ``function``, and return its answer.

    For functions that check `torch_private.function_mode_on` first.
    """
    return handle_torch_function(function, (), *args, **kwargs)


#: Functions that `visible` has made. `ALONE` maps those that are no methods to their equivalent on
#: one device.
SEEN: set[Callable[..., Any]] = set()
ALONE: dict[Callable[..., Any], Callable[..., Any]] = {}


def visible(
    function: Function, name: str = "", alone: Callable[..., Any] | None = None
) -> Function:
    """Return ``function`` made visible to torch-function modes, as torch's own functions are.

    Its body is ``__wrapped__``. ``alone``, for a function that is no method: its equivalent on one
    device, without ``placement`` and ``sbp``.
    """

    # Checked first: mostly no mode is active, and every read of a gradient comes through here.
    recording = torch_private.recording

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
    """Run a rule's function on local tensors.

    A recorder may look into it, or record it as one step where it communicates.
    """
    return function(*args, **kwargs)
