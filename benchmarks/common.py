"""Start the ranks of a benchmark, time its contenders in turn, and print its report.

All benchmarks use this module. Machines are noisy, so contenders are never timed one after the
other. Each round times every contender once, in an order that rotates, and the report has medians
over the rounds. Ratios are medians of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from instructions import counter
from torch import Tensor
from turns import turns

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / "examples"),
    str(ROOT / "tests"),
]  # the example's model, and the measuring tools of tests/support
#: Seconds after which a benchmark's processes are ended in any case. The limit is about twice the
#: time of the longest benchmark, auto_parallel.py for four ranks on two cores.
LIMIT = 5400.0
QUICK_ROUNDS = 3
#: Minimum seconds for which a contender is timed. For steps of some milliseconds, fifteen rounds
#: end before the machine's pace has varied.
LEAST = 1.5

Contenders = dict[str, Callable[[], object]]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Size:
    """A GPT of examples/train_gpt.py and its batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int

    def model(self) -> nn.Module:
        """Make the model, with the same parameters at every call and on every rank."""
        from train_gpt import GPT

        torch.manual_seed(0)
        return GPT(self.layers, self.width, self.heads, self.context)

    def rows(self) -> Tensor:
        """Draw a batch of text [batch, context + 1], the same on every rank."""
        from train_gpt import corpus, draw

        return draw(corpus(), self.batch, self.context, 0)

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, batch {self.batch} x {self.context}"


#: Three sizes whose training step is dominated by calls, by arithmetic (the size of `make train`),
#: and by the bytes that ranks exchange.
SIZES = [Size(4, 64, 4, 32, 4), Size(4, 128, 4, 128, 16), Size(4, 512, 8, 32, 4)]
QUICK_SIZES = [Size(1, 32, 2, 16, 4)]


def training_step(
    model: nn.Module, rows: Tensor, groups: list[list[Tensor]] | None = None
) -> Callable[[], Tensor]:
    """Return a function that does one training step and returns the loss.

    ``groups`` are the optimizer's groups of parameters, for parameters that cannot share one."""
    from train_gpt import loss_of

    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups or [list(model.parameters())]], lr=1e-4, fused=True
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@dataclass
class Row:
    """A case: the seconds of each contender, round by round."""

    case: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    unit: str = "us"

    def median(self, name: str) -> float:
        """Return a contender's median in the row's unit."""
        return statistics.median(self.seconds[name]) * {"us": 1e6, "ms": 1e3}[self.unit]

    def ratio(self, name: str, to: str) -> float:
        """Return the median over the rounds of one contender's time divided by another's."""
        return statistics.median(
            a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True)
        )

    def line(self) -> str:
        """Return the row as JSON: case, unit and the median of each contender."""
        return json.dumps(
            {"case": self.case, "unit": self.unit}
            | {name: round(self.median(name), 3) for name in self.seconds}
        )


