"""``flow.utils.Progress``: what a training run does, in a line on rank 0 and in its writers.

Users put it around their training loop.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, TextIO, runtime_checkable

import torch

from .._base.byte_size import show_bytes
from .._base.terminal import is_terminal
from ..distributed.communication_clock import CommunicationClock
from ..distributed.world import world
from ..errors import GlobalTensorError
from .memory import peak_memory

__all__ = ["ProgressReport", "RunWriter", "ScalarWriter", "TrainingProgress"]

_REDRAW_SECONDS: Final = 0.25


@runtime_checkable
class ScalarWriter(Protocol):
    """A writer of single numbers: torch.utils.tensorboard's SummaryWriter, and those like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


@runtime_checkable
class RunWriter(Protocol):
    """A writer of dicts of numbers: a run of Weights & Biases, and those like it."""

    def log(self, data: dict[str, float], step: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """The state of a training run after ``step`` of ``total`` steps.

    ``loss`` is the mean since the last report, or None. ``tokens_per_second`` is None if the number
    of tokens is unknown. ``communication`` is the share of a step that this rank spends in
    collectives, waiting included, or None before it was measured. ``memory`` is the peak of this
    rank in bytes. ``remaining`` is the expected time to the last step in seconds, or None.
    ``figures`` are the program's own numbers.
    """

    step: int
    total: int | None
    loss: float | None
    steps_per_second: float
    tokens_per_second: float | None
    communication: float | None
    memory: int | None
    remaining: float | None
    figures: dict[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Return all that is known as numbers with names, as writers get them."""
        named = {
            "loss": self.loss,
            "steps_per_second": self.steps_per_second,
            "tokens_per_second": self.tokens_per_second,
            "communication": self.communication,
            "memory_bytes": self.memory,
            **self.figures,
        }
        return {name: float(value) for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        of = "" if self.total is None else f"/{self.total}"
        parts = [f"step {self.step:5d}{of}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        else:
            parts.append(f"{self.steps_per_second:.3g} steps/s")
        if self.communication is not None:
            parts.append(f"communication {self.communication:.0%}")
        if self.memory is not None:
            parts.append(f"memory {show_bytes(self.memory)}")
        parts += [f"{name} {value:.4g}" for name, value in self.figures.items()]
        if self.remaining is not None and self.step != self.total:
            parts.append(f"{_clock(self.remaining)} left")
        return "  ".join(parts)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class TrainingProgress:
    """A report of a training loop: a line on rank 0 every few steps.

    The line has the loss, the speed, the share of time in communication, memory, and the time that
    is left. Every rank calls `step` after each training step. ``total``: the number of the last
    step. ``first``: the steps that were done before, for a run that goes on. ``tokens``: the tokens
    of a step over all ranks; then the speed is in tokens a second. ``every``: steps between two
    reports. ``measure_every``: the communication of one step in so many is measured. The other
    steps have no overhead. ``log_to``: a TensorBoard SummaryWriter, a run of Weights & Biases,
    several of them, or None, as on the ranks that write no log. ``file``: where rank 0 prints,
    standard output by default. ``live``: on a terminal, redraw a line between reports. ``quiet``:
    print nothing. Raises GlobalTensorError for other arguments.

    Use it in a ``with`` block. The end of the block stops a measurement in progress.

    >>> import torch
    >>> with TrainingProgress(4, every=2) as progress:
    ...     for step in range(4):
    ...         report = progress.step(torch.tensor(1.0 + step))
    step     2/4  loss 1.5000  ... left
    step     4/4  loss 3.5000  ...
    >>> report.loss, report.step
    (3.5, 4)
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        first: int = 0,
        tokens: int | None = None,
        every: int = 25,
        measure_every: int = 25,
        log_to: Any = (),
        file: TextIO | None = None,
        live: bool = True,
        quiet: bool = False,
    ) -> None:
        if every < 1 or measure_every < 1:
            raise GlobalTensorError(
                f"Progress: every={every} and measure_every={measure_every} must be at least 1"
            )
        self.total, self.tokens, self.every = total, tokens, every
        self.measure_every = measure_every
        self.done = first
        self.communication: float | None = None
        self.writers = _writers(log_to)
        self.file = sys.stdout if file is None else file
        self.shown = world().rank == 0 and not quiet
        self.in_place = live and self.shown and is_terminal(self.file)
        self._losses: list[Any] = []
        self._figures: dict[str, float] = {}
        self._clock = CommunicationClock()
        self._since, self._counted = time.perf_counter(), first
        self._drawn, self._last = 0.0, ""

    def __enter__(self) -> TrainingProgress:
        self._since = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._clock.running:
            self._clock.stop()
        if self.in_place:
            self._write("\r\x1b[K")

    def step(self, loss: Any = None, **figures: float) -> ProgressReport | None:
        """Count a step, and return the report if one was due, else None.

        ``loss``: a number, or a tensor of one element, whose value is read only for a report. A
        global tensor is read on all its ranks, so all ranks call this method. ``figures``: more
        numbers to show, such as the learning rate.
        """
        if self._clock.running:
            self.communication = self._clock.stop()
        self.done += 1
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._figures.update(figures)
        report = None
        if self.done % self.every == 0 or self.done == self.total:
            report = self._report()
        elif self.in_place and time.perf_counter() - self._drawn > _REDRAW_SECONDS:
            self._draw()
        # The step before the first report is measured too, so that each report has a share.
        due = (self.done + 1) % self.measure_every == 0 or self.done + 1 == self.every
        if due and self.done != self.total:
            self._clock.start()
        return report

    def _report(self) -> ProgressReport:
        loss = self._mean_loss()  # waits for the device, so it comes before the time is read
        now = time.perf_counter()
        rate = (self.done - self._counted) / max(now - self._since, 1e-9)
        report = ProgressReport(
            self.done,
            self.total,
            loss,
            rate,
            None if self.tokens is None else rate * self.tokens,
            self.communication if world().size > 1 else None,
            peak_memory(),
            None if self.total is None else max(0, self.total - self.done) / rate,
            self._figures,
        )
        self._losses, self._figures = [], {}
        self._since, self._counted = now, self.done
        if self.shown:
            self._last = str(report)
            self._write(f"\r\x1b[K{self._last}\n" if self.in_place else f"{self._last}\n")
        if world().rank == 0:
            for writer in self.writers:
                _log(writer, report)
        return report

    def _mean_loss(self) -> float | None:
        losses = self._losses
        if not losses:
            return None
        if all(isinstance(loss, torch.Tensor) for loss in losses):
            return float(torch.stack([loss.reshape(()) for loss in losses]).mean().item())
        return math.fsum(map(float, losses)) / len(losses)

    def _draw(self) -> None:
        now = time.perf_counter()
        rate = (self.done - self._counted) / max(now - self._since, 1e-9)
        of = "" if self.total is None else f"/{self.total}"
        self._write(f"\r\x1b[Kstep {self.done:5d}{of}  {rate:.3g} steps/s")
        self._drawn = now

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()


def _writers(log_to: Any) -> tuple[ScalarWriter | RunWriter, ...]:
    if log_to is None:
        return ()
    writers = tuple(log_to) if isinstance(log_to, Sequence) else (log_to,)
    for writer in writers:
        if not isinstance(writer, ScalarWriter | RunWriter):
            raise GlobalTensorError(
                f"Progress: log_to is a {type(writer).__name__}, which has neither add_scalar (as "
                f"TensorBoard's SummaryWriter) nor log (as a run of wandb). Pass such a writer, or "
                f"use the report that step() returns"
            )
    return writers


def _log(writer: ScalarWriter | RunWriter, report: ProgressReport) -> None:
    numbers = report.numbers()
    if isinstance(writer, ScalarWriter):
        for name, value in numbers.items():
            writer.add_scalar(name, value, report.step)
    else:
        writer.log(numbers, step=report.step)
