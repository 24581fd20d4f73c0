"""Several hosts on one machine: network namespaces on a bridge, each with its own loopback,
address, host name and /etc/hosts.

Namespaces need root or user namespaces, and iproute2. If they are not available, the "hosts" are
loopback addresses, from 127.0.0.2 on, whose links cannot be cut. ``kind()`` tries namespaces and
returns the kind. A namespace lives as long as the process that holds it, and that process ends with
its stdin. So everything, links included, is gone after the test, or when pytest dies in any way.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from globaltensor.distributed.launcher import parent_death_signal

NAMESPACES, LOOPBACK = "namespaces", "loopback addresses"
_SECONDS = 20.0  # limit for commands that take milliseconds
_PORT = 29500  # always free in a namespace of its own


class Host:
    """A host that runs processes. ``addr``: the address at which the other hosts reach it.
    ``interface``: its network interface."""

    def __init__(self, name: str, addr: str, interface: str) -> None:
        self.name, self.addr, self.interface = name, addr, interface
        self.enter: list[str] = []  # prefix of a command that runs on this host
        self._mark = uuid.uuid4().hex
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], output: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host, in a session of its own. The file gets stdout and
        stderr."""
        ours = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "TEST_HOST": self._mark,
        }
        environment = {**os.environ, **ours, **(variables or {})}
        with open(output, "wb") as file:
            options: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": file,
                "stderr": file,
                "start_new_session": True,
            }
            tied = [
                sys.executable,
                "-I",
                "-S",
                str(parent_death_signal.__file__),
                str(os.getpid()),
                *command,
            ]  # it ends with this process
            place = (
                ["env", "-C", str(output.parent)] if self.enter else []
            )  # entering a mount namespace changes to its root
            process = subprocess.Popen(
                [*self.enter, *place, *tied], env=environment, cwd=output.parent, **options
            )
        self._processes.append(process)
        return process

    def alive(self) -> list[int]:
        """Return the processes that were started on this host, and their children."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"TEST_HOST={self._mark}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """Kill all processes on this host at once. The host is down, but its connections are
        closed, so peers notice."""
        for _ in range(50):
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not self.alive():
                break
            time.sleep(0.1)
        for process in self._processes:
            process.wait(_SECONDS)

    def free_port(self) -> int:
        """Return a port that no process on this host uses."""
        if self.enter:
            return _PORT
        with socket.socket() as s:
            s.bind((self.addr, 0))
            return int(s.getsockname()[1])


class Network:
    """A network of ``n`` hosts that reach each other. Leaving the block ends all their processes
    and removes the hosts."""

    def __init__(self, n: int, kind: str) -> None:
        self.kind, self.hosts, self._stack = kind, list[Host](), contextlib.ExitStack()
        try:
            if kind == NAMESPACES:
                self._folder = Path(
                    self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts_"))
                )
                # Names that /etc/hosts does not have are unknown at once. Queries to servers that
                # cannot be reached take seconds.
                self._nobody = self._folder / "resolv.conf"
                self._nobody.write_text("nameserver 127.0.0.1\n")
                self._switch = self._hold([*_alone(), "--net"])
                self._ip(self._switch, "link add name bridge type bridge", "link set bridge up")
                for i in range(n):
                    self._add_host(i)
            else:
                self.hosts = [Host(f"host{i}", f"127.0.0.{i + 2}", "lo") for i in range(n)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        self._stack.close()

    def cut(self, host: Host) -> None:
        """Cut a host's link: packets are lost, and no process gets an error."""
        self._ip(self._switch, f"link set {host.name} down")

    def mend(self, host: Host) -> None:
        self._ip(self._switch, f"link set {host.name} up")

    def name_resolves_to(self, host: Host, address: str) -> None:
        """Let the host's own name mean this address on that host. The other hosts' names stay
        unknown, as they are without a name server."""
        (self._folder / host.name).write_text(f"127.0.0.1 localhost\n{address} {host.name}\n")

    def _add_host(self, i: int) -> None:
        host = Host(f"host{i}", f"10.77.0.{i + 1}", "eth0")
        pid = self._hold([*_entering(self._switch, "net"), "unshare", "--net", "--uts", "--mount"])
        host.enter = _entering(pid, "net", "uts", "mount")
        self._ip(
            self._switch,
            f"link add name {host.name} type veth peer name eth0 netns {pid}",
            f"link set {host.name} master bridge up",
        )
        self._ip(pid, "link set lo up", f"addr add {host.addr}/24 dev eth0", "link set eth0 up")
        self.name_resolves_to(host, host.addr)
        _run([*host.enter, "mount", "--bind", str(self._folder / host.name), "/etc/hosts"])
        _run([*host.enter, "mount", "--bind", str(self._nobody), "/etc/resolv.conf"])
        _run([*host.enter, "hostname", host.name])
        self.hosts.append(host)

    def _hold(self, command: Sequence[str]) -> int:
        """Start a process that holds the namespaces of the command until its stdin is closed.
        Return its pid once they exist."""
        process = self._stack.enter_context(
            subprocess.Popen(
                [*command, "cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"here\n")
            process.stdin.flush()
        if process.stdout.readline() != b"here\n":
            raise OSError(f"{' '.join(command)}: {process.stderr.read().decode().strip()}")
        return process.pid

    def _ip(self, pid: int, *orders: str) -> None:
        for order in orders:
            _run([*_entering(pid, "net"), "ip", *order.split()])


def _alone() -> list[str]:
    """Return the start of a command with a namespace of its own. Users other than root also need a
    user namespace."""
    return ["unshare"] if os.geteuid() == 0 else ["unshare", "--map-root-user"]


def _entering(pid: int, *what: str) -> list[str]:
    users = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(pid), *users, *(f"--{name}" for name in what)]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@functools.cache
def kind() -> tuple[str, str]:
    """Return the kind of hosts on this machine, and the reason if namespaces are not available."""
    missing = [
        name
        for name in ("unshare", "nsenter", "ip", "mount", "hostname")
        if shutil.which(name) is None
    ]
    if missing:
        return LOOPBACK, f"no network namespaces here: {', '.join(missing)} not found"
    try:
        with Network(2, NAMESPACES) as network:
            one, other = network.hosts
            _run(
                [*one.enter, sys.executable, "-S", "-c", "import os; assert os.path.isdir('/proc')"]
            )
            network.cut(other)
    except OSError as error:
        return LOOPBACK, f"no network namespaces here: {error}"
    return NAMESPACES, ""


def hosts(n: int) -> Iterator[Network]:
    """Yield ``n`` hosts of the best available kind, for a fixture."""
    with Network(n, kind()[0]) as network:
        yield network
