"""Tests of the command ``globaltensor``: version, help, suggestions, completion, progress, and the
checks of ``doctor``."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import globaltensor
from globaltensor.__main__ import _parsers, doctor, main
from globaltensor._base.patches import TABLE
from globaltensor._base.progress_line import ProgressLine, StageFile
from globaltensor.distributed import doctor as checks
from globaltensor.distributed.doctor import Finding, examine
from globaltensor.distributed.launcher.options import job_of
from globaltensor.distributed.launcher.options import parser as launcher
from globaltensor.utils.trace_command import trace_parser

VERBS = ("launch", "trace", "doctor", "ops", "profile", "plan", "completion")
COMMAND = [sys.executable, "-m", "globaltensor"]
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")


def ended(*arguments: str) -> int | None:
    """Return the exit code of a command that ends by SystemExit."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    code = end.value.code
    assert code is None or isinstance(code, int)
    return code


# -------------------------------------------------------------------------------------- the parsers


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"globaltensor {globaltensor.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_in_examples_that_parse(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(verb, "--help") == 0
    _, _, text = capsys.readouterr().out.partition("\nexamples:\n")
    lines = [line.strip() for line in text.splitlines()]
    examples = lines[: lines.index("")] if "" in lines else lines
    assert 2 <= len(examples) <= 3
    for example in examples:
        assert f"globaltensor {verb}" in example
        called = example.partition(f"globaltensor {verb}")[2]
        command = re.split(r"   |\)\"| > |\|", called)[0]  # without the comment
        given = [word.strip("'") for word in command.split()]
        if verb in ("launch", "trace"):
            parser = launcher() if verb == "launch" else trace_parser()
            assert parser.parse_args(given).training_script in ("train.py", "globaltensor")
        else:
            top, _ = _parsers([verb])
            assert top.parse_args([verb, *given]).verb == verb


def test_short_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for spelled in (["-n", "3"], ["-n3"], ["--nproc_per_node", "3"], ["--nproc-per-node=3"]):
        job = job_of(launcher().parse_args([*spelled, "train.py", "-n", "7"]))
        assert job.nproc_per_node == 3
        assert list(job.command[-2:]) == ["-n", "7"]  # the script's own
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    assert job_of(launcher().parse_args(["train.py"])).nproc_per_node == 5
    asked: list[int] = []

    def run(*_: Any, nprocs: int, **__: Any) -> list[Any]:
        asked.append(nprocs)
        return [globaltensor.Cluster(size=nprocs)]

    monkeypatch.setattr(sys.modules["globaltensor.auto.profile.measure"], "run", run)
    assert main(["profile", "-n", "3", "--device", "cpu", "--quiet"]) == 0
    assert asked == [3]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["profle"], "profile"),
        (["--verson"], "--version"),
        (["profile", "--secnds", "3"], "--seconds"),
        (["profile", "--secnds=3"], "--seconds"),
        (["profile", "--device", "cpuu"], "cpu"),
        (["doctor", "--patch-es"], "--patches"),
        (["plan", "m:f", "--clustr", "cpu"], "--cluster"),
        (["completion", "bsh"], "bash"),
        (["launch", "--nproc_per_nod", "2", "train.py"], "--nproc_per_node"),
        (["launch", "--nproc", "2", "train.py"], "--nproc_per_node"),
        (["launch", "--bakend", "gloo", "train.py"], "--backend"),
        (["launch", "--backend", "glo", "train.py"], "gloo"),
        (["launch", "--max_restart=2"], "--max_restarts"),
    ],
    ids=" ".join,
)
def test_what_was_meant(
    arguments: Sequence[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.endswith(f"did you mean {meant}?\n"), err
    verb = " " + arguments[0] if arguments[0] in VERBS else ""
    assert err.startswith(f"usage: globaltensor{verb} ")


@pytest.mark.parametrize("arguments", [["zzz"], ["profile", "--zzz"], ["doctor", "extra"]])
def test_nothing_is_meant_by_other_words(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*arguments) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_options_of_the_script_are_no_mistakes(tmp_path: Path) -> None:
    given = ["-n", "1", "train.py", "--nproc_per_nod", "2", "--backen"]
    assert launcher().parse_args(given).training_script_args == given[3:]


def test_functions_that_were_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "nn.functional.sofmax"]) == 1
    assert "did you mean torch.nn.functional.softmax?" in capsys.readouterr().err
    assert main(["ops", "zzzzz"]) == 1
    assert "did you mean" not in capsys.readouterr().err


