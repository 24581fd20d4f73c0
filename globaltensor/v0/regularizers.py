"""``flow.regularizers``: what the size of a variable adds to its gradient."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Regularizer", "l1", "l1_l2", "l2"]


class Regularizer(NamedTuple):
    """The loss gets ``l1 * |w| + l2 * w**2 / 2``, summed over the elements."""

    l1: float = 0.0
    l2: float = 0.0


def l1_l2(l1: float = 0.01, l2: float = 0.01) -> Regularizer:
    """The gradient gets ``l1 * sign(w) + l2 * w``."""
    return Regularizer(float(l1), float(l2))


def l1(l: float = 0.01) -> Regularizer:  # noqa: E741 - the parameter's name is the interface's
    """The gradient gets ``l * sign(w)``."""
    return Regularizer(l1=float(l))


def l2(l: float = 0.01) -> Regularizer:  # noqa: E741
    """The gradient gets ``l * w``."""
    return Regularizer(l2=float(l))
