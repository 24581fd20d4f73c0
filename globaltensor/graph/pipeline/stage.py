"""A stage: a piece of a model on one rank, and its saved state between forward and backward.

`runtime` calls its methods for each micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..._ops.backward import in_this_thread, initial_cotangent
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.gradients import parameter_gather
from ..._tensor.gradients.reducer import reducer
from ...sharding.spec import Spec
from ..capture.recorder_base import casting
from ..program.nodes import autocast
from .split_backward import DeferredWeightGrads

__all__ = ["Stage"]


class _SavedForward:
    """The saved state of a micro-batch.

    It holds the inputs that get gradients, and the places of the outputs in the autograd graph, but
    not the outputs."""

    __slots__ = ("later", "leaves", "roots", "seed")

    def __init__(
        self,
        leaves: dict[int, Tensor],
        roots: list[GradientEdge | None],
        later: DeferredWeightGrads | None,
        seed: Tensor | None,
    ) -> None:
        self.leaves, self.roots, self.later, self.seed = leaves, roots, later, seed


@contextlib.contextmanager
def _restoring_autocast() -> Iterator[None]:
    """Restore autocast and clear its cache afterwards.

    A part of a program sets autocast and may leave it set. The code that runs next, such as the
    caller's, must find autocast as it was. It must also not find a parameter's cast from before the
    optimizer's step."""
    before = casting()
    try:
        yield
    finally:
        autocast(*before)


class Stage:
    """A stage, as far as one rank computes it.

    ``function(*inputs) -> outputs`` maps local tensors to a tuple of local tensors, with torch
    under autograd. It may contain collectives among the ranks of its stage. Its weights' gradients
    are added to their ``.grad``.

    ``differentiable`` holds the numbers of the inputs that get a gradient. ``loss`` is the number
    of an output from which backward starts, and its spec.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor]],
        differentiable: Collection[int] = (),
        loss: tuple[int, Spec] | None = None,
    ) -> None:
        self.function, self.differentiable, self.loss = function, frozenset(differentiable), loss
        self._saved: dict[int, _SavedForward] = {}
        self._later: dict[int, DeferredWeightGrads] = {}

    @property
    def micros(self) -> tuple[int, ...]:
        """The micro-batches with saved state, for a backward or for weights, in order."""
        return tuple(sorted({*self._saved, *self._later}))

    def forward(
        self, micro: int, inputs: Sequence[Tensor], train: bool = True, split: bool = False
    ) -> tuple[Tensor, ...]:
        """Run one micro-batch and return the outputs, detached.

        ``train``: save what a backward needs. ``split``: the backward will come in two parts."""
        if not train:
            with torch.no_grad(), _restoring_autocast():
                return tuple(self.function(*inputs))
        detached_inputs = [
            t.detach().requires_grad_(i in self.differentiable) for i, t in enumerate(inputs)
        ]
        later = DeferredWeightGrads() if split else None
        with (
            torch.enable_grad(),
            _restoring_autocast(),
            later.recording() if later is not None else contextlib.nullcontext(),
        ):
            outputs = tuple(self.function(*detached_inputs))
        # A gradient edge holds the graph, not the tensor. So an output that was sent takes no
        # memory here, unless an op has saved it.
        roots = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
        start = None
        if self.loss is not None:
            number, spec = self.loss
            start = initial_cotangent(GlobalTensor.wrap(outputs[number].detach(), spec), None)
        leaves = {i: t for i, t in enumerate(detached_inputs) if i in self.differentiable}
        self._saved[micro] = _SavedForward(leaves, roots, later, start)
        return tuple(t.detach() for t in outputs)

    def backward(
        self, micro: int, grads: Mapping[int, Tensor], loss_scale: float = 1.0
    ) -> dict[int, Tensor]:
        """Run the full backward and return the gradients of the differentiable inputs.

        Backward starts from the gradients of outputs and from the loss. The saved state is freed.
        ``grads`` holds gradients by output, in the dual of the output's spec (partial for a
        broadcast one). The results have dual specs too.
        """
        saved = self._saved.pop(micro)
        input_grads = self._backward(saved, grads, loss_scale)
        if saved.later is not None:
            saved.later.run()
        return input_grads

    def backward_input(
        self, micro: int, grads: Mapping[int, Tensor], loss_scale: float = 1.0
    ) -> dict[int, Tensor]:
        """Run the backward of inputs only, with arguments and results of `backward`.

        Weights whose gradients can wait (`DeferredWeightGrads`) get them from `backward_weight`.
        Activations are freed, except those that `backward_weight` needs."""
        saved = self._saved.pop(micro)
        later = self._later[micro] = DeferredWeightGrads() if saved.later is None else saved.later
        with later.holding():
            return self._backward(saved, grads, loss_scale)

    def backward_weight(self, micro: int) -> None:
        """Compute the weight gradients that `backward_input` left, and free the saved state."""
        self._later.pop(micro).run()

    def forget(self) -> None:
        """Drop all saved state after a run has failed."""
        self._saved.clear()
        self._later.clear()

    def _backward(
        self, saved: _SavedForward, grads: Mapping[int, Tensor], loss_scale: float
    ) -> dict[int, Tensor]:
        start: list[tuple[Any, Tensor]] = [
            (root, grads[i])
            for i, root in enumerate(saved.roots)
            if root is not None and i in grads
        ]
        if (
            self.loss is not None
            and saved.seed is not None
            and (root := saved.roots[self.loss[0]]) is not None
        ):
            start.append((root, saved.seed * loss_scale))
        saved.roots = []
        if start:
            try:
                # The second forward pass of a checkpoint must be like its first.
                with (
                    saved.later.recording()
                    if saved.later is not None
                    else contextlib.nullcontext(),
                    in_this_thread(),
                ):
                    torch.autograd.backward(
                        [root for root, _ in start], [grad for _, grad in start]
                    )
            except BaseException:
                reducer().abort()
                parameter_gather.abort()
                raise
        # For an input that reached no output, all ranks of the stage still have to send zeros.
        return {
            i: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for i, leaf in saved.leaves.items()
        }
