"""The ranks of one node as processes: start them, report how they ended, and end them.

The agent calls this module. Ending a rank also ends all processes that it has started.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from .log_streams import STDERR, STDOUT, Pump, Stream, say

__all__ = ["LocalWorkers", "OrphanReaper", "Process", "Rank", "start_here", "stdin", "tethered"]

_TICK_SECONDS: Final = 0.02
_KILL_SECONDS: Final = 5.0  # for the system to end processes after SIGKILL
_TAIL_LINES: Final = 16
_LAST_LINES: Final = 4  # the lines of a traceback that have its message
_LINE_LENGTH: Final = 400  # of a line in a report that the console has shown already
# Other ranks may notice a failure before the failed rank has ended, as an interpreter takes a while
# to exit. The launcher waits so long for that rank.
_CAUSE_SECONDS: Final = 2.0
# The prefix that torch writes before the lines of a traceback.
_RANK_BEFORE: Final = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
#: Messages of ranks that end because another rank has ended. If several ranks failed at once, the
#: report names a rank without such a message.
_ECHO: Final = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|has died, hangs|gave up \(its own "
    r"error says why\)|remote process exited|socket closed|has died, with no end of its program|"
    r"has failed: the exception in its own output is the cause|"
    r"has ended, or the connection to it is lost|"
    r"the errors of other ranks show what they were doing",
    re.IGNORECASE,
)
_THROWN: Final = "terminate called"
_CRASH: Final = "Fatal Python error"
_HEADS: Final = ("Traceback (most recent call last)", _THROWN, _CRASH)
_TETHER: Final = Path(__file__).with_name("parent_death_signal.py")
_KEEPER: Final = Path(__file__).with_name("orphan_reaper.py")


class Process(Protocol):
    """A running rank."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit code, -n if signal n ended the process, or None while it lives."""


