"""One process of a pool that mpirun has started. It connects to the test run, and then works like
any other worker."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.paths import FOLDERS

sys.path.extend(map(str, FOLDERS))

import globaltensor as flow
from support import worker

if __name__ == "__main__":
    door = socket.socket(socket.AF_UNIX)
    door.connect(sys.argv[1])
    connection = Connection(os.dup(door.fileno()))
    rank = next(
        int(os.environ[name])
        for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
        if name in os.environ
    )
    connection.send_bytes(pickle.dumps((rank, os.getpid())))
    sys.argv[1] = str(door.detach())
    flow.env.get_rank()  # starts the process group
    worker.main()
