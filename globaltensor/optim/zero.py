"""ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): shard replicas along broadcast axes.

`nn.Graph` uses it.

Stage 1 shards the optimizer's state: each rank steps its shard of a parameter, then the shards are
gathered. Stage 2 also shards the gradients: they are reduce-scattered while backward runs. Stage 3
also shards the parameters: they are gathered for each use (_tensor/gradients/parameter_gather.py),
and ``reshard_after_forward()`` frees them in between. Users see no difference: a parameter shows
and returns the layout it was placed with.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from .._tensor.global_tensor import GlobalTensor
from .._tensor.gradients import parameter_gather
from .._tensor.gradients.leaf import LeafGradient
from .._tensor.gradients.reducer import reducer
from .._tensor.pending_tensor import local_of
from .._tensor.set_data import replace_local
from ..boxing import box
from ..distributed.world import world
from ..errors import ZeroError
from ..sharding.placement import Placement
from ..sharding.sbp import split
from ..sharding.spec import Spec, StorageSpec
from .local_step import ELEMENTWISE, relay

__all__ = ["Zero", "freeing", "shares_of"]

# A bucket of gradients is as large as the largest parameter, within these limits.
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 128 << 10, 25 << 20


def freeing(
    zero: tuple[int, ...] | None, followed: bool, searched: Any
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for a step's forward pass that may free gathered parameters.

    They are freed in ZeRO's third stage, and if the plan frees them that is ``followed`` or was
    ``searched`` for."""
    wanted = (
        followed
        or (zero is not None and zero[0] == 3)
        or (searched is not None and searched.choices.get("reshard_after_forward"))
    )
    return parameter_gather.reshard_after_forward() if wanted else contextlib.nullcontext()


def shares_of(spec: Spec, shard_min_size: int = 1) -> StorageSpec | None:
    """Return the storage of a tensor of ``spec``, sharded among ranks with the same local tensor.

    Returns None if there are no such ranks, or less than ``shard_min_size`` elements for each of
    them.

    Dim 0 is split if it is not split yet and gives every rank as much: such shards are runs of
    memory. Else the largest unsplit dim that gives each rank something is split, else the largest
    dim.

    >>> import torch
    >>> from globaltensor.sbp import broadcast
    >>> shares_of(Spec.make((5, 8), torch.float32, Placement("cpu", [0, 1]), broadcast))
    f32[5, 8] B kept as f32[5, 8] S(1)
    """
    axes = [a for a, e in enumerate(spec.layout) if e.is_broadcast and spec.placement.shape[a] > 1]
    ranks = math.prod(spec.placement.shape[a] for a in axes)
    if (
        not axes
        or not spec.shape
        or any(e.is_partial for e in spec.layout)
        or spec.numel < shard_min_size * ranks
    ):
        return None
    shape = spec.local_shape(spec.placement.flat[0])
    taken = {e.dim for a, e in enumerate(spec.layout) if e.is_split and spec.placement.shape[a] > 1}
    ample = [d for d, n in enumerate(shape) if d not in taken and n >= ranks]
    if 0 in ample and shape[0] % ranks == 0:
        dim = 0
    else:
        dim = max(ample or range(len(shape)), key=lambda d: shape[d])
    # Nested splits have the first axis outermost. If the dim is split already, shards are pieces of
    # the existing shards only if their axes come last.
    order = list(range(spec.placement.axes))
    if any(e.is_split and e.dim == dim for e in spec.layout):
        order = [a for a in order if a not in axes] + axes
    where = (
        spec.placement
        if order == sorted(order)
        else Placement(spec.placement.type, spec.placement.ranks.transpose(order))
    )
    layout = [split(dim) if a in axes else spec.layout[a] for a in order]
    return StorageSpec.of(
        spec.replace(placement=where, layout=layout), spec, [order.index(a) for a in axes]
    )


