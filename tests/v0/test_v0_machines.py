"""Tests of scripts on several machines, which meet and agree. Each failure is reported in bounded
time. Machines are hosts in network namespaces, or loopback addresses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.hosts import LOOPBACK, Network, hosts
from support.launched import within
from support.scripts import Machines, in_plain_torch, results, script

BODY = """
port, addresses = int(sys.argv[1]), sys.argv[2].split(",")
flow.config.gpu_device_num(int(sys.argv[3]))
flow.env.ctrl_port(port)
flow.env.machine([{"addr": a} for a in addresses] if sys.argv[4] == "dicts" else addresses)
print("every machine says this", flush=True)
if __name__ == "__main__":
    start = {name: v.numpy() for name, v in flow.get_all_variables().items()}
    flow.load_variables({name: drawn(*v.shape) * 0.3 for name, v in start.items()})
    losses = steps(0, 3)
    if sys.argv[4] == "raise":
        raise ValueError("the master stops on purpose")
    told(losses=losses, machine=flow.env.current_machine_id(), resource=flow.env.current_resource()[0])
"""  # noqa: E501
SOON = {"GLOBALTENSOR_V0_WAIT": "3"}


@pytest.fixture
def network() -> Iterator[Network]:
    yield from hosts(2)


@pytest.fixture
def machines(network: Network, tmp_path: Path) -> Machines:
    return Machines(network, tmp_path)


def something_listens(machines: Machines, folder: Path) -> None:
    """Start another program at the master's port. It answers in a protocol of its own."""
    program = (
        f"import socket; s = socket.create_server(('', {machines.port})); s.settimeout(100); "
        f"open('ready', 'w').close()\n"
        "while True:\n    c, _ = s.accept(); c.sendall(b'220 ready\\n')"
    )
    machines.network.hosts[0].start([sys.executable, "-S", "-c", program], folder / "listener")
    assert within(20, lambda: (folder / "ready").exists())


def test_two_machines_with_two_devices_each(machines: Machines, tmp_path: Path) -> None:
    """Two machines with two devices each train together. A proxy that leads nowhere is set, and is
    not used. Interfaces of virtual cards are skipped in favor of the interface with the machine's
    address."""
    path = script(tmp_path, BODY)
    for number in (0, 1):
        machines.start(
            path,
            number,
            2,
            "dicts",
            http_proxy="http://203.0.113.9:3128",
            ALL_PROXY="socks5://203.0.113.9:1080",
        )
    (code, out), (other_code, other) = machines.ended(0), machines.ended(1)
    assert (code, other_code) == (0, 0), out + other
    (one,) = results(out)
    assert one["machine"] == 0
    assert one["resource"] == 2
    assert not results(other), "only the master gets past the first call"
    assert (out.count("every machine says this"), other.count("every machine says this")) == (1, 1)
    names = {
        "hidden-weight": (10, 6),
        "hidden-bias": (10,),
        "out-weight": (4, 10),
        "out-bias": (4,),
    }
    start = {
        name: np.random.RandomState(sum(shape)).randn(*shape).astype(np.float32) * np.float32(0.3)
        for name, shape in names.items()
    }
    np.testing.assert_allclose(one["losses"], in_plain_torch(start, 3), rtol=1e-6)


