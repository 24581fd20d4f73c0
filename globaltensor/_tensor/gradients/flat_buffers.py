"""Memory for the gradients of a step side by side, kept from step to step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..._base import torch_private

__all__ = ["FlatBuffer", "FlatBufferPool", "Room", "keep_freed_memory"]

_LARGEST = (32 << 20) - (64 << 10)  # of the blocks that glibc's threshold follows


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep the memory that a step lets go for the next one. The C library gives
    what is free at the end of its heap back to the system once that is more than twice the largest
    block it has let go so far (glibc, mallopt(3)), and each page that comes again is cleared and
    mapped anew: thousands in a step. So let go of a large one, which costs nothing as it is never
    touched. (torch's DistributedDataParallel does so without meaning to, where it forms its buckets
    anew.)"""
    torch.empty(_LARGEST, dtype=torch.uint8)


class Room:
    """Memory of a CPU that is lent to a tensor, and again once that tensor and all others that show
    its memory are gone. What is touched for the first time costs more than a copy.

    A loan is an array of NumPy, which the storage made of it holds as long as there is a tensor on
    it, whoever has that. So it is the loan's end that frees the room, and nobody has to count who
    refers to what.
    """

    __slots__ = ("_array", "_loan", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._array = torch.empty(nbytes, dtype=torch.uint8).numpy()
        self._loan: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        """Return True if nothing shows its memory."""
        return self._loan is None or self._loan() is None

    def lend(self, dtype: torch.dtype) -> torch.Tensor:
        """All of a free room, as a tensor of one dim."""
        if not self.nbytes:
            return torch.empty(0, dtype=dtype)
        loan = self._array[:]
        self._loan = weakref.ref(loan)
        return torch.from_numpy(loan).view(dtype)


class FlatBuffer:
    """Memory for gradients side by side: ``flat``, of one dim, with one element more at its end,
    and ``parts`` of it, one of the shape of each of ``like``."""

    __slots__ = ("flat", "parts")

    def __init__(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> None:
        self.flat = flat
        self.parts: Sequence[torch.Tensor] = torch_private.parts_of(flat[:-1], like)


class _Place:
    """A room, and the numbers of the leaves whose gradients are summed in it."""

    __slots__ = ("numbers", "room")

    def __init__(self, numbers: list[int], room: Room) -> None:
        self.numbers, self.room = numbers, room


class FlatBufferPool:
    """The rooms in which gradients of leaves were summed last, of each leaf one at most."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}  # by the numbers of leaves

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(
            place.room.nbytes
            for place in {id(place): place for place in list(self._places.values())}.values()
        )

    def take(
        self,
        numbers: list[int],
        like: Sequence[torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> FlatBuffer:
        """A row for the gradients of leaves of these ``numbers``, which are ``like`` these. They
        stay where they were summed: the room serves again once they have been let go. (Other
        devices have allocators that keep what is let go.)"""
        size = sum(t.numel() for t in like) + 1
        if device.type != "cpu":
            return FlatBuffer(torch.empty(size, dtype=dtype, device=device), like)
        keep_freed_memory()
        place, nbytes = self._places.get(numbers[0]), size * dtype.itemsize
        if place is None or place.numbers != numbers or place.room.nbytes != nbytes:
            self.drop(numbers)
            place = _Place(numbers, Room(nbytes))
            self._places.update(dict.fromkeys(numbers, place))
        elif not place.room.free:
            place.room = Room(nbytes)
        return FlatBuffer(place.room.lend(dtype), like)

    def drop(self, numbers: Sequence[int]) -> None:
        """Keep nothing of these leaves, nor what the gradients of others were summed in together
        with theirs."""
        for n in numbers:
            place = self._places.pop(n, None)
            for other in place.numbers if place is not None else ():
                self._places.pop(other, None)