# --------------------------------------------------------------------------------------- completion

COMPLETED = [
    ("pro", {"profile"}),
    ("--vers", {"--version"}),
    ("profile --de", {"--device"}),
    ("profile --device ", {"auto", "cpu", "cuda"}),
    ("completion ", {"bash", "zsh", "fish"}),
    ("launch -n 2 --master_", {"--master_addr", "--master_port"}),
    ("launch --backend g", {"gloo"}),
    ("trace --ou", {"--out"}),
    ("plan --expl", {"--explain"}),
    ("doctor --no", {"--no-ranks"}),
]


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    path = folder / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return str(path)


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("bash", tmp_path, capsys)
    program = """
source "$1"; shift
complete -p globaltensor > /dev/null || exit 1
COMP_WORDS=(globaltensor "$@"); COMP_CWORD=$#; _globaltensor; echo "${COMPREPLY[@]}"
"""
    for line, expected in COMPLETED:
        words = line.split(" ")
        assert set(output("bash", "-c", program, "bash", path, *words).split()) == expected, line
    # names of files, which bash completes if there is no answer: values, and after the script
    for line in ("profile --out ", "launch -n 2 train.py --ba", "plan --save "):
        assert not output("bash", "-c", program, "bash", path, *line.split(" ")).strip(), line


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_reads_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output("zsh", "-f", "-n", script("zsh", tmp_path, capsys))


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("fish", tmp_path, capsys)
    for line, expected in COMPLETED:
        said = output("fish", "-c", f"source {path}; complete -C 'globaltensor {line}'")
        assert {text.split("\t")[0] for text in said.splitlines()} == expected, line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_know_every_option(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(script(shell, tmp_path, capsys)).read_text()
    for verb in VERBS:
        assert ended(verb, "--help") == 0
        for option in set(re.findall(r"(?m)^  (?:-\w[^-]*)?--([\w-]+)", capsys.readouterr().out)):
            wanted = f"-l {option} " if shell == "fish" else f"--{option}"
            assert wanted in text, (verb, option)


# ----------------------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, until: str, **options: Any) -> str:
    """Return what a line of progress has shown, once it has shown ``until``, or after 20 s."""
    with ProgressLine("tool", 40.0, stream=stream, every=0.01, **options) as line:
        line.show("starting")
        end = time.monotonic() + 20
        while until not in stream.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    return stream.getvalue()


def test_progress_is_rewritten_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = shown(Terminal(), "starting")
    assert text.startswith("\r\x1b[Ktool: 0 s of about 40 s: starting\r\x1b[K")
    assert text.endswith("\r\x1b[K")  # the line is removed
    assert "\n" not in text


def test_progress_is_a_line_now_and_then_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(io.StringIO(), "starting").splitlines()
    assert set(lines) == {"tool: 0 s of about 40 s: starting"}
    assert ProgressLine("tool", stream=io.StringIO()).every >= 2  # "every few seconds"
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(Terminal(), "starting")


def test_a_stage_of_another_process_is_shown_and_restarts_the_time(tmp_path: Path) -> None:
    stage = StageFile(str(tmp_path / "stage"))
    log = io.StringIO()
    with ProgressLine("tool", 40.0, stage, stream=log, every=0.01) as line:
        line._began -= 30.0
        line.show("starting")
        assert line.line() == "tool: 30 s: starting"
        subprocess.run([sys.executable, "-c", f"open({stage.path!r}, 'w').write('matmuls')"])
        assert line.line() == "tool: 0 s of about 40 s: matmuls"
    StageFile(str(tmp_path / "no" / "such" / "folder"))("progress never fails")


def test_messages_have_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream, text in ((Terminal(), "\r\x1b[Knote\n"), (io.StringIO(), "note\n")):
        ProgressLine("tool", stream=stream, quiet=True).print("note")
        assert stream.getvalue() == text


def test_quiet_shows_nothing() -> None:
    stream = Terminal()
    with ProgressLine("tool", stream=stream, quiet=True, every=0.01) as line:
        line.show("starting")
        time.sleep(0.05)
    assert not stream.getvalue()


@pytest.mark.usefixtures("warm_ranks")
def test_profile_shows_its_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("globaltensor._base.progress_line._PRINT_SECONDS", 0.02)
    asked = ["profile", "-n", "2", "--seconds", "1", "--device", "cpu"]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    stages = list(dict.fromkeys(line.rpartition(": ")[2] for line in err.splitlines()))
    assert stages[0] == "starting ranks"
    assert set(stages[1:]) >= {"matmuls and memory", "collectives and messages"}
    assert "of about 1 s: collectives and messages" in err
    assert "GiB each" in out
    assert not re.search(r"\d (KB|MB|GB)\b(?!/s)", out)


# ------------------------------------------------------------------------------------------- doctor


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def children() -> set[str]:
    """Return the process ids of this process's children."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


def finding(name: str) -> Finding:
    """Return the finding of one check."""
    return next(f for f in examine(ranks=False) if f.name == name)


@pytest.mark.usefixtures("alone")
def test_every_check_is_a_line_and_the_same_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--no-ranks"])
    lines = capsys.readouterr().out.splitlines()
    forms = [re.fullmatch(r"(ok  |warn|FAIL) (\w+): (.+)", line) for line in lines]
    assert all(forms), lines
    names = [form[2] for form in forms if form]
    assert names == [
        *("python", "torch", "globaltensor", "extras", "backends", "world", "cores", "memory"),
        *("shared_memory", "limits", "network", "gpus", "clocks"),
    ]
    assert code == int(any(line.startswith("FAIL") for line in lines))
    assert main(["doctor", "--no-ranks", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in told["checks"]] == names
    statuses = {"ok": "ok", "warn": "warn", "FAIL": "fail"}
    assert [c["status"] for c in told["checks"]] == [statuses[f[1].strip()] for f in forms if f]
    for check in told["checks"]:
        assert set(check) == {"name", "status", "what", "mend", "values"}
        assert all(re.fullmatch("[a-z0-9_]+", key) for key in check["values"])
    values = {check["name"]: check["values"] for check in told["checks"]}
    assert values["torch"]["version"] == torch.__version__
    assert "gloo" in values["backends"]["backends"]
    assert any(a for a in values["network"]["interfaces"].values())


@pytest.mark.usefixtures("alone", "warm_ranks")
def test_two_ranks_talk_and_nothing_is_left(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = children()
    began = time.monotonic()
    *_, found = doctor()
    assert time.monotonic() - began < 2 * checks.RANKS_SECONDS
    assert (found.name, found.status) == ("two_ranks", "ok"), found
    assert "exchanged a number over gloo" in found.what
    assert found.values["exchange_seconds"] < found.values["seconds"]
    assert capfd.readouterr() == ("", "")
    assert children() <= before
    assert list(tmp_path.iterdir()) == []


def dies() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def sleeps() -> None:
    time.sleep(600)


@pytest.mark.usefixtures("alone", "warm_ranks")
@pytest.mark.parametrize(
    ("fn", "seconds", "told"), [(dies, 60.0, "rank 1 .*SIGKILL"), (sleeps, 8.0, "had not")]
)
def test_ranks_that_do_not_talk(
    fn: Any, seconds: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "exchange", fn)
    monkeypatch.setattr(checks, "RANKS_SECONDS", seconds)
    began = time.monotonic()
    *_, found = examine()
    assert time.monotonic() - began < seconds + 15
    assert found.status == "FAIL"
    assert re.search(told, found.what), found
    assert "\n" not in str(found)


@pytest.mark.usefixtures("alone")
def test_a_broken_check_ends_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> Finding:
        raise OSError("no such\nthing")

    broken.__name__ = "_broken"
    monkeypatch.setattr(checks, "_CHECKS", (broken,))
    assert main(["doctor", "--no-ranks"]) == 1
    assert capsys.readouterr().out == "FAIL broken: the check failed with OSError: no such\n"
    assert main(["doctor", "--no-ranks", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "fail"
    monkeypatch.setattr(checks, "_CHECKS", (lambda name: Finding("some", "warn", "so", "do"),))
    assert main(["doctor", "--no-ranks"]) == 0
    assert capsys.readouterr().out == "warn some: so (do)\n"


@pytest.mark.usefixtures("alone")
def test_the_world_and_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a world of one" in finding("world").what
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("MASTER_PORT", "1")
    found = finding("world")
    assert found.status == "FAIL"
    assert "give rank 5 of 2" in found.what
    monkeypatch.setenv("RANK", "1")
    found = finding("world")
    assert (found.status, found.values["rank"], found.values["world_size"]) == ("ok", 1, 2)
    *_, ranks = examine()
    assert (ranks.status, ranks.what) == ("ok", "not tried: this process is rank 1 of 2")


@pytest.mark.usefixtures("alone")
def test_the_interface_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("network").values["gloo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    found = finding("network")
    assert found.status == "FAIL"
    assert found.what == "GLOO_SOCKET_IFNAME names nowhere0, which this host does not have"
    assert "lo" in found.mend
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = finding("network")
    assert (found.status, found.values["gloo"]) == ("ok", "lo")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(
        "globaltensor.distributed.network._resolve_host", lambda name: "203.0.113.9"
    )
    found = finding("network")
    assert found.status == "warn"
    assert "no interface has 203.0.113.9" in found.what
    assert "/etc/hosts" in found.mend


def test_limits_and_sizes_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = {resource.RLIMIT_MEMLOCK: (65536, 65536), resource.RLIMIT_NOFILE: (256, 8192)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    found = finding("limits")
    assert (found.status, found.what) == ("warn", "memlock 64.0 KiB, nofile 256")
    assert found.mend.endswith("ulimit -n 8192")
    limits[resource.RLIMIT_NOFILE] = (65536, 65536)
    assert finding("limits").status == "ok"
    limits[resource.RLIMIT_NOFILE] = (256, 1024)  # ulimit -n cannot reach the minimum here
    mend = finding("limits").mend
    assert "the hard limit is 1024" in mend
    assert "docker run --ulimit nofile=65536" in mend
    assert "ulimit -n" not in mend
    limits[resource.RLIMIT_NOFILE] = (65536, 65536)
    monkeypatch.setattr(checks, "rdma_devices", lambda: ["mlx5_0:1 (InfiniBand)"])
    mend = finding("limits").mend
    assert "docker run --ulimit memlock=-1" in mend
    assert "ulimit -l" not in mend
    limits[resource.RLIMIT_MEMLOCK] = (65536, resource.RLIM_INFINITY)
    assert finding("limits").mend.endswith("ulimit -l unlimited")
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    found = finding("shared_memory")
    assert found.status == "warn"
    assert found.what == "/dev/shm has 64.0 MiB, 64.0 MiB of it available"
    assert "--shm-size" in found.mend
    full = os.statvfs_result((4096, 4096, 16384, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert finding("shared_memory").status == "FAIL"


def test_versions_that_are_too_old_and_packages_that_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MIN_TORCH", (99, 1))
    found = finding("torch")
    assert (found.status, found.mend) == ("FAIL", "pip install 'torch>=99.1'")
    monkeypatch.setattr(checks, "_CORE", ("torch", "no_such_package"))
    found = finding("globaltensor")
    assert (found.status, found.mend) == ("FAIL", "pip install no_such_package")

    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "version", not_installed)
        found = finding("globaltensor")
        assert (found.status, found.mend) == ("FAIL", "pip install no_such_package")
        patched.setattr(checks, "_CORE", ("torch",))
        found = finding("globaltensor")
        assert (found.status, found.what.partition(", ")[2]) == ("warn", "not installed")
    requires = [
        "numpy",
        'highspy>=1.10; extra == "auto"',
        "no-such>=3 ; extra == 'hf'",
        'p>=1; extra == "dev"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(checks, "_is_installed", lambda package: package == "highspy")
    found = finding("extras")
    assert (found.status, found.what) == ("ok", "auto installed; hf lacks no-such")
    assert found.values == {"installed": ["auto"], "missing": {"hf": ["no-such"]}}
    assert found.mend.startswith("optional: pip install '.[NAME]' in a checkout of globaltensor")


def test_cores_that_the_container_does_not_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(checks, "_cpu_quota", lambda: 2.0)
    found = finding("cores")
    assert (found.status, found.mend) == ("warn", "OMP_NUM_THREADS=2")
    monkeypatch.setattr(checks, "_cpu_quota", lambda: None)
    assert finding("cores").status == "ok"


def test_gpus_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    class Devices(type(Path())):  # type: ignore[misc]
        """A path in which there is a GPU's device file."""

        def glob(self, pattern: str) -> list[Path]:
            return [Path("/dev/nvidia0")]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(checks, "Path", Devices)
    found = checks._gpus("gpus")
    assert found.status == "warn"
    assert "this torch is built for CPUs" in found.mend


def test_gpus_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    found = checks._backends("backends")
    assert (found.status, found.what) == ("warn", "GPUs, but no nccl: they talk over gloo")
    assert found.mend == "install a torch that is built with NCCL, see pytorch.org"


def test_gpus_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory = "H100", 80 << 30

    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch, "ones", lambda n, device: ones(n))
    found = finding("gpus")
    assert (found.status, found.what) == ("ok", "2: H100 (80.0 GiB), H100 (80.0 GiB)")
    assert found.values["gpus"] == [{"name": "H100", "memory": 80 << 30}] * 2
    monkeypatch.setattr(torch, "ones", lambda n, device: ones(n) * (device != "cuda:1"))
    found = finding("gpus")
    assert (found.status, found.what) == ("FAIL", "cuda:1 computes a wrong sum")


@pytest.mark.gpu
def test_the_gpus_of_this_machine() -> None:
    found = finding("gpus")
    assert found.status == "ok"
    assert len(found.values["gpus"]) == torch.cuda.device_count() > 0
    assert "nccl" in finding("backends").values["backends"]


def test_an_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> Finding:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "_CHECKS", (interrupted,))
    assert main(["doctor", "--no-ranks"]) == 130
    assert capsys.readouterr() == ("", "globaltensor doctor: interrupted\n")


def test_each_patch_is_a_row_with_its_state_and_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--patches"]) == 0
    rows = [re.split(r" {2,}", line, maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (patch.target, patch.since, patch.reason) for patch in TABLE
    ]
    states = {row[0]: row[2] for row in rows}
    assert set(states.values()) <= {"applied", "waits for import", "unused"}
    assert {states[f"torch:Tensor.{name}"] for name in ("to_global", "sbp", "data")} == {"applied"}


def test_a_reader_that_leaves_early() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m globaltensor ops | head -1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout
    assert "Traceback" not in done.stderr