def test_the_masters_failure_ends_all(machines: Machines, tmp_path: Path) -> None:
    path = script(tmp_path, BODY)
    for number in (0, 1):
        machines.start(path, number, 1, "raise")
    (code, out), (other_code, other) = machines.ended(0), machines.ended(1)
    assert code == 1
    assert other_code == 1
    assert "the master has ended: ValueError: the master stops on purpose" in other
    assert "ValueError: the master stops on purpose" in out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "\n# one line more",
            r"runs another script than the master.*copy the same script to all machines",
        ),
        (
            "",
            (
                r"has recorded other jobs than the master: train; the script must do the same on "
                r"all "
                r"machines"
            ),
        ),
        pytest.param(
            "version",
            r"has another version of globaltensor than the master",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["script", "job", "version"],
)
@pytest.mark.sweep(2)
def test_machines_that_differ_are_told(
    change: str, says: str, machines: Machines, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    other = (
        "import globaltensor.v0.session.rendezvous as m, os\nif os.environ.get('OTHER'):\n    "
        "m._library = lambda: 'other'\n"
    )
    forward = "network(x) * (2 if __import__('os').environ.get('TWICE') else 1)"
    first = script(folders[0], other + BODY, forward)
    second = script(folders[1], other + BODY, forward)
    if change.startswith("\n"):
        second.write_text(second.read_text() + change)
    variables = {"OTHER": "1"} if change == "version" else {"TWICE": "1"} if not change else {}
    machines.start(first, 0, 1, "list")
    machines.start(second, 1, 1, "list", **variables)
    for number in (0, 1):
        code, out = machines.ended(number)
        assert code == 1, out
        assert re.search(says, out), out
        assert not results(out)


@pytest.mark.extended
def test_a_machine_that_does_not_come_is_named(machines: Machines, tmp_path: Path) -> None:
    machines.start(
        script(tmp_path, BODY), 0, 1, "list", https_proxy="http://203.0.113.9:3128", **SOON
    )
    code, out = machines.ended(0)
    assert code == 1
    assert (
        f"machine 1 ({machines.addresses[1]}) has not connected to the master's port "
        f"{machines.port} within 3 s" in out
    )
    assert "https_proxy is set, but machines of a session talk to each other directly" in out


@pytest.mark.extended
def test_a_master_that_cannot_be_reached_is_named(machines: Machines, tmp_path: Path) -> None:
    if machines.network.kind == LOOPBACK:
        pytest.skip("on one machine the second is the master where there is none")
    machines.network.cut(machines.network.hosts[0])
    machines.start(script(tmp_path, BODY), 1, 1, "list", **SOON)
    code, out = machines.ended(0)
    assert code == 1
    assert f"cannot reach the master at {machines.addresses[0]}:{machines.port}" in out
    assert "is the script running there" in out


@pytest.mark.parametrize("name", ["nosuch0", pytest.param("virtual0", marks=pytest.mark.slow)])
def test_a_wrong_interface_is_named(name: str, machines: Machines, tmp_path: Path) -> None:
    if machines.network.kind == LOOPBACK:
        pytest.skip("loopback addresses have one interface")
    if name == "virtual0":
        host = machines.network.hosts[1]
        for words in (
            "link add virtual0 type veth peer name virtual1",
            "addr add 198.51.100.7/24 dev virtual0",
            "link set virtual0 up",
        ):
            if subprocess.run(
                [*host.enter, "ip", *words.split()], capture_output=True, timeout=20, check=False
            ).returncode:
                pytest.skip("no virtual interfaces here")
    path = script(tmp_path, BODY)
    if name == "virtual0":
        machines.start(path, 0, 1, "list", GLOBALTENSOR_V0_WAIT="40")
    else:  # found as soon as any program at the master's port answers
        something_listens(machines, tmp_path)
    machines.start(path, 1, 1, "list", GLOBALTENSOR_V0_WAIT="40", GLOO_SOCKET_IFNAME=name)
    code, out = machines.ended(len(machines.processes) - 1)
    assert code == 1
    if name == "virtual0":
        assert re.search(
            r"sends and receives data at 198.51.100.7 \(virtual0\), where the master .*cannot "
            r"reach it",
            out,
        ), out
        assert machines.ended(0)[0] == 1
    else:
        assert f"GLOO_SOCKET_IFNAME is '{name}'" in out
        assert "set it to eth0" in out


@pytest.mark.extended
def test_a_port_that_is_taken_is_named(machines: Machines, tmp_path: Path) -> None:
    if machines.network.kind == LOOPBACK:
        pytest.skip("on one machine the second process looks for the master at a taken port")
    something_listens(machines, tmp_path)
    path = script(tmp_path, BODY)
    for number in (0, 1):
        machines.start(path, number, 1, "list", **SOON)
    code, out = machines.ended(0)
    assert code == 1
    assert f"port {machines.port} of the master {machines.addresses[0]} is taken" in out
    code, out = machines.ended(1)
    assert code == 1
    assert (
        f"what listened at {machines.addresses[0]}:{machines.port} is no session of globaltensor.v0"
        in out
    )