def options(
    description: str,
    steps: int,
    arguments: Sequence[str] | None = None,
    more: dict[str, dict[str, Any]] | None = None,
) -> argparse.Namespace:
    """Parse the command line that all benchmarks have in common.

    ``steps`` is the default number of rounds. ``more`` has the options of one benchmark alone."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=steps, help="rounds; each times every contender once"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds: does it run?"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line instead of a table"
    )
    parser.add_argument(
        "--nproc", type=int, default=2, help="processes, where the benchmark uses several"
    )
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    for name, about in (more or {}).items():
        parser.add_argument(name, **about)
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.steps = min(chosen.steps, QUICK_ROUNDS)
    return chosen


def on_ranks(nproc: int, backend: str = "auto") -> None:
    """Return if a launcher has started this process, else run this script on ``nproc`` processes.

    In the second case, wait for the processes and exit with their status."""
    if "RANK" not in os.environ:
        sys.exit(started(nproc, backend))


def started(nproc: int, backend: str = "auto") -> int | str:
    """Run this script on ``nproc`` processes, and return their status or a message for `exit`."""
    command = [
        sys.executable,
        "-m",
        "globaltensor.distributed.launch",
        "--nproc_per_node",
        str(nproc),
        "--backend",
        backend,
        *sys.argv,
    ]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    end_by_signal()
    ranks = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    )
    try:
        return ranks.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return f"{Path(sys.argv[0]).name}: no end after {LIMIT:.0f} s"
    finally:
        end(ranks)


def end_by_signal() -> None:
    """Make a SIGTERM run this script's clean-up, so that its child processes end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end(process: subprocess.Popen[Any], group: bool = False) -> None:
    """End a process or its whole ``group``: first by SIGTERM, then by SIGKILL.

    A launcher ends its ranks too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number) if group else process.send_signal(number)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def interleave(
    contenders: Contenders,
    rounds: int,
    calls: int | None = None,
    warm_up: int = 3,
    clock: Clock = time.perf_counter,
    again: int = 0,
    least: float = 0.0,
) -> dict[str, list[float]]:
    """Return the seconds per call of each contender, round by round.

    All ranks start and end a block together. A block has ``calls`` calls, by default as many as
    take about 20 ms. ``again`` calls before each block are not counted, because another contender's
    block has emptied the caches. ``least`` is the minimum of seconds for which each contender is
    timed. It adds rounds if needed, but not if there are as few rounds as for --quick.

    A contender that neither waits nor communicates is better timed by ``time.process_time``,
    because other processes of the machine then don't count.

    Where against.py runs the benchmark twice at once, the runs take turns block by block, and have
    the rounds that it asks for. With its option ``--instructions``, the numbers are instructions
    per call instead of seconds.
    """
    if (counts := counter()) is not None:
        return counts.count(contenders)
    pair = turns()
    turn = pair.turn if pair is not None else contextlib.nullcontext
    together = (
        dist.barrier
        if dist.is_initialized() and dist.get_backend() in ("gloo", "mpi")
        else lambda: None
    )
    with turn():
        for call in contenders.values():
            for _ in range(warm_up):
                call()
        if calls is None:
            longest = max(_block(call, 20, together, clock) for call in contenders.values())
            calls = max(1, int(0.02 / longest))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    gc.collect()
    gc.freeze()
    if pair is not None:
        rounds = pair.rounds
    elif least and rounds > QUICK_ROUNDS:
        rounds = max(
            rounds,
            int(
                _agreed(
                    least
                    / (
                        calls
                        * statistics.median(
                            _block(call, calls, together, clock) for call in contenders.values()
                        )
                    )
                )
            ),
        )
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            with turn():
                # the caches have the other run's data
                for _ in range(max(again, pair is not None)):
                    contenders[name]()
                seconds[name].append(_block(contenders[name], calls, together, clock))
    gc.unfreeze()
    if pair is not None:
        with turn():  # neither goes on before the other has ended
            pair.write(seconds)
    return seconds


def _agreed(number: float) -> float:
    """Return rank 0's number on every rank."""
    if not dist.is_initialized():
        return number
    told = torch.tensor(number, dtype=torch.float64)
    dist.broadcast(told, 0)
    return told.item()


def _block(
    call: Callable[[], object], calls: int, together: Callable[[], object], clock: Clock
) -> float:
    together()
    started = clock()
    for _ in range(calls):
        call()
    together()
    return (clock() - started) / calls


def same_losses(
    contenders: dict[str, Callable[[], float]], steps: int = 2, tolerance: float = 1e-3
) -> list[float]:
    """Run the first steps of all contenders, and return the losses of the first contender.

    The contenders must do the same work. If their losses differ by more than ``tolerance``
    (relative), there is nothing to compare, and the process exits."""
    losses = {name: [step() for _ in range(steps)] for name, step in contenders.items()}
    (first, want), *others = losses.items()
    for name, got in others:
        if any(abs(a - b) > tolerance * abs(b) for a, b in zip(got, want, strict=True)):
            sys.exit(
                f"{name} does not do the same work as {first}: its losses are {got}, not {want}"
            )
    return want


def show(rows: Sequence[Row], as_json: bool, base: str) -> None:
    """Print the rows: JSON lines, or a table with each contender's ratio to ``base``."""
    if as_json:
        for row in rows:
            print(row.line(), flush=True)
    else:
        ratios = {
            row.case: {name: row.ratio(name, base) for name in row.seconds if base in row.seconds}
            for row in rows
        }
        print(table([json.loads(row.line()) for row in rows], ratios, base), flush=True)


def table(
    rows: Sequence[dict[str, object]],
    ratios: dict[str, dict[str, float]] | None = None,
    base: str = "",
) -> str:
    """Return rows as a markdown table that also reads well as text.

    With ``ratios``, each contender's ratio to ``base`` follows its median."""
    names = list(
        dict.fromkeys(name for row in rows for name in row if name not in ("case", "unit"))
    )

    def cell(row: dict[str, object], name: str) -> str:
        if name not in row:
            return "-"
        ratio = (ratios or {}).get(str(row["case"]), {}).get(name)
        if isinstance(row[name], str):
            return str(row[name])
        return (f"{row[name]:,}" if isinstance(row[name], int) else f"{row[name]:.4g}") + (
            f" ({ratio:.2f}x)" if ratio is not None and name != base else ""
        )

    lines = [
        ["case", "unit", *names],
        *(
            [str(row["case"]), str(row["unit"]), *(cell(row, name) for name in names)]
            for row in rows
        ),
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "| "
        + " | ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    ]
    text.insert(
        1,
        "|"
        + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths))
        + "|",
    )
    return "\n".join(text)


def keep(rows: Sequence[dict[str, object]], name: str) -> None:
    """Write rows to results/<name>.jsonl."""
    (ROOT / "benchmarks" / "results" / f"{name}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )


def describe() -> str:
    """Return a line about the machine and the settings of the measurements."""
    return (
        f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.get_num_threads()} "
        f"thread(s) a process, float32"
    )
