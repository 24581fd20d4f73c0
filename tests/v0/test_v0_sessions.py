"""Tests of scripts with job functions, started as a user starts them: one process, which starts its
devices. They cover results, callbacks, snapshots, and all kinds of exits."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.launched import Launched, cleared, nobody_left, within
from support.scripts import SECONDS, in_plain_torch, ran, script


@pytest.fixture
def folder(tmp_path: Path):  # type: ignore[no-untyped-def]
    yield from cleared(tmp_path)


ALL = """
import os, threading, time, torch
from globaltensor.v0.session.session import session
print("the module runs", flush=True)
torch.manual_seed(3)
devices, path = int(sys.argv[1]), sys.argv[2]
flow.config.gpu_device_num(devices)

@flow.global_function()
def dropped(x: tp.Numpy.Placeholder((8, 6))) -> tp.Callback[tp.Tuple[tp.Numpy, tp.Numpy]]:
    return flow.nn.dropout(x, 0.5), network(x)

@flow.global_function(type="train")
def noisy(x: tp.Numpy.Placeholder((8, 6))) -> tp.Numpy:
    out = flow.nn.dropout(x + flow.get_variable("offset", (6,)), 0.5)
    flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.0])).minimize(out)
    return out

@flow.global_function()
def said_nothing(x: tp.Numpy.Placeholder((8, 6))):
    return x * 2

if __name__ == "__main__":
    before = {name: variable.numpy().tolist() for name, variable in flow.get_all_variables().items()}
    first = steps(0, 3)
    flow.checkpoint.save(path)
    second = steps(3, 6)
    refused = ""
    try:
        flow.checkpoint.save(path)
    except flow.SessionError as error:
        refused = str(error)
    flow.load_variables(flow.checkpoint.get(path))
    torch.rand(5)  # the script's own numbers change nothing for the jobs
    again = steps(3, 6)
    noise = [noisy(np.ones((8, 6), np.float32)).tolist() for _ in range(2)]
    came, done = [], threading.Event()
    def callback(pair):
        came.append([pair[0].tolist(), noisy(drawn(8, 6)).shape, threading.current_thread() is threading.main_thread()])
        done.set()
    dropped(drawn(8, 6))(callback)
    done.wait(60)
    later = said_nothing(drawn(8, 6)).get()
    told(before=before, first=first, second=second, again=again, refused=refused, noise=noise, came=came, later=later.tolist(),
         kept=sorted(flow.checkpoint.get(path)), late=flow.env.ctrl_port(5), rank=os.environ.get("RANK"), grad=torch.is_grad_enabled(),
         resource=list(flow.env.current_resource())[:3], machine=flow.env.current_machine_id(), threads=[t.name for t in threading.enumerate() if not t.daemon])
    if sys.argv[3] == "raise":
        session()._enqueue(lambda: time.sleep(1))
        said_nothing(drawn(8, 6))  # still queued when the script ends: it is run all the same
        raise ValueError("this script ends here")
"""  # noqa: E501


@pytest.mark.extended
def test_all_that_a_script_may_do_on_one_and_two_devices(folder: Path) -> None:
    """A script may use all of these features on one and two devices. With two devices it ends in an
    error."""
    path, found = script(folder, ALL), []
    for devices, end, code in ((1, "return", 0), (2, "raise", 1)):
        ((one,), out, err) = ran(folder, path, devices, folder / f"models{devices}", end, code=code)
        found.append(one)
        assert out.count("the module runs") == 1, "the script's own lines ran in device processes"
        assert err.count("no GPU") == (0 if torch.cuda.is_available() else 1)
        assert err.count("ValueError: this script ends here") == code
        assert "has failed" not in err
        assert nobody_left(folder)
    for one in found:
        assert one["again"] == one["second"], (
            "training does not go on as it did: momentum or the step was not restored"
        )
        assert "holds something already" in one["refused"]
        assert one["came"] == [
            [np.random.RandomState(14).randn(8, 6).astype(np.float32).tolist(), [8, 6], False]
        ]
        np.testing.assert_allclose(
            one["later"], 2 * np.random.RandomState(14).randn(8, 6), rtol=1e-6
        )
        assert {"hidden-weight", "hidden-weight-momentum", "System-Train-TrainStep-train"} <= set(
            one["kept"]
        )
        assert (one["late"], one["rank"], one["grad"], one["machine"]) == (False, None, True, 0)
        assert one["threads"] == ["MainThread"]
        kept = np.asarray(one["noise"])
        assert set(np.unique(kept)) == {0.0, 2.0}
        assert (kept[0] != kept[1]).any(), "the same numbers were dropped twice"
    one, two = found
    assert one["before"] == two["before"], (
        "variables begin with other values on other numbers of devices"
    )
    halves = np.asarray(two["noise"])[0].reshape(2, -1)
    assert (halves[0] != halves[1]).any(), "both devices dropped the same places"
    np.testing.assert_allclose(
        one["first"] + one["second"], two["first"] + two["second"], rtol=1e-6
    )
    np.testing.assert_allclose(
        one["first"] + one["second"], in_plain_torch(one["before"], 6), rtol=1e-6
    )
    assert (one["resource"][:2], two["resource"][2]) == ([1, int(torch.cuda.is_available())], 2)


FAILS = """
import logging, os, queue, signal
from globaltensor.v0.session.session import session
logging.basicConfig(stream=sys.stderr)

