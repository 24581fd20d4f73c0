"""Forks the ranks of a world for each call that it is told of on standard input, and says with
which exit codes they ended (support/forked.py).

Importing the library takes seconds, starting a world a tenth of one: so many programs can be tried
as whole processes, which end as processes end.
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
    # What programs import as they go takes seconds, too.
    weight = torch.nn.Parameter(torch.ones(2))
    torch.optim.SGD([weight], lr=0.1)
    globaltensor.nn.Graph.trace(lambda x: x * 2)(torch.ones(2))
    reset_world()  # of one rank, which that has started
    gc.freeze()  # what is there before a fork is not looked through after it
    for line in sys.stdin:
        task = json.loads(line)
        with reserved_port() as port:
            pids = []
            for rank in range(task["ranks"]):
                pid = os.fork()
                if pid == 0:
                    child(task, rank, port)
                    return  # the interpreter ends as it does at the end of any program
                pids.append(pid)
            print(json.dumps(ended(pids, task["seconds"])), flush=True)


def ended(pids: list[int], seconds: float) -> list[int | None]:
    """The exit codes of these processes, -n for signal n; None: still there after so many seconds,
    and killed."""
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
            os.killpg(pid, signal.SIGKILL)  # with what it has started
        if pid not in codes:
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


if __name__ == "__main__":
    main()
