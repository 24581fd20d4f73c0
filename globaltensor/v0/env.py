"""``flow.env``: the machines of a session and how they reach each other.

User code calls the setters before the first job call. They return True, or False once the session
has started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .errors import SessionError
from .session.session import session
from .session.settings import Machine, setting, settings, whole

__all__ = [
    "Resource",
    "ctrl_port",
    "current_machine_id",
    "current_resource",
    "data_port",
    "init",
    "log_dir",
    "logbuflevel",
    "logtostderr",
    "machine",
]


class Resource(NamedTuple):
    """The resources of a session."""

    machine_num: int
    gpu_device_num: int
    cpu_device_num: int
    device: str


@setting
def machine(*val: Any) -> None:
    """Set the machines, as a list or as arguments: addresses, or dicts with ``addr``.

    A dict may also have ``ctrl_port_agent`` and ``data_port_agent``: the ports at which others
    reach the machine if its ports are forwarded. The first machine is the master. Raise
    SessionError for an invalid address, a duplicate, or an empty list.
    """
    nodes = (
        list(val[0])
        if len(val) == 1 and isinstance(val[0], Iterable) and not isinstance(val[0], (str, Mapping))
        else list(val)
    )
    machines = []
    for node in nodes:
        known = (
            {"addr": node}
            if isinstance(node, str)
            else dict(node)
            if isinstance(node, Mapping)
            else {}
        )
        extra = sorted(set(known) - {"addr", "ctrl_port_agent", "data_port_agent"})
        if not isinstance(known.get("addr"), str) or not known["addr"].strip() or extra:
            raise SessionError(
                f'env.machine: a machine is an address or a dict like {{"addr": "192.168.1.12"}}; '
                f"got {node!r}"
            )
        ports = {
            name: whole(f"env.machine: {name}", known[name], 1, 65535)
            for name in ("ctrl_port_agent", "data_port_agent")
            if known.get(name) is not None
        }
        machines.append(Machine(known["addr"].strip(), **ports))
    addresses = [m.addr for m in machines]
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice or not machines:
        raise SessionError(
            f"env.machine: {twice[0]} is in the list twice"
            if twice
            else "env.machine: the list is empty"
        )
    settings.machines = machines


@setting
def ctrl_port(val: int) -> None:
    """Set the port at which machines meet, the same on all; the master listens on it."""
    settings.ctrl_port = whole("env.ctrl_port", val, 1, 65535)


@setting
def data_port(val: int) -> None:
    """Set the master's port at which devices meet to exchange data; by default a free port.

    The data itself goes over ports that the system chooses.
    """
    settings.data_port = whole("env.data_port", val, 1, 65535)


@setting
def log_dir(val: str) -> None:
    """Set the folder of the session's log, with a file for each process that runs the script."""
    settings.log_dir = str(val)


@setting
def logtostderr(val: bool) -> None:
    """Set whether the session writes its log to stderr too."""
    settings.log_to_stderr = bool(val)


@setting
def logbuflevel(val: int) -> None:
    """Set the lowest level that is logged: 0 everything, 1 information, 2 warnings, 3 errors."""
    settings.log_level = {0: 10, 1: 20, 2: 30, 3: 40}.get(whole("env.logbuflevel", val, -1), 10)


def init() -> bool:
    """Find the other machines now, instead of at the first job call.

    Settings made afterwards have no effect. Return True, or False if this has been done already.
    Raise SessionError if the machines cannot meet.
    """
    if settings.closed:
        return False
    session().meet()
    return True


def current_resource() -> Resource:
    """Return the session's resources. This calls `init` if the session is not initialised yet."""
    init()
    layout = session().layout
    gpus = layout.each if layout.kind == "cuda" and layout.tag == "gpu" else 0
    return Resource(
        layout.machines, gpus, layout.each, torch.cuda.get_device_name() if gpus else "cpu"
    )


def current_machine_id() -> int:
    """Return this machine's index in the list, after calling `init` if needed."""
    init()
    meeting = session().meeting
    return 0 if meeting is None else meeting.machine
