"""Loss scaling: torch's scaler with OneFlow's arguments, and one whose scale stays."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import GlobalTensorError

__all__ = ["GradScaler", "StaticGradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler: the loss is multiplied by a scale that grows while gradients stay finite;
    a step whose gradients do not is skipped.

    ``device``: "cuda" or "cpu"; left out, "cuda" where there is one. For loops and for
    `nn.Graph.set_grad_scaler`.

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
    """A scale that stays as it is. A step whose gradients are not finite is skipped all the same.

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
        """After a step: what was found out about its gradients is forgotten; the scale stays,
        unless one is given."""
        super().update(self.get_scale() if new_scale is None else new_scale)
