"""Strides of a global tensor, as one device would have them, the same on all ranks.

View functions, ``stride()`` and ``is_contiguous()`` use them.

Local tensors agree where none is empty, and none has size 1 in a dim where others have more. There
the local tensor answers. Elsewhere (`differ`) a local tensor may be contiguous, or may be viewed in
another shape, only because a dim of it has size 1. There the answer follows from what all ranks
know. A view notes the strides that one device would have: the function itself is run on a meta
tensor with the strides of its base. A call notes them too, if its local results may have another
order than on one device (_ops/result_strides.py). Any other tensor counts as row-major.

Functions that torch refuses by strides (view, unflatten, view_as_complex) are refused by these
strides, on every rank or on none (`StridedViewPlan` in _ops/local_plan.py). A note is exact if the
local tensors have these strides too. That is so where the note starts from a tensor that shares
memory with no other. Its local tensor is made row-major first. If the note is not exact, such a
function works on a copy. A write into either then reaches the other as in any view that needs
communication (_tensor/view_tracking.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .._base import torch_private
from ..distributed.world import world
from ..sharding.balanced_split import nested_balanced_split
from ..sharding.spec import Spec
from .global_tensor import ORDINARY, GlobalTensor

__all__ = [
    "Note",
    "arrange",
    "base_note",
    "by_rows",
    "copy_noted_order",
    "copy_noted_strides",
    "dense_strides",
    "device_strides",
    "differ",
    "forget_note",
    "format_strides",
    "has_hidden_gaps",
    "has_single_element_parts",
    "is_contiguous",
    "local_strides_tell",
    "memory_order",
    "note_of",
    "note_order",
    "note_strides",
    "noted_order",
    "part_tells",
    "results",
    "stride",
    "strides_ambiguous",
    "strides_like",
    "strides_of_copy",
]  # fmt: skip


class Note(NamedTuple):
    """The strides that one device would have.

    ``exact``: the local tensors have these strides, but for dims of size 1."""

    strides: tuple[int, ...]
    exact: bool


@lru_cache(maxsize=1 << 12)
def differ(spec: Spec) -> bool:
    """Return True if local strides may be ambiguous.

    Some local tensor is empty, or has size 1 in a dim where another rank has more.
    """
    for d, n in enumerate(spec.shape):
        sizes = {length for _, length in nested_balanced_split(n, spec.chain(d))} if n else {1}
        if 0 in sizes or (1 in sizes and n > 1 and len(sizes) > 1):
            return True
    return False


@lru_cache(maxsize=1 << 12)
def strides_ambiguous(spec: Spec) -> bool:
    """Return True if local tensors may not show the memory order of dims.

    They `differ`, or have size 1 in a dim."""
    return len(spec.shape) > 1 and (differ(spec) or has_single_element_parts(spec))


@lru_cache(maxsize=1 << 12)
def has_single_element_parts(spec: Spec) -> bool:
    """Return True if some local tensor has size 1 in a dim where the global tensor has more.

    A view function that joins such a dim with others may view the local tensor, although the
    global strides make it copy.
    """
    return any(
        n > 1 and 1 in {length for _, length in nested_balanced_split(n, spec.chain(d))}
        for d, n in enumerate(spec.shape)
    )


# -------------------------------------------------------------------------------------------- notes


def note_strides(x: GlobalTensor, strides: Note) -> None:
    x.__dict__["_strides"] = strides


def note_of(x: GlobalTensor) -> Note | None:
    return x.__dict__.get("_strides")


def noted_order(x: GlobalTensor) -> tuple[int, ...] | None:
    """Return the strides that ``x`` notes, or None if they are row-major."""
    found = note_of(x)
    return None if found is None or found.strides == by_rows(x.shape) else found.strides


def copy_noted_strides(source: GlobalTensor, other: GlobalTensor) -> None:
    """Copy the note of ``source`` to its alias ``other``."""
    if (found := source.__dict__.get("_strides")) is not None:
        other.__dict__["_strides"] = found


def copy_noted_order(source: GlobalTensor, other: GlobalTensor) -> None:
    """Note for ``other``, a copy of ``source``, the strides that torch gives a copy.

    A copy has no gaps, and each of its elements has a place of its own.
    """
    if (found := note_of(source)) is not None:
        strides = _strides_of_copy(_meta_with_strides(source, found.strides))
        note_strides(other, Note(strides, found.exact and strides == found.strides))
    elif "_origin" in source.__dict__ or (
        source._memory is not None and has_hidden_gaps(source._spec.plain)
    ):
        arrange(other, _strides_of_copy(_meta_with_strides(source, device_strides(source))))


def arrange(x: GlobalTensor, strides: tuple[int, ...]) -> None:
    """Give a new tensor, which shares memory with no other, the memory order of ``strides``.

    Copy its local tensor into that order, without gaps, and note the strides if the local tensors
    do not show them. Empty tensors, and strides of 0, are left alone."""
    shape = x.shape
    if len(strides) != len(shape) or len(shape) < 2 or not x.numel():
        return
    if any(s == 0 and n > 1 for s, n in zip(strides, shape, strict=True)):
        return
    shown = stride(x)
    same = all(a == b for a, b, n in zip(shown, strides, shape, strict=True) if n > 1)
    here = x._spec.placement.coordinate(world().rank) is not None
    hidden = not here or has_hidden_gaps(x._spec.plain)
    if same and not hidden and _is_dense(x._local):
        return
    if here:
        local = x._local
        order = dense_strides(local.shape, strides)
        if any(a != b for a, b, n in zip(local.stride(), order, local.shape, strict=True) if n > 1):
            laid = torch.empty_strided(local.shape, order, dtype=local.dtype, device=local.device)
            x._local = laid.copy_(local)
    if hidden and not same:
        note_strides(x, Note(strides, True))


def _strides_of_copy(x: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a new tensor like ``x``, which is on the meta device."""
    # on this device torch makes a dense tensor with a dim of size 1 row-major
    return (x if _is_dense(x) else torch.empty_like(x)).stride()