class Zero:
    """A sharding of optimizer state, gradients or parameters among ranks with the same parameters.

    ``stage``: 1, 2 or 3. ``shard_min_size``: a parameter is sharded if it has at least so many
    elements for each of these ranks (OneFlow's rule). Every rank must make the same object, with
    the same optimizers. It acts from ``attach()`` to ``detach()``, also on optimizers that have
    made steps. A state that is loaded meanwhile, from training with another stage or none, is
    sharded at the next step.

    A parameter all of whose large dims are split already is sharded up to stage 2 only. Gradients
    show the parameter's layout but are stored as shards. Raises ZeroError for an unknown stage or
    size, an optimizer that needs full tensors (LBFGS, Adafactor, Muon), a subclass, or
    ``differentiable=True``.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], stage: int, shard_min_size: int = 1024
    ) -> None:
        if type(stage) is not int or stage not in (1, 2, 3):
            raise ZeroError(
                f"ZeRO has the stages 1 (optimizer state), 2 (and gradients) and 3 (and "
                f"parameters); got {stage!r}"
            )
        if type(shard_min_size) is not int or shard_min_size < 1:
            raise ZeroError(
                f"shard_min_size is the minimum number of elements in a rank's shard of a "
                f"parameter, 1 or more; got {shard_min_size!r}"
            )
        for optimizer in optimizers:
            if type(optimizer) not in ELEMENTWISE:
                raise ZeroError(
                    f"ZeRO lets each rank step its shard of a parameter, but the step of "
                    f"{type(optimizer).__name__} for one element may depend on other elements; "
                    f"these optimizers work element by element: "
                    f"{', '.join(sorted(o.__name__ for o in ELEMENTWISE))}"
                )
            if any(group.get("differentiable") for group in optimizer.param_groups):
                raise ZeroError(
                    "ZeRO does not support differentiable=True: the shards are gathered without "
                    "an autograd graph"
                )
        self.optimizers, self.stage, self.shard_min_size = list(optimizers), stage, shard_min_size
        self.shared: dict[GlobalTensor, StorageSpec] = {}  # the parameters sharded while attached

    def parameters(self) -> list[GlobalTensor]:
        """Return the global parameters of the optimizers, each once."""
        every = (
            p
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        )
        return list(dict.fromkeys(p for p in every if isinstance(p, GlobalTensor)))

    def attach(self) -> Zero:
        """Shard the current tensors and later ones, and return this object. Collective.

        Parameters that another `Zero` object holds are skipped."""
        leaves: list[LeafGradient] = []
        largest = 0
        for p in self.parameters():
            shares = shares_of(p._spec, self.shard_min_size)
            if (
                shares is None
                or p._shard is not None
                or isinstance(p._spec, StorageSpec)
                or not p.is_leaf
            ):
                continue
            self.shared[p] = shares
            if self.stage == 3 and shares.placement is p._spec.placement:
                _store_in_layout(p, shares)
                continue
            grad = p.grad
            p._shard = shares
            if self.stage >= 2:
                p._grad_shard = shares
                if p._leaf is not None:
                    p._leaf.set_storage(shares)
                    p._leaf.value = None
                    leaves.append(p._leaf)
                largest = max(
                    largest,
                    math.prod(shares.shown.local_shape(p.placement.flat[0])) * p.dtype.itemsize,
                )
                p.grad = grad
        reducer().expect(leaves, min(max(largest, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))
        self._relay_optimizers()
        return self

    def detach(self) -> None:
        """Store parameters, gradients and state on every rank in their shown layouts again.

        Collective."""
        shared, self.shared = self.shared, {}
        for p, shares in shared.items():
            if p._spec is shares:
                _store_in_layout(p, shares.shown)
            elif p._shard is shares:
                grad = p.grad
                p._shard = p._grad_shard = None
                if p._leaf is not None:
                    p._leaf.set_storage(None)
                    p._leaf.value = None
                p.grad = grad
        self._relay_optimizers()

    def _relay_optimizers(self) -> None:
        for optimizer in self.optimizers:
            relay(optimizer)


def _store_in_layout(p: GlobalTensor, spec: Spec) -> None:
    """Store a parameter, and its gradient, in another layout."""
    grad, local = p.grad, box(local_of(p).detach(), p._spec, spec, why="ZeRO", alias=False)
    if world().rank in spec.placement._coordinates:
        local = local.contiguous()  # a view of the full tensor would save no memory
    replace_local(p, local, spec)
    p.grad = grad
