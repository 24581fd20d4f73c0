"""Find the tensors that a backward pass reaches, in the autograd graph of fake tensors.

`autograd_recorder` calls this module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["leaves", "reached"]


def _nodes(starts: Sequence[torch.Tensor]) -> tuple[set[Any], dict[int, torch.Tensor]]:
    """Return (functions that a backward pass runs, leaves that it reaches, by id)."""
    seen: set[Any] = set()
    leaves_by_id = {id(t): t for t in starts if t.requires_grad and t.grad_fn is None}
    todo = [t.grad_fn for t in starts if t.grad_fn is not None]
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        leaf = getattr(function, "variable", None)
        if leaf is not None:
            leaves_by_id[id(leaf)] = leaf
        todo += [f for f, _ in function.next_functions]
    return seen, leaves_by_id


def leaves(starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that a backward pass from ``starts`` gives a gradient."""
    return list(_nodes(starts)[1].values())


def reached(starts: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each of ``wanted``, whether a backward pass from ``starts`` reaches it."""
    functions, leaves_by_id = _nodes(starts)
    return [
        id(t) in leaves_by_id or (t.grad_fn is not None and t.grad_fn in functions) for t in wanted
    ]
