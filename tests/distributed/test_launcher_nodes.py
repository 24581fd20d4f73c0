"""Tests of several nodes, each with its own launcher on this machine. They meet, agree, and none
outlives the failure of another."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launched import Launched, end, nobody_left, within, write_script

from globaltensor.distributed.launch import main, reserved_port

TELL = '(folder / f"told.{attempt}.{rank}").write_text(json.dumps(dict(os.environ)))\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    yield tmp_path
    end(tmp_path)


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        pass
    return number


def nodes(port: int, rank: int, *more: object, nproc: int = 1, nnodes: object = 2) -> list[object]:
    return [
        "--nnodes",
        nnodes,
        "--node_rank",
        rank,
        "--nproc_per_node",
        nproc,
        "--master_port",
        port,
        *more,
    ]


def listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def told(folder: Path, attempt: int = 0) -> list[dict[str, str]]:
    found = [json.loads(path.read_text()) for path in folder.glob(f"told.{attempt}.*")]
    return sorted(found, key=lambda variables: int(variables["RANK"]))


@pytest.mark.extended
def test_ranks_go_on_from_node_to_node(folder: Path, port: int) -> None:
    path = write_script(folder, TELL)
    with Launched(folder, *nodes(port, 1, path, nproc=2), warm=True) as other:
        assert main([*map(str, nodes(port, 0, path, nproc=2))]) == 0
        assert other.code() == 0, other.err
    names = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    rows = [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1")]
    assert [tuple(v[n] for n in names) for v in told(folder)] == [
        (*row, "4", "2", "2", "127.0.0.1", str(port)) for row in rows
    ]


def test_a_failure_on_one_node_ends_all(folder: Path, port: int) -> None:
    path = write_script(folder, "if rank == 1:\n    here()\n    sys.exit(7)\nsleep()")
    with (
        Launched(folder, *nodes(port, 0, path), warm=True) as one,
        Launched(folder, *nodes(port, 1, path), warm=True) as two,
    ):
        assert (one.code(), two.code()) == (7, 7)
        two.says(r"rank 1 \(local rank 0, .*ended with exit code 7")
        one.says(
            rf"node 1 \({socket.gethostname()}\) has failed: rank 1 .*ended with exit code "
            rf"7\n.*the launcher has ended this node's 1 rank too"
        )
    assert nobody_left(folder)


@pytest.mark.parametrize(
    ("number", "victim"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.sweep(2)
def test_a_launcher_that_dies_ends_all(
    number: signal.Signals, victim: int, folder: Path, port: int
) -> None:
    path = write_script(folder, "sleep()")
    more = ["--rdzv_conf", "keep_alive_interval=1,keep_alive_max_attempt=3", path]
    warm = number == signal.SIGTERM  # which warm_python passes on
    with (
        Launched(folder, *nodes(port, 0, *more), warm=warm) as one,
        Launched(folder, *nodes(port, 1, *more), warm=warm) as two,
    ):
        one.wait_for("here.*", 2)
        dies, other = (one, two) if victim == 0 else (two, one)
        dies.process.send_signal(number)
        assert dies.code(20) == 128 + number
        assert other.code(20) != 0
        if number == signal.SIGTERM:
            other.says(rf"node {victim} \(.*\) has failed: its launcher got SIGTERM")
        elif victim == 0:
            other.says(
                rf"the launcher of node 0, which serves the meeting point 127\.0\.0\.1:{port}, is "
                rf"gone"
            )
        else:
            other.says(r"node 1 has been silent for \d s: its launcher is dead")
        assert nobody_left(folder)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            {"nproc": 1},
            {"nproc": 2},
            (
                "node [01] .* was started with --nproc_per_node [12], node [01] .* with [12]: it "
                "must "
                "be the same on all nodes"
            ),
        ),
        ({"nnodes": 2}, {"nnodes": 3}, "was started with --nnodes [23], node [01] .* with [23]"),
    ],
    ids=["nproc_per_node", "nnodes"],
)
@pytest.mark.sweep(2)
def test_nodes_started_otherwise(
    first: dict[str, int], second: dict[str, int], says: str, folder: Path, port: int
) -> None:
    path = write_script(folder, TELL)
    with (
        Launched(folder, *nodes(port, 0, path, **first), warm=True) as one,
        Launched(folder, *nodes(port, 1, path, **second), warm=True) as two,
    ):
        for launcher in (one, two):
            assert launcher.code() == 2
            launcher.says(says)
    assert not told(folder), "ranks were started"


def test_a_node_rank_that_is_taken(folder: Path, port: int) -> None:
    path = write_script(folder, TELL)
    one, second = nodes(port, 0, path, nnodes=3), nodes(port, 1, path, nnodes=3)
    with (
        Launched(folder, *one, warm=True),
        Launched(folder, *second, warm=True) as two,
        Launched(folder, *second, warm=True) as three,
    ):
        assert within(
            60, lambda: two.process.poll() is not None or three.process.poll() is not None
        )
        loser = two if two.process.poll() is not None else three
        assert loser.code() == 2
        loser.says(
            rf"--node_rank 1 is taken: a launcher on {socket.gethostname()} \(pid \d+\) has it"
        )


def test_nobody_answers_at_the_master(
    folder: Path, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert (
        main(
            [
                *map(
                    str,
                    nodes(port, 1, "--rdzv_conf", "connect_timeout=1", write_script(folder, TELL)),
                )
            ]
        )
        == 2
    )
    assert time.monotonic() - began < 10
    assert (
        f"node 1 cannot reach node 0 at 127.0.0.1:{port}: Connection refused, for 1 s"
        in capfd.readouterr().err
    )


def test_a_node_that_does_not_come(
    folder: Path, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        main([*map(str, nodes(port, 0, "--rdzv_conf", "timeout=1", write_script(folder, TELL)))])
        == 2
    )
    assert f"node 1 of 2 has not connected to 127.0.0.1:{port} within 1 s" in capfd.readouterr().err


def test_a_master_that_is_elsewhere(
    folder: Path, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                *map(
                    str,
                    nodes(
                        port, 0, "--master_addr", "no-such-host.invalid", write_script(folder, TELL)
                    ),
                )
            ]
        )
        == 2
    )
    assert f"node 0 cannot reach itself at no-such-host.invalid:{port}" in capfd.readouterr().err


def test_a_signal_ends_the_wait_for_other_nodes(folder: Path, port: int) -> None:
    with Launched(folder, *nodes(port, 0, write_script(folder, TELL)), warm=True) as launcher:
        assert within(60, lambda: listening(port))
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.code(10) == 128 + signal.SIGTERM
        assert nobody_left(folder)


@pytest.mark.extended
def test_all_nodes_start_again(folder: Path, port: int) -> None:
    path = write_script(
        folder, TELL + "here()\nif attempt == 0:\n    if rank == 1: sys.exit(3)\n    sleep()"
    )
    with (
        Launched(folder, *nodes(port, 0, "--max_restarts", 1, path), warm=True) as one,
        Launched(folder, *nodes(port, 1, "--max_restarts", 1, path), warm=True) as two,
    ):
        assert (one.code(), two.code()) == (0, 0), one.err + two.err
        one.says("restart 1 of at most 1")
        two.says("restart 1 of at most 1")
    first, second = told(folder, 0), told(folder, 1)
    assert [v["TORCHELASTIC_RESTART_COUNT"] for v in second] == ["1", "1"]
    assert first[0]["MASTER_PORT"] != second[0]["MASTER_PORT"] == second[1]["MASTER_PORT"], (
        "what the first attempt left in the store must not be found"
    )


def elastic(port: int, *more: object, nnodes: str = "1:2") -> list[object]:
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
    return [
        "--nnodes",
        nnodes,
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        f"127.0.0.1:{port}",
        "--rdzv_id",
        "test",
        "--rdzv_conf",
        conf,
        *more,
    ]


@pytest.mark.slow
def test_an_elastic_job_grows_and_shrinks(folder: Path, port: int) -> None:
    """One node begins alone. A second node joins, and all ranks restart as two. The second node
    dies, and the first goes on alone."""
    body = """
