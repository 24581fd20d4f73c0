"""distributed/launcher/log_streams.py: the output of ranks, and the thread that passes it on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from globaltensor.distributed.launcher.log_streams import Pump, Stream


def opened(path: Path) -> tuple[Stream, int]:
    """Return a stream into a file, and the rank's end of its channel."""
    stream = Stream(console=None, path=path, save_tail=True)
    stream.console = 1  # so that it has a channel
    stream.open()
    stream.console = None
    assert stream.theirs is not None
    rank_end = os.dup(stream.theirs)
    stream.started()
    return stream, rank_end


def test_a_rank_may_close_its_output_just_before_it_is_dropped(tmp_path: Path) -> None:
    first, its_end = opened(tmp_path / "first")
    second, other_end = opened(tmp_path / "second")
    written = threading.Event()
    with Pump() as pump:
        pump._queue_for_thread(lambda: written.wait() and None)  # the thread sees all at once
        pump.add(first)
        pump.drop(first)
        pump.add(second)
        os.write(its_end, b"the last line of the first\n")
        os.close(its_end)
        written.set()
        os.write(other_end, b"a line of the second\n")
        os.close(other_end)
        pump.settle()
        pump.drop(second)
    assert (tmp_path / "first").read_bytes() == b"the last line of the first\n"
    assert (tmp_path / "second").read_bytes() == b"a line of the second\n"