def strides_of_copy(x: GlobalTensor) -> tuple[int, ...]:
    """Return the strides that one device gives a copy of ``x``."""
    return _strides_of_copy(_meta_with_strides(x, device_strides(x)))


def strides_like(x: GlobalTensor) -> tuple[int, ...] | None:
    """Return the strides of a new tensor like ``x`` on one device.

    Return None for row-major, or where a rank outside the placement does not know the strides.
    """
    if x.dim() < 2 or not x.numel() or len(x._spec.placement.flat) < world().size:
        return None
    strides = _strides_of_copy(_meta_with_strides(x, device_strides(x)))
    return None if strides == by_rows(x.shape) else strides


def note_order(x: GlobalTensor, strides: tuple[int, ...]) -> None:
    """Note the strides of a new tensor on one device, if its local tensors may not show them."""
    here = x._spec.placement.coordinate(world().rank) is not None
    if not here or has_hidden_gaps(x._spec.plain):
        note_strides(x, Note(strides, False))


def forget_note(x: GlobalTensor) -> None:
    """Drop the note of ``x``, whose contents are about to be replaced."""
    x.__dict__.pop("_strides", None)


def format_strides(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape in a memory format, as torch has them.

    Raises torch's error for a format that needs another number of dims."""
    return torch.empty(tuple(shape), device="meta", memory_format=memory_format).stride()


def by_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    steps, step = [1] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        steps[d] = step
        step *= max(shape[d], 1)
    return tuple(steps)


def part_tells(x: GlobalTensor) -> bool:
    """Return True if this rank's local tensor, and so every rank's, has the global answer."""
    return not differ(x._spec.plain) and x._spec.placement.coordinate(world().rank) is not None


def base_note(x: GlobalTensor, decides: bool) -> Note:
    """Return the strides of a view's base. ``decides``: the function may be refused by them."""
    note = note_of(x)
    if note is not None:
        return note
    if "_origin" in x.__dict__:
        return Note(device_strides(x), False)
    if part_tells(x):
        return Note(device_strides(x), _is_dense(x._local))
    if x._memory is None and type(x) in ORDINARY and (decides or x._pinned):
        _lay_by_rows(x)
        note = Note(by_rows(x.shape), True)
        note_strides(x, note)
        return note
    return Note(by_rows(x.shape), False)


def _lay_by_rows(x: GlobalTensor) -> None:
    """Make the local tensor of ``x``, which shares memory with no other tensor, row-major."""
    local = x._local
    if local.is_contiguous():
        return
    if local.is_leaf and local.requires_grad:
        local.data = local.data.contiguous()
    else:
        with torch.set_grad_enabled(torch.is_grad_enabled() or local.requires_grad):
            x._local = local.contiguous()
        if local.retains_grad:
            x._local.retain_grad()


def _is_dense(t: torch.Tensor) -> bool:
    """Return True if a tensor's elements fill its memory without gaps, each once."""
    return (
        sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1) == t.numel() - 1
        if t.numel()
        else True
    )


