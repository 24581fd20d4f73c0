"""The turns of two runs of one benchmark, of which one works while the other one waits.

against.py starts the runs, and `common.interleave` takes the turns. Pipes pass the turn on, so a
run that waits takes no processor time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

#: The environment variables that against.py sets: the folder of the pipes, the name of this run,
#: which is "A" or "B", and the number of rounds.
FOLDER, RUN, ROUNDS = "BENCHMARK_TURNS", "BENCHMARK_TURNS_RUN", "BENCHMARK_TURNS_ROUNDS"


class Turns:
    """The turns of one run. All of its ranks have a turn together.

    The runs take turns in the order A B, B A, A B, ... Each pair is the same work in both.
    """

    def __init__(self, folder: Path, run: str, rounds: int) -> None:
        self.folder, self.run, self.rounds = folder, run, rounds
        self._rank, self._size = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        self._pair = 0
        self._pipes: dict[str, int] = {}

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for this run's part of the next pair, and pass the turn on after it."""
        first = (self._pair % 2 == 0) == (self.run == "A")
        # The first part of a pair is by the run that had the second part of the pair before.
        if not first:
            self._wait()
        yield
        if first:
            self._pass_on()
        self._pair += 1

    def write(self, seconds: dict[str, list[float]]) -> None:
        """Append the seconds of a comparison to the file of this run."""
        if self._rank == 0:
            with (self.folder / f"{self.run}.jsonl").open("a") as file:
                file.write(json.dumps(seconds) + "\n")

    def _wait(self) -> None:
        os.read(self._pipe(f"{self.run}{self._rank}"), 1)
        if self._rank == 0:
            for rank in range(1, self._size):
                os.write(self._pipe(f"{self.run}{rank}"), b".")

    def _pass_on(self) -> None:
        if self._rank == 0:
            os.write(self._pipe(f"{'B' if self.run == 'A' else 'A'}0"), b".")

    def _pipe(self, name: str) -> int:
        if name not in self._pipes:
            with contextlib.suppress(FileExistsError):
                os.mkfifo(self.folder / name)
            # open for both, which waits for nobody
            self._pipes[name] = os.open(self.folder / name, os.O_RDWR)
        return self._pipes[name]


@functools.cache
def turns() -> Turns | None:
    """Return the turns of this process, or None where against.py has not started it."""
    if FOLDER not in os.environ:
        return None
    return Turns(Path(os.environ[FOLDER]), os.environ[RUN], int(os.environ[ROUNDS]))
