"""Supervision of the ranks on one node: start, forward what they say, and when one fails or a signal comes, end all of them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Final

__all__ = ["Rank", "supervise"]

GRACE_SECONDS: Final = 10.0  # between the request to end (SIGTERM) and the end (SIGKILL)
_TICK_SECONDS: Final = 0.05
_TAIL_BYTES: Final = 16384
_TAIL_LINES: Final = 12
_HEADS: Final = ("Traceback (most recent call last)", "terminate called", "Fatal Python error")
_TETHER: Final = Path(__file__).with_name("tether.py")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Rank:
    """One rank: what it runs, and while it lives its process and the last of what it wrote to stderr."""

    rank: int
    local_rank: int
    command: Sequence[str]
    variables: Mapping[str, str]
    logs: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    stderr: int = -1  # our end of what it writes; -1 where it goes to a file
    said: bytes = b""
    unfinished: bytes = b""  # the start of a line, not forwarded yet
    told_to_end: bool = False
    files: list[IO[bytes]] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        """Exit code, -n where signal n ended it, None while it lives."""
        return None if self.process is None else self.process.poll()

    @property
    def failed(self) -> bool:
        """Did it end badly, of its own?"""
        return bool(self.code) and not self.told_to_end

    def start(self) -> None:
        if self.logs is None:
            self.stderr, theirs = _channel()
            out: int | None = None
        else:
            self.logs.mkdir(parents=True, exist_ok=True)
            self.files = [open(self.logs / name, "wb") for name in ("stdout", "stderr")]  # noqa: SIM115 - closed in close()
            out, theirs = self.files[0].fileno(), self.files[1].fileno()
        # In its own group a rank may not read from the terminal: it would be stopped.
        stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        command = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *self.command]
        self.process = subprocess.Popen(command, env=dict(self.variables), stdin=stdin, stdout=out, stderr=theirs, process_group=0)
        if self.logs is None:
            os.close(theirs)

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to all that it has started."""
        if self.process is not None:
            self.told_to_end = self.told_to_end or self.code is None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        for file in self.files:
            file.close()
        if self.stderr >= 0:
            os.close(self.stderr)
            self.stderr = -1

    def last_words(self) -> list[str]:
        """The last traceback it wrote, shortened to its head and its end; else its last lines."""
        said = self.said
        if self.logs is not None:
            with contextlib.suppress(OSError), open(self.logs / "stderr", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                said = file.read()
        lines = said.decode(errors="replace").replace("\r", "\n").rstrip().splitlines()
        heads = [i for i, line in enumerate(lines) if line.startswith(_HEADS)]
        if heads and len(lines) - heads[-1] > _TAIL_LINES:
            return [lines[heads[-1]], "  ...", *lines[-_TAIL_LINES:]]
        return lines[heads[-1] :] if heads else lines[-_TAIL_LINES // 2 :]

    def epitaph(self) -> str:
        code = self.code or 0
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {_signal_name(-code)} (signal {-code})"
            if -code == signal.SIGKILL:
                how += ", as the system does when memory runs out"
        return f"rank {self.rank} (local rank {self.local_rank}, pid {self.process.pid if self.process else 0} on {socket.gethostname()}) {how}"


def supervise(ranks: Sequence[Rank]) -> int:
    """Run the ranks to their end -> 0, the exit code of the first that failed, or 128 + n where signal n ended it or the launcher.

    The first failure ends the others: SIGTERM, and SIGKILL after ``GRACE_SECONDS``. So do SIGINT, SIGTERM and SIGHUP; a second one is SIGKILL at once.
    """
    received: list[int] = []
    with _handling(received), selectors.DefaultSelector() as selector:
        try:
            for rank in ranks:
                rank.start()
                if rank.stderr >= 0:
                    selector.register(rank.stderr, selectors.EVENT_READ, rank)
            while not received and any(rank.code is None for rank in ranks) and not any(rank.failed for rank in ranks):
                _forward(selector, _TICK_SECONDS)
            failed = _in_order_of_blame([rank for rank in ranks if rank.failed])
            if failed or received:
                _end(ranks, selector, received)
            while _forward(selector, 0):
                pass
            _flush(ranks, b"\n")
            if failed:
                _report(failed, ranks)
                code = failed[0].code or 0
                return code if code > 0 else 128 - code
            if received:
                _say(f"{_signal_name(received[0])} received: ended {len(ranks)} rank{'s' if len(ranks) > 1 else ''}")
                return 128 + received[0]
            return 0
        finally:
            for rank in ranks:
                if rank.code is None:
                    rank.signal(signal.SIGKILL)
                rank.close()


@contextlib.contextmanager
def _handling(received: list[int]) -> Iterator[None]:
    """Signals are noted instead of acted on. An ignored SIGHUP stays so (nohup); SIGINT does not: shells ignore it for what they put in the background."""

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {}
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[Rank], selector: selectors.BaseSelector, received: list[int]) -> None:
    """End all ranks and whatever they have started."""
    asked, until = len(received), time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        rank.signal(signal.SIGTERM)
    while any(rank.code is None for rank in ranks) and time.monotonic() < until and len(received) <= asked:
        _forward(selector, _TICK_SECONDS)
    deaf = [rank.rank for rank in ranks if rank.code is None]
    if deaf and len(received) <= asked:
        _say(f"rank{'s' if len(deaf) > 1 else ''} {', '.join(map(str, deaf))} did not end {GRACE_SECONDS:g} s after SIGTERM: killed")
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    for rank in ranks:
        if rank.process is not None:
            rank.process.wait()


def _in_order_of_blame(failed: Sequence[Rank]) -> list[Rank]:
    """Of ranks found dead at the same moment, one ended by a signal did not die of the others' death."""
    return sorted(failed, key=lambda rank: ((rank.code or 0) > 0, rank.rank))


def _report(failed: Sequence[Rank], ranks: Sequence[Rank]) -> None:
    first, *_ = failed
    others = [rank.epitaph() for rank in ranks if rank is not first and rank.failed]
    lines = [first.epitaph(), *(f"| {line}" for line in first.last_words()), *(f"so did: {other}" for other in others)]
    if first.logs is not None:
        lines.append(f"its output is in {first.logs}")
    left = len(ranks) - 1 - len(others)
    if left:
        lines.append(f"the other {left} rank{'s' if left > 1 else ''} of this node had to end with it")
    _say("\n".join(lines))


def _channel() -> tuple[int, int]:
    """(our end, the rank's end) for what it writes to stderr: a terminal where ours is one, so that progress bars stay."""
    if sys.stderr is not None and sys.stderr.isatty():
        with contextlib.suppress(OSError, ImportError):
            import fcntl
            import termios
            import tty

            ours, theirs = os.openpty()
            tty.setraw(theirs)
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, bytes(8)))
            return ours, theirs
    return os.pipe()


