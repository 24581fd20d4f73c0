"""The launchers of a job, one on each node: rendezvous, agreement, and news of failures.

`job` and the agent call this module. A fixed number of nodes meet at a store that node 0 serves at
the job's master port. An elastic number meet by torch's own rendezvous. While ranks run, each
launcher shows periodically that it lives. It also posts the failure of one of its ranks, so that
all nodes end within seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from ...errors import WorldError
from .log_streams import say

__all__ = ["Interruptible", "NodeMonitor", "StaticRendezvous", "TCPStore", "bound", "serve"]

CONNECT_SECONDS: Final = 45.0  # wait for an answer of node 0
# A setting of torch, read at each rendezvous.
_NO_SHARED_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_TRY_SECONDS: Final = 2.0
_TICK_SECONDS: Final = 0.05
_TELL_SECONDS: Final = 10.0  # between messages about the nodes that are missing
_STORE_SECONDS: Final = 15.0  # wait for an answer of the store
_HEAR_SECONDS: Final = 3.0  # wait for the other nodes to read of a failure


def bound(port: int = 0, listen: bool = False) -> socket.socket:
    """Return a socket bound to this port on all addresses of this machine.

    Port 0 means any free port. Raise WorldError if the port is in use.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", port))
        if listen:
            held.listen(1024)
    except OSError as error:
        held.close()
        why = f"is in use or not allowed on this machine ({error.strerror})"
        raise WorldError(
            f"--master_port {port} {why}: name another, or omit it to get a free one"
        ) from error
    return held


def serve(port: int = 0) -> TCPStore:
    """Return a store served at this port of this machine.

    Port 0 means any free port. Raise WorldError if the port is in use.
    """
    held = bound(port, listen=True)
    number = int(held.getsockname()[1])
    return TCPStore(
        "localhost",
        number,
        None,
        True,
        timedelta(seconds=_STORE_SECONDS),
        False,
        master_listen_fd=held.detach(),
    )


