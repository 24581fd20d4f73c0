"""Plans: the layouts in which each op of a captured graph takes its operands, as data.

A plan is printed, compared, saved as JSON, edited by hand, and used for the next capture.
`Graph.plan` makes one, `Graph.use_plan` follows one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx

from .._base.atomic_file import write_text
from .._base.pytree import replaced, tensors_in
from .._ops.call_plan import name_of
from .._ops.rules import RULES, Arg, OpDescription, rule_of
from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.gradients import parameter_gather
from .._tensor.pending_tensor import local_of, materialize_all
from ..boxing import box
from ..boxing import plan_boxing as route_of
from ..errors import GraphError
from ..sharding.sbp import Sbp, broadcast, partial_sum
from ..sharding.spec import Spec
from .capture.single_device import SAME

__all__ = [
    "Moved",
    "Operand",
    "PlanFollower",
    "PlannedOp",
    "ShardingPlan",
    "entry",
    "following_plan",
    "plan_of",
]

VERSION: Final = 1
Layout = tuple[str, ...]


@dataclass(frozen=True)
class Operand:
    """A tensor operand of an op, with one layout entry for each axis.

    ``of`` is the op that produced the tensor, ``came`` the layout in which the tensor arrived, and
    ``wanted`` the layout in which the op takes it. A plain tensor has the layout ()."""

    of: str
    came: Layout
    wanted: Layout


@dataclass(frozen=True)
class Moved:
    """A boxing while an op runs.

    ``why`` names the operand and the op. ``moves`` has a line for each step. ``bytes`` is the
    traffic of the busiest rank."""

    why: str
    src: Layout
    dst: Layout
    moves: tuple[str, ...]
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PlannedOp:
    """An op: its ``name`` in the graph, the function called, the module that it belongs to."""

    name: str
    function: str
    module: str
    stage: int | None
    placement: str
    operands: tuple[Operand, ...]
    results: tuple[Layout, ...]
    boxings: tuple[Moved, ...] = field(default=())

    def __str__(self) -> str:
        operands_text = ", ".join(
            f"{o.of} {_show(o.came)}"
            + (f"->{_show(o.wanted)}" if o.came and o.came != o.wanted else "")
            for o in self.operands
        )
        where = f"  @{self.module}" if self.module else ""
        stage = f"  stage {self.stage}" if self.stage is not None else ""
        head = (
            f"{self.name} = {self.function}({operands_text}) -> "
            f"{', '.join(map(_show, self.results)) or 'nothing'}  "
            f"{self.placement}{where}{stage}"
        )
        return "\n".join(
            [head, *(f"    {move}  ({b.why})" for b in self.boxings for move in b.moves)]
        )


@dataclass(frozen=True)
class ShardingPlan:
    """The plan that `Graph.plan` returns. Two plans are equal if all their fields are equal."""

    ops: tuple[PlannedOp, ...]

    @property
    def bytes(self) -> int:
        """The traffic of the busiest rank in one forward pass."""
        return sum(b.bytes for op in self.ops for b in op.boxings)

    @property
    def seconds(self) -> float:
        """The predicted time of the boxings of one forward pass, by the cluster's model."""
        return sum(b.seconds for op in self.ops for b in op.boxings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))

    def __iter__(self) -> Iterator[PlannedOp]:
        return iter(self.ops)

    def __getitem__(self, name: str) -> PlannedOp:
        planned_op = next((op for op in self.ops if op.name == name), None)
        if planned_op is None:
            raise GraphError(
                f"the plan has no op {name!r}; it has {', '.join(op.name for op in self.ops)}"
            )
        return planned_op

    def wanting(self, name: str, operand: int, sbp: Sbp | Sequence[Sbp]) -> ShardingPlan:
        """Return the same plan with another layout for one operand.

        In the new plan, op ``name`` takes operand number ``operand`` as ``sbp``. Operands are
        counted from 0. Raises GraphError if the plan has no such op or operand."""
        op = self[name]
        if not 0 <= operand < len(op.operands):
            raise GraphError(
                f"{name} has {len(op.operands)} operands, there is none with number {operand}"
            )
        wanted = tuple(e.short for e in ([sbp] if isinstance(sbp, Sbp) else sbp))
        operands = tuple(
            dataclasses.replace(o, wanted=wanted) if i == operand else o
            for i, o in enumerate(op.operands)
        )
        return ShardingPlan(
            tuple(dataclasses.replace(o, operands=operands) if o is op else o for o in self.ops)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        The file may be edited. When the plan is used, only the ``wanted`` entries of operands
        count."""
        write_text(
            path,
            json.dumps(
                {"version": VERSION, "ops": [dataclasses.asdict(op) for op in self.ops]}, indent=1
            ),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingPlan:
        """Read what `save` has written. Raises GraphError for a file that is no plan."""
        try:
            content = json.loads(Path(path).read_text())
            if content["version"] != VERSION:
                raise GraphError(
                    f"{os.fspath(path)} is a plan of version {content['version']}, this is version "
                    f"{VERSION}"
                )
            return cls(tuple(_op(op) for op in content["ops"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GraphError(
                f"{os.fspath(path)} is no plan: {type(error).__name__}: {error}"
            ) from error

    def diff(self, other: ShardingPlan) -> str:
        """Return the differences of ``other`` from this plan as text.

        The text has a line for each op that differs, and the traffic of both plans. The text is
        empty if the plans are equal."""
        if self == other:
            return ""
        own_ops, other_ops = {op.name: op for op in self.ops}, {op.name: op for op in other.ops}
        lines = [
            f"- {op.name} = {op.function}: only in this plan"
            for name, op in own_ops.items()
            if name not in other_ops
        ]
        lines += [
            f"+ {op.name} = {op.function}: only in the other plan"
            for name, op in other_ops.items()
            if name not in own_ops
        ]
        for name, a in own_ops.items():
            b = other_ops.get(name)
            if b is not None and a != b:
                lines.append(f"  {name}: {'; '.join(_op_differences(a, b))}")
        return "\n".join(
            [
                *lines,
                (
                    f"  forward traffic: {self.bytes} B -> {other.bytes} B a rank, "
                    f"{self.seconds * 1e3:.3g} ms -> {other.seconds * 1e3:.3g} ms"
                ),
            ]
        )


def _op_differences(a: PlannedOp, b: PlannedOp) -> Iterator[str]:
    for what in ("function", "module", "stage", "placement"):
        if getattr(a, what) != getattr(b, what):
            yield f"{what} {getattr(a, what)} -> {getattr(b, what)}"
    if len(a.operands) != len(b.operands):
        yield f"{len(a.operands)} operands -> {len(b.operands)}"
    for i, (x, y) in enumerate(zip(a.operands, b.operands, strict=False)):
        if x.of != y.of:
            yield f"operand {i} is {x.of} -> {y.of}"
        if x.came != y.came:
            yield f"operand {i} arrives as {_show(x.came)} -> {_show(y.came)}"
        if x.wanted != y.wanted:
            yield f"operand {i} is taken as {_show(x.wanted)} -> {_show(y.wanted)}"
    if a.results != b.results:
        yield f"returns {', '.join(map(_show, a.results))} -> {', '.join(map(_show, b.results))}"
    if a.boxings != b.boxings:
        yield f"moves {sum(m.bytes for m in a.boxings)} B -> {sum(m.bytes for m in b.boxings)} B"


def _show(layout: Layout) -> str:
    return " ".join(layout) or "plain"


def _op(fields: dict[str, Any]) -> PlannedOp:
    return PlannedOp(
        **{
            **fields,
            "operands": tuple(
                Operand(o["of"], tuple(o["came"]), tuple(o["wanted"])) for o in fields["operands"]
            ),
            "results": tuple(map(tuple, fields["results"])),
            "boxings": tuple(
                Moved(
                    **{
                        **b,
                        "src": tuple(b["src"]),
                        "dst": tuple(b["dst"]),
                        "moves": tuple(b["moves"]),
                    }
                )
                for b in fields["boxings"]
            ),
        }
    )


def entry(text: str) -> Sbp:
    """Parse the printed form of an sbp entry. Raises ValueError for any other text."""
    if text == "B":
        return broadcast
    if text == "P":
        return partial_sum
    if text.startswith("P(") and text.endswith(")"):
        return Sbp("partial", reduce=text[2:-1])
    if text.startswith("S("):
        dim, _, unit = text[2:].partition(")")
        return Sbp("split", int(dim), int(unit.removeprefix("/") or 1))
    raise ValueError(f"{text!r} is none of S(0), S(0)/4, B, P, P(max)")


def _layout(spec: Spec) -> Layout:
    return tuple(e.short for e in spec.layout)


# ------------------------------------------------------------------------- plan of a captured graph


def plan_of(graph: fx.Graph) -> ShardingPlan:
    """Return the plan of a logical graph."""
    return ShardingPlan(tuple(_planned_op(node) for node in graph.nodes if "came" in node.meta))


def _planned_op(node: fx.Node) -> PlannedOp:
    names = _names(node)
    came, took = node.meta["came"], node.meta["took"]
    operands = []
    for i, (src, taken) in enumerate(zip(came, took, strict=True)):
        dst = _final_spec(node.meta["boxes"], node.meta["called"], i, taken)
        operands.append(
            Operand(
                names[i] if i < len(names) else "",
                () if src is None else _layout(src),
                () if dst is None else _layout(dst),
            )
        )
    result_specs = node.meta["result_specs"]
    placed = next((s.placement for s in [*result_specs, *came] if s is not None), None)
    moved = []
    for src, dst, why in node.meta["boxes"]:
        route = route_of(src, dst)
        moved.append(
            Moved(
                why or "to_global",
                _layout(src),
                _layout(dst),
                tuple(map(str, route.moves)),
                route.bytes,
                route.seconds,
            )
        )
    target = (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", str(node.target))
    )
    where = f"{placed.type}{placed.ranks.tolist()}" if placed is not None else ""
    return PlannedOp(
        node.name,
        target,
        node.meta.get("module", ""),
        node.meta.get("stage"),
        where,
        tuple(operands),
        tuple(map(_layout, result_specs)),
        tuple(moved),
    )


def _names(node: fx.Node) -> list[str]:
    names: list[str] = []
    fx.node.map_arg(
        (node.args, node.kwargs),
        lambda n: names.append(n.name) if tensors_in(n.meta.get("val"), []) else None,
    )
    return names


def _final_spec(
    boxes: Sequence[tuple[Spec, Spec, str]], called: str, operand: int, taken: Spec | None
) -> Spec | None:
    """Return the spec in which an op took an operand: its last boxing's, or else ``taken``."""
    return next(
        (dst for _, dst, why in reversed(boxes) if why == f"{called}: operand {operand}"), taken
    )


# --------------------------------------------------------------------------------- following a plan


class PlanFollower:
    """A plan that a capture follows: before each op, operands are boxed to planned layouts."""

    def __init__(
        self, plan: ShardingPlan, strict: bool = True, unasked: bool = False, searched: Any = None
    ) -> None:
        """Set the plan to follow and the options.

        ``strict``: raise if an op takes an operand in another layout than the plan's. ``unasked``:
        explicit changes of layout in build() follow the plan, not the code. ``searched``: the
        result of the search that the plan comes from, if any."""
        self.plan, self.next, self.strict, self.unasked, self.searched = (
            plan,
            0,
            strict,
            unasked,
            searched,
        )
        self._moved: list[
            tuple[GlobalTensor, GlobalTensor, int]
        ] = []  # for the current op: (operand, boxed operand, its version then)

    def before(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments, boxed to the planned layouts.

        Raises GraphError if an operand cannot be boxed to its planned layout."""
        self._moved.clear()
        op = self._expected_op()
        tensors = tensors_in(kwargs, tensors_in(args, []))
        if op is None or op.function not in _spellings(func) or len(op.operands) != len(tensors):
            return (
                args,
                kwargs,
            )  # no tensor results, or the plan is of another graph: `after` reports that
        if self.unasked and op.function in SAME and op.operands[0].wanted:
            return args[:1], {"sbp": [entry(e) for e in op.operands[0].wanted]}
        rule = rule_of(func, kwargs)
        inplace = rule is not None and rule.inplace
        called = name_of(func)
        boxed_operands = iter(
            [
                t if inplace and i == 0 else self._box_to_plan(op, i, t, called)
                for i, t in enumerate(tensors)
            ]
        )
        return replaced(args, boxed_operands), replaced(kwargs, boxed_operands)

    def _box_to_plan(self, op: PlannedOp, i: int, t: Any, called: str) -> Any:
        wanted = op.operands[i].wanted
        if (
            not isinstance(t, GlobalTensor)
            or not wanted
            or _layout(t._spec) == wanted
            or t._spec.shown is not t._spec
        ):
            return t  # the op itself gathers what is stored in shares
        try:
            spec = t._spec.replace(layout=[entry(e) for e in wanted])
            if len(wanted) != t._spec.placement.axes:
                raise ValueError(f"{len(wanted)} entries for {t._spec.placement.axes} axes")
            why = f"{called}: operand {i}"
            materialize_all(t)
            is_param = "_is_param" in t.__dict__ and type(t) in ORDINARY
            if is_param and parameter_gather.gather_axes(t._spec, spec):
                # Parameters are gathered as ops gather them. Left to the op, the parameter would be
                # taken in its stored layout where that is cheaper than the plan's.
                boxed = GlobalTensor.wrap(
                    parameter_gather.gather_param(t, t._spec, spec, why), spec
                )
            else:
                boxed = GlobalTensor.wrap(box(t._local, t._spec, spec, why=why), spec)
            self._moved.append((t, boxed, boxed._local._version))
            return boxed
        except (ValueError, RuntimeError) as error:
            what = f"operand {i} ({op.operands[i].of}, {t._spec!r})"
            raise GraphError(
                f"{op.name}: the plan wants {what} as {_show(wanted)}, which is impossible: {error}"
            ) from error

    def written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copy what the op has written into boxed operands to the originals.

        An op may write running statistics, for example."""
        quiet = args[1:3] if func in _QUIET and kwargs.get(_QUIET[func]) else ()
        for t, boxed, version in self._moved:
            if boxed._local._version != version or any(boxed is a for a in quiet):
                with torch.no_grad():
                    local_of(t).copy_(
                        box(boxed._local, boxed._spec, t._spec, why="what an op has written")
                    )

    def after(self, node: fx.Node, func: Any, args: Any, kwargs: Any) -> None:
        """Check that the op that has run is the plan's next op and took the planned layouts.

        Raises GraphError if the op took an operand in another layout, or if the plan has another op
        here."""
        op = self._expected_op()
        target = (
            node.target
            if isinstance(node.target, str)
            else getattr(node.target, "__name__", str(node.target))
        )
        if op is None or op.function != target or len(op.operands) != len(node.meta["came"]):
            said = (
                f"{op.name} = {op.function} of {len(op.operands)} tensors"
                if op is not None
                else f"nothing more after {len(self.plan.ops)} ops"
            )
            description = f"{node.name} = {target} of {len(node.meta['came'])} tensors"
            raise GraphError(
                f"the plan is of another graph: build() calls {description}, where the plan has "
                f"{said}"
            )
        self.next += 1
        for i, taken in enumerate(node.meta["took"]):
            got = _final_spec(node.meta["boxes"], node.meta["called"], i, taken)
            wanted = op.operands[i].wanted
            if self.strict and wanted and got is not None and _layout(got) != wanted:
                raise GraphError(
                    f"{op.name} = {op.function} (in {op.module or 'build()'}): the plan wants "
                    f"operand {i} ({op.operands[i].of}) as {_show(wanted)}, "
                    f"but the op takes it as {_show(_layout(got))}\n"
                    f"{_signatures_text(func, args, kwargs)}"
                )

    def finish(self) -> None:
        """Raise GraphError if build() has ended and the plan has more ops."""
        op = self._expected_op()
        if op is not None:
            where = f"{op.name} = {op.function}, its op {self.next} of {len(self.plan.ops)}"
            raise GraphError(
                "the plan is of another graph: build() has ended, but the plan goes on with "
                f"{where}"
            )

    def _expected_op(self) -> PlannedOp | None:
        return self.plan.ops[self.next] if self.next < len(self.plan.ops) else None


#: Functions that write running statistics (their second and third argument) without autograd seeing
#: the write. They write only if the argument named here is true.
_QUIET: Final = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}


def _spellings(func: Any) -> set[str]:
    """Return the names under which a graph may show a function: its own and the operator's."""
    name = getattr(func, "__name__", "")
    return {name, name.strip("_"), {"__get__": "getattr", "__set__": "setattr"}.get(name, name)}


def _signatures_text(func: Any, args: Any, kwargs: Any) -> str:
    """Return the signatures of an op on each axis, for messages."""
    rule, tensors = RULES.get(func), tensors_in(kwargs, tensors_in(args, []))
    found = [t._spec.shown for t in tensors if isinstance(t, GlobalTensor)]
    if rule is None or not found:
        return "it has no rule, so it takes every operand replicated: B"
    placed = found[0].placement
    specs = [
        t._spec.shown
        if isinstance(t, GlobalTensor)
        else Spec.make(t.shape, t.dtype, placed, [broadcast] * placed.axes)
        for t in tensors
    ]
    op = OpDescription([Arg(i, s) for i, s in enumerate(specs)], function=func)
    these = iter(op.args)
    try:
        rule.describe(op, *replaced(args, these), **replaced(kwargs, these))
    except (TypeError, ValueError, IndexError) as error:
        return (
            f"its rule does not know this form of the call ({type(error).__name__}: {error}), so "
            "it takes every operand replicated: B"
        )
    if op.composite is not None or op.whole_call:
        return (
            "it is composed of other ops, or takes its operands replicated: box the operands with "
            "to_global in build() instead"
        )
    lines = []
    for axis in range(placed.axes):
        signatures = dict.fromkeys(
            "(" + ", ".join(e.short for e in s.ins) + ")" for s in op.signatures(axis)
        )
        lines.append(f"  axis {axis} of {name_of(func)}'s operands: {' or '.join(signatures)}")
    return "its rule admits\n" + "\n".join(lines)


@contextlib.contextmanager
def following_plan(
    applied: PlanFollower, hooks: Callable[[Any], Any], logical: Any
) -> Iterator[None]:
    """Enter ``hooks(logical)`` while the recorder ``logical`` follows a plan.

    On exit, raises GraphError if the plan has more ops."""
    logical.applied = applied
    with hooks(logical):
        yield
    logical.applied.finish()
