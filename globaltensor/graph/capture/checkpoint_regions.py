"""Calls of ``torch.utils.checkpoint`` in a model's own code (Hugging Face's
``gradient_checkpointing_enable()``): while a graph records, they mark a region.

Recorded straight through, a checkpoint would leave no trace in the program: what it saves memory by
happens below the calls that are recorded.
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
    """Inside, in this thread, a checkpoint (reentrant or not) is a region of ``recorder`` and does
    nothing else. One inside a region belongs to that."""
    token = _recording.set(
        (recorder, itertools.count(-1, -1))
    )  # modules' regions are numbered upwards from 0
    try:
        yield
    finally:
        _recording.reset(token)


def _region() -> Any:
    """A context for the function that a checkpoint runs; None where nobody records."""
    found = _recording.get()
    return None if found is None else _inside(*found)


@contextlib.contextmanager
def _inside(recorder: Any, numbers: Iterator[int]) -> Iterator[None]:
    before = recorder.region
    if before is None:
        recorder.region = next(numbers)
    try:
        yield
    finally:
        recorder.region = before


torch_private.watch_checkpoints(_region)
