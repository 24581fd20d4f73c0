"""``flow.optimizer``: optimizers, schedules, clipping and loss scaling of jobs that train.

User code calls ``optimizer.SGD(schedule, momentum=0).minimize(loss)`` in a job function of type
"train".
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..amp import GradScaler, StaticGradScaler
from . import lr_schedules, optimizer_updates
from .blob import Blob, recording
from .errors import JobError
from .losses import add_loss
from .lr_schedules import (
    CosineScheduler,
    CustomScheduler,
    ExponentialScheduler,
    InverseTimeScheduler,
    LinearCosineScheduler,
    LrScheduler,
    NaturalExpScheduler,
    PiecewiseConstantScheduler,
    PiecewiseScalingScheduler,
    PolynomialScheduler,
)  # fmt: skip
from .recording.record import Declared

__all__ = [
    "LAMB", "LARS", "SGD", "SGDW", "Adam", "AdamW", "CosineScheduler", "CustomScheduler",
    "ExponentialScheduler", "InverseTimeScheduler", "LazyAdam",
    "LinearCosineScheduler", "LrScheduler", "NaturalExpScheduler", "Optimizer",
    "PiecewiseConstantScheduler", "PiecewiseScalingScheduler",
    "PolynomialScheduler", "RMSProp", "grad_clipping", "loss_scale", "warmup",
]  # fmt: skip


@dataclass(frozen=True)
class ByGlobalNorm:
    """A clipping rule by the norm over all gradients.

    If that norm exceeds ``clip_norm``, the gradients are scaled down to it.
    """

    clip_norm: float


@dataclass(frozen=True)
class StaticLossScale:
    """A constant loss scale.

    The loss is multiplied by ``loss_scale_factor``, and the gradients are divided by it.
    """

    loss_scale_factor: float

    def scaler(self, device: str) -> Any:
        return StaticGradScaler(self.loss_scale_factor, device)


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that adapts to overflows.

    It grows by ``multiplier`` after ``increment_period`` steps with finite gradients. A step with
    other gradients is skipped, and the scale is divided by ``multiplier``.
    """

    initial_loss_scale: float = 2.0**30
    increment_period: int = 2000
    multiplier: float = 2.0

    def scaler(self, device: str) -> Any:
        return GradScaler(
            device,
            float(self.initial_loss_scale),
            self.multiplier,
            1.0 / self.multiplier,
            self.increment_period,
        )


#: ``warmup.constant(steps, multiplier)`` and ``warmup.linear(steps, start_multiplier)``
warmup = types.SimpleNamespace(constant=lr_schedules.constant, linear=lr_schedules.linear)
#: ``grad_clipping.by_global_norm(clip_norm)``
grad_clipping = types.SimpleNamespace(by_global_norm=ByGlobalNorm)
#: ``loss_scale.static_loss_scale(factor)`` and ``loss_scale.dynamic_loss_scale(...)``
loss_scale = types.SimpleNamespace(
    static_loss_scale=StaticLossScale, dynamic_loss_scale=DynamicLossScale
)


