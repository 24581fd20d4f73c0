"""A device of a session that is not the master.

It executes the master's orders until the master ends the session or is gone. `Workers` starts it as
a process; on other machines, `follow_master` runs it in the script's process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...distributed.rdma import init_rdma
from ...distributed.run.worker import end_with
from ...distributed.world import reset_world, running, world
from ..recording.record import Record
from .control_channel import Line, reached
from .device_layout import Layout
from .engine import Engine
from .process_place import Workers, as_rank
from .settings import logger

__all__ = ["Instruction", "follow", "joined", "main"]

_CONNECT_SECONDS: Final = 60.0


@dataclass
class Instruction:
    """The instruction that every device of a session gets from the process that starts it.

    ``master`` is the address and port of the control connection.
    """

    records: list[Record]
    layout: Layout
    seed: int
    debug: bool
    tensor_float: bool | None
    rdma: bool
    master: tuple[str, int]
    token: str


def joined(instruction: Instruction, variables: Mapping[str, str]) -> Engine:
    """Join the world as the rank that ``variables`` name, and create the engine. Collective."""
    if instruction.layout.size > 1:
        if running() is not None:
            reset_world()
        with as_rank(variables):
            world()
    if instruction.rdma:
        init_rdma()
    if instruction.tensor_float is not None:
        torch.backends.cuda.matmul.allow_tf32 = instruction.tensor_float
    return Engine(instruction.records, instruction.layout, instruction.seed, instruction.debug)


def main() -> None:
    """Run a device process.

    It reads its rank and instruction from stdin, while it loads the modules that it will need.
    """
    end_with(os.getppid())
    # PyTorch loads many modules at the first op on a meta tensor, and captures use such tensors.
    torch.relu(torch.empty(1, device="meta"))
    try:
        rank, variables, interfaces = pickle.load(sys.stdin.buffer)
        instruction: Instruction = pickle.load(sys.stdin.buffer)
    except EOFError:  # the session did not start
        return
    os.environ.update(interfaces)
    line = Line(reached(*instruction.master, _CONNECT_SECONDS), "the master")
    line.send(device=rank, token=instruction.token)
    follow(line, instruction, variables, None)


def follow(
    line: Line, instruction: Instruction, variables: Mapping[str, str], workers: Workers | None
) -> None:
    """Execute the master's orders, then end this process.

    ``workers`` are the device processes that this process has started, if it runs the script. In
    that case it also logs why it ends.
    """
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    over = threading.Event()

    def leave(words: str, code: int) -> None:
        _exit_process(words if workers is not None else "", code, workers)

    def listen() -> None:
        while (message := line.receive()) is not None:
            if message.get("do") == "end":
                over.set()
                # Leave even out of a collective, because the other ranks will not come.
                if message.get("why"):
                    leave(f"the master has ended: {message['why']}", 1)
            orders.put(message)
        if not over.is_set():
            leave("the connection to the master is lost, so this machine stops", 1)

    threading.Thread(target=listen, name="globaltensor.v0 line to the master", daemon=True).start()
    engine: Engine | None = None
    try:
        while True:
            order = orders.get()
            if order["do"] == "join":
                engine = joined(instruction, variables)
            elif order["do"] == "end":
                reset_world()
                leave("", 0)
            else:
                assert engine is not None
                {"run": engine.run, "fetch": engine.fetch, "load": engine.load}[order["do"]](
                    order["what"]
                )  # type: ignore[operator]
    except BaseException:
        line.send(failed=traceback.format_exc())
        leave(traceback.format_exc(), 1)


def _exit_process(words: str, code: int, workers: Workers | None) -> None:
    """End this process at once, without running the rest of the script.

    The script continues on the master only. ``words`` are logged, if there are any.
    """
    if words:
        logger.error(words)
    if workers is not None:
        workers.end()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
