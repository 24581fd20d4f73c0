"""What a process that ``run`` has started does: read what to call, call it, leave the answer in the
folder of the call.

The folder holds ``path.json`` (where to import from), ``call`` (function and arguments), and by
rank ``here.0`` (it is about to call), ``result.0`` or ``failure.0``, and ``stack.0`` (where it was
when it was asked with SIGUSR1).
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from ...errors import WorldError
from ..world import ProcessWorld, reset_world, running
from .serialize import SerializedValue, pack, save, unpack

__all__ = ["Failure", "RemoteCall", "end_with", "main"]

_LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True)
class RemoteCall:
    """What every rank calls. ``sources``: the text of files that are none, like a notebook's cells,
    for tracebacks."""

    what: SerializedValue
    arguments: Sequence[str]
    sources: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Failure:
    """How a rank failed: when (seconds since 1970), its traceback, and the exception where it could
    be pickled."""

    at: float
    traceback: str
    error: SerializedValue | None


def main(folder: Path, rank: int, parent: int | None) -> None:
    """Run one rank of a call; ``parent``: who called, where that is this process's parent. Ends the
    process with code 1 where it fails."""
    end_with(parent or os.getppid())
    _tell_where_when_asked(folder / f"stack.{rank}")
    try:
        result = _answer(folder, rank)
        here = running()
        if isinstance(here, ProcessWorld):
            here.check_end()
    except BaseException as error:  # whatever it is, who called run is told
        _write(
            Failure(time.time(), _traceback(error), _sendable(error)), folder / f"failure.{rank}"
        )
        # No farewell: what is left of the world may wait for ever for ranks that wait for this one.
        _flush()
        os._exit(1)
    _flush()
    save(result, folder / f"result.{rank}")
    reset_world()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _answer(folder: Path, rank: int) -> SerializedValue:
    call: RemoteCall = torch.load(folder / "call", weights_only=False)
    sys.argv[:] = call.arguments
    for name, lines in call.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
    fn, args = unpack(call.what)
    (folder / f"here.{rank}").touch()
    result = fn(*args)
    try:
        return pack(result)
    except Exception as error:
        told = (
            f"rank {rank} cannot send back what {getattr(fn, '__name__', fn)} returned, a "
            f"{type(result).__name__}: {error}"
        )
        raise WorldError(
            f"{told}; return numbers, text, tensors, or lists and dicts of them"
        ) from error


def _write(failure: Failure, path: Path) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(pickle.dumps(failure))
    unfinished.rename(path)


def _traceback(error: BaseException) -> str:
    """The traceback without this file's own frames."""
    own, start = (main.__code__.co_filename,), error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename in own:
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__))


def _sendable(error: BaseException) -> SerializedValue | None:
    """The exception, where it is one that can be raised elsewhere and comes out of its pickle as it
    went in."""
    if not isinstance(error, Exception):
        return None
    with contextlib.suppress(Exception):
        parcel = pack(error)
        again = unpack(parcel)
        if type(again) is type(error) and str(again) == str(error):
            return parcel
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _tell_where_when_asked(path: Path) -> None:
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=open(path, "w"), all_threads=False)  # noqa: SIM115 - open as long as the process lives


def end_with(parent: int) -> None:
    """End this process and all it has started when its parent dies. Linux does so at once
    (distributed/launcher/parent_death.py), but for this process alone, and others not at all.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
