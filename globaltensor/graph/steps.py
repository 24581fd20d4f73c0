"""What a program calls besides torch: boxings, steps that communicate, the backward pass. All act on this rank's local tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import draws, gradients, sharded
from ..boxing import box, plan
from ..spec import Spec
from ..wrapper import GlobalTensor

__all__ = ["Boxing", "Draw", "Gather", "Step", "autocast", "backward", "set_grad_enabled"]

set_grad_enabled = torch.set_grad_enabled


class Step:
    """A function of ours that is one step of a program. ``__name__`` is how the program prints it."""

    __module__ = "steps"

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self.function = function
        self.__name__ = (name or getattr(function, "__name__", "") or type(function).__name__).strip("<>_").lower() or "step"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.__name__


class Draw(Step):
    """A random op: it draws from its own stream, equal on ranks that hold equal values."""

    __module__ = "steps"

    def __init__(self, function: Callable[..., Any], coordinate: tuple[int, ...]) -> None:
        super().__init__(function)
        self.coordinate = coordinate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return draws.run(self.function, args, kwargs, self.coordinate)


class Boxing(Step):
    """A change of sbp or placement."""

    __module__ = "boxing"

    def __init__(self, src: Spec, dst: Spec, grad: Spec | None, why: str, alias: bool) -> None:
        self.src, self.dst, self.grad, self.why, self.alias = src, dst, grad, why, alias
        moves = plan(src, dst).moves
        self.__name__ = "_".join(m.kind for m in moves) or "keep"

    def __call__(self, local: Tensor) -> Tensor:
        return box(local, self.src, self.dst, self.grad, self.why, self.alias)


class Gather(Step):
    """A split parameter brought together for a use (sharded.py)."""

    __module__ = "boxing"

    def __init__(self, leaf: GlobalTensor, dst: Spec, why: str) -> None:
        self.leaf, self.dst, self.why = leaf, dst, why
        self.__name__ = "gathered"

    def __call__(self, local: Tensor) -> Tensor:
        return sharded.gathered(self.leaf, self.leaf._spec, self.dst, self.why)


def backward(tensors: Sequence[Tensor], seeds: Sequence[Tensor], scale: float = 1.0, *, retain_graph: bool = False) -> None:
    """The backward pass of this rank's part. ``scale`` multiplies what it starts from."""
    reached = [i for i, t in enumerate(tensors) if t.requires_grad]
    if reached:
        starts = [seeds[i] if scale == 1.0 else seeds[i] * scale for i in reached]
        gradients.run([tensors[i] for i in reached], starts, retain_graph, False, None)


def autocast(*kinds: tuple[str, bool, torch.dtype]) -> None:
    """Mixed precision from here on."""
    torch.clear_autocast_cache()
    for kind, on, dtype in kinds:
        torch.set_autocast_enabled(kind, on)
        torch.set_autocast_dtype(kind, dtype)
