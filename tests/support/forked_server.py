"""A server that forks the ranks of a world for each call read from standard input. Its answer holds
the ranks' exit codes (support/forked.py).

Importing the library takes seconds, and starting a world takes a tenth of a second. So many
programs can run as whole processes, which end as processes end.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import pickle
import signal
import sys
import time
import warnings
from typing import Any


def child(task: dict[str, Any], rank: int, port: int) -> None:
    os.setpgid(0, 0)
    n = str(task["ranks"])
    world = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ |= world | task["variables"]
    said = os.open(f"{task['folder']}/{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    warnings.simplefilter("error")
    fn, args = pickle.loads(base64.b64decode(task["call"]))
    fn(*args)


def main() -> None:
    import torch

    import globaltensor
    from globaltensor.distributed.launch import reserved_port
    from globaltensor.distributed.world import reset_world

    torch.set_num_threads(1)
    # Late imports of programs take seconds too, so they run here.
    weight = torch.nn.Parameter(torch.ones(2))
    torch.optim.SGD([weight], lr=0.1)
    globaltensor.nn.Graph.trace(lambda x: x * 2)(torch.ones(2))
    reset_world()  # the world of one rank, which the line above has started
    gc.freeze()  # the collector ignores objects that exist before a fork
    for line in sys.stdin:
        task = json.loads(line)
        with reserved_port() as port:
            pids = []
            for rank in range(task["ranks"]):
                pid = os.fork()
                if pid == 0:
                    child(task, rank, port)
                    return  # the interpreter exits as at the end of any program
                pids.append(pid)
            print(json.dumps(ended(pids, task["seconds"])), flush=True)


def ended(pids: list[int], seconds: float) -> list[int | None]:
    """Return the exit codes of these processes, -n for signal n. None means that the process was
    still alive after so many seconds, and was killed."""
    codes: dict[int, int | None] = {}
    until = time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < until:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with the processes it has started
        if pid not in codes:
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


if __name__ == "__main__":
    main()
