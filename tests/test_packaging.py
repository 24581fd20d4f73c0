"""Tests of the built package: what the wheel and the sdist hold, and that the wheel works in an
environment that has the core dependencies and nothing else."""

from __future__ import annotations

import email
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import globaltensor

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 is the first to read TOML")
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "globaltensor"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


def test_the_version_is_written_in_one_place() -> None:
    assert "version" not in project()
    assert project()["dynamic"] == ["version"]
    written = re.findall(r'^__version__ = "(.*)"$', (PACKAGE / "__init__.py").read_text(), re.M)
    assert written == [globaltensor.__version__]
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first is not None
    assert first[1] == globaltensor.__version__


def test_the_extra_all_has_every_extra_for_users() -> None:
    extras = project()["optional-dependencies"]
    (every,) = map(Requirement, extras["all"])
    assert every.name == "globaltensor"
    assert every.extras == set(extras) - {"all", "dev", "docs"}
    assert any("all" in Requirement(text).extras for text in extras["dev"])


def test_the_pythons_are_those_that_it_requires() -> None:
    minors = [
        int(text.rpartition(".")[2])
        for text in project()["classifiers"]
        if text.startswith("Programming Language :: Python :: 3.")
    ]
    assert project()["requires-python"] == f">=3.{min(minors)}"
    assert minors == list(range(min(minors), max(minors) + 1))


# ------------------------------------------------------------------------------- the built package


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist. Return their paths (wheel, sdist).

    Without isolation: hatchling is installed, so nothing is downloaded."""
    pytest.importorskip("build", reason="needs globaltensor[dev]")
    pytest.importorskip("hatchling", reason="needs globaltensor[dev]")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True, cwd=out, capture_output=True, text=True,
    )  # fmt: skip
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(wheel.read(metadata))
    here = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == here
    assert {"globaltensor/py.typed", "globaltensor/auto/plan/page/page.html"} <= here
    assert {path.suffix for path in map(Path, here)} >= {".py", ".pyi", ".js", ".css", ".html"}
    licenses = {Path(name).name for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE"}
    assert fields["Version"] == globaltensor.__version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert "all" in fields.get_all("Provides-Extra", [])
    assert "Operating System :: POSIX :: Linux" in fields.get_all("Classifier", [])


@pytest.mark.slow
def test_the_sdist_has_what_a_developer_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "pyproject.toml", "LICENSE", "NOTICE", "CHANGELOG.md", "README.md", "Makefile",
        "constraints.txt", "tests/test_packaging.py", "examples/moe.py", "docs/quickstart.md",
    } <= names  # fmt: skip
    assert not [name for name in names if name.startswith((".venv", "runs", "dist/"))]
    assert built[1].stat().st_size < 20e6


def with_dependencies(name: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add an installed distribution and all that it requires, without extras, to ``found``."""
    key = canonicalize_name(name)
    if key in found:
        return
    found[key] = importlib.metadata.distribution(name)
    for text in found[key].requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            with_dependencies(requirement.name, found)


def top_level(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    """Yield the files and folders of a distribution that stand in site-packages."""
    entries = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    for entry in sorted(entries - {"__pycache__", "bin"}):
        yield Path(str(distribution.locate_file(entry)))


PROGRAM = """
import importlib.util, pathlib, sys
for extra in ("transformers", "safetensors", "sklearn", "highspy", "mpi4py", "yaml", "pytest"):
    assert importlib.util.find_spec(extra) is None, extra
import torch
import globaltensor as flow
assert pathlib.Path(flow.__file__).is_relative_to(sys.prefix), flow.__file__
everyone = flow.placement.all("cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))
flow.parallelize(model, everyone, sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = flow.randn(64, 6, placement=everyone, sbp=flow.sbp.split(0))
labels = rows[:, :3].argmax(1)
for step in range(20):
    loss = torch.nn.functional.cross_entropy(model(rows), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
value = loss.item()
flow.save(model.state_dict(), "model.pt", global_dst_rank=0)
if flow.env.get_rank() == 0:
    plan = flow.auto.plan(torch.nn.Linear(64, 64), torch.empty(8, 64), "dgx-h100", mesh=(2,))
    plan.save_html("plan.html")
    print(f"ranks {flow.env.get_world_size()} version {flow.__version__} loss {value:.6f}")
"""


@pytest.mark.slow
def test_the_wheel_works_with_core_dependencies_only(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """Install the wheel into an empty environment. The core dependencies are links to those that
    are installed here, so that torch is not downloaded again."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    found: dict[str, importlib.metadata.Distribution] = {}
    for text in project()["dependencies"]:
        with_dependencies(Requirement(text).name, found)
    assert {"torch", "numpy"} <= set(found)
    assert not {"transformers", "pytest", "mpi4py", "pyyaml"} & set(found)
    for distribution in found.values():
        for path in top_level(distribution):
            if not (site / path.name).exists():
                (site / path.name).symlink_to(path)

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(tmp_path / "env/bin" / command[0]), *command[1:]], cwd=tmp_path, timeout=300,
            capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    install = ["-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-index"]
    run("python", *install, str(built[0]))  # with its dependencies: pip finds that all are there
    run("python", "-m", "pip", "check")
    (tmp_path / "train.py").write_text(PROGRAM)
    losses = set()
    for plan in ("data", "fsdp", "tensor"):
        out = run("globaltensor", "launch", "--nproc_per_node", "2", "train.py", plan)
        match = re.search(r"ranks 2 version (\S+) loss ([\d.]+)", out)
        assert match is not None, out
        assert match[1] == globaltensor.__version__
        losses.add(round(float(match[2]), 4))
    assert len(losses) == 1
    page = (tmp_path / "plan.html").read_text()
    assert "<style>" in page
    assert "<script" in page
