"""Tests of parts of a session in this process, on one device or with the test as the peer. They
cover queued jobs, failures and cleanup."""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp
from globaltensor.v0.session import device_worker, rendezvous, worker_pool
from globaltensor.v0.session.control_channel import Line
from globaltensor.v0.session.device_layout import Layout
from globaltensor.v0.session.process_place import Workers
from globaltensor.v0.session.session import session
from globaltensor.v0.session.settings import Machine, Settings, logger

SECONDS = 20.0


@pytest.fixture(autouse=True)
def _own_session() -> Iterator[None]:
    flow.clear_default_session()
    yield
    flow.clear_default_session()


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    lines = tuple(map(_line, socket.socketpair()))
    yield lines  # type: ignore[misc]
    for line in lines:
        line.close()


def _line(connection: socket.socket) -> Line:
    """Return a line over a socket pair, which does not accept TCP options."""
    taken = SimpleNamespace(
        **{
            name: getattr(connection, name)
            for name in ("settimeout", "sendall", "recv", "shutdown", "close")
        },
        setsockopt=lambda *_: None,
    )
    return Line(taken, "the other end")  # type: ignore[arg-type]


def test_a_queued_job_gets_the_arrays_of_its_call_and_a_lost_error_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @flow.global_function()
    def rows(at: tp.Numpy.Placeholder((2,), dtype=flow.int32)):  # type: ignore[no-untyped-def]
        return flow.gather(
            flow.get_variable("table", (5, 3), initializer=flow.ones_initializer()), at
        )

    @flow.global_function()
    def doubled(x: tp.Numpy.Placeholder((2,))) -> tp.Callback[tp.Numpy]:
        return x * 2

    buffer, gate, came = np.ones(2, np.float32), threading.Event(), queue.SimpleQueue[Any]()
    session().start()
    session()._enqueue(lambda: gate.wait(SECONDS))  # the session is busy: calls are queued
    doubled(buffer)(came.put)
    buffer[:] = 7
    rows(np.array([0, 99], np.int32))  # this error reaches no caller, as no call waits for it
    gate.set()
    assert came.get(timeout=SECONDS).tolist() == [2, 2]
    assert rows(np.array([0, 4], np.int32)).get().shape == (2, 3), (
        "one device is never out of step: the session goes on"
    )
    assert "job rows has failed: " in caplog.text


def test_nothing_is_started_in_a_job_function() -> None:
    @flow.global_function()
    def inner(x: tp.Numpy.Placeholder((2,))) -> tp.Numpy:
        return x

    @flow.global_function()
    def outer(x: tp.Numpy.Placeholder((2,))) -> tp.Numpy:
        return inner(x)

    with pytest.raises(flow.JobError, match="job inner is called in the job function outer"):
        outer(np.zeros(2, np.float32))
    flow.clear_default_session()

    @flow.global_function()
    def looks(x: tp.Numpy.Placeholder((2,))) -> tp.Numpy:
        return x * len(flow.get_all_variables())

    with pytest.raises(flow.JobError, match="job looks: a job function only records"):
        looks(np.zeros(2, np.float32))


def test_a_session_leaves_no_handlers_behind(tmp_path: Path) -> None:
    before = list(logger.handlers)
    flow.env.log_dir(str(tmp_path))
    flow.env.logtostderr(True)
    flow.env.init()
    assert len(logger.handlers) == len(before) + 2
    flow.clear_default_session()
    assert logger.handlers == before


def test_both_numbers_of_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    flow.config.gpu_device_num(1)
    flow.config.cpu_device_num(4)
    with pytest.raises(
        flow.SessionError,
        match=(
            r"gpu_device_num\(1\) and config.cpu_device_num\(4\) ask for 4 devices .* this "
            r"machine shows 1 GPU$"
        ),
    ):
        flow.env.init()


