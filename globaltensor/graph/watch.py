"""Modules under capture: they say when they run, bring what they are given to the placement of their stage, and mark what is to be recomputed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..placement import Placement
from ..wrapper import GlobalTensor
from .blocks import Block
from .errors import GraphError
from .kept import kept
from .nest import replaced, tensors_in
from .record import Logical

__all__ = ["block_of", "stages_of", "watched"]


def block_of(module: torch.nn.Module, blocks: Mapping[int, Block]) -> Block | None:
    """The settings of a module: the graph's own, else those that `flow.pipeline.cut` has given it."""
    return blocks.get(id(module)) or module.__dict__.get("_stage")


@contextlib.contextmanager
def watched(modules: Mapping[str, torch.nn.Module], blocks: Mapping[int, Block], logical: Logical) -> Iterator[None]:
    """While build() runs, ``logical`` knows path, stage and recomputed region of the module that runs."""
    watcher = _Watcher(logical)
    try:
        for name, module in modules.items():
            for path, part in module.named_modules():
                watcher.around(f"{name}.{path}".rstrip("."), block_of(part, blocks), part)
        with kept(modules):
            yield
    finally:
        watcher.leave()


class _Watcher:
    def __init__(self, logical: Logical) -> None:
        self.logical = logical
        self.regions = itertools.count()
        self.handles: list[Any] = []
        self.before: list[tuple[Any, ...]] = []
        self.here: Placement | None = None  # of the stage that runs
        self.moved: dict[tuple[int, Placement], tuple[torch.Tensor, torch.Tensor]] = {}  # what many modules are given is brought to a stage once
        self.borrowed: list[tuple[torch.nn.Module, str, Any]] = []

    def leave(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.give_back(0)

    def around(self, path: str, block: Block | None, module: torch.nn.Module) -> None:
        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            logical = self.logical
            self.before.append((logical.path, logical.stage, logical.region, self.here, len(self.borrowed)))
            logical.path = [path]
            if block is not None:
                if block.activation_checkpointing and logical.region is None:
                    logical.region = next(self.regions)
                if block.stage_id is not None:
                    logical.stage = block.stage_id
                if block.placement is not None:
                    self.here = block.placement
            if self.here is not None:
                self.borrow(module)
            if block is None or block.placement is None:
                return None
            these = iter([self.brought(t) for t in tensors_in(kwargs, tensors_in(args, []))])
            return replaced(args, these), replaced(kwargs, these)

        def exit_(module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self.logical.path, self.logical.stage, self.logical.region, self.here, held = self.before.pop()
            self.give_back(held)

        self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self.handles.append(module.register_forward_hook(exit_, with_kwargs=True))

    def brought(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor on the placement of the stage that runs, with its sbp as it is."""
        if not isinstance(t, GlobalTensor) or t._spec.placement is self.here or self.here is None:
            return t
        key = (id(t), self.here)
        if key not in self.moved:
            self.moved[key] = (t, t.to_global(placement=self.here))  # kept, so that the id stays its own
        return self.moved[key][1]

    def borrow(self, module: torch.nn.Module) -> None:
        """A weight that lies in another stage (tied to one there) is brought here for the module's run."""
        for held in (module._parameters, module._buffers):
            for name, t in held.items():
                if isinstance(t, GlobalTensor) and t._spec.shown.placement is not self.here:
                    self.borrowed.append((module, name, t))
                    held[name] = self.brought(t)  # type: ignore[assignment]

    def give_back(self, held: int) -> None:
        while len(self.borrowed) > held:
            module, name, t = self.borrowed.pop()
            (module._parameters if name in module._parameters else module._buffers)[name] = t


def stages_of(name: str, modules: Mapping[str, torch.nn.Module], blocks: Mapping[int, Block]) -> list[Placement]:
    """Where each stage lies, by the settings of the modules. Raises GraphError where they are not numbered from 0, or one has two placements."""
    found: dict[int, Placement] = {}
    for path, part in ((f"{top}.{path}".rstrip("."), part) for top, module in modules.items() for path, part in module.named_modules()):
        block = block_of(part, blocks)
        if block is None or block.stage_id is None:
            continue
        where = block.placement or next((p.placement for p in part.parameters() if isinstance(p, GlobalTensor)), None)
        if where is None:
            raise GraphError(f"{name}: {path} is in stage {block.stage_id}, but has no global parameters: say where it lies, set_stage(..., placement)")
        if found.setdefault(block.stage_id, where) is not where:
            raise GraphError(
                f"{name}: stage {block.stage_id} lies on {found[block.stage_id]!r} and, with {path}, on {where!r}: a stage has one placement"
            )
    if sorted(found) != list(range(len(found))):
        raise GraphError(f"{name}: pipeline stages are numbered from 0 without gaps, but there are {sorted(found)}")
    return [found[k] for k in range(len(found))]
