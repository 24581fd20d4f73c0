"""Gathers of sharded parameters that an op needs in full (FSDP, ZeRO-3), many at a time.

Dispatch calls `gather_param`. The gradients are reduce-scattered many at a time.

One parameter at a time costs a collective's latency each. The order in which parameters are used is
learnt while the program runs. A use gathers the parameters that will follow in the same collective,
up to a bucket. Every decision comes from what all ranks of the parameter's placement see alike: the
order of ops there, specs and versions. What a rank does alone, or with other ranks, changes nothing
of it.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..._base import torch_private
from ..._base.overridable import shown
from ...boxing import box, log, plan_boxing
from ...boxing.moves import gathers
from ...distributed.communicator import flatten
from ...distributed.world import world
from ...sharding.placement import Placement
from ...sharding.spec import Spec, StorageSpec
from ..global_tensor import GlobalTensor
from .buckets import Buckets
from .reducer import dtype_of_sum, reduce_gradient, reducer

__all__ = [
    "abort",
    "finish",
    "forget",
    "gather_axes",
    "gather_param",
    "immediate",
    "queue_reduce_scatter",
    "reset_prefetch",
    "reshard_after_forward",
    "to_logical",
]

# Bytes of gathered parameters: a few transformer blocks of a small model, one matrix of a large
# one.
BUCKET_BYTES = 16 << 20
# A parameter of this many bytes is gathered alone on a CPU: copying it into a bucket and out again
# takes longer than one more collective.
ALONE_BYTES = 1 << 21
UNDER_WAY = 1  # buckets of gradients in transit
MAX_ALIVE = 256  # gathered parameters in the table before the freed ones are dropped
MAX_EXPECTED = 1 << 14  # expected uses: above that number all are learnt again
PASSES = 8  # a use that has not come again for this many passes is no longer expected
# Under reshard_after_forward() a bucket is at most as large as the largest parameter. Below this
# size a collective costs its latency.
MIN_BATCH_BYTES = 128 << 10

RECALLED = "backward of a use under reshard_after_forward"  # why a parameter is gathered again

# (parameter, the spec that it was gathered to, the gradient of the gathered tensor)
Waiting = tuple[GlobalTensor, Spec, torch.Tensor]


class GatheredParam(NamedTuple):
    """A gathered parameter: its leaf, the local tensor's version, and its storage.

    It keeps none of them alive.
    """

    leaf: weakref.ref[GlobalTensor]
    dst: Spec
    local: weakref.ref[torch.Tensor]
    version: int
    storage: torch_private.StorageWeakRef

    def is_freed(self) -> bool:
        return bool(self.storage.expired())


class Gathering(NamedTuple):
    """A parameter that is gathered to ``dst``.

    It may be freed on this rank and alive on others, where a garbage collector has not run yet. So
    decisions that all ranks must make alike use its number and specs.
    """

    leaf: weakref.ref[GlobalTensor]
    number: int
    src: Spec
    dst: Spec

    @property
    def group_key(self) -> tuple[Any, ...]:
        """The key that parameters must share to be gathered together."""
        return self.src.placement, gather_axes(self.src, self.dst), self.src.dtype

    @property
    def key(self) -> tuple[int, Spec]:
        return self.number, self.dst


class PrefetchOrder:
    """The order in which the parameters of one placement are used.

    The ranks of the placement see the same order there. They may differ in what they use elsewhere.
    """

    def __init__(self) -> None:
        #: (number of the last parameter but one, number of the last; 0: none) -> (the next one, the
        #: last pass in which it followed).
        self.next: dict[tuple[int, int], tuple[Gathering, int]] = {}
        self.recent: tuple[int, int] = (0, 0)
        self.passes = 0
        # Bytes of the largest parameter gathered in this pass, and in the last pass that gathered
        # any.
        self.largest = self.before = 0

    def record_use(self, one: Gathering) -> None:
        """Record that this parameter is used next."""
        if len(self.next) >= MAX_EXPECTED:
            self.next.clear()
        self.next[self.recent] = one, self.passes
        self.recent = (self.recent[1], one.number)

    def max_bucket_bytes(self, freed: bool) -> int:
        """Return the maximum bytes of a bucket."""
        return (
            min(max(self.largest, self.before, MIN_BATCH_BYTES), BUCKET_BYTES)
            if freed
            else BUCKET_BYTES
        )

    def start_pass(self) -> None:
        """Start a new pass, whose order begins where this one's began."""
        self.recent = (0, 0)
        self.before, self.largest = self.largest or self.before, 0
        self.passes += 1
        if self.passes % PASSES == 0:
            self.next = {
                pair: entry for pair, entry in self.next.items() if entry[1] >= self.passes - PASSES
            }


