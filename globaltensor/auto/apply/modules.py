"""Apply a plan to an eager model: ``flow.parallelize(model, placement, plan)``.

`parallelize` calls `apply_plan` through `MODEL_PLANNERS`. The plan may come from any search or from
a file. The eager search (auto/apply/eager.py) uses the hooks. Parameters are boxed to their planned
layouts, and modules are assigned to the plan's stages. Modules without children box their inputs
and outputs to the planned layouts. Functions between modules choose their layouts automatically
(_ops/rules/strategy.py). Micro-batches, their schedule and ZeRO need a graph: `Config.follow`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..._base import torch_private
from ..._base.pytree import object_tensors, replaced_in_objects
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.gradients import parameter_gather
from ...boxing.moves import Layout
from ...errors import PlanError
from ...graph.module_settings import ModuleSettings
from ...graph.pipeline.split_model import staged
from ...graph.sharding_plan import entry
from ...parallel.module_to_global import module_to_global
from ...parallel.parallelize import MODEL_PLANNERS
from ...sharding.placement import Placement
from ...sharding.sbp import broadcast
from ...sharding.spec import layout_for
from ..plan.plan import Plan, PlannedCall

__all__ = ["apply_plan", "install_layout_hooks", "install_reshard_hooks"]


@MODEL_PLANNERS.register(Plan)
def apply_plan(model: nn.Module, placement: Placement, plan: Plan) -> nn.Module:
    """Shard and place a model by ``plan`` on the ranks of ``placement``, in their order.

    Collective. Returns the model, which is changed in place. Raises PlanError if the plan is for
    another number of ranks or for another model, or if no module starts to run in one of its
    stages.
    """
    plan = _match_model_paths(plan, model)
    lanes = _lane_placements(plan, placement)
    layouts = {g.name: _layout(g.layout) for g in plan.placed}
    whole = (broadcast,) * len(plan.mesh)

    def sbp(path: str, tensor: torch.Tensor) -> Layout:
        return layouts.get(path, whole)

    if len(lanes) == 1:
        module_to_global(model, lanes[0], sbp)
    else:
        stages = plan.choices["stages"]
        staged(
            model,
            [lanes[stage["lane"]] for stage in stages],
            _assign_modules_to_stages(plan, model),
            sbp,
        )
    if lanes[0] is not placement:
        model.register_forward_pre_hook(
            _FirstStageInputHook(
                lanes[0], [_layout(g.layout) for g in plan.placed if g.kind == "input"]
            ),
            with_kwargs=True,
        )
    install_layout_hooks(model, plan)
    for path in _recomputed(plan, model):
        model.get_submodule(path).__dict__.setdefault(
            "_stage", ModuleSettings()
        ).activation_checkpointing = True
    install_reshard_hooks(model, plan)
    model.__dict__["_automatic_plan"] = plan
    return model


def _layout(entries: Sequence[str]) -> Layout:
    return tuple(map(entry, entries))


def _match_model_paths(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with paths as in ``model``.

    In a plan made for a graph, paths begin with the name of the graph's module. Raises PlanError if
    a parameter of the plan is not in the model, or has another shape there."""
    shapes = {path: tuple(t.shape) for path, t in model.named_parameters()}
    planned = {g.name: g.shape for g in plan.placed if g.kind == "parameter"}
    strange = sorted(path for path, shape in planned.items() if shapes.get(path) != shape)
    if not strange:
        return plan
    names = {path.partition(".")[0] for path in planned}
    inner = {path.partition(".")[2]: shape for path, shape in planned.items()}
    if len(names) == 1 and all(shapes.get(path) == shape for path, shape in inner.items()):
        return _strip_path_prefix(plan, f"{names.pop()}.")
    path = strange[0]
    has = (
        f"it is {list(shapes[path])} there"
        if path in shapes
        else f"which has none of that name (but {', '.join(list(shapes)[:4])}, ...)"
    )
    raise PlanError(
        f"the plan is of another model than this {type(model).__name__}: parameter {path} is "
        f"{list(planned[path])} in the plan, {has}"
    )


def _strip_path_prefix(plan: Plan, prefix: str) -> Plan:
    def strip_prefix(path: str) -> str:
        return (
            path.removeprefix(prefix)
            if path.startswith(prefix)
            else ""
            if path == prefix[:-1]
            else path
        )

    placed = tuple(dataclasses.replace(g, name=strip_prefix(g.name)) for g in plan.placed)
    calls = tuple(
        dataclasses.replace(
            c, module=strip_prefix(c.module), operands=tuple(map(strip_prefix, c.operands))
        )
        for c in plan.calls
    )
    return dataclasses.replace(plan, placed=placed, calls=calls)


