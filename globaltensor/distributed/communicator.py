"""Collectives among an ordered set of ranks, on tensors of any dtype, size and stride.

``World.comm`` creates communicators; boxing and the reduction of gradients call them.

Every collective is built on one primitive, `_swap`: each rank sends flat bytes to some others. A
backend overrides the collectives that it can do better natively. Results are new tensors. Inputs
are never modified, except by `all_reduce_async`. Data moves as bytes, so every dtype can be moved.
Reductions happen locally, in the order of ranks, so every rank gets the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import DivergenceError, GlobalTensorError
from ..sharding.balanced_split import balanced_split
from ..sharding.tensor_kinds import TensorKind, refusal
from .divergence import OBJECTS, History, Report, describe

if TYPE_CHECKING:
    from .backends.shared_memory import SharedMemoryPeers
    from .world_base import World

__all__ = [
    "Channel",
    "Communicator",
    "CompletedHandle",
    "ExchangeHandle",
    "Handle",
    "Message",
    "ReduceScatterHandle",
    "Traffic",
    "as_bytes",
    "combine",
    "flatten",
    "record_collectives",
]

#: Up to this many bytes an all-reduce gathers everything and adds locally: one round instead of
#: two. Two ranks always do so, because it sends no more bytes.
_SMALL: Final = 1 << 15

#: Dtypes that torch cannot add or compare -> a dtype that can hold their values for the reduction.
_WIDER: Final = {
    torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_FOLD: Final[dict[str, Callable[..., Tensor]]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Traffic(NamedTuple):
    """One collective that this rank took part in.

    ``bytes`` is the number of bytes that a rank sends (the larger share if shares are uneven).
    """

    kind: str
    ranks: tuple[int, ...]
    bytes: int


class Handle(Protocol):
    """A handle that an asynchronous collective returns."""

    def wait(self) -> None:
        """Block until the result is available. Raise WorldError if the collective failed."""


class ReduceScatterHandle:
    """A handle of a reduce-scatter.

    ``value`` is this rank's shard once ``wait`` has returned. ``finish`` computes it from the
    result of ``work``.
    """

    def __init__(
        self,
        work: Handle | None = None,
        finish: Callable[[], Tensor] | None = None,
        value: Tensor | None = None,
    ) -> None:
        self._work, self._finish, self._value = work, finish, value

    def wait(self) -> None:
        """Block until the result is available. Raise WorldError if the collective failed."""
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self._value = self._finish()
        self._work = self._finish = None

    @property
    def value(self) -> Tensor:
        """The result of this rank. Call ``wait`` first."""
        assert self._value is not None, "call wait() first"
        return self._value


class ExchangeHandle:
    """A handle of an exchange in progress."""

    def __init__(self, work: Handle, parts: dict[int, Tensor], buffers: object = None) -> None:
        self._work, self._parts, self._buffers = work, parts, buffers

    def wait(self) -> dict[int, Tensor]:
        """Block until all data has arrived and the sent tensors may be written again.

        Return the received flat tensors by index. Raise WorldError if they cannot arrive.
        """
        self._work.wait()
        self._buffers = None
        return self._parts


class CompletedHandle:
    """A handle of a collective that has already finished."""

    def wait(self) -> None:
        return None


@contextmanager
def record_collectives() -> Iterator[list[Traffic]]:
    """Record the collectives of this rank, forward and backward, while the block runs.

    The block's value is the list to which they are recorded.

    >>> with record_collectives() as log:
    ...     pass
    >>> log
    []
    """
    from .world import world

    this_world = world()
    before, this_world.trace = this_world.trace, []
    try:
        yield this_world.trace
    finally:
        this_world.trace = before


def flatten(t: Tensor) -> Tensor:
    """Return the elements of ``t`` in row-major order: 1-D, contiguous and without gradient.

    The result shares memory with ``t`` where it can.
    """
    t = t.detach()
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    # A storage with gaps must not reach gloo, which would send the gaps too.
    return t.contiguous().view(-1)


def as_bytes(flat: Tensor) -> Tensor:
    """Return a view of the same memory as bytes."""
    # A tensor of one element may have any stride and still count as contiguous. A view as another
    # dtype needs stride 1.
    return (flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))).view(torch.uint8)


def combine(
    parts: Sequence[Tensor], op: str, spare: int | None = None, out: Tensor | None = None
) -> Tensor:
    """Return the elementwise sum, max or min of tensors of one shape and dtype, in the given order.

    The result is a new tensor, unless an existing one can be overwritten. That is ``out``, which
    may be one of the first two tensors, or the tensor at index ``spare`` if there are two tensors.

    Half types are added in float32. For bool, sum and max are "any", and min is "all". Raise
    RuntimeError for the max or min of complex numbers.
    """
    dtype = parts[0].dtype
    if len(parts) == 1:
        return parts[0].clone()
    if dtype is torch.bool:
        return functools.reduce(torch.logical_and if op == "min" else torch.logical_or, parts)
    if dtype is torch.uint64:
        # int64 adds the same bits. Flipping the top bit makes the order of int64 that of uint64.
        top = -(1 << 63) if op != "sum" else 0
        return (combine([p.view(torch.int64) ^ top for p in parts], op) ^ top).view(torch.uint64)
    wider = _WIDER.get(dtype)
    if (
        wider is None
        and op == "sum"
        and len(parts) > 2
        and dtype in (torch.float16, torch.bfloat16)
    ):
        wider = torch.float32
    if wider is not None:
        return combine([p.to(wider) for p in parts], op).to(dtype)
    fold = _FOLD[op]
    total = fold(
        parts[0], parts[1], out=parts[spare] if spare is not None and len(parts) == 2 else out
    )
    for part in parts[2:]:
        fold(total, part, out=total)
    return total


class Communicator(ABC):
    """The collectives among ``ranks``, in the given order.

    All of these ranks must call the same collectives in the same order.
    """

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self.world, self.ranks, self.size = world, ranks, len(ranks)
        self.index = ranks.index(world.rank)
        self.begin_digests()

    def peers(self, device: torch.device) -> SharedMemoryPeers | None:
        """Return the peers that share memory with this rank, or None without such memory."""
        return None

    def begin_digests(self) -> None:
        """Forget everything that was compared so far."""
        # The digest of the collectives, each with the operations run before it.
        self._log = hashlib.blake2b(digest_size=8)
        self._histories: list[History] = []
        # The history of exactly these ranks, if they share no other history.
        self._own: History | None = None
        self._known_histories = self._collectives = 0
        self._digest = b""  # the digest of the last collective
        #: A size of the collective that begins, the same on every rank, if there is one.
        self._nbytes: int | None = None

    @abstractmethod
    def _swap(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> None:
        """Send each flat byte tensor to its peer, and fill the receive tensors from their peers.

        Keys are indexes into ``ranks``, never the own one. No tensor is empty. Every member must
        make the call, even with nothing to send or receive: NCCL starts a communicator only with
        all members.
        """

    def all_gather_object(self, value: object, purpose: str = "") -> list[Any]:
        """Return every rank's (picklable) value, in the order of ``ranks``.

        ``purpose`` names the function that exchanges the values. Raise DivergenceError, on every
        rank, if the ranks exchange values for different purposes.
        """
        if self.size == 1:
            return [value]
        world = self.world
        before, world.purpose = world.purpose, purpose
        try:
            self._begin_collective(OBJECTS, torch.uint8, _CPU, purpose)
            return self.all_gather_unchecked(value, self._digest)
        finally:
            world.purpose = before

    def all_gather_unchecked(self, value: object, digest: bytes = b"") -> list[Any]:
        """Return every rank's value like `all_gather_object`.

        Calls during a comparison use it without ``digest``, which is compared otherwise.
        """
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        header = torch.tensor([payload.numel(), int.from_bytes(digest, "little", signed=True)])
        headers = [h.tolist() for h in self._all_gather_parts(header, [2] * self.size)]
        if any(h[1] != headers[0][1] for h in headers):
            raise self._diverged(self.all_gather_unchecked)
        return [
            pickle.loads(part.numpy().tobytes())
            for part in self._all_gather_parts(payload, [h[0] for h in headers])
        ]

    def barrier(self) -> None:
        """Block until all ranks have called this method."""
        if self.size > 1:
            self._begin_collective("barrier", torch.uint8, _CPU)
            self._all_gather_parts(torch.zeros(1), [1] * self.size)

    def compare_plain(
        self, digest: Tensor, text: str, purpose: str, odd: TensorKind | None = None
    ) -> None:
        """Compare a digest (int64, on the CPU) of a plain tensor that must be equal on all ranks.

        ``odd`` is the kind of this rank's tensor, if it is not an ordinary tensor. On every rank,
        raise DivergenceError if digests differ, or KindError if kinds differ.
        """
        self.world.plain, self.world.purpose, self.world.odd = text, purpose, odd
        self._begin_collective("comparison of a plain tensor", torch.int64, _CPU)
        parts = self._all_gather_parts(digest, [digest.numel()] * self.size)
        if not all(torch.equal(part, digest) for part in parts):
            raise self._diverged(self.all_gather_unchecked)
        self.world.plain, self.world.purpose, self.world.odd = "", "", None

    def _begin_and_record(
        self,
        kind: str,
        nbytes: int,
        dtype: torch.dtype | None,
        device: torch.device,
        op: str = "",
        longest: int | None = None,
    ) -> None:
        self._nbytes = nbytes if kind in _OF_ONE_SIZE else longest
        self._begin_collective(kind, dtype, device, op)
        self._nbytes = None
        world = self.world
        world.nbytes = nbytes
        if world.trace is not None or world.observer is not None:
            world.observe(Traffic(kind, self.ranks, nbytes))

    # Comparison of what ranks run

    def _begin_collective(
        self, kind: str, dtype: torch.dtype | None, device: torch.device, op: str = ""
    ) -> None:
        """Begin a collective: compare its digest, and under flow.check_ranks its operations too.

        Raise DivergenceError if they differ.
        """
        world = self.world
        if world.pace is not None:
            world.pace.compare(self, kind)
        if world.compares and self.size > 1:
            if self._known_histories != len(world.histories):
                self._find_histories()
            self._collectives += 1
            label, own = _label(kind, dtype, op), self._own
            if own is not None:  # the usual case: one digest covers everything
                own.record(label)
                self._digest = own.digest()
            else:
                self._log.update(b"".join([label, *[h.digest() for h in self._histories]]))
                self._digest = self._log.digest()
            world.kind = kind
            self._compare(device)

    def _find_histories(self) -> None:
        ranks = frozenset(self.ranks)
        self._histories = [h for h in self.world.histories.values() if ranks <= h.ranks]
        self._known_histories = len(self.world.histories)
        self._own = (
            self._histories[0]
            if len(self._histories) == 1 and self._histories[0].ranks == ranks
            else None
        )

    def _compare(self, device: torch.device) -> None:
        """Compare the digest with that of the other ranks, if the data does not carry it."""
        return None

    def _diverged(
        self, exchange: Callable[[Any], Sequence[Any]], detail: str = ""
    ) -> GlobalTensorError:
        """Return the error of ranks whose digests, kinds of tensors or messages differ.

        ``exchange`` is a function that gathers every rank's object on all ranks. ``detail``: what
        this rank has seen of the others, for the error.
        """
        world = self.world
        report = Report.here(
            world.rank,
            world.kind,
            world.purpose,
            world.plain,
            self._histories,
            world.odd,
            detail,
            world.raised,
        )
        reports = [Report.unpacked(data) for data in exchange(report.packed()) if data]
        world.forget()
        reports.sort(key=lambda r: r.rank)
        first = next((r for r in reports if r.odd is not None), reports[0])
        if any(r.odd != first.odd for r in reports):
            return refusal(first.purpose, {r.rank: r.odd for r in reports})
        error = DivergenceError(describe(reports, self.ranks))
        if not all(r.plain for r in reports):
            world.diverged = str(error)
        return error

    # Reductions

    def all_reduce(self, t: Tensor, op: str = "sum") -> Tensor:
        """Return the elementwise ``sum``, ``max`` or ``min`` of all ranks' tensors of one shape.

        Every rank gets the same bits.
        """
        if self.size == 1 or not t.numel():
            return t.detach().clone()
        flat = flatten(t)
        self._begin_and_record(
            "all_reduce", 2 * (flat.nbytes - flat.nbytes // self.size), flat.dtype, flat.device, op
        )
        return self._all_reduce(flat, op).view(t.shape)

    def all_reduce_async(self, flat: Tensor, op: str = "sum") -> Handle:
        """Reduce a contiguous tensor over all ranks **in place**, during the computation.

        The caller must not read or write the tensor until ``wait()`` of the handle returns.
        """
        if self.size > 1 and flat.numel():
            self._begin_and_record(
                "all_reduce",
                2 * (flat.nbytes - flat.nbytes // self.size),
                flat.dtype,
                flat.device,
                op,
            )
            return self._all_reduce_async(flat, op)
        return CompletedHandle()

    def reduce_scatter(self, chunks: Sequence[Tensor], op: str = "sum") -> Tensor:
        """Reduce-scatter one chunk for each rank, of any shapes.

        Rank i gets the ``op`` of all ranks' chunks i.
        """
        own_chunk = chunks[self.index]
        if self.size == 1:
            return own_chunk.detach().clone()
        sends = [flatten(c) for c in chunks]
        total = sum(c.nbytes for c in sends)
        self._begin_and_record(
            "reduce_scatter", total - total // self.size, own_chunk.dtype, own_chunk.device, op
        )
        return self._reduce_scatter(sends, op).view(own_chunk.shape)

    def reduce_scatter_async(
        self, chunks: Sequence[Tensor], op: str = "sum"
    ) -> ReduceScatterHandle:
        """Reduce-scatter 1-D contiguous chunks during the computation.

        The caller must not touch the chunks until ``wait()`` of the handle returns. Then the handle
        has the ``value``.
        """
        if self.size == 1:
            return ReduceScatterHandle(value=chunks[0].detach().clone())
        total = sum(c.nbytes for c in chunks)
        self._begin_and_record(
            "reduce_scatter", total - total // self.size, chunks[0].dtype, chunks[0].device, op
        )
        return self._reduce_scatter_async([c.detach() for c in chunks], op)

    def _reduce_scatter_async(self, sends: Sequence[Tensor], op: str) -> ReduceScatterHandle:
        return ReduceScatterHandle(value=self._reduce_scatter(sends, op))

    def _all_reduce(self, flat: Tensor, op: str) -> Tensor:
        n, p = flat.numel(), self.size
        if p == 2 or flat.nbytes <= _SMALL:
            return combine(self._all_gather_parts(flat, [n] * p), op, spare=self.index - 1)
        sizes = [length for _, length in balanced_split(n, p)]
        out = torch.empty_like(flat)
        self._all_gather(self._reduce_scatter(list(flat.split_with_sizes(sizes)), op), sizes, out)
        return out

    def _all_reduce_async(self, flat: Tensor, op: str) -> Handle:
        self._all_reduce_in_place(flat.detach().view(-1), op)
        return CompletedHandle()

    def _all_reduce_in_place(self, flat: Tensor, op: str) -> None:
        if self.size == 2 or flat.nbytes <= _SMALL:
            parts = self._all_gather_parts(flat, [flat.numel()] * self.size)
            flat.copy_(combine(parts, op, spare=self.index - 1))
            return
        slots = flat.split_with_sizes(
            [length for _, length in balanced_split(flat.numel(), self.size)]
        )
        own_slot = slots[self.index]
        own_slot.copy_(self._reduce_scatter(slots, op))
        others = [i for i in range(self.size) if i != self.index]
        self._swap_flat(dict.fromkeys(others, own_slot), {i: slots[i] for i in others}, flat.device)

    def _reduce_scatter(self, sends: Sequence[Tensor], op: str) -> Tensor:
        longest = max(self.size * max(s.numel() for s in sends), sum(s.numel() for s in sends))
        return combine(
            self._all_to_all_parts(sends, [sends[self.index].numel()] * self.size, longest),
            op,
            spare=self.index - 1,
        )

    # Moves

    def all_gather(self, t: Tensor, numels: Sequence[int], fresh: bool = True) -> list[Tensor]:
        """Return every rank's elements as flat tensors; rank i sends ``numels[i]`` elements.

        If not ``fresh``, the own local tensor may share memory with ``t``.
        """
        flat = flatten(t)
        if self.size == 1:
            return [flat.clone() if fresh else flat]
        total = sum(numels) * flat.itemsize
        self._begin_and_record("all_gather", total - total // self.size, flat.dtype, flat.device)
        parts = self._all_gather_parts(flat, numels)
        if fresh:
            parts[self.index] = flat.clone()
        return parts

    def _all_gather_parts(self, flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
        parts = [
            flat if i == self.index else torch.empty(n, dtype=flat.dtype, device=flat.device)
            for i, n in enumerate(numels)
        ]
        others = [i for i in range(self.size) if i != self.index]
        self._swap_flat(dict.fromkeys(others, flat), {i: parts[i] for i in others}, flat.device)
        return parts

    def all_gather_into(self, t: Tensor, numels: Sequence[int], out: Tensor) -> None:
        """Gather every rank's elements into ``out``, in the order of ``ranks``.

        ``out`` is flat and contiguous, and has ``sum(numels)`` elements.
        """
        flat = flatten(t)
        if self.size == 1:
            out.copy_(flat)
            return
        self._begin_and_record(
            "all_gather", out.nbytes - out.nbytes // self.size, out.dtype, out.device
        )
        self._all_gather(flat, numels, out)

    def all_gather_into_async(self, t: Tensor, numels: Sequence[int], out: Tensor) -> Handle:
        """Gather every rank's elements into ``out`` during the computation.

        The caller must not touch ``t`` and ``out`` until ``wait()`` of the handle returns.
        """
        flat = flatten(t)
        if self.size == 1:
            out.copy_(flat)
            return CompletedHandle()
        self._begin_and_record(
            "all_gather", out.nbytes - out.nbytes // self.size, out.dtype, out.device
        )
        return self._all_gather_async(flat, numels, out)

    def _all_gather_async(self, flat: Tensor, numels: Sequence[int], out: Tensor) -> Handle:
        self._all_gather(flat, numels, out)
        return CompletedHandle()

    def _all_gather(self, flat: Tensor, numels: Sequence[int], out: Tensor) -> None:
        slots = out.split_with_sizes(list(numels))
        others = [i for i in range(self.size) if i != self.index]
        self._swap_flat(
            dict.fromkeys(others, flat),
            {i: slots[i] for i in others},
            out.device,
            (slots[self.index], flat),
        )

    def all_to_all(
        self,
        sends: Sequence[Tensor],
        numels: Sequence[int],
        fresh: bool = True,
        longest: int | None = None,
    ) -> list[Tensor]:
        """Send ``sends[i]`` to rank i, and return what was received as flat tensors.

        Rank j sends ``numels[j]`` elements. If not ``fresh``, the own local tensor may share memory
        with its input. ``longest`` is the largest number of elements that any rank sends or
        receives, if it is known. It may allow a faster path.
        """
        flats = [flatten(s) for s in sends]
        own = flats[self.index]
        if self.size > 1:
            self._begin_and_record(
                "all_to_all",
                sum(f.nbytes for f in flats) - own.nbytes,
                own.dtype,
                own.device,
                longest=longest,
            )
        parts = self._all_to_all_parts(flats, numels, longest)
        if fresh:
            parts[self.index] = own.clone()
        return parts

    def _all_to_all_parts(
        self, sends: Sequence[Tensor], numels: Sequence[int], longest: int | None
    ) -> list[Tensor]:
        own = sends[self.index]
        parts = [
            own if i == self.index else torch.empty(n, dtype=own.dtype, device=own.device)
            for i, n in enumerate(numels)
        ]
        others = [i for i in range(self.size) if i != self.index]
        self._swap_flat({i: sends[i] for i in others}, {i: parts[i] for i in others}, own.device)
        return parts

    def all_to_all_into(
        self,
        sends: Sequence[Tensor],
        numels: Sequence[int],
        out: Tensor,
        longest: int | None = None,
    ) -> None:
        """Exchange as in `all_to_all`, into ``out`` and in the order of ``ranks``.

        ``out`` is flat and contiguous, and has ``sum(numels)`` elements.
        """
        flats = [flatten(s) for s in sends]
        if self.size == 1:
            out.copy_(flats[0])
            return
        total = sum(f.nbytes for f in flats)
        own = flats[self.index].nbytes
        self._begin_and_record("all_to_all", total - own, out.dtype, out.device, longest=longest)
        self._all_to_all(flats, numels, out, longest)

    def _all_to_all(
        self, sends: Sequence[Tensor], numels: Sequence[int], out: Tensor, longest: int | None
    ) -> None:
        slots = out.split_with_sizes(list(numels))
        others = [i for i in range(self.size) if i != self.index]
        self._swap_flat(
            {i: sends[i] for i in others},
            {i: slots[i] for i in others},
            out.device,
            (slots[self.index], sends[self.index]),
        )

    def broadcast(self, t: Tensor, src: int) -> Tensor:
        """Return the tensor of the rank at index ``src`` on every rank.

        On the other ranks ``t`` provides only shape and dtype.
        """
        if self.size == 1 or not t.numel():
            return t.detach().clone()
        self._begin_and_record("broadcast", t.nbytes, t.dtype, t.device)
        flat = (
            flatten(t).clone()
            if self.index == src
            else torch.empty(t.numel(), dtype=t.dtype, device=t.device)
        )
        self._broadcast(flat, src)
        return flat.view(t.shape)

    def _broadcast(self, flat: Tensor, src: int) -> None:
        if self.index == src:
            self._swap_flat(
                dict.fromkeys((i for i in range(self.size) if i != src), flat), {}, flat.device
            )
        else:
            self._swap_flat({}, {src: flat}, flat.device)

    def exchange(
        self, sends: Mapping[int, Tensor], numels: Mapping[int, int], like: Tensor
    ) -> dict[int, Tensor]:
        """Send ``sends[i]`` to the rank at index i, and return the flat tensors received.

        This is a sparse point-to-point exchange: ``numels[j]`` elements come from the rank at index
        j. Dtype and device are those of ``like``. A rank gets what it sends to itself as a copy.
        """
        recvs = {i: torch.empty(n, dtype=like.dtype, device=like.device) for i, n in numels.items()}
        self.exchange_into(sends, recvs, like.device)
        return recvs

    def exchange_async(
        self, sends: Mapping[int, Tensor], numels: Mapping[int, int], like: Tensor
    ) -> ExchangeHandle:
        """Exchange with other ranks as in `exchange`, during the computation.

        The caller must not touch the sent tensors until ``wait()`` of the handle returns the
        received ones.
        """
        flats = {i: flatten(s) for i, s in sends.items() if s.numel()}
        recvs = {i: torch.empty(n, dtype=like.dtype, device=like.device) for i, n in numels.items()}
        self._begin_and_record("exchange", sum(f.nbytes for f in flats.values()), None, like.device)
        if self.size == 1:
            return ExchangeHandle(CompletedHandle(), recvs)
        into = {i: as_bytes(r) for i, r in recvs.items() if r.numel()}
        return ExchangeHandle(
            self._swap_async({i: as_bytes(s) for i, s in flats.items()}, into, like.device),
            recvs,
            flats,
        )

    def _swap_async(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> Handle:
        self._swap(sends, recvs, device)
        return CompletedHandle()

    def exchange_into(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> None:
        """Exchange as in `exchange`, into the given flat contiguous tensors."""
        flats = {i: flatten(s) for i, s in sends.items()}
        self._begin_and_record(
            "exchange", sum(f.nbytes for i, f in flats.items() if i != self.index), None, device
        )
        local = (recvs[self.index], flats[self.index]) if self.index in recvs else None
        self._swap_flat(
            {i: f for i, f in flats.items() if i != self.index},
            {i: r for i, r in recvs.items() if i != self.index},
            device,
            local,
        )

    def _swap_flat(
        self,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Tensor],
        device: torch.device,
        local: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        if self.size > 1:
            self._swap(
                {i: as_bytes(s) for i, s in sends.items() if s.numel()},
                {i: as_bytes(r) for i, r in recvs.items() if r.numel()},
                device,
            )
        if local is not None:
            local[0].copy_(local[1])


_CPU: Final = torch.device("cpu")


#: Collectives in which each rank counts as many bytes of traffic as any other.
_OF_ONE_SIZE: Final = frozenset(("all_reduce", "reduce_scatter", "all_gather", "broadcast"))


@functools.cache
def _label(kind: str, dtype: torch.dtype | None, op: str) -> bytes:
    """Return the record of a collective for the digest."""
    return f"{kind} {dtype} {op}".encode()


class Message(Protocol):
    """One message in transit through a channel."""

    def over(self) -> bool:
        """Return True if the message has arrived or failed, without waiting.

        ``wait`` then returns or raises at once.
        """

    def arrive(self) -> None:
        """Block until the data has arrived.

        Local post-processing, such as a copy to the device, is left to `wait`.
        """
        self.wait()

    def wait(self) -> None:
        """Block until the message has arrived, at most for the time limit of the world.

        Raise WorldError if the message cannot arrive.
        """


class Channel(ABC):
    """The messages from rank ``source`` to rank ``target`` that move during the computation.

    This rank is one of the two. Messages have no names: the n-th receive gets the n-th message
    sent. So both sides must know the order and the sizes of messages. All other channels are
    independent of this one, including the one in the opposite direction.
    """

    def __init__(self, world: World, source: int, target: int) -> None:
        self.world, self.source, self.target = world, source, target

    @abstractmethod
    def _send(self, data: Tensor) -> Message:
        """Start sending flat bytes, at least one."""

    @abstractmethod
    def _receive(self, data: Tensor) -> Message:
        """Start receiving into flat bytes, at least one."""

    def connect(self) -> None:
        """Prepare the channel.

        Both ranks must call it before the first message. Each rank calls it for all of its
        channels, sorted by (source, target), because a call may wait for the other rank.
        """
        return None

    def close(self) -> None:
        """Release the resources of the channel."""
        return None

    def send(self, t: Tensor) -> Message:
        """Start sending the elements of ``t`` in row-major order, without waiting.

        The caller must not write to them until the message is over.
        """
        flat = flatten(t)
        world = self.world
        if world.trace is not None or world.observer is not None:
            world.observe(Traffic("send", (self.source, self.target), flat.nbytes))
        return self._send(as_bytes(flat))

    def receive(self, flat: Tensor) -> Message:
        """Start filling a contiguous 1-D tensor with the next message, without waiting."""
        return self._receive(as_bytes(flat))
