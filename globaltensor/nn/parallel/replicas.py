"""DDP over replicas of a model whose parameters are global tensors.

`DistributedDataParallel` uses it for such models. Each replica has its own ranks, and gradients are
averaged between corresponding ranks. The sum over a replica's ranks with the same parameter, and
the sum over the replicas, are one sum. It is one all-reduce among all these ranks, in the buckets
of _tensor/gradients/reducer.py, while backward runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.gradients import reducer
from ..._tensor.gradients.leaf import LeafGradient
from ..._tensor.pending_tensor import local_of
from ...boxing import log
from ...distributed.world import world
from ...errors import GlobalTensorError, PlacementError
from ...sharding.placement import Placement
from .transparent import Transparent

__all__ = ["GlobalReplicas"]


class GlobalReplicas(Transparent, nn.Module):
    """A wrapper that ``DistributedDataParallel`` returns for a module with global parameters.

    Every rank builds the module on the placement of its own replica:
    ``module.to_global(flow.placement("cpu", [[0, 1], [2, 3]][replica]), ...)``. The replicas have
    placements of one shape and parameters of one sbp. Rank i of one corresponds to rank i of the
    others. Rank 0's replica sends parameters and, at each forward, buffers to the others. Gradients
    are means over the replicas. Under ``no_sync()`` they are not reduced.

    ``process_group``: the ranks that correspond to this one, if they cannot be found among all
    ranks. Raises PlacementError if replicas do not correspond, and GlobalTensorError if some
    parameters are global and some are not.
    """

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool | None = True,
        broadcast_parameters: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.broadcast_buffers = broadcast_buffers is not False
        this_world = world()
        parameters = list(dict(module.named_parameters()).items())
        plain = [name for name, p in parameters if not isinstance(p, GlobalTensor)]
        if plain:
            raise GlobalTensorError(
                f"DistributedDataParallel: {', '.join(plain[:3])} is local, other parameters are "
                "global: make all parameters global with module.to_global"
            )
        placements = _replicas({name: p._spec.placement for name, p in parameters}, process_group)
        self.module = module
        self.peers: tuple[int, ...] = ()
        for name, p in parameters:
            replicas = placements[name]
            own_ranks = p._spec.placement.flat
            if this_world.rank not in own_ranks:
                continue
            self.peers = tuple(r[own_ranks.index(this_world.rank)] for r in replicas)
            if p.requires_grad and p.is_leaf:
                reducer.observe_gradients(p._local)
                _replace(p, replicas)
        if self.peers:
            self._spread([local_of(p) for _, p in parameters] if broadcast_parameters else [])
            self._spread(self._local_buffers())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.peers and not reducer.reducer().deferred:
            self._spread(self._local_buffers())
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients unsummed within the block; the first backward pass outside sums all."""
        with reducer.no_sync():
            yield

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Raise GlobalTensorError: it is not supported."""
        raise _local_only_error(
            "join",
            "give all replicas the same number of batches (a sampler with drop_last, or one that "
            "pads)",
        )

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Raise GlobalTensorError: it is not supported."""
        raise _local_only_error(
            "register_comm_hook",
            "flow.set_grad_reduce_dtype(module, dtype) sets the dtype in which gradients are "
            "summed",
        )

    def _local_buffers(self) -> list[torch.Tensor]:
        return list(map(local_of, self.module.buffers()))

    @torch.no_grad()
    def _spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the first replica's values to the others, once for each dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for t in tensors:
            kinds.setdefault((t.dtype, t.device), []).append(t)
        comm = world().comm(self.peers)
        for these in kinds.values():
            with log.exchanges("DistributedDataParallel: values of the first replica"):
                flat = comm.broadcast(torch.cat([t.reshape(-1) for t in these]), 0)
            for t, part in zip(these, flat.split([t.numel() for t in these]), strict=True):
                t.copy_(part.view(t.shape))


