"""A factor that gradients lack while they are on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ...sharding.placement import Placement

__all__ = ["PendingScale"]


class PendingScale(Protocol):
    """What the gradients of a backward pass have yet to be multiplied by, which all ranks have to
    tell each other first (_ops/rules/deferred_mean.py)."""

    riding: bool  # whether it travels with gradients

    def factor(self) -> float:
        """The number. Waits for the others; collective where nothing has been started."""

    def start(self) -> None:
        """Begin to tell. Collective, once."""

    def rider(
        self, placement: Placement, axes: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A tensor without dims, to be summed with the first gradients that leave; None where it is
        told otherwise."""

    def ride(self, wait: Callable[[], None], cell: torch.Tensor) -> None:
        """That is under way: after ``wait()`` it is in ``cell``, of one element."""
