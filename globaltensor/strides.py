"""In what order the elements of a whole tensor would stand in memory: told by the parts, where they can tell, and the same on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch

from .distributed.world import world
from .spec import Spec, nested
from .wrapper import GlobalTensor

__all__ = ["carry_note", "laid", "lies_in_order", "note", "stride", "turn"]


@lru_cache(maxsize=1 << 12)
def hidden(spec: Spec) -> bool:
    """Whether parts may not tell: some part is empty, or has one element of a dim of which others have more, whose stride says nothing of where it stands among
    the others. Where all have one all tell the same, mostly what is right: it counts for matrices, and calls on more dims keep their pace."""
    for d, n in enumerate(spec.shape):
        sizes = {length for _, length in nested(n, spec.chain(d))} if n else {1}
        if 0 in sizes or (1 in sizes and n > 1 and (len(sizes) > 1 or len(spec.shape) == 2)):
            return True
    return False


def turn(taken: Sequence[Hashable], given: Sequence[Hashable], spec: Spec) -> tuple[int, ...] | None:
    """A view function gives the factors ``given`` of what has the factors ``taken``: which of its dims each of the view's is, where that has to be noted for
    `stride` because the parts of ``spec`` may not tell."""
    if len(given) < 2 or len(given) != len(taken) or None in given or set(given) != set(taken) or len(set(given)) < len(given) or not hidden(spec.plain):
        return None
    return tuple(list(taken).index(f) for f in given)


def note(source: GlobalTensor, view: GlobalTensor, dims: Sequence[int]) -> None:
    """``view`` has these dims of ``source``."""
    view.__dict__["_order"] = [dims.index(d) for d in _order(source)]


def carry_note(source: GlobalTensor, other: GlobalTensor) -> None:
    """``other`` shows what ``source`` does."""
    if (order := source.__dict__.get("_order")) is not None:
        other.__dict__["_order"] = order


def _order(x: GlobalTensor) -> Sequence[int]:
    """The dims from the outermost to the innermost."""
    return x.__dict__.get("_order", range(x.dim()))  # type: ignore[no-any-return]


def stride(self: GlobalTensor, dim: int | None = None) -> Any:
    """Strides of a whole tensor laid out as the parts are; where the part is of the whole shape, its own."""
    shape, local = self.shape, self._local
    if local.shape == shape and local.dim() and all(e.kind != "split" or n == 1 for e, n in zip(self._spec.layout, self._spec.placement.shape, strict=True)):
        out = local.stride()
    else:
        told = not hidden(self._spec.plain) and local.dim() == len(shape)
        steps, step = [0] * len(shape), 1
        for d in reversed(sorted(range(len(shape)), key=lambda d: (-local.stride(d), d)) if told else _order(self)):
            steps[d] = step if not told or local.stride(d) or shape[d] <= 1 else 0
            step *= max(shape[d], 1) if steps[d] else 1
        out = tuple(steps)
    return out if dim is None else out[dim]


def lies_in_order(x: GlobalTensor, memory_format: torch.memory_format) -> bool:
    """Return True if a tensor lies so in memory. Where parts may not tell, the whole tensor, of which all ranks know the same, has to lie so too."""
    if hidden(x._spec.plain) and not torch.empty_strided(x.shape, stride(x), device="meta").is_contiguous(memory_format=memory_format):
        return False
    return x._local.is_contiguous(memory_format=memory_format)


def laid(x: GlobalTensor) -> tuple[int, ...] | None:
    """Strides in which one device would hold the values of ``x``, which is written into in that order. None: row by row, or a rank outside the placement has to
    keep step, which cannot tell."""
    spec = x._spec
    if not x.numel() or len(spec.placement.flat) < world().size:
        return None
    found: tuple[int, ...] = stride(x)
    usual = torch.empty(spec.shape, device="meta").stride()
    return None if all(a == b for a, b, n in zip(found, usual, spec.shape, strict=True) if n > 1) else found
