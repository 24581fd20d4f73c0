"""Tests on several hosts: the launcher on each, a training step across them, the network interface,
and hosts that fail.

The hosts are network namespaces where this machine allows them, else loopback addresses
(support/hosts.py): the test's name says which.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.hosts import LOOPBACK, NAMESPACES, Network, hosts, kind
from support.launched import within
from support.warm_python import warm_python

from globaltensor.distributed import network as interface

LIMIT = 120.0  # seconds for a job on a busy machine, where importing torch alone may take 20
needs_namespaces = pytest.mark.skipif(kind()[0] != NAMESPACES, reason=kind()[1])


@pytest.fixture(params=[kind()[0]])
def network() -> Iterator[Network]:
    yield from hosts(2)


class Job:
    """A job of one launcher per host, all in one folder."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        script: str,
        *options: str,
        nproc: int = 1,
        dynamic: bool = False,
        **variables: str,
    ) -> None:
        self.network, self.folder = network, folder
        (folder / "script.py").write_text(script)
        addr, port = network.hosts[0].addr, network.hosts[0].free_port()
        self.processes = []
        for i, host in enumerate(network.hosts):
            meet = (
                ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{addr}:{port}", "--rdzv_id", "job"]
                if dynamic
                else ["--node_rank", str(i)]
            )
            meet += [] if dynamic else ["--master_addr", addr, "--master_port", str(port)]
            many = ["--nnodes", str(len(network.hosts)), "--nproc_per_node", str(nproc)]
            command = [
                warm_python(),
                "-m",
                "globaltensor.distributed.launch",
                *many,
                *meet,
                *options,
                "script.py",
            ]
            self.processes.append(host.start(command, folder / f"output.{i}", variables))

    def wait(self, *of: int, seconds: float = LIMIT) -> None:
        """Wait until the launchers of these hosts (default: all) and all their processes have
        ended."""
        numbers = of or range(len(self.processes))
        assert within(
            seconds, lambda: all(self.processes[i].poll() is not None for i in numbers)
        ), self.said()
        for i in numbers:
            assert within(20, lambda i=i: not self.network.hosts[i].alive()), (
                f"host {i}: processes are left"
            )

    def wait_for(self, name: str, n: int) -> None:
        """Wait until ``n`` ranks have written this file."""

        def there() -> bool:
            return len(list(self.folder.glob(f"{name}.*"))) >= n or any(
                process.poll() is not None for process in self.processes
            )

        assert within(LIMIT, there), self.said()
        assert len(list(self.folder.glob(f"{name}.*"))) >= n, self.said()

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def output(self, i: int) -> str:
        return (self.folder / f"output.{i}").read_text(errors="replace")

    def said(self) -> str:
        return "\n".join(
            f"host {i} ({process.poll()}): {self.output(i)[-3000:]}"
            for i, process in enumerate(self.processes)
        )


MODEL = """
import torch

def data():
    made = torch.Generator().manual_seed(3)
    return torch.randn(6, 5, generator=made), torch.randn(6, 4, generator=made)

def weights():
    made = torch.Generator().manual_seed(4)
    return torch.randn(8, 5, generator=made), torch.randn(4, 8, generator=made)

def train(x, y, w1, w2):
    '''Three steps -> the losses.'''
    optimizer, losses = torch.optim.SGD([w1, w2], lr=0.05, momentum=0.9), []
    for _ in range(3):
        hidden = torch.relu(torch.nn.functional.linear(x, w1))
        loss = torch.nn.functional.mse_loss(torch.nn.functional.linear(hidden, w2), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""
STEP = (
    MODEL
    + """
import os
import globaltensor as flow
B, S = flow.sbp.broadcast, flow.sbp.split
nodes = flow.env.get_node_size()
grid = flow.placement("cpu", torch.arange(flow.env.get_world_size()).reshape(nodes, -1).tolist())  # hosts, and the ranks of each

def spread(value, *sbp):
    return value.to_global(placement=grid, sbp=[B, B]).to_global(sbp=sbp).detach()

