"""``flow.optim.lr_scheduler``: torch's schedulers, and OneFlow's.

Two of OneFlow's are not in torch, and one is in both. Users construct them. A step is what torch
calls an epoch."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._base.torch_namespace import directory as _directory
from .._base.torch_namespace import names_of_torch as _names_of_torch

__all__ = ["CosineDecayLR", "PolynomialLR", "WarmUpLR", "WarmupLR"]

__getattr__ = _names_of_torch(__name__)
__dir__ = _directory(__name__)


def _print_rates(scheduler: Any) -> None:
    if scheduler.verbose:
        sys.stdout.write(
            f"step {scheduler.last_epoch}: learning rates "
            f"{', '.join(f'{lr:.4g}' for lr in scheduler.get_last_lr())}\n"
        )


class _Scheduler(LRScheduler):
    def __init__(self, optimizer: Optimizer, last_step: int, verbose: bool) -> None:
        self.verbose = verbose
        super().__init__(optimizer, last_step)

    @property
    def last_step(self) -> int:
        """The index of the last step: torch's ``last_epoch``."""
        return self.last_epoch

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step."""
        super().step(epoch)
        _print_rates(self)


class CosineDecayLR(_Scheduler):
    """A cosine decay of the rate (Loshchilov and Hutter 2017, "SGDR", without restarts).

    The rate falls along half a cosine to ``alpha`` times itself in ``decay_steps`` steps, and stays
    there. Raises ValueError unless ``decay_steps`` is positive."""

    def __init__(
        self,
        optimizer: Optimizer,
        decay_steps: int,
        alpha: float = 0.0,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        if decay_steps <= 0:
            raise ValueError(f"CosineDecayLR: decay_steps must be positive, got {decay_steps}")
        self.decay_steps, self.alpha = decay_steps, alpha
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self) -> list[Any]:
        """Return the rates of the groups at this step."""
        fallen = 0.5 * (
            1 + math.cos(math.pi * min(self.last_epoch, self.decay_steps) / self.decay_steps)
        )
        return [base * ((1 - self.alpha) * fallen + self.alpha) for base in self.base_lrs]


class PolynomialLR(torch.optim.lr_scheduler.PolynomialLR):
    """A polynomial decay of the rate: torch's, or OneFlow's if ``decay_batch`` is passed.

    ``steps`` is an older name of ``decay_batch``. In OneFlow's, the rate falls in so many steps to
    ``end_learning_rate``, as (1 - step / decay_batch) ** ``power``, and stays there. With ``cycle``
    it continues to fall from the rate it began with, over twice the steps, then three times. Raises
    ValueError unless ``decay_batch`` is positive, and TypeError for arguments of both forms.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> schedule = PolynomialLR(optimizer, decay_batch=4, end_learning_rate=0.02, power=2.0)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates.append(round(schedule.get_last_lr()[0], 6))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.1, 0.065, 0.04, 0.025, 0.02, 0.02]
    """

    def __init__(
        self, optimizer: Optimizer, total_iters: int | None = None, power: float = 1.0,
        last_epoch: int = -1, *, decay_batch: int | None = None,
        steps: int | None = None, end_learning_rate: float | None = None, cycle: bool = False,
        last_step: int = -1, verbose: bool = False,
    ) -> None:  # fmt: skip
        step_counts = [n for n in (total_iters, decay_batch, steps) if n is not None]
        ours = decay_batch is not None or steps is not None
        if len(step_counts) > 1 or (not ours and (end_learning_rate is not None or cycle)):
            raise TypeError(
                "PolynomialLR: give total_iters (as torch has it), or decay_batch with "
                "end_learning_rate and cycle (as OneFlow has it)"
            )
        self.decay_batch, self.cycle, self.verbose = (
            step_counts[0] if ours else None,
            cycle,
            verbose,
        )
        self.end_learning_rate = 0.0001 if end_learning_rate is None else end_learning_rate
        if ours and step_counts[0] <= 0:
            raise ValueError(f"PolynomialLR: decay_batch must be positive, got {step_counts[0]}")
        super().__init__(optimizer, *(step_counts or [5]), power, max(last_epoch, last_step))

    def get_lr(self) -> list[Any]:
        """Return the rates of the groups at this step."""
        over, at = self.decay_batch, self.last_epoch
        if over is None:
            return super().get_lr()
        if self.cycle:
            over *= max(1, math.ceil(at / over))
        left: float = (1 - min(at, over) / over) ** self.power
        return [
            (base - self.end_learning_rate) * left + self.end_learning_rate
            for base in self.base_lrs
        ]

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step."""
        super().step(epoch)
        _print_rates(self)


