"""How the gradients of leaves are summed over the ranks.

By duality the gradient of a broadcast leaf arrives as partial sums. They are reduced in buckets,
flattened over the axes, overlapped with the rest of backward (as torch's DistributedDataParallel
does), and deferred under ``no_sync()``. Of a leaf whose gradient is kept in shares (ZeRO's second
stage) they are reduce-scattered.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ..._base import torch_private
from ...boxing import box
from ...distributed.world import world
from ...errors import GlobalTensorError
from ...sharding.spec import Spec, StorageSpec
from ..global_tensor import GlobalTensor
from .buckets import Buckets
from .flat_buffers import FlatBuffer, FlatBufferPool
from .pending_scale import PendingScale
from .watchers import Watcher, Watchers, end_of

__all__ = [
    "LeafGradient",
    "Reducer",
    "attach",
    "detach",
    "dtype_of_sum",
    "fuse_loss_count",
    "no_sync",
    "observe_gradients",
    "reduce_gradient",
    "reducer",
    "set_grad_reduce_dtype",
    "settle",
]  # fmt: skip

Target = TypeVar("Target", torch.Tensor, torch.nn.Module)

# As torch's reducer: the first bucket is small, so that communication starts early; the others are
# large enough for bandwidth, small enough to overlap.
FIRST_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
# a bucket of this size has its room before its gradients come; below, one call that copies all
# costs less than a call for each
ROOM_BYTES = 8 << 20
_UNDER_WAY = 2  # buckets of shares: each holds gradients whole until it has arrived


def dtype_of_sum(grad: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """In which dtype a gradient is summed over the ranks, where its leaf wants ``wanted``."""
    return grad.dtype if wanted is None or not grad.is_floating_point() else wanted


def reduce_gradient(
    grad: torch.Tensor, dual: Spec, spec: Spec, wanted: torch.dtype | None, why: str
) -> torch.Tensor:
    """A gradient boxed from ``dual`` to ``spec``, summed in the dtype that its leaf wants.
    Differentiable."""
    kind = dtype_of_sum(grad, wanted)
    if kind is grad.dtype:
        return box(grad, dual, spec, why=why)
    return box(grad.to(kind), dual.replace(dtype=kind), spec.replace(dtype=kind), why=why).to(
        grad.dtype
    )


class LeafGradient:
    """The gradient of one leaf whose contributions lie on several ranks. ``value`` is this rank's
    part, lying as ``kept``: the leaf's own layout, or shares.

    It is there as long as the leaf's local tensor, whose hook holds it. It must not hold that in
    turn: torch shows the collector nothing of these hooks, and parameters would stay for good."""

    def __init__(self, leaf: GlobalTensor, number: int) -> None:
        self.number = number
        self._local = weakref.ref(leaf._local)
        self.spec = leaf._spec
        self.dual = leaf._spec.dual()
        self.reduce_dtype = leaf._reduce_dtype
        self.owner = weakref.ref(leaf)
        self.value: torch.Tensor | None = None
        self.bucketed, self.ranks, self.way, self.kept = (
            False,
            (),
            (self.spec.placement, (), False),
            self.spec,
        )  # see `keep`
        self.planned: PlannedBucket | None = None  # the bucket that its gradient waits for
        self._sizes: dict[torch.dtype, tuple[int, tuple[Any, ...]]] = {}  # see `size`
        #: Where the shares of each of the ranks lie in the gradient, and the shape of this rank's.
        self.cuts: list[tuple[slice, ...]] = []
        self.part: tuple[int, ...] = ()
        self.unsummed: _Unsummed | None = (
            None  # the passes under ``no_sync()`` from which it has contributions
        )
        self.hooks: OrderedDict[int, Callable[[GlobalTensor], None]] = leaf.__dict__.setdefault(
            "_accumulated", OrderedDict()
        )  # the user's
        self.keep(leaf._grad_shard)
        reducer().leaves[number] = self
        weakref.finalize(self, reducer().flats.drop, [number]).atexit = False
        self.handle = self.local.register_post_accumulate_grad_hook(self.arrived)

    @property
    def local(self) -> torch.Tensor:
        found = self._local()
        assert found is not None, "the leaf is there, or a pass that needs it"
        return found

    def keep(self, shares: StorageSpec | None) -> None:
        """From now on ``value`` lies as ``shares`` says; None: as the leaf does."""
        self._sizes.clear()
        self.planned = None
        placement, rank = self.spec.placement, world().rank
        if shares is not None:
            self.kept, self.ranks, self.way = (
                shares,
                shares.ranks(rank),
                (shares.placement, shares.axes, True),
            )
            self.bucketed = True
            self.cuts, self.part = (
                [shares.share(rank, r) for r in self.ranks],
                shares.local_shape(rank),
            )
            return
        summed = tuple(
            a for a, e in enumerate(self.spec.layout) if e.is_broadcast and placement.shape[a] > 1
        )
        self.bucketed = bool(summed) and not any(e.is_partial for e in self.spec.layout)
        self.kept, self.ranks, self.way = (
            self.spec,
            placement.fiber(rank, summed) if self.bucketed else (),
            (placement, summed, False),
        )

    def key(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """What gradients must have in common to go in one bucket."""
        return (
            self.way,
            dtype
            if self.reduce_dtype is None or not dtype.is_floating_point
            else self.reduce_dtype,
            dtype,
            self.local.device,
        )

    def size(self, dtype: torch.dtype) -> tuple[int, tuple[Any, ...]]:
        """(bytes, key) of a gradient of this dtype in a bucket."""
        found = self._sizes.get(dtype)
        if found is None:
            key = self.key(dtype)
            found = self._sizes[dtype] = (self.local.numel() * key[1].itemsize, key)
        return found

    def sum_in(self, dtype: torch.dtype | None) -> None:
        """From now on it is summed in this dtype; None: in its own."""
        self.reduce_dtype, self.planned = dtype, None
        self._sizes.clear()

    def arrived(self, local: torch.Tensor) -> None:
        """Torch has put a contribution into the local tensor's ``.grad``."""
        planned = self.planned
        if planned is not None and planned.ready and self.number not in planned.came:
            planned.came[self.number] = self
            if len(planned.came) == len(planned.numbers):
                reducer().join(planned)
            return
        here = reducer()
        if not here.deferred:
            here.add(self)
        else:
            here.defer(self)

    def release(self) -> None:
        """No contribution of passes under ``no_sync()`` is left."""
        passes, self.unsummed = self.unsummed, None
        if passes is not None:
            passes.summed(self.number)

    def take(self) -> torch.Tensor | None:
        if self.unsummed is not None:
            self.release()
        local = self._local()
        if local is None:
            return None  # nobody can ask for it any more
        grad, local.grad = local.grad, None
        return grad

    def put(self, grad: torch.Tensor) -> None:
        """Add a reduced gradient, in place where torch would."""
        if (
            self.value is None
        ):  # torch copies a gradient with a graph, too: nobody can detach a view in place
            self.value = grad.clone() if grad.requires_grad and grad._is_view() else grad
        elif grad.requires_grad or self.value.requires_grad:
            self.value = self.value + grad
        else:
            self.value.add_(grad)

    def settle(self) -> torch.Tensor | None:
        """What has come in up to now, reduced. Collective where something is pending."""
        if self.local.grad is not None:
            grad = self.take()
            if grad.layout is not torch.strided:  # type: ignore[union-attr]
                grad = grad.to_dense()  # type: ignore[union-attr]
            self.put(
                reduce_gradient(
                    grad, self.dual, self.kept, self.reduce_dtype, "gradient of a leaf"
                ).contiguous()
            )  # type: ignore[arg-type]
        return self.value


