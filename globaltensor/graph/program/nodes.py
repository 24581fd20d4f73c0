"""The functions that a program calls in addition to torch's.

They are boxings, steps that communicate, and the backward pass. All act on this rank's local
tensors. The recorders write them into programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._ops import backward as gradients
from ..._ops import random_streams as draws
from ..._ops.rules.deferred_mean import PendingCount
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.gradients import parameter_gather
from ...boxing import box, plan_boxing
from ...sharding.spec import Spec

__all__ = [
    "BoxingCall",
    "GatherCall",
    "ProgramCall",
    "RandomCall",
    "autocast",
    "backward",
    "count_of",
    "counted",
    "set_grad_enabled",
]

set_grad_enabled = torch.set_grad_enabled


class ProgramCall:
    """A function of this package as a step of a program. The program prints ``__name__``."""

    __module__ = "steps"

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self.function = function
        self.__name__ = (
            name or getattr(function, "__name__", "") or type(function).__name__
        ).strip("<>_").lower() or "step"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.__name__


class RandomCall(ProgramCall):
    """A random op that draws from its own stream, equal on ranks that hold equal values.

    ``repeats`` says whether it draws the same numbers when it runs again."""

    __module__ = "steps"
    repeats = False

    def __init__(self, function: Callable[..., Any], coordinate: tuple[int, ...]) -> None:
        super().__init__(function)
        self.coordinate = coordinate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return draws.run(self.function, args, kwargs, self.coordinate)


class BoxingCall(ProgramCall):
    """A change of sbp or placement."""

    __module__ = "boxing"

    def __init__(self, src: Spec, dst: Spec, grad: Spec | None, why: str, alias: bool) -> None:
        self.src, self.dst, self.grad, self.why, self.alias = src, dst, grad, why, alias
        moves = plan_boxing(src, dst).moves
        self.__name__ = "_".join(m.kind for m in moves) or "keep"

    def __call__(self, local: Tensor) -> Tensor:
        return box(local, self.src, self.dst, self.grad, self.why, self.alias)


class GatherCall(ProgramCall):
    """A split parameter, gathered for a use (_tensor/gradients/parameter_gather.py)."""

    __module__ = "boxing"

    def __init__(self, leaf: GlobalTensor, dst: Spec, why: str) -> None:
        self.leaf, self.dst, self.why = leaf, dst, why
        self.__name__ = "gathered"

    def __call__(self, local: Tensor) -> Tensor:
        return parameter_gather.gather_param(self.leaf, self.leaf._spec, self.dst, self.why)


def backward(
    tensors: Sequence[Tensor],
    seeds: Sequence[Tensor],
    scale: float = 1.0,
    count: PendingCount | None = None,
    *,
    retain_graph: bool = False,
) -> None:
    """Run the backward pass of this rank's local tensors.

    ``scale`` multiplies the seeds. ``count`` is a pending count by which the seeds must still be
    divided."""
    reached = [i for i, t in enumerate(tensors) if t.requires_grad]
    if reached:
        starts = [seeds[i] if scale == 1.0 else seeds[i] * scale for i in reached]
        if count is not None:
            gradients.run_with_pending_scale(tensors[0], starts[0], count, retain_graph)
        else:
            gradients.run([tensors[i] for i in reached], starts, retain_graph, False, None)
    elif count is not None:
        count.start()


def counted(spec: Spec, most: int) -> Callable[[Tensor], PendingCount]:
    """Return a function from this rank's local count to the pending count of all ranks.

    The local count has the layout ``spec``. The count of all ranks is at most ``most``."""

    def start(part: Tensor) -> PendingCount:
        count = PendingCount(GlobalTensor.wrap(part, spec), most, programmed=True)
        if not count.may_ride():
            count.start()
        return count

    return start


def count_of(count: PendingCount) -> Tensor:
    """Wait for a count, and return its local tensor."""
    whole = count()
    return whole._local if isinstance(whole, GlobalTensor) else whole


def autocast(*kinds: tuple[str, bool, torch.dtype]) -> None:
    """Set autocast from here on."""
    torch.clear_autocast_cache()
    for kind, on, dtype in kinds:
        torch.set_autocast_enabled(kind, on)
        torch.set_autocast_dtype(kind, dtype)
