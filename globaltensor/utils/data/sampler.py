"""DistributedSampler: torch's, on a world that starts automatically."""

from __future__ import annotations

from typing import TypeVar

from torch.utils import data

from ...distributed.world import world

__all__ = ["DistributedSampler"]

T = TypeVar("T", covariant=True)


class DistributedSampler(data.DistributedSampler[T]):
    """A sampler of one rank's share of a dataset.

    The order follows from ``seed`` and the epoch (``set_epoch``). By default the ``num_replicas``
    ranks are those of the world. If the dataset does not divide evenly, the first samples are used
    twice, or with ``drop_last`` the last ones are left out. Raises ValueError if ``rank`` is not
    one of the replicas.
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
