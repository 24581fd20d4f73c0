"""The layout of an optimizer's state: that of the tensor which a rank steps for its parameter.

`local_step` calls these functions when a state is loaded or a layout changes.
"""

from __future__ import annotations

from typing import Any

import torch

from .._tensor.global_tensor import GlobalTensor
from ..distributed.world import world
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .repeated_step import State
from .shard_gather import stepped

__all__ = ["relay_state", "state_beside"]


def state_beside(p: GlobalTensor, spec: Spec, value: torch.Tensor) -> GlobalTensor:
    """Box a value of the state to the layout of the stepped tensor.

    A loaded value may have another layout, or be a plain full value. The local tensor is on the
    device of the parameter's local tensor, also on ranks outside the placement: fused kernels
    accept the empty tensors with the rest."""
    if isinstance(value, GlobalTensor) and value._spec is spec.replace(dtype=value._spec.dtype):
        return value
    part = torch.empty(spec.local_shape(world().rank), dtype=value.dtype, device=p._local.device)
    out = GlobalTensor.wrap(part, spec.replace(dtype=value.dtype))
    with torch.no_grad():
        out.copy_(value)
    return out


def relay_state(p: torch.Tensor, known: State) -> None:
    """Box the state of one parameter.

    A loaded state may share its tensors with another optimizer. If boxing separates the moments,
    the counts of steps must be separated too."""
    laid = {k: _box_state_value(p, v, k) for k, v in known.items()}
    moved = any(laid[k] is not v for k, v in known.items())
    for k, v in laid.items():
        known[k] = v.clone() if moved and v is known[k] and isinstance(v, torch.Tensor) else v


def _box_state_value(p: torch.Tensor, value: Any, key: Any) -> Any:
    """Box a value of a parameter's state to where the parameter is.

    Each tensor of the parameter's shape gets the layout of the stepped tensor. Tensors of other
    shapes (sums over rows, flat gradients) become broadcast, if they are not on the parameter's
    placement yet. Counts of steps remain the same."""
    if type(value) is dict:
        return {k: _box_state_value(p, v, k) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_box_state_value(p, v, key) for v in value)
    if not isinstance(value, torch.Tensor) or key == "step":
        return value
    if isinstance(p, GlobalTensor):
        if value.shape == p.shape:
            return state_beside(p, stepped(p), value)
        if _is_elsewhere(p, value):
            sbp = [broadcast] * len(p._spec.layout)
            return value.detach().to_global(placement=p.placement, sbp=sbp)  # type: ignore[attr-defined]
    elif isinstance(value, GlobalTensor):  # the state of a parameter that is plain on each rank
        everyone = Placement(value.placement.type, list(range(world().size)))
        whole = value.detach().to_global(placement=everyone, sbp=broadcast)  # type: ignore[attr-defined]
        return whole.to_local().to(p.device)
    return value


def _is_elsewhere(p: GlobalTensor, value: torch.Tensor) -> bool:
    """Return True if a value must move: a global one, or a full plain one, but not a count."""
    if isinstance(value, GlobalTensor):
        return value._spec.placement != p._spec.placement
    return value.ndim > 0