def results(
    base: GlobalTensor, strides: tuple[int, ...], call: Callable[[torch.Tensor], Any], copies: bool
) -> list[tuple[int, ...]] | None:
    """Return the strides of a view function's results for a base with these strides on one device.

    Raises the errors that torch raises. ``copies``: the function may copy; return None for a copy.
    """
    with (
        torch.no_grad(),
        torch_private.without_function_modes(),
        torch_private.unobserved(),
        torch_private.real_tensors(),
    ):
        source = _meta_with_strides(base, strides)
        out = call(source)
        if copies and not torch_private.share_storage(source, out):
            return None
    return [t.stride() for t in (out if isinstance(out, (tuple, list)) else [out])]


def device_strides(x: GlobalTensor) -> tuple[int, ...]:
    """Return the strides of ``x`` on one device, with the gaps that a view may leave.

    A view that needed communication has the strides of its function's result on one device. Any
    other tensor has the local strides, enlarged where they step over a split dim.
    """
    if (found := note_of(x)) is not None:
        return found.strides
    if (origin := x.__dict__.get("_origin")) is not None:
        source, taken, *_ = origin
        try:
            strides = (results(source, device_strides(source), taken, copies=False) or [])[0]
        except RuntimeError:  # torch refuses this view of its base, but this library made it
            strides = by_rows(x.shape)
        note_strides(x, Note(strides, False))
        return strides
    if (
        x._memory is None
        or not part_tells(x)
        or x._local.dim() != x.dim()
        or has_single_element_parts(x._spec.plain)  # of these tensors, views have notes
    ):
        # A tensor that shares no memory, or is no view, has no gaps.
        whole: tuple[int, ...] = stride(x)
        return whole
    return _global_strides(x.shape, x._local)


