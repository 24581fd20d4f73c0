"""A scale factor that still has to be applied to gradients being reduced.

The reducer applies it. _ops/rules/deferred_mean.py makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ...sharding.placement import Placement

__all__ = ["PendingScale"]


class PendingScale(Protocol):
    """The factor that this backward pass's gradients must still be multiplied by.

    Computing it takes one reduction over all ranks (_ops/rules/deferred_mean.py).
    """

    attached: bool  # True if it is sent together with gradients

    def factor(self) -> float:
        """Return the factor.

        It waits for the other ranks, and is collective where nothing has been started.
        """

    def start(self) -> None:
        """Start the reduction over the ranks. Collective, once."""

    def payload(
        self, placement: Placement, axes: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return a 0-dim tensor to be summed with the first gradients that are sent.

        Return None where the factor is sent in another way.
        """

    def attach(self, wait: Callable[[], None], cell: torch.Tensor) -> None:
        """Note that the payload was sent: after ``wait()``, ``cell`` (1 element) holds its sum."""
