"""Tests that support/warm_python runs programs as Python does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launched import alive, within
from support.warm_python import _Server, warm_python


def test_no_test_ends_the_server_with_its_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    # a server that is ready at once, and starts no programs
    home = tmp_path / "home"
    home.mkdir()
    (home / "client.py").write_text("")
    (home / "server.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    monkeypatch.setattr("support.warm_python.HERE", home)
    server = _Server()
    try:
        assert alive(tmp_path) == []
    finally:
        server.close()


def ended(*arguments: str, text: str = "") -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of a program."""
    done = subprocess.run(
        [warm_python(), *arguments], input=text, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("print('seen')", 0, ""),
        ("print('seen'); raise SystemExit(3)", 3, ""),
        ("import sys; print('seen'); sys.exit('why')", 1, "why\n"),
        ("import os, signal; print('seen', flush=True); os.kill(os.getpid(), 15)", -15, ""),
        ("import atexit; atexit.register(print, 'seen')", 0, ""),
        ("import threading; threading.Thread(target=lambda: print('seen')).start()", 0, ""),
    ],
)
def test_a_program_ends_as_it_does_under_python(program: str, code: int, said: str) -> None:
    assert ended("-c", program) == (code, "seen\n", said)


def test_an_error_shows_the_frames_of_the_program_alone() -> None:
    program = "def f():\n    1 / 0\nf()\n"
    code, _, said = ended("-c", program)
    assert code == 1
    plain = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said == plain.stderr


def test_a_warning_is_an_error_with_its_option() -> None:
    code, _, said = ended("-W", "error", "-c", "import warnings; warnings.warn('careful')")
    assert code == 1
    assert "UserWarning: careful" in said


def test_a_script_has_its_arguments_folder_input_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    (tmp_path / "script.py").write_text(
        "import os, sys, beside, torch\n"
        "print(__name__, __file__, sys.argv[1:], beside.name, os.getcwd(), input(),"
        " os.environ['OF_THE_TEST'], os.getppid(), torch.initial_seed())\n"
    )
    monkeypatch.setenv("OF_THE_TEST", "value")
    script = str(tmp_path / "script.py")
    answers = [ended(script, "a", "-b", text="line\n") for _ in range(2)]
    for code, out, _ in answers:
        expected = ("__main__", script, ["a", "-b"], "beside", os.getcwd(), "line", "value")
        assert code == 0
        assert out.startswith(" ".join(map(str, (*expected, os.getpid()))) + " ")
    assert answers[0] != answers[1], "each process has a seed of its own"


def test_a_module_is_the_main_program() -> None:
    code, out, said = ended("-m", "globaltensor", "--version")
    assert (code, said) == (0, "")
    assert out.startswith("globaltensor ")


def test_options_that_the_server_does_not_know_start_python() -> None:
    program = "import sys; print(sys.flags.isolated, 'torch' in sys.modules)"
    assert ended("-I", "-c", program) == (0, "1 False\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_gets_the_signals_and_goes_with_its_client(
    number: signal.Signals, tmp_path: Path
) -> None:
    program = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
    command = [warm_python(), "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.send_signal(number)
        assert process.wait(20) == -number
    assert within(20, lambda: not Path(f"/proc/{pid}").exists())
