"""Gradients after a run of stages: summed over the ranks, and known of on ranks that hold no part
of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.gradients.reducer import settle
from ...distributed.world import placeholder, world

__all__ = ["Grads"]


class Grads:
    """What is done to the gradients of ``parameters`` after each run. Every rank has the same
    parameters in the same order."""

    def __init__(self) -> None:
        self._told: tuple[list[int], frozenset[int]] | None = (
            None  # ids of the parameters; the places of those that get a gradient somewhere
        )

    def complete(self, parameters: Sequence[torch.Tensor]) -> None:
        """Sum what is pending. Where a parameter lies on other ranks, its gradient becomes a
        placeholder, as after an eager pass: what is done to all gradients (clipping, norms) must be
        the same ops on every rank. Collective."""
        settle(parameters)
        rank = world().rank
        elsewhere = [
            isinstance(p, GlobalTensor) and p.placement.coordinate(rank) is None for p in parameters
        ]
        ids = [id(p) for p in parameters]
        if self._told is None or self._told[0] != ids:
            here = world()
            mine = [
                i
                for i, (p, away) in enumerate(zip(parameters, elsewhere, strict=True))
                if not away and p.grad is not None
            ]
            everyone = here.comm(tuple(range(here.size))).all_gather_object(mine)
            self._told = ids, frozenset(i for found in everyone for i in found)
        for i, (p, away) in enumerate(zip(parameters, elsewhere, strict=True)):
            if away and i in self._told[1]:
                p.grad = GlobalTensor.wrap(placeholder(p._spec), p._spec)  # type: ignore[attr-defined]
