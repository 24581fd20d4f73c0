"""``flow.pipeline``: split a model into stages, with the schedules that drive them.

Users call `cut`. Plans of `flow.auto` call `staged`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._base import torch_private
from ..._base.pytree import object_tensors, replaced_in_objects
from ..._ops.sharding_propagation import stage_context
from ..._tensor.global_tensor import GlobalTensor
from ...errors import GlobalTensorError
from ...parallel.module_to_global import module_to_global
from ...sharding.placement import Placement
from ...sharding.sbp import broadcast
from ...sharding.spec import layout_for
from ..module_settings import ModuleSettings
from . import *  # noqa: F403

__all__ = ["cut"]


def cut(
    model: torch.nn.Module,
    placements: Sequence[Placement],
    at: Sequence[str] | None = None,
    sbp: Any = broadcast,
) -> torch.nn.Module:
    """Split ``model`` into pipeline stages, place its parameters, and return the model.

    There is one stage for each of ``placements``. Every graph that holds the model runs it in these
    stages.

    ``at`` lists the paths of the submodules with which stages 1, 2, ... begin. They must be in the
    order of the model (``named_modules``), which is also the order in which they must run. None:
    the largest ``ModuleList`` or ``Sequential`` is split so that the bytes of parameters are shared
    as evenly as its blocks allow. Modules before it then go to the first stage, modules after it to
    the last. ``sbp`` is that of ``module.to_global``, with paths in ``model``; it applies to all
    stages. A weight that two stages use is placed on the first of them and sent to the other.

    Outside a graph the model runs its stages one after the other. Its forward may compute with
    tensors of several stages in between (a skip connection, a loss). Such an op runs in the stage
    that ran last. Raises GlobalTensorError if a path does not exist, if the order is another, or if
    there are fewer blocks than stages.

    >>> import globaltensor as flow
    >>> here = flow.placement("cpu", [0])
    >>> model = cut(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)), [here, here], at=["2"])
    >>> [part.__dict__["_stage"].stage_id for part in model]
    [0, 0, 1]
    """  # noqa: E501
    placements = () if isinstance(placements, Placement) else list(placements)
    if not placements or not all(isinstance(p, Placement) for p in placements):
        raise GlobalTensorError(
            "pipeline.cut: placements is a list of globaltensor.placement, one for each stage"
        )
    order = [path for path, _ in model.named_modules() if path]
    begins = list(at) if at is not None else _even_stages(model, order, len(placements))
    unknown = [path for path in begins if path not in order]
    if unknown:
        has = ", ".join(map(repr, order[:8]))
        raise GlobalTensorError(
            f"pipeline.cut: the model has no submodule {', '.join(map(repr, unknown))}; among "
            f"others it has {has}"
        )
    if len(begins) != len(placements) - 1:
        raise GlobalTensorError(
            f"pipeline.cut: {len(placements)} stages need {len(placements) - 1} submodules at "
            f"which stages begin, but at= names {len(begins)}"
        )
    places = [order.index(path) for path in begins]
    if places != sorted(set(places)):
        raise GlobalTensorError(
            f"pipeline.cut: at= must name submodules in the order of the model, each once; got "
            f"{', '.join(map(repr, begins))}"
        )
    stage_of = {path: sum(i >= place for place in places) for i, path in enumerate(order)}
    beside = {begin.rpartition(".")[0] for begin in begins}
    parts = [
        (path, module)
        for path, module in model.named_modules()
        if path and _outermost(path, begins)
    ]
    # Modules without parameters and apart from the blocks (rotary tables, masks) run wherever they
    # are used.
    parts = [
        (path, m)
        for path, m in parts
        if next(m.parameters(), None) is not None or path.rpartition(".")[0] in beside
    ]
    return staged(model, placements, [(path, stage_of[path]) for path, _ in parts], sbp)


def staged(
    model: torch.nn.Module,
    placements: Sequence[Placement],
    parts: Sequence[tuple[str, int]],
    sbp: Any,
) -> torch.nn.Module:
    """Assign submodules to stages, in place.

    ``parts`` holds (path, stage), and no submodule is inside another. A tied weight is placed on
    the stage of its first part. Tensors of modules outside all parts are placed on stage 0."""
    done: dict[
        int, tuple[Any, Any]
    ] = {}  # id of a tensor -> (the tensor, its global tensor): tied weights stay tied
    inside = set()
    for path, stage in parts:
        module = model.get_submodule(path)
        inside.update(f"{path}.{name}".rstrip(".") for name, _ in module.named_modules())
        _place_tensors(module, path, placements[stage], sbp, done)
        for each in _called_modules(module):
            block = ModuleSettings()
            block.set_stage(stage, placements[stage])
            each.__dict__["_stage"] = block
            each.register_forward_pre_hook(_enter_stage, with_kwargs=True)
            each.register_forward_hook(_leave_stage, with_kwargs=True, always_call=True)
    for path, module in model.named_modules():
        if path not in inside:
            _place_tensors(module, path, placements[0], sbp, done, recurse=False)
    model.register_forward_pre_hook(_ForwardStart(placements[0]), prepend=True)
    model.register_forward_hook(_end_forward, always_call=True)
    return model


def _called_modules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the module, or the modules in a list that is never called itself."""
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        for child in module.children():
            yield from _called_modules(child)
    else:
        yield module


