"""Comparisons of random numbers whose result is known before a number is drawn.

A number of `torch.rand` is in [0, 1), so ``torch.rand([]) < 0.0`` is no choice that depends on
data. The recorder calls this module when build() branches on a comparison.

Models drop whole layers this way, with a probability that mostly is 0 (LayerDrop, Fan et al. 2019;
adapters). ``torch.rand(1) > 0.0`` asks the same question. It is false only if exactly 0 is drawn,
once in 2**24 or rarer. That case follows from how the comparison is written, not from what it asks,
so it counts as true."""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx

__all__ = ["decided", "drawn"]

_BELOW: Final = frozenset({"lt", "le"})
_MIRRORED: Final = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_OPERATORS: Final[dict[Any, str]] = {getattr(operator, name): name for name in _MIRRORED} | {
    getattr(torch, name): name for name in _MIRRORED
}


def decided(node: fx.Node | None) -> bool | None:
    """Return the result of comparing a uniform random number with a number, if every draw gives it.

    Otherwise, and for other nodes, return None."""
    name = None if node is None else _OPERATORS.get(node.target, node.target)
    if node is None or name not in _MIRRORED or len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    if _uniform(b):
        a, b, name = b, a, _MIRRORED[name]
    if not _uniform(a) or isinstance(b, bool) or not isinstance(b, (int, float)):
        return None
    below = name in _BELOW
    if b >= 1:
        return below
    if b < 0 or (b == 0 and (name in ("lt", "ge") or _never_draws_zero(a))):
        return not below
    return None


def drawn(node: fx.Node | None) -> bool:
    """Return True if a value follows from random numbers alone."""
    todo, seen, is_random = [node], set(), False
    while todo:
        one = todo.pop()
        if one is None or one.op == "placeholder":
            return False
        if one not in seen:
            seen.add(one)
            is_random = is_random or bool(one.meta.get("random"))
            todo += one.all_input_nodes
    return is_random


def _never_draws_zero(node: fx.Node) -> bool:
    """Return True if exactly 0 is hardly ever drawn. Half precision has too few values for that."""
    return node.meta["val"].dtype in (torch.float32, torch.float64)


def _uniform(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target is torch.rand
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node.meta["val"].numel() == 1
    )
