"""Python's garbage collector, kept from looking through the whole process again and again while a
search makes many small objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["gc_paused"]


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Inside, no rings of objects are collected. A search makes few of them, and a process with
    models in it has a million objects to look through, which takes a second each time; measured, a
    sixth of a search for 512 devices, for a third more memory."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