x, y = (spread(value, S(0), B) for value in data())  # data parallel over the hosts
w1, w2 = (spread(value, B, S(dim)).requires_grad_() for value, dim in zip(weights(), (0, 1)))  # tensor parallel within each
told = {
    "env": [flow.env.get_rank(), flow.env.get_world_size(), flow.env.get_local_rank(), nodes],
    "losses": train(x, y, w1, w2),
    "weights": [torch.from_numpy(w.detach().numpy()) for w in (w1, w2)],
    "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
}
torch.save(told, f"told.{flow.env.get_rank()}")
"""  # noqa: E501
)


def plain() -> tuple[list[float], list[torch.Tensor]]:
    """Compute losses and weights of the same steps by torch on one device."""
    names: dict[str, object] = {}
    exec(MODEL, names)
    weights = [w.requires_grad_() for w in names["weights"]()]  # type: ignore[operator]
    return names["train"](*names["data"](), *weights), weights  # type: ignore[operator]


def check_step(job: Job, nproc: int) -> list[dict[str, object]]:
    job.wait()
    assert job.codes() == [0] * len(job.processes), job.said()
    losses, weights = plain()
    n = nproc * len(job.processes)
    told = [torch.load(job.folder / f"told.{rank}") for rank in range(n)]
    for rank, one in enumerate(told):
        assert one["env"] == [rank, n, rank % nproc, len(job.processes)]
        torch.testing.assert_close(torch.tensor(one["losses"]), torch.tensor(losses))
        for mine, theirs in zip(one["weights"], weights, strict=True):
            torch.testing.assert_close(mine, theirs.detach())
    return told


def test_a_training_step_across_hosts(network: Network, tmp_path: Path) -> None:
    """Two hosts with two ranks each train data-parallel across the hosts and tensor-parallel within
    each."""
    check_step(Job(network, tmp_path, STEP, nproc=2), 2)


@needs_namespaces
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "c10d"])
@pytest.mark.extended
def test_host_names_that_mean_the_host_itself(
    dynamic: bool, network: Network, tmp_path: Path
) -> None:
    """The host's own name resolves to 127.0.1.1, as on Debian, and the other hosts' names are
    unknown."""
    for host in network.hosts:
        network.name_resolves_to(host, "127.0.1.1")
    told = check_step(Job(network, tmp_path, STEP, dynamic=dynamic), 1)
    assert [one["interface"] for one in told] == ["eth0"] * 2


@pytest.mark.slow
def test_the_interface_that_is_named(network: Network, tmp_path: Path) -> None:
    name = network.hosts[0].interface
    told = check_step(Job(network, tmp_path, STEP, GLOO_SOCKET_IFNAME=name), 1)
    assert [one["interface"] for one in told] == [name] * 2


@needs_namespaces
@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "nosuch0",
            [
                (
                    "GLOO_SOCKET_IFNAME is 'nosuch0', which this host does not have: set it on "
                    "every "
                    "node"
                ),
                "here eth0 leads to 10.77.0.1",
            ],
        ),
        pytest.param(
            "lo",
            [
                "GLOO_SOCKET_IFNAME is 'lo': set it on every node to the network interface",
                "Connection refused",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.extended
def test_an_interface_that_leads_nowhere(
    name: str, says: Sequence[str], network: Network, tmp_path: Path
) -> None:
    job = Job(network, tmp_path, STEP, GLOO_SOCKET_IFNAME=name, GLOBALTENSOR_TIMEOUT="15")
    job.wait()
    assert all(job.codes()), job.said()
    both = job.output(0) + job.output(1)
    for text in says:
        assert text in both, job.said()


FOR_EVER = """
import time
from pathlib import Path
import globaltensor as flow
x = flow.ones(4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
x.sum().item()
Path(f"here.{flow.env.get_rank()}").touch()
while True:
    x.sum().item()
    time.sleep(0.02)
"""


@pytest.mark.extended
def test_a_host_whose_processes_are_killed(network: Network, tmp_path: Path) -> None:
    job = Job(network, tmp_path, FOR_EVER)
    job.wait_for("here", 2)
    network.hosts[1].kill()
    job.wait(0, seconds=60)
    assert job.codes()[0] not in (0, None)
    said = job.output(0)
    assert "rank 0 (local rank 0" in said, said
    assert "among ranks [0, 1] failed" in said, said
    assert "Connection closed by peer" in said or "Connection reset by peer" in said, said


@needs_namespaces
@pytest.mark.extended
def test_a_host_whose_cable_is_pulled(network: Network, tmp_path: Path) -> None:
    """No process receives a message about the lost host, so only timeouts can detect it. The ranks'
    own timeout is long here, so the launchers detect it."""
    job = Job(
        network, tmp_path, FOR_EVER, "--rdzv_conf", "keep_alive_interval=1,keep_alive_max_attempt=5"
    )
    job.wait_for("here", 2)
    network.cut(network.hosts[1])
    job.wait(seconds=60)
    assert all(job.codes()), job.said()
    for i in range(2):
        assert f"node {1 - i} has been silent for" in job.output(i), job.said()
        assert "its launcher is dead, or its network" in job.output(i), job.said()
        assert "the launcher has ended this node's 1 rank too" in job.output(i), job.said()


@pytest.mark.slow
@needs_namespaces
def test_a_rank_that_waits_for_a_host_that_is_gone_gives_up(
    network: Network, tmp_path: Path
) -> None:
    job = Job(
        network,
        tmp_path,
        FOR_EVER,
        "--rdzv_conf",
        "keep_alive_interval=30",
        GLOBALTENSOR_TIMEOUT="10",
    )
    job.wait_for("here", 2)
    network.cut(network.hosts[1])
    job.wait(seconds=80)
    assert all(job.codes()), job.said()
    for i in range(2):
        assert "among ranks [0, 1] failed" in job.output(i), job.said()
        assert "Timed out waiting 10000ms" in job.output(i), job.said()


# ----------------------------------------------------------------------------- the hosts themselves


REPORT = """
import json, socket
from pathlib import Path
import globaltensor as flow
Path(f"told.{flow.env.get_rank()}").write_text(json.dumps([flow.env.get_world_size(), flow.env.get_node_size(), socket.gethostname()]))
"""  # noqa: E501


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(LOOPBACK, marks=pytest.mark.slow),
        pytest.param(NAMESPACES, marks=needs_namespaces),
    ],
)
def test_hosts_of_each_kind(kind: str, tmp_path: Path) -> None:
    with Network(2, kind) as network:
        job = Job(network, tmp_path, REPORT)
        job.wait()
        told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2)]
        assert [one[:2] for one in told] == [[2, 2]] * 2
        assert len({one[2] for one in told}) == (2 if kind == NAMESPACES else 1)


@needs_namespaces
def test_hosts_end_with_who_made_them(tmp_path: Path) -> None:
    program = """
import os, sys, time
from pathlib import Path
from support.hosts import NAMESPACES, Network
network = Network(3, NAMESPACES)
for host in network.hosts:
    host.start(["sleep", "300"], Path(sys.argv[1]) / host.name)
def begun(host):
    return [pid for pid in host.alive() if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")]
until = time.monotonic() + 60
while time.monotonic() < until and not all(map(begun, network.hosts)):
    time.sleep(0.05)
print(*[os.readlink(f"/proc/{begun(host)[0]}/ns/net") for host in network.hosts], flush=True)
time.sleep(300)
"""  # noqa: E501
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TMPDIR": str(tmp_path),
    }  # a killed process leaves files behind
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        spaces = process.stdout.readline().split()
        assert len(set(spaces)) == 3
        assert in_namespaces(spaces)
        os.kill(process.pid, signal.SIGKILL)
    assert within(20, lambda: not in_namespaces(spaces)), "processes are left in the hosts"


def in_namespaces(spaces: Sequence[str]) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "ns/net") in spaces:
                found.append(entry.name)
    return found


# ---------------------------------------------------------------------------- the network interface


def test_ways_that_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        interface.own_address("127.0.0.3")
        == interface.own_address("localhost")
        == interface.own_address("no.such.host.invalid")
        == ""
    )
    assert interface.interface_of("127.0.0.1") == "lo"
    assert interface.interface_of("192.0.2.77") == ""
    monkeypatch.delenv(interface.VARIABLE, raising=False)
    for nodes in (1, 2):
        interface.choose_gloo_interface("127.0.0.1", nodes)
    assert interface.VARIABLE not in os.environ, (
        "on one host the loopback interface will do, which torch takes by itself"
    )
    monkeypatch.setenv(interface.VARIABLE, "mine")
    interface.choose_gloo_interface("10.0.0.1", 2)
    assert os.environ[interface.VARIABLE] == "mine"


def test_advice_is_for_errors_of_the_interface_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface.gloo_hint(RuntimeError("the port is taken"), "127.0.0.1") == ""
    monkeypatch.setenv(interface.VARIABLE, "nosuch0")
    said = interface.gloo_hint(RuntimeError("Unable to find address for: nosuch0"), "127.0.0.1")
    assert said.startswith(
        "GLOO_SOCKET_IFNAME is 'nosuch0', which this host does not have: set it on every node"
    )
    monkeypatch.delenv(interface.VARIABLE)
    assert "which the name of this host" in interface.gloo_hint(
        RuntimeError("Gloo connectFullMesh failed"), "127.0.0.1"
    )
