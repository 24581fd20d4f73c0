"""The session: the machines and devices that run a script's jobs.

It starts at the first job call or the first access to a variable, and ends with the script.

Every device is a rank of one world. The master's process is device 0. It sends orders to the others
over control connections, and all devices execute them alike. Arrays travel as global tensors, by
boxing. On the other machines the script never gets past the call that starts the session.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Final

import numpy as np
import torch

from ..._base.user_code import warn_user
from ...distributed.cluster_env import detect
from ...distributed.env import get_world_size
from ...distributed.launch import reserved_port
from ...distributed.world import reset_world, running
from ..errors import JobError, SessionError
from ..recording.record import Record
from ..recording.recorder import taping
from ..recording.signature import array_of
from .device_layout import Layout
from .device_worker import Instruction, joined
from .engine import Engine
from .process_place import SessionAddress, Workers
from .rendezvous import SessionRendezvous
from .settings import logger, settings
from .worker_pool import WorkerPool, follow_master

__all__ = ["Fetched", "Session", "reset", "session"]

_TICK_SECONDS: Final = 0.05
_LAST_WORDS_SECONDS: Final = 3.0  # for a failed device to report why


class Fetched:
    """The result of a job without a return annotation.

    ``get()`` waits for the arrays. ``async_get(f)`` calls ``f`` with them.
    """

    def __init__(self, job: str, future: Future[Any], wait: Callable[[Future[Any]], Any]) -> None:
        self._future, self._wait = future, wait
        # Log a failure, because user code may never ask for the arrays.
        future.add_done_callback(functools.partial(_logged, job))

    def get(self) -> Any:
        return self._wait(self._future)

    def async_get(self, callback: Callable[[Any], Any]) -> None:
        _when_done(self._wait, self._future, callback)


class Session:
    """The jobs of a script and the devices that run them.

    A script has one session; `session` returns it.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Any] = {}
        self.layout = Layout()
        self.records: dict[str, Record] = {}
        self.meeting: SessionRendezvous | None = None
        self.engine: Engine | None = None
        self._crew: WorkerPool | None = None
        self._over = ""
        self._failed = ""  # the error that put the devices out of step, in words
        self._log: list[logging.Handler] = []
        self._starting = threading.RLock()
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    @property
    def over(self) -> str:
        """The reason why nothing can run any more; empty while the session is usable."""
        return self._over or (self._crew.lost if self._crew is not None else "")

    # Public API

    def add(self, job: Any) -> None:
        """Register a job that the session will run.

        Raise JobError if the session has started, or has a job of this name.
        """
        if self.engine is not None:
            raise JobError(
                f"job {job.name} is defined after the session has started (by the first job call, "
                f"or a look at a variable): define all jobs before"
            )
        if job.name in self.jobs:
            raise JobError(
                f"there is a job {job.name} already: the jobs of a session need different names"
            )
        self.jobs[job.name] = job

    def call(self, job: Any, arguments: Sequence[Any]) -> Any:
        """Run a job with the current values of the arrays for its placeholders.

        Return its result. Without a return annotation, return a `Fetched` for it. With `Callback`,
        return a function that accepts the user's callback.
        """
        self.start()
        if self.jobs.get(job.name) is not job:
            raise SessionError(
                f"job {job.name} belongs to a session that has been cleared: define it again"
            )
        arrays = [
            array_of(job.name, name, leaf, value, self.layout.size)
            for (name, leaf), value in zip(job.signature.placeholders(), arguments, strict=True)
        ]
        record = self.records[job.name]
        fetched = job.signature.returns is None and record.results is not None
        # The call returns before the job has run, and the caller may reuse the arrays.
        if job.signature.callback or fetched:
            arrays = [array.copy() for array in arrays]

        def work() -> Any:
            pieces = self._run_on_all_devices(
                "run", job.name, lambda engine: engine.run(job.name, arrays)
            )
            return job.signature.handed(record.results, pieces, record.mirrored_of)

        future = self._enqueue(work)
        if job.signature.callback:
            return lambda callback: _when_done(self._wait, future, callback)
        return Fetched(job.name, future, self._wait) if fetched else self._wait(future)

    def names(self) -> list[str]:
        """Return the names of the session's variables."""
        return list(self._started_engine().variables)

    def saved_names(self) -> list[str]:
        """Return the names of all that is saved.

        These are variables, optimizer states, step counts and loss scales.
        """
        return self._started_engine().names()

    def shape_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of one of `saved_names`."""
        return self._started_engine().shape_of(name)

    def fetch(self, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Return values by name."""
        self.start()
        values: dict[str, np.ndarray[Any, Any]] = self._wait(
            self._enqueue(
                lambda: self._run_on_all_devices(
                    "fetch", list(names), lambda engine: engine.fetch(names)
                )
            )
        )
        return values

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Set values by name; they must have the right shapes."""
        self.start()
        names = list(arrays)
        self._wait(
            self._enqueue(
                lambda: self._run_on_all_devices(
                    "load", names, lambda engine: engine.load(names, arrays)
                )
            )
        )

    # Start

    def meet(self) -> None:
        """Find the other machines, if there are any, and close the settings.

        Raise SessionError if the machines cannot meet.
        """
        with self._starting:
            if settings.closed:
                return
            settings.check()
            _check_alone()
            self.layout = _layout()
            self._log = _log()
            settings.closed = True
            if len(settings.machines) > 1:
                try:
                    self.meeting = SessionRendezvous(settings, self.layout.each, self.layout.kind)
                except BaseException as error:
                    self._over = f"the machines of the session could not connect: {error}"
                    raise

    def start(self) -> None:
        """Run all job functions once, and start the devices.

        On machines other than the master, this does not return. Raise JobError for an invalid job,
        and SessionError if the session cannot start.
        """
        with self._starting:
            if self.over:
                raise SessionError(self.over)
            if self.engine is not None:
                return
            tape = taping()
            if tape is not None:
                raise JobError(
                    f"job {tape.record.name}: a job function only records ops; call jobs and read "
                    "variables outside of it"
                )
            workers = Workers()
            try:
                if not settings.closed:
                    settings.check()
                    _check_alone()
                    self.layout = _layout()
                workers.launch(self.layout.each - 1)
                self.records = {name: job.recorded(self.layout) for name, job in self.jobs.items()}
                self.meet()
                self._say_what_devices()
                self._begin(workers)
            except BaseException as error:
                self._fail_to_start(workers, error)
                raise

    def _fail_to_start(self, workers: Workers, error: BaseException) -> None:
        for process in workers.processes:
            process.kill()
        if settings.closed:  # otherwise the script may fix the error and retry
            self._over = self._over or f"the session did not start: {error}"
            self.close()
        workers.end()

    def _say_what_devices(self) -> None:
        asked = settings.gpus or any(
            s.devices.tag == "gpu" for r in self.records.values() for s in r.steps
        )
        if self.layout.kind == "cpu" and asked:
            warn_user(
                f'there is no GPU here: "gpu" devices are CPU devices ({self.layout.each} on this '
                f"machine)",
                UserWarning,
            )

    def _begin(self, workers: Workers) -> None:
        records, digests = (
            list(self.records.values()),
            {name: record.digest() for name, record in self.records.items()},
        )
        if self.meeting is not None and self.meeting.machine > 0:
            follow_master(self.meeting, self.layout, workers, records, digests)
        atexit.register(self._end_of_script)
        self._crew = crew = WorkerPool(self.layout, self.meeting, workers)
        node = settings.machines[0] if self.meeting is not None else None
        where = "127.0.0.1" if node is None else node.addr
        port = 0 if crew.server is None else int(crew.server.getsockname()[1])
        if node is not None and node.ctrl_port_agent:
            port = node.ctrl_port_agent
        seed = torch.initial_seed() & 0x7FFFFFFFFFFFFFFF
        instruction = Instruction(
            records,
            self.layout,
            seed,
            settings.debug,
            settings.tensor_float,
            settings.rdma,
            (where, port),
            secrets.token_hex(16),
        )
        with (
            reserved_port(settings.data_port or 0)
            if self.layout.size > 1
            else contextlib.nullcontext(0) as data
        ):
            place = SessionAddress(self.layout, where, data)
            crew.agree(digests, place, instruction)
            crew.gather(place, instruction)
            self._thread = threading.Thread(
                target=self._run, name="globaltensor.v0 session", daemon=True
            )
            self._thread.start()
            self.engine = self._wait(self._enqueue(lambda: self._join(instruction, place)))
        atexit.unregister(self._end_of_script)
        # The world has registered its own exit handler meanwhile. Register ours again, so that it
        # runs before the world's: queued work needs the world.
        atexit.register(self._end_of_script)
        if settings.debug:
            for record in records:
                logger.debug("%s", "\n".join(record.lines()))

    def _join(self, instruction: Instruction, place: SessionAddress) -> Engine:
        assert self._crew is not None
        self._crew.tell(do="join")
        return joined(instruction, place.variables(0))

    def _started_engine(self) -> Engine:
        self.start()
        assert self.engine is not None
        return self.engine

    # Work: one thread of the master executes all orders, in the order of the calls

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                if self._failed:
                    raise SessionError(self._failed)
                result = work()
            except BaseException as error:
                if self.layout.size > 1 and not self._failed:
                    self._failed = f"the session has failed: {error}"
                future.set_exception(error)
            else:
                future.set_result(result)

    def _enqueue(self, work: Callable[[], Any]) -> Future[Any]:
        if self.over or self._failed:
            raise SessionError(self.over or self._failed)
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def _run_on_all_devices(self, do: str, what: Any, local_call: Callable[[Engine], Any]) -> Any:
        """Execute an order on all devices, and return this device's result."""
        assert self._crew is not None
        assert self.engine is not None
        self._crew.tell(do=do, what=what)
        return local_call(self.engine)

    def _wait(self, future: Future[Any]) -> Any:
        """Return the future's result. Raise SessionError if a device fails meanwhile."""
        while not future.done() and not self.over:
            with contextlib.suppress(NotYet):
                future.exception(_TICK_SECONDS)
        if future.done() and future.exception() is None:
            return future.result()
        if self.layout.size > 1:
            self._fail(future)
        return future.result()

    def _fail(self, future: Future[Any]) -> None:
        """Handle a failure here or on another device, after which the devices are out of step.

        Raise SessionError if another device is the cause.
        """
        until = time.monotonic() + _LAST_WORDS_SECONDS
        while time.monotonic() < until and not (self.over and future.done()):
            time.sleep(_TICK_SECONDS)
        error, over = future.exception() if future.done() else None, self.over
        self._over = over or self._failed
        if over and (error is None or isinstance(error, RuntimeError)):
            raise SessionError(over) from error

    # End

    def _end_of_script(self) -> None:
        self.close(_failure())

    def close(self, failed: str = "") -> None:
        """End all devices once all pending calls are done.

        ``failed`` is the error that ends the script, if there is one; the devices get it as the
        reason.
        """
        atexit.unregister(self._end_of_script)
        if self._thread is not None:
            self._work.put(None)
            while self._thread.is_alive() and not self.over:
                self._thread.join(_TICK_SECONDS)
        if self._crew is not None:
            self._crew.tell(do="end", why=self.over or self._failed or failed)
            left = self._close_world()
            self._crew.close()
            if not left:  # our thread waits in a collective for devices that are gone only now
                self._close_world()
        if self.meeting is not None:
            self.meeting.close()
        for handler in self._log:
            logger.removeHandler(handler)
            handler.close()
        self._over = self._over or "the session has ended"

    def _close_world(self) -> bool:
        """Close the world, so that another session can start in this process.

        Return False, without closing it, if our thread is still at work in it.
        """
        if self._thread is not None:
            self._thread.join(_LAST_WORDS_SECONDS)
            if self._thread.is_alive():
                return False
        if self.layout.size > 1:
            reset_world()
        return True