class GatherState:
    """The state of one rank: the order in which parameters are used, and prefetched ones."""

    def __init__(self) -> None:
        self.orders: dict[Placement, PrefetchOrder] = {}
        #: (the gathered tensor, the local tensor that it is from, the writes into it before). None:
        #: the parameter is freed, and with it the memory.
        self.ready: dict[
            tuple[int, Spec], tuple[torch.Tensor, torch.Tensor, tuple[int, int]] | None
        ] = {}
        self.scatters: Buckets[Waiting] = Buckets(
            BUCKET_BYTES, BUCKET_BYTES, lambda a, b: (a[0], a[1], a[2] + b[2])
        )
        self.last = 0
        self.arrived: list[GlobalTensor] = []
        self.immediate = 0
        self.freed = 0
        # gathered under reshard_after_forward(), by storage
        self.alive: dict[int, GatheredParam] = {}
        self.waiting: dict[Any, list[Waiting]] = {}  # gradients of such parameters
        self.under_way: deque[tuple[list[tuple[GlobalTensor, torch.dtype]], Any]] = deque()
        # placements whose gathered parameters have a gradient in this backward pass
        self.reached: set[Placement] = set()

    def number(self, leaf: GlobalTensor) -> int:
        """Return the number of a gathered parameter, by its first use: the same on every rank."""
        if torch_private.recording.on:
            return -id(leaf)  # in a graph's capture, whose uses count nowhere else
        gather_number: int | None = leaf.__dict__.get("_gathered_number")
        if gather_number is None:
            self.last += 1
            gather_number = leaf.__dict__["_gathered_number"] = self.last
            weakref.finalize(leaf, _forget_leaf, weakref.ref(self), gather_number).atexit = False
        return gather_number

    def let_go(self, number: int) -> None:
        """Drop the memory of a parameter that is freed.

        A parameter that was ready stays marked as ready, because the other ranks must decide alike.
        """
        # Iterate over copies: a garbage collector may run anywhere.
        for key in [k for k in list(self.ready) if k[0] == number]:
            kept = self.ready.pop(key, None)
            if kept is not None and kept[1]._version == kept[2][0]:
                self.ready[key] = None
        for way in [k for k in list(self.scatters.limits) if k[-1] == number]:  # type: ignore[index]
            self.scatters.limits.pop(way, None)

    def order(self, placement: Placement) -> PrefetchOrder:
        found = self.orders.get(placement)
        if found is None:
            found = self.orders[placement] = PrefetchOrder()
        return found


def _forget_leaf(state: weakref.ref[GatherState], number: int) -> None:
    if (found := state()) is not None:
        found.let_go(number)


def _state() -> GatherState:
    return world().state(GatherState)


def reset_prefetch(placement: Placement) -> None:
    """End a pass of the parameters of a placement, on all its ranks.

    Drop what was prefetched, and let the next use begin a new order.
    """
    state = _state()
    for key in [k for k in list(state.ready) if k[1].placement is placement]:
        state.ready.pop(key, None)
    order = state.orders.get(placement)
    if order is not None:
        order.start_pass()
        if not order.next:
            del state.orders[placement]
    _drop_freed(state)


def relearn(placement: Placement) -> None:
    """Forget the expected uses on a placement: a parameter there has a new layout, on all ranks."""
    _state().orders.pop(placement, None)


@contextlib.contextmanager
def immediate(on: bool) -> Iterator[None]:
    """Let gradients of gathered parameters flow through the graph at once.

    The caller needs the gradients there, not at the leaves.
    """
    state = _state()
    state.immediate += on
    try:
        yield
    finally:
        state.immediate -= on


def abort() -> None:
    """Drop what a failed backward pass has collected."""
    state = _state()
    state.scatters.drop()
    state.arrived.clear()
    state.waiting.clear()
    state.under_way.clear()
    state.reached.clear()
    for placement in list(state.orders):
        reset_prefetch(placement)


