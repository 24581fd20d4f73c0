"""The main function of a process started by ``run``: read the call, make it, write the result.

The program in `spawn` calls it. Files in the folder of the call are ``path.json`` (the import path)
and ``call`` (function and arguments). Each rank writes ``here.0`` (it is about to make the call),
then ``result.0`` or ``failure.0``, and ``stack.0`` (its stack when it got SIGUSR1).
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
    """The call that every rank makes.

    ``sources`` has the text of sources that are not files, such as a notebook's cells, for
    tracebacks.
    """

    what: SerializedValue
    arguments: Sequence[str]
    sources: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Failure:
    """The failure of a rank: its time (seconds since 1970), its traceback and its exception.

    The exception is None if it could not be pickled.
    """

    at: float
    traceback: str
    error: SerializedValue | None


def main(folder: Path, rank: int, parent: int | None) -> None:
    """Run one rank of a call, and exit with code 1 if it fails.

    ``parent`` is the process that called ``run``, if it is this process's parent.
    """
    end_with(parent or os.getppid())
    _dump_stack_on_signal(folder / f"stack.{rank}")
    try:
        result = _answer(folder, rank)
        this_world = running()
        if isinstance(this_world, ProcessWorld):
            this_world.check_end()
    except BaseException as error:  # any error is reported to the caller of run
        _write(
            Failure(time.time(), _traceback(error), _sendable(error)), folder / f"failure.{rank}"
        )
        # Skip the usual cleanup: the rest of the world may wait for ever for ranks that wait for
        # this one.
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
        problem = (
            f"rank {rank} cannot send back what {getattr(fn, '__name__', fn)} returned, a "
            f"{type(result).__name__}: {error}"
        )
        raise WorldError(
            f"{problem}; return numbers, text, tensors, or lists and dicts of them"
        ) from error


def _write(failure: Failure, path: Path) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(pickle.dumps(failure))
    unfinished.rename(path)


def _traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this file."""
    own, start = (main.__code__.co_filename,), error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename in own:
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__))


def _sendable(error: BaseException) -> SerializedValue | None:
    """Return the serialized exception, or None if it cannot be raised in another process.

    Unpickling it must give an equal exception.
    """
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


def _dump_stack_on_signal(path: Path) -> None:
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=open(path, "w"), all_threads=False)  # noqa: SIM115 - open as long as the process lives


def end_with(parent: int) -> None:
    """End this process, and all processes that it has started, when its parent dies.

    Linux kills this process at once (distributed/launcher/parent_death_signal.py), but not its
    children. Other systems do neither.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
