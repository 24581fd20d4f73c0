"""A plan: how each tensor of a model lies on a mesh and what each call takes, with its price, its
proof and its memory. It is data."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..._base.writable_path import write_text
from ...errors import GlobalTensorError
from ..solver import proven

__all__ = [
    "Alternative",
    "LayoutChange",
    "Lost",
    "OtherChoice",
    "PlacedTensor",
    "Plan",
    "PlanError",
    "PlannedCall",
]

VERSION: Final = 1
Layout = tuple[str, ...]  # one entry for each axis of the mesh, as printed: S(0), B, P


class PlanError(GlobalTensorError):
    """No plan can be made, or a file holds none."""


@dataclass(frozen=True)
class LayoutChange:
    """A change of layout between where a tensor is made and a call that takes it (``taker``;
    several where they share it, joined by spaces; "output" for whoever gets a result). Seconds of
    the forward pass and of the gradient's way back, and the collectives that each is; ``bytes`` of
    the whole tensor. Where ``src`` is ``dst`` only the gradient moves: that of a parameter which
    several ranks hold is summed. If a parameter is gathered again in backward, ``forward`` is of
    both times."""

    value: str
    taker: str
    src: Layout
    dst: Layout
    forward: float
    backward: float
    bytes: int
    there: str = ""
    back: str = ""

    @property
    def takers(self) -> tuple[str, ...]:
        return tuple(self.taker.split())

    @property
    def first(self) -> str:
        """The first that takes it; nothing where it is only kept so."""
        return self.taker.split()[0] if self.taker else ""


@dataclass(frozen=True)
class OtherChoice:
    """Another way to run a call, or for something given to lie, the rest of the plan as it is but
    for the tensors beside it, which follow. ``extra``: seconds a step that it costs more (less than
    0: the memory limit or a bound on the search's time is why it was not taken), ``memory``: bytes
    a rank that the peak grows, ``because``: what makes the difference."""

    takes: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    extra: float
    memory: int
    because: str


@dataclass(frozen=True)
class PlannedCall:
    """One call: how it takes its operands and gives its results, seconds of computing forward and
    backward, and of what it communicates itself. ``share`` is the part of the work one rank
    does."""

    name: str
    function: str
    module: str
    where: str
    operands: tuple[str, ...]
    wanted: tuple[Layout, ...]
    results: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the results
    forward: float
    backward: float
    moving: float
    share: float
    others: tuple[OtherChoice, ...] = ()
    bytes: int = 0  # what one rank holds of the results
    # the time at which it runs, in ``Plan.over_time``; its backward runs at ``Plan.moments`` less
    # this
    number: int = -1
    again: bool = False  # whether it is recomputed in backward


@dataclass(frozen=True)
class PlacedTensor:
    """A parameter, buffer or input: ``kind`` is which, ``bytes`` what one rank holds of it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    bytes: int
    others: tuple[OtherChoice, ...] = ()  # each ``takes`` nothing and ``gives`` one layout


@dataclass(frozen=True)
class Lost:
    """What an error in the rule of a function has kept from the search: so many ways for operands
    to lie, of so many calls together. 0 ways: the work of the calls could not be counted, and they
    are priced by what they read and write."""

    function: str
    error: str
    ways: int
    calls: int


@dataclass(frozen=True)
class Alternative:
    """Another way that has been priced by the same model. ``cost`` is inf where it cannot be done;
    ``why`` says so."""

    cost: float
    memory: int
    fits: bool
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """What `flow.auto.plan` gives. Costs in seconds a step, memory in bytes a rank.

    ``cost`` is what the search has minimised, ``bound`` a lower bound of it over all plans in its
    space: equal, the plan is optimal. ``seconds``: the step time that the simulator foretells,
    where traffic may run beside computing.
    """

    cluster: str
    mesh: tuple[int, ...]
    cost: float
    bound: float
    seconds: float
    memory: int
    limit: int | None
    training: bool
    given: tuple[PlacedTensor, ...]
    calls: tuple[PlannedCall, ...]
    changes: tuple[LayoutChange, ...]
    alternatives: dict[str, Alternative] = field(default_factory=dict)
    # (time, bytes a rank from then on): calls forward are 0, 1, ..., backward goes on from there
    over_time: tuple[tuple[int, int], ...] = ()
    #: What else was chosen: stages, micro-batches, recomputation, ZeRO; "freed": gathered
    #: parameters are let go of, and gathered again in backward.
    choices: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(
        default_factory=dict, compare=False
    )  # how it was found, and how long it took
    # what the cost is made of: seconds of "computing", "moving" and "updating", less what is
    # "hidden"
    spent: dict[str, float] = field(default_factory=dict)
    timeline: dict[str, Any] = field(
        default_factory=dict
    )  # of the simulated step, as a Chrome trace; nothing where none has been simulated
    moments: int = 0  # how long the time of ``over_time`` is
    held: dict[str, int] = field(
        default_factory=dict
    )  # what the memory at its peak is made of: bytes of "parameters", "gradients", ...
    lost: tuple[Lost, ...] = ()  # what errors have kept from the search
    source: str = ""  # where the cluster's figures come from (`Cluster.origin`)

    @property
    def gap(self) -> float:
        """How far from the bound the cost may be, as a part of the cost."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0

    @property
    def optimal(self) -> bool:
        """Return True if no plan in the space of the search costs less, as far as floats tell
        (`solver.proven`), and errors have kept nothing from the search."""
        return not self.lost and proven(self.cost, self.bound)

    @property
    def parameters(self) -> dict[str, Layout]:
        """Path of each parameter -> how it lies."""
        return {g.name: g.layout for g in self.given if g.kind == "parameter"}

    def report(self) -> str:
        """What it costs and why that is the least, what fills the memory, how parameters lie, what
        moves, and what other ways would cost; for a terminal."""
        from .report import report

        return report(self)

    def explain(self, path: str) -> str:
        """Of a module, parameter, call or tensor (its path, the beginning of paths, or a pattern
        such as ``blocks.*.up``): how it lies, what moves there at what price, and what other ways
        would cost. Raises PlanError for a path that is not in the plan, naming some like it."""
        from .explain import explain

        return explain(self, path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a page that needs nothing else: calls by module, changes of layout,
        memory over time, timeline, alternatives."""
        from .html import page

        write_text(path, page(self))

    def __str__(self) -> str:
        from .report import summary

        return summary(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        write_text(path, self.to_json())

    def to_json(self) -> str:
        """As JSON; what costs inf costs null there."""
        told = {"version": VERSION, **dataclasses.asdict(self)}
        for a in told["alternatives"].values():
            a["cost"] = a["cost"] if math.isfinite(a["cost"]) else None
        return json.dumps(told, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what `save` has written. Raises PlanError for a file that is no plan."""
        try:
            told = json.loads(Path(path).read_text())
            if told.pop("version") != VERSION:
                raise PlanError(f"{os.fspath(path)} is a plan of another version than {VERSION}")
            return cls(**{name: _READ.get(name, _same)(value) for name, value in told.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"{os.fspath(path)} is no plan: {type(error).__name__}: {error}"
            ) from error


def _same(value: Any) -> Any:
    return value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _records(kind: Any) -> Any:
    def read(value: Any) -> Any:
        return tuple(
            kind(
                **{
                    k: _records(OtherChoice)(v) if k == "others" else _tuples(v)
                    for k, v in record.items()
                }
            )
            for record in value
        )

    return read


_READ: Final = {
    "mesh": _tuples, "over_time": _tuples, "given": _records(PlacedTensor),
    "calls": _records(PlannedCall), "changes": _records(LayoutChange),
    "lost": _records(Lost),
    "alternatives": lambda value: {name: Alternative(**{**a,
        "cost": math.inf if a["cost"] is None else a["cost"]}) for name, a in value.items()},
}  # fmt: skip
