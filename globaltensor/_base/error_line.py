"""Errors as one line of text, for messages that quote them."""

from __future__ import annotations

from typing import Final

__all__ = ["in_one_line"]

_MAX_CHARACTERS: Final = 300  # of each error


def in_one_line(error: BaseException | None) -> str:
    """Return an error and its causes in one line: the first line of each message.

    >>> in_one_line(OSError("no route\\nto host")), in_one_line(None)
    ('OSError: no route', '')
    """
    texts = []
    while error is not None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        texts.append(f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MAX_CHARACTERS])
        error = error.__cause__
    return "; ".join(texts)
