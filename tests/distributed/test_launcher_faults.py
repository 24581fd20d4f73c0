"""Tests of ranks that die, hang, disagree or restart under the real launcher. Each run ends in
bounded time, names the rank and the reason, and leaves no process."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.launched import Launched, alive, end, nobody_left, within, write_script
from support.mpi import needs_mpi
from support.warm_python import warm_python

from globaltensor.distributed.launch import main

BACKENDS = ["gloo", pytest.param("mpi", marks=needs_mpi)]
COLLECTIVE = """
import torch
import globaltensor.distributed as dist
dist.init_process_group()
x = torch.ones(1000)
dist.all_reduce(x)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    yield tmp_path
    end(tmp_path)


@pytest.fixture
def warm_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launcher start its ranks under support/warm_python. It finds no mpirun then."""
    monkeypatch.setattr(sys, "executable", warm_python())


def run(folder: Path, body: str, *options: object, n: int = 2) -> int:
    """Run the launcher in this process, on n ranks, and return its exit code.

    Ranks that import torch run under support/warm_python, except on MPI: the launcher finds no
    mpirun then."""
    warm = COLLECTIVE in body and "mpi" not in options
    with mock.patch.object(sys, "executable", warm_python() if warm else sys.executable):
        return main(["--nproc_per_node", str(n), *map(str, options), write_script(folder, body)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sweep(2)
def test_a_rank_killed_in_the_middle(
    backend: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = (
        f"{COLLECTIVE}\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nfor _ in "
        f"range(100000):\n    dist.all_reduce(x)\n"
    )
    assert run(folder, body, "--backend", backend) == 128 + signal.SIGKILL
    said = capfd.readouterr().err
    assert "rank 1 (local rank 1" in said
    assert "was ended by SIGKILL (signal 9)" in said
    assert nobody_left(folder)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sweep(2)
def test_a_rank_that_hangs(
    backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other ranks' collective times out. The hanging rank ignores even SIGTERM."""
    monkeypatch.setenv("GLOBALTENSOR_TIMEOUT", "3")
    body = (
        f"{COLLECTIVE}\nif rank == 1:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    "
        f"time.sleep(100)\ndist.all_reduce(x)\n"
    )
    began = time.monotonic()
    assert run(folder, body, "--backend", backend, "--shutdown_timeout", "0.5") == 1
    assert time.monotonic() - began < 40
    said = capfd.readouterr().err
    assert "rank 0 (local rank 0" in said
    assert "| Traceback (most recent call last)" in said
    assert "timed out" in said.lower() or "timeout" in said.lower()
    assert "rank 1 did not end 0.5 s after SIGTERM: killed" in said
    assert nobody_left(folder)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sweep(2)