(folder / f"world.{os.environ['WORLD_SIZE']}.{rank}.{os.getpid()}").touch()
wait_for("end", 1)
"""
    path = write_script(folder, body)
    with Launched(folder, *elastic(port, "--max_restarts", 3, path), warm=True) as one:
        one.wait_for("world.1.0.*", 1)
        with Launched(folder, *elastic(port, "--max_restarts", 3, path), warm=True) as two:
            two.wait_for("world.2.*", 2)
            two.process.kill()
            two.process.wait()
            one.wait_for("world.1.0.*", 2)
            (folder / "end").touch()
            assert one.code() == 0, one.err
    assert nobody_left(folder)


@pytest.mark.extended
def test_a_dynamic_rendezvous_of_two_nodes(folder: Path, port: int) -> None:
    path = write_script(folder, TELL)
    with (
        Launched(folder, *elastic(port, path, nnodes="2"), warm=True) as one,
        Launched(folder, *elastic(port, path, nnodes="2"), warm=True) as two,
    ):
        assert (one.code(), two.code()) == (0, 0), one.err + two.err
    assert [(v["RANK"], v["WORLD_SIZE"], v["MASTER_ADDR"]) for v in told(folder)] == [
        ("0", "2", "127.0.0.1"),
        ("1", "2", "127.0.0.1"),
    ]