def _lane_placements(plan: Plan, placement: Placement) -> list[Placement]:
    """Return the placement of each lane of the plan.

    A lane has the shape of the plan's mesh. The lanes share out the ranks of ``placement`` in
    order. Raises PlanError if the number of ranks differs."""
    size = math.prod(plan.mesh)
    count = 1 + max((stage["lane"] for stage in plan.choices.get("stages", ())), default=0)
    if placement.size != count * size:
        shape = "x".join(map(str, plan.mesh)) or "1"
        meshes = f"{count} times a mesh of {shape}" if count > 1 else f"a mesh of {shape}"
        mend = "plan for as many, by mesh=... or cluster.with_size(n)"
        ranks = f"{count * size} rank{'s' if count * size > 1 else ''}"
        raise PlanError(
            f"the plan is for {ranks} ({meshes}), {placement!r} has {placement.size}: {mend}"
        )
    if count == 1 and placement.shape == plan.mesh:
        return [placement]
    ranks = placement.ranks.reshape(-1)
    return [
        Placement(placement.type, ranks[k * size : (k + 1) * size].reshape(plan.mesh))
        for k in range(count)
    ]


def _assign_modules_to_stages(plan: Plan, model: nn.Module) -> list[tuple[str, int]]:
    """Return (path, stage) for the outermost modules whose calls are all in one stage.

    A module without children that is called in several stages is assigned to the first of them. A
    module that does not run itself, but whose parameters others use, is assigned to the first stage
    that uses them. A module without parameters runs in the stage that calls it. It is left out if
    it is called in several stages, or if it is not in a list or a Sequential. Raises PlanError if
    no module starts to run in a stage."""
    places = {call.name: k for k, call in enumerate(plan.calls)}
    under: dict[str, set[int]] = {}  # module -> stages of the calls in it
    users: dict[str, int] = {}  # parameter -> first stage that uses it
    for number, stage in enumerate(plan.choices["stages"]):
        a, b = (places[name] for name in stage["calls"]) if stage["calls"] else (0, -1)
        for call in plan.calls[a : b + 1]:
            for path in _ancestor_paths(call.module):
                under.setdefault(path, set()).add(number)
            for name in call.operands:
                users.setdefault(name, number)
    seen: set[int] = set()
    several = {id(m) for path, m in model.named_modules() if len(under.get(path, ())) > 1}

    def walk(module: nn.Module, prefix: str, in_row: bool) -> Iterator[tuple[str, int]]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if id(child) in seen:
                continue
            seen.add(id(child))
            held, stages = (
                [f"{path}.{n}" for n, _ in child.named_parameters()],
                under.get(path, set()),
            )
            lists = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if not stages or (not held and (len(stages) > 1 or not in_row)):
                if held:
                    yield path, min((users[p] for p in held if p in users), default=0)
            elif (lists or any(id(m) in several for m in child.modules())) and any(
                True for _ in child.children()
            ):
                yield from walk(child, f"{path}.", lists or isinstance(child, nn.Sequential))
            else:
                yield path, min(stages)

    parts = sorted(
        walk(model, "", isinstance(model, (nn.ModuleList, nn.Sequential))), key=lambda part: part[1]
    )
    for number, stage in enumerate(plan.choices["stages"]):
        if number and number not in {k for _, k in parts}:
            where = f"stage {number} of the plan begins at {', '.join(stage['calls'][:1])}"
            raise PlanError(
                f"{where}, and no module of the model starts to run in it: it cannot be cut there"
            )
    return parts


def _ancestor_paths(path: str) -> Iterator[str]:
    """Return the paths of a module's ancestors and its own path, the outermost first.

    The model itself is left out."""
    parts = path.split(".") if path else []
    return (".".join(parts[: k + 1]) for k in range(len(parts)))


def _recomputed(plan: Plan, model: nn.Module) -> list[str]:
    """Return the outermost modules all of whose calls are recomputed in backward."""
    again = {p for c in plan.calls if c.again for p in _ancestor_paths(c.module)} - {
        p for c in plan.calls if not c.again for p in _ancestor_paths(c.module)
    }
    return [
        path
        for path, _ in model.named_modules()
        if path in again and path.rpartition(".")[0] not in again
    ]


class _FirstStageInputHook:
    """A forward pre-hook of the model that boxes its inputs to the first stage's placement.

    They get their planned layouts there if the plan has as many inputs; otherwise they keep their
    sbp."""

    def __init__(self, where: Placement, layouts: Sequence[Layout]) -> None:
        self.where, self.layouts = where, layouts

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = object_tensors(kwargs, object_tensors(args, []))
        known = self.layouts if len(self.layouts) == len(tensors) else [None] * len(tensors)
        boxed_inputs = iter(
            [self.box_to_stage(t, layout) for t, layout in zip(tensors, known, strict=True)]
        )
        return replaced_in_objects(args, boxed_inputs), replaced_in_objects(kwargs, boxed_inputs)

    def box_to_stage(self, t: Any, layout: Layout | None) -> Any:
        if not isinstance(t, GlobalTensor) or t.placement is self.where:
            return t
        return t.to_global(
            placement=self.where, sbp=layout_for(self.where, t.sbp if layout is None else layout)
        )


