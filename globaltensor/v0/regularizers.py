"""``flow.regularizers``: penalties on the size of variables, which add to their gradients.

User code passes them to `get_variable` and to layers.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Regularizer", "l1", "l1_l2", "l2"]


class Regularizer(NamedTuple):
    """A penalty that adds ``l1 * |w| + l2 * w**2 / 2`` to the loss, summed over the elements."""

    l1: float = 0.0
    l2: float = 0.0


def l1_l2(l1: float = 0.01, l2: float = 0.01) -> Regularizer:
    """Return a penalty that adds ``l1 * sign(w) + l2 * w`` to the gradient."""
    return Regularizer(float(l1), float(l2))


def l1(l: float = 0.01) -> Regularizer:  # noqa: E741 - the parameter's name is the interface's
    """Return a penalty that adds ``l * sign(w)`` to the gradient."""
    return Regularizer(l1=float(l))


def l2(l: float = 0.01) -> Regularizer:  # noqa: E741
    """Return a penalty that adds ``l * w`` to the gradient."""
    return Regularizer(l2=float(l))
