"""Tests of ``globaltensor plan``: its output and files, the forms of MODULE:NAME that it accepts,
and its error messages."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.warm_python import warm_python

from globaltensor.__main__ import main
from globaltensor.auto import cli
from globaltensor.auto.plan.plan import Plan
from globaltensor.auto.plan.report import report
from globaltensor.cluster import Cluster
from globaltensor.errors import PlanError

MODELS = """
import torch
import torch.nn as nn
import globaltensor as flow


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 16)

    def forward(self, x, scale):
        return self.inner(x) * scale


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), (torch.randn(4, 8),)


pair = nn.Linear(8, 8), torch.randn(4, 8)
kind = Scaled, (torch.randn(4, 8), torch.randn(16))
named = Scaled(), (torch.randn(4, 8),), {"scale": torch.randn(16)}
only_named = Scaled(), {"x": torch.randn(4, 8), "scale": torch.randn(16)}


class Step(flow.nn.Graph):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(8, 16).to_global(flow.placement("cpu", [0]), flow.sbp.broadcast)

    def build(self, x):
        return self.model(x)


def graph():
    return Step(), (torch.randn(4, 8).to_global(flow.placement("cpu", [0]), flow.sbp.broadcast),)


alone = nn.Linear(2, 2)
number = 3


def triple():
    return 1, 2, 3, 4


