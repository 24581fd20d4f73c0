"""The control connection between the master and another process of its session.

It carries JSON values over TCP, one per line, but no code and no arrays. Rendezvous, workers and
the worker pool use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any, Final

from ..errors import SessionError

__all__ = ["PROXIES", "Line", "listen", "proxies", "reached"]

MAX_BYTES: Final = 1 << 22  # maximum size of one message
_TRY_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.2
PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")


class Line:
    """One end of a control connection; ``peer`` describes the other end in words."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Keepalive notices a host that has vanished without closing the connection.
        for name, seconds in (
            ("TCP_KEEPIDLE", 10),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 4),
        ):
            if (option := getattr(socket, name, None)) is not None:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.peer = connection, peer
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> bool:
        """Send a message. Return False if that fails, because the other end may be gone."""
        with self._sending:
            try:
                self.connection.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return False
        return True

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message.

        Return None if the other end is gone, this end is closed, or the data is no JSON object.
        Raise TimeoutError after ``seconds``.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            try:
                # This also fails if this end has been closed meanwhile.
                self.connection.settimeout(left)
                came = self.connection.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not came or len(self._rest) > MAX_BYTES:
                return None
            self._rest += came
        text, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(text)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 chooses a free port. Raise OSError if that fails."""
    family = (
        socket.AF_INET6
        if ":" in host or (not host and socket.has_dualstack_ipv6())
        else socket.AF_INET
    )
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6 and not host:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
        held.listen(256)
    except OSError:
        held.close()
        raise
    return held


def reached(host: str, port: int, seconds: float, waits: Any = None) -> socket.socket:
    """Connect to a port, with retries for ``seconds``.

    ``waits(why)`` is called after each failed try. Raise SessionError with the reason of the last
    failure.
    """
    until, why = time.monotonic() + seconds, ""
    while True:
        try:
            return socket.create_connection(
                (host, port), max(0.1, min(_TRY_SECONDS, until - time.monotonic()))
            )
        except OSError as error:
            why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        if time.monotonic() + _PAUSE_SECONDS > until:
            raise SessionError(why)
        if waits is not None:
            waits(why)
        time.sleep(_PAUSE_SECONDS)


def proxies() -> str:
    """Return a sentence about the proxies that the environment names, or an empty string."""
    found = [name for stem in PROXIES for name in (stem, stem.upper()) if os.environ.get(name)]
    if not found:
        return ""
    return (
        f" {', '.join(found)} {'is' if len(found) == 1 else 'are'} set, but machines of a "
        f"session talk to each other directly, never through a proxy."
    )
