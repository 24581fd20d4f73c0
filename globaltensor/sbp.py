"""``flow.sbp``: how a tensor lies on one axis of a placement, split, broadcast or partial. The
public page of `sharding.sbp`."""

from .sharding.sbp import (
    Sbp,
    broadcast,
    partial_max,
    partial_min,
    partial_norm,
    partial_sum,
    sbp,
    split,
)

__all__ = [
    "Sbp",
    "broadcast",
    "partial_max",
    "partial_min",
    "partial_norm",
    "partial_sum",
    "sbp",
    "split",
]