class Optimizer:
    """The base class of all optimizers.

    ``loss_scale_factor`` is short for ``loss_scale_policy=loss_scale.static_loss_scale(factor)``.
    ``variables`` limits training to the variables with these names. JobError is raised for
    arguments that do not fit.
    """

    def __init__(
        self,
        lr_scheduler: LrScheduler,
        loss_scale_factor: float | None = None,
        grad_clipping: ByGlobalNorm | None = None,
        train_step_lbn: str | None = None,
        loss_scale_policy: StaticLossScale | DynamicLossScale | None = None,
        variables: Sequence[str] | None = None,
    ) -> None:
        kind = type(self).__name__
        if not isinstance(lr_scheduler, LrScheduler):
            raise JobError(
                f"optimizer.{kind}: the first argument is a schedule, like "
                f"PiecewiseConstantScheduler([], [0.1]); got {lr_scheduler!r}"
            )
        if train_step_lbn is not None:
            raise JobError(
                f"optimizer.{kind}: train_step_lbn names a blob that counts steps; the session "
                f"counts them itself now: leave it out"
            )
        if loss_scale_factor is not None and loss_scale_policy is not None:
            raise JobError(
                f"optimizer.{kind}: loss_scale_factor and loss_scale_policy set the same thing: "
                "pass one of them"
            )
        self.lr_scheduler, self.grad_clipping = lr_scheduler, grad_clipping
        self.loss_scale_policy = (
            StaticLossScale(loss_scale_factor)
            if loss_scale_factor is not None
            else loss_scale_policy
        )
        self.variables = None if variables is None else list(variables)
        # learning rate of variables with the model name "bias", from
        # ``function_config.train.secondary_lr``
        self.secondary: float | None = None
        self.weight_decay: tuple[float, Sequence[str] | None, Sequence[str] | None] = (
            0.0,
            None,
            None,
        )

    def minimize(self, loss: Blob | Sequence[Blob]) -> None:
        """Train this job: each call is a step against the gradient of the loss.

        The loss of several elements is reduced to its mean. Several losses are reduced to the sum
        of their means. Raise JobError if the job is not of type "train", or has an optimizer
        already.
        """
        tape = recording()
        if not tape.record.training:
            raise JobError(
                f'minimize: job {tape.record.name} is of type "predict": use '
                f'@flow.global_function(type="train")'
            )
        if tape.record.optimizer is not None:
            raise JobError(
                f"minimize: job {tape.record.name} has an optimizer already; several losses go to "
                f"one minimize([...])"
            )
        tape.record.optimizer = self
        for one in loss if isinstance(loss, (list, tuple)) else [loss]:
            add_loss(one)

    def _decays(self, weight_decay: float | None, includes: Any, excludes: Any) -> None:
        if includes is not None and excludes is not None:
            raise JobError(
                f"optimizer.{type(self).__name__}: weight_decay_includes and "
                f"weight_decay_excludes cannot both be given"
            )
        self.weight_decay = (float(weight_decay or 0.0), _patterns(includes), _patterns(excludes))

    def rule(self) -> tuple[type[optimizer_updates.Update], dict[str, Any]]:
        """Return the class of the update and its options."""
        raise JobError(f"{type(self).__name__} is no optimizer: take one of flow.optimizer")

    def made(
        self, declared: Sequence[Declared], held: Mapping[str, torch.nn.Parameter]
    ) -> optimizer_updates.Update:
        """Create the torch optimizer of a job's variables."""
        kind, options = self.rule()
        own = {
            "l1": [d.regularizer[0] for d in declared],
            "l2": [d.regularizer[1] for d in declared],
            "decay": [self._decay_of(d.name) for d in declared],
            "scale": [
                1.0
                if self.secondary is None or d.model_name != "bias"
                else self.secondary / self.lr_scheduler.base_lr
                for d in declared
            ],
        }
        if self.grad_clipping is not None:
            options["clip_grad_max_norm"] = float(self.grad_clipping.clip_norm)
        return kind([held[d.name] for d in declared], **own, **options)

    def _decay_of(self, name: str) -> float:
        rate, includes, excludes = self.weight_decay
        if includes is not None:
            return rate if any(re.search(p, name) for p in includes) else 0.0
        return 0.0 if any(re.search(p, name) for p in excludes or ()) else rate

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


def _patterns(given: str | Sequence[str] | None) -> list[str] | None:
    return [given] if isinstance(given, str) else None if given is None else list(given)


class SGD(Optimizer):
    """The SGD optimizer. With momentum: ``v = momentum * v + rate * g; w -= v``."""

    def __init__(
        self, lr_scheduler: LrScheduler, loss_scale_factor: float | None = None,
        momentum: float = 0.9, grad_clipping: ByGlobalNorm | None = None,
        train_step_lbn: str | None = None, loss_scale_policy: Any = None,
        variables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            lr_scheduler,
            loss_scale_factor,
            grad_clipping,
            train_step_lbn,
            loss_scale_policy,
            variables,
        )
        self.momentum = momentum

    def rule(self) -> tuple[type[optimizer_updates.Update], dict[str, Any]]:
        return optimizer_updates.SGDUpdate, {"beta": self.momentum}


class SGDW(SGD):
    """The SGD optimizer with decoupled weight decay: w also loses ``rate * weight_decay * w``.

    ``weight_decay_includes`` and ``weight_decay_excludes`` are regular expressions, searched in the
    names of variables. At most one of them may be set.
    """

    def __init__(
        self, lr_scheduler: LrScheduler, loss_scale_factor: float | None = None,
        momentum: float = 0.9, weight_decay: float | None = None,
        weight_decay_includes: str | Sequence[str] | None = None,
        weight_decay_excludes: str | Sequence[str] | None = None,
        grad_clipping: ByGlobalNorm | None = None, train_step_lbn: str | None = None,
        loss_scale_policy: Any = None, variables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            lr_scheduler,
            loss_scale_factor,
            momentum,
            grad_clipping,
            train_step_lbn,
            loss_scale_policy,
            variables,
        )
        self._decays(weight_decay, weight_decay_includes, weight_decay_excludes)


class Adam(Optimizer):
    """The Adam optimizer; ``do_bias_correction`` enlarges the first steps."""

    update: type[optimizer_updates.Update] = optimizer_updates.AdamUpdate

    def __init__(
        self, lr_scheduler: LrScheduler, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-8, do_bias_correction: bool = False,
        loss_scale_factor: float | None = None, grad_clipping: ByGlobalNorm | None = None,
        train_step_lbn: str | None = None, loss_scale_policy: Any = None,
        variables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            lr_scheduler,
            loss_scale_factor,
            grad_clipping,
            train_step_lbn,
            loss_scale_policy,
            variables,
        )
        self.beta1, self.beta2, self.epsilon, self.do_bias_correction = (
            beta1,
            beta2,
            epsilon,
            do_bias_correction,
        )

    def rule(self) -> tuple[type[optimizer_updates.Update], dict[str, Any]]:
        return self.update, {
            "beta1": self.beta1,
            "beta2": self.beta2,
            "epsilon": self.epsilon,
            "correct": self.do_bias_correction,
        }


