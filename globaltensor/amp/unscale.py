"""torch.amp.GradScaler on global gradients.

The dispatcher calls this. Each rank unscales its local tensors. All ranks learn whether any met an
inf or nan, so all skip the same step."""

from __future__ import annotations

from typing import Any

import torch

from .._base import torch_private
from .._ops.dispatch import register_handlers
from .._tensor.global_tensor import GlobalTensor
from ..boxing import box, log
from ..distributed.world import world

__all__: list[str] = []


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Multiply gradients by a number, in place, and set ``found_inf`` to 1 if any is not finite.

    The result covers all ranks. Collective over the world, because the next action of ranks outside
    a placement depends on it too."""
    grads, found_inf, factor = args
    parts = [g._local if isinstance(g, GlobalTensor) else g for g in grads]
    func(parts, found_inf, factor, **kwargs)
    for g in grads:
        # summands may be finite where their sum is not
        if isinstance(g, GlobalTensor) and any(e.is_partial for e in g._spec.layout):
            whole = box(g._local, g._spec, g._spec.replicated(), why="GradScaler.unscale_")
            found_inf.masked_fill_(~torch.isfinite(whole).all(), 1.0)
    this_world = world()
    if this_world.size > 1:
        with log.exchanges("GradScaler.unscale_: whether a gradient is not finite"):
            found_inf.copy_(
                this_world.comm(tuple(range(this_world.size)))
                .all_reduce(found_inf.reshape(1), "max")
                .reshape(())
            )


register_handlers({torch_private.unscale_gradients: _unscale}, "list of tensors")