class _Unsummed(Watcher):
    """What passes under ``no_sync()`` have left unsummed: contributions that nothing is owed to,
    and that those of a later pass are added to."""

    __slots__ = ("leaves", "over")

    def __init__(self, among: Watchers) -> None:
        super().__init__(among)
        self.leaves: set[int] = set()  # which have some
        self.over = False  # the block has been left, and all ranks have the same leaves

    def summed(self, number: int) -> None:
        """The contributions to a leaf have been taken."""
        self.leaves.discard(number)
        if self.over and not self.leaves:
            self.end()


class PlannedBucket:
    """A bucket of the plan each of whose leaves gets one gradient in a pass. These wait until all
    are there: of a small bucket where they came, for one look at all costs less than one at each;
    of a large one in its room, where they will be summed. So each is copied while it is in the
    caches, and the memory that it came in serves the next: whole buckets that are let go together
    go back to the system, to be touched for the first time again in each step."""

    __slots__ = ("at", "came", "index", "key", "numbers", "open", "placed", "ready", "roomy", "row")

    def __init__(self, index: int, numbers: list[int], key: tuple[Any, ...], roomy: bool) -> None:
        self.index, self.numbers, self.key, self.roomy = index, numbers, key, roomy
        self.at = {n: i for i, n in enumerate(numbers)}
        self.begin()

    def begin(self) -> None:
        """Another pass."""
        self.came: dict[int, LeafGradient] = {}  # by number
        self.placed: dict[int, torch.Tensor] = {}  # of these, what is in the room
        self.row: FlatBuffer | None = (
            None  # the room, with one element more, for what rides with it
        )
        self.open = True  # it has not been seen to yet
        # open, the end of this pass is being waited for, and a gradient that comes has but to be
        # counted
        self.ready = False

    def fits(self, grads: Iterable[torch.Tensor | None]) -> bool:
        """Whether gradients may lie in a row with others, and are what was planned."""
        dtype = self.key[2]
        return all(
            g is not None and g.dtype is dtype and not g.requires_grad and g.layout is torch.strided
            for g in grads
        )


