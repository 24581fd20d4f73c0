"""Modules of experts in a model, recognised by their form, with dispatch of tokens to expert ranks.

`flow.parallelize` and globaltensor.auto use them. The form is that of transformers 5: parameters of
at least three dims, the first of which is the experts, and ``forward(tokens, index, weights)``. The
module itself defines what the experts compute. On each rank its own ``forward`` runs on a copy that
has only this rank's experts, and each row has one expert.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._ops.rules.experts import TokenFunction, moe_experts
from .._tensor.global_tensor import GlobalTensor
from ..errors import ShapeError

__all__ = ["dispatch_tokens", "expert_parameters", "experts_in"]

#: Attribute names under which modules store their number of experts.
_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")


def experts_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return path -> module for every module of experts in ``model``."""
    return {
        path: module
        for path, module in model.named_modules()
        if _count(module) and _takes_tokens(module)
    }


def _count(module: nn.Module) -> int:
    """Return the number of experts of a module's parameters, or 0 if they do not have this form."""
    firsts = {p.shape[0] for p in module._parameters.values() if p is not None and p.dim() >= 3}
    return firsts.pop() if len(firsts) == 1 else 0


def _takes_tokens(module: nn.Module) -> bool:
    """Return True if the signature is ``forward(hidden_states, top_k_index, top_k_weights)``.

    Similar names count too: ``router_indices``, ``routing_weights``."""
    # the class's forward, because the module may be dispatched already
    names = list(inspect.signature(type(module).forward).parameters)[1:4]
    return (
        len(names) == 3
        and ("ind" in names[1] or "ids" in names[1])
        and any(word in names[2] for word in ("weight", "score", "prob"))
    )


def expert_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters whose first dim is the experts: matrices and biases."""
    count = _count(module)
    return [name for name, p in module.named_parameters() if p.dim() >= 2 and p.shape[0] == count]


def dispatch_tokens(module: nn.Module) -> None:
    """Make a module of experts send its tokens to the ranks of their experts.

    Its parameters must be global by then. Its results must be linear in the weights."""
    module.forward = _Dispatch(module)


class _Dispatch:
    """A ``forward`` of a module of experts.

    It is an object, because an object is copied and pickled together with its module. A function,
    or a method of another object, is not."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own_forward = type(self.module).forward
        positional = args
        if kwargs:  # the keyword names are those of this module
            bound = inspect.signature(own_forward).bind(self.module, *args, **kwargs)
            positional = bound.args[1:]
        if not _are_routed(positional):
            return own_forward(self.module, *args, **kwargs)
        return _forward(self.module, *positional)


def _are_routed(args: tuple[Any, ...]) -> bool:
    """Return True if these are tokens [..., hidden], with index and weights [..., k].

    The signature of a module of experts can be that of another module: a graph convolution has
    ``forward(x, edge_index, edge_weight)``."""
    if len(args) != 3 or not all(isinstance(a, Tensor) and a.dim() for a in args):
        return False
    hidden, index, weights = args
    return (
        index.shape == weights.shape
        and not index.is_floating_point()
        and weights.is_floating_point()
        and hidden.numel() * index.shape[-1] == index.numel() * hidden.shape[-1]
    )


def _forward(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Any:
    """Run the module on tokens [..., hidden], with index and weights [..., k]."""
    parameters = dict(module.named_parameters())
    if not any(isinstance(p, GlobalTensor) for p in parameters.values()):
        return type(module).forward(module, hidden, index, weights)
    own = expert_parameters(module)
    common = {
        name: t for name, t in [*parameters.items(), *module.named_buffers()] if name not in own
    }
    tokens = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    if index.dim() != 2:
        index, weights = index.reshape(-1, index.shape[-1]), weights.reshape(-1, weights.shape[-1])
    function = _LocalExpertsForward(weakref.ref(module), tuple(own), tuple(common))
    out = moe_experts(
        tokens,
        index,
        weights,
        *[parameters[name] for name in own],
        function=function,
        shared=tuple(common.values()),
    )
    return out if hidden.dim() == 2 else out.reshape(hidden.shape)


@dataclass(frozen=True)
class _LocalExpertsForward(TokenFunction):
    """A module's own ``forward`` on the experts of a rank.

    Two are equal for the same module, because they are part of the keys of plans. The reference to
    the module is weak, because plans outlive models."""

    module: weakref.ref[nn.Module]
    own: tuple[str, ...]
    common: tuple[str, ...]

    def __call__(self, rows: Tensor, counts: Sequence[int], *parameters: Tensor) -> Tensor:
        expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(rows.device)
        return self._run(
            len(counts), (rows, expert[:, None], rows.new_ones(rows.shape[0], 1)), parameters
        )

    def run_all(self, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        return self._run(parameters[0].shape[0], (x, index, weights), parameters)

    def _run(
        self, count: int, args: tuple[Tensor, Tensor, Tensor], parameters: tuple[Tensor, ...]
    ) -> Tensor:
        module = self.module()
        assert module is not None, "it has called this"
        there = _copy(module, dict(zip((*self.own, *self.common), parameters, strict=True)))
        for name in _NUMBERS:
            if name in there.__dict__:
                there.__dict__[name] = count
        out = there.forward(*args)
        if not isinstance(out, Tensor):
            raise ShapeError(
                f"{type(module).__name__}: a module of experts must return one tensor, not "
                f"{type(out).__name__}"
            )
        return out


def _copy(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Copy a module with these tensors, by path, as its parameters and buffers.

    The copy runs its class's ``forward``, without hooks and without a ``forward`` of the
    instance."""
    clone = copy.copy(module)
    clone.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    for held in ("_parameters", "_buffers"):
        clone.__dict__[held] = {
            name: tensors.get(name, t) for name, t in module.__dict__[held].items()
        }
    clone.__dict__["_modules"] = {
        name: child
        if child is None
        else _copy(
            child,
            {
                path.partition(".")[2]: t
                for path, t in tensors.items()
                if path.partition(".")[0] == name
            },
        )
        for name, child in module._modules.items()
    }
    return clone
