"""A line on stderr that shows the state of long work.

The commands use it. The work runs in the same process, in other processes, or in both.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO

from .terminal import is_terminal

__all__ = ["ProgressLine", "StageFile"]

_REDRAW_SECONDS: Final = 0.25  # on a terminal
_PRINT_SECONDS: Final = 5.0  # elsewhere, such as in a log file
_WIDTH: Final = 79


@dataclass(frozen=True)
class StageFile:
    """A file that holds the name of the current stage of the work.

    The process that does the work calls this object with the name of each stage. The object can be
    pickled, so that may be another process than the one that shows the stage.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stage = StageFile(f"{folder}/stage")
    ...     before = stage.read()
    ...     stage("matmuls")
    ...     (before, stage.read())
    ('', 'matmuls')
    """

    path: str

    def __call__(self, stage: str) -> None:
        """Write the name of the stage. Errors of the file system are ignored."""
        with contextlib.suppress(OSError):
            partial = Path(f"{self.path}.part")
            partial.write_text(stage)
            partial.replace(self.path)

    def read(self) -> str:
        """Return the last stage, or an empty string."""
        with contextlib.suppress(OSError):
            return Path(self.path).read_text()
        return ""


class ProgressLine:
    """A context in which a line shows what runs, since when, and for about how long.

    On a terminal the line is rewritten in place, and removed at the end. Elsewhere a line is
    printed every five seconds. ``seconds`` is the expected time, or None if it is unknown. With a
    ``stage`` the time counts from the first stage. ``quiet`` shows nothing.

    >>> import io
    >>> log = io.StringIO()
    >>> with ProgressLine("tool", 3.0, stream=log, every=0.01) as line:
    ...     line.show("measuring")
    ...     time.sleep(0.2)
    >>> log.getvalue().splitlines()[-1]
    'tool: 0 s of about 3 s: measuring'
    """

    def __init__(
        self,
        what: str,
        seconds: float | None = None,
        stage: StageFile | None = None,
        quiet: bool = False,
        stream: TextIO | None = None,
        every: float | None = None,
    ) -> None:
        self.what, self.seconds, self.stage, self.quiet = what, seconds, stage, quiet
        self.stream = sys.stderr if stream is None else stream
        self.in_place = is_terminal(self.stream)
        self.every = every or (_REDRAW_SECONDS if self.in_place else _PRINT_SECONDS)
        self.text = ""
        self._began, self._staged = time.monotonic(), False
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def show(self, text: str) -> None:
        """Set the text of the line. It is shown until there is a stage."""
        self.text = text

    def print(self, text: str) -> None:
        """Print a message on a line of its own, whether the progress is shown or not."""
        self._write(f"\r\x1b[K{text}\n" if self.in_place else f"{text}\n")

    def line(self) -> str:
        """Return the line as it is now."""
        stage = self.stage.read() if self.stage else ""
        if stage and not self._staged:
            self._staged, self._began = True, time.monotonic()
        took = f"{time.monotonic() - self._began:.0f} s"
        timed = self.seconds is not None and (self._staged or self.stage is None)
        limit = f" of about {self.seconds:g} s" if timed else ""
        text = stage or self.text
        return f"{self.what}: {took}{limit}" + (f": {text}" if text else "")

    def __enter__(self) -> ProgressLine:
        if not self.quiet:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if not self.quiet:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream may be closed
            while not self._ended.wait(self.every):
                line = self.line()
                self._write(f"\r\x1b[K{line[:_WIDTH]}" if self.in_place else f"{line}\n")
            if self.in_place:
                self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with self._writing:
            self.stream.write(text)
            self.stream.flush()
