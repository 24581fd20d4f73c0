"""The gradient of one leaf: what is still pending of it, and when it is summed over the ranks.

The reducer and the optimizers hold a leaf's `LeafGradient`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ..._base import torch_private
from ...distributed.world import world
from ...sharding.spec import StorageSpec
from ..global_tensor import GlobalTensor
from .reducer import PlannedBucket, UnsummedPass, observe_gradients, reduce_gradient, reducer
from .watchers import end_of

__all__ = ["LeafGradient", "attach", "detach"]


class LeafGradient:
    """The gradient of one leaf to which several ranks contribute.

    ``value`` is this rank's local tensor of it, in the layout ``kept``: the leaf's own layout, or
    shares.

    It lives as long as the leaf's local tensor, whose hook holds it. It must not hold that tensor
    in turn. torch shows the garbage collector nothing of these hooks, so parameters would never be
    freed.
    """

    def __init__(self, leaf: GlobalTensor, number: int) -> None:
        self.number = number
        self._local = weakref.ref(leaf._local)
        self.spec = leaf._spec
        self.dual = leaf._spec.dual()
        self.reduce_dtype = leaf._reduce_dtype
        self.owner = weakref.ref(leaf)
        self.value: torch.Tensor | None = None
        # See `set_storage`.
        self.bucketed, self.ranks, self.way, self.grad_spec = (
            False,
            (),
            (self.spec.placement, (), False),
            self.spec,
        )
        self.planned: PlannedBucket | None = None  # the bucket that its gradient waits for
        self._sizes: dict[torch.dtype, tuple[int, tuple[Any, ...]]] = {}  # see `size`
        #: The slices of each rank's share in the gradient, and the shape of this rank's share.
        self.cuts: list[tuple[slice, ...]] = []
        self.part: tuple[int, ...] = ()
        # The passes under ``no_sync()`` from which it has contributions.
        self.unsummed: UnsummedPass | None = None
        # The user's hooks.
        self.hooks: OrderedDict[int, Callable[[GlobalTensor], None]] = leaf.__dict__.setdefault(
            "_accumulated", OrderedDict()
        )
        self.set_storage(leaf._grad_shard)
        reducer().leaves[number] = self
        weakref.finalize(self, reducer().flats.drop, [number]).atexit = False
        self.handle = self.local.register_post_accumulate_grad_hook(self.on_grad)

    @property
    def local(self) -> torch.Tensor:
        found = self._local()
        assert found is not None, "the leaf is there, or a pass that needs it"
        return found

    def set_storage(self, shares: StorageSpec | None) -> None:
        """Set the layout of ``value``: ``shares``, or the leaf's own if that is None."""
        self._sizes.clear()
        self.planned = None
        placement, rank = self.spec.placement, world().rank
        if shares is not None:
            self.grad_spec, self.ranks, self.way = (
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
        self.grad_spec, self.ranks, self.way = (
            self.spec,
            placement.fiber(rank, summed) if self.bucketed else (),
            (placement, summed, False),
        )

    def key(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the key that gradients must share to go in one bucket."""
        return (
            self.way,
            dtype
            if self.reduce_dtype is None or not dtype.is_floating_point
            else self.reduce_dtype,
            dtype,
            self.local.device,
        )

    def size(self, dtype: torch.dtype) -> tuple[int, tuple[Any, ...]]:
        """Return (bytes, key) of a gradient of this dtype in a bucket."""
        found = self._sizes.get(dtype)
        if found is None:
            key = self.key(dtype)
            found = self._sizes[dtype] = (self.local.numel() * key[1].itemsize, key)
        return found

    def sum_in(self, dtype: torch.dtype | None) -> None:
        """Set the dtype in which the gradient is summed; None: its own."""
        self.reduce_dtype, self.planned = dtype, None
        self._sizes.clear()

    def on_grad(self, local: torch.Tensor) -> None:
        """Handle a contribution that torch has put into the local tensor's ``.grad``."""
        planned = self.planned
        if planned is not None and planned.ready and self.number not in planned.came:
            planned.came[self.number] = self
            if len(planned.came) == len(planned.numbers):
                reducer().join(planned)
            return
        gradient_reducer = reducer()
        if not gradient_reducer.deferred:
            gradient_reducer.add(self)
        else:
            gradient_reducer.defer(self)

    def release(self) -> None:
        """Record that no contribution of passes under ``no_sync()`` is left."""
        passes, self.unsummed = self.unsummed, None
        if passes is not None:
            passes.summed(self.number)

    def take(self) -> torch.Tensor | None:
        if self.unsummed is not None:
            self.release()
        local = self._local()
        if local is None:
            return None  # the leaf is gone: nothing can read its gradient
        grad, local.grad = local.grad, None
        return grad

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add a reduced gradient, in place where torch would."""
        # torch copies a gradient with a graph, too: a view cannot be detached in place.
        if self.value is None:
            self.value = grad.clone() if grad.requires_grad and grad._is_view() else grad
        elif grad.requires_grad or self.value.requires_grad:
            self.value = self.value + grad
        else:
            self.value.add_(grad)

    def flush(self) -> torch.Tensor | None:
        """Return the reduced gradient of all arrivals so far.

        It is collective where something is pending.
        """
        if self.local.grad is not None:
            grad = self.take()
            if grad.layout is not torch.strided:  # type: ignore[union-attr]
                grad = grad.to_dense()  # type: ignore[union-attr]
            self.accumulate(
                reduce_gradient(
                    grad, self.dual, self.grad_spec, self.reduce_dtype, "gradient of a leaf"
                ).contiguous()
            )  # type: ignore[arg-type]
        return self.value


def detach(leaf: GlobalTensor) -> None:
    """Stop watching a leaf that no longer requires grad."""
    end_of(leaf._local)


def _watch_from_first_gradient(local: torch.Tensor) -> None:
    """Watch a leaf that one rank alone may have made, from its first gradient on.

    Such a leaf was read from a file, or copied. All ranks run the pass that brings its first
    gradient. In that pass the gradient is multiplied at the end by the factor that may be pending
    (`Reducer.finish`).
    """
    gradient_reducer, of = reducer(), weakref.ref(local)

    def begin(grad: torch.Tensor) -> None:
        handle.remove()
        if (leaf := of()) is not None:
            if gradient_reducer.owed is not None:
                if not gradient_reducer.queued:
                    gradient_reducer.at_end()
                gradient_reducer.unwatched.append((leaf, grad))
            gradient_reducer.watchers.of(leaf)

    handle = local.register_hook(begin)  # type: ignore[no-untyped-call]


def attach(leaf: GlobalTensor, maybe_alone: bool = False) -> None:
    """Watch a new leaf for its contributions where other ranks hold some of them.

    ``maybe_alone``: other ranks may not have made the leaf.
    """
    known, leaf._leaf = leaf._leaf, None
    if torch_private.is_fake(leaf._local) and torch_private.function_mode_on():
        return  # the leaf belongs to a program, which records what arrives at its leaves
    # Ranks outside the placement count and watch too: all ranks must agree.
    spec, number = (
        leaf._spec,
        reducer().number(),
    )
    shared = any(not e.is_split and spec.placement.shape[a] > 1 for a, e in enumerate(spec.layout))
    if not shared:
        if maybe_alone and leaf._local.is_leaf:
            _watch_from_first_gradient(leaf._local)
        else:
            observe_gradients(leaf._local)
        return
    gradient_reducer = reducer()
    gradient_reducer.everywhere = (
        gradient_reducer.everywhere and len(spec.placement.flat) == world().size
    )
    if leaf._local.is_leaf and spec.placement.coordinate(world().rank) is not None:
        if known is not None and known._local() is leaf._local and known.spec is spec:
            # the leaf was attached before: of two hooks, the first would take what the second needs
            leaf._leaf = known
            return
        if known is not None:
            known.handle.remove()
        leaf._leaf = LeafGradient(leaf, number)
