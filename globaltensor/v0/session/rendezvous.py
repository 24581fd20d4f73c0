"""The rendezvous of a session's machines, which `Session.meet` runs.

The same script runs once on each machine. Every machine finds itself in the list by its address,
and the first is the master. The machines meet at the master's control port and compare what they
run. Every failure is a SessionError within ``seconds()``, on all machines that have connected.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..._base.user_code import PACKAGE_ROOT
from ...distributed.network import addresses_of, interface_of, is_here, own_address
from ..errors import SessionError
from .control_channel import Line, listen, proxies, reached
from .settings import Settings, logger

__all__ = ["VARIABLE", "SessionRendezvous", "seconds"]

VARIABLE: Final = "GLOBALTENSOR_V0_WAIT"
_WAIT_SECONDS: Final = 60.0
_HELLO_SECONDS: Final = 10.0
_PROBE_SECONDS: Final = 3.0
_TELL_SECONDS: Final = 10.0
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LIBRARY: Final = PACKAGE_ROOT


def seconds() -> float:
    """Return how many seconds machines wait for each other to meet (``GLOBALTENSOR_V0_WAIT``)."""
    return float(os.environ.get(VARIABLE) or _WAIT_SECONDS)


class SessionRendezvous:
    """A completed rendezvous of a session's machines.

    ``machine`` is the number of this machine. On the master, ``lines`` has the control connection
    to each other machine by its number.
    """

    def __init__(self, settings: Settings, each: int, kind: str) -> None:
        self.settings, self.nodes = settings, settings.machines
        self.card = _card(each, kind, len(self.nodes))
        self.machine, self.lines, self.master = 0, dict[int, Line](), None
        self.server: socket.socket | None = None
        self.until = time.monotonic() + seconds()
        self._warned_at = time.monotonic()
        self._before = {name: os.environ.get(name) for name in _INTERFACES}
        own_machines = [i for i, node in enumerate(self.nodes) if is_here(node.addr)]
        if not own_machines:
            problem = (
                f"none of the machines of env.machine is this one: it names "
                f"{', '.join(n.addr for n in self.nodes)}"
            )
            own_addresses = ", ".join(
                f"{a} ({name})" for name, addresses in addresses_of().items() for a in addresses
            )
            raise SessionError(
                f"{problem}; this machine ({socket.gethostname()}) has "
                f"{own_addresses or 'no address'}"
            )
        self.own_machines = own_machines
        try:
            if own_machines[0] != 0 or not self._serve():
                self._connect_to_master()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections and restore the interface variables.

        The next session may use other interfaces.
        """
        for line in [*self.lines.values(), *([self.master] if self.master else [])]:
            line.close()
        if self.server is not None:
            self.server.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    @property
    def own(self) -> str:
        """The address at which the other machines reach this one."""
        return self.nodes[self.machine].addr

    def refuse(self, why: str) -> None:
        """Send the reason to all connected machines, and raise SessionError."""
        for line in self.lines.values():
            line.send(refused=why)
        raise SessionError(why)

    # On the master

    def _serve(self) -> bool:
        """Become the master if its port is free, and wait for all other machines.

        Return False if another process of this machine is the master.
        """
        port = self.settings.port
        try:
            self.server = listen("", port)
        except OSError as error:
            # All machines are on one host, for trials: the script that came first is the master.
            if len(self.own_machines) > 1:
                return False
            problem = (
                f"port {port} of the master {self.own} is taken ({error.strerror}): by another "
                f"program, or this script runs there already"
            )
            raise SessionError(
                f"{problem}; name a free one on all machines with flow.env.ctrl_port"
            ) from error
        _set_backend_interface(self.own, self.nodes, 0)
        with _Doorbell() as bell:
            while len(self.lines) < len(self.nodes) - 1:
                self._greet(bell)
            for number, line in self.lines.items():
                line.send(met=True, at=bell.at)
                answer = self._answer(line)
                if answer is None or "reached" not in answer:
                    self.refuse(
                        f"machine {number} ({self.nodes[number].addr}) has stopped: "
                        f"{(answer or {}).get('refused', 'its script has ended')}"
                    )
        for line in self.lines.values():
            line.send(go=True)
        return True

    def _greet(self, bell: _Doorbell) -> None:
        assert self.server is not None
        missing = [i for i in range(1, len(self.nodes)) if i not in self.lines]
        left = self.until - time.monotonic()
        if left <= 0:
            self.refuse(self._missing_machine_message(missing))
        if time.monotonic() - self._warned_at > _TELL_SECONDS:
            self._warned_at = time.monotonic()
            logger.warning(
                "the master waits at port %d for machine %s (%s)",
                self.settings.port,
                missing,
                ", ".join(self.nodes[i].addr for i in missing),
            )
        self.server.settimeout(min(1.0, left))
        try:
            connection, where = self.server.accept()
        except TimeoutError:
            return
        line = Line(connection, f"{where[0]}")
        try:
            hello = line.receive(_HELLO_SECONDS)
        except TimeoutError:
            hello = None
        if hello is None or not {"card", "here", "at"} <= hello.keys():
            line.close()
            return
        number = next((i for i in hello["here"] if i in missing), None)
        if number is None:
            refusal = (
                f"machine {hello['here']} of env.machine has connected already: start the script "
                "once on each machine"
            )
            line.send(refused=refusal)
            line.close()
            return
        self.lines[number] = line
        line.peer = f"machine {number} ({self.nodes[number].addr})"
        why = _differs(line.peer, hello["card"], f"the master ({self.own})", self.card)
        if why:
            self.refuse(why)
        line.send(machine=number)
        problem = _unreachable_reason(hello["at"])
        if problem:
            self.refuse(_advice(line.peer, hello["at"], "the master", problem))

    def _missing_machine_message(self, missing: Sequence[int]) -> str:
        node, port = self.nodes[missing[0]], self.settings.port
        problem = (
            f"machine {missing[0]} ({node.addr}) has not connected to the master's port {port} "
            f"within {seconds():g} s ({VARIABLE} waits longer)"
        )
        try:
            reached(node.addr, port, _PROBE_SECONDS).close()
            why = (
                "it listens at that port itself: does it consider itself the master? Its list of "
                "machines must be the same"
            )
        except SessionError as error:
            refused = "refused" in str(error)
            why = (
                f"its host is there ({error})"
                if refused
                else f"its host cannot be reached ({error})"
            )
            hint = (
                "is this script running there, with the same machines and port, and may it "
                "connect to this port (firewalls, containers without --net=host)?"
            )
            why += (
                f": {hint}"
                if refused
                else ": is the address right, and is there a route from here?"
            )
        return f"{problem}; {why}{proxies()}"

    # On the other machines

    def _connect_to_master(self) -> None:
        master, port = self.nodes[0], self.nodes[0].ctrl_port_agent or self.settings.port
        own_machines = [i for i in self.own_machines if i > 0]
        where = f"{master.addr}:{port}"

        def warn_waiting(why: str) -> None:
            if time.monotonic() - self._warned_at > _TELL_SECONDS:
                self._warned_at = time.monotonic()
                logger.warning(
                    "machine %s waits for the master at %s (%s)", own_machines, where, why
                )

        try:
            connection = reached(
                master.addr, port, max(1.0, self.until - time.monotonic()), warn_waiting
            )
        except SessionError as error:
            failure = (
                f"machine {own_machines[0]} ({self.nodes[own_machines[0]].addr}) cannot reach the "
                f"master at {where}: {error}, for {seconds():g} s ({VARIABLE} waits longer)"
            )
            hint = (
                "is the script running there, is the port the same on all machines, and does "
                "no firewall or container (docker: --net=host) stand between?"
            )
            raise SessionError(f"{failure}; {hint}{proxies()}") from None
        self.master = Line(connection, f"the master ({master.addr})")
        _set_backend_interface(self.nodes[own_machines[0]].addr, self.nodes, own_machines[0])
        # Wait anew from here, because the master may only now have begun to wait for others.
        wait = seconds() + _TELL_SECONDS
        with _Doorbell() as bell:
            self.master.send(card=self.card, here=own_machines, at=bell.at)
            self.machine = int(self._receive_from_master(where, "machine", wait)["machine"])
            met = self._receive_from_master(where, "met", wait)
            problem = _unreachable_reason(met["at"])
            if problem:
                why = _advice(
                    "the master", met["at"], f"machine {self.machine} ({self.own})", problem
                )
                self.master.send(refused=why)
                raise SessionError(why)
            self.master.send(reached=True)
            self._receive_from_master(where, "go", wait)

    def _receive_from_master(self, where: str, what: str, wait: float) -> dict[str, Any]:
        assert self.master is not None
        try:
            message = self.master.receive(wait)
        except TimeoutError:
            raise SessionError(
                f"what listens at {where} is not the master of this session, or it hangs: it sent "
                f"nothing for {wait:.0f} s"
            ) from None
        if message is None or not {what, "refused"} & message.keys():
            why = (
                "is no session of globaltensor.v0"
                if what == "machine"
                else "has ended while the machines were connecting"
            )
            raise SessionError(
                f"what listened at {where} {why}; the port must be one that only the master uses"
            )
        if "refused" in message:
            raise SessionError(str(message["refused"]))
        return message

    def _answer(self, line: Line) -> dict[str, Any] | None:
        with contextlib.suppress(TimeoutError):
            return line.receive(_HELLO_SECONDS)
        return None


