"""The abilities of the terminal that a stream writes to: redrawing a line, and colours."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["in_colour", "is_terminal"]


def is_terminal(stream: Any) -> bool:
    """Return True if a stream is a terminal that can redraw a line.

    A stream may have no more than ``write``. Standard output is None in a program without one.

    >>> import io
    >>> is_terminal(io.StringIO()), is_terminal(None)
    (False, False)
    """
    isatty = getattr(stream, "isatty", None)
    return os.environ.get("TERM") != "dumb" and isatty is not None and bool(isatty())


def in_colour(stream: Any) -> bool:
    """Return True if text for a stream has colours, by the rules of Python's own messages."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(stream)
