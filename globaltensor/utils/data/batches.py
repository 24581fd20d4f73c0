"""Global batches from the batches of each rank's own loader, as with DistributedDataParallel.

Users construct `GlobalBatches`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..._base.pytree import replaced, tensors_in
from ..._tensor.convert import check_placement, spec_of
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.promote import check_replicated
from ...distributed.world import placeholder, world
from ...errors import GlobalTensorError, SbpError
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp, as_layout, broadcast, split
from ...sharding.tensor_kinds import Described, described, refuse

__all__ = ["GlobalBatches"]

_END = object()
#: The message of a rank about its batch: its structure, and shape and dtype (`described`) of each
#: tensor. It is None if the rank's loader has ended.
_Told = tuple[Any, list[Described]]


class GlobalBatches:
    """An iterable of global batches, whose rows each rank reads with its own ``loader``.

    It is for a loader that reads other rows on every rank, such as ``DataLoader(dataset, 8,
    sampler=DistributedSampler(dataset))``: 8 rows a rank become a batch of 8 x ranks. Tensors of
    the batch [rows, ...] are joined along the dims that ``sbp`` splits (the default is
    ``split(0)``, on one axis). Tensors without such a dim must be the same on every rank, and so
    must all tensors along a broadcast axis. A batch is a pytree of dicts, lists and tuples. Its
    values that are no tensors remain each rank's own.

    ``placement``: all ranks' CPUs by default. Ranks outside it must iterate too, but their loader
    is not read. ``uneven``: the action if a loader ends before the others. It is ``"error"``, or
    ``"stop"``, which leaves the rest of the others unread. `GlobalDataLoader` reads the rows of one
    device's batches instead.

    Iterating is collective. It raises errors on every rank. It raises GlobalTensorError if a loader
    ends early, and DivergenceError if ranks that should read the same rows do not. It raises
    ShapeError if rows are not balanced (of n rows over p ranks the first n mod p hold one more).

    >>> import globaltensor as flow
    >>> rows = torch.utils.data.DataLoader(torch.arange(6.).view(6, 1), batch_size=3)
    >>> [batch.shape for batch in GlobalBatches(rows, flow.placement("cpu", [0]))]
    [torch.Size([3, 1]), torch.Size([3, 1])]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        placement: Placement | None = None,
        sbp: Any = None,
        *,
        uneven: str = "error",
    ) -> None:
        self.loader, self.uneven = loader, uneven
        self.placement = Placement.all("cpu") if placement is None else placement
        check_placement(self.placement)
        if uneven not in ("error", "stop"):
            raise GlobalTensorError(f'GlobalBatches: uneven is "error" or "stop", not {uneven!r}')
        if sbp is None and self.placement.axes > 1:
            raise SbpError(
                f"GlobalBatches: the placement has {self.placement.axes} axes: give sbp with one "
                f"entry for each, such as [split(0), broadcast]"
            )
        self.layout = as_layout(split(0) if sbp is None else sbp, self.placement.axes)
        if any(e.is_partial for e in self.layout):
            raise SbpError(
                "GlobalBatches: sbp is split(dim) or broadcast on each axis, not partial"
            )

    def __len__(self) -> int:
        """Return the number of batches of this rank's loader."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        here = world()
        inside = self.placement.coordinate(here.rank) is not None
        batches = iter(self.loader) if inside else iter(())
        number = 0
        while True:
            batch = next(batches, _END)
            tensors = tensors_in(batch, []) if batch is not _END else []
            mine = (
                None
                if batch is _END
                else (
                    replaced(batch, iter([torch.empty(0)] * len(tensors))),
                    [described(t) for t in tensors],
                )
            )
            told: Sequence[_Told | None] = (
                here.comm(tuple(range(here.size))).all_gather_object(mine)
                if here.size > 1
                else [mine]
            )
            if not self._go_on(told, number):
                return
            shell, metas = told[here.rank if inside else self.placement.flat[0]]  # type: ignore[misc]
            parts = [
                self._joined(i, tensors[i] if inside else None, told) for i in range(len(metas))
            ]
            number += 1
            yield replaced(shell, iter(parts))

    def _go_on(self, told: Sequence[_Told | None], number: int) -> bool:
        """Return True if every rank has another batch, and False if the iteration ends.

        Raises GlobalTensorError if some ranks have no other batch, or batches of another
        structure."""
        ranks = self.placement.flat
        ended = [r for r in ranks if told[r] is None]
        if ended:
            if len(ended) < len(ranks) and self.uneven == "error":
                going = min(set(ranks) - set(ended))
                raise GlobalTensorError(
                    f"GlobalBatches: the loader of rank {ended[0]} has ended after {number} "
                    f"batches, that of rank {going} has more. Give every rank as many "
                    'batches (DistributedSampler and drop_last=True do), or pass uneven="stop" to '
                    "leave the rest unread"
                )
            return False
        counts = {r: len(told[r][1]) for r in ranks}  # type: ignore[index]
        if len(set(counts.values())) > 1:
            raise GlobalTensorError(
                "GlobalBatches: batches have different structures on different ranks; numbers of "
                f"tensors by rank: {counts}"
            )
        return True

    def _joined(
        self, i: int, local: torch.Tensor | None, told: Sequence[_Told | None]
    ) -> GlobalTensor:
        here, where = world(), self.placement
        held = {r: told[r][1][i] for r in where.flat}  # type: ignore[index]
        refuse(f"GlobalBatches: tensor {i} of a batch", held)
        dims = len(held[where.flat[0]][0])
        layout: list[Sbp] = [e if e.is_split and e.dim < dims else broadcast for e in self.layout]
        spec = spec_of(held, where, layout)
        if local is None:
            return GlobalTensor.wrap(placeholder(spec), spec)
        alike = [a for a, e in enumerate(layout) if e.is_broadcast]
        same = where.fiber(here.rank, alike) if alike else ()
        if len(same) > 1:
            check_replicated(
                local,
                same,
                f"tensor {i} of a batch, on ranks that are to read the same rows",
                place=("GlobalBatches", i),
            )
        return GlobalTensor.wrap(local.to(here.device(where.type)), spec)
