"""A log of what this rank sends for global tensors, and a block that forbids hidden traffic.

Users open both, `boxing_log()` and `no_boxing()`. `box` reports boxings. The communicators report
all other traffic when they send it, and `exchanges` names the reason. Collectives of
`flow.distributed` and `flow.comm` are not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from torch.profiler import record_function

from .._base.number_ranges import show_ranges
from .._base.torch_private import profiling
from ..distributed.communicator import Traffic
from ..distributed.world import world
from ..distributed.world_base import World
from ..errors import BoxingError
from ..sharding.spec import Spec
from .moves import show_bytes, show_placement
from .planner import BoxingPlan

__all__ = [
    "BoxingRecord",
    "ExchangeRecord",
    "boxing_log",
    "boxing_sent_here",
    "check",
    "exchange",
    "exchanges",
    "forbidden",
    "no_boxing",
    "record_boxing",
    "watched",
]

#: The name of an explicit call. Such a boxing is always allowed.
EXPLICIT = "to_global"


@dataclass(frozen=True, slots=True)
class BoxingRecord:
    """A record of one boxing.

    ``op``: the operation that needed it (``to_global``, ``add: argument 1``, ``backward of ...``).
    ``bytes``: the traffic of the busiest rank.
    """

    op: str
    src: Spec
    dst: Spec
    plan: BoxingPlan

    @property
    def bytes(self) -> int:
        return self.plan.bytes

    @property
    def kind(self) -> str:
        """The moves, joined by ``+``."""
        return "+".join(m.kind for m in self.plan.moves) or "nothing"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both placements."""
        return tuple(dict.fromkeys((*self.src.placement.flat, *self.dst.placement.flat)))

    def __str__(self) -> str:
        return (
            f"{self.op}: {describe(self.src)} -> {describe(self.dst)}  {self.kind}  "
            f"{show_bytes(self.bytes)}"
        )


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """A record of traffic that is no boxing of one tensor.

    It is an op's exchange with other ranks because a dim stayed split, or a collective for many
    tensors: a bucket of gradients, or parameters that are gathered together.

    ``op``: the reason. ``bytes``: the bytes that this rank sent. A dry run sends nothing: there
    ``bytes`` is the op's prediction, in most ops the bytes that this rank receives. ``kind``: the
    collectives. A pass of an op through several collectives is one record, with the sum of their
    bytes. ``ranks``: the ranks that took part.
    """

    op: str
    bytes: int
    kind: str = "exchange"
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        ranks = f"  ranks {show_ranges(self.ranks)}" if self.ranks else ""
        return f"{self.op}  {self.kind}  {show_bytes(self.bytes)}{ranks}"


class _OpenLogs:
    """The logs that are open on one rank, and the `exchanges` block that the rank is in."""

    #: The number of logs that are open in this process. While it is 0, nothing else is looked at.
    count = 0
    changing = threading.Lock()

    def __init__(self) -> None:
        self.logs: tuple[list[Any], ...] = ()
        self.block: _Exchanges | None = None

    def observe(self, this_world: World, traffic: Traffic) -> None:
        """Record a collective that is about to be sent, unless it is a part of a boxing."""
        if isinstance(this_world.purpose, tuple):
            return
        if self.block is not None:
            self.block.sent.append(traffic)
        else:
            self.add(ExchangeRecord(traffic.kind, traffic.bytes, traffic.kind, traffic.ranks))

    def add(self, record: BoxingRecord | ExchangeRecord) -> None:
        for log in self.logs:
            log.append(record)


_forbidden: ContextVar[bool] = ContextVar("globaltensor_no_boxing", default=False)


