"""The server behind ``warm_python()``: it forks a process for each client and runs the client's
program there as Python would.

A client that is gone takes its program's process group with it.
"""

from __future__ import annotations

import array
import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import io
import marshal
import multiprocessing.spawn
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

import globaltensor
from globaltensor._ops import random_streams
from globaltensor.distributed import launch
from globaltensor.distributed.world import reset_world

MAX_FILES = 250


@dataclass
class Request:
    """A program to run, and what a process inherits."""

    arguments: list[str]
    folder: str
    variables: dict[bytes, bytes]
    numbers: list[int]  # the file descriptors in the client, and those that arrived here
    descriptors: list[int]
    ignored: list[int]
    client: int

    @classmethod
    def read(cls, connection: socket.socket) -> Request | None:
        """Read a client's request. Return None if the client is gone."""
        size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * MAX_FILES))
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        data, missing = b"", int.from_bytes(size, sys.byteorder)
        while missing and (part := connection.recv(missing)):
            data += part
            missing -= len(part)
        if missing or not data:
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        arguments, folder, variables, numbers, ignored, client = marshal.loads(data)
        return cls(arguments, folder, variables, numbers, list(descriptors), ignored, client)


def warm_up() -> None:
    """Let the library import what it imports late."""
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(2))
    torch.optim.SGD([weight], lr=0.1)
    globaltensor.nn.Graph.trace(lambda x: x * 2)(torch.ones(2))
    reset_world()  # the world of one rank, which the line above has started
    del sys.modules[launch.__name__]  # python -m runs it as a new module


def serve(folder: str) -> None:
    """Answer the clients of the socket in this folder until a signal ends this process."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    pids: dict[socket.socket, int] = {}
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            if ready is listener:
                connection, _ = listener.accept()
                request = Request.read(connection)
                if request is None:
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    for each in (listener, wake, woken, connection, *pids):
                        each.close()
                    become(request, f"{folder}/python")
                for number in request.descriptors:
                    os.close(number)
                pids[connection] = pid
                selector.register(connection, selectors.EVENT_READ)
            elif ready is wake:
                wake.recv(4096)
            elif ready in pids:
                try:
                    signals = ready.recv(64)
                except ConnectionError:
                    signals = b""
                for number in signals or bytes([signal.SIGKILL]):
                    with contextlib.suppress(ProcessLookupError):
                        (os.kill if signals else os.killpg)(pids[ready], number)
                if not signals:
                    selector.unregister(ready)
        for connection, pid in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):
                    connection.sendall(code.to_bytes(8, sys.byteorder, signed=True))
                with contextlib.suppress(KeyError):
                    selector.unregister(connection)
                connection.close()
                del pids[connection]


def become(request: Request, executable: str) -> None:
    """Make this forked process the client's program, run it and exit."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # it dies with the server
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    # First out of the way of the numbers that the client had, then to those numbers.
    above = max(request.numbers) + MAX_FILES + 1
    for i, descriptor in enumerate(request.descriptors):
        os.dup2(descriptor, above + i, inheritable=False)
        os.close(descriptor)
    for i, number in enumerate(request.numbers):
        os.dup2(above + i, number)
        os.close(above + i)
    os.environ.clear()
    for name, value in request.variables.items():
        os.environb[name] = value
    enter(request.client)
    os.chdir(request.folder)
    options, program = split(request.arguments)
    unbuffered = "-u" in options or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stream(1, "strict", unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream(2, "backslashreplace", unbuffered)  # type: ignore[misc]
    os.getppid = functools.partial(parent_of, request.client)
    sys.executable = executable
    multiprocessing.spawn.set_executable(executable)
    # Each process has seeds of its own. Python's generator sees to that itself. The library takes
    # a program for one without a seed while torch's seed is that of the import.
    random_streams._seed_at_import = torch.default_generator.seed()
    numpy.random.seed()
    filters(options)
    finish(run(program))


def parent_of(client: int) -> int:
    """Return the pid of the client's parent, which is 1 after that has ended."""
    return int(Path(f"/proc/{client}/stat").read_text().rpartition(")")[2].split()[1])


def enter(client: int) -> None:
    """Enter the client's namespaces, if it runs on another host of support/hosts.py."""
    for kind in ("user", "uts", "net", "mnt"):
        theirs = f"/proc/{client}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
            number = os.open(theirs, os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(number, 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the client's {kind} namespace")
            os.close(number)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return (options of Python, the program with its arguments)."""
    at = 0
    while arguments[at] in ("-u", "-B", "-W"):
        at += 1 + (arguments[at] == "-W")
    return arguments[:at], arguments[at:]


def stream(number: int, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding="utf-8",
        errors=errors,
        line_buffering=number == 2 or os.isatty(number),
        write_through=unbuffered,
    )


def filters(options: list[str]) -> None:
    """Filter warnings as Python does with PYTHONWARNINGS and these -W options."""
    given = [w for w in os.environ.get("PYTHONWARNINGS", "").split(",") if w]
    given += [options[i + 1] for i, option in enumerate(options) if option == "-W"]
    sys.warnoptions[:] = given
    warnings._processoptions(given)  # type: ignore[attr-defined]


def run(program: list[str]) -> Any:
    """Run ``-c code``, ``-m module`` or a script with its arguments. Return what sys.exit gets."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    first, *rest = program
    entries = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = entries + [p for p in sys.path if p in STANDARD]
    try:
        if first == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv[:] = ["-m", *rest[1:]]
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif first == "-c":
            sys.path.insert(0, "")
            sys.argv[:] = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.path.insert(0, str(Path(first).resolve().parent))
            sys.argv[:] = program
            main.__dict__.update(__file__=first, __cached__=None)
            exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)
    except SystemExit as exit:
        return exit.code
    except BaseException as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            shown = shown.tb_next
        error.__traceback__ = shown
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, shown
        vars(sys)["last_exc"] = error  # of Python 3.12
        sys.excepthook(type(error), error, shown)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def finish(code: Any) -> None:
    """Exit as Python does, without the teardown of the interpreter, which takes 0.3 s."""
    if code is None:
        code = 0
    elif not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for each in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            each.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    STANDARD = {p for p in sys.path if p.startswith((sys.prefix, sys.base_prefix))}
    warm_up()
    gc.collect()
    gc.freeze()  # the collector ignores objects that exist before a fork
    serve(*sys.argv[1:])