def test_ranks_with_other_shapes(
    backend: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"{COLLECTIVE}\ndist.all_reduce(torch.ones((1000, 1200)[rank]))\n"
    assert run(folder, body, "--backend", backend) != 0
    said = capfd.readouterr().err
    assert "| Traceback (most recent call last)" in said
    assert "1000" in said
    assert "1200" in said
    assert nobody_left(folder)


@pytest.mark.parametrize("late", [0.0, 0.6], ids=["at once", "ends later"])
def test_the_rank_that_failed_is_told_before_those_who_noticed(
    late: float, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that waits for the failed rank ends too, possibly before it. The failed rank is
    reported all the same."""
    body = f"""
import atexit
here()
if rank == 1:
    atexit.register(lambda: ((folder / "noticed").touch(), time.sleep({late})))
    raise ValueError("the sky fell")
wait_for("noticed", 1)
raise RuntimeError("Read error [127.0.0.1]:31649: Connection reset by peer")
"""
    assert run(folder, body) == 1
    said = capfd.readouterr().err
    told = said[said.index("globaltensor.launch: rank") :]
    assert "rank 1 (local rank 1" in told.splitlines()[0]
    assert "| ValueError: the sky fell" in told
    assert "| RuntimeError" not in told
    # the other rank's error is one line of the report, and none where it had no time to fail
    others = re.findall(
        r"another rank failed too: rank 0 \(local rank 0, pid \d+ on .*\) ended with exit code 1\n",
        told,
    )
    assert len(others) == told.count("rank 0 (local rank 0")
    assert len(others) == 1 if late else len(others) <= 1
    assert len(told.splitlines()) < 12, told
    assert nobody_left(folder)


def test_a_long_message_is_shown_in_full_once(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The report repeats the error of the failed rank, because the output of many ranks may come
    after it. Only the first words of a long line are repeated."""
    body = """
if rank == 1:
    message = "the sky fell " + "and fell " * 100 + "to the " + "ground"
    raise ValueError(message)
sleep()
"""
    assert run(folder, body) == 1
    said = capfd.readouterr().err
    told = said[said.index("globaltensor.launch: rank 1") :]
    assert said.count("to the ground") == 1
    assert "to the ground" not in told
    assert re.search(r"\| ValueError: the sky fell and fell .* \.\.\. \(in full above\)\n", told)


def test_why_a_rank_was_aborted_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The report contains the reason from C++ and the location from Python, without the list of
    loaded extension modules."""
    body = """
if rank == 0:
    sys.stderr.write("terminate called after throwing an instance of 'gloo::EnforceNotMet'\\n  what():  64 vs 32. Is there a collective mismatch?\\n")
    sys.stderr.flush()
    import torch; os.abort()
sleep()
"""  # noqa: E501
    assert run(folder, body) == 128 + signal.SIGABRT
    said = capfd.readouterr().err
    told = said[said.index("globaltensor.launch: rank 0") :]
    assert "| terminate called after throwing" in told
    assert "|   what():  64 vs 32. Is there a collective mismatch?" in told
    assert "script.py" in told
    assert "Extension modules" not in told


@needs_mpi
@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("sys.exit(7)", 7, "ended with exit code 7"),
        ("raise ValueError('the sky fell')", 1, "| ValueError: the sky fell"),
    ],
    ids=["exit", "raise"],
)
@pytest.mark.sweep(2)
def test_a_failure_in_an_mpi_world(
    does: str, code: int, says: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """mpirun runs the ranks, but the launcher decides and reports. The other ranks get the time to
    end cleanly."""
    body = f"""
import mpi4py
mpi4py.rc.finalize = False  # it would wait for the others
from mpi4py import MPI
assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (rank, 3)
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), (folder / f"tidy.{{rank}}").touch(), os._exit(0)))
here()
if rank == 1:
    {does}
