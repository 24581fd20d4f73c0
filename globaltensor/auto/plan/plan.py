"""A plan as data: layouts of tensors and calls on a mesh, price, proof and memory.

The searches make plans. Users read, save and load them, and apply them to a model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..._base.atomic_file import write_text
from ...errors import PlanError
from ..solver import proven, relative_gap

__all__ = [
    "Alternative",
    "LayoutChange",
    "Lost",
    "OtherChoice",
    "PlacedTensor",
    "Plan",
    "PlannedCall",
]

VERSION: Final = 2
Layout = tuple[str, ...]  # one entry for each axis of the mesh, as printed: S(0), B, P


@dataclass(frozen=True)
class LayoutChange:
    """A change of layout between the call that makes a tensor and a call that takes it.

    ``taker`` is that call: several names joined by spaces where calls share the change, "output"
    for a result of the model. ``forward`` is seconds of the forward pass, ``backward`` seconds of
    moving the gradient back. ``forward_collectives`` and ``backward_collectives`` are the
    collectives of each. ``bytes`` is the size of the global tensor.

    Where ``src`` equals ``dst`` only the gradient moves: the gradient of a parameter that several
    ranks hold is summed. If a parameter is gathered again in backward, ``forward`` includes both
    times.
    """

    value: str
    taker: str
    src: Layout
    dst: Layout
    forward: float
    backward: float
    bytes: int
    forward_collectives: str = ""
    backward_collectives: str = ""

    @property
    def takers(self) -> tuple[str, ...]:
        return tuple(self.taker.split())

    @property
    def first(self) -> str:
        """The first call that takes the tensor; empty if the new layout is only for storage."""
        return self.taker.split()[0] if self.taker else ""


@dataclass(frozen=True)
class OtherChoice:
    """An alternative way to run a call, or an alternative layout of a given tensor.

    The rest of the plan is unchanged, except for neighbouring tensors, which follow. ``extra`` is
    the seconds a step that it costs more. A negative ``extra`` means that the memory limit or a
    time limit of the search ruled the choice out. ``memory`` is the bytes a rank by which the peak
    grows. ``because`` names the cause of the difference.
    """

    takes: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    extra: float
    memory: int
    because: str


@dataclass(frozen=True)
class PlannedCall:
    """A call of the plan with its layouts and its price.

    ``wanted`` and ``results`` are the layouts of its operands and its results. ``forward`` and
    ``backward`` are seconds of computing, ``moving`` seconds of the call's own communication.
    ``share`` is the fraction of the work that one rank does.
    """

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
    bytes: int = 0  # of the results on one rank
    # the time at which the call runs, in ``Plan.over_time``; its backward runs at ``Plan.moments``
    # minus this
    number: int = -1
    again: bool = False  # the call is recomputed in backward


@dataclass(frozen=True)
class PlacedTensor:
    """A parameter, buffer or input.

    ``kind`` says which of them it is. ``bytes`` is the size of its local tensor.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    bytes: int
    others: tuple[OtherChoice, ...] = ()  # each ``takes`` nothing and ``gives`` one layout


@dataclass(frozen=True)
class Lost:
    """The part of the search space that was lost to an error in the rule of a function.

    ``ways`` counts the layouts of operands, over all of the ``calls`` together. With ``ways=0`` the
    work of the calls could not be counted, so they are priced by the bytes that they read and
    write.
    """

    function: str
    error: str
    ways: int
    calls: int


