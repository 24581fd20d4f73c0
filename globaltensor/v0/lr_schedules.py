"""Learning-rate schedules for the optimizers of the job-function interface.

Steps count from 0: the first batch is trained with ``rate(0)``. A warm-up replaces the first steps
of a schedule. User code creates schedules; `optimizer` asks them for each step's rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import JobError

__all__ = [
    "CosineScheduler", "CustomScheduler", "ExponentialScheduler", "InverseTimeScheduler",
    "LinearCosineScheduler", "LrScheduler", "NaturalExpScheduler",
    "PiecewiseConstantScheduler", "PiecewiseScalingScheduler", "PolynomialScheduler", "WarmupConf",
    "constant", "linear",
]  # fmt: skip


@dataclass(frozen=True)
class WarmupConf:
    """A warm-up: the learning rates of the first ``steps`` batches.

    ``warmup.constant`` and ``warmup.linear`` create it.
    """

    steps: int
    start: float
    rising: bool

    def rate(self, base: float, step: int) -> float:
        factor = self.start + (1.0 - self.start) * step / self.steps if self.rising else self.start
        return base * factor


def constant(steps: int, multiplier: float) -> WarmupConf:
    """Return a warm-up of ``steps`` batches at the base rate times ``multiplier``.

    Raise JobError if ``steps`` is less than 1.
    """
    return WarmupConf(_steps("warmup.constant", steps), float(multiplier), False)


def linear(steps: int, start_multiplier: float) -> WarmupConf:
    """Return a warm-up that rises from the base rate times ``start_multiplier`` to the base rate.

    It rises in equal increments over ``steps`` batches. Raise JobError if ``steps`` is less than 1.
    """
    return WarmupConf(_steps("warmup.linear", steps), float(start_multiplier), True)


class LrScheduler:
    """A learning rate by step, the base class of all schedules.

    ``base_lr`` is the rate at which warm-ups end.
    """

    base_lr: float
    warmup: WarmupConf | None = None

    def decayed(self, step: int) -> float:
        """Return the rate at a step, without warm-up."""
        raise JobError(
            f"{type(self).__name__} is no schedule: take one of flow.optimizer.*Scheduler"
        )

    def rate(self, step: int) -> float:
        """Return the rate at a step, including warm-up.

        >>> PiecewiseConstantScheduler([], [0.1], warmup=linear(10, 0.0)).rate(5)
        0.05
        """
        if self.warmup is not None and step < self.warmup.steps:
            return self.warmup.rate(self.base_lr, step)
        return self.decayed(step)


@dataclass(frozen=True)
class CosineScheduler(LrScheduler):
    """A half cosine from ``base_lr`` to ``alpha * base_lr`` at ``steps``, then constant."""

    base_lr: float
    steps: int
    alpha: float = 0.0
    warmup: WarmupConf | None = None

    def decayed(self, step: int) -> float:
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(step, self.steps) / self.steps))
        return self.base_lr * ((1.0 - self.alpha) * cosine + self.alpha)


@dataclass(frozen=True)
class PiecewiseConstantScheduler(LrScheduler):
    """A piecewise constant rate: ``values[i]`` up to and including step ``boundaries[i]``.

    ``values`` must have one item more than ``boundaries``; otherwise JobError is raised.
    """

    boundaries: Sequence[int]
    values: Sequence[float]
    warmup: WarmupConf | None = None

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise JobError(
                f"PiecewiseConstantScheduler: {len(self.boundaries)} boundaries need "
                f"{len(self.boundaries) + 1} values, got {len(self.values)}"
            )

    @property
    def base_lr(self) -> float:  # type: ignore[override]
        return self.values[0]

    def decayed(self, step: int) -> float:
        return self.values[sum(step > b for b in self.boundaries)]


@dataclass(frozen=True)
class PiecewiseScalingScheduler(LrScheduler):
    """A piecewise constant rate, given as factors of ``base_lr``.

    The rate is ``base_lr`` up to and including the first boundary, then ``base_lr * scale[0]``,
    then ``base_lr * scale[1]`` and so on. A single number as ``scale`` applies after every
    boundary. JobError is raised if the numbers of scales and boundaries differ.
    """

    base_lr: float
    boundaries: Sequence[int]
    scale: float | Sequence[float]
    warmup: WarmupConf | None = None

    def __post_init__(self) -> None:
        if isinstance(self.scale, Sequence) and len(self.scale) != len(self.boundaries):
            raise JobError(
                f"PiecewiseScalingScheduler: one scale for each of {len(self.boundaries)} "
                f"boundaries, got {len(self.scale)}"
            )

    def decayed(self, step: int) -> float:
        scales = (
            list(self.scale)
            if isinstance(self.scale, Sequence)
            else [self.scale] * len(self.boundaries)
        )
        return self.base_lr * [1.0, *scales][sum(step > b for b in self.boundaries)]


@dataclass(frozen=True)
class PolynomialScheduler(LrScheduler):
    """A polynomial decay from ``base_lr`` to ``end_learning_rate`` at ``steps``.

    ``power`` is the exponent. With ``cycle``, the schedule is stretched to the next multiple of
    ``steps`` whenever it has ended.
    """

    base_lr: float
    steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    warmup: WarmupConf | None = None

    def decayed(self, step: int) -> float:
        at, steps = float(step), float(self.steps)
        if self.cycle:
            at = at or 1.0
            steps *= math.ceil(at / steps)
        else:
            at = min(at, steps)
        return (self.base_lr - self.end_learning_rate) * (
            1.0 - at / steps
        ) ** self.power + self.end_learning_rate


@dataclass(frozen=True)
class LinearCosineScheduler(LrScheduler):
    """A falling line times a cosine of ``num_periods`` periods (Bello et al. 2017).

    The rate is ``((alpha + line) * cosine + beta) * base_lr``. The line falls from 1 to 0 at
    ``steps`` and stays there.
    """

    base_lr: float
    steps: int
    num_periods: float = 0.5
    alpha: float = 0.0
    beta: float = 0.001
    warmup: WarmupConf | None = None

    def decayed(self, step: int) -> float:
        at = min(step, self.steps) / self.steps
        cosine = 0.5 * (1.0 + math.cos(2.0 * math.pi * self.num_periods * at))
        return self.base_lr * ((self.alpha + 1.0 - at) * cosine + self.beta)


@dataclass(frozen=True)
class _Decay(LrScheduler):
    """The base of the next three schedules, whose rates fall with ``step / steps``.

    ``staircase`` rounds that ratio down to an integer.
    """

    base_lr: float
    steps: int
    decay_rate: float
    staircase: bool = False
    warmup: WarmupConf | None = None

    def ratio(self, step: int) -> float:
        return float(step // self.steps) if self.staircase else step / self.steps


class ExponentialScheduler(_Decay):
    """The rate ``base_lr * decay_rate ** (step / steps)``.

    ``staircase`` rounds the exponent down.
    """

    def decayed(self, step: int) -> float:
        return float(self.base_lr * self.decay_rate ** self.ratio(step))


class InverseTimeScheduler(_Decay):
    """The rate ``base_lr / (1 + decay_rate * step / steps)``.

    ``staircase`` rounds ``step / steps`` down.
    """

    def decayed(self, step: int) -> float:
        return self.base_lr / (1.0 + self.decay_rate * self.ratio(step))


class NaturalExpScheduler(_Decay):
    """The rate ``base_lr * exp(-decay_rate * step / steps)``.

    ``staircase`` rounds ``step / steps`` down.
    """

    def decayed(self, step: int) -> float:
        return self.base_lr * math.exp(-self.decay_rate * self.ratio(step))


class CustomScheduler(LrScheduler):
    """A schedule by a function of the step that the user supplies.

    OneFlow took the name of a blob here. That raises JobError, because a job's blobs are not known
    before its step.
    """

    def __init__(self, lbn: Callable[[int], float] | Any) -> None:
        if not callable(lbn):
            raise JobError(
                f"CustomScheduler({lbn!r}): use a function of the step instead of a blob's name: "
                f"CustomScheduler(lambda step: 0.1 / (1 + step))"
            )
        self.function = lbn
        self.base_lr = float(lbn(0))

    def decayed(self, step: int) -> float:
        return float(self.function(step))

    def __repr__(self) -> str:
        return f"CustomScheduler({getattr(self.function, '__qualname__', type(self.function).__name__)})"  # noqa: E501


def _steps(what: str, steps: int) -> int:
    if not isinstance(steps, int) or steps < 1:
        raise JobError(f"{what}: steps is a number of batches, at least 1; got {steps!r}")
    return steps