class _Doorbell:
    """A port that other machines try to connect to.

    It tests that they reach this machine at the address of its data connections. ``at`` is
    [address, port, interface].
    """

    def __enter__(self) -> _Doorbell:
        name = os.environ.get(_INTERFACES[0], "").split(",")[0]
        found = addresses_of().get(name, [])
        self._socket = listen(found[0] if found else "", 0)
        self.at = [found[0] if found else "", self._socket.getsockname()[1], name]
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _unreachable_reason(at: Sequence[Any]) -> str:
    """Return why a doorbell cannot be reached, or an empty string if it can."""
    if not at[0] or ipv6_local(at[0]):
        return ""
    try:
        reached(str(at[0]), int(at[1]), _PROBE_SECONDS).close()
    except SessionError as error:
        return str(error)
    return ""


def ipv6_local(address: str) -> bool:
    """Return True if the address is link-local IPv6, which means nothing on another machine."""
    return address.lower().startswith("fe80")


def _advice(whom: str, at: Sequence[Any], who: str, problem: str) -> str:
    failure = (
        f"{whom} sends and receives data at {at[0]} ({at[2]}), where {who} cannot reach it: "
        f"{problem}"
    )
    return (
        f"{failure}; set {' and '.join(_INTERFACES)} there to the interface of the network that "
        f"joins the machines, and open its ports (docker: --net=host)"
    )


