"""The devices of a session other than the master, as the master sees them.

The session uses the pool to start the devices of its own machine, to send orders to all devices,
and to learn of failures.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from ..errors import SessionError
from .control_channel import Line, listen
from .device_layout import Layout
from .device_worker import Instruction, follow
from .process_place import SessionAddress, Workers
from .rendezvous import SessionRendezvous
from .settings import logger, settings

__all__ = ["WorkerPool", "follow_master"]

_START_SECONDS: Final = 120.0  # for device processes to start; they import torch
_TELL_SECONDS: Final = 10.0
_HELLO_SECONDS: Final = 10.0


class WorkerPool:
    """The devices of a session from 1 on.

    ``lost`` describes the failure of a device; it is empty while all is well.
    """

    def __init__(self, layout: Layout, meeting: SessionRendezvous | None, workers: Workers) -> None:
        self.layout, self.meeting, self.workers, self.lost = layout, meeting, workers, ""
        self.lines: dict[int, Line] = {}
        self.server: Any = meeting.server if meeting is not None else None
        if self.server is None and layout.size > 1:
            self.server = listen("127.0.0.1", 0)

    def agree(
        self, digests: Mapping[str, str], place: SessionAddress, instruction: Instruction
    ) -> None:
        """Check that all machines recorded the same jobs, and send the place where devices meet.

        Raise SessionError, on all machines, if one has recorded others.
        """
        meeting = self.meeting
        if meeting is None:
            return
        for line in meeting.lines.values():
            line.send(records=True)
            theirs = _receive_answer(line, line.peer).get("records") or {}
            differ = sorted(
                name for name in {*digests, *theirs} if theirs.get(name) != digests.get(name)
            )
            if differ:
                meeting.refuse(
                    f"{line.peer} has recorded other jobs than the master: {', '.join(differ)}; "
                    f"the script must do the same on all machines"
                )
        data = settings.machines[0].data_port_agent or place.port
        for line in meeting.lines.values():
            line.send(place=[place.addr, data], seed=instruction.seed, token=instruction.token)

    def gather(self, place: SessionAddress, instruction: Instruction) -> None:
        """Send the devices of this machine their ranks, and wait until all have connected.

        Raise SessionError if a device ends before, or does not connect in time.
        """
        each = self.layout.each
        self.workers.tell(place, 0, instruction)
        if self.meeting is not None:
            self.lines.update({number * each: line for number, line in self.meeting.lines.items()})
        until = time.monotonic() + _START_SECONDS
        while len(self.lines) < self.layout.size - 1:
            for device, code in self.workers.dead().items():
                raise SessionError(
                    f"the process of device 0:{device} ended with code {code} before it was "
                    "ready; its stderr says why"
                )
            if time.monotonic() > until:
                missing = [
                    f"{r // each}:{r % each}"
                    for r in range(1, self.layout.size)
                    if r not in self.lines
                ]
                raise SessionError(
                    f"device{'s' if len(missing) > 1 else ''} {', '.join(missing)} did not start "
                    f"within {_START_SECONDS:g} s"
                )
            self._welcome(instruction.token)
        for line in self.lines.values():
            threading.Thread(
                target=self._watch,
                args=(line,),
                name=f"globaltensor.v0 line to {line.peer}",
                daemon=True,
            ).start()

    def tell(self, **order: Any) -> None:
        """Send an order to all devices."""
        for line in self.lines.values():
            line.send(**order)

    def close(self) -> None:
        """Close all connections, after the devices have received the order to end.

        The processes of this machine are gone afterwards.
        """
        self.workers.end()
        for line in self.lines.values():
            line.close()
        if self.server is not None:
            self.server.close()

    def _welcome(self, token: str) -> None:
        self.server.settimeout(0.5)
        try:
            connection, where = self.server.accept()
        except TimeoutError:
            return
        line, hello = Line(connection, str(where[0])), {}
        with contextlib.suppress(TimeoutError):
            hello = line.receive(_HELLO_SECONDS) or {}
        rank = hello.get("device")
        if hello.get("token") != token or not isinstance(rank, int):
            line.close()
            return
        line.peer = f"device {rank // self.layout.each}:{rank % self.layout.each}"
        self.lines[rank] = line

    def _watch(self, line: Line) -> None:
        """Record the failure that a device reports, or the loss of its connection."""
        while (message := line.receive()) is not None:
            if "failed" in message:
                self.lost = self.lost or f"{line.peer} has failed:\n{message['failed'].rstrip()}"
        self.lost = self.lost or f"{line.peer} is gone: its process has ended, or its machine"


def follow_master(
    meeting: SessionRendezvous,
    layout: Layout,
    workers: Workers,
    records: list[Any],
    digests: Mapping[str, str],
) -> None:
    """Run the first device of another machine.

    Send the other devices there their ranks, then execute the master's orders. This does not
    return. Raise SessionError if the machines do not agree.
    """
    line = meeting.master
    assert line is not None
    asked = _receive_answer(line, "the master")
    if "refused" not in asked:
        line.send(records=dict(digests))
        asked = _receive_answer(line, "the master")
    if "refused" in asked:
        raise SessionError(str(asked["refused"]))
    place = SessionAddress(layout, *asked["place"])
    where = meeting.nodes[0].addr, meeting.nodes[0].ctrl_port_agent or settings.port
    instruction = Instruction(
        records,
        layout,
        asked["seed"],
        settings.debug,
        settings.tensor_float,
        settings.rdma,
        where,
        asked["token"],
    )
    first = meeting.machine * layout.each
    workers.tell(place, first, instruction)
    follow(line, instruction, place.variables(first), workers)


def _receive_answer(line: Line, who: str) -> dict[str, Any]:
    """Wait for a machine's answer; its script may not have reached its first job call yet.

    Raise SessionError if the machine's script has ended.
    """
    warned_at = time.monotonic()
    while True:
        try:
            answer = line.receive(1.0)
        except TimeoutError:
            if time.monotonic() - warned_at > _TELL_SECONDS:
                warned_at = time.monotonic()
                logger.warning(
                    "waiting for %s, whose script has not reached its first job call", who
                )
            continue
        if answer is None:
            raise SessionError(
                f"{who} has ended before its first job call: its own output says why"
            )
        return answer
