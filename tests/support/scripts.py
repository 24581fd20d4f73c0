"""Job-function scripts on this machine or on several hosts, for tests. Each script ends in bounded
time and leaves nothing behind."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from support.hosts import LOOPBACK, Host, Network
from support.launched import Launched
from support.warm_python import warm_python

SECONDS = 120.0  # importing torch takes seconds, several times that if all cores are busy

TRAINING = """
import json, sys
import numpy as np
import globaltensor.v0 as flow
import globaltensor.v0.typing as tp

def told(**values):
    print("RESULT " + json.dumps(values), flush=True)

def drawn(*shape, seed=0):
    return np.random.RandomState(seed + sum(shape)).randn(*shape).astype(np.float32)

def network(x):
    start = flow.random_normal_initializer(0.0, 0.3)
    hidden = flow.layers.dense(x, 10, activation=flow.math.tanh, kernel_initializer=start, name="hidden")
    return flow.layers.dense(hidden, 4, kernel_initializer=start, name="out")

@flow.global_function(type="train")
def train(x: tp.Numpy.Placeholder((8, 6)), y: tp.Numpy.Placeholder((8,), dtype=flow.int32)) -> tp.Numpy:
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(y, FORWARD(x))
    flow.optimizer.SGD(flow.optimizer.CosineScheduler(0.2, 8)).minimize(loss)
    return loss

def steps(first, last):
    return [float(train(drawn(8, 6, seed=i), np.random.RandomState(i).randint(0, 4, 8).astype(np.int32)).mean()) for i in range(first, last)]
"""  # noqa: E501


def script(folder: Path, body: str, forward: str = "network(x)", name: str = "script.py") -> Path:
    """Write a script that has the training job above, and then this body."""
    (folder / name).write_text(TRAINING.replace("FORWARD(x)", forward) + body)
    return folder / name


def in_plain_torch(start: Mapping[str, Any], steps: int) -> list[float]:
    """Return the losses of the script's first steps, from these values, without the library."""
    ps = [
        torch.tensor(start[name], dtype=torch.float32).requires_grad_()
        for name in ("hidden-weight", "hidden-bias", "out-weight", "out-bias")
    ]
    velocity = [torch.zeros_like(p) for p in ps]
    losses = []
    for i in range(steps):
        x = torch.tensor(np.random.RandomState(i + 14).randn(8, 6).astype(np.float32))
        y = torch.tensor(np.random.RandomState(i).randint(0, 4, 8))
        loss = F.cross_entropy(F.linear(torch.tanh(F.linear(x, ps[0], ps[1])), ps[2], ps[3]), y)
        rate = 0.2 * 0.5 * (1 + math.cos(math.pi * i / 8))
        with torch.no_grad():
            for p, v, g in zip(ps, velocity, torch.autograd.grad(loss, ps), strict=True):
                v.mul_(0.9).add_(g, alpha=rate)
                p -= v
        losses.append(loss.item())
    return losses


def results(text: str) -> list[dict[str, Any]]:
    """Return the values that a script reported, in order."""
    return [json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")]


def ran(
    folder: Path, path: Path, *arguments: object, code: int = 0, **variables: str
) -> tuple[list[dict[str, Any]], str, str]:
    """Run a script to its end on this machine. Return the values it reported, all that it printed,
    and its stderr."""
    with Launched(
        folder, path, *arguments, command=[sys.executable], warm=True, **variables
    ) as started:
        assert started.code(SECONDS) == code, started.err
        return results(started.out), started.out, started.err


class Machines:
    """A script on each of several hosts, the master's first."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.port = network.hosts[0].free_port()
        self.addresses = [host.addr for host in network.hosts]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, path: Path, number: int, *arguments: object, **variables: str) -> None:
        """Start the script on a host, with port, addresses and these arguments."""
        host: Host = self.network.hosts[number]
        command = [
            warm_python(),
            str(path),
            str(self.port),
            ",".join(self.addresses),
            *map(str, arguments),
        ]
        output = self.folder / f"machine.{len(self.processes)}"
        self.processes.append(host.start(command, output, variables))
        if (
            self.network.kind == LOOPBACK and len(self.processes) == 1
        ):  # if all addresses are one machine's, the first process is the master
            self._listening()

    def ended(self, number: int) -> tuple[int, str]:
        """Return (exit code, all output) of the process that was started as number ``number``."""
        process, output = self.processes[number], self.folder / f"machine.{number}"
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"machine {number} has not ended; it wrote:\n{output.read_text(errors='replace')}"
            ) from None
        return code, output.read_text(errors="replace")

    def _listening(self) -> None:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and self.processes[0].poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
