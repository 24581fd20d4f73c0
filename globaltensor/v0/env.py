"""``flow.env``: the machines of a session and how they reach each other. Settings return True, or
False once the session has started."""

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
    """What a session has."""

    machine_num: int
    gpu_device_num: int
    cpu_device_num: int
    device: str


@setting
def machine(*val: Any) -> None:
    """The machines, as a list or as arguments: addresses, or dicts with ``addr`` (and
    ``ctrl_port_agent``, ``data_port_agent``: the ports by which others reach it, where they are
    forwarded). The first is the master. Raises SessionError for what is no address, or one that
    stands twice."""
    given = (
        list(val[0])
        if len(val) == 1 and isinstance(val[0], Iterable) and not isinstance(val[0], (str, Mapping))
        else list(val)
    )
    found = []
    for node in given:
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
        found.append(Machine(known["addr"].strip(), **ports))
    addresses = [m.addr for m in found]
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice or not found:
        raise SessionError(
            f"env.machine: {twice[0]} stands twice in the list"
            if twice
            else "env.machine: the list is empty"
        )
    settings.machines = found


@setting
def ctrl_port(val: int) -> None:
    """The port by which machines meet, the same on all; the master listens there."""
    settings.ctrl_port = whole("env.ctrl_port", val, 1, 65535)


@setting
def data_port(val: int) -> None:
    """The master's port where devices meet for their data; by default a free one. The data itself
    goes over ports that the system gives."""
    settings.data_port = whole("env.data_port", val, 1, 65535)


@setting
def log_dir(val: str) -> None:
    """The session writes its log there, a file for each process that runs the script."""
    settings.log_dir = str(val)


@setting
def logtostderr(val: bool) -> None:
    """The session writes its log to stderr too."""
    settings.log_to_stderr = bool(val)


@setting
def logbuflevel(val: int) -> None:
    """The least level that is logged: 0 everything, 1 information, 2 warnings, 3 errors."""
    settings.log_level = {0: 10, 1: 20, 2: 30, 3: 40}.get(whole("env.logbuflevel", val, -1), 10)


def init() -> bool:
    """Find the other machines now, instead of at the first job call; what is said about the session
    afterwards counts no more. Raises SessionError where they do not meet. True; False where it has
    been done."""
    if settings.closed:
        return False
    session().meet()
    return True


def current_resource() -> Resource:
    """What the session has. It must have been initialised: `init`, or a job call; else this does
    it."""
    init()
    layout = session().layout
    gpus = layout.each if layout.kind == "cuda" and layout.tag == "gpu" else 0
    return Resource(
        layout.machines, gpus, layout.each, torch.cuda.get_device_name() if gpus else "cpu"
    )


def current_machine_id() -> int:
    """Which machine of the list this is. It must have been initialised: `init`, or a job call; else
    this does it."""
    init()
    meeting = session().meeting
    return 0 if meeting is None else meeting.machine
