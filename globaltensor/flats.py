"""Memory for the gradients of a step side by side, kept from step to step."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _torch

__all__ = ["Flats", "keep_let_go_memory"]

_LARGEST = (32 << 20) - (64 << 10)  # of the blocks that glibc's threshold follows


@functools.cache
def keep_let_go_memory() -> None:
    """Let this process keep the memory that a step lets go for the next one. The C library gives what is free at the end of its heap back to the system once
    that is more than twice the largest block it has let go so far (glibc, mallopt(3)), and each page that comes again is cleared and mapped anew: thousands
    in a step. So let go of a large one, which costs nothing as it is never touched. (torch's DistributedDataParallel does so without meaning to, where it
    forms its buckets anew.)"""
    torch.empty(_LARGEST, dtype=torch.uint8)


class Flats(dict[tuple[Any, ...], torch.Tensor]):
    """1-D tensors, by what goes into them."""

    def take(self, key: tuple[Any, ...], size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for gradients side by side. They stay where they were summed. What is touched for the first time costs more than a copy: it serves again once
        they have been let go."""
        keep_let_go_memory()
        flat = self.get(key)
        if flat is None or flat.numel() != size or _torch.memory_is_shared(flat):
            flat = self[key] = torch.empty(size, dtype=dtype, device=device)
        return flat
