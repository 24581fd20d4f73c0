"""Find the user's line: the innermost frame outside this library and torch.

Error messages, logs and the tracebacks call these functions.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

__all__ = [
    "PACKAGE_ROOT",
    "caller_frame",
    "is_user_code",
    "line_text",
    "user_frame",
    "user_line",
    "warn_user",
    "without_warnings",
]

#: The folder of this package.
PACKAGE_ROOT = Path(__file__).parents[1]
_MAX_KNOWN = 1 << 14
_OURS, _LIBRARY, _USER = range(3)
_FOLDERS = tuple(
    (str(folder) + os.sep, owner)
    for folder, owner in (
        (PACKAGE_ROOT, _OURS),
        (Path(torch.__file__).parent, _LIBRARY),
        *((sysconfig.get_path(name), _LIBRARY) for name in ("purelib", "platlib", "stdlib")),
    )
)
# Code that is in no file, and that no user has written.
_GENERATED = (
    "<frozen",
    "<eval_with_key>",
    "<attrs",
    "<__array_function__",
)
# by file name, not by code object: code objects of two files may be equal
_known: dict[str, int] = {}


def _owner(code: CodeType) -> int:
    """Return the owner of the code: this library, another one, or the user.

    Another library is an installed package or the standard library.
    """
    name = code.co_filename
    owner = _known.get(name)
    if owner is None:
        if len(_known) > _MAX_KNOWN:
            _known.clear()
        owner = (
            _LIBRARY
            if name.startswith(_GENERATED)
            else next((owner for folder, owner in _FOLDERS if name.startswith(folder)), _USER)
        )
        _known[name] = owner
    return owner


def is_user_code(code: CodeType) -> bool:
    """Return True if the code is the user's.

    Installed packages and the standard library are not the user's.
    """
    return _owner(code) == _USER


def caller_frame(start: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame outside this library: the user's, or of another library.

    ``start``: the innermost frame of another thread, to search there.
    """
    frame: FrameType | None = start or sys._getframe(1)
    while frame is not None and _owner(frame.f_code) == _OURS:
        frame = frame.f_back
    return frame


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame of the user's own code.

    If there is none, return the innermost frame of another library. Return None in a thread that
    torch started. ``start``: the innermost frame of another thread, to search there.
    """
    frame = innermost_frame = caller_frame(start)
    while frame is not None:
        if _owner(frame.f_code) == _USER:
            return frame
        frame = frame.f_back
    return innermost_frame


def user_line(start: FrameType | None = None) -> str:
    """Return the user's line as ``train.py:12: loss = model(x)``.

    ``start``: the innermost frame of another thread, for the user's line there.
    """
    frame = user_frame(start)
    if frame is None:
        return "a thread of torch"
    return line_text(frame.f_code.co_filename, frame.f_lineno)


def line_text(file: str, line: int) -> str:
    """Return a line of a file as ``train.py:12: loss = model(x)``."""
    return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()[:80]}"


#: The warnings that were shown: text, category, file and line.
_shown_warnings: set[tuple[str, type[Warning], str, int]] = set()
_warnings_lock = threading.RLock()
_MAX_SHOWN_WARNINGS = 4096


def _filter_action(message: str, category: type[Warning], module: str, line: int) -> str:
    """Return what Python's filters say of a warning: "default", "always", "ignore" ..."""

    def matches(pattern: Any, text: str) -> bool:
        if pattern is None:
            return True
        return bool(pattern == text if isinstance(pattern, str) else pattern.match(text))

    for action, text, kind, of_module, of_line in warnings.filters:
        if (
            issubclass(category, kind)
            and matches(text, message)
            and matches(of_module, module)
            and of_line in (0, line)
        ):
            return action
    return "default"


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore all warnings inside the block, which must not wait for other ranks.

    Python's filters are those of the process. Ranks that are threads enter one after the other, or
    the last one to leave would put back the filters that it had found: those of another block.
    """
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the user's line, not a line of this library.

    Python's filters apply to the user's line too. By default a text is shown once for each line.
    Python itself forgets what it has shown whenever any code enters `warnings.catch_warnings`.
    """
    frame = user_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    names = frame.f_globals
    module = names.get("__name__") or "<unknown>"
    if _filter_action(message, category, module, frame.f_lineno) == "default":
        shown = message, category, frame.f_code.co_filename, frame.f_lineno
        if shown in _shown_warnings:
            return
        if len(_shown_warnings) >= _MAX_SHOWN_WARNINGS:
            _shown_warnings.clear()
        _shown_warnings.add(shown)
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=module,
        registry=names.setdefault("__warningregistry__", {}),
    )
