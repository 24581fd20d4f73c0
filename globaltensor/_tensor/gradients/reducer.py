"""The reducer: it sums the gradients of leaves over the ranks.

`attach` starts it for a leaf that requires grad.

By duality the gradient of a broadcast leaf arrives as partial sums. They are reduced in buckets,
flattened over the axes, overlapped with the rest of backward (as in torch's
DistributedDataParallel), and deferred under ``no_sync()``. Gradients that are stored in shards
(ZeRO's second stage) are reduce-scattered.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..._base import torch_private
from ...boxing import box, log
from ...distributed.world import world
from ...distributed.world_base import World, on_forget
from ...errors import GlobalTensorError
from ...sharding.spec import Spec, StorageSpec
from ..global_tensor import GlobalTensor
from .buckets import Buckets
from .flat_buffers import FlatBuffer, FlatBufferPool
from .pending_scale import PendingScale
from .watchers import Watcher, Watchers

if TYPE_CHECKING:
    from .leaf import LeafGradient

__all__ = [
    "Reducer",
    "call_accumulated_hooks",
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

# As in torch's reducer, the first bucket is small, so that communication starts early. The others
# are large enough for bandwidth, and small enough to overlap.
FIRST_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
# A bucket of this size gets its buffer before its gradients arrive. For smaller ones, one call that
# copies all gradients costs less than a call for each.
ROOM_BYTES = 8 << 20
# maximum number of buckets of shards in transit: each holds full gradients until it has arrived
_UNDER_WAY = 2


def dtype_of_sum(grad: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a gradient is summed over the ranks.

    ``wanted``: the dtype that its leaf wants, or None.
    """
    return grad.dtype if wanted is None or not grad.is_floating_point() else wanted


def reduce_gradient(
    grad: torch.Tensor, dual: Spec, spec: Spec, wanted: torch.dtype | None, why: str
) -> torch.Tensor:
    """Return a gradient boxed from ``dual`` to ``spec``, summed in the dtype that its leaf wants.

    The function is differentiable.
    """
    kind = dtype_of_sum(grad, wanted)
    if kind is grad.dtype:
        return box(grad, dual, spec, why=why)
    return box(grad.to(kind), dual.replace(dtype=kind), spec.replace(dtype=kind), why=why).to(
        grad.dtype
    )


class UnsummedPass(Watcher):
    """A watcher for contributions that passes under ``no_sync()`` have left unsummed.

    No factor is pending on these contributions, and those of a later pass are added to them.
    """

    __slots__ = ("leaves", "over")

    def __init__(self, among: Watchers) -> None:
        super().__init__(among)
        self.leaves: set[int] = set()  # the leaves that have some
        self.over = False  # the block has been left, and all ranks have the same leaves

    def summed(self, number: int) -> None:
        """Record that the contributions to a leaf have been taken."""
        self.leaves.discard(number)
        if self.over and not self.leaves:
            self.end()


class PlannedBucket:
    """A planned bucket whose leaves each receive exactly one gradient in a pass.

    Its gradients wait until all have arrived. Those of a small bucket wait in their own memory: one
    check of all costs less than one for each. Those of a large bucket wait in the buffer in which
    they will be summed. So each is copied while it is in the caches, and its memory serves the next
    one. Otherwise all the gradients of a bucket would be freed together and returned to the system.
    Each step would then touch that memory for the first time again.
    """

    __slots__ = ("at", "came", "index", "key", "numbers", "open", "placed", "ready", "roomy", "row")

    def __init__(self, index: int, numbers: list[int], key: tuple[Any, ...], roomy: bool) -> None:
        self.index, self.numbers, self.key, self.roomy = index, numbers, key, roomy
        self.at = {n: i for i, n in enumerate(numbers)}
        self.begin()

    def begin(self) -> None:
        """Reset the bucket for another pass."""
        self.came: dict[int, LeafGradient] = {}  # by number
        self.placed: dict[int, torch.Tensor] = {}  # by number: the gradients in the buffer
        # The buffer, with one more element for a number that is summed with the gradients.
        self.row: FlatBuffer | None = None
        self.open = True  # it has not been handled yet
        # it is open, the callback at the end of this pass is queued, and an arriving gradient has
        # only to be counted
        self.ready = False

    def fits(self, grads: Iterable[torch.Tensor | None]) -> bool:
        """Return True if gradients may share a flat buffer, and are of the planned dtype."""
        dtype = self.key[2]
        return all(
            g is not None and g.dtype is dtype and not g.requires_grad and g.layout is torch.strided
            for g in grads
        )