class _ForwardStart:
    """A forward pre-hook of a model in stages.

    After this hook, an op with operands of several stages runs on the placement of the stage that
    ran last."""

    def __init__(self, first: Placement) -> None:
        self.first = first

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        before = module.__dict__.setdefault("_met_before", [])
        if before:  # an interrupt has left the former pass without its end
            before.clear()
            stage_context.models = stage_context.stages = 0
            stage_context.where = None
        before.append(stage_context.where)
        stage_context.models += 1
        stage_context.where = (
            None if torch_private.function_mode_on() else self.first
        )  # under capture, the graph does this (graph/capture/local_recorder.py)


def _end_forward(module: torch.nn.Module, args: Any, out: Any) -> None:
    stage_context.where = module.__dict__["_met_before"].pop()
    stage_context.models -= 1


def _enter_stage(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Move a stage's inputs, and the weights that it borrows, to its placement, in eager mode.

    While a graph is captured, the graph does this (graph/capture/module_hooks.py).
    """
    if torch_private.function_mode_on():
        return None
    _return_borrowed(module)  # left by an interrupt
    where = module.__dict__["_stage"].placement
    entered: list[Any] = module.__dict__.setdefault("_entered", [])
    entered.append(stage_context.where)
    stage_context.where, stage_context.stages = where, stage_context.stages + 1
    borrowed = module.__dict__.setdefault("_borrowed", [])
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, t in held.items():
                if isinstance(t, GlobalTensor) and t.placement is not where:
                    # training writes into buffers, and the new values must be copied back
                    borrowed.append((held, name, t, held is part._buffers and part.training))
                    held[name] = _move_to(t, where)
    these = iter([_move_to(t, where) for t in object_tensors(kwargs, object_tensors(args, []))])
    return replaced_in_objects(args, these), replaced_in_objects(kwargs, these)


def _move_to(t: Any, where: Placement) -> Any:
    return (
        t.to_global(placement=where, sbp=layout_for(where, t.sbp))
        if isinstance(t, GlobalTensor) and t.placement is not where
        else t
    )


def _leave_stage(module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    _return_borrowed(module, True)
    entered = module.__dict__.get("_entered")
    if not entered:
        return  # it ran under capture
    before = entered.pop()
    stage_context.stages -= 1
    if stage_context.stages or not stage_context.models:
        # Within another stage, that stage continues. Between the stages of a model, the last one
        # that ran counts.
        stage_context.where = before


def _return_borrowed(module: torch.nn.Module, written: bool = False) -> None:
    """Put borrowed tensors back.

    ``written``: copy what the stage has written into buffers to the originals."""
    for held, name, t, buffer in reversed(module.__dict__.pop("_borrowed", [])):
        lent, held[name] = held[name], t
        if written and buffer and isinstance(lent, GlobalTensor):
            with torch.no_grad():
                value = lent.detach().to_global(
                    placement=t.placement, sbp=layout_for(t.placement, t.sbp)
                )
                if value.shape == t.shape:
                    t.copy_(value)
                else:
                    held[name] = value


def _outermost(path: str, begins: Sequence[str]) -> bool:
    """Return True if a submodule is in one stage, and the module that contains it is not.

    The submodule then contains no beginning of a stage, but its parent does."""
    parent = path.rpartition(".")[0]
    return not _contains_begin(path, begins) and (not parent or _contains_begin(parent, begins))


def _contains_begin(path: str, begins: Sequence[str]) -> bool:
    return any(begin.startswith(f"{path}.") for begin in begins)


def _place_tensors(
    module: torch.nn.Module,
    path: str,
    placement: Placement,
    sbp: Any,
    done: dict[int, tuple[Any, Any]],
    recurse: bool = True,
) -> None:
    """Make tensors global that are not placed yet.

    Patterns and callables see paths in the full model."""
    from ...parallel.module_to_global import sbp_for

    for prefix, part in module.named_modules() if recurse else [("", module)]:
        for held in (part._parameters, part._buffers):
            for name, t in held.items():
                if t is None:
                    continue
                if id(t) not in done:
                    full = ".".join(piece for piece in (path, prefix, name) if piece)
                    done[id(t)] = (
                        t,
                        _global(
                            t,
                            placement,
                            sbp_for(
                                [broadcast] * placement.axes if sbp is broadcast else sbp,
                                full,
                                t,
                                placement.axes,
                            ),
                        ),
                    )
                held[name] = done[id(t)][1]


def _global(t: torch.Tensor, placement: Placement, layout: Any) -> Any:
    holder = torch.nn.Module()
    if isinstance(t, torch.nn.Parameter):
        holder.register_parameter("t", t)
    else:
        holder.register_buffer("t", t)
    module_to_global(holder, placement, layout)
    return holder.t


def _even_stages(model: torch.nn.Module, order: Sequence[str], stages: int) -> list[str]:
    """Return the beginnings of the most even stages.

    The largest stage then has the minimum bytes of parameters."""
    lists = [
        (path, m)
        for path, m in model.named_modules()
        if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)) and len(m) >= stages
    ]
    if not lists:
        raise GlobalTensorError(
            f"pipeline.cut: the model has no list of at least {stages} blocks to cut: name with "
            "at= the submodules at which stages begin"
        )
    path, blocks = max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))
    inner = [f"{path}.{name}".lstrip(".") for name, _ in blocks.named_children()]
    first, last = (
        order.index(inner[0]),
        max(
            i
            for i, other in enumerate(order)
            if other == inner[-1] or other.startswith(f"{inner[-1]}.")
        ),
    )
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks.children()]
    seen: set[int] = {id(p) for p in blocks.parameters()}
    for i, other in enumerate(order):
        own = [p for p in model.get_submodule(other).parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        if i < first:
            sizes[0] += sum(p.nbytes for p in own)
        elif i > last:
            sizes[-1] += sum(p.nbytes for p in own)
    return [inner[i] for i in _cuts(sizes, stages)]


def _cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return where to cut a row of sizes into ``parts`` parts, so that the largest is minimal.

    No part is empty.

    >>> _cuts([5, 1, 1, 2, 5], 3)
    [1, 4]
    """
    n = len(sizes)
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    best = [
        (ends[j], ends[j] ** 2, [0]) for j in range(n + 1)
    ]  # for the first j blocks in one part: (largest, unevenness, beginnings)
    for part in range(1, parts):
        best = [
            min(
                (_extend_division(best[i], ends[j] - ends[i], i) for i in range(part, j)),
                default=(1 << 62, 0, []),
            )
            for j in range(n + 1)
        ]
    return best[n][2][1:]


def _extend_division(
    before: tuple[int, int, list[int]], size: int, begin: int
) -> tuple[int, int, list[int]]:
    return max(before[0], size), before[1] + size**2, [*before[2], begin]