class Reducer:
    """Collects the gradients of leaves while backward runs and sums them over the ranks, a bucket
    at a time."""

    def __init__(self) -> None:
        self.deferred = 0  # blocks of ``no_sync()`` around what runs
        self.unsummed: list[_Unsummed] = []  # of each of these
        # all leaves with contributions of several ranks have been on all ranks: these know alike
        # when none is left unsummed
        self.everywhere = True
        self.buckets: Buckets[tuple[LeafGradient, torch.Tensor]] = Buckets(
            FIRST_BYTES, BUCKET_BYTES, lambda a, b: (a[0], a[1] + b[1])
        )
        self.leaves: weakref.WeakValueDictionary[int, LeafGradient] = (
            weakref.WeakValueDictionary()
        )  # by number, those that had gradients
        self.planned: dict[int, PlannedBucket] = {}  # by their number in the plan
        self.alone: list[tuple[LeafGradient, torch.Tensor]] = []
        self.flats = FlatBufferPool()
        self.numbers = 0
        #: A bucket, its gradients in a row, the part of each, what to wait for, whether its factor
        #: is still to come.
        self.sent: list[
            tuple[
                list[tuple[LeafGradient, torch.Tensor]],
                torch.Tensor,
                Sequence[torch.Tensor],
                Any,
                bool,
            ]
        ] = []
        self.under_way: deque[tuple[list[LeafGradient], Any, torch.dtype]] = (
            deque()
        )  # buckets of shares
        self.finished: list[LeafGradient] = []
        self.unwatched: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # local leaves that are owed the factor as well, and what has come to them
        self.queued = False
        self.before: list[Callable[[], None]] = []
        self.owed: PendingScale | None = (
            None  # what every gradient of the pass under way has yet to be multiplied by
        )
        # True if every rank's gradients lack it; otherwise each rank decides for itself, and
        # multiplies its own before the sum
        self.scaled_after_sum = False
        self.rides = False  # whether such numbers may travel with gradients (`fuse_loss_count`)
        self.asked = False  # for the last such number before a backward pass could bring it
        # what may see gradients before they come here (hooks, leaves of other kinds): then none may
        # be owed anything
        self.watchers = Watchers()
        self._always: Watcher | None = None

    def number(self) -> int:
        """The number of a new leaf: the same on every rank, since all make the same leaves in the
        same order."""
        self.numbers += 1
        return self.numbers

    @property
    def watched(self) -> bool:
        """Return True if gradients may be seen on this rank before they come here. Set to True:
        from now on, for good."""
        return bool(self.deferred or self.watchers.alive)

    @watched.setter
    def watched(self, value: bool) -> None:
        self._always = Watcher(self.watchers) if value else None

    def may_owe(self, told: bool) -> bool:
        """Return True if the gradients of a pass may be owed a factor. ``told``: the ranks are
        telling each other the factor already, so each decides for itself; otherwise by what all
        ranks know."""
        return not (self.deferred or (self.watchers.alive if told else self.watchers.open))

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Leave what arrives in the block unsummed."""
        passes = _Unsummed(self.watchers)
        self.unsummed.append(passes)
        self.deferred += 1
        try:
            yield
        finally:
            self.deferred -= 1
            self.unsummed.pop()
            passes.over = self.everywhere
            passes.summed(0)  # where there was nothing

    def defer(self, leaf: LeafGradient) -> None:
        """The gradient of a leaf has come, and stays unsummed."""
        passes = self.unsummed[-1]
        if leaf.unsummed is not passes:
            leaf.release()
            leaf.unsummed = passes
            passes.leaves.add(leaf.number)

    def at_end(self, before: Callable[[], None] | None = None) -> None:
        """Finish when the backward pass under way ends; ``before`` runs first, once."""
        if before is not None and before not in self.before:
            self.before.append(before)
        if not self.queued:
            self.queued = True
            for planned in self.planned.values():
                planned.ready = not (planned.roomy or self.deferred)
            torch_private.queue_backward_callback(self.finish)

    def add(self, leaf: LeafGradient) -> None:
        """A leaf's gradient has come."""
        if not self.queued:
            self.at_end()
        planned = leaf.planned
        if planned is None or not planned.open:
            self._take(leaf, leaf.take())
            return
        came = planned.came
        if leaf.number in came:
            self._part(planned)
            if leaf.number not in planned.placed:
                self.buckets.again(leaf.number)  # into the same tensor
            return
        came[leaf.number] = leaf
        if planned.roomy and planned.fits([leaf.local.grad]):
            self._place(planned, leaf)
        if len(came) == len(planned.numbers):
            self.join(planned)

    def _place(self, planned: PlannedBucket, leaf: LeafGradient) -> None:
        """Put a gradient where it will be summed."""
        if planned.row is None:
            leaves = [
                leaf
                for leaf in map(self.leaves.get, planned.numbers)
                if leaf is not None and leaf.local.is_contiguous()
            ]
            planned.roomy = len(leaves) == len(planned.numbers) and all(
                leaf.size(leaf.local.dtype)[1] == planned.key for leaf in leaves
            )
            if not planned.roomy:
                return
            planned.row = self.flats.take(
                planned.numbers, [leaf.local for leaf in leaves], planned.key[1], planned.key[3]
            )
        grad = leaf.take()
        assert grad is not None
        planned.placed[leaf.number] = planned.row.parts[planned.at[leaf.number]].copy_(grad)

    def join(self, planned: PlannedBucket) -> None:
        """All gradients of a bucket are there."""
        came, placed, planned.open, planned.ready = planned.came, planned.placed, False, False
        items = {
            n: (came[n], placed[n] if n in placed else came[n].take()) for n in planned.numbers
        }
        if len(placed) == len(items) or planned.fits([grad for _, grad in items.values()]):
            for bucket in self.buckets.whole(planned.index, items):  # type: ignore[arg-type]
                self.send(bucket)
        else:
            for leaf, grad in items.values():
                self._take(leaf, grad)

    def _part(self, planned: PlannedBucket) -> None:
        """The gradients of a bucket one by one: in this pass it is another."""
        planned.open = planned.ready = False
        for n, leaf in planned.came.items():
            self._take(leaf, planned.placed.get(n))
            self._take(leaf, leaf.take())

    def _form(self) -> None:
        """After a plan was made: what to wait for."""
        for leaf in self.leaves.values():
            leaf.planned = None
        self.planned.clear()
        for i, bucket in enumerate(self.buckets.plan):
            arrivals: list[Any] = [self.buckets.planned[n] for n in bucket]
            way, kind, dtype, _ = key = arrivals[0][2]
            if way[2] or not all(times == 1 and each == key for times, _, each in arrivals):
                continue
            roomy = kind is dtype and sum(nbytes for _, nbytes, _ in arrivals) >= ROOM_BYTES
            planned = self.planned[i] = PlannedBucket(i, list(bucket), key, roomy)
            for leaf in map(self.leaves.get, bucket):
                if leaf is not None:
                    leaf.planned = planned

    def _take(self, leaf: LeafGradient, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        if not leaf.bucketed or grad.requires_grad or grad.layout is not torch.strided:
            self.alone.append((leaf, grad))
            return
        for bucket in self.buckets.add(leaf.number, (leaf, grad), *leaf.size(grad.dtype)):
            self.send(bucket)

    def expect(self, leaves: Sequence[LeafGradient], limit: int) -> None:
        """Each of these leaves will get one gradient in the next pass, of its own dtype; buckets of
        shares hold at most ``limit`` bytes, or one gradient."""
        sizes = {leaf.number: leaf.size(leaf.local.dtype) for leaf in leaves}
        self.buckets.expect(
            {n: (1, *size) for n, size in sizes.items()},
            {key: limit for _, key in sizes.values() if key[0][2]},
        )
        self._form()

    def scatter(self, bucket: list[tuple[LeafGradient, torch.Tensor]]) -> None:
        """Let go of gradients; each rank gets its shares of their sums."""
        leaves = [leaf for leaf, _ in bucket]
        first, dtype = leaves[0], bucket[0][1].dtype
        parts = [g[leaf.cuts[i]].reshape(-1) for i in range(len(first.ranks)) for leaf, g in bucket]
        flat = torch.empty(
            sum(p.numel() for p in parts), dtype=first.key(dtype)[1], device=parts[0].device
        )
        torch.cat(parts, out=flat)
        chunks = flat.split_with_sizes(
            [
                sum(p.numel() for p in parts[i : i + len(bucket)])
                for i in range(0, len(parts), len(bucket))
            ]
        )
        bucket.clear()
        if self.owed is not None:
            self.owed.start()
        if not self.scaled_after_sum and (factor := self.factor()) != 1:
            flat *= factor
        handle = world().comm(first.ranks).reduce_scatter_async(chunks, "sum")
        self.under_way.append((leaves, handle, dtype))
        while len(self.under_way) > _UNDER_WAY:
            self.receive()

    def receive(self) -> None:
        """Wait for the bucket of shares that was sent first."""
        leaves, handle, dtype = self.under_way.popleft()
        handle.wait()
        value, at = (
            handle.value * factor
            if self.scaled_after_sum and (factor := self.factor()) != 1
            else handle.value,
            0,
        )
        for leaf in leaves:
            n = math.prod(leaf.part)
            leaf.put(value[at : at + n].view(leaf.part).to(dtype))
            at += n
            self.finished.append(leaf)

    def send(self, bucket: list[tuple[LeafGradient, torch.Tensor]]) -> None:
        if isinstance(bucket[0][0].kept, StorageSpec):
            return self.scatter(bucket)
        way, kind = bucket[0][0].way, dtype_of_sum(bucket[0][1], bucket[0][0].reduce_dtype)
        rider = self.owed.rider(way[0], way[1], kind) if self.owed is not None else None
        planned = self.planned.get(self.buckets.bucket.get(bucket[0][0].number, -1))
        grads: Sequence[torch.Tensor] = [g for _, g in bucket]
        row = planned.row if planned is not None else None
        if row is None or list(map(id, grads)) != list(map(id, row.parts)):
            row = self.flats.take([leaf.number for leaf, _ in bucket], grads, kind, grads[0].device)
            torch_private.copy_all(row.parts, grads)
        flat = row.flat if rider is not None else row.flat[:-1]
        if rider is not None:
            flat[-1].copy_(rider)
        # Where each rank knows the number by itself it pays before the sum: then it is its own
        # matter whether it owes anything.
        later = rider is not None or (self.owed is not None and self.owed.riding)
        if not later and (factor := self.factor()) != 1:
            flat *= factor
        handle = (
            world().comm(bucket[0][0].ranks).all_reduce_async(flat, "sum") if flat.numel() else None
        )
        if rider is not None and self.owed is not None and handle is not None:
            self.owed.ride(handle.wait, flat[-1:])
            flat = flat[:-1]
        self.sent.append((bucket, flat, row.parts, handle, later))
        return None

    def factor(self) -> float:
        """What the gradients of this pass have to be multiplied by."""
        return 1.0 if self.owed is None else self.owed.factor()

    def abort(self) -> None:
        """A backward pass has failed: what it had collected is dropped, so that the next one starts
        afresh."""
        self.queued = False
        self.buckets.drop()
        self.before, self.sent, self.finished, self.alone, self.unwatched = [], [], [], [], []
        self.under_way.clear()
        for planned in self.planned.values():
            for leaf in planned.came.values() if planned.open else ():
                leaf.take()
            planned.begin()

    def finish(self) -> None:
        """The end of a backward pass."""
        try:
            for before in self.before:
                before()
            for planned in self.planned.values():
                if planned.open and planned.came:
                    self._part(planned)
            plan = self.buckets.planned
            for rest in self.buckets.finish():
                self.send(rest)
            if self.buckets.planned is not plan:
                self._form()
            while self.under_way:
                self.receive()
            for bucket, flat, parts, handle, later in self.sent:
                if handle is not None:
                    handle.wait()
                if later and (factor := self.factor()) != 1:
                    flat *= factor
                same = flat.dtype is bucket[0][1].dtype
                for (leaf, grad), part in zip(bucket, parts, strict=True):
                    leaf.put(part if same and grad.is_contiguous() else grad.copy_(part))
                    self.finished.append(leaf)
            for leaf, grad in sorted(self.alone, key=lambda entry: entry[0].number):
                with torch.set_grad_enabled(grad.requires_grad):
                    grad = grad if grad.layout is torch.strided else grad.to_dense()
                    grad = grad * factor if (factor := self.factor()) != 1 else grad
                    leaf.put(
                        reduce_gradient(
                            grad, leaf.dual, leaf.kept, leaf.reduce_dtype, "gradient of a leaf"
                        )
                    )
                self.finished.append(leaf)
            for local, grad in self.unwatched:
                if local.grad is not None and (factor := self.factor()) != 1:
                    local.grad.add_(grad, alpha=factor - 1)
            for leaf in self.finished:
                owner = leaf.owner() if leaf.hooks else None
                if owner is not None:
                    for hook in list(leaf.hooks.values()):
                        hook(owner)
        finally:
            self.abort()


def reducer() -> Reducer:
    """The reducer of this rank."""
    here = world()
    found = here.reducer
    if found is None:
        found = here.reducer = Reducer()
    return found  # type: ignore[no-any-return]


def settle(leaves: Iterable[torch.Tensor]) -> None:
    """Sum over the ranks, in buckets, what has been deferred for these leaves; in one order on all
    ranks."""
    here = reducer()
    here.queued = True
    for leaf in leaves:
        pending = leaf._leaf if isinstance(leaf, GlobalTensor) else None
        if pending is not None and pending.local.grad is not None:
            here.add(pending)
    here.finish()


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Backward passes inside leave the gradients of leaves unsummed; the first one outside (or
    reading ``.grad``) sums all at once.

    For gradient accumulation: as ``DistributedDataParallel.no_sync``.
    """
    with reducer().deferring():
        yield


def set_grad_reduce_dtype(target: Target, dtype: torch.dtype | None) -> Target:
    """Sum the gradients of a global tensor, or of a module's global parameters, over the ranks in
    ``dtype``, then cast them back; returns ``target``.

    For parameters in bfloat16 or float16: ``flow.set_grad_reduce_dtype(model, torch.float32)``
    rounds once what otherwise may be rounded at each addition, and sends twice the bytes. Holds for
    the sums that data parallelism and sharded parameters need (all-reduce, reduce-scatter). None:
    in the gradient's own dtype. The same on every rank. Raises GlobalTensorError for a dtype that
    is not a real floating one. (``MixedPrecision.reduce_dtype`` of torch's FSDP.)

    >>> import torch
    >>> import globaltensor as flow
    >>> model = torch.nn.Linear(4, 2).bfloat16().to_global(flow.placement("cpu", [0]), flow.sbp.broadcast)
    >>> model = flow.set_grad_reduce_dtype(model, torch.float32)
    """  # noqa: E501
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise GlobalTensorError(
            f"reduce_dtype: gradients are summed in a floating dtype such as torch.float32, not "
            f"{dtype}"
        )
    for p in target.parameters() if isinstance(target, torch.nn.Module) else (target,):
        if isinstance(p, GlobalTensor):
            p._reduce_dtype = dtype
            if p._leaf is not None:
                p._leaf.sum_in(dtype)
    return target


def observe_gradients(local: torch.Tensor) -> None:
    """Gradients of this rank may be seen on their way as long as the graph is there that has
    computed ``local``; of a leaf, as long as that requires grad."""
    reducer().watchers.of(local)


def fuse_loss_count(mode: bool = True) -> None:
    """Let the number of targets that a mean loss divides by travel with the gradients of its
    backward pass: one collective less in each data-parallel step.

    It is a promise of the program that all ranks do the same with losses and gradients on their
    way: before a backward pass all or none read the loss (``to_local``), hook into tensors or ask
    for ``grad_fn``. Off unless called; in static graphs, whose ranks run one program, the number
    travels so anyway. All ranks must call it alike.
    """
    reducer().rides = bool(mode)


def detach(leaf: GlobalTensor) -> None:
    """A leaf no longer requires grad."""
    end_of(leaf._local)


def _watch_from_first_gradient(local: torch.Tensor) -> None:
    """Begin to watch a leaf that one rank alone may have made (read from a file, copied) when a
    gradient comes to it: this pass all ranks run. In the pass itself the gradient is multiplied at
    the end by the factor that it may be owed (`Reducer.finish`)."""
    here, of = reducer(), weakref.ref(local)

    def begin(grad: torch.Tensor) -> None:
        handle.remove()
        if (leaf := of()) is not None:
            if here.owed is not None:
                if not here.queued:
                    here.at_end()
                here.unwatched.append((leaf, grad))
            here.watchers.of(leaf)

    handle = local.register_hook(begin)  # type: ignore[no-untyped-call]


def attach(leaf: GlobalTensor, maybe_alone: bool = False) -> None:
    """A leaf now requires grad: watch for its contributions where other ranks hold some of them.
    ``maybe_alone``: other ranks may not have made it."""
    known, leaf._leaf = leaf._leaf, None
    if torch_private.is_fake(leaf._local) and torch_private.function_mode_on():
        return  # of a program: what comes to its leaves is told by it
    spec, number = (
        leaf._spec,
        reducer().number(),
    )  # ranks outside the placement count too, and watch: all must agree
    shared = any(not e.is_split and spec.placement.shape[a] > 1 for a, e in enumerate(spec.layout))
    if not shared:
        if maybe_alone and leaf._local.is_leaf:
            _watch_from_first_gradient(leaf._local)
        else:
            observe_gradients(leaf._local)
        return
    here = reducer()
    here.everywhere = here.everywhere and len(spec.placement.flat) == world().size
    if leaf._local.is_leaf and spec.placement.coordinate(world().rank) is not None:
        if known is not None and known._local() is leaf._local and known.spec is spec:
            # it was told so before; of two, the first would take what the second is asked for
            leaf._leaf = known
            return
        if known is not None:
            known.handle.remove()
        leaf._leaf = LeafGradient(leaf, number)