class Reducer:
    """A collector of the gradients of leaves, which sums them over the ranks while backward runs.

    It sums a bucket at a time.
    """

    def __init__(self) -> None:
        self.deferred = 0  # number of active ``no_sync()`` blocks
        self.unsummed: list[UnsummedPass] = []  # one for each of these blocks
        # True if all leaves with contributions of several ranks were placed on all ranks. Then all
        # ranks know alike when none is left unsummed.
        self.everywhere = True
        self.buckets: Buckets[tuple[LeafGradient, torch.Tensor]] = Buckets(
            FIRST_BYTES, BUCKET_BYTES, lambda a, b: (a[0], a[1] + b[1])
        )
        # By number, the leaves that had gradients.
        self.leaves: weakref.WeakValueDictionary[int, LeafGradient] = weakref.WeakValueDictionary()
        self.planned: dict[int, PlannedBucket] = {}  # by their index in the plan
        self.alone: list[tuple[LeafGradient, torch.Tensor]] = []
        self.flats = FlatBufferPool()
        self.numbers = 0
        #: (bucket, its gradients in a flat buffer, the part of each, the handle to wait for, True
        #: if the factor is still to be applied).
        self.sent: list[
            tuple[
                list[tuple[LeafGradient, torch.Tensor]],
                torch.Tensor,
                Sequence[torch.Tensor],
                Any,
                bool,
            ]
        ] = []
        # Buckets of shards in transit.
        self.under_way: deque[tuple[list[LeafGradient], Any, torch.dtype]] = deque()
        self.finished: list[LeafGradient] = []
        # Local leaves that also lack the factor, and the gradients that have arrived there.
        self.unwatched: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.queued = False
        self.before: list[Callable[[], None]] = []
        # The factor that every gradient of the current pass must still be multiplied by, on all
        # ranks.
        self.owed: PendingScale | None = None
        self.rides = False  # True if such numbers may be sent with gradients (`fuse_loss_count`)
        # the last such number was asked for before a backward pass could send it
        self.asked = False
        # Reasons for which gradients may be seen before they arrive here (hooks, leaves of other
        # kinds): then no factor may be pending on them.
        self.watchers = Watchers()
        self._always: Watcher | None = None

    def number(self) -> int:
        """Return the number of a new leaf.

        It is the same on every rank, since all ranks make the same leaves in the same order.
        """
        self.numbers += 1
        return self.numbers

    @property
    def watched(self) -> bool:
        """True if gradients may be seen on this rank before they arrive here.

        Setting it to True holds from then on, for good.
        """
        return bool(self.deferred or self.watchers.alive)

    @watched.setter
    def watched(self, value: bool) -> None:
        self._always = Watcher(self.watchers) if value else None

    def may_owe(self) -> bool:
        """Return True if a factor may be pending on the gradients of a pass.

        The answer follows from what all ranks know. If each rank decided alone, gradients with the
        factor and without it would be added where a backward pass moves them between ranks.
        """
        return not (self.deferred or self.watchers.open)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Leave gradients that arrive in the block unsummed."""
        passes = UnsummedPass(self.watchers)
        self.unsummed.append(passes)
        self.deferred += 1
        try:
            yield
        finally:
            self.deferred -= 1
            self.unsummed.pop()
            passes.over = self.everywhere
            passes.summed(0)  # for a block without gradients

    def defer(self, leaf: LeafGradient) -> None:
        """Record that a leaf's gradient has arrived and stays unsummed."""
        passes = self.unsummed[-1]
        if leaf.unsummed is not passes:
            leaf.release()
            leaf.unsummed = passes
            passes.leaves.add(leaf.number)

    def at_end(self, before: Callable[[], None] | None = None) -> None:
        """Finish when the current backward pass ends. ``before`` runs first, once."""
        if before is not None and before not in self.before:
            self.before.append(before)
        if not self.queued:
            self.queued = True
            for planned in self.planned.values():
                planned.ready = not (planned.roomy or self.deferred)
            torch_private.queue_backward_callback(self.finish)

    def add(self, leaf: LeafGradient) -> None:
        """Add a leaf's gradient that has arrived."""
        if not self.queued:
            self.at_end()
        planned = leaf.planned
        if planned is None or not planned.open:
            self._add_to_bucket(leaf, leaf.take())
            return
        came = planned.came
        if leaf.number in came:
            self._dissolve_bucket(planned)
            if leaf.number not in planned.placed:
                self.buckets.add_again(leaf.number)  # it is added to the same tensor
            return
        came[leaf.number] = leaf
        if planned.roomy and planned.fits([leaf.local.grad]):
            self._copy_into_buffer(planned, leaf)
        if len(came) == len(planned.numbers):
            self.join(planned)

    def _copy_into_buffer(self, planned: PlannedBucket, leaf: LeafGradient) -> None:
        """Copy a gradient into the buffer in which it will be summed."""
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
        """Handle a bucket whose gradients have all arrived."""
        came, placed, planned.open, planned.ready = planned.came, planned.placed, False, False
        items = {
            n: (came[n], placed[n] if n in placed else came[n].take()) for n in planned.numbers
        }
        if len(placed) == len(items) or planned.fits([grad for _, grad in items.values()]):
            for bucket in self.buckets.add_all(planned.index, items):  # type: ignore[arg-type]
                self.send(bucket)
        else:
            for leaf, grad in items.values():
                self._add_to_bucket(leaf, grad)

    def _dissolve_bucket(self, planned: PlannedBucket) -> None:
        """Handle the gradients of a bucket one by one: in this pass the bucket is another."""
        planned.open = planned.ready = False
        for n, leaf in planned.came.items():
            self._add_to_bucket(leaf, planned.placed.get(n))
            self._add_to_bucket(leaf, leaf.take())

    def _form_buckets(self) -> None:
        """Set the buckets to wait for, after a plan was made."""
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

    def _add_to_bucket(self, leaf: LeafGradient, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        if not leaf.bucketed or grad.requires_grad or grad.layout is not torch.strided:
            self.alone.append((leaf, grad))
            return
        for bucket in self.buckets.add(leaf.number, (leaf, grad), *leaf.size(grad.dtype)):
            self.send(bucket)

    def expect(self, leaves: Sequence[LeafGradient], limit: int) -> None:
        """Expect one gradient of its own dtype for each of these leaves in the next pass.

        Buckets of shards hold at most ``limit`` bytes, or one gradient.
        """
        sizes = {leaf.number: leaf.size(leaf.local.dtype) for leaf in leaves}
        self.buckets.expect(
            {n: (1, *size) for n, size in sizes.items()},
            {key: limit for _, key in sizes.values() if key[0][2]},
        )
        self._form_buckets()

    def scatter(self, bucket: list[tuple[LeafGradient, torch.Tensor]]) -> None:
        """Reduce-scatter a bucket of gradients: each rank gets its shards of their sums."""
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
        with log.exchanges("gradients: {} summed in one bucket to the ranks' shards", len(leaves)):
            handle = world().comm(first.ranks).reduce_scatter_async(chunks, "sum")
        self.under_way.append((leaves, handle, dtype))
        while len(self.under_way) > _UNDER_WAY:
            self.receive()

    def receive(self) -> None:
        """Wait for the bucket of shards that was sent first."""
        leaves, handle, dtype = self.under_way.popleft()
        handle.wait()
        value, at = (
            handle.value * factor if (factor := self.factor()) != 1 else handle.value,
            0,
        )
        for leaf in leaves:
            n = math.prod(leaf.part)
            leaf.accumulate(value[at : at + n].view(leaf.part).to(dtype))
            at += n
            self.finished.append(leaf)

    def send(self, bucket: list[tuple[LeafGradient, torch.Tensor]]) -> None:
        if isinstance(bucket[0][0].grad_spec, StorageSpec):
            return self.scatter(bucket)
        way, kind = bucket[0][0].way, dtype_of_sum(bucket[0][1], bucket[0][0].reduce_dtype)
        payload = self.owed.payload(way[0], way[1], kind) if self.owed is not None else None
        planned = self.planned.get(self.buckets.bucket.get(bucket[0][0].number, -1))
        grads: Sequence[torch.Tensor] = [g for _, g in bucket]
        row = planned.row if planned is not None else None
        if row is None or list(map(id, grads)) != list(map(id, row.parts)):
            row = self.flats.take([leaf.number for leaf, _ in bucket], grads, kind, grads[0].device)
            torch_private.copy_all(row.parts, grads)
        flat = row.flat if payload is not None else row.flat[:-1]
        if payload is not None:
            flat[-1].copy_(payload)
        # Where the count has a sum of its own, the factor is known before the gradients are summed.
        later = payload is not None or (self.owed is not None and self.owed.attached)
        if not later and (factor := self.factor()) != 1:
            flat *= factor
        with log.exchanges("gradients: {} summed in one bucket", len(bucket)):
            handle = (
                world().comm(bucket[0][0].ranks).all_reduce_async(flat, "sum")
                if flat.numel()
                else None
            )
        if payload is not None and self.owed is not None and handle is not None:
            self.owed.attach(handle.wait, flat[-1:])
            flat = flat[:-1]
        self.sent.append((bucket, flat, row.parts, handle, later))
        return None

    def factor(self) -> float:
        """Return the factor that this pass's gradients must be multiplied by."""
        return 1.0 if self.owed is None else self.owed.factor()

    def abort(self) -> None:
        """Drop what a failed backward pass has collected, so that the next one starts afresh."""
        self.queued = False
        self.buckets.drop()
        self.before, self.sent, self.finished, self.alone, self.unwatched = [], [], [], [], []
        self.under_way.clear()
        for planned in self.planned.values():
            for leaf in planned.came.values() if planned.open else ():
                leaf.take()
            planned.begin()

    def finish(self) -> None:
        """Finish a backward pass: send the rest, wait for all sums, and call the users' hooks."""
        try:
            for before in self.before:
                before()
            for planned in self.planned.values():
                if planned.open and planned.came:
                    self._dissolve_bucket(planned)
            plan = self.buckets.planned
            for rest in self.buckets.finish():
                self.send(rest)
            if self.buckets.planned is not plan:
                self._form_buckets()
            while self.under_way:
                self.receive()
            for bucket, flat, parts, handle, later in self.sent:
                if handle is not None:
                    handle.wait()
                if later and (factor := self.factor()) != 1:
                    flat *= factor
                same = flat.dtype is bucket[0][1].dtype
                for (leaf, grad), part in zip(bucket, parts, strict=True):
                    leaf.accumulate(part if same and grad.is_contiguous() else grad.copy_(part))
                    self.finished.append(leaf)
            for leaf, grad in sorted(self.alone, key=lambda entry: entry[0].number):
                with torch.set_grad_enabled(grad.requires_grad):
                    grad = grad if grad.layout is torch.strided else grad.to_dense()
                    grad = grad * factor if (factor := self.factor()) != 1 else grad
                    leaf.accumulate(
                        reduce_gradient(
                            grad, leaf.dual, leaf.grad_spec, leaf.reduce_dtype, "gradient of a leaf"
                        )
                    )
                self.finished.append(leaf)
            for local, grad in self.unwatched:
                if local.grad is not None and (factor := self.factor()) != 1:
                    local.grad.add_(grad, alpha=factor - 1)
            for leaf in self.finished:
                owner = leaf.owner() if leaf.hooks else None
                if owner is not None:
                    call_accumulated_hooks(owner, leaf.hooks)
        finally:
            self.abort()


def call_accumulated_hooks(
    leaf: GlobalTensor, hooks: Mapping[int, Callable[[GlobalTensor], Any]]
) -> None:
    """Call the user's hooks of a leaf whose ``.grad`` is complete.

    Raises GlobalTensorError where a hook returns a value, as torch refuses it: the value would
    replace nothing.
    """
    for hook in list(hooks.values()):
        if hook(leaf) is not None:
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise GlobalTensorError(
                f"the post accumulate grad hook {name} must return None, because a value that "
                "it returns does not replace the gradient: write to p.grad in the hook, "
                "or return another gradient from a hook of p.register_hook"
            )


def reducer() -> Reducer:
    """Return the reducer of this rank."""
    return world().state(Reducer)


@on_forget
def _doubt_watchers(of: World) -> None:
    if (found := of.existing_state(Reducer)) is not None:
        found.watchers.doubt()


def settle(leaves: Iterable[torch.Tensor]) -> None:
    """Sum what has been deferred for these leaves over the ranks, in buckets.

    All ranks must pass the leaves in the same order.
    """
    gradient_reducer = reducer()
    gradient_reducer.queued = True
    for leaf in leaves:
        pending = leaf._leaf if isinstance(leaf, GlobalTensor) else None
        if pending is not None and pending.local.grad is not None:
            gradient_reducer.add(pending)
    gradient_reducer.finish()


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Leave the gradients of leaves unsummed in backward passes inside the block.

    The first backward pass outside (or reading ``.grad``) sums all at once. It is for gradient
    accumulation, as ``DistributedDataParallel.no_sync``.
    """
    with reducer().deferring():
        yield


def set_grad_reduce_dtype(target: Target, dtype: torch.dtype | None) -> Target:
    """Set the dtype in which gradients are summed over the ranks, and return ``target``.

    ``target`` is a global tensor, or a module with global parameters. The sums are cast back to the
    gradient's dtype.

    For parameters in bfloat16 or float16, ``flow.set_grad_reduce_dtype(model, torch.float32)``
    rounds once what otherwise may be rounded at each addition. It sends twice the bytes. It holds
    for the sums that data parallelism and sharded parameters need (all-reduce, reduce-scatter).
    None: the gradient's own dtype. All ranks must set the same dtype. Raises GlobalTensorError for
    a dtype that is not a real floating one. (``MixedPrecision.reduce_dtype`` of torch's FSDP.)

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
    """Record that user code may observe gradients early as long as ``local``'s graph exists.

    For a leaf that is as long as it requires grad.
    """
    reducer().watchers.of(local)


def fuse_loss_count(mode: bool = True) -> None:
    """Reduce a mean loss's target count together with the first gradients of its backward pass.

    It saves one collective in each data-parallel step.

    The program promises that all ranks treat losses and incomplete gradients alike. Before a
    backward pass all or none read the loss (``to_local``), hook into tensors or ask for
    ``grad_fn``. It is off unless called. Static graphs, whose ranks run one program, always do it.
    All ranks must call it alike.
    """
    reducer().rides = bool(mode)
