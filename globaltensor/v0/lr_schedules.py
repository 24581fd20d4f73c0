"""Learning rates by step. Steps count from 0: the first batch is trained with ``rate(0)``. A
warm-up takes the place of a schedule's first steps."""

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
    """How the first ``steps`` batches are trained; made by ``warmup.constant`` and
    ``warmup.linear``."""

    steps: int
    start: float
    rising: bool

    def rate(self, base: float, step: int) -> float:
        factor = self.start + (1.0 - self.start) * step / self.steps if self.rising else self.start
        return base * factor


def constant(steps: int, multiplier: float) -> WarmupConf:
    """For ``steps`` batches the base rate times ``multiplier``."""
    return WarmupConf(_steps("warmup.constant", steps), float(multiplier), False)


def linear(steps: int, start_multiplier: float) -> WarmupConf:
    """For ``steps`` batches from the base rate times ``start_multiplier`` up to the base rate, in
    even steps."""
    return WarmupConf(_steps("warmup.linear", steps), float(start_multiplier), True)


class LrScheduler:
    """A learning rate by step. ``base_lr``: the rate that warm-ups lead to."""

    base_lr: float
    warmup: WarmupConf | None = None

    def decayed(self, step: int) -> float:
        """The rate at a step, warm-ups aside."""
        raise JobError(
            f"{type(self).__name__} is no schedule: take one of flow.optimizer.*Scheduler"
        )

    def rate(self, step: int) -> float:
        """The rate at a step.

        >>> PiecewiseConstantScheduler([], [0.1], warmup=linear(10, 0.0)).rate(5)
        0.05
        """
        if self.warmup is not None and step < self.warmup.steps:
            return self.warmup.rate(self.base_lr, step)
        return self.decayed(step)


@dataclass(frozen=True)
class CosineScheduler(LrScheduler):
    """Half a cosine from ``base_lr`` down to ``alpha * base_lr`` at ``steps``, where it stays."""

    base_lr: float
    steps: int
    alpha: float = 0.0
    warmup: WarmupConf | None = None

    def decayed(self, step: int) -> float:
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(step, self.steps) / self.steps))
        return self.base_lr * ((1.0 - self.alpha) * cosine + self.alpha)


@dataclass(frozen=True)
class PiecewiseConstantScheduler(LrScheduler):
    """``values[i]`` up to and including step ``boundaries[i]``, then the next; one value more than
    boundaries."""

    boundaries: Sequence[int]
    values: Sequence[float]
    warmup: WarmupConf | None = None

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise JobError(
                f"PiecewiseConstantScheduler: {len(self.boundaries)} boundaries part "
                f"{len(self.boundaries) + 1} values, got {len(self.values)}"
            )

    @property
    def base_lr(self) -> float:  # type: ignore[override]
        return self.values[0]

    def decayed(self, step: int) -> float:
        return self.values[sum(step > b for b in self.boundaries)]


@dataclass(frozen=True)
class PiecewiseScalingScheduler(LrScheduler):
    """``base_lr`` up to and including the first boundary, then times ``scale[0]``, then
    ``scale[1]`` ... (of ``base_lr``). One number serves all."""

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
    """From ``base_lr`` to ``end_learning_rate`` at ``steps``, along a power; with ``cycle`` again
    and again, over longer and longer stretches."""

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
    """A falling line times a cosine of ``num_periods`` periods: ``(alpha + line) * cosine + beta``
    times ``base_lr`` (Bello et al. 2017)."""

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
    """What the next three share: a rate that falls with ``step / steps``, of which ``staircase``
    takes the whole part."""

    base_lr: float
    steps: int
    decay_rate: float
    staircase: bool = False
    warmup: WarmupConf | None = None

    def ratio(self, step: int) -> float:
        return float(step // self.steps) if self.staircase else step / self.steps


class ExponentialScheduler(_Decay):
    """``base_lr * decay_rate ** (step / steps)``; ``staircase``: only whole powers."""

    def decayed(self, step: int) -> float:
        return float(self.base_lr * self.decay_rate ** self.ratio(step))


class InverseTimeScheduler(_Decay):
    """``base_lr / (1 + decay_rate * step / steps)``; ``staircase``: only whole ratios."""

    def decayed(self, step: int) -> float:
        return self.base_lr / (1.0 + self.decay_rate * self.ratio(step))


class NaturalExpScheduler(_Decay):
    """``base_lr * exp(-decay_rate * step / steps)``; ``staircase``: only whole ratios."""

    def decayed(self, step: int) -> float:
        return self.base_lr * math.exp(-self.decay_rate * self.ratio(step))


class CustomScheduler(LrScheduler):
    """A rate of your own: a function of the step. The original took the name of a blob; raises
    JobError for one, since a job's blobs are not known before its step."""

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
