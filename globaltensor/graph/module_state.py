"""The state of a graph's modules, listed once.

A walk through a module tree at each call would cost more than many a step. `Graph` reads the list
at each call."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.grad import clear_grads

__all__ = ["ModuleState"]

_numbers = itertools.count()


def _forward_hook_ids(module: torch.nn.Module) -> tuple[int, ...]:
    """Return the numbers of a module's forward hooks: torch gives each hook one of its own."""
    return *module._forward_pre_hooks, -1, *module._forward_hooks


class ModuleState:
    """The submodules, parameters and buffers of ``modules`` at the time of creation.

    `current` tests whether they are still the same."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.number = next(_numbers)
        self.modules = list(dict.fromkeys(m for top in modules.values() for m in top.modules()))
        self._tops = list(modules.items())
        slots = [held for m in self.modules for held in (m._parameters, m._buffers)]
        self._dicts: list[dict[str, Any]] = [*(m._modules for m in self.modules), *slots]
        self._lengths = list(map(len, self._dicts))
        self._values = _values(self._dicts)
        found = itertools.chain.from_iterable(held.values() for held in slots)
        #: Parameters and buffers, each once.
        self.tensors: list[torch.Tensor] = list({id(t): t for t in found if t is not None}.values())
        self.parameters = [t for t in self.tensors if isinstance(t, torch.nn.Parameter)]
        self._stepped: list[torch.Tensor] = []  # all parameters of the optimizers at the last clear
        self._besides: list[torch.Tensor] = []  # those of them that are not in the modules

    def current(self, modules: Mapping[str, torch.nn.Module]) -> bool:
        """Return True if these modules still hold the same submodules and tensors."""
        if list(modules.items()) != self._tops or list(map(len, self._dicts)) != self._lengths:
            return False
        return all(map(operator.is_, _values(self._dicts), self._values))

    def state(self) -> tuple[Any, ...]:
        """Return the properties of the modules that a program depends on."""
        where = [
            t._spec if type(t) in ORDINARY else (t.shape, t.dtype, t.device) for t in self.tensors
        ]
        return (
            self.number,
            tuple([m.training for m in self.modules]),
            tuple(where),
            tuple([t.requires_grad for t in self.tensors]),
            tuple(
                [
                    _forward_hook_ids(m)
                    for m in self.modules
                    if m._forward_hooks or m._forward_pre_hooks
                ]
            ),
            tuple([m.__dict__["forward"] for m in self.modules if "forward" in m.__dict__]),
        )

    def trained(self) -> list[torch.Tensor]:
        """Return the parameters that get gradients."""
        return [p for p in self.parameters if p.requires_grad]

    def clear(self, optimizers: Iterable[Optimizer]) -> None:
        """Clear all gradients, also those of optimizers' parameters outside of the modules."""
        _clear_grads(self.parameters)
        params = [
            p
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        if len(params) != len(self._stepped) or not all(map(operator.is_, params, self._stepped)):
            known = set(map(id, self.parameters))
            self._stepped, self._besides = params, [p for p in params if id(p) not in known]
        _clear_grads(self._besides)


def _values(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, dicts)))


def _clear_grads(parameters: Iterable[torch.Tensor]) -> None:
    leaves = []
    for p in parameters:
        if isinstance(p, GlobalTensor) and type(p) in ORDINARY:
            leaves.append(p)
        else:
            p.grad = None
    clear_grads(leaves)