@dataclass
class Rank:
    """One rank: its command, its variables, its output streams and, once started, its process.

    ``variables`` are added to those of the launcher.
    """

    rank: int
    local_rank: int
    command: Sequence[str]
    variables: Mapping[str, str]
    out: Stream = field(default_factory=lambda: Stream(STDOUT))
    err: Stream = field(default_factory=lambda: Stream(STDERR, save_tail=True))
    process: Process | None = None
    told_to_end: bool = False

    @property
    def code(self) -> int | None:
        """The exit code, -n if signal n ended the rank, or None while it lives."""
        return None if self.process is None else self.process.poll()

    @property
    def failed(self) -> bool:
        """True if the rank ended with an error before the launcher asked it to end."""
        return bool(self.code) and not self.told_to_end

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to all processes that it has started."""
        if self.process is None:
            return
        self.told_to_end = self.told_to_end or self.code is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:  # not the leader of a group yet, or gone
                if self.code is None:
                    os.kill(self.process.pid, number)

    def last_words(self) -> list[str]:
        """Return the last traceback that the rank wrote, shortened, else its last lines."""
        said = _RANK_BEFORE.sub("", self.err.tail().decode(errors="replace").replace("\r", "\n"))
        lines = said.rstrip().splitlines()
        lines = [line for line in lines if not line.startswith("Extension modules:")]
        while lines and not lines[-1].strip():
            lines.pop()
        heads = [i for i, line in enumerate(lines) if line.startswith(_HEADS)]
        if (
            len(heads) > 1
            and lines[heads[-1]].startswith(_CRASH)
            and lines[heads[-2]].startswith(_THROWN)
        ):
            cause = lines[heads[-2] : heads[-1]]  # the reason; the place of the abort follows
            return [*cause, *lines[heads[-1] :][-_TAIL_LINES:]]
        if heads and len(lines) - heads[-1] > _TAIL_LINES:
            return [lines[heads[-1]], "  ...", *lines[-_TAIL_LINES:]]
        return lines[heads[-1] :] if heads else lines[-_TAIL_LINES // 2 :]

    @property
    def echoes(self) -> bool:
        """True if the last output shows that the rank ended because another rank had ended."""
        return (self.code or 0) > 0 and bool(
            _ECHO.search(" ".join(self.last_words()[-_LAST_LINES:]))
        )

    def epitaph(self) -> str:
        """Return one line that says which rank it was and how it ended."""
        code = self.code or 0
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal_name(-code)} (signal {-code})"
            if -code == signal.SIGKILL:
                how += ", as by kill -9, or by the system when memory runs out"
        return (
            f"rank {self.rank} (local rank {self.local_rank}, pid "
            f"{self.process.pid if self.process else 0} on {socket.gethostname()}) {how}"
        )


class OrphanReaper:
    """A process that outlives the launcher for a moment, to kill what ranks have started.

    It does so only if the launcher can no longer do it. Leaving the block ends it.
    """

    def __enter__(self) -> OrphanReaper:
        command = [sys.executable, "-I", "-S", str(_KEEPER)]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=null,
            stderr=null,
            start_new_session=True,
            text=True,
            bufsize=1,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=_KILL_SECONDS)

    def hold(self, group: int) -> None:
        """Kill this process group if the launcher ends before it calls ``release``."""
        self._tell(f"+{group}")

    def release(self, group: int) -> None:
        """Stop holding this process group, so that it may live."""
        self._tell(f"-{group}")

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the reaper was already killed, and it is not essential
            self._process.stdin.write(f"{text}\n")


class LocalWorkers:
    """The ranks of this node, which start and end together.

    ``start`` is a function that starts their processes.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        pump: Pump,
        keeper: OrphanReaper,
        start: Callable[[Sequence[Rank]], None],
    ) -> None:
        self.ranks, self._pump, self._keeper, self._start = list(ranks), pump, keeper, start

    def start(self, again: bool = False) -> None:
        """Start the ranks. If ``again``, they append to the files of earlier ranks."""
        for rank in self.ranks:
            for stream in (rank.out, rank.err):
                stream.open(again)
                self._pump.add(stream)
        try:
            self._start(self.ranks)
        finally:
            for rank in self.ranks:
                rank.out.started()
                rank.err.started()
                if rank.process is not None:
                    self._keeper.hold(rank.process.pid)

    @property
    def alive(self) -> list[Rank]:
        """The ranks that have not ended yet."""
        return [rank for rank in self.ranks if rank.process is not None and rank.code is None]

    @property
    def failed(self) -> list[Rank]:
        """The ranks that failed without a request to end, the most likely cause first.

        Of ranks found dead at the same moment, one ended by a signal did not end because of the
        others.
        """
        failed = [rank for rank in self.ranks if rank.failed]
        if len(failed) > 1:
            self._pump.settle()  # get their last output
        return sorted(failed, key=lambda rank: ((rank.code or 0) > 0, rank.echoes, rank.rank))

    def failed_by(self, hurry: Callable[[], object]) -> list[Rank]:
        """Return ``failed`` with the rank that caused the failure among them.

        A rank that noticed the end of another rank may be found dead before that rank. So wait for
        the cause for a moment, or until ``hurry`` returns True.
        """
        until = time.monotonic() + _CAUSE_SECONDS
        self._pump.settle()
        while (
            (failed := self.failed)[0].echoes
            and self.alive
            and time.monotonic() < until
            and not hurry()
        ):
            time.sleep(_TICK_SECONDS)
        return failed

    def end(
        self,
        number: int = signal.SIGTERM,
        grace: float = 10.0,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """End all ranks and all processes that they have started.

        They first get signal ``number``. Those alive ``grace`` seconds later, or once ``hurry``
        returns True, get SIGKILL.
        """
        until = time.monotonic() + grace
        for rank in self.ranks:
            rank.signal(number)
        while self.alive and time.monotonic() < until and not hurry():
            time.sleep(_TICK_SECONDS)
        deaf = [str(rank.rank) for rank in self.alive]
        if deaf and not hurry():
            say(
                f"rank{'s' if len(deaf) > 1 else ''} {', '.join(deaf)} did not end {grace:g} s "
                f"after {signal_name(number)}: killed"
            )
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
        until = time.monotonic() + _KILL_SECONDS
        while self.alive and time.monotonic() < until:
            time.sleep(_TICK_SECONDS)
        self._pump.settle()

    def report(self, failed: Sequence[Rank]) -> str:
        """Return the report of a failure, in lines.

        It has the first of these ranks, its last output, and what happened to the others. The
        output is a repetition if the console has shown it, so its long lines are cut.
        """
        first, *others = failed
        words = first.last_words()
        if first.err.console is not None:
            words = [_cut(line) for line in words]
        lines = [
            first.epitaph(),
            *(f"| {line}" for line in words),
            *(f"another rank failed too: {other.epitaph()}" for other in others),
        ]
        if first.err.path is not None:
            lines.append(f"its output is in {first.err.path.parent}")
        left = sum(rank.code != 0 for rank in self.ranks) - len(failed)
        if left:
            others_left = f"{left} ranks" if left > 1 else "rank"
            lines.append(f"the launcher has ended the other {others_left} of this node too")
        return "\n".join(lines)

    def close(self) -> None:
        """Release the ranks, and kill those that are alive."""
        for rank in self.alive:
            rank.signal(signal.SIGKILL)
        for rank in self.ranks:
            self._pump.drop(rank.out)
            self._pump.drop(rank.err)
            if rank.process is not None:
                self._keeper.release(rank.process.pid)
        self._pump.settle()


def _cut(line: str) -> str:
    """Return a line without its end if it is long."""
    return line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]} ... (in full above)"


def start_here(ranks: Sequence[Rank]) -> None:
    """Start these ranks as child processes of this process."""
    for rank in ranks:
        variables = {**os.environ, **rank.variables}
        rank.process = subprocess.Popen(
            tethered(rank.command),
            env=variables,
            stdin=stdin(),
            stdout=rank.out.theirs,
            stderr=rank.err.theirs,
        )


def tethered(command: Sequence[str]) -> list[str]:
    """Return the command so that it dies with this process and leads its own process group."""
    return [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *command]


def stdin() -> int | None:
    """Return the stdin for ranks, which is never the terminal.

    A rank in its own process group would be stopped if it read from the terminal.
    """
    return (
        subprocess.DEVNULL if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() else None
    )


def signal_name(number: int) -> str:
    """Return the name of a signal: SIGTERM for 15, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
