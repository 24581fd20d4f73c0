"""The output of ranks on its way to the launcher's console, to files, or to both.

The launcher's agent and workers call this module. It passes output on in whole lines, and saves the
end of it for the report of a failure.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final

__all__ = ["Pump", "Stream", "say", "write"]

STDOUT: Final = 1
STDERR: Final = 2
_TICK_SECONDS: Final = 0.05
_DRAIN_SECONDS: Final = 2.0
_TAIL_BYTES: Final = 16384
_writing = threading.Lock()


def write(descriptor: int, text: bytes) -> None:
    """Write all of the text, and ignore errors.

    Even if no process reads it any more, the ranks should not end for that.
    """
    with _writing, contextlib.suppress(OSError):
        view = memoryview(text)
        while view:
            view = view[os.write(descriptor, view) :]


def say(text: str) -> None:
    """Write a message of the launcher itself to stderr."""
    write(
        STDERR,
        "".join(f"globaltensor.launch: {line}\n" for line in text.splitlines()).encode(
            errors="replace"
        ),
    )


@dataclass
class Stream:
    """The stdout or stderr of a rank.

    ``console`` is the descriptor where it is shown (1 or 2), or None. If ``save_tail`` is True, its
    end is saved for a report. If ``whole_lines`` is True, the console shows it line by line: ranks
    write without a buffer, so that the pieces of one `print` would mix with those of other ranks.
    """

    console: int | None
    path: Path | None = None
    prefix: bytes = b""
    save_tail: bool = False
    whole_lines: bool = False
    ours: int = -1  # our end of the channel, or -1
    theirs: int | None = None  # the rank's end, or None for the launcher's own descriptor
    said: bytes = b""
    unfinished: bytes = b""
    file: IO[bytes] | None = None

    def open(self, again: bool = False) -> None:
        """Open the channel and the file, if they are needed.

        If ``again``, a restarted rank appends to the file of its predecessor.
        """
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab" if again else "wb", buffering=0)  # noqa: SIM115 - closed in close()
        if self.console is None and self.file is not None:
            self.theirs = os.dup(self.file.fileno())
        elif self.console is None and not self.save_tail:
            self.theirs = os.open(os.devnull, os.O_WRONLY)
        elif self.file is not None or self.save_tail or self.whole_lines or self.prefix:
            self.ours, self.theirs = _channel(self.console)

    def started(self) -> None:
        """Close the launcher's copy of the rank's end, once the rank has it.

        So the launcher sees when the last process that holds the end has closed it.
        """
        if self.theirs is not None:
            os.close(self.theirs)
            self.theirs = None

    def take(self, chunk: bytes) -> None:
        """Pass on what has arrived, as far as it makes whole lines."""
        self.said = (self.said + chunk)[-_TAIL_BYTES:]
        if self.file is not None:
            with contextlib.suppress(OSError):  # the disk is full, but the console still gets it
                self.file.write(chunk)
        text = self.unfinished + chunk
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self.unfinished = text[cut:]
        self._show(text[:cut])

    def flush(self, end: bytes = b"") -> None:
        """Show an unfinished line too: it may be a prompt or a progress bar."""
        if self.unfinished and (end or not self.prefix):
            self._show(self.unfinished + end)
            self.unfinished = b""

    def _show(self, text: bytes) -> None:
        if self.console is not None and text:
            if self.prefix:
                text = re.sub(rb"(?m)^(?=.)", lambda _: self.prefix, text)
            write(self.console, text)

    def tail(self) -> bytes:
        """Return the end of the output."""
        if self.ours < 0 and not self.said and self.path is not None:
            with contextlib.suppress(OSError), open(self.path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                return file.read()
        return self.said

    def close(self) -> None:
        self.started()
        if self.ours >= 0:
            os.close(self.ours)
            self.ours = -1
        if self.file is not None:
            self.file.close()
            self.file = None


def _channel(console: int | None) -> tuple[int, int]:
    """Return (our end, the rank's end) of a channel.

    It is a terminal if the console is one, so that progress bars still work.
    """
    if console is not None and sys.platform != "win32" and os.isatty(console):
        with contextlib.suppress(OSError, ImportError):
            import fcntl
            import termios
            import tty

            ours, theirs = os.openpty()
            tty.setraw(theirs)
            fcntl.ioctl(
                theirs, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8))
            )
            return ours, theirs
    return os.pipe()


class Pump:
    """A thread that passes on the output of streams.

    It is independent of torch's agent, which sleeps and waits.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell, self._rope = os.pipe()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._open = True
        self._thread = threading.Thread(
            target=self._run, name="globaltensor launcher's output", daemon=True
        )

    def __enter__(self) -> Pump:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue_for_thread(self._end)
        self._thread.join(2 * _DRAIN_SECONDS)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._bell)
            os.close(self._rope)

    def add(self, stream: Stream) -> None:
        """Pass on the output of this stream until the rank's end of it is closed."""
        if stream.ours >= 0:
            self._queue_for_thread(
                lambda: self._selector.register(stream.ours, selectors.EVENT_READ, stream) and None
            )

    def drop(self, stream: Stream) -> None:
        """Pass on the output that this stream has brought, and close the stream."""
        self._queue_for_thread(lambda: self._drop(stream))

    def settle(self) -> None:
        """Wait until the output written so far is passed on, for a few seconds at most."""
        done = threading.Event()
        self._queue_for_thread(self._drain)
        self._queue_for_thread(done.set)
        done.wait(2 * _DRAIN_SECONDS)

    def _queue_for_thread(self, order: Callable[[], None]) -> None:
        # Only the thread may use the selector, so every change to it is queued for the thread.
        self._orders.put(order)
        os.write(self._rope, b".")

    def _run(self) -> None:
        while self._open:
            if not self._read_ready(_TICK_SECONDS):
                self._flush()
            while not self._orders.empty():
                self._orders.get()()

    def _read_ready(self, seconds: float) -> bool:
        """Read once from all ready streams, after waiting at most ``seconds``.

        Return False if there was no data.
        """
        came = False
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                os.read(key.fd, 1 << 12)
                continue
            came = True
            try:
                chunk = os.read(key.fd, 1 << 16)
            except OSError:  # a terminal reports so that its other end is closed
                chunk = b""
            key.data.take(chunk)
            if not chunk:
                self._selector.unregister(key.fd)
                key.data.flush(b"\n")
        return came

    def _drain(self) -> None:
        until = time.monotonic() + _DRAIN_SECONDS
        while self._read_ready(0) and time.monotonic() < until:
            pass
        self._flush(b"\n")

    def _flush(self, end: bytes = b"") -> None:
        for key in self._selector.get_map().values():
            if key.data is not None:
                key.data.flush(end)

    def _drop(self, stream: Stream) -> None:
        if stream.ours >= 0 and stream.ours in self._selector.get_map():
            self._drain()
            # where the rank has closed its end meanwhile, reading to the end has unregistered it
            if stream.ours in self._selector.get_map():
                self._selector.unregister(stream.ours)
        stream.close()

    def _end(self) -> None:
        self._drain()
        self._open = False