class StaticRendezvous(RendezvousHandler):
    """A rendezvous of a fixed number of nodes. ``check`` is called during waits, and may raise."""

    def __init__(
        self,
        addr: str,
        port: int,
        rank: int,
        nodes: int,
        nproc: int,
        run_id: str,
        check: Callable[[], None],
        connect: float,
        timeout: float,
    ) -> None:
        self.addr, self.port, self.rank, self.nodes, self.nproc = addr, port, rank, nodes, nproc
        self._run_id, self._check, self._connect, self._timeout = run_id, check, connect, timeout
        self._round = -1
        self.server: TCPStore | None = None
        self._store: Store | None = None

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes, and check that all were started with the same options.

        Raise WorldError if they were not, or if a node does not come.
        """
        self._round += 1
        if self._store is None:
            self._store = PrefixStore(
                "globaltensor/launchers",
                self._serve_store() if self.rank == 0 else self._reach_store(),
            )
        store = PrefixStore(f"round/{self._round}", self._store)
        if self.nodes > 1:
            self._agree(store)
        return RendezvousInfo(
            store, self.rank, self.nodes, RendezvousStoreInfo(self.addr, self.port)
        )

    def _serve_store(self) -> Store:
        self.server = serve(self.port)
        self.port = self.server.port
        if self.nodes > 1:
            try:
                socket.create_connection((self.addr, self.port), _TRY_SECONDS).close()
            except OSError as error:
                why = f"node 0 cannot reach itself at {self.addr}:{self.port} ({_reason(error)})"
                raise WorldError(
                    f"{why}: --master_addr must be an address of this machine at which other "
                    f"nodes can reach it"
                ) from error
        return self.server

    def _reach_store(self) -> Store:
        where, began, last_notice = f"{self.addr}:{self.port}", time.monotonic(), 0.0
        while True:
            self._check()
            try:
                socket.create_connection((self.addr, self.port), _TRY_SECONDS).close()
                break
            except OSError as error:
                waited, why = time.monotonic() - began, _reason(error)
            if waited > self._connect:
                problem = (
                    f"node {self.rank} cannot reach node 0 at {where}: {why}, for "
                    f"{self._connect:g} s"
                )
                mend = (
                    "is the launcher of node 0 running, are --master_addr and --master_port those "
                    "of node 0, and does a firewall block the connection?"
                )
                raise WorldError(
                    f"{problem}; {mend} (--rdzv_conf connect_timeout=<seconds> waits longer)"
                )
            if waited - last_notice > _TELL_SECONDS:
                last_notice = waited
                say(f"node {self.rank} waits for node 0 at {where} ({why})")
            time.sleep(5 * _TICK_SECONDS)
        try:
            return TCPStore(
                self.addr, self.port, None, False, timedelta(seconds=_STORE_SECONDS), False
            )
        except RuntimeError as error:
            raise WorldError(
                f"the program that listens at {where} is not a launcher: --master_port must be a "
                f"port that only node 0's launcher uses ({error})"
            ) from error

    def _agree(self, store: Store) -> None:
        """Wait until all nodes have come.

        Each node publishes its card and compares it: node 0 with every node's, the others with node
        0's.
        """
        own_card = {
            "nnodes": self.nodes,
            "nproc_per_node": self.nproc,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "run": self._run_id,
        }
        if store.add(f"taken/{self.rank}", 1) > 1:
            first = self._first_card(store)
            raise WorldError(
                f"--node_rank {self.rank} is taken: a launcher on {first['host']} (pid "
                f"{first['pid']}) has it; each node needs a different number"
            )
        store.set(f"card/{self.rank}", json.dumps(own_card))
        until, last_notice = time.monotonic() + self._timeout, time.monotonic()
        for other in range(1, self.nodes) if self.rank == 0 else [0]:
            while not store.check([f"card/{other}"]):
                self._raise_if_refused(store)
                if time.monotonic() > until:
                    self._give_up(
                        store,
                        f"node {other} of {self.nodes} has not connected to "
                        f"{self.addr}:{self.port} within {self._timeout:g} s",
                    )
                if time.monotonic() - last_notice > _TELL_SECONDS:
                    last_notice = time.monotonic()
                    say(
                        f"node {self.rank} waits at {self.addr}:{self.port} for node {other} of "
                        f"{self.nodes}"
                    )
                time.sleep(_TICK_SECONDS)
            self._compare(store, other, json.loads(store.get(f"card/{other}")), own_card)
        if self.rank == 0:
            store.set("go", "")
        while not store.check(["go"]):
            self._raise_if_refused(store)
            if time.monotonic() > until:
                self._give_up(
                    store,
                    f"node 0 at {self.addr}:{self.port} still waits for other nodes after "
                    f"{self._timeout:g} s",
                )
            time.sleep(_TICK_SECONDS)

    def _first_card(self, store: Store) -> dict[str, object]:
        """Return the card of the launcher that has this node's number.

        It publishes the card right after it takes the number, unless it ends at that point.
        """
        until = time.monotonic() + _TRY_SECONDS
        while not store.check([f"card/{self.rank}"]):
            if time.monotonic() > until:
                return {"host": "?", "pid": "?"}
            time.sleep(_TICK_SECONDS)
        card: dict[str, object] = json.loads(store.get(f"card/{self.rank}"))
        return card

    def _compare(
        self, store: Store, node: int, other_card: dict[str, object], own_card: dict[str, object]
    ) -> None:
        for option in ("nnodes", "nproc_per_node"):
            if other_card[option] != own_card[option]:
                what = (
                    f"node {node} ({other_card['host']}) was started with --{option} "
                    f"{other_card[option]}, node {self.rank} ({own_card['host']}) with "
                    f"{own_card[option]}"
                )
                self._give_up(
                    store,
                    f"{what}: it must be the same on all nodes (--rdzv_backend c10d allows "
                    f"different --nproc_per_node)",
                )

    def _give_up(self, store: Store, why: str) -> None:
        store.set("refused", why)
        self._tell_all(store)
        raise WorldError(why)

    def _raise_if_refused(self, store: Store) -> None:
        self._check()
        if store.check(["refused"]):
            why = store.get("refused").decode()
            self._tell_all(store)
            raise WorldError(why)

    def _tell_all(self, store: Store) -> None:
        """Wait until the nodes that have come know the reason, for a few seconds at most.

        Node 0 serves the store from which the others read it, so node 0 must not end before.
        """
        if self.rank:
            store.set(f"knows/{self.rank}", "")
            return
        until = time.monotonic() + _TRY_SECONDS
        while time.monotonic() < until and any(
            store.check([f"card/{n}"]) and not store.check([f"knows/{n}"])
            for n in range(1, self.nodes)
        ):
            time.sleep(_TICK_SECONDS)


class Interruptible(RendezvousHandler):
    """A wrapper of torch's own rendezvous that lets a signal end its wait of minutes.

    ``interruptible()`` returns a context in which a signal ends the wait. torch would serve one
    store for the ranks of all rounds. In torch 2.13 a node that joins later then waits in vain for
    the store's address. So the agent serves a new store each time.
    """

    def __init__(
        self,
        inner: RendezvousHandler,
        interruptible: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> None:
        self._inner, self._interruptible = inner, interruptible

    def get_backend(self) -> str:
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        before = os.environ.get(_NO_SHARED_STORE)
        os.environ[_NO_SHARED_STORE] = "1"
        try:
            with self._interruptible():
                return self._inner.next_rendezvous()
        finally:
            if before is None:
                del os.environ[_NO_SHARED_STORE]
            else:
                os.environ[_NO_SHARED_STORE] = before

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


class NodeMonitor:
    """A monitor of the other nodes while the ranks run.

    It has a thread, because the store may take its time to answer. A launcher that shows no sign of
    life for ``interval`` times ``attempts`` seconds counts as dead. ``line`` is the address of a
    store that the first node's launcher serves. If a connection to it ends, that launcher is gone.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        nodes: int,
        interval: float,
        attempts: int,
        line: tuple[str, int],
    ) -> None:
        self._store, self._rank, self._nodes, self._interval, self._silence = (
            store,
            rank,
            nodes,
            interval,
            interval * attempts,
        )
        self.where = f"{line[0]}:{line[1]}"
        self._line = socket.create_connection(line, _STORE_SECONDS)
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        self._news, self.code, self.final = "", 1, True
        self.silent: int | None = None
        self._answered = time.monotonic()
        self._deaf = False
        self._thread = threading.Thread(
            target=self._run, name="globaltensor launcher's watch", daemon=True
        )
        self._thread.start()

    def report_failure(self, what: str, code: int, final: bool) -> str:
        """Post that this node has failed, and return the earlier news of another node, if any.

        ``final`` means that this node does not restart.
        """

        def post() -> int:
            if self._store.add("failures", 1) == 1:
                failure = {
                    "node": self._rank,
                    "host": socket.gethostname(),
                    "what": what,
                    "code": code,
                    "final": final,
                }
                self._store.set("failure", json.dumps(failure))
                return self._store.add("heard", int(self._rank > 0))
            if self._store.check(["failure"]):
                self._note_failure(json.loads(self._store.get("failure")))
            return 0

        self._ask(post)
        return self._news

    @property
    def failures(self) -> str:
        """The news of another node's failure, or an empty string while all is well."""
        silence = time.monotonic() - self._answered
        # Our thread waits for an answer, which may never come.
        if not self._news and self._rank > 0 and silence > self._silence:
            self._news = (
                f"node 0 has been silent for {silence:.0f} s: its launcher is dead, or its network"
            )
        return self._news

    def done(self) -> None:
        """Post that this node's ranks have ended without errors."""
        self._ask(lambda: self._store.add("done", 1))

    @property
    def all_done(self) -> bool:
        """True if the ranks of all nodes have ended without errors."""
        return self._count("done") >= self._nodes

    def leave(self) -> None:
        """Wait until all nodes know that the job is done.

        The launcher that serves the store must be the last to end.
        """
        until = time.monotonic() + self._silence
        self._ask(lambda: self._store.add("left", 1))
        while (
            not self._deaf
            and self._reachable()
            and self._count("left") < self._nodes
            and time.monotonic() < until
        ):
            time.sleep(_TICK_SECONDS)

    def close(self) -> None:
        """End the monitor.

        The launcher that serves the store gives the others time to read the reason there.
        """
        self._stop.set()
        until = time.monotonic() + _HEAR_SECONDS
        if self._rank == 0 and self._count("failures"):
            while (
                self._count("heard") < self._nodes - 1 - (self.silent is not None)
                and time.monotonic() < until
            ):
                time.sleep(_TICK_SECONDS)
        self._thread.join(_STORE_SECONDS)
        self._line.close()

    def _count(self, key: str) -> int:
        return self._ask(lambda: self._store.add(key, 0))

    def _ask(self, question: Callable[[], int]) -> int:
        """Return the store's answer, or 0 if it does not answer.

        After that, the store is not asked again. torch would wait for as long as the system regards
        a cut cable as a slow one.
        """
        answers: list[int] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        if not self._deaf and self._reachable():
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(min(_STORE_SECONDS, self._silence))
            self._deaf = asking.is_alive()
        return answers[0] if answers else 0

    def _reachable(self) -> bool:
        """Return True if the connection is up.

        Check it before using the store, which writes pages to stderr if its own connection is down.
        """
        ready, _, _ = select.select([self._line], [], [], 0)
        with contextlib.suppress(OSError):
            return not ready or bool(self._line.recv(1, socket.MSG_PEEK))
        return False

    def _run(self) -> None:
        last = 0.0
        while not self._news and not self._stop.wait(min(0.2, self._interval)):
            try:
                self._answered = time.monotonic()
                if not self._reachable():
                    raise ConnectionError
                if self._store.check(["failure"]):
                    self._note_failure(json.loads(self._store.get("failure")))
                elif time.monotonic() - last > self._interval:
                    last = time.monotonic()
                    self._beat()
            except (RuntimeError, OSError):
                if not self._stop.is_set():
                    self._news = (
                        f"the launcher of node 0, which serves the meeting point "
                        f"{self.where}, is gone"
                    )

    def _note_failure(self, failure: dict[str, object]) -> None:
        if failure["node"] != self._rank and not self._news:
            self._store.add("heard", 1)
            self.code, self.final = int(str(failure["code"])), bool(failure["final"])
            self._news = f"node {failure['node']} ({failure['host']}) has failed: {failure['what']}"

    def _beat(self) -> None:
        """Show that this launcher lives, and check others.

        Node 0 checks all nodes, and the other nodes check node 0.
        """
        self._store.add(f"beat/{self._rank}", 1)
        now = time.monotonic()
        for node in range(1, self._nodes) if self._rank == 0 else [0]:
            key = f"beat/{node}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            known = self._beats.get(node)
            if known is None or known[0] != beat:
                self._beats[node] = (beat, now)
            elif now - known[1] > self._silence:
                self.silent = node
                self._news = (
                    f"node {node} has been silent for {now - known[1]:.0f} s: its "
                    f"launcher is dead, or its network"
                )
                self.report_failure(self._news, 1, True)


def _reason(error: OSError) -> str:
    return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
