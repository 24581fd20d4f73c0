"""Find out whether the store of the rendezvous is still served. Worlds that end ask this.

Without a launcher rank 0 serves the store, and may be the rank that has ended. A request to the
store would then make torch print a C++ trace.
"""

from __future__ import annotations

import socket
import time
from typing import Any, Final

__all__ = ["store_answers"]

_CONNECT_SECONDS: Final = 2.0
# A process that ends closes its connections one after the other. The store's may be the last.
_EXIT_SECONDS: Final = 0.2


def store_answers(store: Any, lost: bool) -> bool:
    """Return False if the store is a server on TCP that accepts no connection any more.

    ``lost``: this rank has just lost its connection to another one, which may serve the store.
    """
    if lost:
        time.sleep(_EXIT_SECONDS)
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    if not (host and port):
        return True
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
