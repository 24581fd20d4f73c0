"""torch's elastic agent with this package's own processes, used by ``distributed.launch``.

torch's agent decides when ranks start, restart and are done. This package decides how their
processes live and end.

torch's own processes (``LocalElasticAgent``) have these faults. They get signals one by one, so the
processes that they have started stay behind. They outlive an agent that is killed. They write to
the console directly, in the middle of each other's lines, or through files. For a failure without
``@record`` only the exit code is reported. The four methods below and ``_exit_barrier`` are those
that torch documents for agents to implement.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from .log_streams import STDERR, STDOUT, Pump, Stream, say
from .mpirun import Mpirun
from .node_rendezvous import NodeMonitor, StaticRendezvous, TCPStore, serve
from .workers import LocalWorkers, OrphanReaper, Rank, signal_name, start_here

__all__ = ["NodeAgent", "Signals"]

_SIGNALS: Final = tuple(
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    if (number := getattr(signal, name, None)) is not None
)


class Signals:
    """The signals that ask the launcher to end, recorded instead of acted on at once.

    An exception in the middle of a start would leave a rank behind that the launcher does not know.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # An ignored SIGHUP stays ignored (nohup). SIGINT does not, because shells ignore it
                # for background jobs.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self._at_once:
            self.check()

    def check(self) -> None:
        """Raise torch's SignalException if a signal has arrived."""
        if self.received:
            number = signal.Signals(self.received[0])
            raise SignalException(f"the launcher got {number.name}", number)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise as soon as a signal arrives, while the block runs."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False


def _is_not_of_a_signal(record: logging.LogRecord) -> bool:
    """Return False for torch's warning of a signal, about which the launcher has its own line."""
    return "death signal" not in record.getMessage()


