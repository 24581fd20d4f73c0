"""The parameter updates of `optimizer`, as ``torch.optim`` optimizers.

`Optimizer.made` creates them. Their formulas differ from torch's own in the details that each class
describes.

One param group holds all parameters, so that clipping uses one global norm. Options that differ
between parameters are lists, in the order of the parameters: ``l1`` and ``l2`` (regularizers),
``decay`` (decoupled weight decay), ``scale`` (of the learning rate).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..optim.local_step import ELEMENTWISE

__all__ = [
    "AdamUpdate",
    "LambUpdate",
    "LarsUpdate",
    "LazyAdamUpdate",
    "RMSPropUpdate",
    "SGDUpdate",
    "Update",
]


class Update(torch.optim.Optimizer):
    """The base class of the updates.

    ``states`` are the names of the states of each parameter, which start at zero.
    """

    states: tuple[str, ...] = ()

    def __init__(self, params: Sequence[Tensor], **options: Any) -> None:
        n = len(params)
        lists = {
            name: options.pop(name, None) or [default] * n
            for name, default in (("l1", 0.0), ("l2", 0.0), ("decay", 0.0), ("scale", 1.0))
        }
        super().__init__([{"params": list(params), **lists}], {"lr": 1.0, "steps": 0, **options})
        for p in params:
            for name in self.state_names(options):
                self.state[p][name] = torch.zeros_like(p.detach())

    def state_names(self, options: dict[str, Any]) -> tuple[str, ...]:
        return self.states

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one step with the current gradients.

        Parameters without a gradient stay unchanged.
        """
        for group in self.param_groups:
            group["steps"] += 1
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                grad = p.grad
                if group["l1"][i]:
                    grad = grad + group["l1"][i] * p.sign()
                if group["l2"][i]:
                    grad = grad + group["l2"][i] * p
                self.change(
                    p,
                    grad,
                    self.state[p],
                    group,
                    group["lr"] * group["scale"][i],
                    group["decay"][i],
                )

    def change(
        self,
        p: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        rate: float,
        decay: float,
    ) -> None:
        """Change one parameter."""
        raise TypeError(f"{type(self).__name__} has no update rule")


class SGDUpdate(Update):
    """An SGD update: ``v = beta * v - rate * g; p += v``.

    The rate is inside v, so a later fall of the rate does not shrink the accumulated v. In torch it
    does.
    """

    states = ("momentum",)

    def state_names(self, options: dict[str, Any]) -> tuple[str, ...]:
        return self.states if options["beta"] else ()

    def change(
        self,
        p: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        rate: float,
        decay: float,
    ) -> None:
        if group["beta"]:
            v = state["momentum"]
            v.mul_(group["beta"]).sub_(grad * rate)
            change = v - p * (rate * decay) if decay else v
        else:
            change = (grad + p * decay if decay else grad) * -rate
        p.add_(change)


class AdamUpdate(Update):
    """An Adam update (Kingma and Ba 2015), by default without bias correction.

    The weight decay is decoupled (Loshchilov and Hutter 2019).
    """

    states = ("m", "v")

    def change(
        self,
        p: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        rate: float,
        decay: float,
    ) -> None:
        direction = self.direction(grad, state, group)
        p.sub_((direction + p * decay if decay else direction) * rate)

    def direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        m, v = state["m"], state["v"]
        m.mul_(group["beta1"]).add_(grad * (1 - group["beta1"]))
        v.mul_(group["beta2"]).add_(grad * grad * (1 - group["beta2"]))
        if group["correct"]:
            m, v = (
                m / (1 - group["beta1"] ** group["steps"]),
                v / (1 - group["beta2"] ** group["steps"]),
            )
        return m / (v.sqrt() + group["epsilon"])


class LazyAdamUpdate(AdamUpdate):
    """An Adam update that leaves elements with zero gradient unchanged, including their states."""

    def change(
        self,
        p: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        rate: float,
        decay: float,
    ) -> None:
        touched = grad != 0
        before = {name: state[name].clone() for name in self.states}
        direction = self.direction(grad, state, group)
        for name, value in before.items():
            state[name].copy_(torch.where(touched, state[name], value))
        p.sub_(torch.where(touched, direction * rate, torch.zeros_like(direction)))


class RMSPropUpdate(Update):
    """An RMSProp update: it divides the gradient by the root of its mean square.

    ``epsilon`` is added under the root; torch adds it to the root. ``centered`` uses the mean
    square of the deviation from the mean gradient.
    """

    states = ("mean_square", "mean_gradient")

    def state_names(self, options: dict[str, Any]) -> tuple[str, ...]:
        return self.states if options["centered"] else self.states[:1]

    def change(
        self,
        p: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        rate: float,
        decay: float,
    ) -> None:
        rho = group["decay_rate"]
        square = state["mean_square"].mul_(rho).add_(grad * grad * (1 - rho))
        if group["centered"]:
            mean = state["mean_gradient"].mul_(rho).add_(grad * (1 - rho))
            square = square - mean * mean
        p.sub_(grad / (square + group["epsilon"]).sqrt() * rate + p * (rate * decay))


class LarsUpdate(Update):
    """A LARS update: a learning rate per parameter (You et al. 2017).

    The rate follows from the norms of the parameter and of its gradient.
    """

    states = ("momentum",)

    def change(
        self,
        p: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        rate: float,
        decay: float,
    ) -> None:
        size, steepness = p.norm(), grad.norm()
        trust = group["coefficient"] * size / (group["epsilon"] + steepness + decay * size)
        own = rate * torch.where((size > 0) & (steepness > 0), trust, torch.ones_like(trust))
        v = state["momentum"]
        v.mul_(group["beta"]).sub_(grad * own)
        p.add_(v - p * (own * decay) if decay else v)


class LambUpdate(AdamUpdate):
    """A LAMB update: Adam with a learning rate per parameter (You et al. 2020).

    The rate follows from the norms of the parameter and of its step.
    """

    def change(
        self,
        p: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        rate: float,
        decay: float,
    ) -> None:
        direction = self.direction(grad, state, group) + p * decay
        size, length = p.norm(), direction.norm()
        trust = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
        p.sub_(direction * (trust * rate))


# These updates change each element independently of the others. They therefore step on local
# tensors, and ZeRO may shard their states.
ELEMENTWISE.update({SGDUpdate, AdamUpdate, LazyAdamUpdate, RMSPropUpdate})
