"""The process that mpirun starts for each rank: it runs the rank for the launcher.

It gets the rank's command, stdin, stdout and stderr from the launcher, runs the command, and
reports how it ended. It runs as a bare script (``python -I -S distributed/launcher/mpirun_shim.py
<the launcher's socket>``).

mpirun ends a whole job within a second of the first failure, and reports it in its own words. The
launcher gives ranks time and reports which one failed. So mpirun sees only the shim, which ends
when all ranks have ended.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

# This module is in the same folder. The package is not on the path of a bare script.
from parent_death_signal import become, tie  # type: ignore[import-not-found]

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def main(path: str) -> int:
    """Serve one rank. Return 0 always: the launcher gets the rank's exit code directly."""
    # Ignore mpirun's request to end, as the launcher makes its own request.
    signal.signal(signal.SIGTERM, lambda *_: None)
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    launcher = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    launcher.connect(path)
    launcher.sendall(f"{rank}\n".encode())
    text, streams = receive(launcher)
    pid = os.fork()
    if pid == 0:
        launcher.close()
        tie(os.getppid())
        begin(json.loads(text), streams)
    for stream in streams:
        os.close(stream)
    launcher.sendall(f"{pid}\n".encode())
    watch(pid, launcher)
    return 0


def receive(launcher: socket.socket) -> tuple[bytes, list[int]]:
    """Return (the order as JSON, the descriptors of stdin, stdout and stderr).

    The order is one line. The descriptors come with its start.
    """
    text, descriptors, _, _ = socket.recv_fds(launcher, 1 << 16, 3)
    while not text.endswith(b"\n"):
        more = launcher.recv(1 << 16)
        if not more:
            sys.exit(0)
        text += more
    return text, list(descriptors)


def begin(order: dict[str, Any], streams: list[int]) -> None:
    """Replace this process by the rank."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.update(order["variables"])
    become(order["command"])


def watch(pid: int, launcher: socket.socket) -> None:
    """Report to the launcher when and how the rank ends.

    Once the launcher is done or dead, kill what is left of a rank that has not ended well.
    """
    alive, code, ended = True, 0, os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    while True:
        sources: list[Any] = [launcher, *([ended] if alive and ended is not None else [])]
        ready, _, _ = select.select(sources, [], [], 0.05 if alive and ended is None else None)
        if launcher in ready and not launcher.recv(1 << 12):
            break
        # The process is not reaped, so that its pid is not reused until its group is killed.
        exit_info = (
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if alive else None
        )
        if exit_info is not None:
            alive = False
            code = (
                exit_info.si_status if exit_info.si_code == os.CLD_EXITED else -exit_info.si_status
            )
            launcher.sendall(f"{code}\n".encode())
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if alive or code:
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
