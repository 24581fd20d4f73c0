"""The ``.grad`` attribute of global tensors: read, assigned, and laid out as the tensor is.

`GlobalTensor` and the optimizers use these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from .._base.overridable import visible
from ..boxing import box
from ..errors import SbpError
from ..sharding.placement import Placement
from ..sharding.spec import Spec
from .global_tensor import GlobalTensor
from .history import GRADIENT, identify_copy, record, record_together
from .plain_operands import replicated_grad
from .strides import note_of, note_order

__all__ = ["clear_grads", "get_grad", "local_grad", "place_grad", "set_grad"]


def _grad_spec(x: GlobalTensor) -> Spec:
    """Return the spec of a leaf's gradient: the leaf's own, or shares (ZeRO)."""
    return x._leaf.grad_spec if x._leaf is not None else x._spec  # type: ignore[no-any-return]


@functools.partial(visible, name="grad")
def get_grad(x: GlobalTensor) -> GlobalTensor | None:
    """Return the gradient, in the tensor's own sbp. Collective where contributions are pending."""
    leaf, local = x._leaf, x._local.grad
    if leaf is not None:
        local = leaf.value if local is None else leaf.flush()
    if local is None:
        return None
    kept = x.__dict__.get("_kept_grad")
    if kept is not None and kept[0] is local:
        return kept[1]  # type: ignore[no-any-return]
    if leaf is None and not x._local.is_leaf:
        dual = x._spec.dual()
        wrapped = GlobalTensor.wrap(box(local, dual, x._spec, why="gradient"), x._spec)
    else:
        spec = _grad_spec(x)
        wrapped = GlobalTensor.wrap(
            local, spec if spec.dtype is local.dtype else spec.replace(dtype=local.dtype)
        )
        if (note := note_of(x)) is not None:
            note_order(wrapped, note.strides)  # torch gives a gradient the strides of its leaf
    wrapped._serial = hash((x._serial, GRADIENT))
    x.__dict__["_kept_grad"] = (local, wrapped)
    return wrapped


def local_grad(leaf: GlobalTensor) -> tuple[bool, torch.Tensor | None]:
    """Return (True if a leaf's gradient has the leaf's layout for it, this rank's local tensor).

    The layout is `_grad_spec`. Where it differs, the local tensor is None. The call is collective
    as ``.grad`` is, but a gradient that no code reads is not wrapped.
    """
    if "_kept_grad" not in leaf.__dict__:
        return True, leaf._leaf.flush() if leaf._leaf is not None else leaf._local.grad
    grad, spec = get_grad(leaf), _grad_spec(leaf)
    if grad is None:
        return True, None
    alike = (
        isinstance(grad, GlobalTensor)
        and grad._spec.layout == spec.layout
        and grad._spec.placement is spec.placement
    )
    return alike, grad._materialize()._local if alike else None


def clear_grads(leaves: Iterable[GlobalTensor]) -> None:
    """Clear the gradients of these leaves without reading them.

    The call is recorded once for each placement, because a rank that does not clear a gradient adds
    the next one to it."""
    cleared: dict[Placement, list[GlobalTensor]] = {}
    for x in leaves:
        local, leaf = x._local, x._leaf
        x.__dict__.pop("_kept_grad", None)
        if local.grad is not None or (leaf is not None and leaf.value is not None):
            cleared.setdefault(x._spec.shown.placement, []).append(x)
            local.grad = None
        if leaf is not None:
            leaf.value = None
            leaf.release()
    for tensors in cleared.values():
        record_together("clear grad", tensors)


@functools.partial(visible, name="set_grad")
def set_grad(x: GlobalTensor, value: Any) -> None:
    if value is None:
        clear_grads([x])
        return
    x.__dict__.pop("_kept_grad", None)
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__  # the text is torch's
        raise TypeError(
            f"assigned grad expected to be a Tensor or None but got grad of type {kind}"
        )
    if value.shape != x.shape:
        raise SbpError(
            f"attempting to assign a gradient of size '{list(value.shape)}' to a tensor of size "
            f"'{list(x.shape)}'. Please ensure that the gradient and the tensor are the same size"
        )
    if not isinstance(value, GlobalTensor):
        value = replicated_grad(value, x._spec.shown.placement, "a gradient given to .grad")
    value = value._materialize()
    if value.dtype is not x.dtype and x._leaf is not None:
        # torch's own error, unless the tensor's grad_dtype allows this dtype
        x._local.grad = torch.empty_like(x._local, dtype=value.dtype)
    record("set grad", x, value)
    place_grad(x, value)


def place_grad(x: GlobalTensor, value: GlobalTensor) -> None:
    """Make a global tensor the gradient of ``x``, without a record of it.

    It is collective only if the tensor has another layout than the gradient."""
    x.__dict__.pop("_kept_grad", None)
    grad_spec = _grad_spec(x).replace(dtype=value.dtype)
    local = (
        value._local
        if value._spec is grad_spec
        else box(value._local, value._spec, grad_spec, why="assigning .grad").contiguous()
    )
    if x._leaf is not None:
        x._local.grad, x._leaf.value = None, local
        x._leaf.release()
    else:
        x._local.grad = local
    x.__dict__["_kept_grad"] = (
        local,
        value
        if value._local is local
        else identify_copy(GlobalTensor.wrap(local, grad_spec), x, GRADIENT),
    )
