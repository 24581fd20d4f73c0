"""GlobalDataLoader: batches of global tensors, of which each rank reads its share.

Users construct it. The order of samples, and so every batch, is that of one device. Along the axes
that split dim 0, each rank reads its own rows. Along the other axes, one rank reads and sends to
the others. So a replica of a model loads once, and random augmentations of a sample are the same on
all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils import data

from ..._base.pytree import replaced, structure, tensors_in
from ..._tensor.convert import check_placement
from ..._tensor.global_tensor import GlobalTensor
from ...boxing import log
from ...distributed.world import placeholder, world
from ...errors import DivergenceError, GlobalTensorError, SbpError, ShapeError
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp, as_layout, broadcast, split
from ...sharding.spec import Spec
from .prefetch import on_device
from .read_order import SPLIT_ADVICE, order_text, subset_text
from .sampler import DistributedSampler

__all__ = ["GlobalDataLoader"]

#: Options of torch's DataLoader that this loader sets itself, and what to pass instead.
_SET_HERE = {
    "batch_sampler": "pass sampler, batch_size and drop_last: each rank reads its share of a batch",
    "generator": "pass seed, or a sampler with a generator of its own",
}
#: First element of the message that ranks exchange when an iteration begins.
_BEGIN = "begin"
_SUBSET = "the subset of the dataset"


class GlobalDataLoader:
    """A loader of a map-style ``dataset`` that yields batches of global tensors.

    An example is ``GlobalDataLoader(dataset, 64, placement=p, sbp=flow.sbp.split(0),
    shuffle=True)``.

    ``batch_size`` counts the samples of the global batch. ``sbp``: for each axis of the placement
    ``split(0)`` (the samples), ``broadcast``, or ``split(d)`` of another dim. Such a dim is cut
    after reading, and a tensor without it is broadcast. A smaller last batch splits by the balanced
    rule, and some ranks may hold no row of it. The result of ``collate_fn`` is a pytree of dicts,
    lists and tuples. Its values that are no tensors remain those of the rank that read them.

    The batches are those of ``DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset,
    1, 0, shuffle, seed))`` on one device, whatever the placement. ``sampler`` defines another
    order, the same on every rank. ``set_epoch`` changes the order, and ``state_dict`` stores the
    position in it, for any number of ranks. On accelerators the next batch is copied from pinned
    memory while the last one is used. Other options (``num_workers``, ``prefetch_factor``,
    ``persistent_workers``, ...) are passed to torch's DataLoader.

    All ranks of the world must iterate together, with those outside the placement.
    ``check_meta=False`` omits the exchange of shapes with each batch, unless something else needs
    it. This is right only if every rank's share has the same trailing shape and dtypes. Raises
    SbpError, PlacementError, and ShapeError if the ranks' shares do not form one batch. Raises
    DivergenceError, when an iteration begins, if ranks have other epochs, seeds, positions,
    datasets or orders of the samples.
    """

    def __init__(
        self,
        dataset: data.Dataset[Any],
        batch_size: int = 1,
        *,
        placement: Placement | None = None,
        sbp: Any = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        sampler: data.Sampler[int] | None = None,
        collate_fn: Any = None,
        check_meta: bool = True,
        pin_memory: bool | None = None,
        **options: Any,
    ) -> None:
        if isinstance(dataset, data.IterableDataset) or not isinstance(dataset, Sized):
            raise GlobalTensorError(
                "GlobalDataLoader reads by index, so that each rank can read its share: the "
                "dataset needs __getitem__ and __len__. For any other one take a DataLoader on "
                "each rank, and GlobalBatches(loader, placement) around it"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise GlobalTensorError(
                f"GlobalDataLoader: batch_size is the number of samples in a global batch, at "
                f"least 1, not {batch_size!r}. (Batches that the dataset forms itself go through "
                f"a DataLoader on each rank, and GlobalBatches(loader, placement) around it)"
            )
        for name in _SET_HERE.keys() & options.keys():
            raise GlobalTensorError(f"GlobalDataLoader: {name} cannot be passed: {_SET_HERE[name]}")
        if sampler is not None and shuffle:
            raise GlobalTensorError(
                "GlobalDataLoader: sampler and shuffle both set the order of the samples: pass "
                "one of them"
            )
        self.placement = (
            Placement.all("cuda" if torch.cuda.is_available() else "cpu")
            if placement is None
            else placement
        )
        check_placement(self.placement)
        self.layout = _check_layout(
            as_layout(split(0) if sbp is None else sbp, self.placement.axes)
        )
        self.dataset, self.batch_size, self.drop_last, self.check_meta = (
            dataset,
            batch_size,
            drop_last,
            check_meta,
        )
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.sampler: Any = (
            DistributedSampler(dataset, 1, 0, shuffle, seed) if sampler is None else sampler
        )
        self._begin = self._done = 0
        self._share = _BatchShare(self.placement, self.layout)
        self._loader: data.DataLoader[Any] | None = None
        if self._share.reads:
            pin = (
                torch.cuda.is_available() and self.placement.type == "cuda"
                if pin_memory is None
                else pin_memory
            )
            self._rows = _Rows()
            # A separate generator: ranks that read must not advance torch's random numbers further
            # than the others.
            self._generator = torch.Generator()
            self._loader = data.DataLoader(
                dataset, batch_sampler=self._rows, collate_fn=collate_fn, pin_memory=pin,
                generator=self._generator, **options
            )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        samples = len(self.sampler)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Select the order of the epoch with this number.

        The next iteration begins at its start, unless it is the epoch that ``load_state_dict``
        continues."""
        if epoch != self.epoch:
            self.epoch, self._begin, self._done = epoch, 0, 0
        if isinstance(self.sampler, data.DistributedSampler):
            self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the position in it, the same on every rank.

        The position counts the batches that were yielded, not those that were read ahead."""
        fixed = {
            name: getattr(self, name) for name in ("batch_size", "drop_last", "shuffle", "seed")
        }
        return {"epoch": self.epoch, "batches": self._done, "samples": len(self.sampler), **fixed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a ``state_dict``.

        Raises GlobalTensorError if the state belongs to other batches than this loader's."""
        own_state = self.state_dict()
        if missing := [name for name in own_state if name not in state]:
            has = ", ".join(map(str, state)) or "nothing"
            raise GlobalTensorError(
                f"GlobalDataLoader: this is no state of a loader: it has no {', '.join(missing)} "
                f"(but {has})"
            )
        other = [
            f"{name} {state[name]} (here {own_state[name]})"
            for name in own_state
            if name not in ("epoch", "batches") and state[name] != own_state[name]
        ]
        if other:
            raise GlobalTensorError(
                f"GlobalDataLoader: this state belongs to a loader with {', '.join(other)}, whose "
                "batches are different"
            )
        self.set_epoch(int(state["epoch"]))
        self._begin = self._done = int(state["batches"])

    def __iter__(self) -> Iterator[Any]:
        batches = list(data.BatchSampler(self.sampler, self.batch_size, self.drop_last))[
            self._begin :
        ]
        self._check_order(batches)
        history = world().history((self.placement,))
        history.record(b"GlobalDataLoader")
        iteration = history.serial  # identifies the batches of this iteration
        self._done, self._begin = self._begin, 0
        read: Iterator[Any] = iter(())
        if self._loader is not None:
            self._generator.manual_seed(hash((self.seed, self.epoch, world().rank)) % (1 << 63))
            self._rows.batches = [rows for rows in map(self._share.rows, batches) if rows]
            read = on_device(
                map(_mapping_to_dict, self._loader), world().device(self.placement.type)
            )
        for batch in batches:
            own_share = next(read) if self._share.reads and self._share.rows(batch) else None
            position = self.epoch, self._done
            serial = hash((iteration, self._done))
            out = self._share.assemble(own_share, len(batch), self.check_meta, position, serial)
            self._done += 1
            yield out

    def _check_order(self, batches: Sequence[Sequence[Any]]) -> None:
        """Raise DivergenceError, on every rank, if the ranks would not read the same batches.

        The ranks of the placement compare everything that decides the order. The others compare
        the sizes of the batches only."""
        this_world = world()
        if this_world.size == 1:
            return
        rows = [row for batch in batches for row in batch]
        own = {
            "batches": f"{len(batches)} ({len(rows)} samples)",
            "epoch": self.epoch,
            "the position in the epoch": self._begin,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "the length of the dataset": len(self.dataset),
            "the order of the samples": order_text(rows),
            _SUBSET: subset_text(self.dataset) or "all of it",
        }
        messages = this_world.comm(tuple(range(this_world.size))).all_gather_object(
            (_BEGIN, own), "GlobalDataLoader"
        )
        _check_stage(messages)
        ranks = self.placement.flat
        first = ranks[0]
        for name in own:
            advice = f". {SPLIT_ADVICE}" if name == _SUBSET else ""
            for r in range(this_world.size) if name == "batches" else ranks:
                if messages[r][1][name] != messages[first][1][name]:
                    raise DivergenceError(
                        f"GlobalDataLoader: rank {r} would read other batches than rank {first}: "
                        f"{name} is {messages[r][1][name]} on rank {r}, "
                        f"{messages[first][1][name]} on rank {first}. Every rank "
                        "needs the same dataset, the same seed and epoch (set_epoch), the same "
                        "position (load_state_dict), and a sampler that yields the same indices"
                        f"{advice}"
                    )