class _Log(list[Any]):
    """A list of records, which prints as one record a line."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


@contextmanager
def boxing_log() -> Iterator[list[Any]]:
    """Collect a record of what this rank sends for global tensors in the block, and why.

    Collectives of `flow.distributed` and `flow.comm`, barriers and comparisons of plain tensors are
    not recorded. Opening a log starts the world.

    A `BoxingRecord` is of one tensor that is boxed, explicitly, by an op, or by a backward pass. An
    `ExchangeRecord` is of an exchange inside an op, or of a collective for many tensors, such as a
    bucket of gradients.

    >>> with boxing_log() as log:
    ...     pass
    >>> [record.op for record in log]
    []
    """
    log: list[Any] = _Log()
    this_world = world()
    open_logs = this_world.state(_OpenLogs)
    open_logs.logs = (*open_logs.logs, log)
    # A dry world sends nothing, and ops predict their traffic there.
    if not this_world.dry and this_world.observer is None:
        this_world.observer = lambda traffic: open_logs.observe(this_world, traffic)
    with _OpenLogs.changing:
        _OpenLogs.count += 1
    try:
        yield log
    finally:
        with _OpenLogs.changing:
            _OpenLogs.count -= 1
        # Logs may close in any order.
        open_logs.logs = tuple(each for each in open_logs.logs if each is not log)
        if not open_logs.logs:
            this_world.observer = None


def watched() -> bool:
    """Return True if a log is open or a profiler runs, so that traffic needs a name."""
    return _OpenLogs.count > 0 or profiling()


def exchanges(why: str, *args: object) -> AbstractContextManager[Any]:
    """Return a block whose collectives are logged as one `ExchangeRecord` with the reason ``why``.

    ``args`` are formatted into ``why`` (`str.format`), only if a log is open or a profiler runs.
    While a profiler of torch runs, the block is a named range of it.
    """
    if not watched():
        return _NOTHING
    reason = why.format(*args) if args else why
    return _Exchanges(reason, f"exchange {reason}")


def boxing_sent_here(route: BoxingPlan, why: str) -> AbstractContextManager[Any]:
    """Check and log a boxing whose collective the caller sends in the block, without `run`."""
    record_boxing(route, why)
    return _Exchanges("", range_name(route)) if watched() else _NOTHING


_NOTHING: Final = nullcontext()


class _Exchanges:
    """A block of collectives that are sent for one reason. Without a reason they are not logged."""

    __slots__ = ("before", "label", "range", "sent", "state", "why")

    def __init__(self, why: str, label: str) -> None:
        self.why, self.label = why, label
        self.sent: list[Traffic] = []

    def __enter__(self) -> None:
        self.state = world().state(_OpenLogs)
        self.before, self.state.block = self.state.block, self
        self.range = record_function(self.label) if profiling() else _NOTHING
        self.range.__enter__()

    def __exit__(self, *error: object) -> None:
        self.range.__exit__(*error)  # type: ignore[arg-type]
        self.state.block = self.before
        if self.sent and self.why:
            kinds = "+".join(dict.fromkeys(t.kind for t in self.sent))
            ranks = tuple(dict.fromkeys(r for t in self.sent for r in t.ranks))
            self.state.add(ExchangeRecord(self.why, sum(t.bytes for t in self.sent), kinds, ranks))


def range_name(route: BoxingPlan) -> str:
    """Return the name of a boxing in a profiler: ``box S(0)->B 4.2 MiB ranks 0-1``."""
    before, after = (",".join(e.short for e in s.layout) for s in (route.src, route.dst))
    ranks = dict.fromkeys((*route.src.placement.flat, *route.dst.placement.flat))
    return f"box {before}->{after} {show_bytes(route.bytes)} ranks {show_ranges(ranks)}"


@contextmanager
def no_boxing() -> Iterator[None]:
    """Raise BoxingError where an op in the block would communicate.

    It would communicate to box an operand, or with its neighbours along a split dim. Explicit
    `to_global` is allowed, and so is boxing without traffic.
    """
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


def forbidden() -> bool:
    """Return True if the code runs inside `no_boxing`."""
    return _forbidden.get()


def check(route: BoxingPlan, why: str) -> None:
    """Raise BoxingError if `no_boxing` forbids ``route``.

    A route without traffic is allowed, and so are an explicit ``to_global`` and a backward pass.
    """
    if (
        not _forbidden.get()
        or not route.bytes
        or not why
        or why.startswith((EXPLICIT, "backward of"))
    ):
        return
    target = ", ".join(_entry_text(e.kind, e.dim, e.reduce) for e in route.dst.layout)
    placement = (
        "" if route.src.placement is route.dst.placement else f"placement={route.dst.placement!r}, "
    )
    raise BoxingError(
        f"{why}: {describe(route.src)} would be boxed to {describe(route.dst)} "
        f"({', '.join(m.kind for m in route.moves)}, {show_bytes(route.bytes)} a rank), "
        f"but no_boxing() forbids hidden traffic. Make the move explicit with "
        f"x.to_global({placement}sbp=[{target}]) before the op, or leave no_boxing()"
    )


def exchange(what: str, nbytes: int, explicit: bool = False) -> None:
    """Check an exchange inside an op that is about to happen.

    Where nothing is sent (in a dry run), log the prediction of ``nbytes``. Otherwise the traffic
    itself is logged. ``explicit``: the user has asked for exactly this exchange. Raises BoxingError
    inside `no_boxing` otherwise.
    """
    if _forbidden.get() and not explicit:
        raise BoxingError(
            f"{what}: the op would exchange {show_bytes(nbytes)} with other ranks, since it works "
            f"along a split dim, but no_boxing() forbids hidden traffic. "
            "Gather that dim with x.to_global(sbp=...) before the op, or leave no_boxing()"
        )
    if _OpenLogs.count and (this_world := world()).dry:
        this_world.state(_OpenLogs).add(ExchangeRecord(what, nbytes))


def record_boxing(route: BoxingPlan, why: str) -> None:
    """Check a boxing that is about to happen, and log it."""
    if _forbidden.get():
        check(route, why)
    if _OpenLogs.count:
        found = world().state(_OpenLogs)
        if found.logs:
            found.add(BoxingRecord(why or EXPLICIT, route.src, route.dst, route))


def describe(spec: Spec) -> str:
    """Return a spec and its placement as text: ``f32[8, 16] S(0) on cpu[0, 1]``."""
    return f"{spec!r} on {show_placement(spec.placement)}"


def _entry_text(kind: str, dim: int, reduce: str) -> str:
    return (
        f"split({dim})"
        if kind == "split"
        else "broadcast"
        if kind == "broadcast"
        else f"partial_{reduce}"
    )
