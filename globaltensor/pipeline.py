"""``flow.pipeline``: a model cut into stages, and the schedules by which stages take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _torch
from .errors import GlobalTensorError
from .graph.blocks import Block
from .graph.nest import replaced, tensors_in
from .graph.pipeline import *  # noqa: F403
from .modules import module_to_global
from .placement import Placement
from .sbp import broadcast
from .wrapper import GlobalTensor

__all__ = ["cut"]


def cut(model: torch.nn.Module, placements: Sequence[Placement], at: Sequence[str] | None = None, sbp: Any = broadcast) -> torch.nn.Module:
    """Cut ``model`` into ``len(placements)`` pipeline stages and place its parameters; returns the model. Every graph that holds it runs it in these stages.

    ``at``: paths of the submodules with which stages 1, 2, ... begin, in the order of the model (``named_modules``), in which they must run. None: the
    largest ``ModuleList`` or ``Sequential`` is cut so that the bytes of parameters are shared as evenly as its blocks allow; what stands before it goes to
    the first stage, what comes after to the last. ``sbp``: as for ``module.to_global``, paths being those in ``model``; one for all stages.
    A weight that two stages use lies in the first of them and is sent to the other. Outside a graph the model runs its stages one after the other.
    Raises GlobalTensorError where a path does not exist, the order is another, or there are fewer blocks than stages.

    >>> import globaltensor as flow
    >>> here = flow.placement("cpu", [0])
    >>> model = cut(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)), [here, here], at=["2"])
    >>> [part.__dict__["_stage"].stage_id for part in model]
    [0, 0, 1]
    """
    placements = list(placements)
    if not placements or not all(isinstance(p, Placement) for p in placements):
        raise GlobalTensorError("pipeline.cut: placements is a list of globaltensor.placement, one for each stage")
    order = [path for path, _ in model.named_modules() if path]
    begins = list(at) if at is not None else _even(model, order, len(placements))
    unknown = [path for path in begins if path not in order]
    if unknown:
        has = ", ".join(map(repr, order[:8]))
        raise GlobalTensorError(f"pipeline.cut: the model has no submodule {', '.join(map(repr, unknown))}; among others it has {has}")
    if len(begins) != len(placements) - 1:
        raise GlobalTensorError(f"pipeline.cut: {len(placements)} stages need {len(placements) - 1} places where stages begin, but at= names {len(begins)}")
    places = [order.index(path) for path in begins]
    if places != sorted(set(places)):
        raise GlobalTensorError(f"pipeline.cut: at= must name submodules in the order of the model, each once; got {', '.join(map(repr, begins))}")
    stage_of = {path: sum(i >= place for place in places) for i, path in enumerate(order)}
    done: dict[int, tuple[Any, Any]] = {}  # id of a tensor -> (it, what it has become): tied weights stay tied
    beside = {begin.rpartition(".")[0] for begin in begins}
    parts = [(path, module) for path, module in model.named_modules() if path and _outermost(path, begins)]
    # What has no parameters and stands apart from the blocks (rotary tables, masks) runs wherever it is used.
    parts = [(path, m) for path, m in parts if next(m.parameters(), None) is not None or path.rpartition(".")[0] in beside]
    for path, module in parts:
        stage = stage_of[path]
        _place(module, path, placements[stage], sbp, done)
        block = Block()
        block.set_stage(stage, placements[stage])
        module.__dict__["_stage"] = block
        module.register_forward_pre_hook(_enter, with_kwargs=True)
        module.register_forward_hook(_leave, with_kwargs=True, always_call=True)
    _place(model, "", placements[0], sbp, done, recurse=False)
    return model


def _enter(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Eager: bring what a stage is given, and weights it borrows, to its placement. While a graph is captured that is the graph's affair (graph/watch.py)."""
    if _torch.function_mode_on():
        return None
    where = module.__dict__["_stage"].placement
    borrowed = module.__dict__.setdefault("_borrowed", [])
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, t in held.items():
                if isinstance(t, GlobalTensor) and t.placement is not where:
                    borrowed.append((held, name, t))
                    held[name] = t.to_global(placement=where)
    these = iter([t.to_global(placement=where) if isinstance(t, GlobalTensor) else t for t in tensors_in(kwargs, tensors_in(args, []))])
    return replaced(args, these), replaced(kwargs, these)


def _leave(module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    for held, name, t in reversed(module.__dict__.pop("_borrowed", [])):
        held[name] = t


def _outermost(path: str, begins: Sequence[str]) -> bool:
    """Whether a submodule lies in one stage, and what holds it does not: it is no ancestor of a beginning, but its parent is one."""
    parent = path.rpartition(".")[0]
    return not _holds(path, begins) and (not parent or _holds(parent, begins))


def _holds(path: str, begins: Sequence[str]) -> bool:
    return any(begin.startswith(f"{path}.") for begin in begins)


def _place(module: torch.nn.Module, path: str, placement: Placement, sbp: Any, done: dict[int, tuple[Any, Any]], recurse: bool = True) -> None:
    """Make what is not placed yet global; patterns and callables see paths of the whole model."""
    from .modules import sbp_for

    for prefix, part in module.named_modules() if recurse else [("", module)]:
        for held in (part._parameters, part._buffers):
            for name, t in held.items():
                if t is None:
                    continue
                if id(t) not in done:
                    full = ".".join(piece for piece in (path, prefix, name) if piece)
                    done[id(t)] = (t, _global(t, placement, sbp_for(sbp, full, t, placement.axes)))
                held[name] = done[id(t)][1]


def _global(t: torch.Tensor, placement: Placement, layout: Any) -> Any:
    holder = torch.nn.Module()
    if isinstance(t, torch.nn.Parameter):
        holder.register_parameter("t", t)
    else:
        holder.register_buffer("t", t)
    module_to_global(holder, placement, layout)
    return holder.t


def _even(model: torch.nn.Module, order: Sequence[str], stages: int) -> list[str]:
    """Where stages begin so that the largest has as few bytes of parameters as can be."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)) and len(m) >= stages]
    if not lists:
        raise GlobalTensorError(f"pipeline.cut: the model has no list of at least {stages} blocks to cut: say with at= where stages begin")
    path, blocks = max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))
    inner = [f"{path}.{name}".lstrip(".") for name, _ in blocks.named_children()]
    first, last = order.index(inner[0]), max(i for i, other in enumerate(order) if other == inner[-1] or other.startswith(f"{inner[-1]}."))
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
    """Where to cut a row of sizes into so many parts, none empty, the largest as small as can be.

    >>> _cuts([5, 1, 1, 2, 5], 3)
    [1, 4]
    """
    n = len(sizes)
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    best = [(ends[j], ends[j] ** 2, [0]) for j in range(n + 1)]  # of the first j blocks in one part: (largest, how uneven, beginnings)
    for part in range(1, parts):
        best = [min((_with(best[i], ends[j] - ends[i], i) for i in range(part, j)), default=(1 << 62, 0, [])) for j in range(n + 1)]
    return best[n][2][1:]


def _with(before: tuple[int, int, list[int]], size: int, begin: int) -> tuple[int, int, list[int]]:
    return max(before[0], size), before[1] + size**2, [*before[2], begin]