def forget() -> None:
    """Forget what this rank has learnt of the order of gathers."""
    abort()
    _state().orders.clear()


def to_logical(x: GlobalTensor) -> GlobalTensor:
    """Return the tensor with the spec that is shown.

    It is collective where the tensor is stored otherwise (ZeRO).
    """
    shown = x._spec.shown
    return (
        x
        if x._spec is shown
        else GlobalTensor.wrap(box(x._local, x._spec, shown, why="to_local"), shown)
    )


def gather_axes(src: Spec, dst: Spec) -> tuple[int, ...]:
    """Return the axes along which src -> dst only gathers, () where it does anything else."""
    if isinstance(src, StorageSpec) and dst is src.shown:
        return src.axes
    if src.placement is not dst.placement or not src.numel:
        return ()
    return gathers(src.layout, dst.layout)


# ---------------------------------------------------------------------------------------- gathering


def gather_param(leaf: GlobalTensor, src: Spec, dst: Spec, why: str) -> torch.Tensor:
    """Return the local tensor of ``dst`` for a leaf with the spec ``src``.

    It was prefetched, or it is gathered now, together with the parameters to follow.
    """
    if torch_private.function_mode_on():
        return shown(gather_param, leaf, src, dst, why)  # type: ignore[no-any-return]
    state, local, this_world = _state(), leaf._local, world()
    if this_world.rank not in src.placement._coordinates:
        return box(local, src, dst, why=why)
    if this_world.dry:
        log.record_boxing(plan_boxing(src, dst), why)
    elif log.forbidden():
        log.check(plan_boxing(src, dst), why)
    whole = _gather_for_use(state, leaf, src, dst, bool(state.freed), why)
    if not (local.requires_grad and torch.is_grad_enabled()):
        out = whole
    else:
        out = _GatheredParameter.apply(
            local, _ParameterRef(whole, leaf, bool(state.freed)), src, dst
        )
    if state.freed and torch.is_grad_enabled():
        _remember(
            state,
            GatheredParam(
                weakref.ref(leaf),
                dst,
                weakref.ref(local),
                local._version,
                torch_private.StorageWeakRef(whole.untyped_storage()),
            ),
        )
    return out


def _gather_for_use(
    state: GatherState, leaf: GlobalTensor, src: Spec, dst: Spec, freed: bool, why: str
) -> torch.Tensor:
    """Return the gathered tensor for the next use of a parameter, in the op ``why``."""
    local, order, one = (
        leaf._local,
        state.order(src.placement),
        Gathering(weakref.ref(leaf), state.number(leaf), src, dst),
    )
    order.record_use(one)
    gathered = state.ready.pop(one.key, None)
    if gathered is None or gathered[1] is not local or gathered[2] != _write_counts(leaf):
        order.largest = max(order.largest, _max_local_bytes(dst))
        with torch_private.unobserved():
            batch = _next_batch(state, one, order.max_bucket_bytes(freed), freed)
            with _log_gather(batch, why):
                _gather(state, batch, local.device)
        gathered = state.ready.pop(one.key)
    assert gathered is not None, "it is an argument of the call"
    return gathered[0]


def _max_local_bytes(spec: Spec) -> int:
    """Return the bytes of the largest local tensor."""
    return spec.local_numel() * spec.dtype.itemsize


def _is_gathered_alone(spec: Spec) -> bool:
    """Return True if a gathered parameter is gathered alone, as its gradient is reduced alone."""
    return spec.placement.type == "cpu" and _max_local_bytes(spec) >= ALONE_BYTES


def _next_batch(state: GatherState, one: Gathering, most: int, exact: bool) -> list[Gathering]:
    """Return this use and the expected next ones of the same group, up to ``most`` bytes.

    If not ``exact``, the last one may exceed it.
    """
    batch, total, order = [one], _max_local_bytes(one.dst), state.order(one.src.placement)
    if _is_gathered_alone(one.dst):
        return batch
    at, way = order.recent, one.group_key
    seen = {one.key}
    while total < most and at in order.next:
        other = order.next[at][0]
        if other.key in seen or other.group_key != way or _layout_changed(other):
            break
        if not _is_gathered_alone(other.dst) and not _is_ready(state, other):
            if exact and total + _max_local_bytes(other.dst) > most:
                break
            batch.append(other)
            total += _max_local_bytes(other.dst)
        seen.add(other.key)
        at = (at[1], other.number)
    return batch