time.sleep(100)
"""  # noqa: E501
    assert run(folder, body, "--backend", "mpi", n=3) == code
    said = capfd.readouterr().err
    assert "rank 1 (local rank 1" in said
    assert says in said
    assert "prterun" not in said
    assert sorted(path.name for path in folder.glob("tidy.*")) == ["tidy.0", "tidy.2"]
    assert nobody_left(folder)


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.sweep(2)
def test_the_launcher_of_an_mpi_world_dies(number: signal.Signals, folder: Path) -> None:
    path = write_script(folder, "import subprocess\nsubprocess.Popen(['sleep', '100'])\nsleep()")
    with Launched(folder, "--nproc_per_node", 2, "--backend", "mpi", path) as launcher:
        launcher.wait_for("here.*", 2)
        launcher.process.send_signal(number)
        assert launcher.code(20) == 128 + number
        assert nobody_left(folder)


@needs_mpi
def test_mpirun_dies(folder: Path) -> None:
    path = write_script(folder, "sleep()")
    with Launched(folder, "--nproc_per_node", 2, "--backend", "mpi", path) as launcher:
        launcher.wait_for("here.*", 2)
        (mpirun,) = [
            pid
            for pid in alive(folder)
            if Path(f"/proc/{pid}/exe").resolve().name
            in ("mpirun", "orterun", "prterun", "prte", "mpiexec")
        ]
        os.kill(mpirun, signal.SIGKILL)
        assert launcher.code(20) != 0
        launcher.says(
            r"mpirun was ended by SIGKILL \(signal 9\)\n.*the launcher has ended the 2 ranks that "
            r"it connected too"
        )
        assert nobody_left(folder)


@needs_mpi
def test_output_and_logs_of_an_mpi_world(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Each line is one write. Python's unbuffered print makes several writes, and those of two ranks
    # may interleave.
    body = (
        "sys.stdout.write(f\"out {rank} {os.environ['GLOBALTENSOR_BACKEND']}\\n\"); "
        'sys.stderr.write(f"err {rank}\\n")'
    )
    assert run(folder, body, "--backend", "mpi") == 0
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["out 0 mpi", "out 1 mpi"]
    assert sorted(said.err.splitlines()) == ["err 0", "err 1"]
    assert (
        run(
            folder,
            body,
            "--backend",
            "mpi",
            "--redirect_stdout_and_stderr",
            "--logdir",
            folder / "logs",
        )
        == 0
    )
    assert [(folder / f"logs/local_rank_{i}/stdout").read_text() for i in range(2)] == [
        "out 0 mpi\n",
        "out 1 mpi\n",
    ]
    assert capfd.readouterr() == ("", "")


@needs_mpi
def test_mpirun_keeps_its_files_apart(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun's pid names Open MPI's own folder. Files left there by a killed mpirun prevent the
    next one with that pid from starting."""
    assert (
        run(folder, 'print(os.environ["PMIX_SERVER_TMPDIR"], flush=True)', "--backend", "mpi") == 0
    )
    (place,) = set(capfd.readouterr().out.split())
    assert place.startswith(f"{tempfile.gettempdir()}/globaltensor_mpi_")
    assert not Path(place).parent.exists()


def test_mpi_on_several_nodes_is_mpiruns_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend", "mpi", "--nnodes", "2", "--master_port", "1234", __file__]) == 2
    assert (
        "start the script itself, by `mpirun -n <ranks> --host a,b python script.py` or by srun"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=needs_mpi)])
def test_ranks_start_again(backend: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        "(folder / "
        'f"told.{attempt}.{rank}").write_text(json.dumps(dict(os.environ)))\nhere()\nif '
        "attempt < 2 and rank == 1: sys.exit(3 + attempt)\n"
    )
    assert (
        run(
            folder,
            body + "if attempt < 2: time.sleep(100)",
            "--max_restarts",
            2,
            "--backend",
            backend,
        )
        == 0
    )
    said = capfd.readouterr().err
    places = [
        said.index(text)
        for text in (
            "ended with exit code 3",
            "restart 1 of at most 2",
            "ended with exit code 4",
            "restart 2 of at most 2",
        )
    ]
    assert places == sorted(places)
    told = [json.loads((folder / f"told.{attempt}.0").read_text()) for attempt in range(3)]
    assert [(v["TORCHELASTIC_RESTART_COUNT"], v["TORCHELASTIC_MAX_RESTARTS"]) for v in told] == [
        ("0", "2"),
        ("1", "2"),
        ("2", "2"),
    ]
    assert len({v["MASTER_PORT"] for v in told}) == 3


def test_restarts_are_counted(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run(folder, "here()\nif rank == 1: sys.exit(5)\ntime.sleep(100)", "--max_restarts", 1) == 5
    )
    assert capfd.readouterr().err.count("ended with exit code 5") == 2
    assert nobody_left(folder)


