"""Calls of ``torch.utils.checkpoint`` in a model's own code, as regions to recompute.

Hugging Face's ``gradient_checkpointing_enable()`` makes such calls. While a graph records, each
call marks a region. Otherwise a checkpoint would leave no trace in the program, because it saves
memory below the level of the recorded calls. `capture` enters `marked`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from ..._base import torch_private

__all__ = ["marked"]

_recording: ContextVar[tuple[Any, Iterator[int]] | None] = ContextVar(
    "globaltensor_recording", default=None
)


@contextlib.contextmanager
def marked(recorder: Any) -> Iterator[None]:
    """Make each checkpoint in this thread a region of ``recorder`` and nothing else.

    This covers reentrant checkpoints too. A checkpoint inside a region belongs to that region."""
    token = _recording.set(
        (recorder, itertools.count(-1, -1))
    )  # modules' regions are numbered upwards from 0
    try:
        yield
    finally:
        _recording.reset(token)


def _region() -> Any:
    """Return a context for the function that a checkpoint runs, or None outside of recording."""
    found = _recording.get()
    return None if found is None else _in_region(*found)


@contextlib.contextmanager
def _in_region(recorder: Any, numbers: Iterator[int]) -> Iterator[None]:
    before = recorder.region
    if before is None:
        recorder.region = next(numbers)
    try:
        yield
    finally:
        recorder.region = before


torch_private.watch_checkpoints(_region)
