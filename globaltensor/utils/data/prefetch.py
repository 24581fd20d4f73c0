"""Copies of batches to a device, one ahead of the computation, for `GlobalDataLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..._base.pytree import replaced, tensors_in

__all__ = ["on_device"]


def on_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Return the batches with their tensors on ``device``.

    Each batch is copied to CUDA on a separate stream while the batch before it is used."""
    if device.type == "cuda":
        return _prefetch(batches, device)
    return batches if device.type == "cpu" else (_move_batch(batch, device) for batch in batches)


def _move_batch(batch: Any, device: torch.device) -> Any:
    return replaced(batch, iter([t.to(device, non_blocking=True) for t in tensors_in(batch, [])]))


def _prefetch(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)
    waiting: list[tuple[Any, torch.cuda.Event]] = []
    for batch in batches:
        with torch.cuda.stream(stream):
            waiting.append((_move_batch(batch, device), stream.record_event()))
        if len(waiting) > 1:
            yield _wait_for_copy(*waiting.pop(0), device)
    for moved, event in waiting:
        yield _wait_for_copy(moved, event, device)


def _wait_for_copy(moved: Any, event: torch.cuda.Event, device: torch.device) -> Any:
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for t in tensors_in(moved, []):
        t.record_stream(current)  # its memory is used by the current stream from here on
    return moved