@dataclass(frozen=True)
class Alternative:
    """An alternative to the plan, priced by the same model.

    ``cost`` is inf where the alternative is impossible; ``why`` gives the reason.
    """

    cost: float
    memory: int
    fits: bool
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """A plan, as `flow.auto.plan` returns it.

    Costs are in seconds a step, memory is in bytes a rank. ``cost`` is what the search has
    minimised. ``bound`` is a lower bound of it over all plans in the search space; if both are
    equal, the plan is optimal. ``seconds`` is the step time that the simulator predicts, where
    communication may overlap with computing.
    """

    cluster: str
    mesh: tuple[int, ...]
    cost: float
    bound: float
    seconds: float
    memory: int
    limit: int | None
    training: bool
    placed: tuple[PlacedTensor, ...]
    calls: tuple[PlannedCall, ...]
    changes: tuple[LayoutChange, ...]
    alternatives: dict[str, Alternative] = field(default_factory=dict)
    # (time, bytes a rank from then on): forward calls run at 0, 1, ..., backward calls after those
    over_time: tuple[tuple[int, int], ...] = ()
    #: The other choices: stages, micro-batches, recomputation, ZeRO. "reshard_after_forward":
    #: gathered parameters are freed after each use, and gathered again in backward.
    choices: dict[str, Any] = field(default_factory=dict)
    # the log of the search, with its duration
    search: dict[str, Any] = field(default_factory=dict, compare=False)
    # the terms of the cost: seconds of "computing", "moving" and "updating", minus "hidden"
    cost_breakdown: dict[str, float] = field(default_factory=dict)
    # the simulated step as a Chrome trace; empty if no step was simulated
    timeline: dict[str, Any] = field(default_factory=dict)
    moments: int = 0  # the length of the time axis of ``over_time``
    # the terms of the peak memory: bytes of "parameters", "gradients", ...
    memory_breakdown: dict[str, int] = field(default_factory=dict)
    lost: tuple[Lost, ...] = ()  # the parts of the search space that were lost to errors
    source: str = ""  # the origin of the cluster's figures (`Cluster.origin`)
    # the name of the model, such as the name of its class; empty if it is not known
    model: str = field(default="", compare=False)
    # the loss and the optimizer that the search has assumed; empty if the graph has its own
    assumed: str = field(default="", compare=False)

    @property
    def gap(self) -> float:
        """The largest possible distance of the cost from the optimum, as a fraction of the cost.

        It is 0 if the plan is optimal."""
        return relative_gap(self.cost, self.bound)

    @property
    def optimal(self) -> bool:
        """Return True if no plan in the search space costs less, within the precision of floats.

        It is False if errors have kept anything from the search. See `solver.proven`.
        """
        return not self.lost and proven(self.cost, self.bound)

    @property
    def parameters(self) -> dict[str, Layout]:
        """The layout of each parameter, by its path."""
        return {g.name: g.layout for g in self.placed if g.kind == "parameter"}

    def report(self, verbose: bool = False) -> str:
        """Return a report for a terminal.

        It has the cost with its proof, the use of memory, the layouts of parameters, the changes of
        layout, and the cost of other choices. It ends in the cost, the memory and the layouts in
        short, and in how to apply the plan. ``verbose`` adds the times of the search, the size of
        its problem and the log of its solver.
        """
        from .report import report

        return report(self, verbose)

    def explain(self, path: str) -> str:
        """Explain the plan of a module, parameter, call or tensor.

        ``path`` is its path, the beginning of paths, or a pattern such as ``blocks.*.up``. The text
        has its layout, its changes of layout with their prices, and the cost of other choices.
        Raises PlanError for a path that is not in the plan; the message names similar paths.
        """
        from .explain import explain

        return explain(self, path)

    def save_html(self, path: str | os.PathLike[str], *, model: str | None = None) -> None:
        """Write the report as a single self-contained HTML page.

        It shows the devices and what each holds, calls by module, changes of layout, memory over
        time, timeline and alternatives. ``model`` is the name of the model in the title, by default
        that of the plan.
        """
        from .html import page

        write_text(path, page(self if model is None else dataclasses.replace(self, model=model)))

    def __str__(self) -> str:
        from .report import summary

        return summary(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        write_text(path, self.to_json())

    def to_json(self) -> str:
        """Return the plan as JSON text. A cost of inf becomes null, and keys have no spaces."""
        fields = {"version": VERSION, **dataclasses.asdict(self)}
        for a in fields["alternatives"].values():
            a["cost"] = a["cost"] if math.isfinite(a["cost"]) else None
        for field_name in _NAMED_FIELDS:
            fields[field_name] = {_JSON_KEYS.get(k, k): v for k, v in fields[field_name].items()}
        return json.dumps(fields, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` has written. Raises PlanError for a file that is no plan."""
        try:
            fields = json.loads(Path(path).read_text())
            if fields.pop("version") != VERSION:
                raise PlanError(
                    f"{os.fspath(path)} is a plan of another version; this version is {VERSION}"
                )
            for field_name in _NAMED_FIELDS:
                fields[field_name] = {_NAMES.get(k, k): v for k, v in fields[field_name].items()}
            return cls(
                **{name: _READ.get(name, _unchanged)(value) for name, value in fields.items()}
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"{os.fspath(path)} is no plan: {type(error).__name__}: {error}"
            ) from error


#: The fields whose keys are names that reports show, and the keys that replace them in JSON.
#: `Plan.load` accepts both, so files with the names keep their version.
_NAMED_FIELDS: Final = ("alternatives", "cost_breakdown", "memory_breakdown")
_JSON_KEYS: Final = {
    "data parallel": "data_parallel",
    "tensor parallel": "tensor_parallel",
    "fully sharded (ZeRO-3)": "fully_sharded",
    "computing and moving": "computing_and_moving",
    "parameters and gradients": "parameters_and_gradients",
    "inputs and buffers": "inputs_and_buffers",
    "gathered parameters": "gathered_parameters",
    "gradients and optimizer": "gradients_and_optimizer",
}
_NAMES: Final = {key: name for name, key in _JSON_KEYS.items()}


def _unchanged(value: Any) -> Any:
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
    "mesh": _tuples, "over_time": _tuples, "placed": _records(PlacedTensor),
    "calls": _records(PlannedCall), "changes": _records(LayoutChange),
    "lost": _records(Lost),
    "alternatives": lambda value: {name: Alternative(**{**a,
        "cost": math.inf if a["cost"] is None else a["cost"]}) for name, a in value.items()},
}  # fmt: skip
