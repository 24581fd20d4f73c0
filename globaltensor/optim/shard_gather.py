"""The shards of replicated parameters (ZeRO): a rank steps its shards, then all are gathered.

`local_step` steps the shards. One collective gathers many small shards.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

from .._base import torch_private
from .._tensor.global_tensor import GlobalTensor
from ..boxing import box, log
from ..distributed.world import world
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec, StorageSpec

__all__ = ["BUCKET_BYTES", "ShardPlaces", "SteppedShards", "same_layout", "stepped", "summed"]


BUCKET_BYTES = 16 << 20  # size limit of parameters that are gathered together

# a parameter of this size, whose shards are consecutive in memory, is gathered in place
ALONE_BYTES = 1 << 20


def same_layout(a: Spec, b: Spec) -> bool:
    return a.placement is b.placement and a.layout == b.layout


def stepped(p: GlobalTensor) -> Spec:
    """Return the layout of the tensor that a rank steps for a parameter, and of its state."""
    shard = p._shard
    if shard is not None and shard.shown is p._spec:  # its layout may have changed since
        return shard
    return summed(p._spec)


def summed(spec: Spec) -> Spec:
    """Return the spec with partial entries replaced by broadcast.

    The optimizer steps the sum of a partial parameter, because steps of the summands do not add up
    to a step of the sum."""
    return (
        spec.replace(layout=[broadcast if e.is_partial else e for e in spec.layout])
        if any(e.is_partial for e in spec.layout)
        else spec
    )


class ShardBucket:
    """A group of parameters whose shards are gathered together, and the shards' positions."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.ranks: tuple[int, ...] = ()
        self.numels: list[int] = []  # elements that each rank contributes
        self.own: list[torch.Tensor] = []  # views of this rank's shards in the parameters
        self.params: list[int] = []  # ids of the parameters
        # views of the destination of each rank's shards, in the order of arrival
        self.places: list[torch.Tensor] = []
        self.sizes: list[int] = []


class ShardPlaces:
    """A record of the positions of all ranks' shards in some parameters.

    The positions are computed once. They are valid until a parameter or its memory changes."""

    def __init__(self, members: Sequence[tuple[GlobalTensor, StorageSpec]]) -> None:
        self.members = [(p, p._local, shard) for p, shard in members]
        # (parameter id, own shard, full tensor, ranks, element counts)
        self.alone: list[tuple[int, torch.Tensor, torch.Tensor, tuple[int, ...], list[int]]] = []
        of_ways: dict[
            Hashable, list[tuple[ShardBucket, list[tuple[GlobalTensor, StorageSpec]]]]
        ] = {}
        rank = world().rank
        for p, shard in members:
            local = p._local
            if local.nbytes >= ALONE_BYTES and _shards_are_consecutive(p, shard):
                whole, ranks = local.detach(), shard.ranks(rank)
                self.alone.append(
                    (
                        id(p),
                        whole[shard.share(rank, rank)],
                        whole.view(-1),
                        ranks,
                        [math.prod(shard.local_shape(r)) for r in ranks],
                    )
                )
                continue
            of_way = of_ways.setdefault(
                (shard.placement, shard.axes, local.dtype, local.device), []
            )
            if not of_way or of_way[-1][0].nbytes + local.nbytes > BUCKET_BYTES:
                of_way.append((ShardBucket(), []))
            of_way[-1][0].nbytes += local.nbytes
            of_way[-1][1].append((p, shard))
        self.buckets = [bucket for of_way in of_ways.values() for bucket, _ in of_way]
        for bucket, those in (entry for of_way in of_ways.values() for entry in of_way):
            bucket.ranks, bucket.params = those[0][1].ranks(rank), [id(p) for p, _ in those]
            for r in bucket.ranks:
                places = [p._local.detach()[shard.share(rank, r)] for p, shard in those]
                bucket.places += places
                bucket.sizes += [t.numel() for t in places]
                bucket.numels.append(sum(t.numel() for t in places))
                if r == rank:
                    bucket.own = places

    def serve(self, members: Sequence[tuple[GlobalTensor, StorageSpec]]) -> bool:
        """Return True if the positions are valid for these parameters."""
        if len(members) != len(self.members):
            return False
        return all(
            p is q and p._local is local and shard is other
            for (p, shard), (q, local, other) in zip(members, self.members, strict=True)
        )


class SteppedShards:
    """The shards of replicated parameters that this rank steps.

    The object exists for one step. `gather` writes the shards of all ranks to the parameters."""

    def __init__(self, places: ShardPlaces | None = None) -> None:
        self.parts: dict[int, torch.Tensor] = {}  # id of a parameter -> this rank's shard
        self.places = places
        self.flats: list[torch.Tensor] = []  # the concatenated shards of each bucket
        # partial parameters, and their sums
        self.sums: list[tuple[GlobalTensor, torch.Tensor]] = []
        if places is None:
            return
        self.parts.update({number: own for number, own, *_ in places.alone})
        for bucket in places.buckets:
            flat = torch.cat([own.reshape(-1) for own in bucket.own])
            self.flats.append(flat)
            for number, own, part in zip(
                bucket.params,
                bucket.own,
                flat.split_with_sizes([t.numel() for t in bucket.own]),
                strict=True,
            ):
                self.parts[number] = part.view(own.shape)

    def add(self, p: GlobalTensor, spec: Spec) -> None:
        """Add a partial parameter, which is stepped as its sum. Collective."""
        self.parts[id(p)] = box(p._local.detach(), p._spec, spec, why="optimizer step", alias=False)
        self.sums.append((p, self.parts[id(p)]))

    def gather(self) -> None:
        """Gather every rank's shards, and box the sums, into the parameters. Collective."""
        with torch.no_grad():
            for p, part in self.sums:
                p._local.copy_(box(part, summed(p._spec), p._spec, why="optimizer step"))
        if self.places is None:
            return
        with torch.no_grad():
            for number, _, whole, ranks, numels in self.places.alone:
                # autograd does not see this write
                with log.exchanges("optimizer step: shards of a parameter gathered"):
                    world().comm(ranks).all_gather_into(self.parts[number], numels, whole)
                torch.autograd.graph.increment_version(whole)
            self.parts.clear()
            for bucket in self.places.buckets:
                flat = self.flats.pop(0)
                came = torch.empty(sum(bucket.numels), dtype=flat.dtype, device=flat.device)
                with log.exchanges("optimizer step: shards of parameters gathered in one bucket"):
                    world().comm(bucket.ranks).all_gather_into(flat, bucket.numels, came)
                shards = came.split_with_sizes(bucket.sizes)
                torch_private.copy_all(
                    bucket.places,
                    [
                        shard.view(place.shape)
                        for shard, place in zip(shards, bucket.places, strict=True)
                    ],
                )


def _shards_are_consecutive(p: GlobalTensor, shard: StorageSpec) -> bool:
    """Return True if the shards of a parameter's local tensor are consecutive in its memory."""
    split = {e.dim for a, e in enumerate(shard.layout) if a in shard.axes}
    return split == {0} and p._local.is_contiguous()
