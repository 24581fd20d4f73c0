"""Global batches from the batches of each rank's own loader, as with DistributedDataParallel.

Users construct `GlobalBatches`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..._base.pytree import replaced, structure, tensors_in
from ..._tensor.convert import check_placement, spec_of
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.history import identify_results
from ..._tensor.plain_operands import check_replicated
from ...distributed.world import placeholder, world
from ...errors import DivergenceError, GlobalTensorError, SbpError
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp, as_layout, broadcast, split
from ...sharding.tensor_kinds import Described, described, refuse
from .loader import check_split_dims
from .read_order import SPLIT_ADVICE, sampler_text

__all__ = ["GlobalBatches"]

_END = object()
#: The message of a rank about its batch: its number, its structure, and shape and dtype
#: (`described`) of each tensor. The first one also has the `sampler_text` of its loader. It is None
#: if the rank's loader has ended.
_BatchHeader = tuple[int, Any, list[Described], str]


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
        this_world = world()
        inside = self.placement.coordinate(this_world.rank) is not None
        batches = iter(self.loader) if inside else iter(())
        number = 0
        while True:
            batch = next(batches, _END)
            tensors = tensors_in(batch, []) if batch is not _END else []
            own_header = (
                None
                if batch is _END
                else (
                    number,
                    replaced(batch, iter([torch.empty(0)] * len(tensors))),
                    [described(t) for t in tensors],
                    "" if number else sampler_text(self.loader),
                )
            )
            headers: Sequence[_BatchHeader | None] = (
                this_world.comm(tuple(range(this_world.size))).all_gather_object(
                    own_header, "GlobalBatches"
                )
                if this_world.size > 1
                else [own_header]
            )
            if not self._all_have_next(headers, number):
                return
            _, shell, metas, _ = headers[this_world.rank if inside else self.placement.flat[0]]  # type: ignore[misc]
            parts = [
                self._global_batch_tensor(i, tensors[i] if inside else None, headers)
                for i in range(len(metas))
            ]
            check_split_dims("GlobalBatches", self.layout, [part.dim() for part in parts])
            if this_world.size > 1:
                this_world.history((self.placement,)).record(b"GlobalBatches")
            identify_results(parts)
            number += 1
            yield replaced(shell, iter(parts))

    def _all_have_next(self, headers: Sequence[_BatchHeader | None], number: int) -> bool:
        """Return True if every rank has another batch, and False if the iteration ends.

        Raises GlobalTensorError if some ranks have no other batch, or batches of another
        structure, and DivergenceError if a rank has begun the iteration again."""
        ranks = self.placement.flat
        ended = [r for r in ranks if headers[r] is None]
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
        first, numbers = ranks[0], {r: headers[r][0] for r in ranks}  # type: ignore[index]
        structures = {r: structure(headers[r][1]) for r in ranks}  # type: ignore[index]
        for r in ranks:
            if numbers[r] != numbers[first]:
                raise DivergenceError(
                    f"GlobalBatches: rank {first} reads batch {numbers[first]}, rank {r} batch "
                    f"{numbers[r]}: a rank has begun the iteration again, or has left out a batch. "
                    "All ranks must iterate together"
                )
            reads, first_reads = headers[r][3], headers[first][3]  # type: ignore[index]
            if reads != first_reads:
                raise DivergenceError(
                    "GlobalBatches: the DistributedSamplers of the ranks divide other rows, so "
                    f"some rows would be read twice and others never: rank {first} has "
                    f"{first_reads or 'none'}; rank {r} has {reads or 'none'}. Every rank needs "
                    f"the same dataset, seed and epoch (set_epoch). {SPLIT_ADVICE}"
                )
            if structures[r] != structures[first]:
                counts = {r: len(headers[r][2]) for r in ranks}  # type: ignore[index]
                raise GlobalTensorError(
                    "GlobalBatches: batches have different structures on different ranks; numbers "
                    f"of tensors by rank: {counts}\n  rank {first} has  {structures[first]}\n"
                    f"  rank {r} has  {structures[r]}\n"
                    "Each rank's loader must yield the same keys and containers, in the same order"
                )
        return True

    def _global_batch_tensor(
        self, i: int, local: torch.Tensor | None, headers: Sequence[_BatchHeader | None]
    ) -> GlobalTensor:
        this_world, where = world(), self.placement
        held = {r: headers[r][2][i] for r in where.flat}  # type: ignore[index]
        refuse(f"GlobalBatches: tensor {i} of a batch", held)
        dims = len(held[where.flat[0]][0])
        layout: list[Sbp] = [e if e.is_split and e.dim < dims else broadcast for e in self.layout]
        spec = spec_of(held, where, layout)
        if local is None:
            return GlobalTensor.wrap(placeholder(spec), spec)
        alike = [a for a, e in enumerate(layout) if e.is_broadcast]
        same = where.fiber(this_world.rank, alike) if alike else ()
        if len(same) > 1:
            check_replicated(
                local,
                same,
                f"tensor {i} of a batch, on ranks that are to read the same rows",
                place=("GlobalBatches", i),
            )
        return GlobalTensor.wrap(local.to(this_world.device(where.type)), spec)