class WarmupLR(_Scheduler):
    """A warm-up of rates, alone or before another scheduler.

    Rates begin at ``warmup_factor`` times the optimizer's. For ``warmup_iters`` steps they stay
    there ("constant") or grow linearly ("linear").

    If a scheduler is passed, the rates then follow it. This scheduler advances during the warm-up,
    which ends at the rate that it has reached by then. With ``warmup_prefix`` it begins after the
    warm-up, which ends at the optimizer's own rates. Call ``step`` of this object alone. Raises
    ValueError for another method, for an argument that is neither a scheduler nor an optimizer, and
    for no steps with an optimizer.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> schedule = WarmupLR(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), warmup_factor=0.5, warmup_iters=2, warmup_prefix=True)
    >>> rates = []
    >>> for _ in range(5):
    ...     rates.append(round(schedule.get_last_lr()[0], 6))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.05, 0.075, 0.1, 0.05, 0.025]
    """  # noqa: E501

    def __init__(
        self, scheduler_or_optimizer: LRScheduler | Optimizer, warmup_factor: float = 1.0 / 3,
        warmup_iters: int = 5, warmup_method: str = "linear",
        warmup_prefix: bool = False, last_step: int = -1, verbose: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(scheduler_or_optimizer, (LRScheduler, Optimizer)):
            raise ValueError(
                f"WarmupLR: takes a scheduler or an optimizer, got "
                f"{type(scheduler_or_optimizer).__name__}"
            )
        if warmup_method not in ("linear", "constant"):
            raise ValueError(
                f'WarmupLR: warmup_method is "linear" or "constant", got {warmup_method!r}'
            )
        self.scheduler = (
            scheduler_or_optimizer if isinstance(scheduler_or_optimizer, LRScheduler) else None
        )
        if self.scheduler is None and warmup_iters <= 0:
            raise ValueError(
                f"WarmupLR: warmup_iters must be positive where there is no scheduler to continue "
                f"with, got {warmup_iters}"
            )
        self.warmup_factor, self.warmup_iters, self.warmup_method, self.warmup_prefix = (
            warmup_factor,
            warmup_iters,
            warmup_method,
            warmup_prefix,
        )
        optimizer = scheduler_or_optimizer if self.scheduler is None else self.scheduler.optimizer
        self._ends = self._rates_after_warmup(optimizer)
        super().__init__(optimizer, last_step, verbose)  # type: ignore[arg-type]

    def _rates_after_warmup(self, optimizer: Any) -> list[Any] | None:
        """Return the scheduler's rates at the end of the warm-up.

        Returns None if these are the optimizer's own."""
        scheduler = self.scheduler
        if scheduler is None or self.warmup_prefix:
            return None
        state, groups = (
            scheduler.state_dict(),
            [
                copy.deepcopy({k: v for k, v in group.items() if k != "params"})
                for group in optimizer.param_groups
            ],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that a step of the optimizer comes first
            for _ in range(scheduler.last_epoch, self.warmup_iters):
                scheduler.step()
        ends = scheduler.get_last_lr()
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            for name, value in settings.items():
                _set(group, name, value)
        scheduler.load_state_dict(state)
        return ends

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step.

        Raises ValueError for ``epoch``: each rate follows the one before."""
        if epoch is not None:
            raise ValueError(
                "WarmupLR: step() takes no epoch; to continue from a step, call load_state_dict"
            )
        scheduler = self.scheduler
        if scheduler is not None and self.last_epoch >= (
            self.warmup_iters if self.warmup_prefix else 0
        ):
            for group, lr in zip(self.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                _set(group, "lr", lr)  # torch's schedulers continue from the rates they find
            scheduler.step()
        super().step()

    def get_lr(self) -> list[Any]:
        """Return the rates of the groups at this step."""
        at = self.last_epoch
        if at >= self.warmup_iters:
            return list(self.base_lrs if self.scheduler is None else self.scheduler.get_last_lr())
        starts = [base * self.warmup_factor for base in self.base_lrs]
        if self.warmup_method == "constant":
            return starts
        ends = self.base_lrs if self._ends is None else self._ends
        return [
            start + (end - start) * at / self.warmup_iters
            for start, end in zip(starts, ends, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the scheduler that follows the warm-up."""
        state = {k: v for k, v in super().state_dict().items() if k != "scheduler"}
        return (
            state if self.scheduler is None else {**state, "scheduler": self.scheduler.state_dict()}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state.

        Raises ValueError unless both have a scheduler after the warm-up, or neither."""
        state = dict(state_dict)
        if ("scheduler" in state) != (self.scheduler is not None):
            raise ValueError(
                "WarmupLR: the state and this WarmupLR must both have a scheduler, or neither"
            )
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state.pop("scheduler"))
        super().load_state_dict(state)


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a value of a group. As in torch's schedulers, a tensor rate remains the same tensor."""
    if isinstance(group.get(name), Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


WarmUpLR = WarmupLR
