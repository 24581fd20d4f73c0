"""Collectives among processes, over torch.distributed.

`shared_memory_comm` falls back to them if ranks share no memory.

On gloo every collective is built from messages and all-to-alls. Measured on two processes (26 MB),
these take 12 and 14 ms, all_reduce 28 ms, all_gather_into_tensor 25 ms and reduce_scatter_tensor 77
ms. Where messages and an all-to-all could both serve, the all-to-all is used. It waits in gloo's
own threads, which a busy machine wakes sooner. For 1 MB with both cores busy it takes 0.8 ms, and
1.0 in the third quartile; messages take 0.9 and 4.0. The native collectives of NCCL and of our MPI
(globaltensor.distributed.backends.mpi) are used as they are.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..._base import torch_private
from ..._base.refusals import no_values_message
from ..._base.user_code import user_line
from ...errors import DivergenceError, PlacementError, WorldError
from ..communicator import Communicator, Handle, ReduceScatterHandle, as_bytes, combine
from ..divergence import (
    READING,
    READING_ADVICE,
    Report,
    collective_of,
    describe,
    digest_of,
    due,
    spelled,
)
from ..watchdog import CONNECTION_CLOSED, Deadlock, Wait
from ..world import ProcessWorld
from . import gloo_size_mismatch

__all__ = ["P2PCommunicator", "ProcessGroupCommunicator"]

_TAG: Final = 7001  # separates our messages from the user's own send and recv
_BACKGROUND_TAG: Final = 7002  # for messages of the background thread
_AHEAD_TAG: Final = 7004  # for exchanges in progress (7003 is the tag of channels)
_WAKE_TAG: Final = 7005  # for a message that no rank sends
_MEETING_TAG: Final = 7006  # for ranks that are about to create a group
_REPLICATED: Final = 1 << 18  # up to this many bytes an all-gather is an all-to-all of copies
#: Up to so many bytes sent by each rank, an asynchronous all-reduce is built from messages.
#: ``_SWAPPED`` is for two ranks, where no other algorithm sends fewer bytes. Measured on two cores,
#: ours and gloo's own, in ms. Two ranks: 4 KB 0.3 and 0.4 to 1.4, 1 MB 1.0 and 1.3, 2 MB 1.7 and
#: 3.4, 4 MB 4.0 and 3.7. Four ranks: 64 KB 2.5 and 5.4, 1 MB 8.9 and 5.7.
_TOLD: Final = 1 << 17
_SWAPPED: Final = 3 << 20
# Up to so many ranks on MPI, one all-to-all with mostly empty parts is faster than separate
# messages.
_TO_ALL: Final = 4
# The line of gloo's source where an error came up.
_GLOO_PLACE: Final = re.compile(r"\[\S+\.(?:cc|h):\d+\] ")
_MAX_GLOO_BYTES: Final = (1 << 31) - 1  # bytes torch's all-to-all on gloo can count
_OPS: Final = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_NATIVE_REDUCES: Final = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}
_torch: Final = torch_private.collectives
#: torch renamed these in 2.13 and warns at the older names.
_gather_evenly: Callable[..., object] = vars(_torch).get(
    "all_gather_single", _torch.all_gather_into_tensor
)
_scatter_evenly: Callable[..., object] = vars(_torch).get(
    "reduce_scatter_single", _torch.reduce_scatter_tensor
)


class P2PCommunicator(Communicator):
    """A communicator built on point-to-point messages between processes, on CPU tensors.

    Tensors on other devices go through host memory.
    """

    world: ProcessWorld

    def __init__(self, world: ProcessWorld, ranks: tuple[int, ...], tag: int = _TAG) -> None:
        super().__init__(world, ranks)
        self._tag = tag
        self._waits: dict[bool, AbstractContextManager[object]] = {}

    def waiting(self, moving: bool = False) -> AbstractContextManager[object]:
        """Return the block in which this rank waits for the others, for the watchdog of the rank.

        ``moving``: the data may have been under way before the wait.
        """
        wait = self._waits.get(moving)
        if wait is None:
            watchdog, peers = self.world.watchdog, [r for r in self.ranks if r != self.world.rank]
            if watchdog is None or not peers or self._tag == _BACKGROUND_TAG:
                wait = contextlib.nullcontext()  # the tag is that of the background thread
            else:
                mpi = "mpi" in self.world.backend
                wait = Wait(watchdog, peers, moving, _interrupt_mpi if mpi else self._interrupt)
            self._waits[moving] = wait
        return wait

    def _interrupt(self) -> None:
        """End all waits of this process on the connections of gloo, with an error.

        Gloo closes them once one message has not come in time.
        """
        for group in {self.world.require_process_group(), *self.world.groups_of(self.ranks)}:
            other = (group.rank() + 1) % group.size()
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], other, _WAKE_TAG).wait(timedelta(milliseconds=1))

    def _swap(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> None:
        if device.type != "cpu":
            return self._swap_staged(sends, recvs)
        _Messages(self, sends, recvs, self._tag).wait()
        return None

    def _swap_async(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> Handle:
        return (
            _Messages(self, sends, recvs, _AHEAD_TAG)
            if device.type == "cpu"
            else super()._swap_async(sends, recvs, device)
        )

    def _swap_staged(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        # The device has no backend of its own.
        if any(s.is_meta for s in sends.values()):
            place = collective_of(self.world.kind, spelled(self.world.purpose))
            raise PlacementError(f"{user_line()}\n{no_values_message(place)}")
        host = {i: torch.empty(r.shape, dtype=r.dtype) for i, r in recvs.items()}
        self._swap({i: s.cpu() for i, s in sends.items()}, host, torch.device("cpu"))
        for i, r in recvs.items():
            r.copy_(host[i])

    def broken(
        self, what: str, error: Exception, gone: str = "", early: bool = False
    ) -> WorldError | DivergenceError:
        """Return the error for a failed collective.

        ``gone`` says which rank has ended, and how, if that is known. ``early`` is True if it has
        not reached the end of its program, so that this rank is not to blame.
        """
        rank, purpose = self.world.rank, spelled(self.world.purpose)
        for wait in self._waits.values():
            if isinstance(wait, Wait) and wait.found is not None:
                return self.deadlock_error(wait.found)
        why = _GLOO_PLACE.sub("", str(error)).partition(". This is typically")[0]
        failed = f"rank {rank}: {what} among ranks {list(self.ranks)} failed: {why}"
        place = collective_of(self.world.kind, purpose)
        if not gone and (ended := gloo_size_mismatch.peer_reports(self.world, self.ranks)):
            return self._ended_by_gloo(ended)
        if not gone and CONNECTION_CLOSED.search(why):
            others = [r for r in self.ranks if r != rank]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {others}"
            gone = (
                f"{who} has ended, or the connection to it is lost: its own output shows the cause"
            )
        if gone:
            advice = f" {READING_ADVICE}" if purpose.startswith(READING) and not early else ""
            return WorldError(
                f"{user_line()}\n{gone}. Rank {rank} waits for it in {place}.{advice}\n({failed})"
            )
        problem = f"{failed}; a rank has died, hangs, or did something else"
        if purpose.startswith(READING):
            reads = (
                f"rank {self.world.rank} reads the value of a global tensor here, and other "
                f"ranks do not"
            )
            return WorldError(f"{user_line()}\n{reads}. {READING_ADVICE}\n({problem})")
        return WorldError(
            f"{user_line()}\nrank {rank} is in {place}, and the other ranks have not come there: "
            f"they hang, compute, or wait in another function, such as a collective of "
            f"torch.distributed. The last line of each rank's own output, or py-spy dump, shows "
            f"where\n({problem})"
        )

    def deadlock_error(self, found: Deadlock) -> DivergenceError:
        """Return the error for ranks that wait for each other for ever."""
        purpose = spelled(self.world.purpose)
        place = collective_of(self.world.kind, purpose)
        advice = (
            READING_ADVICE
            if purpose.startswith(READING)
            else "Every rank must run the same operations on global tensors: move them out of the "
            "branch of one rank"
        )
        if len(found.waits) == 1:
            ((rank, where),) = found.waits.items()
            others = f"rank {rank} waits for it in {where}"
        else:
            ranks_at: dict[str, list[int]] = {}
            for rank, where in found.waits.items():
                ranks_at.setdefault(where, []).append(rank)
            others = " and ".join(
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))} "
                f"wait{'' if len(ranks) > 1 else 's'} in {where}"
                for where, ranks in list(ranks_at.items())[:8]
            )
            others += ", each for one of the others"
        return DivergenceError(
            f"{user_line()}\nrank {self.world.rank} is in {place}, while {others}. {advice}"
        )

    def _ended_by_gloo(self, reports: Sequence[Report]) -> WorldError:
        """Return the error where gloo has ended other ranks, which left these reports."""
        world = self.world
        own = Report.here(world.rank, world.kind, world.purpose, world.plain, self._histories)
        text = describe(sorted([own, *reports], key=lambda r: r.rank))
        world.diverged = text
        return DivergenceError(text)


def _interrupt_mpi() -> None:
    """End all waits of this process on MPI, with an error."""
    from .mpi.library import library

    library().interrupt()


class _Messages:
    """The messages of one exchange in progress."""

    def __init__(
        self,
        comm: P2PCommunicator,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Tensor],
        tag: int,
    ) -> None:
        self._comm, group, ranks = comm, comm.world.require_process_group(), comm.ranks
        self._moving = tag == _AHEAD_TAG
        try:
            self._works = [group.recv([t], ranks[i], tag) for i, t in recvs.items()]
            self._works += [group.send([t], ranks[i], tag) for i, t in sends.items()]
        except RuntimeError as error:
            raise comm.broken("an exchange", error) from error

    def wait(self) -> None:
        try:
            with self._comm.waiting(self._moving):
                for work in self._works:
                    work.wait()
        except RuntimeError as error:
            raise self._comm.broken("an exchange", error) from error


class ProcessGroupCommunicator(P2PCommunicator):
    """A communicator over torch.distributed.

    Only its members create the torch group, when a collective first needs it.
    """

    def __init__(self, world: ProcessWorld, ranks: tuple[int, ...]) -> None:
        super().__init__(world, ranks)
        self._sorted = tuple(sorted(ranks))
        #: The index in `ranks` of each rank of the torch group, which sorts its ranks.
        self._order = [ranks.index(r) for r in self._sorted]
        self._mpi = "mpi" in world.backend
        if not self._mpi:
            gloo_size_mismatch.install()

    @property
    def group(self) -> dist.ProcessGroup:
        """The torch group of these ranks."""
        if not self._mpi and not self.world.groups_of(self._sorted) and self.size < self.world.size:
            self._meet()
        return self.world.group(self._sorted)

    def _meet(self) -> None:
        """Block until all ranks are about to create their group.

        No watchdog ends a wait in torch's function that creates it. Raise DivergenceError if a rank
        is about to create the group of other ranks.
        """
        own = torch.tensor([int.from_bytes(digest_of(str(self._sorted))[:7], "little")])
        meeting = P2PCommunicator(self.world, self.ranks, _MEETING_TAG)
        for part in meeting._all_gather_parts(own, [1] * self.size):
            if not torch.equal(part, own):
                place = collective_of(self.world.kind, spelled(self.world.purpose))
                raise DivergenceError(
                    f"{user_line()}\nrank {self.world.rank} is in {place} with ranks "
                    f"{list(self._sorted)}, while one of these is in an operation with other "
                    f"ranks. Every rank must run the same operations on global tensors, in the "
                    f"same order"
                )

    def _compare(self, device: torch.device) -> None:
        if not due(self._collectives):
            return
        # The size is compared too: gloo ends a process that gets a longer message than it expects.
        size = -1 if self._nbytes is None else self._nbytes
        own = torch.tensor([int.from_bytes(self._digest, "little", signed=True), size])
        peers = torch.empty(2 * self.size, dtype=torch.int64)
        group = self.group
        try:
            with self.waiting():
                _torch.all_to_all_single(peers, own.repeat(self.size), group=group)
        except RuntimeError as error:
            raise self.broken("a comparison of what the ranks do", error) from error
        digests, sizes = peers[::2], peers[1::2]
        if bool((digests != own[0]).any()):
            raise self._diverged(self.all_gather_unchecked)
        if bool((sizes != size).any()):
            odd = int((sizes != size).nonzero()[0])
            detail = f"rank {self._sorted[odd]} moves {int(sizes[odd])} bytes where this rank "
            raise self._diverged(self.all_gather_unchecked, f"{detail}moves {size}")

    def _native(self, device: torch.device) -> bool:
        """Return True if torch's own collectives serve this device better than messages."""
        return device.type in self.world.backends

    def _reduces(self, some: Tensor) -> bool:
        """Return True if torch's own collectives also reduce numbers of this dtype.

        Ours over MPI reduce as `combine` does.
        """
        return self._native(some.device) and (self._mpi or some.dtype in _NATIVE_REDUCES)

    def _swap(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> None:
        if not self._native(device) or (self._mpi and self.size > _TO_ALL):
            return super()._swap(sends, recvs, device)
        group, none = self.group, torch.empty(0, dtype=torch.uint8, device=device)
        _torch.all_to_all(
            [recvs.get(i, none) for i in self._order],
            [sends.get(i, none) for i in self._order],
            group=group,
        )
        return None

    def _swap_async(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], device: torch.device
    ) -> Handle:
        if not self._native(device) or self._mpi:
            return super()._swap_async(sends, recvs, device)
        group, none = self.group, torch.empty(0, dtype=torch.uint8, device=device)
        work = _torch.all_to_all(
            [recvs.get(i, none) for i in self._order],
            [sends.get(i, none) for i in self._order],
            group=group,
            async_op=True,
        )
        return _Work(self, work)

    # All-to-all, and collectives built on it, on the CPU

    def _exchange_all(
        self, sends: Sequence[Tensor], outs: Sequence[Tensor], joined_out: Tensor | None
    ) -> None:
        """Run one all-to-all of flat tensors, given in the order of the torch group.

        ``joined_out`` is the memory of all ``outs``, one after the other, or None.
        """
        source, target = (
            _cat_flat(sends),
            outs[0].new_empty(sum(o.numel() for o in outs)) if joined_out is None else joined_out,
        )
        size, sent, received = (
            target.itemsize,
            [s.numel() for s in sends],
            [o.numel() for o in outs],
        )
        self._all_to_all_bytes(
            as_bytes(target),
            as_bytes(source),
            [n * size for n in received],
            [n * size for n in sent],
        )
        if joined_out is None:
            for out, part in zip(outs, target.split_with_sizes(received), strict=True):
                out.copy_(part)

    def _all_to_all_bytes(
        self, out: Tensor, source: Tensor, received: list[int], sent: list[int]
    ) -> None:
        group = self.group
        try:
            with self.waiting():
                _torch.all_to_all_single(out, source, received, sent, group=group)
        except RuntimeError as error:
            raise self.broken("an all-to-all", error) from error

    def _swap_pair(self, send: Tensor, recv: Tensor) -> None:
        """Swap flat tensors between two ranks."""
        group = self.group
        own_index = group.rank()
        sent, received = [0, 0], [0, 0]
        sent[1 - own_index], received[1 - own_index] = send.nbytes, recv.nbytes
        self._all_to_all_bytes(as_bytes(recv), as_bytes(send), received, sent)

    def _fits_all_to_all(self, some: Tensor, longest: int | None) -> bool:
        """Return True if an all-to-all can carry this: on the CPU, and not too long to be counted.

        ``longest`` is the same on every rank, so the answer is the same too.
        """
        return (
            some.is_cpu
            and not self._mpi
            and longest is not None
            and longest * some.itemsize <= _MAX_GLOO_BYTES
        )

    def _all_to_all_parts(
        self, sends: Sequence[Tensor], numels: Sequence[int], longest: int | None
    ) -> list[Tensor]:
        own = sends[self.index]
        if not self._fits_all_to_all(own, longest):
            return super()._all_to_all_parts(sends, numels, longest)
        if self.size == 2:
            other = torch.empty(numels[1 - self.index], dtype=own.dtype)
            self._swap_pair(sends[1 - self.index], other)
            return [own, other] if self.index == 0 else [other, own]
        order = self._order
        out = torch.empty(sum(numels), dtype=own.dtype)
        parts = out.split_with_sizes([numels[i] for i in order])
        self._exchange_all([sends[i] for i in order], parts, out)
        return [parts[order.index(i)] for i in range(self.size)]

    def _all_to_all(
        self, sends: Sequence[Tensor], numels: Sequence[int], out: Tensor, longest: int | None
    ) -> None:
        if not self._fits_all_to_all(out, longest):
            super()._all_to_all(sends, numels, out, longest)
        elif self.size == 2:
            slots = out.split_with_sizes(list(numels))
            self._swap_pair(sends[1 - self.index], slots[1 - self.index])
            slots[self.index].copy_(sends[self.index])
        else:
            slots = out.split_with_sizes(list(numels))
            straight = self._order == list(range(self.size))
            self._exchange_all(
                [sends[i] for i in self._order],
                [slots[i] for i in self._order],
                out if straight else None,
            )

    # All-gather

    def _all_gather_parts(self, flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
        if self._mpi and self._native(flat.device):
            parts = [
                flat if i == self.index else torch.empty(n, dtype=flat.dtype, device=flat.device)
                for i, n in enumerate(numels)
            ]
            _torch.all_gather(
                [as_bytes(parts[i]) for i in self._order], as_bytes(flat), group=self.group
            )
            return parts
        if self._native(flat.device):
            out = torch.empty(sum(numels), dtype=flat.dtype, device=flat.device)
            self._all_gather(flat, numels, out)
            return list(out.split_with_sizes(list(numels)))
        if self._replicates(flat, numels):
            return self._all_to_all_parts([flat] * self.size, numels, self.size * max(numels))
        return super()._all_gather_parts(flat, numels)

    def _replicates(self, flat: Tensor, numels: Sequence[int]) -> bool:
        # All ranks must choose the same algorithm. So the longest share decides, not the own one.
        return (
            flat.is_cpu
            and not self._mpi
            and (self.size == 2 or max(numels) * flat.itemsize <= _REPLICATED)
        )

    def _all_gather(self, flat: Tensor, numels: Sequence[int], out: Tensor) -> None:
        if not self._native(out.device):
            if self._replicates(flat, numels):
                return self._all_to_all([flat] * self.size, numels, out, self.size * max(numels))
            return super()._all_gather(flat, numels, out)
        group, order = self.group, self._order
        if len(set(numels)) == 1 and order == list(range(self.size)):
            _gather_evenly(as_bytes(out), as_bytes(flat), group=group)
        else:
            slots = as_bytes(out).split_with_sizes([n * out.itemsize for n in numels])
            _torch.all_gather([slots[i] for i in order], as_bytes(flat), group=group)
        return None

    def _all_gather_async(self, flat: Tensor, numels: Sequence[int], out: Tensor) -> Handle:
        if self._mpi or self._native(out.device):
            return super()._all_gather_async(flat, numels, out)
        lane = P2PCommunicator(self.world, self.ranks, _BACKGROUND_TAG)
        return background(self.world).submit(lambda: lane._all_gather(flat, numels, out))

    def _broadcast(self, flat: Tensor, src: int) -> None:
        if self._native(flat.device):
            _torch.broadcast(as_bytes(flat), self.ranks[src], group=self.group)
        else:
            super()._broadcast(flat, src)

    # Reductions

    def _reduce_scatter(self, sends: Sequence[Tensor], op: str) -> Tensor:
        own_chunk = sends[self.index]
        if not self._reduces(own_chunk):
            return super()._reduce_scatter(sends, op)
        group, order, out = self.group, self._order, torch.empty_like(own_chunk)
        if not self._mpi and len({s.numel() for s in sends}) == 1:
            _scatter_evenly(out, _cat_flat([sends[i] for i in order]), _OPS[op], group=group)
        else:
            _torch.reduce_scatter(out, [sends[i] for i in order], _OPS[op], group=group)
        return out

    def _reduce_scatter_async(self, sends: Sequence[Tensor], op: str) -> ReduceScatterHandle:
        own_chunk, order = sends[self.index], self._order
        numels = [s.numel() for s in sends]
        if self._reduces(own_chunk):
            out = torch.empty_like(own_chunk)
            work = _torch.reduce_scatter(
                out, [sends[i] for i in order], _OPS[op], group=self.group, async_op=True
            )
            return ReduceScatterHandle(_Work(self, work), lambda: out)
        if not self._fits_all_to_all(own_chunk, max(self.size * max(numels), sum(numels))):
            return super()._reduce_scatter_async(sends, op)
        # All other ranks' chunks for this rank. The own chunk stays where it is. The chunks are
        # added once they have arrived.
        size, n = own_chunk.itemsize, own_chunk.numel()
        others = [i for i in order if i != self.index]
        source, target = (
            _cat_flat([sends[i] for i in others]),
            torch.empty(n * (self.size - 1), dtype=own_chunk.dtype),
        )
        received, sent = (
            [0 if i == self.index else v * size for i, v in zip(order, vs, strict=True)]
            for vs in ([n] * self.size, [numels[i] for i in order])
        )
        work = _torch.all_to_all_single(
            as_bytes(target), as_bytes(source), received, sent, group=self.group, async_op=True
        )

        def add() -> Tensor:
            chunks = dict(zip(others, target.split_with_sizes([n] * len(others)), strict=True)) | {
                self.index: own_chunk
            }
            return combine(
                [chunks[i] for i in range(self.size)],
                op,
                spare=1 - self.index if self.size == 2 else None,
            )

        return ReduceScatterHandle(_Work(self, work), add)

    def _all_reduce(self, flat: Tensor, op: str) -> Tensor:
        if not self._reduces(flat):
            return super()._all_reduce(flat, op)
        out = flat.clone()
        _torch.all_reduce(out, _OPS[op], group=self.group)
        return out

    def _all_reduce_async(self, flat: Tensor, op: str) -> Handle:
        if (
            flat.nbytes * (self.size - 1) <= (_TOLD if self.size > 2 else _SWAPPED)
            and flat.is_cpu
            and not self._mpi
        ):
            return self._all_reduce_numbers(flat, op)
        if flat.dtype in _NATIVE_REDUCES or self._mpi:
            # Gloo's own all-reduce is used too: its threads work without Python's lock, which a
            # running backward pass needs. The call is made on the group itself, because the work of
            # torch's function before the call costs as much again (45 us).
            how = dist.AllreduceOptions()
            how.reduceOp = _OPS[op]  # type: ignore[assignment]
            return _Work(self, self.group.allreduce([flat], how))
        if self._native(flat.device):
            return super()._all_reduce_async(flat, op)
        lane = P2PCommunicator(self.world, self.ranks, _BACKGROUND_TAG)
        return background(self.world).submit(
            lambda: lane._all_reduce_in_place(flat.detach().view(-1), op)
        )

    def _all_reduce_numbers(self, flat: Tensor, op: str) -> Handle:
        """Reduce few numbers over all ranks in place.

        Each rank sends its numbers to every other rank and adds locally.
        """
        n, p, group = flat.numel(), self.size, self.group
        if p == 2:
            parts: list[Tensor] = [flat, torch.empty_like(flat)]
            sizes = [0, flat.nbytes] if group.rank() == 0 else [flat.nbytes, 0]
            work = group.alltoall_base(as_bytes(parts[1]), as_bytes(flat), sizes, sizes)
        else:
            out = flat.new_empty(p, n)
            parts = list(out)
            work = group.alltoall_base(as_bytes(out.view(-1)), as_bytes(flat.repeat(p)), [], [])
        return _PendingNumbers(self, work, flat, parts, op)


def _cat_flat(parts: Sequence[Tensor]) -> Tensor:
    """Return flat tensors one after the other, without a copy if they already have that layout."""
    at, first = parts[0].data_ptr(), parts[0]
    for part in parts:
        if (
            part.data_ptr() != at
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return torch.cat([as_bytes(part) for part in parts]).view(first.dtype)
        at += part.nbytes
    return first.as_strided((sum(p.numel() for p in parts),), (1,))


class _Work:
    """A torch work that raises our error."""

    def __init__(self, comm: P2PCommunicator, work: dist.Work | None) -> None:
        self.comm, self.work = comm, work

    def wait(self) -> None:
        try:
            if self.work is not None:
                with self.comm.waiting(moving=True):
                    self.work.wait()
        except RuntimeError as error:
            raise self.comm.broken("a collective under way", error) from error


class _PendingNumbers(_Work):
    """The numbers of other ranks in transit. ``wait`` combines them into ``flat``."""

    def __init__(
        self, comm: P2PCommunicator, work: dist.Work, flat: Tensor, parts: list[Tensor], op: str
    ) -> None:
        super().__init__(comm, work)
        self._flat, self._parts, self._op = flat, parts, op

    def wait(self) -> None:
        super().wait()
        if self._parts:
            # The first of the pair is `flat`. The order of two tensors makes no difference to a
            # sum.
            pair = len(self._parts) == 2
            total = combine(self._parts, self._op, spare=0 if pair and self._op == "sum" else None)
            if total is not self._flat:
                self._flat.copy_(total)
            self._parts = []


class _Job:
    """A collective that the background thread runs."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run, self.done, self.error = run, threading.Event(), None

    error: BaseException | None

    def over(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        # The timeout of the process group bounds the wait: it ends the job with an error.
        self.done.wait()
        if self.error is not None:
            raise self.error


class Background:
    """A thread that runs collectives during the main thread's computation.

    It runs them in the order in which they were started, which is the same on every rank.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="globaltensor background", daemon=True
        )
        self._thread.start()

    def submit(self, run: Callable[[], None]) -> _Job:
        """Queue a collective."""
        job = _Job(run)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread after the queued collectives, and wait for it for a second at most."""
        self._jobs.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with torch.no_grad():
                    job.run()
            except BaseException as error:  # raised by the job's wait()
                job.error = error
            job.done.set()
            del job  # free the job's tensors while this thread waits for the next


def background(world: ProcessWorld) -> Background:
    """Return the background thread of a world, started at first use."""
    if world.background is None:
        world.background = Background()
    assert isinstance(world.background, Background)
    return world.background
