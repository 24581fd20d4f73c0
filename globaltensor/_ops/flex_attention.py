"""Torch's flex_attention on global tensors.

Each rank computes its batch entries and heads. A split sequence is gathered first. PyTorch compiles
flex_attention down to a level where no function call is visible any more, so it receives local
tensors. Importing this module replaces torch's function.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from .._base import torch_private
from .._tensor.global_tensor import GlobalTensor
from ..distributed.world import world
from ..errors import KernelError
from ..sharding.sbp import Sbp, broadcast
from ..sharding.spec import Spec
from .local_map import local_map

__all__ = ["install"]


def _attend_global_tensors(
    original: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    global_inputs = [t for t in (query, key, value) if isinstance(t, GlobalTensor)]
    if not global_inputs:
        return original(query, key, value, score_mod, block_mask, *args, **kwargs)
    where = global_inputs[0].placement
    layout = [
        e if _can_split(e, global_inputs[0], query.shape, key.shape) else broadcast
        for e in global_inputs[0].sbp
    ]
    spec = Spec.make(query.shape, query.dtype, where, layout)
    inside = where.coordinate(world().rank) is not None
    first, length = (tuple(x[:2]) for x in spec.box(world().rank)) if inside else ((0, 0), (0, 0))
    masks = (
        block_mask
        if block_mask is None or not inside
        else _local_block_mask(block_mask, first, length)
    )

    def parts(q: Any, k: Any, v: Any) -> Any:
        return original(q, k, v, _shift_indices(score_mod, first, 1), masks, *args, **kwargs)

    return local_map(parts, layout if where.axes > 1 else layout[0], [layout] * 3, placement=where)(
        query, key, value
    )


def _can_split(entry: Sbp, x: GlobalTensor, queries: Any, keys: Any) -> bool:
    """Return True if an axis may split batch entries or heads.

    Each rank must have some, and as many of the queries as it has keys for."""
    if not entry.is_split or entry.dim > 1 or entry.unit != 1:
        return False
    parts = math.prod(
        n
        for e, n in zip(x.sbp, x.placement.shape, strict=True)
        if e.is_split and e.dim == entry.dim
    )
    mine, theirs = queries[entry.dim], keys[entry.dim]
    return mine >= parts if mine == theirs else bool(theirs) and mine % parts == theirs % parts == 0  # type: ignore[no-any-return]


def _shift_indices(function: Any, first: tuple[int, ...], at: int) -> Any:
    """Shift the batch and head indices that a function receives to those of this rank.

    They are its arguments ``at`` and ``at + 1``."""
    b, h = first
    if function is None or not (b or h):
        return function
    return lambda *given: function(*given[:at], given[at] + b, given[at + 1] + h, *given[at + 2 :])


def _local_block_mask(mask: Any, first: tuple[int, ...], length: tuple[int, ...]) -> Any:
    """Return the block mask of this rank's batch entries and heads. A dim of size 1 covers all."""
    wide = mask.kv_num_blocks.shape[:2]
    rows = tuple(
        slice(None) if n == 1 else slice(a, a + m)
        for n, a, m in zip(wide, first, length, strict=True)
    )
    found = copy.copy(mask) if all(row == slice(None) for row in rows) else mask[rows]
    found.mask_mod = _shift_indices(mask.mask_mod, first, 0)
    return found


def _refuse_global_tensors(*given: Any) -> None:
    if any(isinstance(t, GlobalTensor) for t in given):
        raise KernelError(
            "flex_attention was imported before globaltensor and cannot see global tensors: "
            "import globaltensor first"
        )


def install() -> None:
    """Make torch's flex_attention accept global tensors."""
    torch_private.wrap_flex_attention(_attend_global_tensors, _refuse_global_tensors)


install()
