"""The ranks of one node as processes: start them, tell how they ended, and end them with all that
they have started."""

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
_KILL_SECONDS: Final = 5.0  # for the system to end what has got SIGKILL
_TAIL_LINES: Final = 12
_LAST_LINES: Final = 4  # of a traceback: the message
# for the rank to end whose failure others have noticed already: an interpreter takes a while to
_CAUSE_SECONDS: Final = 2.0
_RANK_BEFORE: Final = re.compile(
    r"^\[rank\d+\]: ?", re.MULTILINE
)  # what torch puts before the lines of a traceback
#: What ranks say that end since another has ended: of those that failed at once, the other is the
#: one to name.
_ECHO: Final = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|has died, hangs|gave up \(its own "
    r"error says why\)|remote process exited|socket closed",
    re.IGNORECASE,
)
_THROWN: Final = "terminate called"
_CRASH: Final = "Fatal Python error"
_HEADS: Final = ("Traceback (most recent call last)", _THROWN, _CRASH)
_TETHER: Final = Path(__file__).with_name("parent_death.py")
_KEEPER: Final = Path(__file__).with_name("orphan_reaper.py")


class Process(Protocol):
    """A running rank."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, -n where signal n ended it, None while it lives."""


@dataclass
class Rank:
    """One rank: what it runs, the variables that it gets besides the launcher's own, where its
    output goes; once it is started, its process."""

    rank: int
    local_rank: int
    command: Sequence[str]
    variables: Mapping[str, str]
    out: Stream = field(default_factory=lambda: Stream(STDOUT))
    err: Stream = field(default_factory=lambda: Stream(STDERR, kept=True))
    process: Process | None = None
    told_to_end: bool = False

    @property
    def code(self) -> int | None:
        """Exit code, -n where signal n ended it, None while it lives."""
        return None if self.process is None else self.process.poll()

    @property
    def failed(self) -> bool:
        """Did it end badly, of its own?"""
        return bool(self.code) and not self.told_to_end

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to all that it has started."""
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
        """The last traceback it wrote, shortened to its head and its end; else its last lines."""
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
            cause = lines[heads[-2] : heads[-1]]  # why it was aborted, and below where
            return [*cause, *lines[heads[-1] :][-_TAIL_LINES:]]
        if heads and len(lines) - heads[-1] > _TAIL_LINES:
            return [lines[heads[-1]], "  ...", *lines[-_TAIL_LINES:]]
        return lines[heads[-1] :] if heads else lines[-_TAIL_LINES // 2 :]

    @property
    def echoes(self) -> bool:
        """Did it, by its last words, end only because another rank had ended?"""
        return (self.code or 0) > 0 and bool(
            _ECHO.search(" ".join(self.last_words()[-_LAST_LINES:]))
        )

    def epitaph(self) -> str:
        """Which rank it was and how it ended, in one line."""
        code = self.code or 0
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal_name(-code)} (signal {-code})"
            if -code == signal.SIGKILL:
                how += ", as the system does when memory runs out"
        return (
            f"rank {self.rank} (local rank {self.local_rank}, pid "
            f"{self.process.pid if self.process else 0} on {socket.gethostname()}) {how}"
        )


class OrphanReaper:
    """A process that outlives this one for a moment, and ends what ranks have started where this
    one can't any more. Leaving the block ends it."""

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
        """Kill this process group if this process ends before it says ``release``."""
        self._tell(f"+{group}")

    def release(self, group: int) -> None:
        """Let it live."""
        self._tell(f"-{group}")

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: a comfort less
            self._process.stdin.write(f"{text}\n")


class LocalWorkers:
    """This node's ranks, which live and end together. ``start``: how their processes begin."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        pump: Pump,
        keeper: OrphanReaper,
        start: Callable[[Sequence[Rank]], None],
    ) -> None:
        self.ranks, self._pump, self._keeper, self._start = list(ranks), pump, keeper, start

    def start(self, again: bool = False) -> None:
        """Begin. ``again``: what they write to files goes on where it ended."""
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
        """Those not ended yet."""
        return [rank for rank in self.ranks if rank.process is not None and rank.code is None]

    @property
    def failed(self) -> list[Rank]:
        """Those that ended badly of their own; of ranks found dead at the same moment, one ended by
        a signal did not die of the others' death."""
        failed = [rank for rank in self.ranks if rank.failed]
        if len(failed) > 1:
            self._pump.settle()  # their last words
        return sorted(failed, key=lambda rank: ((rank.code or 0) > 0, rank.echoes, rank.rank))

    def failed_by(self, hurry: Callable[[], object]) -> list[Rank]:
        """``failed``, with the cause among them: who noticed that a rank had gone may be found dead
        before it, which is waited for, or for ``hurry``."""
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
        """End all ranks and whatever they have started: by this signal, and those that live
        ``grace`` seconds later, or at ``hurry``, by SIGKILL."""
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
        """What went wrong, in lines: the first of these ranks, its last words, and what became of
        the others."""
        first, *others = failed
        lines = [
            first.epitaph(),
            *(f"| {line}" for line in first.last_words()),
            *(f"so did: {other.epitaph()}" for other in others),
        ]
        if first.err.path is not None:
            lines.append(f"its output is in {first.err.path.parent}")
        left = len(self.ranks) - len(failed)
        if left:
            lines.append(
                f"the other {left} rank{'s' if left > 1 else ''} of this node had to end with it"
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Let go of the ranks; those alive are killed."""
        for rank in self.alive:
            rank.signal(signal.SIGKILL)
        for rank in self.ranks:
            self._pump.drop(rank.out)
            self._pump.drop(rank.err)
            if rank.process is not None:
                self._keeper.release(rank.process.pid)
        self._pump.settle()


def start_here(ranks: Sequence[Rank]) -> None:
    """Start these ranks as processes of this one."""
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
    """The command, tied to the life of this process and leading a process group."""
    return [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *command]


def stdin() -> int | None:
    """What ranks read: not the terminal, since in a group of its own a rank would be stopped for
    it."""
    return (
        subprocess.DEVNULL if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() else None
    )


def signal_name(number: int) -> str:
    """SIGTERM for 15, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
