"""Tests of the launcher: the values it sends to the ranks, its report when a rank fails, and that
no process stays behind. Linux's /proc shows which processes are alive."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.launched import Launched, alive, end, nobody_left, within, write_script
from support.warm_python import warm_python

from globaltensor.distributed.launch import main, reserved_port
from globaltensor.distributed.launcher.workers import LocalWorkers, Rank
from globaltensor.errors import WorldError

TELL = '(folder / f"told.{rank}").write_text(json.dumps({"arguments": sys.argv[1:], **os.environ}))'
ONE_FAILS = """
if rank == 1:
    {}
sleep()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Yield a function that writes a script, and end the script's processes afterwards."""
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    yield lambda body: write_script(tmp_path, body)
    end(tmp_path)


def told(folder: Path, n: int) -> list[dict[str, str]]:
    return [json.loads((folder / f"told.{rank}").read_text()) for rank in range(n)]


def test_every_rank_is_told_who_it_is(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main(["--nproc_per_node", "2", script(TELL), "--alpha", "b c", "-m"]) == 0
    for rank, variables in enumerate(told(tmp_path, 2)):
        assert variables["arguments"] == ["--alpha", "b c", "-m"]
        assert (
            variables["RANK"],
            variables["LOCAL_RANK"],
            variables["WORLD_SIZE"],
            variables["LOCAL_WORLD_SIZE"],
        ) == (str(rank), str(rank), "2", "2")
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(variables["MASTER_PORT"]) < 1 << 16
        assert variables["OMP_NUM_THREADS"] == "1"


def test_a_rank_that_fails_while_the_launcher_looks_is_noticed(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher asks which ranks have failed, then which are alive. All may end in between."""
    failed = LocalWorkers.failed.fget  # type: ignore[attr-defined]

    def look(team: LocalWorkers) -> list[Rank]:
        found: list[Rank] = failed(team)
        assert found or within(30, lambda: not team.alive)
        return found

    monkeypatch.setattr(LocalWorkers, "failed", property(look))
    assert main(["--nproc_per_node", "2", script("time.sleep(1)\nsys.exit(3 * (rank == 0))")]) == 3


def test_one_process_by_default(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main([script(TELL)]) == 0
    (variables,) = told(tmp_path, 1)
    assert variables["WORLD_SIZE"] == "1"
    assert "OMP_NUM_THREADS" not in variables


def test_a_module_and_a_program(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(TELL)
    monkeypatch.chdir(tmp_path)
    assert main(["--nproc_per_node", "2", "-m", "script", "x"]) == 0
    assert [variables["arguments"] for variables in told(tmp_path, 2)] == [["x"], ["x"]]
    assert (
        main(
            [
                "--nproc_per_node",
                "2",
                "--no_python",
                "sh",
                "-c",
                'echo $RANK of $WORLD_SIZE > "$TEST_FOLDER/out.$RANK"',
            ]
        )
        == 0
    )
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(2)] == ["0 of 2\n", "1 of 2\n"]


def test_logs_are_made_and_overwritten(
    script: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script('print("out", rank, sys.argv[1]); print("err", rank, file=sys.stderr)')
    for run in ("first", "second"):
        assert (
            main(
                [
                    "--nproc_per_node",
                    "2",
                    "--redirect_stdout_and_stderr",
                    "--logdir",
                    str(tmp_path / "a/b"),
                    path,
                    run,
                ]
            )
            == 0
        )
        assert [(tmp_path / f"a/b/local_rank_{i}/stdout").read_text() for i in range(2)] == [
            f"out 0 {run}\n",
            f"out 1 {run}\n",
        ]
        assert (tmp_path / "a/b/local_rank_1/stderr").read_text() == "err 1\n"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("stream", ["out", "err"])
def test_what_ranks_write_is_passed_on_in_whole_lines(
    stream: str, script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    # print writes its arguments one by one, since the launcher's ranks have no buffer
    path = script(f"for i in range(200):\n    print(rank, 'line', i, file=sys.std{stream})")
    assert main(["--nproc_per_node", "2", path]) == 0
    lines = getattr(capfd.readouterr(), stream).splitlines()
    # A line is passed on unfinished only if a rank pauses in the middle of the line. On a busy
    # machine that may happen.
    assert (
        sum(line in {f"{rank} line {i}" for rank in range(2) for i in range(200)} for line in lines)
        >= 390
    )


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("sys.exit(7)", 7, ["rank 1 (local rank 1", "ended with exit code 7"]),
        (
            "raise ValueError('the sky fell')",
            1,
            [
                "| Traceback (most recent call last)",
                "| ValueError: the sky fell",
                "ended with exit code 1",
            ],
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, ["was ended by SIGKILL (signal 9)"]),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            128 + 11,
            ["was ended by SIGSEGV (signal 11)", "| Fatal Python error: Segmentation fault"],
        ),
    ],
)
def test_one_failure_ends_all(
    does: str,
    code: int,
    says: list[str],
    script: Callable[[str], str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    began = time.monotonic()
    assert main(["--nproc_per_node", "3", script(ONE_FAILS.format(does))]) == code
    assert time.monotonic() - began < 10
    assert not alive(tmp_path)
    said = capfd.readouterr().err
    for text in [*says, "the launcher has ended the other 2 ranks of this node too"]:
        assert text in said


def test_a_failure_in_logs_is_shown(
    script: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(ONE_FAILS.format("raise ValueError('the sky fell')"))
    assert (
        main(
            [
                "--nproc_per_node",
                "2",
                "--redirect_stdout_and_stderr",
                "--logdir",
                str(tmp_path),
                path,
            ]
        )
        == 1
    )
    said = capfd.readouterr().err
    assert "| ValueError: the sky fell" in said
    assert f"its output is in {tmp_path}/local_rank_1" in said


def test_what_a_rank_has_started_ends_too(script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(
        "import subprocess\nsubprocess.Popen(['sleep', '100'])\nif rank == 1: sys.exit(7)\nsleep()"
    )
    assert main(["--nproc_per_node", "2", path]) == 7
    assert within(5, lambda: not alive(tmp_path))


def test_ranks_that_ignore_the_request_to_end(
    script: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    deaf = "if rank != 1:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    sleep()\n"
    wait = "while len(list(folder.glob('here.*'))) < 1: time.sleep(0.01)\nsys.exit(7)"
    assert main(["--nproc_per_node", "2", "--shutdown_timeout", "0.5", script(deaf + wait)]) == 7
    assert not alive(tmp_path)
    assert "rank 0 did not end 0.5 s after SIGTERM: killed" in capfd.readouterr().err


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name
)
@pytest.mark.sweep(3)
def test_the_launchers_end_is_the_ranks_end(
    number: signal.Signals, script: Callable[[str], str], tmp_path: Path
) -> None:
    path = script("import subprocess\nsubprocess.Popen(['sleep', '100'])\nsleep()")
    with Launched(tmp_path, "--nproc_per_node", 2, path) as launcher:
        launcher.wait_for("here.*", 2)
        launcher.process.send_signal(number)
        assert launcher.code(20) == 128 + number
        assert nobody_left(tmp_path)
        if number != signal.SIGKILL:
            launcher.says(f"{number.name} received: ended 2 ranks")
            assert "death signal" not in launcher.err  # torch's line about the same


def test_a_reserved_port_is_nobody_elses() -> None:
    with reserved_port() as one, reserved_port() as two:
        assert one != two
        with socket.socket() as rank0:  # torch's store binds in the same way
            rank0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank0.bind(("127.0.0.1", one))
            rank0.listen()
            with (
                pytest.raises(WorldError, match=f"--master_port {one} is in use"),
                reserved_port(one),
            ):
                pass


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["not_there.py"], "not_there.py does not exist"),
        (
            ["--redirect_stdout_and_stderr", "--logdir", "/dev/null/log", __file__],
            "--logdir /dev/null/log: no files can be written there (Not a directory)",
        ),
        (
            ["-r", "3", "--log_dir", "/dev/null/log", __file__],
            "--log_dir /dev/null/log: no files can be written there (Not a directory)",
        ),
        (
            ["--nnodes", "2", "--node_rank", "2", "--master_port", "1234", __file__],
            "--node_rank 2 is out of range: with --nnodes 2 it must be from 0 to 1",
        ),
        (["--nnodes", "2", __file__], "needs --master_port"),
        (["--nproc_per_node", "0", __file__], "at least 1 process"),
        (["--master_port", "70000", __file__], "a port is from 1 to 65535"),
        (["--no_python", "-m", __file__], "exclude each other"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert says in capfd.readouterr().err


def test_a_port_in_use_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--master_port", str(port), __file__]) == 2
    assert f"--master_port {port} is in use" in capfd.readouterr().err


def test_a_program_that_cannot_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--no_python", "no-such-program"]) == 127
    assert "cannot run no-such-program: No such file or directory" in capfd.readouterr().err


def test_the_command_line_shows_its_options() -> None:
    done = subprocess.run(
        [warm_python(), "-m", "globaltensor", "launch", "-h"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    for option in (
        "nnodes",
        "node_rank",
        "nproc_per_node",
        "master_addr",
        "master_port",
        "module",
        "no_python",
        "redirect_stdout_and_stderr",
        "logdir",
    ):
        assert f"--{option}" in done.stdout