def _check_alone() -> None:
    """Raise SessionError if a launcher has made this process one of several ranks."""
    place = detect(os.environ)
    if (place is not None and place.world_size > 1) or (
        running() is not None and get_world_size() > 1
    ):
        told = "this process is one of several ranks already" + (
            f" (started by {place.source})" if place is not None else ""
        )
        raise SessionError(
            f"{told}: a job-function script is started once on each machine, without a launcher, "
            f"and starts its devices itself"
        )


def _layout() -> Layout:
    """Return the devices that the settings ask for.

    Raise SessionError if this machine has GPUs, but fewer than that.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tag = "gpu" if settings.gpus is not None or (gpus and settings.cpus is None) else "cpu"
    if gpus and tag == "gpu" and settings.devices > gpus:
        asked = " and ".join(
            f"config.{kind}_device_num({n})"
            for kind, n in (("gpu", settings.gpus), ("cpu", settings.cpus))
            if n is not None
        )
        told = (
            f"{asked} ask{'' if ' and ' in asked else 's'} for {settings.devices} devices on "
            f"each machine, one process and one GPU each"
        )
        raise SessionError(f"{told}: this machine shows {gpus} GPU{'s' if gpus > 1 else ''}")
    return Layout(max(1, len(settings.machines)), settings.devices, tag, "cuda" if gpus else "cpu")


def _log() -> list[logging.Handler]:
    """Set up the log as `env.log_dir` and the other settings say, and return the handlers added."""
    handlers: list[logging.Handler] = []
    if settings.log_level is not None or settings.debug:
        logger.setLevel(logging.DEBUG if settings.debug else settings.log_level or logging.DEBUG)
    if settings.log_dir is not None:
        os.makedirs(settings.log_dir, exist_ok=True)
        handlers.append(
            logging.FileHandler(
                os.path.join(settings.log_dir, f"session.{os.getpid()}.log"), delay=True
            )
        )
    if settings.log_to_stderr:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        logger.addHandler(handler)
    return handlers


def _failure() -> str:
    """Return the error that ends the script, or an empty string."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f"{type(error).__name__}: {error}"


def _logged(job: str, future: Future[Any]) -> None:
    """Log that a job has failed, if it has."""
    error = future.exception()
    if error is not None:
        logger.error("job %s has failed: %s: %s", job, type(error).__name__, error)


def _when_done(
    wait: Callable[[Future[Any]], Any], future: Future[Any], callback: Callable[[Any], Any]
) -> None:
    """Call ``callback`` with the result in a new thread, because it may call jobs."""

    def run() -> None:
        try:
            result = wait(future)
        except Exception:
            logger.error(
                "a job whose result a callback waits for has failed:\n%s", traceback.format_exc()
            )
            return
        callback(result)

    threading.Thread(target=run, name="globaltensor.v0 callback").start()


_session = Session()


def session() -> Session:
    """Return the script's session."""
    return _session


def reset() -> None:
    """End the session; later settings and jobs belong to a new one."""
    global _session
    old, _session = _session, Session()
    old.close()
    settings.reset()
