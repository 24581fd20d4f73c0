"""Memory for the gradients of a step side by side, kept from step to step."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import _torch

__all__ = ["Flats", "Row", "keep_let_go_memory"]

_LARGEST = (32 << 20) - (64 << 10)  # of the blocks that glibc's threshold follows


@functools.cache
def keep_let_go_memory() -> None:
    """Let this process keep the memory that a step lets go for the next one. The C library gives what is free at the end of its heap back to the system once
    that is more than twice the largest block it has let go so far (glibc, mallopt(3)), and each page that comes again is cleared and mapped anew: thousands
    in a step. So let go of a large one, which costs nothing as it is never touched. (torch's DistributedDataParallel does so without meaning to, where it
    forms its buckets anew.)"""
    torch.empty(_LARGEST, dtype=torch.uint8)


_SHAPE, _REQUIRES_GRAD = operator.attrgetter("shape"), operator.attrgetter("requires_grad")


class Row:
    """Memory for gradients side by side: ``flat``, of one dim, with ``spare`` elements more at its end, and ``parts`` of it, one of the shape of each of
    ``like``."""

    __slots__ = ("_users", "flat", "parts", "spare")

    def __init__(self, like: Sequence[torch.Tensor], spare: int, dtype: torch.dtype, device: torch.device) -> None:
        size = sum(t.numel() for t in like)
        self.spare, self.flat = spare, torch.empty(size + spare, dtype=dtype, device=device)
        self.parts: list[torch.Tensor] = list(_torch.parts_of(self.flat[:size], like))
        self._users = self._held()

    def _held(self) -> tuple[int, list[int]]:
        return _torch.memory_users(self.flat), list(map(sys.getrefcount, self.parts))

    def serves(self, like: Sequence[torch.Tensor], spare: int) -> bool:
        """Whether it is for such gradients, and nobody else has it, or what was in it, any more."""
        if self.spare != spare or list(map(_SHAPE, like)) != list(map(_SHAPE, self.parts)):
            return False
        return self._held() == self._users and not any(map(_REQUIRES_GRAD, self.parts))


class Flats(dict[tuple[Any, ...], Row]):
    """Rows by what goes into them."""

    def take(self, key: tuple[Any, ...], like: Sequence[torch.Tensor], spare: int, dtype: torch.dtype, device: torch.device) -> Row:
        """A row for gradients like these; ``dtype`` and ``device`` follow from the key. They stay where they were summed. What is touched for the first time
        costs more than a copy: the row serves again once they have been let go."""
        keep_let_go_memory()
        row = self.get(key)
        if row is None or not row.serves(like, spare):
            row = self[key] = Row(like, spare, dtype, device)
        return row
