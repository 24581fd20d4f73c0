"""One process of the pool. It reads functions from its connection, calls them and answers. The
process runs as a script with the connection's file descriptor."""

from __future__ import annotations

import faulthandler
import gc
import pickle
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection

import torch

import globaltensor
from globaltensor._tensor.gradients import parameter_gather
from globaltensor.distributed.world import running
from support import device


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    device.move()
    gc.collect()
    gc.freeze()  # the collector ignores the modules, which are most of its work
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(answer(message))


def answer(message: bytes) -> bytes:
    """Run the call in a message, in the state in which a process starts. Return (True, result) or
    (False, traceback)."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if running():
        globaltensor.fuse_loss_count(False)  # the training example turns it on
        # In some tests the ranks part. Then they learn other orders of gathers.
        parameter_gather.forget()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fn, args = pickle.loads(message)
            return pickle.dumps((True, fn(*args)))
    except BaseException:  # the test reports any failure
        return pickle.dumps((False, traceback.format_exc()))


if __name__ == "__main__":
    main()
