"""Tests of examples/v0: their losses are those of plain PyTorch, and the trained network recognizes
digits."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.hosts import LOOPBACK, Network, hosts
from support.jobs import drawn, play, same
from support.launched import Launched, cleared, nobody_left

import globaltensor.v0 as flow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "v0"
MODULES = (
    "digits",
    "lenet_model",
    "distributed_train",
    "hybrid_parallelism_mlp",
    "hybrid_parallelism_lenet",
    "mirrored_mlp",
    "lenet_train",
    "lenet_eval",
)
SECONDS = 600.0


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Yield a function that imports an example as a module, in a session of its own. Dropout is
    off, because it would change the numbers."""
    flow.clear_default_session()
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(flow.nn, "dropout", lambda x, rate, name=None: x)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)
    flow.clear_default_session()


def perceptron(hidden: str, output: str) -> tuple[dict[str, Any], Callable[..., Any]]:
    start = {
        f"{hidden}-weight": drawn(512, 784) * 0.05,
        f"{hidden}-bias": drawn(512) * 0.05,
        f"{output}-weight": drawn(10, 512) * 0.05,
    }
    return {**start, f"{output}-bias": drawn(10) * 0.05}, lambda x, a, b, c, d: F.linear(
        F.relu(F.linear(x.flatten(1), a, b)), c, d
    )


def lenet(hidden: str, output: str) -> tuple[dict[str, Any], Callable[..., Any]]:
    start = {"conv1-weight": drawn(32, 1, 5, 5) * 0.1, "conv1-bias": drawn(32) * 0.05}
    start |= {"conv2-weight": drawn(64, 32, 5, 5) * 0.05, "conv2-bias": drawn(64) * 0.05}
    start |= {
        f"{hidden}-weight": drawn(512, 3136) * 0.02,
        f"{hidden}-bias": drawn(512) * 0.05,
        f"{output}-weight": drawn(10, 512) * 0.05,
    }

    def forward(x: Any, *ps: Any) -> Any:
        for weight, bias in (ps[0:2], ps[2:4]):
            x = F.max_pool2d(F.relu(F.conv2d(x, weight, bias, padding=2)), 2)
        return F.linear(F.relu(F.linear(x.flatten(1), ps[4], ps[5])), ps[6], ps[7])

    return {**start, f"{output}-bias": drawn(10) * 0.05}, forward


@pytest.mark.parametrize(
    ("name", "devices", "network"),
    [
        ("distributed_train", 2, perceptron("hidden", "output-weight")),
        ("hybrid_parallelism_mlp", 2, perceptron("hidden", "output")),
        ("mirrored_mlp", 2, perceptron("hidden", "output")),
        ("hybrid_parallelism_lenet", 2, lenet("hidden", "outlayer")),
        ("lenet_train", 2, lenet("dense1", "dense2")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_losses_are_those_of_plain_pytorch(
    name: str,
    devices: int,
    network: tuple[dict[str, Any], Callable[..., Any]],
    example: Callable[[str], Any],
) -> None:
    module, (start, forward) = example(name), network
    if name == "hybrid_parallelism_lenet":
        module.PIECES = 2
    batches = [
        (
            np.abs(drawn(100, 1, 28, 28, seed=i)),
            np.random.RandomState(i).randint(0, 10, 100).astype(np.int32),
        )
        for i in range(3)
    ]
    cut = module.cut if name == "mirrored_mlp" else lambda array: array
    got = play(devices, [(module.train_job, cut(x), cut(y)) for x, y in batches], start)
    parameters = [torch.tensor(v).requires_grad_() for v in start.values()]
    for (x, y), losses in zip(batches, got.results, strict=True):
        want = F.cross_entropy(
            forward(torch.tensor(x), *parameters), torch.tensor(y).long(), reduction="none"
        )
        same(np.concatenate(losses) if isinstance(losses, list) else losses, want.detach(), 2e-6)
        assert abs(float(np.mean(losses)) - want.mean().item()) <= 1e-6 * max(
            1.0, want.mean().item()
        )
        grads = torch.autograd.grad(want.mean(), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                p -= 0.1 * g


def accuracy(text: str) -> float:
    found = re.search(r"accuracy: ([\d.]+)%", text)
    assert found is not None, text
    return float(found[1])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    pytest.importorskip("sklearn")
    yield from cleared(tmp_path)


def run(folder: Path, name: str, *arguments: object) -> str:
    """Run an example to its end and return its output."""
    with Launched(
        folder, EXAMPLES / f"{name}.py", *arguments, command=[sys.executable], OMP_NUM_THREADS="1"
    ) as started:
        assert started.code(SECONDS) == 0, started.err
        out = started.out
    assert nobody_left(folder)
    return out


@pytest.mark.extended
def test_hybrid_parallelism_knows_its_digits(folder: Path) -> None:
    assert accuracy(run(folder, "hybrid_parallelism_mlp", "--epochs", 12)) >= 95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirrored_mlp", "hybrid_parallelism_lenet"])
def test_digits_are_known(name: str, folder: Path) -> None:
    assert accuracy(run(folder, name, "--epochs", 12)) >= 95


@pytest.mark.slow
def test_a_model_is_saved_and_known_again(folder: Path) -> None:
    run(folder, "lenet_train", "--epochs", 12, "--models", folder / "models")
    assert accuracy(run(folder, "lenet_eval", "--models", folder / "models")) >= 95


@pytest.fixture
def network() -> Iterator[Network]:
    yield from hosts(2)


@pytest.mark.slow
def test_two_hosts_know_their_digits(folder: Path, network: Network) -> None:
    addresses, port = [host.addr for host in network.hosts], network.hosts[0].free_port()
    command = [
        sys.executable,
        str(EXAMPLES / "distributed_train.py"),
        "--epochs",
        "12",
        "--port",
        str(port),
        "--nodes",
        *addresses,
    ]
    order = list(enumerate(network.hosts))
    processes = []
    for number, host in order:
        processes.append(host.start(command, folder / f"host{number}"))
        if network.kind == LOOPBACK and number == 0:
            time.sleep(10)  # if all addresses are one machine's, the first process is the master
    for process in processes:
        assert process.wait(SECONDS) == 0
    assert accuracy((folder / "host0").read_text()) >= 95
    other = (folder / "host1").read_text()
    assert "distributed config" in other
    assert "step" not in other
    assert "accuracy" not in other


def test_without_digits_it_says_what_to_install(
    tmp_path: Path, example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[examples\]'"):
        example("digits").load(None, 100)
    with pytest.raises(flow.SessionError, match="there is no train-images-idx3-ubyte"):
        example("digits").load(str(tmp_path), 100)