@pytest.mark.usefixtures("warm_launcher")
def test_collectives_work_again_after_a_restart(folder: Path) -> None:
    """Entries that the first attempt left in the store must not be used: their addresses are no
    longer valid."""
    body = COLLECTIVE + (
        "if attempt == 0 and rank == 0: sys.exit(3)\n(folder / "
        "f'sum.{attempt}.{rank}').write_text(str(x[0].item()))\n"
    )
    assert run(folder, body, "--max_restarts", 1) == 0
    assert [(folder / f"sum.1.{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]


@pytest.mark.usefixtures("warm_launcher")
def test_a_rank_that_ends_early_does_not_disturb_the_others(folder: Path) -> None:
    body = COLLECTIVE + (
        "dist.destroy_process_group()\nif rank == 1:\n    time.sleep(0.5)\n    (folder / "
        "'late').touch()\n"
    )
    assert run(folder, body) == 0
    assert (folder / "late").exists()


def test_the_console_and_the_files_of_torchruns_options(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = 'print("out", rank); print("err", rank, file=sys.stderr)'
    assert (
        run(
            folder,
            body,
            "--tee",
            "3",
            "--log-dir",
            folder / "logs",
            "--rdzv-id",
            "job",
            "--local-ranks-filter",
            "0",
        )
        == 0
    )
    said = capfd.readouterr()
    assert (said.out, said.err) == ("[default0]:out 0\n", "[default0]:err 0\n")
    (attempt,) = (folder / "logs").glob("job_*/attempt_0")
    assert [(attempt / f"{i}/stdout.log").read_text() for i in range(2)] == ["out 0\n", "out 1\n"]
    assert run(folder, body, "--redirects", "0:3,1:1", "--log_dir", folder / "more") == 0
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "err 1\n")
    assert run(folder, body, "--local_ranks_filter", "1") == 0
    said = capfd.readouterr()
    assert (said.out, said.err) == ("out 1\n", "err 1\n")


def test_a_rank_that_is_not_shown_is_still_reported(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            folder,
            "if rank == 1: raise ValueError('the sky fell')\ntime.sleep(100)",
            "--local_ranks_filter",
            "0",
        )
        == 1
    )
    assert "| ValueError: the sky fell" in capfd.readouterr().err


def test_a_terminal_stays_one(folder: Path) -> None:
    """Progress bars check whether stderr is a terminal. Output through the launcher's terminal
    arrives unchanged."""
    import pty

    path = write_script(folder, "sys.stderr.write(f'tty {sys.stderr.isatty()}\\rdone {rank}\\n')")
    ours, theirs = pty.openpty()
    pid = os.fork()
    if pid == 0:
        os.dup2(theirs, 2)
        os._exit(main([path]))
    os.close(theirs)
    said = b""
    deadline = time.monotonic() + 30
    while b"done 0" not in said and time.monotonic() < deadline:
        said += os.read(ours, 1 << 12)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(ours)
    assert said == b"tty True\rdone 0\r\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nnodes", "1:2", __file__], "--rdzv_backend c10d needs --rdzv_endpoint HOST:PORT"),
        (["--nnodes", "two", __file__], "--nnodes two: must be a number of nodes"),
        (
            ["--nproc_per_node", "many", __file__],
            "--nproc_per_node many: must be a number, auto, cpu or gpu",
        ),
        pytest.param(
            ["--nproc_per_node", "gpu", __file__],
            "--nproc_per_node gpu: PyTorch finds no GPU on this machine",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (
            ["--rdzv_backend", "nowhere", "--rdzv_endpoint", "localhost:1", __file__],
            "The rendezvous backend 'nowhere' is not registered",
        ),
        (["--rdzv_conf", "timeout", __file__], "it must be KEY=VALUE"),
        (["--rdzv_conf", "timeout=soon", __file__], "timeout=soon: a number is needed"),
        (["--standalone", "--nnodes", "2", __file__], "--standalone is for one node"),
        (["--tee", "7", __file__], "--tee 7: must be 0 nothing, 1 stdout"),
        (["--local_ranks_filter", "a", __file__], "--local_ranks_filter a"),
        (["--max_restarts", "-1", __file__], "--max_restarts"),
    ],
)
def test_more_mistakes_are_told(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert says in capfd.readouterr().err


def test_a_timeout_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOBALTENSOR_TIMEOUT", "soon")
    assert main([__file__]) == 2
    assert "GLOBALTENSOR_TIMEOUT is 'soon'" in capfd.readouterr().err


def test_as_many_ranks_as_cores(folder: Path) -> None:
    assert (
        main(["--nproc_per_node", "cpu", write_script(folder, "(folder / f'rank.{rank}').touch()")])
        == 0
    )
    assert within(1, lambda: (folder / "rank.0").exists())
    assert len(list(folder.glob("rank.*"))) >= 1
