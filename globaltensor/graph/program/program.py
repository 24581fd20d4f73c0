"""The program of one rank: an fx GraphModule over local tensors, and the readers of its states.

`Graph` makes one for each shape, and each pipeline stage has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.pending_tensor import PendingTensor
from .nodes import autocast

__all__ = ["Program", "State"]

State = Callable[[], torch.Tensor]


class Program:
    """A program that runs on the call's local inputs.

    ``print(program.module)`` shows it as Python code."""

    def __init__(
        self,
        graph: fx.Graph,
        constants: Mapping[str, Any],
        states: Sequence[State],
        inputs: int,
        name: str = "Program",
    ) -> None:
        self.module = fx.GraphModule(dict(constants), graph, name)
        self.run: Callable[..., Any] = self.module
        rest = [node for node in graph.nodes if node.op == "placeholder"][inputs:]
        self._rest: list[State | None] = [
            states[node.meta["state"]] if "state" in node.meta else None for node in rest
        ]  # None stands for the scale

    def __call__(self, inputs: Sequence[torch.Tensor], scale: float = 1.0) -> tuple[Any, ...]:
        """Return the local results. ``scale`` multiplies all gradients."""
        grad, cast = (
            torch.is_grad_enabled(),
            [
                (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k))
                for k in ("cpu", "cuda")
            ],
        )
        rest = [scale if state is None else state() for state in self._rest]
        try:
            return self.run(*inputs, *rest)  # type: ignore[no-any-return]
        except BaseException:
            torch.set_grad_enabled(grad)
            autocast(*cast)
            raise


def reader(owner: torch.Tensor) -> State:
    """Return a function that reads a state at each run.

    A parameter's local tensor may have been replaced between runs."""
    if isinstance(owner, PendingTensor):
        return lambda: owner._materialize()._local
    if isinstance(owner, GlobalTensor):
        return lambda: owner._local
    return lambda: owner