def _layout_changed(one: Gathering) -> bool:
    leaf = one.leaf()
    return leaf is not None and leaf._spec is not one.src


def _is_ready(state: GatherState, one: Gathering) -> bool:
    """Return True if the parameter is prefetched, and has not been written into since."""
    if one.key not in state.ready:
        return False
    kept, leaf = state.ready[one.key], one.leaf()
    return (
        kept is None or leaf is None or (kept[1] is leaf._local and kept[2] == _write_counts(leaf))
    )


def _write_counts(leaf: GlobalTensor) -> tuple[int, int]:
    """Return the numbers of writes into a parameter: by itself and its views, and by all aliases.

    `p.data` has a version of its own, but is an alias."""
    return leaf._local._version, 0 if leaf._memory is None else leaf._memory.writes


def _log_gather(batch: Sequence[Gathering], why: str) -> contextlib.AbstractContextManager[Any]:
    """Return the block that logs a gather: of one parameter, or of the following ones too.

    In a dry world `gather_param` has logged it.
    """
    if len(batch) == 1 and log.watched() and not world().dry:
        return log.boxing_sent_here(plan_boxing(batch[0].src, batch[0].dst), why)
    return log.exchanges("parameters: {} gathered together, first for {}", len(batch), why)


def _gather(state: GatherState, batch: Sequence[Gathering], device: torch.device) -> None:
    first, rank = batch[0], world().rank
    ranks = first.src.placement.fiber(rank, gather_axes(first.src, first.dst))
    numels = [sum(math.prod(one.src.box(r)[1]) for one in batch) for r in ranks]
    wholes = [
        torch.empty(one.dst.box(rank)[1], dtype=one.dst.dtype, device=device) for one in batch
    ]
    # a freed one is None: nothing will use what arrives for it
    leaves = [one.leaf() for one in batch]
    locals_ = [None if leaf is None else leaf._local for leaf in leaves]
    flat = [
        torch.zeros(math.prod(one.src.box(rank)[1]), dtype=one.src.dtype, device=device)
        if local is None
        else local.detach().reshape(-1)
        for one, local in zip(batch, locals_, strict=True)
    ]
    if len(batch) == 1 and _concatenates_to_full(first.src, first.dst, ranks, rank):
        world().comm(ranks).all_gather_into(flat[0], numels, wholes[0].view(-1))
    else:
        parts = (
            world()
            .comm(ranks)
            .all_gather(torch.cat(flat) if len(flat) > 1 else flat[0], numels, fresh=False)
        )
        at = [0] * len(ranks)
        for one, whole in zip(batch, wholes, strict=True):
            for i, r in enumerate(ranks):
                n = math.prod(shape := one.src.box(r)[1])
                _gradient_piece(whole, one.src, one.dst, r, rank).copy_(
                    parts[i][at[i] : at[i] + n].view(shape)
                )
                at[i] += n
    for one, whole, leaf, local in zip(batch, wholes, leaves, locals_, strict=True):
        state.ready[one.key] = (
            None if leaf is None or local is None else (whole, local, _write_counts(leaf))
        )


def _concatenates_to_full(src: Spec, dst: Spec, ranks: Sequence[int], rank: int) -> bool:
    """Return True if these ranks' local tensors, concatenated, are the full tensor in memory."""
    begin, whole = dst.box(rank)
    at = begin[0] if whole else 0
    for r in ranks:
        offsets, lengths = src.box(r)
        if not whole or offsets[0] != at or lengths[1:] != whole[1:]:
            return False
        at += lengths[0]
    return True


class _ParameterRef:
    """A carrier of a gathered parameter, and of its leaf, past autograd."""

    def __init__(self, whole: torch.Tensor, leaf: GlobalTensor, freed: bool) -> None:
        self.whole, self.leaf, self.freed = whole, leaf, freed