class NodeAgent(SimpleElasticAgent):
    """The agent for the ranks that a job has on this node.

    ``command`` and ``variables`` are the same for every rank. ``code`` is the launcher's exit code
    at the end.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        command: list[str],
        variables: dict[str, str],
        logs: LogsSpecs,
        prefix: Callable[[int, int], str],
        mpi: bool,
        grace: float,
        beat: tuple[float, int],
        pump: Pump,
        keeper: OrphanReaper,
        signals: Signals,
    ) -> None:
        super().__init__(spec)
        logging.getLogger(SimpleElasticAgent.__module__).addFilter(_is_not_of_a_signal)
        self._command, self._variables, self._logs, self._prefix, self._grace, self._beat = (
            command,
            variables,
            logs,
            prefix,
            grace,
            beat,
        )
        self._pump, self._keeper, self._signals = pump, keeper, signals
        self._mpirun = Mpirun(pump, signals.check) if mpi else None
        self._team: LocalWorkers | None = None
        self._watch: NodeMonitor | None = None
        self._server: TCPStore | None = None  # the ranks' store, if this node serves it
        self._done = False
        self._starts = 0  # starts so far: restarts and changes in the number of nodes count too
        self.code = 0

    # Methods that torch's agent calls

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._signals.check()
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        where, met = self._meeting_point(worker_group), _untyped_group(worker_group)
        ranks = self._ranks(worker_group, where, restarts)
        self._team = LocalWorkers(
            ranks, self._pump, self._keeper, self._mpirun.start if self._mpirun else start_here
        )
        self._team.start(again=self._starts > 1)
        self._done = False
        if met.group_world_size > 1:
            self._watch = NodeMonitor(
                met.store, met.group_rank, met.group_world_size, *self._beat, where
            )
        return {rank.local_rank: rank.process.pid if rank.process else None for rank in ranks}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._signals.check()
        team, watch = self._team, self._watch
        assert team is not None
        # Asked before `failed`: a rank that fails in between still counts as alive, and is found
        # the next time.
        alive = bool(team.alive)
        if team.failed:
            return self._failure_result(
                team.failed_by(
                    lambda: self._signals.received or (watch is not None and watch.failures)
                )
            )
        if watch is not None and watch.failures:
            self.code = watch.code
            if watch.final and isinstance(worker_group.spec.rdzv_handler, StaticRendezvous):
                self._remaining_restarts = 0  # too few nodes would be left
            self._end_workers(team)
            say(
                f"{watch.failures}\nthe launcher has ended this node's {len(team.ranks)} "
                f"rank{'s' if len(team.ranks) > 1 else ''} too"
            )
            self._announce_restart()
            return RunResult(state=WorkerState.UNHEALTHY)
        if self._mpirun is not None and self._mpirun.died and alive:
            return self._lost_mpirun(team, self._mpirun)
        if alive or not self._all_nodes_done():
            return RunResult(state=WorkerState.HEALTHY)
        self.code = 0
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values={rank.rank: None for rank in team.ranks}
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        team, self._team = self._team, None
        watch, self._watch = self._watch, None
        if team is not None:
            if watch is not None and self._signals.received:
                watch.report_failure(
                    f"its launcher got {signal_name(self._signals.received[0])}",
                    128 + self._signals.received[0],
                    True,
                )
            if team.alive:
                self._end_workers(team)
            team.close()
            if self._mpirun is not None:
                self._mpirun.close()
        if watch is not None:
            watch.close()

    def _exit_barrier(self) -> None:
        # torch's own barrier waits in the store for minutes, without reacting to signals, for nodes
        # that may have died.
        if self._watch is not None:
            self._watch.leave()

    # Helpers

    def _end_workers(self, team: LocalWorkers) -> None:
        asked = len(self._signals.received)
        team.end(signal.SIGTERM, self._grace, hurry=lambda: len(self._signals.received) > asked)

    def _failure_result(self, failed: list[Rank]) -> RunResult:
        assert self._team is not None
        code = failed[0].code or 0
        self.code = code if code > 0 else 128 - code
        earlier = ""
        if self._watch is not None:
            earlier = self._watch.report_failure(
                failed[0].epitaph(), self.code, self._remaining_restarts == 0
            )
        self._end_workers(self._team)
        say(self._team.report(failed))
        if earlier:
            say(f"before that, {earlier}")
        self._announce_restart()
        failures = {
            rank.rank: ProcessFailure(
                rank.local_rank, rank.process.pid if rank.process else 0, rank.code or 0, ""
            )
            for rank in failed
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _lost_mpirun(self, team: LocalWorkers, mpirun: Mpirun) -> RunResult:
        self.code, epitaph = mpirun.epitaph()
        if self._watch is not None:
            self._watch.report_failure(epitaph, self.code, self._remaining_restarts == 0)
        self._end_workers(team)
        say(
            f"{epitaph}\nthe launcher has ended the {len(team.ranks)} "
            f"rank{'s' if len(team.ranks) > 1 else ''} that it connected too"
        )
        self._announce_restart()
        return RunResult(state=WorkerState.UNHEALTHY)

    def _announce_restart(self) -> None:
        limit = self._worker_group.spec.max_restarts
        if self._remaining_restarts > 0:
            say(
                f"starting the ranks again: restart {limit - self._remaining_restarts + 1} of at "
                f"most {limit}"
            )

    def _all_nodes_done(self) -> bool:
        if self._watch is None:
            return True
        if not self._done:
            self._done = True
            self._watch.done()
        return self._watch.all_done

    def _ranks(self, group: WorkerGroup, where: tuple[str, int], restarts: int) -> list[Rank]:
        """Return this node's ranks, with the variables that define each rank's place."""
        addr, port = where
        shared = {
            **self._variables,
            "MASTER_ADDR": addr,
            "MASTER_PORT": str(port),
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_NAME": group.spec.role,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        own = {
            worker.local_rank: {
                **shared,
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
            }
            for worker in group.workers
        }
        to = self._logs.reify(own)
        streams = {}
        for worker in group.workers:
            prefix = self._prefix(worker.global_rank, worker.local_rank)
            for number, paths, teed in (
                (STDOUT, to.stdouts, to.tee_stdouts),
                (STDERR, to.stderrs, to.tee_stderrs),
            ):
                streams[worker.local_rank, number] = _stream(
                    number,
                    paths[worker.local_rank],
                    worker.local_rank in teed,
                    prefix,
                    whole_lines=len(group.workers) > 1,
                )
        ranks = []
        for worker in group.workers:
            local = worker.local_rank
            ranks.append(
                Rank(
                    worker.global_rank,
                    local,
                    self._command,
                    own[local],
                    streams[local, STDOUT],
                    streams[local, STDERR],
                )
            )
        return ranks

    def _meeting_point(self, group: WorkerGroup) -> tuple[str, int]:
        """Return the address and port of the store where the ranks meet; the first node serves it.

        At the first start it may be the launchers' own store. Restarted ranks need a new one,
        without the entries of earlier ranks.
        """
        handler = group.spec.rdzv_handler
        self._starts += 1
        if isinstance(handler, StaticRendezvous) and self._starts == 1:
            return handler.addr, handler.port
        met = _untyped_group(group)
        if met.group_rank == 0:
            self._server = server = serve()
            met.store.set("ranks meet at", str(server.port))
        return met.master_addr, int(met.store.get("ranks meet at"))


def _untyped_group(group: WorkerGroup) -> Any:
    """Return the group after the rendezvous, typed as Any.

    torch declares the fields that it then sets as None.
    """
    return group


def _stream(number: int, path: str, teed: bool, prefix: str, whole_lines: bool) -> Stream:
    """Return the stream for a rank's stdout or stderr, as torch's LogsSpecs describes it.

    The path "" is the console. Any other path is a file, and also the console if the stream is
    teed.
    """
    save_tail = number == STDERR
    if path in ("", os.devnull):
        console = number if not path else None
        return Stream(console, save_tail=save_tail, whole_lines=whole_lines and not path)
    return Stream(number if teed else None, Path(path), prefix.encode() if teed else b"")