class inner:
    small = staticmethod(small)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder with a module ``planned_models`` the current folder."""
    (tmp_path / "planned_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("planned_models", "models"):
        sys.modules.pop(name, None)


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_without_a_cluster_it_plans_for_two_devices_and_says_so(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, out, err = ran(capsys, "planned_models:small")
    assert code == 0, err
    assert out.startswith("plan for 2 devices of generic, one axis, training, 3 calls\n  cost ")
    assert "data parallel" in out
    assert "planning for 2 devices of the generic cluster" in err


def test_a_preset_a_mesh_and_files(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(
        capsys,
        "planned_models:small",
        "--cluster",
        "dgx-h100",
        "--devices",
        "4",
        "--mesh",
        "2x2",
        "--html",
        "p.html",
        "--save",
        "p.json",
    )
    assert code == 0, err
    assert out.startswith("plan for 4 devices of dgx-h100, a mesh of 2 x 2")
    assert (models / "p.html").read_text().startswith("<!doctype html>")
    assert report(Plan.load(models / "p.json"), saved="p.json") + "\n" == out
    assert 'plan = flow.auto.load_plan("p.json")' in out
    assert "--save" not in out
    assert "written to p.html" in err


def test_internals_of_the_search_are_shown_on_request(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("planned_models:small", "--cluster", "cpu")
    code, out, _ = ran(capsys, *asked)
    assert code == 0
    assert "search:" not in out
    assert "\n\nin short\n  cost " in out
    assert out.endswith("--save plan.json does\n")
    code, out, _ = ran(capsys, *asked, "--verbose")
    assert code == 0
    assert re.search(r"\n\nsearch: .*\bsolving ", out)


def test_as_json(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(
        capsys,
        "planned_models:small",
        "--cluster",
        "cpu",
        "--json",
        "--batch",
        "16",
        "--seconds",
        "20",
    )
    assert code == 0
    told = json.loads(out)
    assert told["cluster"] == "cpu"
    assert told["mesh"] == [2]
    assert next(g["shape"] for g in told["placed"] if g["kind"] == "input") == [16, 8]


def test_explaining_instead_of_reporting(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(
        capsys,
        "planned_models:small",
        "--cluster",
        "cpu",
        "--explain",
        "0",
        "--explain",
        "2.weight",
    )
    assert code == 0
    assert out.startswith("0: 1 call and 2 tensors given")
    assert "\n\n2.weight: " in out
    assert "bound" not in out


def test_a_file_that_a_profile_wrote(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Cluster(name="ours", size=4, memory=1 << 30).save("ours.json")
    code, out, err = ran(capsys, "planned_models:small", "--cluster", "ours.json")
    assert code == 0, err
    assert out.startswith("plan for 4 devices of ours, ")
    assert "of the limit of 1.0 GiB" in out


@pytest.mark.parametrize("name", ["pair", "kind", "named", "only_named", "graph", "inner.small"])
def test_what_a_name_may_be(models: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(
        capsys,
        f"planned_models:{name}",
        "--cluster",
        "generic",
        *(["--devices", "1"] if name == "graph" else []),
    )
    assert code == 0, err
    assert "weight" in out


def test_a_module_may_be_a_file(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (models / "deep").mkdir()
    (models / "deep" / "models.py").write_text(MODELS)
    code, out, err = ran(capsys, "deep/models.py:pair", "--cluster", "cpu")
    assert code == 0, err
    assert "[8, 8]  float32" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small"], "not of the form MODULE:NAME"),
        (["nowhere_at_all:small"], "no module 'nowhere_at_all' can be imported from"),
        (["none.py:small"], "there is no file none.py"),
        (
            ["planned_models:smal"],
            r"planned_models has no 'smal'; it has .*small.*; did you mean 'small'\?",
        ),
        (["planned_models:alone"], "is a model without inputs; give"),
        (["planned_models:number"], r"provides an int; expected \(model, inputs\)"),
        (["planned_models:triple"], "provides a tuple of 4; expected"),
        (
            ["planned_models:small", "--cluster", "dgx-z"],
            "no preset of this name; presets are generic, dgx-a100",
        ),
        (["planned_models:small", "--cluster", "dgx-h10"], r"did you mean dgx-h100\?"),
        (["planned_models:small", "--cluster", "none.json"], "none.json: cannot be read"),
        (["planned_models:small", "--devices", "0"], "--devices 0: at least 1"),
        (["planned_models:small", "--mesh", "2y4"], "--mesh 2y4: a shape such as 8 or 2x4"),
        (["planned_models:small", "--memory", "lots"], "memory is a number of bytes"),
        (
            ["planned_models:small", "--memory", "10", "--cluster", "cpu"],
            "no plan fits into memory=10 bytes",
        ),
        (
            ["planned_models:small", "--cluster", "cpu", "--explain", "zero"],
            "no module, parameter, call or tensor 'zero'",
        ),
        (["planned_models:small", "--html", "no/such/folder.html"], "no/such/folder.html"),
        (["planned_models:smal", "--html", "left.html", "--save", "left.json"], "has no 'smal'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_a_line(
    models: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ran(capsys, *arguments)
    assert code == 1
    assert not out
    assert re.search(message, err), err
    assert err.splitlines()[-1].startswith("globaltensor plan: ")
    assert not list(models.glob("left.*")), "no empty files are left behind"


def test_what_the_users_code_raises_comes_through(models: Path) -> None:
    (models / "broken_models.py").write_text("import nothing_that_is_there\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_that_is_there"):
        main(["plan", "broken_models:small"])


def test_accelerators_of_this_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 << 30

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Properties)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "H100")
    found = cli.cluster_for(None)
    assert (found.size, found.device, found.memory) == (4, "cuda", 80 << 30)
    assert "H100" in found.name
    assert cli.cluster_for(None, 2).size == 2


def test_a_cluster_without_a_size_is_said_to_be_two(tmp_path: Path) -> None:
    Cluster().save(tmp_path / "any.json")
    said: list[str] = []
    assert cli.cluster_for(str(tmp_path / "any.json"), None, said.append).size == 2
    assert "--devices" in said[0]
    with pytest.raises(PlanError, match="at least 1"):
        cli.cluster_for("cpu", -1)


def test_the_command_in_a_process_of_its_own(models: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [warm_python(), "-m", "globaltensor", *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=models,
        )

    shown = run("plan", "--help")
    assert shown.returncode == 0
    assert "--cluster" in shown.stdout
    done = run("plan", "planned_models:small", "--cluster", "dgx-h100")
    assert done.returncode == 0, done.stderr
    assert "cost" in done.stdout
    assert run("--help").stdout.count("plan") >= 1


def test_the_package_is_the_command_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["globaltensor", "doctor", "--json", "--no-ranks"])
    monkeypatch.delitem(sys.modules, "globaltensor.__main__", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("globaltensor", run_name="__main__")
    assert not ended.value.code
    assert "torch" in [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]]
