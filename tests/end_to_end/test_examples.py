"""Tests of the programs in examples/ that a person starts from: on two processes they have the
numbers of one process, and the files for clusters are as their programs read them.

`train_gpt.py` and `finetune_hf.py` have test files of their own.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.program import LAUNCH, run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: Programs to start from, each with options for a run of a second.
TINY = {
    "train_resnet": ["--epochs", "1", "--width", "4", "--batch", "250"],
    "lora": ["--steps", "4", "--batch", "3", "--context", "15"],
    "moe": "--steps 3 --experts 5 --layers 1 --width 16 --context 16 --batch 3".split(),
    "long_context": "--context 65 --layers 1 --width 16 --steps 3".split(),
}
NEEDS = {"train_resnet": ["sklearn"], "lora": ["transformers"]}
START = [*TINY, "three_axes", "resume_after_kill"]


def main_of(name: str, arguments: list[str]) -> tuple[Any, str]:
    """Run an example in this process. Return its result, and what it printed."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # examples import from train_gpt.py
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = importlib.import_module(name).main(arguments)
    return result, printed.getvalue()


Runs = Callable[[str], tuple[Any, Any, str]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that the example of adapters writes."""
    return tmp_path_factory.mktemp("examples") / "adapters.pt"


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[Any, Any, str]]:
    """Return what is known of the examples that have run."""
    return {}


@pytest.fixture
def on_one_and_two(
    ranks: Callable[..., list[Any]], adapters: Path, known: dict[str, tuple[Any, Any, str]]
) -> Runs:
    """Return a function that runs an example in a world of one and on two processes, once for all
    tests.

    It returns both results, and what rank 0 of two printed. Rank 1 prints nothing, and has the same
    result."""

    def run_once(name: str) -> tuple[Any, Any, str]:
        for module in NEEDS.get(name, ()):
            pytest.importorskip(module)
        if name not in known:
            arguments = TINY[name] + (["--out", str(adapters)] if name == "lora" else [])
            one, _ = main_of(name, arguments)
            (two, printed), (other, silent) = ranks(2, main_of, name, arguments, timeout=240)
            assert other == two
            assert not silent
            known[name] = one, two, printed
        return known[name]

    return run_once


@pytest.mark.parametrize("name", TINY)
def test_two_processes_have_the_numbers_of_one(name: str, on_one_and_two: Runs) -> None:
    one, two, printed = on_one_and_two(name)
    if isinstance(one, dict):
        assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.02)
        one, two = one["loss"], two["loss"]
    assert two == pytest.approx(one, rel=1e-5)
    assert len(set(two)) == len(two)
    assert f"loss {two[-1]:.4f}" in printed


def test_the_resnet_learns() -> None:
    pytest.importorskip("sklearn")
    found, _ = main_of("train_resnet", ["--epochs", "2", "--width", "8"])
    assert found["loss"][1] < found["loss"][0] / 2
    assert found["accuracy"][-1] > 0.6


def test_adapters_follow_their_layers_and_are_saved_in_full(
    adapters: Path, on_one_and_two: Runs
) -> None:
    _, losses, printed = on_one_and_two("lora")
    assert losses[-1] < losses[0]
    assert re.search(r"q_proj\.lora_B +\(globaltensor\.sbp\.split\(dim=0\),\)", printed)
    assert re.search(r"q_proj\.lora_A +\(globaltensor\.sbp\.broadcast,\)", printed)
    saved = torch.load(adapters)
    assert len(saved) == 2 * 2 * 6  # layers, two matrices, adapted projections
    assert all("lora_" in name for name in saved)
    assert saved["model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (64, 8)


def test_each_rank_has_some_experts(on_one_and_two: Runs) -> None:
    _, _, printed = on_one_and_two("moe")
    assert "experts (5, 32, 16)" in printed
    assert "on this rank (3, 32, 16)" in printed


def test_the_ring_is_the_only_traffic_of_the_forward_pass(on_one_and_two: Runs) -> None:
    _, _, printed = on_one_and_two("long_context")
    assert "65 positions, of which this rank has 33" in printed
    moves = printed.partition("ranks send:\n")[2].partition("step 0")[0].splitlines()
    assert moves
    assert all("keys and values round the ring" in move for move in moves)


def test_eight_simulated_ranks_have_the_losses_of_one_device() -> None:
    (alone, eight), printed = main_of("three_axes", ["--steps", "2"])
    assert eight == pytest.approx(alone, rel=1e-9)
    assert alone[1] < alone[0]
    assert "rank 0: stage 0, up.weight (64, 32) of (128, 32)" in printed


def test_a_run_goes_on_after_the_death_of_a_rank(tmp_path: Path) -> None:
    script = str(EXAMPLES / "resume_after_kill.py")
    options = ["--steps", "8", "--every", "3"]  # the death falls between two checkpoints
    code, out = run(
        [*LAUNCH, "--nproc_per_node", "2", "--max_restarts", "1", script,
         *options, "--checkpoint", "two.pt", "--die-at", "5"],
        240, tmp_path,
    )  # fmt: skip
    assert code == 0, out
    assert "attempt 0: 2 rank(s) start at step 0" in out
    assert "rank 1 dies at step 5" in out
    assert "attempt 1: 2 rank(s) start at step 3" in out
    undisturbed, _ = main_of("resume_after_kill", [*options, "--checkpoint", str(tmp_path / "1")])
    assert torch.load(tmp_path / "two.pt")["losses"] == pytest.approx(undisturbed, rel=1e-5)
    # on another number of processes, from the file of two
    longer, printed = main_of(
        "resume_after_kill", ["--steps", "9", "--checkpoint", str(tmp_path / "two.pt")]
    )
    assert "1 rank(s) start at step 8" in printed
    assert len(longer) == 9


@pytest.mark.usefixtures("warm_ranks")
def test_the_cells_of_the_notebook_run(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            tree = ast.parse(source)
            exec(compile(tree, cell["id"], "exec"), names)
        for link in re.findall(r"\]\(([^)#]+)", source) if cell["cell_type"] == "markdown" else ():
            assert (EXAMPLES / link).exists(), link
    assert torch.equal(*names["sums"])
    assert [shape for _, shape in names["results"]] == [(32, 6), (16, 6), (16, 6)]
    assert names["alone"][-1] < 0.1
    assert f"loss {names['alone'][0]:.4f} -> {names['alone'][-1]:.4f}" in capsys.readouterr().out


def test_the_gpt_says_what_was_seen_and_what_is_next(tmp_path: Path) -> None:
    code, out = run(
        [*LAUNCH, "--nproc_per_node", "2", str(EXAMPLES / "train_gpt.py"),
         *"--steps 2 --layers 1 --width 16 --context 8 --batch 3 --sample 4 --log-every 1".split()],
        240, tmp_path,
    )  # fmt: skip
    assert code == 0, out
    seen, following = out.splitlines()[-2:]
    assert re.match(r"Seen: loss [\d.]+ -> [\d.]+ \(validation\) on 2 process\(es\); each ", seen)
    assert following.startswith('Next: make train ARGS="--parallel tensor"')
    for path in re.findall(r"\w+/\w+\.md", following):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", START)
def test_an_example_is_short_and_has_its_command(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 120
    command = re.search(r"^    python .*?^$", text, re.MULTILINE | re.DOTALL)
    assert command is not None
    assert f"examples/{name}.py" in command[0]


def test_the_table_has_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| \[([\w./]+)\]", text, re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (EXAMPLES / target).exists(), target
    for path in re.findall(r"\bexamples/[\w./]+", text):
        assert (ROOT / path).exists(), path
    files = [p for p in EXAMPLES.iterdir() if p.suffix in (".py", ".ipynb")]
    files += (EXAMPLES / "deploy").iterdir()
    assert {str(p.relative_to(EXAMPLES)) for p in files if p.is_file()} <= set(rows)


# ----------------------------------------------------------------------------------------- clusters

DEPLOY = EXAMPLES / "deploy"
TINY_GPT = "--steps 1 --layers 1 --width 16 --context 8 --batch 2 --sample 0".split()
PYTHON_FIRST = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


@pytest.mark.extended
def test_the_batch_script_starts_a_launcher_on_each_node(tmp_path: Path) -> None:
    """Run the script with an `srun` of one node: it runs the command in place."""
    script = DEPLOY / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    for name, body in {
        "srun": 'shift; exec "$@"',
        "scontrol": "echo 127.0.0.1; echo other",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1",
        "SLURM_NODEID": "0", "RANKS_PER_NODE": "2", "PATH": f"{tmp_path}:{PYTHON_FIRST}",
    }  # fmt: skip
    command = ["bash", str(script), str(EXAMPLES / "train_gpt.py"), *TINY_GPT]
    code, out = run(command, 240, tmp_path, **variables)
    assert code == 0, out
    assert "data on 2 process(es)" in out


@pytest.mark.extended
def test_the_kubernetes_job_starts_its_ranks() -> None:
    """Run the pod's command with the variables that the training operator sets in a pod."""
    job = pytest.importorskip("yaml").safe_load((DEPLOY / "kubernetes_pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    variables = {
        "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(20000 + os.getpid() % 20000),
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"], "PATH": PYTHON_FIRST,
    }  # fmt: skip
    command = [*container["command"], *container["args"], *TINY_GPT]
    code, out = run(command, 240, ROOT, **variables)
    assert code == 0, out
    assert "fsdp on 2 process(es)" in out


def test_the_image_copies_what_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    assert {step for step, _ in steps} <= set(
        "FROM ARG RUN WORKDIR COPY USER ENTRYPOINT CMD".split()
    )
    assert steps[0][0] == "FROM"
    for step, rest in steps:
        if step == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
        if step in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(rest))
    start = dict(steps)
    assert json.loads(start["ENTRYPOINT"]) == ["python", *LAUNCH[1:]]
    assert (ROOT / json.loads(start["CMD"])[-1]).exists()


def test_the_function_for_ray_reports_a_falling_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the function that Ray Train's workers run, in a world of one, with a `report` of ours."""
    reports: list[dict[str, Any]] = []
    ray = types.ModuleType("ray")
    ray.train = types.SimpleNamespace(report=reports.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    names: dict[str, Any] = {"__name__": "ray_train"}
    path = DEPLOY / "ray_train.py"
    exec(compile(path.read_text(), str(path), "exec"), names)
    names["train"]({"gpu": False, "epochs": 5})
    assert [report["epoch"] for report in reports] == list(range(5))
    assert reports[-1]["loss"] < reports[0]["loss"] - 0.1
