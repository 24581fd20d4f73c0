"""Flat buffers for gradient buckets, reused between steps. The reducer takes them from a pool."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..._base import torch_private

__all__ = ["FlatBuffer", "FlatBufferPool", "Room", "keep_freed_memory"]

_LARGEST = (32 << 20) - (64 << 10)  # largest size of the blocks that raise glibc's threshold


@functools.cache
def keep_freed_memory() -> None:
    """Raise glibc's trim threshold, so that memory freed after one step is reused in the next.

    glibc returns the free memory at the end of its heap to the system once it exceeds a threshold.
    The threshold is twice the largest block freed so far (mallopt(3)). Each page that comes back is
    cleared and mapped again: thousands in a step. So a large block is freed here, which costs
    nothing as it is never touched. (torch's DistributedDataParallel has the same effect by
    accident, where it rebuilds its buckets.)
    """
    torch.empty(_LARGEST, dtype=torch.uint8)


class Room:
    """A piece of CPU memory that is lent to a tensor, and again once all tensors on it are gone.

    Memory that is touched for the first time costs more than a copy. A loan is a NumPy array. The
    storage made of it holds the array as long as there is a tensor on it, in any code. So the end
    of the loan frees the room, and no references have to be counted.
    """

    __slots__ = ("_array", "_loan", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._array = torch.empty(nbytes, dtype=torch.uint8).numpy()
        self._loan: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        """True if no tensor uses its memory."""
        return self._loan is None or self._loan() is None

    def lend(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all of a free room as a 1-D tensor."""
        if not self.nbytes:
            return torch.empty(0, dtype=dtype)
        loan = self._array[:]
        self._loan = weakref.ref(loan)
        return torch.from_numpy(loan).view(dtype)


class FlatBuffer:
    """A flat buffer for several gradients.

    ``flat`` is 1-D, with one more element at its end. ``parts`` are views of it, one of the shape
    of each of ``like``.
    """

    __slots__ = ("flat", "parts")

    def __init__(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> None:
        self.flat = flat
        self.parts: Sequence[torch.Tensor] = torch_private.parts_of(flat[:-1], like)


class _GradientSlot:
    """A room, and the numbers of the leaves whose gradients are summed in it."""

    __slots__ = ("numbers", "room")

    def __init__(self, numbers: list[int], room: Room) -> None:
        self.numbers, self.room = numbers, room


class FlatBufferPool:
    """The rooms in which gradients of leaves were summed last, at most one for each leaf."""

    def __init__(self) -> None:
        self._places: dict[int, _GradientSlot] = {}  # by the numbers of leaves

    @property
    def nbytes(self) -> int:
        """The bytes of all rooms."""
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
        """Return a buffer for the gradients of the leaves of these ``numbers``.

        The gradients have the shapes of ``like``, and stay where they were summed. The room is used
        again once they have been freed. (Other devices have allocators that cache freed memory.)
        """
        size = sum(t.numel() for t in like) + 1
        if device.type != "cpu":
            return FlatBuffer(torch.empty(size, dtype=dtype, device=device), like)
        keep_freed_memory()
        place, nbytes = self._places.get(numbers[0]), size * dtype.itemsize
        if place is None or place.numbers != numbers or place.room.nbytes != nbytes:
            self.drop(numbers)
            place = _GradientSlot(numbers, Room(nbytes))
            self._places.update(dict.fromkeys(numbers, place))
        elif not place.room.free:
            place.room = Room(nbytes)
        return FlatBuffer(place.room.lend(dtype), like)

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop the rooms of these leaves, also rooms that they share with other leaves."""
        for n in numbers:
            place = self._places.pop(n, None)
            for other in place.numbers if place is not None else ():
                self._places.pop(other, None)