def test_a_device_in_a_collective_ends_with_a_master_that_failed(
    ends: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, master = ends
    began, over, left = threading.Event(), threading.Event(), queue.SimpleQueue[Any]()

    def run(_: object) -> None:
        began.set()
        over.wait(SECONDS)  # as in a collective that no other rank has joined

    def leave(words: str, code: int, _: object) -> None:
        left.put((words, code))
        if threading.current_thread() is follower:
            raise SystemExit

    monkeypatch.setattr(
        device_worker, "joined", lambda *_: SimpleNamespace(run=run, fetch=None, load=None)
    )
    monkeypatch.setattr(device_worker, "_exit_process", leave)
    monkeypatch.setattr(device_worker, "reset_world", lambda: None)

    def follow() -> None:
        with contextlib.suppress(SystemExit):
            device_worker.follow(line, None, {}, Workers())  # type: ignore[arg-type]

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    master.send(do="join")
    master.send(do="run", what="job")
    assert began.wait(SECONDS)
    master.send(do="end", why="ValueError: no more")
    try:
        assert left.get(timeout=SECONDS / 2) == ("the master has ended: ValueError: no more", 1)
    finally:
        over.set()
        follower.join(SECONDS)
    assert not follower.is_alive()


def test_a_machine_that_came_early_waits_as_long_as_the_master(
    ends: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that came early waits as long as the master. It reaches the master when its own
    time is nearly over, and the master's time begins only then. Afterwards the variables set for
    the meeting are restored."""
    waits, now = {}, [0.0]

    def found(*_: object) -> socket.socket:
        now[0] += 49.0
        return ends[0].connection

    def heard(self: Any, where: str, what: str, wait: float) -> dict[str, Any]:
        waits[what] = wait
        return {"machine": 1, "met": True, "at": ["", 0, ""], "go": True}

    def lead(*_: object) -> None:
        os.environ["NCCL_SOCKET_IFNAME"] = "other0"

    monkeypatch.setenv(rendezvous.VARIABLE, "50")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    for name, value in {
        "time": SimpleNamespace(monotonic=lambda: now[0]),
        "is_here": lambda a: a == "b",
        "reached": found,
        "_set_backend_interface": lead,
    }.items():
        monkeypatch.setattr(rendezvous, name, value)
    monkeypatch.setattr(rendezvous.SessionRendezvous, "_receive_from_master", heard)
    met = rendezvous.SessionRendezvous(
        Settings(machines=[Machine("a"), Machine("b")], ctrl_port=1), 1, "cpu"
    )
    assert min(waits.values()) >= 50
    assert set(waits) == {"machine", "met", "go"}
    assert os.environ["NCCL_SOCKET_IFNAME"] == "other0"
    met.close()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


def test_a_machine_is_told_that_something_else_listens_at_the_masters_port(
    ends: tuple[Line, Line],
) -> None:
    comes = object.__new__(rendezvous.SessionRendezvous)
    comes.master = ends[0]
    with pytest.raises(
        flow.SessionError,
        match=r"what listens at a:1 is not the master of this session, or it hangs",
    ):
        comes._receive_from_master("a:1", "machine", 0.1)
    ends[1].send(hello="I am another program")
    with pytest.raises(
        flow.SessionError, match=r"what listened at a:1 is no session of globaltensor.v0"
    ):
        comes._receive_from_master("a:1", "machine", SECONDS)


def test_a_wrong_interface_is_named_before_machines_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Machine("203.0.113.7"), Machine("203.0.113.8")]
    monkeypatch.setattr(rendezvous, "interface_of", lambda _: "eth0")
    for name in ("nosuch0", "lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        with pytest.raises(
            flow.SessionError, match=f"machine 1: GLOO_SOCKET_IFNAME is '{name}', .*set it to eth0"
        ):
            rendezvous._set_backend_interface("203.0.113.8", nodes, 1)


def test_who_connects_and_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_HELLO_SECONDS", 0.1)
    found = worker_pool.WorkerPool(Layout(1, 2), None, Workers())
    with socket.create_connection(found.server.getsockname(), SECONDS) as stranger:
        found._welcome("token")
        stranger.settimeout(SECONDS)
        assert stranger.recv(1) == b""
    assert not found.lines
    found.close()


def test_a_line_that_this_end_has_closed_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line(socket.create_connection(server.getsockname()), "the other end")
        theirs = server.accept()[0]
    line.close()
    assert line.receive() is None
    assert line.receive(1.0) is None
    theirs.close()
