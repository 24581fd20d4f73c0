"""Loss scaling: torch's scaler with OneFlow's arguments, and one with a fixed scale.

Users construct them."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import GlobalTensorError

__all__ = ["GradScaler", "StaticGradScaler"]


class GradScaler(torch.amp.GradScaler):
    """A loss scaler as torch's GradScaler.

    The loss is multiplied by a scale that grows while gradients are finite. A step whose gradients
    are not finite is skipped.

    ``device``: "cuda" or "cpu". The default is "cuda" if there is one. Use it in loops, or pass it
    to `nn.Graph.set_grad_scaler`.

    >>> GradScaler("cpu", init_scale=8.0).get_scale()
    8.0
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)


class StaticGradScaler(GradScaler):
    """A loss scaler with a fixed scale. A step whose gradients are not finite is skipped too.

    Raises GlobalTensorError unless ``scale_factor`` is positive and finite.

    >>> StaticGradScaler(128.0).get_scale()
    128.0
    """

    def __init__(self, scale_factor: float, device: str | None = None) -> None:
        if not 0 < scale_factor < math.inf:
            raise GlobalTensorError(
                f"StaticGradScaler: the scale is a number above 0, got {scale_factor}"
            )
        super().__init__(device, init_scale=float(scale_factor))

    def update(self, new_scale: Any = None) -> None:
        """Reset the records of a step's gradients after the step.

        The scale changes only if one is passed."""
        super().update(self.get_scale() if new_scale is None else new_scale)