class _GatheredParameter(torch.autograd.Function):
    """A gathered parameter.

    Its backward is a reduce-scatter, together with others where the gradient only has to reach the
    leaf.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, carried: _ParameterRef, src: Spec, dst: Spec
    ) -> torch.Tensor:
        ctx.leaf, ctx.local, ctx.src, ctx.dst, ctx.freed = (
            carried.leaf,
            local,
            src,
            dst,
            carried.freed,
        )
        return carried.whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if _state().immediate or torch.is_grad_enabled() or _gradient_is_watched(ctx.leaf):
            dual, mine = ctx.dst.dual(), ctx.src.dual()
            return (
                reduce_gradient(
                    grads[0], dual, mine, ctx.leaf._reduce_dtype, "gradient of a gathered parameter"
                ),
                None,
                None,
                None,
            )
        queue_reduce_scatter(ctx.leaf, ctx.dst, grads[0], ctx.freed)
        return None, None, None, None


def _gradient_is_watched(leaf: GlobalTensor) -> bool:
    """Return True if user code may see this leaf's gradient before it is complete."""
    return bool(leaf._local._backward_hooks) or bool(leaf.__dict__.get("_accumulated"))


# --------------------------------------------------------------------------------------- scattering


def queue_reduce_scatter(
    leaf: GlobalTensor, dst: Spec, grad: torch.Tensor, freed: bool = False
) -> None:
    """Queue the gradient of a gathered parameter until a bucket is full or backward ends.

    Under ``reshard_after_forward`` the bucket is a small one, filled as gradients come.
    """
    state = _state()
    reducer().at_end(finish)
    src = leaf._spec
    state.reached.add(src.placement)
    kind = dtype_of_sum(grad, leaf._reduce_dtype)
    key: tuple[Any, ...] = (src.placement, gather_axes(src, dst), kind, grad.dtype, dst.layout)
    if not freed:
        if _is_gathered_alone(dst):
            key = (*key, state.number(leaf))
            state.scatters.limits[key] = 1
        for bucket in state.scatters.add(
            state.number(leaf), (leaf, dst, grad), grad.numel() * kind.itemsize, key
        ):
            _send(state, bucket)
        return
    # A backward pass that gathers again meets the parameters in the same order on every rank, so
    # their gradients come in the same order too.
    waiting = state.waiting.setdefault(key, [])
    waiting.append((leaf, dst, grad))
    if sum(w.nbytes for _, w, _ in waiting) >= state.order(src.placement).max_bucket_bytes(True):
        _send(state, state.waiting.pop(key))


def finish() -> None:
    """End backward: scatter what waits, and pass on leaves that other axes still have to sum."""
    state = _state()
    for bucket in [*state.scatters.finish(), *state.waiting.values()]:
        _send(state, bucket)
    state.waiting.clear()
    while state.under_way:
        _receive(state)
    arrived, state.arrived = state.arrived, []
    gradient_reducer = reducer()
    for leaf in arrived:
        if leaf._leaf is not None:
            (gradient_reducer.defer if gradient_reducer.deferred else gradient_reducer.add)(
                leaf._leaf
            )
    reached, state.reached = state.reached, set()
    for placement in reached:
        reset_prefetch(placement)


def _send(state: GatherState, items: list[Waiting]) -> None:
    leaf, dst, first = items[0]
    where, rank = leaf._spec.placement, world().rank
    ranks = where.fiber(rank, gather_axes(leaf._spec, dst))
    pieces = [
        _gradient_piece(grad, leaf._spec, whole, r, rank)
        for r in ranks
        for leaf, whole, grad in items
    ]
    kind, sizes = dtype_of_sum(first, leaf._reduce_dtype), [p.numel() for p in pieces]
    in_rows = all(p.is_contiguous() for p in pieces)
    if in_rows and len(items) == 1 and kind is first.dtype:
        chunks: Sequence[torch.Tensor] = [flatten(p) for p in pieces]  # in their own memory
    else:
        flat = torch.empty(sum(sizes), dtype=kind, device=first.device)
        if in_rows:
            torch.cat([p.view(-1) for p in pieces], out=flat)
        else:
            torch_private.copy_all(
                [
                    to.view(p.shape)
                    for to, p in zip(flat.split_with_sizes(sizes), pieces, strict=True)
                ],
                pieces,
            )
        chunks = flat.split_with_sizes(
            [sum(sizes[i : i + len(items)]) for i in range(0, len(sizes), len(items))]
        )
    with log.exchanges("gradients of gathered parameters: {} in one bucket", len(items)):
        handle = world().comm(ranks).reduce_scatter_async(chunks, "sum")
    state.under_way.append(([(leaf, grad.dtype) for leaf, _, grad in items], handle))
    while len(state.under_way) > UNDER_WAY:
        _receive(state)