def _global_strides(shape: Sequence[int], local: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor with this shape, given those of its local tensor."""
    sizes, steps = local.shape, list(local.stride())
    split_dims = [d for d, n in enumerate(shape) if n != sizes[d] and steps[d]]
    for d in sorted(split_dims, key=lambda d: (steps[d], -d)):
        step, span = steps[d], steps[d] * sizes[d]
        for i in range(len(shape)):
            # Of two equal strides, the dim that has several local elements is the outer one.
            outer = steps[i] >= span and (steps[i] > step or sizes[i] > 1 or i < d)
            if i != d and outer:
                steps[i] = steps[i] * shape[d] // sizes[d]
    return tuple(steps)


def _meta_with_strides(x: GlobalTensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device="meta")


# ---------------------------------------------------------------------------------------- questions


def stride(self: GlobalTensor, dim: int | None = None) -> Any:
    """Return the strides of a global tensor with the memory order of its local tensors.

    Where the local tensor has the global shape, its own strides are returned.
    """
    shape, local = self.shape, self._local
    if (
        local.shape == shape
        and local.dim()
        and "_origin" not in self.__dict__
        and all(
            e.kind != "split" or n == 1
            for e, n in zip(self._spec.layout, self._spec.placement.shape, strict=True)
        )
    ):
        out = local.stride()
    elif (found := note_of(self)) is not None:
        out = _drop_gaps(shape, found.strides)
    elif "_origin" in self.__dict__:
        out = _drop_gaps(shape, device_strides(self))
    elif not strides_ambiguous(self._spec.plain) and local.dim() == len(shape):
        out = dense_strides(shape, _known_order(shape, local))
    else:
        out = by_rows(shape)
    if dim is None:
        return out
    n = len(shape)
    if not -n <= dim < n:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})"
        )
    return out[dim]


def _known_order(shape: Sequence[int], local: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a local tensor as far as every rank knows their order.

    The stride of a dim of size 1 says nothing, and may differ by rank. Where the global dim has
    more elements, it counts as the dim inside the one before it.
    """
    sizes, steps = local.shape, local.stride()
    if not any(n != m == 1 for n, m in zip(shape, sizes, strict=True)):
        return steps
    out, before = list(steps), max(steps) + 1
    for d, (n, m) in enumerate(zip(shape, sizes, strict=True)):
        if n != m == 1 and steps[d]:
            out[d] = before
        elif m > 1 and steps[d]:
            before = steps[d]
    return tuple(out)


def _drop_gaps(shape: Sequence[int], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of one device as they are, or, if they leave gaps, those without gaps."""
    spread = [(n, s) for n, s in zip(shape, strides, strict=True) if s]
    dense = sum((n - 1) * s for n, s in spread if n > 1) + 1 == math.prod(n for n, _ in spread)
    return strides if dense else dense_strides(shape, strides)


def dense_strides(shape: Sequence[int], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of this shape with dims in the order of ``strides``."""
    steps, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        steps[d] = step if strides[d] or shape[d] <= 1 else 0
        step *= max(shape[d], 1) if steps[d] else 1
    return tuple(steps)


def is_contiguous(
    self: GlobalTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    """Return the answer that one device would give, the same on every rank."""
    if local_strides_tell(self):
        return self._stored.is_contiguous(memory_format=memory_format)
    strides = (
        device_strides(self)
        if part_tells(self) or note_of(self) is not None or "_origin" in self.__dict__
        else by_rows(self.shape)
    )
    return _meta_with_strides(self, strides).is_contiguous(memory_format=memory_format)


def local_strides_tell(x: GlobalTensor) -> bool:
    """Return True if ``x`` is contiguous on one device where its local tensor is."""
    held = x.__dict__
    return (
        not has_hidden_gaps(x._spec.plain)
        and "_strides" not in held
        and "_origin" not in held
        and x._spec.placement.coordinate(world().rank) is not None
    )


@lru_cache(maxsize=1 << 12)
def has_hidden_gaps(spec: Spec) -> bool:
    """Return True if a local tensor may be contiguous where the global tensor is not."""
    return differ(spec) or has_single_element_parts(spec)


def memory_order(x: GlobalTensor) -> tuple[int, ...] | None:
    """Return the strides with which one device would hold ``x``, the order of writes into it.

    Return None for row-major, or where a rank outside the placement has to keep step: that rank
    does not know the strides.
    """
    spec = x._spec
    if not x.numel() or len(spec.placement.flat) < world().size:
        return None
    strides: tuple[int, ...] = stride(x)
    usual = torch.empty(spec.shape, device="meta").stride()
    return (
        None
        if all(a == b for a, b, n in zip(strides, usual, spec.shape, strict=True) if n > 1)
        else strides
    )
