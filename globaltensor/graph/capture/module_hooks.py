"""Hooks on modules during capture.

The hooks report which module runs, move its inputs to the placement of its stage, and mark the
regions to recompute. `Graph` passes `watched` to the capture."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ..._base.pytree import object_tensors, replaced_in_objects
from ..._tensor.global_tensor import GlobalTensor
from ...errors import GraphError
from ...sharding.placement import Placement
from ..module_settings import ModuleSettings
from .batch_norm_average import averaged
from .logical_recorder import LogicalRecorder
from .side_effects import restoring_modules

__all__ = ["block_of", "configured_placements", "stages_of", "watched"]


def block_of(
    module: torch.nn.Module, blocks: Mapping[int, ModuleSettings]
) -> ModuleSettings | None:
    """Return the settings of a module: the graph's own, completed by its assigned stage.

    `flow.pipeline.cut`, or a plan, may have assigned a stage to the module. That stage counts if
    the graph's own settings name none."""
    own, cut = blocks.get(id(module)), module.__dict__.get("_stage")
    if own is None or cut is None or own.stage_id is not None:
        return own or cut
    both = ModuleSettings()
    both.stage_id, both.placement = cut.stage_id, own.placement or cut.placement
    both.activation_checkpointing = own.activation_checkpointing or cut.activation_checkpointing
    return both


def _has_stage(module: torch.nn.Module) -> bool:
    found = module.__dict__.get("_stage")
    return found is not None and found.stage_id is not None


@contextlib.contextmanager
def watched(
    modules: Mapping[str, torch.nn.Module],
    blocks: Mapping[int, ModuleSettings],
    logical: LogicalRecorder,
    own: dict[str, Any] | None = None,
    build: Any = None,
) -> Iterator[None]:
    """Report the path, stage and recomputed region of the running module to ``logical``.

    The context is entered around build(). ``own`` holds the attributes of the graph, and
    ``build`` is the function that runs."""
    watcher = _ModuleWatcher(logical)
    logical.joins = any(
        _has_stage(part) for module in modules.values() for part in module.modules()
    )
    try:
        for name, module in modules.items():
            for path, part in module.named_modules():
                watcher.add_hooks(f"{name}.{path}".rstrip("."), block_of(part, blocks), part)
        with averaged(modules), restoring_modules(modules, own or {}, logical, build):
            yield
    finally:
        watcher.remove_hooks()