def _receive(state: GatherState) -> None:
    """Wait for the bucket that was sent first, and add its gradients to the leaves."""
    leaves, handle = state.under_way.popleft()
    handle.wait()
    start = 0
    for leaf, dtype in leaves:
        shape = leaf._spec.local_shape(world().rank)
        part = handle.value[start : start + math.prod(shape)].view(shape).to(dtype)
        start += math.prod(shape)
        local = leaf._local
        if local.grad is None:
            local.grad = part
        else:
            local.grad.add_(part)
        state.arrived.append(leaf)


def _gradient_piece(grad: torch.Tensor, src: Spec, dst: Spec, r: int, rank: int) -> torch.Tensor:
    """Return the piece of a gathered parameter's gradient that belongs to rank ``r``."""
    offsets = dst.box(rank)[0]
    begin, shape = src.box(r)
    return grad[
        tuple(slice(b - o, b - o + s) for b, o, s in zip(begin, offsets, shape, strict=True))
    ]


# ------------------------------------------------------------------------------------------ freeing


@contextlib.contextmanager
def reshard_after_forward() -> Iterator[None]:
    """Free parameters gathered in the block after each use, and gather them again in backward.

    For sharded parameters (``parallelize(model, placement, "fsdp")``, ZeRO's third stage). Forward
    runs in the block, backward in it or after it. Autograd saves a note instead of a gathered
    parameter. So a rank has a bucket or two of gathered parameters, and of their gradients, at a
    time, as large as the largest parameter. Without the block, autograd keeps them all. It costs
    one more all-gather (``reshard_after_forward`` of torch's FSDP). A copy that an op makes and
    caches (autocast's) is not freed. The parameters must not change before backward has used them:
    RuntimeError, as for any tensor that autograd saves.

    >>> import globaltensor as flow
    >>> model = flow.parallelize(torch.nn.Linear(4, 2), flow.placement("cpu", [0]), "fsdp")
    >>> with reshard_after_forward():
    ...     loss = model(torch.ones(3, 4)).sum()
    >>> loss.backward()
    """
    state = _state()
    state.freed += 1
    try:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: _pack_saved(state, t), _unpack_saved
        ):
            yield
    finally:
        state.freed -= 1
        _drop_freed(state)


def _remember(state: GatherState, use: GatheredParam) -> None:
    """Register a gathered parameter, to recognize it when autograd saves it."""
    if len(state.alive) > MAX_ALIVE:
        _drop_freed(state)
    state.alive[use.storage.cdata] = use


def _drop_freed(state: GatherState) -> None:
    if state.alive:
        for key in [k for k, use in state.alive.items() if use.is_freed()]:
            del state.alive[key]


class _SavedGather(NamedTuple):
    """A note that autograd saves instead of a gathered parameter.

    It names the parameter, and the tensor's view of its memory.
    """

    leaf: GlobalTensor
    dst: Spec
    local: torch.Tensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _pack_saved(state: GatherState, t: torch.Tensor) -> Any:
    use = state.alive.get(torch_private.storage_key(t))
    leaf, local = (None, None) if use is None or use.is_freed() else (use.leaf(), use.local())
    if (
        use is None
        or leaf is None
        or local is None
        or t.dtype is not use.dst.dtype
        or t.is_conj()
        or t.is_neg()
    ):
        return t, t._version  # torch checks the version only where there are no hooks
    return _SavedGather(leaf, use.dst, local, use.version, t.size(), t.stride(), t.storage_offset())


def _unpack_saved(saved: Any) -> torch.Tensor:
    if not isinstance(saved, _SavedGather):
        t, version = saved
        if t._version != version:
            raise _version_error(t, version)
        return t  # type: ignore[no-any-return]
    leaf = saved.leaf
    if leaf._local is not saved.local or saved.local._version != saved.version:
        raise _version_error(leaf, saved.version)
    with torch.no_grad():
        return _gather_for_use(_state(), leaf, leaf._spec, saved.dst, True, RECALLED).as_strided(
            saved.size, saved.stride, saved.offset
        )


def _version_error(t: torch.Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(t.shape)} is at version "
        f"{t._version}; expected version {version} instead"
    )