def _forward(selector: selectors.BaseSelector, seconds: float) -> bool:
    """Pass on what the ranks have written, in whole lines, waiting at most so long for it. False: there was nothing."""
    if not selector.get_map():
        time.sleep(seconds)
        return False
    ready = selector.select(seconds)
    for key, _ in ready:
        rank: Rank = key.data
        try:
            chunk = os.read(key.fd, 1 << 16)
        except OSError:  # how a terminal says that its other end is closed
            chunk = b""
        if not chunk:
            selector.unregister(key.fd)
        rank.said = (rank.said + chunk)[-_TAIL_BYTES:]
        text = rank.unfinished + chunk
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        rank.unfinished = text[cut:]
        _write(text[:cut])
    if not ready:
        _flush([key.data for key in selector.get_map().values()])
    return bool(ready)


def _flush(ranks: Sequence[Rank], end: bytes = b"") -> None:
    for rank in ranks:
        if rank.unfinished:
            _write(rank.unfinished + end)
        rank.unfinished = b""


def _write(text: bytes) -> None:
    # Nobody may be listening any more: no reason to end the ranks.
    if text and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
            view = memoryview(text)
            while view:
                view = view[os.write(sys.stderr.fileno(), view) :]


def _say(text: str) -> None:
    _write("".join(f"globaltensor.launch: {line}\n" for line in text.splitlines()).encode())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