def _set_backend_interface(own: str, nodes: Sequence[Any], number: int) -> None:
    """Set the backends' interface to that of the address at which others reach this machine.

    A value that the user has set stays, if it can be right. Raise SessionError if it cannot: the
    interface does not exist, or it is the loopback interface while other machines are elsewhere.
    """
    own_interface, interfaces = interface_of(_address(own)), addresses_of()
    elsewhere = any(not is_here(n.addr) for n in nodes)
    for variable in _INTERFACES:
        setting = os.environ.get(variable)
        if not setting:
            if own_interface or not elsewhere:
                os.environ[variable] = own_interface or "lo"
            continue
        name = setting.removeprefix("=").removeprefix("^").split(",")[0].split(":")[0]
        mend = (
            f"set it to {own_interface}, by which {own} is reached"
            if own_interface
            else f"there are {', '.join(interfaces)}"
        )
        if variable == _INTERFACES[0] and name not in interfaces:
            this_machine = f"this machine ({socket.gethostname()})"
            raise SessionError(
                f"machine {number}: {variable} is {setting!r}, an interface that {this_machine} "
                f"does not have; {mend}, or unset it"
            )
        if elsewhere and name == "lo" and not setting.startswith("^"):
            raise SessionError(
                f"machine {number}: {variable} is {setting!r}, which leads to this machine alone; "
                f"{mend}, or unset it"
            )


def _address(host: str) -> str:
    """Return the numeric address of a host."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return own_address(host)


def _card(each: int, kind: str, machines: int) -> dict[str, Any]:
    """Return the properties that must be equal on all machines."""
    script = _script()
    return {
        "script": hashlib.sha256(script.read_bytes()).hexdigest()[:12]
        if script is not None
        else "no file",
        "path": str(script),
        "library": _library(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if kind == "cuda" else "",
        "python": platform.python_version_tuple()[:2],
        "devices": each,
        "kind": kind,
        "machines": machines,
    }


def _script() -> Path | None:
    found = getattr(sys.modules.get("__main__"), "__file__", None)
    path = Path(found) if found else None
    return path if path is not None and path.is_file() else None


def _library() -> str:
    """Return a hash of this package's code, because two copies of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(_LIBRARY.rglob("*.py")):
        digest.update(path.relative_to(_LIBRARY).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _differs(whose: str, card: dict[str, Any], own_name: str, own: dict[str, Any]) -> str:
    """Return how two machines differ, or an empty string if they do not."""
    card, own = ({**c, "python": list(c["python"])} for c in (card, own))
    if card["script"] != own["script"]:
        difference = (
            f"{whose} runs another script than {own_name}: {card['path']} ({card['script']}) "
            f"there, {own['path']} ({own['script']}) here"
        )
        return f"{difference}; copy the same script to all machines"
    words = {
        "library": "another version of globaltensor",
        "torch": "another version of PyTorch",
        "nccl": "another version of NCCL",
        "python": "another version of Python",
        "devices": "another number of devices",
        "kind": "devices of another kind",
        "machines": "another number of machines",
    }
    for key, what in words.items():
        if card[key] != own[key]:
            return (
                f"{whose} has {what} than {own_name}: {card[key]!r} there, {own[key]!r} here; all "
                f"machines must have the same"
            )
    return ""
