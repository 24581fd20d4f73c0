"""Tests of flow.utils.Progress: its numbers, who prints, what writers get, and what is measured."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
import torch
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.communicator import Communicator
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.utils.training_progress import ProgressReport

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
STEP = 0.02  # seconds


class Scalars:
    """A writer like TensorBoard's."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))


class Runs:
    """A writer like a run of wandb."""

    def __init__(self) -> None:
        self.written: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.written.append((data, step))


def test_a_report_of_steps() -> None:
    out = io.StringIO()
    reports = []
    with flow.utils.Progress(5, every=2, tokens=100, file=out) as progress:
        for step in range(5):
            time.sleep(STEP)
            reports.append(progress.step(torch.tensor(float(step)), lr=0.1 * step))
    assert [None if r is None else (r.step, r.loss) for r in reports] == [
        None,
        (2, 0.5),
        None,
        (4, 2.5),
        (5, 4.0),
    ]
    last = reports[3]
    assert last is not None
    assert 0.2 / STEP < last.steps_per_second <= 1 / STEP
    assert last.tokens_per_second == last.steps_per_second * 100
    assert last.remaining == 1 / last.steps_per_second
    assert last.figures == {"lr": pytest.approx(0.3)}
    assert last.memory is not None
    assert last.memory > 1 << 20
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert re.fullmatch(
        r"step     4/5  loss 2\.5000  [\d,]+ tokens/s  memory [\d.]+ [MG]iB  lr 0\.3  0:00:00 left",
        lines[1],
    ), lines[1]
    assert not lines[2].endswith("left")


def test_what_a_line_shows() -> None:
    report = ProgressReport(25, 1000, 2.5, 3.0, None, 0.123, 3 << 20, 3661.0)
    assert str(report) == (
        "step    25/1000  loss 2.5000  3 steps/s  communication 12%  memory 3.0 MiB  1:01:01 left"
    )
    assert str(ProgressReport(7, None, None, 0.5, None, None, None, None)) == (
        "step     7  0.5 steps/s"
    )


def test_a_run_that_goes_on_counts_from_there() -> None:
    out = io.StringIO()
    with flow.utils.Progress(12, first=9, every=10, file=out) as progress:
        for _ in range(3):
            progress.step(1.0)
    assert [line.split("  loss")[0] for line in out.getvalue().splitlines()] == [
        "step    10/12",
        "step    12/12",
    ]


def test_writers_get_numbers() -> None:
    scalars, runs = Scalars(), Runs()
    with flow.utils.Progress(2, every=2, log_to=[scalars, runs], quiet=True) as progress:
        progress.step(1.0)
        progress.step(2.0, lr=0.5)
    names = ["loss", "steps_per_second", "memory_bytes", "lr"]
    assert [(tag, step) for tag, _, step in scalars.written] == [(name, 2) for name in names]
    assert scalars.written[0][1] == 1.5
    ((data, step),) = runs.written
    assert step == 2
    assert data == {tag: value for tag, value, _ in scalars.written}


def test_wrong_arguments() -> None:
    with pytest.raises(flow.errors.GlobalTensorError, match=r"neither add_scalar .* nor log"):
        flow.utils.Progress(log_to=object())
    with pytest.raises(flow.errors.GlobalTensorError, match="every=0"):
        flow.utils.Progress(every=0)


def partial_losses() -> tuple[float | None, str, int]:
    out, scalars = io.StringIO(), Scalars()
    with flow.utils.Progress(2, every=2, file=out, log_to=scalars) as progress:
        for _ in range(2):
            loss = torch.tensor(1.0 + world().rank).to_global(flow.placement.all("cpu"), P)  # type: ignore[attr-defined]
            report = progress.step(loss)
    assert report is not None
    return report.loss, out.getvalue(), len(scalars.written)


def test_global_losses_are_read_on_all_ranks_and_shown_on_the_first() -> None:
    (loss, text, written), (other, nothing, none) = simulate(2, partial_losses)
    assert loss == other == 3.0
    assert "loss 3.0000" in text
    assert (nothing, none) == ("", 0)
    assert written == 4, "loss, speed, communication and memory"


def late_ranks() -> tuple[list[float | None], int]:
    """Let rank 1 need half of a step longer, and count the steps that were measured."""
    here, measured = world(), 0
    everyone = tuple(range(here.size))
    shares = []
    with flow.utils.Progress(12, every=4, measure_every=4, quiet=True) as progress:
        for _ in range(12):
            measured += not isinstance(here.comm(everyone), Communicator)
            time.sleep(STEP * (1 + here.rank))
            here.comm(everyone).all_reduce(torch.ones(4))
            report = progress.step()
            if report is not None:
                shares.append(report.communication)
    assert isinstance(here.comm(everyone), Communicator), "nothing stays wrapped"
    return shares, measured


def test_the_share_of_communication_is_measured_on_every_kth_step() -> None:
    (waiting, measured), (working, _) = run_on(2, late_ranks)
    assert measured == 3
    assert all(share is not None and 0.3 < share < 0.8 for share in waiting), waiting
    assert all(share is not None and share < 0.3 for share in working), working


def a_loop_without_a_block() -> bool:
    here, everyone = world(), (0, 1)
    here.comm(everyone)
    progress = flow.utils.Progress(3, measure_every=2, quiet=True)
    for _ in range(3):
        progress.step()
    return isinstance(here.comm(everyone), Communicator)


def test_the_last_step_ends_the_measuring() -> None:
    assert simulate(2, a_loop_without_a_block) == [True, True]


def stopped_within() -> bool:
    here = world()
    everyone = tuple(range(here.size))
    here.comm(everyone)

    def fails() -> None:
        with flow.utils.Progress(measure_every=2, quiet=True) as progress:
            progress.step()
            assert not isinstance(here.comm(everyone), Communicator)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fails()
    return isinstance(here.comm(everyone), Communicator)


def test_a_loop_that_fails_leaves_nothing_wrapped() -> None:
    assert simulate(2, stopped_within) == [True, True]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_redrawn(monkeypatch: Any) -> None:
    out = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("globaltensor.utils.training_progress._REDRAW_SECONDS", 0.0)
    with flow.utils.Progress(3, every=2, file=out) as progress:
        for _ in range(3):
            progress.step(1.0)
    drawn = out.getvalue().split("\r\x1b[K")
    assert drawn[1].startswith("step     1/3")
    assert not drawn[1].endswith("\n")
    assert drawn[2].startswith("step     2/3  loss 1.0000")
    assert drawn[2].endswith("\n")
    assert drawn[-1] == ""


def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch: Any) -> None:
    out = Terminal()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("globaltensor.utils.training_progress._REDRAW_SECONDS", 0.0)
    with flow.utils.Progress(2, every=1, file=out) as progress:
        for _ in range(2):
            progress.step(1.0)
    assert [line[:13] for line in out.getvalue().splitlines()] == ["step     1/2 ", "step     2/2 "]
    assert "\x1b" not in out.getvalue()
