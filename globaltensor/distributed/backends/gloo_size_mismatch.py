"""Report ranks that diverge where gloo would end a process without a word to the others.

Gloo ends the process that receives a longer message than it expects (`std::terminate`). Ranks that
run different operations can come to that between two comparisons of what they run
(`divergence.due`). Communicators over gloo call `install`, which sets a terminate handler. The
handler puts this rank's report into the store of the rendezvous, prints the error and ends the
process. The other ranks lose their connection. They then find the report (`peer_reports`) and
raise the same error with their own side of it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ..._base.user_code import user_line
from ..divergence import OTHER_SIDE, Report, describe, described_operations, spelled
from ..store_liveness import store_answers
from ..world import ProcessWorld, running

__all__ = ["install", "peer_reports"]

# The module whose functions wait for gloo.
_COLLECTIVES: Final = str(Path(__file__).with_name("process_group_comm.py"))
_KEY: Final = "globaltensor/size_mismatch"
_STORE_SECONDS: Final = 5.0
_DETAIL: Final = "gloo received a longer message than this collective has"
# Names of the C++ runtime (Itanium C++ ABI), which has no Python interface.
_SET_TERMINATE: Final = "_ZSt13set_terminatePFvvE"
_EXCEPTION_TYPE: Final = "__cxa_current_exception_type"
_GLOO_ERROR: Final = b"N4gloo13EnforceNotMetE"


@functools.cache
def install() -> None:
    """Set the terminate handler of this process, once. Without a known C++ runtime do nothing."""
    try:
        runtime = ctypes.CDLL("libstdc++.so.6")
        set_terminate: Any = runtime[_SET_TERMINATE]
        exception_type: Any = runtime[_EXCEPTION_TYPE]
    except (OSError, AttributeError):
        return
    handler = ctypes.CFUNCTYPE(None)
    set_terminate.restype = exception_type.restype = ctypes.c_void_p
    set_terminate.argtypes = [handler]

    def terminate() -> None:
        with contextlib.suppress(Exception):
            if _name_of(exception_type()) == _GLOO_ERROR:
                _report_and_exit()
        if before:
            handler(before)()
        os.abort()

    installed = handler(terminate)
    before = set_terminate(installed)
    # This also keeps a reference to the handler, as C++ holds none. Python code must not be called
    # once the interpreter has ended.
    atexit.register(lambda: (installed, set_terminate(handler(before) if before else handler())))


def _name_of(type_info: int | None) -> bytes:
    """Return the mangled name of the C++ type that ``std::type_info`` at this address describes."""
    if not type_info:
        return b""
    name = ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p)).value
    return (name or b"").lstrip(b"*")


def _report_and_exit() -> None:
    """Publish and print what this rank was doing, and end the process with exit code 1.

    It runs on a thread of gloo, while another thread waits in the collective. Return if no thread
    waits in a collective of this library: the message then belongs to the user's own collective.
    """
    world, frame = running(), _frame_in_collective()
    if not isinstance(world, ProcessWorld) or frame is None:
        return
    line = user_line(frame)
    operations = described_operations(world.histories.values())
    report = Report(
        world.rank, world.kind, spelled(world.purpose), line, "", operations, None, _DETAIL
    )
    with contextlib.suppress(Exception):  # the rank that served the store may have ended
        world.store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        world.store.set(f"{_KEY}/{world.rank}", report.packed())
    text = describe([report])
    with contextlib.suppress(Exception):
        sys.stderr.write(
            f"[rank{world.rank}]: globaltensor.errors.DivergenceError: {text}\n({OTHER_SIDE})\n"
        )
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _frame_in_collective() -> FrameType | None:
    """Return the innermost frame of a thread that is in a collective over gloo, or None."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_filename == _COLLECTIVES:
                return innermost
            frame = frame.f_back
    return None


def peer_reports(world: ProcessWorld, ranks: Sequence[int]) -> list[Report]:
    """Return the reports of those of ``ranks`` that gloo has ended for a message of wrong size."""
    reports: list[Report] = []
    if not store_answers(world.store, lost=True):
        return reports
    with contextlib.suppress(Exception):  # the rank that served the store may have ended
        world.store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        for rank in ranks:
            key = f"{_KEY}/{rank}"
            if rank != world.rank and world.store.check([key]):
                reports.append(Report.unpacked(world.store.get(key)))
    return reports
