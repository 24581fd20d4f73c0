"""DistributedSampler: torch's, on a world that starts by itself."""

from __future__ import annotations

from typing import TypeVar

from torch.utils import data

from ...distributed.world import world

__all__ = ["DistributedSampler"]

T = TypeVar("T", covariant=True)


class DistributedSampler(data.DistributedSampler[T]):
    """Gives each of ``num_replicas`` ranks its part of a dataset, in an order that follows from
    ``seed`` and the epoch (``set_epoch``).

    By default the replicas are the ranks of the world. Where the dataset does not divide evenly the
    first samples are given out twice, or with ``drop_last`` the last ones not at all. Raises
    ValueError where ``rank`` is not one of the replicas.
    """

    def __init__(
        self,
        dataset: data.Dataset[T],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        replicas = world().size if num_replicas is None else num_replicas
        super().__init__(
            dataset, replicas, world().rank if rank is None else rank, shuffle, seed, drop_last
        )
