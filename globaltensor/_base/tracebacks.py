"""Show a user's mistake by the user's own lines: frames of this library, of torch and of the
standard library are left out of tracebacks of our errors.

``GLOBALTENSOR_TRACEBACK=full`` shows them all.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType
from typing import Any

from ..errors import GlobalTensorError
from .user_code import is_user_code

__all__ = ["VARIABLE", "install", "shortened"]

VARIABLE = "GLOBALTENSOR_TRACEBACK"


def shortened(error: BaseException) -> list[str] | None:
    """Return the traceback of an error of ours by the user's lines; None where all of it is to be
    shown."""
    if not isinstance(error, GlobalTensorError) or os.environ.get(VARIABLE) == "full":
        return None
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_user_code(frame.f_code)
    ]
    if not frames:
        return None
    shown = traceback.format_list(traceback.StackSummary.extract(iter(frames)))
    said = traceback.format_exception_only(type(error), error)
    return [
        "Traceback (most recent call last):\n",
        *shown,
        *said,
        f"(frames of globaltensor and torch are left out; {VARIABLE}=full shows them)\n",
    ]


def install() -> None:
    """Let the interpreter, and IPython, show errors of ours so."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> Any:
        lines = shortened(error)
        if lines is None:
            return before(kind, error, where)
        sys.stderr.write("".join(lines))
        return None

    sys.excepthook = hook
    GlobalTensorError._render_traceback_ = _rendered  # type: ignore[attr-defined]


def _rendered(self: GlobalTensorError) -> list[str]:
    """What IPython shows in place of its own traceback."""
    return [line.rstrip("\n") for line in shortened(self) or traceback.format_exception(self)]
