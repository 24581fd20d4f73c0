"""`boxing_log()` records the boxings that happen, `no_boxing()` forbids them.

Users open both. `box` and native ops over split dims report to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..errors import BoxingError
from ..sharding.spec import Spec
from .moves import show_bytes, show_placement
from .planner import BoxingPlan

__all__ = [
    "BoxingRecord",
    "ExchangeRecord",
    "boxing_log",
    "check",
    "exchange",
    "forbidden",
    "no_boxing",
    "record_boxing",
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

    def __str__(self) -> str:
        return (
            f"{self.op}: {describe(self.src)} -> {describe(self.dst)}  "
            f"{'+'.join(m.kind for m in self.plan.moves) or 'nothing'}  "
            f"{show_bytes(self.bytes)}"
        )


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """A record of an op's exchange with other ranks because a dim stayed split.

    ``op``: the kind of exchange. ``bytes``: the bytes that this rank received.
    """

    op: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.op}  exchange  {show_bytes(self.bytes)}"


_logs: ContextVar[tuple[list[Any], ...]] = ContextVar("globaltensor_boxing_logs", default=())
_forbidden: ContextVar[bool] = ContextVar("globaltensor_no_boxing", default=False)


@contextmanager
def boxing_log() -> Iterator[list[Any]]:
    """Collect every `BoxingRecord` and every `ExchangeRecord` of this rank in the block.

    Explicit boxings and those of backward are included. An `ExchangeRecord` is of an exchange
    inside an op.

    >>> with boxing_log() as log:
    ...     pass
    >>> [record.op for record in log]
    []
    """
    log: list[Any] = []
    token = _logs.set((*_logs.get(), log))
    try:
        yield log
    finally:
        _logs.reset(token)


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
    target = ", ".join(_spell(e.kind, e.dim, e.reduce) for e in route.dst.layout)
    placement = (
        "" if route.src.placement is route.dst.placement else f"placement={route.dst.placement!r}, "
    )
    raise BoxingError(
        f"{why}: {describe(route.src)} would be boxed to {describe(route.dst)} "
        f"({', '.join(m.kind for m in route.moves)}, {show_bytes(route.bytes)} a rank), "
        f"but no_boxing() forbids hidden traffic. Write the move out with "
        f"x.to_global({placement}sbp=[{target}]) before the op, or leave no_boxing()"
    )


def exchange(what: str, nbytes: int, explicit: bool = False) -> None:
    """Check an exchange inside an op that is about to happen, and log it.

    ``explicit``: the user has asked for exactly this exchange. Raises BoxingError inside
    `no_boxing` otherwise.
    """
    if _forbidden.get() and not explicit:
        raise BoxingError(
            f"{what}: the op would exchange {show_bytes(nbytes)} with other ranks, since it works "
            f"along a split dim, but no_boxing() forbids hidden traffic. "
            "Make that dim whole with x.to_global(sbp=...) before the op, or leave no_boxing()"
        )
    for log in _logs.get():
        log.append(ExchangeRecord(what, nbytes))


def record_boxing(route: BoxingPlan, why: str, logs: tuple[list[Any], ...] | None = None) -> None:
    """Check a boxing that is about to happen, and log it."""
    if _forbidden.get():
        check(route, why)
    logs = _logs.get() if logs is None else logs
    if logs:
        record = BoxingRecord(why or EXPLICIT, route.src, route.dst, route)
        for log in logs:
            log.append(record)


def current_logs() -> tuple[list[Any], ...]:
    """Return the logs that are open now.

    Backward runs in threads of autograd, which no context reaches. So a boxing remembers its logs.
    """
    return _logs.get()


def describe(spec: Spec) -> str:
    """Return a spec and its placement as text: ``f32[8, 16] S(0) on cpu[0, 1]``."""
    return f"{spec!r} on {show_placement(spec.placement)}"


def _spell(kind: str, dim: int, reduce: str) -> str:
    return (
        f"split({dim})"
        if kind == "split"
        else "broadcast"
        if kind == "broadcast"
        else f"partial_{reduce}"
    )
