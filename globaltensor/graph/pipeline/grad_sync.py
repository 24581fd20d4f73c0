"""The completion of gradients after a run of stages.

Gradients are summed over the ranks. Ranks that hold no part of a parameter learn which ones have a
gradient. `Graph` calls `Grads.complete` before the optimizers step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.gradients.reducer import settle
from ...distributed.world import placeholder, world

__all__ = ["Grads"]


class Grads:
    """A record of the parameters that get gradients, used after each run.

    Every rank has the same parameters in the same order."""

    def __init__(self) -> None:
        self._with_grad: tuple[list[int], frozenset[int]] | None = (
            None  # ids of the parameters; indices of those that get a gradient on some rank
        )

    def complete(self, parameters: Sequence[torch.Tensor]) -> None:
        """Sum the pending gradients over the ranks.

        The gradient of a parameter on other ranks becomes a placeholder, as after an eager pass.
        Ops on all gradients (clipping, norms) must be the same on every rank. Collective."""
        settle(parameters)
        rank = world().rank
        elsewhere = [
            isinstance(p, GlobalTensor) and p.placement.coordinate(rank) is None for p in parameters
        ]
        ids = [id(p) for p in parameters]
        if self._with_grad is None or self._with_grad[0] != ids:
            this_world = world()
            own_indices = [
                i
                for i, (p, away) in enumerate(zip(parameters, elsewhere, strict=True))
                if not away and p.grad is not None
            ]
            everyone = this_world.comm(tuple(range(this_world.size))).all_gather_object(
                own_indices, "the gradients of a pipeline's stages"
            )
            self._with_grad = ids, frozenset(i for indices in everyone for i in indices)
        for i, (p, away) in enumerate(zip(parameters, elsewhere, strict=True)):
            if away and i in self._with_grad[1]:
                p.grad = GlobalTensor.wrap(placeholder(p._spec), p._spec)  # type: ignore[attr-defined]
