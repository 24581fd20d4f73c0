"""``flow.sbp``: the layout of a tensor on one axis of a placement: split, broadcast or partial.

This module is the public page of `sharding.sbp`, for users.
"""

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
