"""The settings of a session: devices, machines, ports, logs.

``config`` and ``env`` write them before the session starts; the session closes them at its start.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ParamSpec

from ..errors import SessionError

__all__ = ["Machine", "Settings", "logger", "settings", "whole"]

logger = logging.getLogger("globaltensor.v0")

P = ParamSpec("P")


@dataclass(frozen=True)
class Machine:
    """A machine of a session.

    The agents are the ports at which others reach it if its ports are forwarded (containers).
    """

    addr: str
    ctrl_port_agent: int | None = None
    data_port_agent: int | None = None


@dataclass
class Settings:
    """The values that were set by `config` and `env`.

    ``closed`` is True once a session has started with them.
    """

    gpus: int | None = None
    cpus: int | None = None
    machine_num: int | None = None
    machines: list[Machine] = field(default_factory=list)
    ctrl_port: int | None = None
    data_port: int | None = None
    log_dir: str | None = None
    log_to_stderr: bool | None = None
    log_level: int | None = None
    debug: bool = False
    rdma: bool = False
    tensor_float: bool | None = None
    closed: bool = False

    @property
    def devices(self) -> int:
        """The number of devices of each machine, one process each."""
        return max(self.gpus or 0, self.cpus or 0, 1)

    @property
    def port(self) -> int:
        """The control port. Raise SessionError if it is not set, which several machines need."""
        if self.ctrl_port is None:
            raise SessionError(
                "several machines need a port to connect through, the same on all: "
                "flow.env.ctrl_port(9988)"
            )
        return self.ctrl_port

    def check(self) -> None:
        """Raise SessionError for settings that contradict each other."""
        if self.machine_num is not None and self.machine_num != max(1, len(self.machines)):
            contradiction = (
                f"config.machine_num({self.machine_num}), but env.machine names "
                f"{len(self.machines) or 'none'}"
            )
            raise SessionError(
                f"{contradiction}: give env.machine the address of each machine, or leave out "
                f"config.machine_num"
            )

    def reset(self) -> None:
        """Restore all defaults."""
        fresh = Settings()
        for f in fields(self):
            setattr(self, f.name, getattr(fresh, f.name))


settings = Settings()


def setting(function: Callable[P, Any]) -> Callable[P, bool]:
    """Decorate a function that changes settings before the session starts.

    The decorated function returns True. Once the session has started, it changes nothing, logs a
    warning and returns False.
    """

    @functools.wraps(function)
    def warn_if_closed(*args: P.args, **kwargs: P.kwargs) -> bool:
        if settings.closed:
            logger.warning(
                "%s had no effect, because the session has started already: call it before the "
                "first job call",
                function.__name__,
            )
            return False
        function(*args, **kwargs)
        return True

    return warn_if_closed


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return ``value`` if it is an integer in this range. Raise SessionError otherwise."""
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < least
        or (most is not None and value > most)
    ):
        within = f"at least {least}" if most is None else f"from {least} to {most}"
        raise SessionError(f"{name}({value!r}): an integer is wanted, {within}")
    return value
