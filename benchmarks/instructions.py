"""Count the processor instructions of a benchmark's contenders, by valgrind.

Times differ from run to run by several percent, counts by less than 0.1 %. A count shows what a
change of Python code costs on the processor. It says nothing about waiting, caches and memory, and
several ranks that wait for each other cannot be counted. against.py ``--instructions`` starts the
runs, and `common.interleave` counts instead of timing.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

#: The environment variable that against.py sets: the path to which this run's counts go.
COUNTS = "BENCHMARK_COUNTS"
#: Calls before the first block: caches of layouts and of specialised bytecode have filled by then.
WARM_UP = 30
BLOCKS, CALLS = 3, 20


def command(counts: Path) -> list[str]:
    """Return the start of a command line under which a benchmark's instructions are counted.

    Exits with a message if valgrind is not installed or torch was built without its requests."""
    if shutil.which("valgrind") is None:
        sys.exit("--instructions needs valgrind: install it (for example apt install valgrind)")
    if not torch._C._valgrind_supported_platform():
        sys.exit("--instructions needs a torch that was built with callgrind's requests")
    return [
        "valgrind",
        "--tool=callgrind",
        "--collect-atstart=no",
        f"--callgrind-out-file={counts.with_suffix('.callgrind')}",
        f"--log-file={counts.with_suffix('.valgrind')}",
    ]


# The requests to valgrind are private names of torch. They stand here, because a benchmark also
# runs with the library of another commit, whose torch_private may lack them.


class Counter:
    """The counts of one run, which valgrind dumps to a new file after each block."""

    def __init__(self, counts: Path) -> None:
        self._counts, self._dumps = counts, 0

    def count(self, contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Return the instructions per call of each contender, block by block, and append them."""
        counted = {name: self._blocks(call) for name, call in contenders.items()}
        with self._counts.open("a") as file:
            file.write(json.dumps(counted) + "\n")
        return counted

    def _blocks(self, call: Callable[[], object]) -> list[float]:
        for _ in range(WARM_UP):
            call()
        counted = []
        for _ in range(BLOCKS):
            gc.collect()
            torch._C._valgrind_toggle()
            for _ in range(CALLS):
                call()
            torch._C._valgrind_toggle_and_dump_stats()
            counted.append(self._dumped() / CALLS)
        return counted

    def _dumped(self) -> int:
        self._dumps += 1
        lines = self._counts.with_suffix(f".callgrind.{self._dumps}").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("totals:"))


@functools.cache
def counter() -> Counter | None:
    """Return the counter of this process, or None where its instructions are not counted."""
    return Counter(Path(os.environ[COUNTS])) if COUNTS in os.environ else None
