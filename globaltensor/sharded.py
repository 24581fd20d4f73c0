"""Split parameters that an op wants whole (FSDP, ZeRO-3): gathered many at a time, and their gradients reduce-scattered many at a time.

One parameter at a time costs a collective's latency each. The order in which parameters are used is learnt while the program runs; on a use, those that
will follow are gathered in the same collective, up to a bucket. Every decision comes from what all ranks see alike: the order of ops, specs and versions.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import _torch
from .boxing import box, log, plan
from .buckets import Buckets
from .distributed.world import World, world
from .reducer import dtype_of_sum, reducer, summed
from .spec import Spec, Stored
from .visible import shown
from .wrapper import GlobalTensor

__all__ = ["abort", "finish", "forget", "gather_axes", "gathered", "immediate", "scatter", "unfolded"]

BUCKET_BYTES = 16 << 20  # of gathered parameters: a few transformer blocks of a small model, one matrix of a large one


Waiting = tuple[GlobalTensor, Spec, torch.Tensor]  # a parameter, what it was gathered to, and the gradient of that


class Sharding:
    """One rank's memory of which split parameters are used after which, and of those gathered ahead."""

    def __init__(self) -> None:
        self.next: dict[tuple[int, int], tuple[weakref.ref[GlobalTensor], Spec]] = {}
        self.recent: tuple[int, int] = (0, 0)
        self.ready: dict[tuple[int, Spec], tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.scatters: Buckets[Waiting] = Buckets(BUCKET_BYTES, BUCKET_BYTES, lambda a, b: (a[0], a[1], a[2] + b[2]))
        self.last = 0
        self.arrived: list[GlobalTensor] = []
        self.immediate = 0

    def number(self, leaf: GlobalTensor) -> int:
        """A number for each parameter that is gathered, by its first use: the same on every rank."""
        found: int | None = leaf.__dict__.get("_gathered_number")
        if found is None:
            self.last += 1
            found = leaf.__dict__["_gathered_number"] = self.last
        return found


_STATE: weakref.WeakKeyDictionary[World, Sharding] = weakref.WeakKeyDictionary()


def _state() -> Sharding:
    here = world()
    found = _STATE.get(here)
    if found is None:
        found = _STATE[here] = Sharding()
    return found


def forget() -> None:
    """A pass is over: nothing gathered ahead is kept, and the next use begins a new order."""
    state = _state()
    state.ready.clear()
    state.recent = (0, 0)


@contextlib.contextmanager
def immediate(on: bool) -> Iterator[None]:
    """Gradients of gathered parameters flow through the graph at once: somebody asks for them there, not at the leaves."""
    state = _state()
    state.immediate += on
    try:
        yield
    finally:
        state.immediate -= on


def abort() -> None:
    """A backward pass has failed: what it had collected is dropped."""
    state = _state()
    state.scatters.drop()
    state.arrived.clear()
    forget()


def unfolded(x: GlobalTensor) -> GlobalTensor:
    """A tensor that lies as it is shown to lie. Collective where it is stored otherwise (ZeRO)."""
    shown = x._spec.shown
    return x if x._spec is shown else GlobalTensor.wrap(box(x._local, x._spec, shown, why="to_local"), shown)


def gather_axes(src: Spec, dst: Spec) -> tuple[int, ...]:
    """The axes along which src -> dst only gathers; () where it does anything else."""
    if isinstance(src, Stored) and dst is src.shown:
        return src.axes
    if src.placement is not dst.placement or not src.numel:
        return ()
    axes = []
    for a, (x, y) in enumerate(zip(src.layout, dst.layout, strict=True)):
        if x is not y:
            if not (x.is_split and y.is_broadcast):
                return ()
            axes.append(a)
    # A dim that another axis goes on splitting does not come back in one piece.
    if any(src.layout[a].dim == e.dim for a in axes for b, e in enumerate(dst.layout) if e.is_split and b != a):
        return ()
    return tuple(axes)


# ---------------------------------------------------------------------------------------------------------------- gathering


def gathered(leaf: GlobalTensor, src: Spec, dst: Spec, why: str) -> torch.Tensor:
    """The local tensor of ``dst`` for a leaf that lies as ``src``; taken from what was gathered ahead, or gathered with those to follow."""
    if _torch.function_mode_on():
        return shown(gathered, leaf, src, dst, why)  # type: ignore[no-any-return]
    state, local = _state(), leaf._local
    if world().rank not in src.placement._coordinates:
        return box(local, src, dst, why=why)
    before = state.recent
    number = state.number(leaf)
    state.next[before] = (weakref.ref(leaf), dst)
    state.recent = (before[1], number)
    log.watch(plan(src, dst), why)
    key = (number, dst)
    found = state.ready.pop(key, None)
    if found is None or found[1] is not local or found[2] != local._version:
        with _torch.unobserved():
            _gather(state, _batch(state, leaf, src, dst))
        found = state.ready.pop(key)
    if local.requires_grad and torch.is_grad_enabled():
        return _Gathered.apply(local, _Box(found[0], leaf), src, dst)  # type: ignore[no-any-return]
    return found[0]


def _batch(state: Sharding, leaf: GlobalTensor, src: Spec, dst: Spec) -> list[tuple[GlobalTensor, Spec]]:
    """This use and those expected after it that travel the same way, up to a bucket."""
    batch, total = [(leaf, dst)], dst.nbytes
    at, way = state.recent, (src.placement, gather_axes(src, dst), src.dtype)
    seen = {(state.number(leaf), dst)}
    while total < BUCKET_BYTES and (expected := state.next.get(at)) is not None:
        other, wanted = expected[0](), expected[1]
        if other is None or (number := state.number(other), wanted) in seen:
            break
        if (other._spec.placement, gather_axes(other._spec, wanted), other._spec.dtype) != way:
            break
        kept = state.ready.get((number, wanted))
        if kept is None or kept[1] is not other._local or kept[2] != other._local._version:
            batch.append((other, wanted))
            total += wanted.nbytes
        seen.add((number, wanted))
        at = (at[1], number)
    return batch


def _gather(state: Sharding, batch: Sequence[tuple[GlobalTensor, Spec]]) -> None:
    first = batch[0][0]._spec
    where, rank = first.placement, world().rank
    ranks = where.fiber(rank, gather_axes(first, batch[0][1]))
    flat = [leaf._local.detach().reshape(-1) for leaf, _ in batch]
    numels = [sum(math.prod(leaf._spec.box(r)[1]) for leaf, _ in batch) for r in ranks]
    parts = world().comm(ranks).all_gather(torch.cat(flat) if len(flat) > 1 else flat[0], numels)
    at = [0] * len(ranks)
    for leaf, dst in batch:
        offsets, lengths = dst.box(rank)
        whole = torch.empty(lengths, dtype=leaf.dtype, device=leaf._local.device)
        for i, r in enumerate(ranks):
            begin, shape = leaf._spec.box(r)
            n = math.prod(shape)
            whole[tuple(slice(b - o, b - o + s) for b, o, s in zip(begin, offsets, shape, strict=True))] = parts[i][at[i] : at[i] + n].view(shape)
            at[i] += n
        state.ready[(state.number(leaf), dst)] = (whole, leaf._local, leaf._local._version)


class _Box:
    """Carries a gathered parameter, and whose it is, past autograd."""

    def __init__(self, whole: torch.Tensor, leaf: GlobalTensor) -> None:
        self.whole, self.leaf = whole, leaf


class _Gathered(torch.autograd.Function):
    """A gathered parameter. Backward: reduce-scatter, together with others where the gradient only has to reach the leaf."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, carried: _Box, src: Spec, dst: Spec) -> torch.Tensor:
        ctx.leaf, ctx.local, ctx.src, ctx.dst = carried.leaf, local, src, dst
        return carried.whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if _state().immediate or torch.is_grad_enabled() or _watched(ctx.leaf):
            dual, mine = ctx.dst.dual(), ctx.src.dual()
            return summed(grads[0], dual, mine, ctx.leaf._reduce_dtype, "gradient of a gathered parameter"), None, None, None
        scatter(ctx.leaf, ctx.dst, grads[0])
        return None, None, None, None


def _watched(leaf: GlobalTensor) -> bool:
    """Whether somebody looks at this leaf's gradient on its way."""
    return bool(leaf._local._backward_hooks) or "_watched" in leaf.__dict__


# ---------------------------------------------------------------------------------------------------------------- scattering


def scatter(leaf: GlobalTensor, dst: Spec, grad: torch.Tensor) -> None:
    """Keep the gradient of a gathered parameter until a bucket is full or backward ends."""
    state = _state()
    reducer().at_end(finish)
    src = leaf._spec
    kind = dtype_of_sum(grad, leaf._reduce_dtype)
    key = (src.placement, gather_axes(src, dst), kind, grad.dtype, dst.layout)
    for bucket in state.scatters.add(state.number(leaf), (leaf, dst, grad), grad.numel() * kind.itemsize, key):
        _send(state, bucket)


def finish() -> None:
    """Backward ends: scatter what waits, and hand on the leaves whose part other axes still have to sum."""
    state = _state()
    for bucket in state.scatters.finish():
        _send(state, bucket)
    arrived, state.arrived = state.arrived, []
    here = reducer()
    for leaf in arrived:
        if leaf._leaf is not None and not here.deferred:
            here.add(leaf._leaf)
    forget()


def _send(state: Sharding, items: list[Waiting]) -> None:
    leaf, dst, first = items[0]
    where, rank = leaf._spec.placement, world().rank
    ranks = where.fiber(rank, gather_axes(leaf._spec, dst))
    chunks = [torch.cat([_piece(grad, leaf._spec, whole, r, rank).reshape(-1) for leaf, whole, grad in items]) for r in ranks]
    kind = dtype_of_sum(first, leaf._reduce_dtype)
    mine = world().comm(ranks).reduce_scatter([c.to(kind) for c in chunks], "sum").to(first.dtype)
    start = 0
    for leaf, _, _ in items:
        shape = leaf._spec.local_shape(rank)
        part = mine[start : start + math.prod(shape)].view(shape)
        start += math.prod(shape)
        local = leaf._local
        if local.grad is None:
            local.grad = part
        else:
            local.grad.add_(part)
        state.arrived.append(leaf)


def _piece(grad: torch.Tensor, src: Spec, dst: Spec, r: int, rank: int) -> torch.Tensor:
    """What of a gathered parameter's gradient belongs to rank ``r``."""
    offsets = dst.box(rank)[0]
    begin, shape = src.box(r)
    return grad[tuple(slice(b - o, b - o + s) for b, o, s in zip(begin, offsets, shape, strict=True))]
