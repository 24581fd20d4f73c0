"""Short tracebacks: errors of this library show only the user's own lines.

So do errors of torch that this library found before the call ran (`mark_torch_error`). Frames of
this library, of torch and of the standard library are left out. The package calls
`install` when it is imported. ``GLOBALTENSOR_TRACEBACK=full`` shows all frames.

Logging catches the errors of its calls, such as ``logging.info("%s", x)`` on one rank alone, and
prints them itself. They are shortened there too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from types import TracebackType
from typing import Any

from ..errors import GlobalTensorError
from .patches import patch
from .user_code import is_user_code

__all__ = ["VARIABLE", "install", "mark_torch_error", "shortened"]

VARIABLE = "GLOBALTENSOR_TRACEBACK"
_MARK = "_globaltensor_found_it"


def mark_torch_error(error: Exception) -> None:
    """Mark an error of torch about the user's call, so that its traceback is shortened too."""
    setattr(error, _MARK, True)


def shortened(error: BaseException, callers: bool = False) -> list[str] | None:
    """Return the traceback of this library's or a marked error, with the user's frames only.

    ``callers``: show the callers of the frame that caught the error as well. Return None where
    the full traceback should be shown.
    """
    ours = isinstance(error, GlobalTensorError) or getattr(error, _MARK, False)
    if not ours or os.environ.get(VARIABLE) == "full":
        return None
    walked = [*traceback.walk_tb(error.__traceback__)]
    if callers and walked and walked[0][0].f_back is not None:
        walked = [*reversed([*traceback.walk_stack(walked[0][0].f_back)]), *walked]
    frames = [(frame, line) for frame, line in walked if is_user_code(frame.f_code)]
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
    """Make the interpreter, IPython and logging show this library's errors with the user's frames
    only."""

    def showing(before: Any) -> Any:
        def hook(
            kind: type[BaseException], error: BaseException, where: TracebackType | None
        ) -> Any:
            lines = shortened(error)
            if lines is None:
                return before(kind, error, where)
            sys.stderr.write("".join(lines))
            return None

        return hook

    def showing_in_logs(before: Any) -> Any:
        def handleError(self: logging.Handler, record: logging.LogRecord) -> Any:
            error = sys.exc_info()[1]
            lines = None if error is None else shortened(error, callers=True)
            if lines is None or not logging.raiseExceptions or sys.stderr is None:
                return before(self, record)
            with contextlib.suppress(OSError):  # as logging does
                sys.stderr.write("".join(lines))
            return None

        return handleError

    patch("sys:excepthook", showing)
    patch("logging:Handler.handleError", showing_in_logs)
    GlobalTensorError._render_traceback_ = _ipython_lines  # type: ignore[attr-defined]


def _ipython_lines(self: GlobalTensorError) -> list[str]:
    """Return the traceback lines that IPython shows in place of its own."""
    return [line.rstrip("\n") for line in shortened(self) or traceback.format_exception(self)]