def _check_stage(messages: Sequence[tuple[Any, Any]]) -> None:
    """Raise DivergenceError if the ranks are at different batches, or some begin an iteration.

    The first element of each rank's message is `_BEGIN`, or the epoch and the batch that it reads.
    """
    first = messages[0][0]
    for r, (stage, _) in enumerate(messages):
        if stage != first:
            raise DivergenceError(
                f"GlobalDataLoader: rank 0 {_stage_text(first)}, but rank {r} "
                f"{_stage_text(stage)}: all ranks must begin an iteration together, and read "
                "the same number of batches from it"
            )


def _stage_text(stage: Any) -> str:
    if stage == _BEGIN:
        return "begins an iteration"
    return f"reads batch {stage[1]} of epoch {stage[0]}"


def _mapping_to_dict(batch: Any) -> Any:
    """Convert other kinds of mapping to a dict."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _check_layout(layout: Sequence[Sbp]) -> tuple[Sbp, ...]:
    for entry in layout:
        if entry.is_partial or (entry.is_split and entry.dim < 0):
            raise SbpError(
                f"GlobalDataLoader: sbp is split(0), broadcast, or split(d) with d > 0 on each "
                f"axis, not {entry!r}"
            )
    return tuple(layout)


def check_split_dims(caller: str, layout: Sequence[Sbp], dims: Sequence[int]) -> None:
    """Raise SbpError if an axis splits a dim that no tensor of the batch has.

    ``dims``: the number of dims of each tensor. A batch without tensors has nothing to split.
    """
    for entry in layout:
        if dims and entry.is_split and max(dims) <= entry.dim:
            raise SbpError(
                f"{caller}: sbp {entry!r} splits dim {entry.dim}, but no tensor of the batch has "
                f"more than {max(dims)} dims, so every rank would hold all of it. Dim 0 counts "
                f"the rows: flow.sbp.split(0)"
            )


class _Rows(data.Sampler[list[int]]):
    """A sampler of the indices that this rank reads, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _BatchShare:
    """A rank's share of each batch."""

    def __init__(self, placement: Placement, layout: tuple[Sbp, ...]) -> None:
        this_world = world()
        self.placement, self.layout, self.rank = placement, layout, this_world.rank
        self.over_rows = [e if e == split(0) else broadcast for e in layout]
        # the axes along which one rank reads for all
        shared_axes = [a for a, e in enumerate(self.over_rows) if e.is_broadcast]
        where = placement.coordinate(this_world.rank)
        self.inside = where is not None
        self.fiber = placement.fiber(this_world.rank, shared_axes) if self.inside else ()
        self.reads = self.inside and self.fiber[0] == this_world.rank
        #: For each rank, the rank that reads for it.
        self.reader = {r: placement.fiber(r, shared_axes)[0] for r in placement.flat}
        self.parts = len(set(self.reader.values()))
        self.covers = set(placement.flat) == set(range(this_world.size))

    def _span(self, size: int, rank: int) -> tuple[int, int]:
        offsets, lengths = Spec.make((size,), torch.int64, self.placement, self.over_rows).box(rank)
        return offsets[0], lengths[0]

    def rows(self, batch: Sequence[int]) -> list[int]:
        """Return the indices of a global batch whose samples this rank holds."""
        begin, length = self._span(len(batch), self.rank)
        return list(batch[begin : begin + length])

    def assemble(
        self, local_share: Any, size: int, check: bool, position: tuple[int, int], serial: int
    ) -> Any:
        """Return the batch of ``size`` samples, given this rank's share ``local_share``.

        ``local_share`` is None on a rank that has read nothing. ``position`` is the epoch and the
        number of the batch. ``serial`` identifies the batch."""
        tensors = tensors_in(local_share, [])
        shell, metas = local_share, [(tuple(t.shape), t.dtype) for t in tensors]
        if check or not self.covers or len(self.fiber) > 1 or size < self.parts:
            shell, metas = self._agree_on_structure(local_share, metas, size, position)
        else:
            self._check_rows(self.rank, metas, size)
        check_split_dims("GlobalDataLoader", self.layout, [len(shape) for shape, _ in metas])
        parts = iter(
            [
                self._assemble_tensor(
                    tensors[i] if local_share is not None else None,
                    shape,
                    dtype,
                    size,
                    hash((serial, i)),
                )
                for i, (shape, dtype) in enumerate(metas)
            ]
        )
        return replaced(shell, parts)

    def _agree_on_structure(
        self, local_share: Any, metas: list[Any], size: int, position: tuple[int, int]
    ) -> tuple[Any, list[Any]]:
        """Return the structure of the batch, and shape and dtype of its tensors.

        All ranks that read must agree on them, except for the number of rows. Raises ShapeError if
        they do not, and DivergenceError if they are at different batches."""
        this_world = world()
        own_share = (
            None
            if local_share is None
            else (replaced(local_share, iter([torch.empty(0)] * len(metas))), metas)
        )
        messages = this_world.comm(tuple(range(this_world.size))).all_gather_object(
            (position, own_share), "GlobalDataLoader"
        )
        _check_stage(messages)
        shares = [share for _, share in messages]
        heard = {r: shares[r] for r in sorted(set(self.reader.values())) if shares[r] is not None}
        first = min(heard)
        for r, (shell, other) in heard.items():
            self._check_rows(r, other, size)
            if structure(shell) != structure(heard[first][0]):
                raise ShapeError(
                    "GlobalDataLoader: the shares of a batch have different structures: rank "
                    f"{first} has {structure(heard[first][0])}, rank {r} {structure(shell)}. Let "
                    "every sample have the same keys and containers, in the same order"
                )
            if [(s[1:], d) for s, d in other] != [(s[1:], d) for s, d in heard[first][1]]:
                raise ShapeError(
                    f"GlobalDataLoader: the shares of a batch do not fit together: rank {first} "
                    f"has {_format_metas(heard[first][1])}, rank {r} {_format_metas(other)}. "
                    "collate_fn sees one share only: let it pad to a length that does not depend "
                    "on the samples"
                )
        return heard.get(self.reader.get(self.rank, first), heard[first])[0], heard[first][1]

    def _check_rows(self, rank: int, metas: list[Any], size: int) -> None:
        rows = self._span(size, rank)[1]
        for shape, _ in metas:
            if shape[:1] != (rows,):
                raise ShapeError(
                    f"GlobalDataLoader: collate_fn made a tensor of shape {list(shape)} of rank "
                    f"{rank}'s {rows} samples: dim 0 must count them"
                )

    def _assemble_tensor(
        self,
        local: torch.Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        size: int,
        serial: int,
    ) -> GlobalTensor:
        layout = [
            broadcast if e.is_split and e.dim >= max(1, len(shape)) else e for e in self.layout
        ]
        spec = Spec.make((size, *shape[1:]), dtype, self.placement, layout)
        if not self.inside:
            return GlobalTensor.wrap(placeholder(spec), spec, serial)
        rows = spec.replace(layout=self.over_rows).local_shape(self.rank)
        this_world = world()
        whole = (
            torch.empty(rows, dtype=dtype, device=this_world.device(self.placement.type))
            if local is None
            else local
        )
        if len(self.fiber) > 1:
            with log.exchanges("a batch of the loader to the ranks that share its rows"):
                whole = this_world.comm(self.fiber).broadcast(whole, 0)
        offsets, lengths = spec.box(self.rank)
        for d in range(1, len(shape)):
            whole = whole.narrow(d, offsets[d], lengths[d])
        return GlobalTensor.wrap(whole.contiguous(), spec, serial)


def _format_metas(metas: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in metas)