def install_reshard_hooks(model: nn.Module, plan: Plan) -> None:
    """Free gathered parameters after each use in forward, if the plan has "reshard_after_forward".

    See `parameter_gather.reshard_after_forward`. While a graph is captured, the hooks do nothing,
    because the graph frees the parameters."""
    if plan.choices.get("reshard_after_forward"):
        reshard_hooks = _ReshardHooks()
        model.register_forward_pre_hook(reshard_hooks.begin, prepend=True)
        model.register_forward_hook(reshard_hooks.end, always_call=True)


class _ReshardHooks:
    """A pair of forward hooks that free gathered parameters during a model's training forward.

    Runs of the model may be nested."""

    def __init__(self) -> None:
        self.open: list[contextlib.ExitStack] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        stack = contextlib.ExitStack()
        if torch.is_grad_enabled() and not torch_private.recording.on:
            stack.enter_context(parameter_gather.reshard_after_forward())
        self.open.append(stack)

    def end(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.open:  # empty if a hook that ran before `begin` has failed
            self.open.pop().close()


def install_layout_hooks(model: nn.Module, plan: Plan) -> None:
    """Box inputs and outputs of modules to the plan's layouts by forward hooks.

    Only modules without children that run once get hooks."""
    by_module: dict[str, list[PlannedCall]] = {}
    takers: dict[str, list[PlannedCall]] = {}
    for call in plan.calls:
        by_module.setdefault(call.module, []).append(call)
        for name in dict.fromkeys(call.operands):
            takers.setdefault(name, []).append(call)
    state_names = {g.name for g in plan.placed if g.kind != "input"}
    for path, module in model.named_modules():
        own = by_module.get(path)
        if not own or any(True for _ in module.children()) or not _runs_once(own, state_names):
            continue
        input_layouts, output_layout = (
            _planned_input_layouts(own, state_names),
            _planned_output_layout(own, takers),
        )
        if any(input_layouts):
            module.register_forward_pre_hook(_InputLayoutHook(input_layouts), with_kwargs=True)
        if output_layout is not None:
            module.register_forward_hook(_OutputLayoutHook(output_layout))


def _runs_once(own: Sequence[PlannedCall], state_names: set[str]) -> bool:
    """Return True if the module's calls are consecutive and use no parameter twice.

    A call with the same parameters would be a second run of the module."""
    numbers = [c.number for c in own]
    used = [name for c in own for name in c.operands if name in state_names]
    return numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(used) == len(
        set(used)
    )


def _planned_input_layouts(
    own: Sequence[PlannedCall], state_names: set[str]
) -> list[Layout | None]:
    """Return the layouts that the first call wants for the module's inputs, in operand order.

    The entry of an input that the first call uses several times is None."""
    inside, first = {c.name for c in own}, own[0]
    outside = [
        (name, wanted)
        for name, wanted in zip(first.operands, first.wanted, strict=True)
        if name not in inside and name not in state_names
    ]
    return [
        _layout(wanted) if first.operands.count(name) == 1 else None for name, wanted in outside
    ]


def _planned_output_layout(
    own: Sequence[PlannedCall], takers: dict[str, list[PlannedCall]]
) -> Layout | None:
    """Return the layout that all users of the module's result want.

    Return None if the users want several layouts, if the result already has that layout, or if the
    module's last call has several results."""
    last = own[-1]
    if len(last.results) != 1:
        return None
    layouts = {call.wanted[call.operands.index(last.name)] for call in takers.get(last.name, ())}
    only = layouts.pop() if len(layouts) == 1 else None
    return _layout(only) if only is not None and only != last.results[0] else None


def _box_if_planned(t: Any, layout: Layout | None) -> Any:
    if (
        layout is None
        or not isinstance(t, GlobalTensor)
        or t._spec.layout == layout
        or len(layout) != t._spec.placement.axes
    ):
        return t
    if any(e.is_split and e.dim >= t.dim() for e in layout):
        return t  # not the planned tensor: the module's arguments are in another order
    return t.to_global(sbp=list(layout))


class _InputLayoutHook:
    def __init__(self, layouts: Sequence[Layout | None]) -> None:
        self.layouts = layouts

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = object_tensors(kwargs, object_tensors(args, []))
        if len(tensors) != len(self.layouts):
            return None
        boxed_inputs = iter(
            [_box_if_planned(t, layout) for t, layout in zip(tensors, self.layouts, strict=True)]
        )
        return replaced_in_objects(args, boxed_inputs), replaced_in_objects(kwargs, boxed_inputs)


class _OutputLayoutHook:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, module: nn.Module, args: Any, out: Any) -> Any:
        return _box_if_planned(out, self.layout)