class _ModuleWatcher:
    def __init__(self, logical: LogicalRecorder) -> None:
        self.logical = logical
        self.regions = itertools.count()
        self.handles: list[Any] = []
        self.before: list[tuple[Any, ...]] = []
        self.stage_placement: Placement | None = None  # placement of the stage that runs
        self.borrowed: list[tuple[torch.nn.Module, str, Any]] = []
        self.places: dict[int, Placement] = {}  # placements of the stages that have run
        self.ran: set[int] = set()  # ids of modules with a stage that have run

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.return_weights(0)

    def add_hooks(self, path: str, block: ModuleSettings | None, module: torch.nn.Module) -> None:
        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            logical, inputs = self.logical, object_tensors(kwargs, object_tensors(args, []))
            self.before.append(
                (
                    logical.path,
                    logical.stage,
                    logical.region,
                    self.stage_placement,
                    len(self.borrowed),
                )
            )
            logical.path = [path]
            if block is not None:
                if block.activation_checkpointing and logical.region is None:
                    logical.region = next(self.regions)
                stage, where = self.stage_of_run(module, block, inputs)
                if stage is not None:
                    logical.stage = stage
                if where is not None:
                    self.stage_placement = logical.stage_placement = where
            if self.stage_placement is not None:
                self.borrow_weights(module)
            if block is None or block.placement is None:
                return None
            boxed = iter([self.to_running_stage(t) for t in inputs])
            return replaced_in_objects(args, boxed), replaced_in_objects(kwargs, boxed)

        def exit_(module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            (
                self.logical.path,
                self.logical.stage,
                self.logical.region,
                self.stage_placement,
                held,
            ) = self.before.pop()
            self.logical.stage_placement = self.stage_placement
            self.return_weights(held)

        self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self.handles.append(module.register_forward_hook(exit_, with_kwargs=True))

    def stage_of_run(
        self, module: torch.nn.Module, block: ModuleSettings, inputs: list[torch.Tensor]
    ) -> tuple[int | None, Placement | None]:
        """Return the stage and the placement in which a module runs.

        A module runs in its own stage. In a model that was cut, a module that is called again with
        tensors of a later stage runs in that stage, as an op would."""
        stage, where = block.stage_id, block.placement
        if stage is None or where is None:
            return stage, where
        self.places[stage] = where
        again = id(module) in self.ran
        self.ran.add(id(module))
        if again and self.logical.joins:
            nodes = [self.logical.known.get(id(t)) for t in inputs]
            stage = max(
                [
                    stage,
                    *(
                        s
                        for node in nodes
                        if node is not None and (s := node.meta.get("reached")) in self.places
                    ),
                ]
            )
        return stage, self.places[stage]

    def to_running_stage(self, t: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the placement of the running stage, with its sbp unchanged."""
        if (
            not isinstance(t, GlobalTensor)
            or t._spec.placement is self.stage_placement
            or self.stage_placement is None
        ):
            return t
        return self.logical.brought(t, self.stage_placement)

    def borrow_weights(self, module: torch.nn.Module) -> None:
        """Move weights of other stages (tied weights) to the running stage for the module's run."""
        for held in (module._parameters, module._buffers):
            for name, t in held.items():
                if (
                    isinstance(t, GlobalTensor)
                    and t._spec.shown.placement is not self.stage_placement
                ):
                    self.borrowed.append((module, name, t))
                    held[name] = self.to_running_stage(t)  # type: ignore[assignment]

    def return_weights(self, held: int) -> None:
        while len(self.borrowed) > held:
            module, name, t = self.borrowed.pop()
            (module._parameters if name in module._parameters else module._buffers)[name] = t


def stages_of(
    name: str,
    modules: Mapping[str, torch.nn.Module],
    blocks: Mapping[int, ModuleSettings],
    logical: fx.Graph,
) -> list[Placement]:
    """Return the placement of each stage, by the settings of modules, and of tensors in build().

    Raises GraphError if stages are not numbered from 0, or if a stage has two placements. Also
    raises it if a weight that only one stage uses is not on the stage's placement."""
    stage_placements: dict[int, Placement] = {}
    users: dict[
        int, set[int | None]
    ] = {}  # id of a weight -> the stages of the modules that hold it
    astray: list[tuple[str, GlobalTensor, int, Placement]] = []
    for path, part, block in _walk_with_stages(modules, blocks):
        stage = None if block is None else block.stage_id
        for t in (*part._parameters.values(), *part._buffers.values()):
            users.setdefault(id(t), set()).add(stage)
        if block is None or stage is None:
            continue
        where = (
            block.placement
            or stage_placements.get(stage)
            or next((p.placement for p in part.parameters() if isinstance(p, GlobalTensor)), None)
        )
        if where is None:
            raise GraphError(
                f"{name}: {path} is in stage {stage}, but has no global parameters: name its "
                "placement with set_stage(..., placement)"
            )
        if stage_placements.setdefault(stage, where) is not where:
            raise GraphError(
                f"{name}: stage {stage} is on {stage_placements[stage]!r}, but its module {path} "
                f"is on {where!r}: a stage has one placement"
            )
        for own, t in (*part._parameters.items(), *part._buffers.items()):
            if isinstance(t, GlobalTensor) and t.placement is not where:
                astray.append((f"{path}.{own}", t, stage, where))
    for path, t, stage, where in astray:
        if len(users[id(t)]) == 1:
            raise GraphError(
                f"{name}: {path} is on {t.placement!r}, but its stage {stage} is on {where!r}, "
                "and no other stage uses it: move it there with to_global (flow.pipeline.cut does "
                "so)"
            )
    for node in logical.nodes:
        stage = node.meta.get("starts")
        if stage is not None:
            node_placement = node.meta["val"].placement
            if stage_placements.setdefault(stage, node_placement) is not node_placement:
                raise GraphError(
                    f"{name}: stage {stage} is on {stage_placements[stage]!r}, but its tensor "
                    f"{node.name} is on {node_placement!r}: a stage has one placement"
                )
    if sorted(stage_placements) != list(range(len(stage_placements))):
        missing = min(set(range(len(stage_placements))) - set(stage_placements))
        raise GraphError(
            f"{name}: pipeline stages are numbered from 0 without gaps, but there are "
            f"{sorted(stage_placements)}: set_stage({missing}, ...) is missing"
        )
    return [stage_placements[k] for k in range(len(stage_placements))]


def configured_placements(
    modules: Mapping[str, torch.nn.Module], blocks: Mapping[int, ModuleSettings]
) -> list[Placement]:
    """Return the placements of the stages, stage 0 first, by the settings of the modules alone."""
    stage_placements: dict[int, Placement] = {}
    for _, part, block in _walk_with_stages(modules, blocks):
        if (
            block is not None
            and block.stage_id is not None
            and block.stage_id not in stage_placements
        ):
            where = block.placement or next(
                (p.placement for p in part.parameters() if isinstance(p, GlobalTensor)), None
            )
            if where is not None:
                stage_placements[block.stage_id] = where
    return [stage_placements[k] for k in sorted(stage_placements)]


def _walk_with_stages(
    modules: Mapping[str, torch.nn.Module], blocks: Mapping[int, ModuleSettings]
) -> Iterator[tuple[str, torch.nn.Module, ModuleSettings | None]]:
    """Yield path, module, and the settings that assign the module to a stage.

    These are the module's own settings, or those of a module that contains it."""

    def walk(
        path: str, module: torch.nn.Module, block: ModuleSettings | None
    ) -> Iterator[tuple[str, torch.nn.Module, ModuleSettings | None]]:
        own = block_of(module, blocks)
        block = own if own is not None and own.stage_id is not None else block
        yield path, module, block
        for child, part in module.named_children():
            yield from walk(f"{path}.{child}", part, block)

    for top, module in modules.items():
        yield from walk(top, module, None)