class AdamW(Adam):
    """The Adam optimizer with decoupled weight decay (see `SGDW`)."""

    def __init__(
        self, lr_scheduler: LrScheduler, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-8, do_bias_correction: bool = False,
        loss_scale_factor: float | None = None, weight_decay: float | None = None,
        weight_decay_includes: str | Sequence[str] | None = None,
        weight_decay_excludes: str | Sequence[str] | None = None,
        grad_clipping: ByGlobalNorm | None = None, train_step_lbn: str | None = None,
        loss_scale_policy: Any = None, variables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        common = (loss_scale_factor, grad_clipping, train_step_lbn, loss_scale_policy, variables)
        super().__init__(lr_scheduler, beta1, beta2, epsilon, do_bias_correction, *common)
        self._decays(weight_decay, weight_decay_includes, weight_decay_excludes)


class LazyAdam(Adam):
    """An Adam optimizer that leaves elements with zero gradient unchanged."""

    update = optimizer_updates.LazyAdamUpdate

    def __init__(
        self, lr_scheduler: LrScheduler, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-8, loss_scale_factor: float | None = None,
        grad_clipping: ByGlobalNorm | None = None, train_step_lbn: str | None = None,
        loss_scale_policy: Any = None, variables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            lr_scheduler,
            beta1,
            beta2,
            epsilon,
            False,
            loss_scale_factor,
            grad_clipping,
            train_step_lbn,
            loss_scale_policy,
            variables,
        )


class LAMB(Adam):
    """The LAMB optimizer: Adam with a learning rate per variable.

    The rate follows from the norms of the variable and of its step.
    """

    update = optimizer_updates.LambUpdate

    def __init__(
        self, lr_scheduler: LrScheduler, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-6, loss_scale_factor: float | None = None,
        weight_decay: float | None = None, weight_decay_includes: str | Sequence[str] | None = None,
        weight_decay_excludes: str | Sequence[str] | None = None,
        grad_clipping: ByGlobalNorm | None = None, train_step_lbn: str | None = None,
        loss_scale_policy: Any = None, variables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            lr_scheduler,
            beta1,
            beta2,
            epsilon,
            True,
            loss_scale_factor,
            grad_clipping,
            train_step_lbn,
            loss_scale_policy,
            variables,
        )
        self._decays(weight_decay, weight_decay_includes, weight_decay_excludes)


class RMSProp(Optimizer):
    """The RMSProp optimizer: it divides the gradient by the root of its mean square.

    ``centered`` divides by the root of the gradient's variance instead.
    """

    def __init__(
        self, lr_scheduler: LrScheduler, decay_rate: float = 0.99, epsilon: float = 1e-8,
        centered: bool = False, loss_scale_factor: float | None = None,
        grad_clipping: ByGlobalNorm | None = None, train_step_lbn: str | None = None,
        loss_scale_policy: Any = None, variables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            lr_scheduler,
            loss_scale_factor,
            grad_clipping,
            train_step_lbn,
            loss_scale_policy,
            variables,
        )
        self.decay_rate, self.epsilon, self.centered = decay_rate, epsilon, centered

    def rule(self) -> tuple[type[optimizer_updates.Update], dict[str, Any]]:
        return optimizer_updates.RMSPropUpdate, {
            "decay_rate": self.decay_rate,
            "epsilon": self.epsilon,
            "centered": self.centered,
        }


class LARS(Optimizer):
    """The LARS optimizer: momentum with a learning rate per variable.

    The rate follows from the norms of the variable and of its gradient.
    """

    def __init__(
        self, lr_scheduler: LrScheduler, momentum_beta: float = 0.9, epsilon: float = 1e-9,
        lars_coefficient: float = 0.0001,
        loss_scale_factor: float | None = None, weight_decay: float | None = None,
        weight_decay_includes: str | Sequence[str] | None = None,
        weight_decay_excludes: str | Sequence[str] | None = None,
        grad_clipping: ByGlobalNorm | None = None, train_step_lbn: str | None = None,
        loss_scale_policy: Any = None, variables: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            lr_scheduler,
            loss_scale_factor,
            grad_clipping,
            train_step_lbn,
            loss_scale_policy,
            variables,
        )
        self.momentum_beta, self.epsilon, self.lars_coefficient = (
            momentum_beta,
            epsilon,
            lars_coefficient,
        )
        self._decays(weight_decay, weight_decay_includes, weight_decay_excludes)

    def rule(self) -> tuple[type[optimizer_updates.Update], dict[str, Any]]:
        return optimizer_updates.LarsUpdate, {
            "beta": self.momentum_beta,
            "epsilon": self.epsilon,
            "coefficient": self.lars_coefficient,
        }