def _local_only_error(name: str, mend: str) -> GlobalTensorError:
    why = (
        "gradients of global parameters go through the buckets of global tensors, not torch's "
        "reducer"
    )
    return GlobalTensorError(
        f"DistributedDataParallel.{name} is for modules of local parameters: {why}; {mend}"
    )


def _replicas(
    own_placements: dict[str, Placement], group: dist.ProcessGroup | None
) -> dict[str, list[tuple[int, ...]]]:
    """Return the ranks of every replica of each parameter, sorted by first rank. Collective.

    Raises PlacementError if replicas do not correspond, or share ranks."""
    this_world = world()
    ranks = (
        tuple(range(this_world.size))
        if group is None
        else tuple(dist.get_process_group_ranks(group))
    )
    rank_placements = this_world.comm(ranks).all_gather_object(
        {name: (p.type, p.shape, p.flat) for name, p in own_placements.items()},
        "the setup of DistributedDataParallel",
    )
    replicas: dict[str, list[tuple[int, ...]]] = {}
    for name, placement in own_placements.items():
        others = {rank: other.get(name) for rank, other in zip(ranks, rank_placements, strict=True)}
        for rank, other in others.items():
            if other is None or other[:2] != (placement.type, placement.shape):
                has = (
                    "has no such parameter"
                    if other is None
                    else f'holds it on a placement "{other[0]}" of shape {other[1]}'
                )
                raise PlacementError(
                    f"DDP: rank {this_world.rank} holds {name} on a placement "
                    f'"{placement.type}" of shape {placement.shape}, but rank {rank} {has}: '
                    "replicas must be alike"
                )
        sets = sorted({other[2] for other in others.values() if other is not None})
        held = [r for ranks in sets for r in ranks]
        if len(set(held)) != len(held):
            raise PlacementError(
                f"DistributedDataParallel: the replicas of {name} are on "
                f"{', '.join(map(str, sets))}, which share ranks: each replica needs its own ranks"
            )
        replicas[name] = sets
    return replicas


def _replace(leaf: GlobalTensor, replicas: list[tuple[int, ...]]) -> None:
    """Make the gradient of a leaf a mean over the replicas too."""
    before = leaf._leaf
    if before is not None:
        before.handle.remove()
    leaf._leaf = _MeanGradient(leaf, replicas)
    if before is not None:
        leaf._leaf.value, leaf._leaf.hooks = before.value, before.hooks


class _MeanGradient(LeafGradient):
    """A gradient of one leaf, averaged over the replicas."""

    def __init__(self, leaf: GlobalTensor, replicas: list[tuple[int, ...]]) -> None:
        super().__init__(leaf, reducer.reducer().number())
        if any(e.is_partial for e in self.spec.layout):
            raise GlobalTensorError(
                f"DistributedDataParallel: a parameter is partial ({self.spec!r}): make it "
                f"broadcast or split first"
            )
        flat = self.spec.placement.flat
        within = self.ranks or (world().rank,)
        self.count = len(replicas)
        self.ranks = tuple(sorted(ranks[flat.index(r)] for r in within for ranks in replicas))
        self.bucketed = len(self.ranks) > 1
        self.way = (*self.way, "replicas")  # type: ignore[assignment]

    def accumulate(self, grad: torch.Tensor) -> None:
        if grad.requires_grad or grad.layout is not torch.strided:
            raise GlobalTensorError(
                "DistributedDataParallel: gradients that are sparse, or differentiated again, "
                "cannot be averaged over replicas"
            )
        super().accumulate(grad.div_(self.count))

    def flush(self) -> torch.Tensor | None:
        grad = self.take() if self.local.grad is not None else None
        if grad is not None:
            kind = reducer.dtype_of_sum(grad, self.reduce_dtype)
            with log.exchanges("gradient of a leaf, summed over the replicas"):
                total = world().comm(self.ranks).all_reduce(grad.contiguous().to(kind))
            self.accumulate(total.to(grad.dtype))
        return self.value