def jobs():
    @flow.global_function()
    def rows(at: tp.Numpy.Placeholder((2,), dtype=flow.int32)) -> tp.Callback[tp.Numpy]:
        return flow.math.reduce_sum(flow.gather(flow.get_variable("table", (5, 3), initializer=flow.ones_initializer()), at), axis=1)

    return rows

if __name__ == "__main__":
    came, said, rows = queue.SimpleQueue(), [], jobs()
    flow.config.cpu_device_num(2)
    rows(np.array([0, 4], np.int32))(came.put)
    good = came.get(timeout=60).tolist()
    rows(np.array([99, 0], np.int32))(came.put)  # fails on one device; a callback is not called for it
    for _ in range(2):
        try:
            steps(0, 1)
        except flow.SessionError as error:
            said.append(str(error))
    sys.last_value = ValueError("of a cell before")  # as a notebook leaves it
    flow.clear_default_session()
    rows = jobs()
    flow.config.cpu_device_num(3)
    rows(np.array([0, 4], np.int32))(came.put)
    told(good=good, again=came.get(timeout=60).tolist(), said=said)
    os.kill(session()._crew.workers.processes[0].pid, signal.SIGKILL)
    for _ in range(1000):
        flow.get_all_variables()["table"].numpy()
"""  # noqa: E501


@pytest.mark.extended
def test_a_session_that_failed_says_so_and_another_may_follow(folder: Path) -> None:
    """A session that failed reports the failure, and another session may follow. First a job fails
    on one of two devices while no call waits for it. Then, in a new session, one of three devices
    is killed."""
    ((one,), _, err) = ran(folder, script(folder, FAILS), code=1)
    assert (one["good"], one["again"]) == ([3, 3], [3, 3])
    assert len(one["said"]) == 2
    assert all("index out of range" in said for said in one["said"]), one["said"]
    assert re.search(r"SessionError: device 0:\d is gone", err), err
    assert nobody_left(folder)


ENDS = """
import time
flow.config.cpu_device_num(2)
if __name__ == "__main__":
    steps(0, 1)
    told(here=True)
    while sys.argv[1] == "wait":
        time.sleep(0.05)
    if sys.argv[1] == "job":
        train(np.zeros((8, 5), np.float32), np.zeros(8, np.int32))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "says"),
    [("job", 1, r"x takes an array of shape \[8, 6\], got \[8, 5\]"), ("return", 0, "")],
)
def test_no_device_outlives_a_script(how: str, code: int, says: str, folder: Path) -> None:
    with Launched(folder, script(folder, ENDS), how, command=[sys.executable]) as started:
        assert started.code(SECONDS) == code, started.err
        started.says(says)
    assert nobody_left(folder)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=str
)
def test_no_device_outlives_a_script_that_is_ended(number: signal.Signals, folder: Path) -> None:
    with Launched(folder, script(folder, ENDS), "wait", command=[sys.executable]) as started:
        assert within(
            SECONDS, lambda: "RESULT" in started.out or started.process.poll() is not None
        )
        started.process.send_signal(number)
        assert started.code(SECONDS) != 0
        assert nobody_left(folder)


WRONG = """
@flow.global_function()
def broken(x: tp.Numpy.Placeholder((4, 3))) -> tp.Numpy:
    return flow.matmul(x, x)

flow.config.cpu_device_num(2)
if __name__ == "__main__":
    steps(0, 1)
"""


def test_an_error_in_a_job_function_is_told_once(folder: Path) -> None:
    _, _, err = ran(folder, script(folder, WRONG), code=1)
    assert err.count("errors.JobError:") == 1, err
    assert "Blob(x, shape=[4, 3], dtype=float32)" in err
    assert nobody_left(folder)


def test_a_rank_is_no_place_for_a_session(folder: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    _, _, err = ran(folder, script(folder, "steps(0, 1)"), code=1, **variables)
    assert "started once on each machine, without a launcher" in err
