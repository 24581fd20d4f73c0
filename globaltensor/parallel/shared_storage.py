"""Tensors of one module that share memory, found before they become global.

`SameModel` uses it. Tensors that are the same object are one tensor here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._base import torch_private
from .._tensor.global_tensor import GlobalTensor
from ..sharding.tensor_kinds import TensorKind, parameter_described

__all__ = ["SharedMemory", "find_shared_memory", "overlap_message"]


class SharedMemory(NamedTuple):
    """The memory that tensors of a module share, by the first path of each tensor.

    ``owners``: the path of a tensor -> the path of the tensor whose memory it shows, all of it in
    the same form. ``overlap``: two tensors that share memory in another way, or None.
    """

    owners: dict[str, str]
    overlap: tuple[str, str] | None


class _Place(NamedTuple):
    """The place of a tensor in its storage, in bytes."""

    begin: int
    end: int
    path: str
    local: torch.Tensor


def find_shared_memory(tensors: Sequence[tuple[str, torch.Tensor]]) -> SharedMemory:
    """Return the memory that the tensors share on this rank.

    Of tensors that show the same memory, the owner is the first parameter, or else the first.
    """
    first: dict[torch.Tensor, str] = {}
    for path, t in tensors:
        first.setdefault(t, path)
    forms: dict[Any, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    places: dict[Any, list[_Place]] = defaultdict(list)
    for t, path in first.items():
        local = _local_with_memory(t)
        if local is None:
            continue
        storage = local.device, torch_private.storage_key(local)
        spec = t._spec if isinstance(t, GlobalTensor) else None
        form = (
            storage,
            local.storage_offset(),
            local.shape,
            local.stride(),
            local.dtype,
            local.is_conj(),
            local.is_neg(),
            spec,
        )
        if form not in forms:
            begin = local.storage_offset() * local.element_size()
            reach = sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True)) + 1
            places[storage].append(_Place(begin, begin + reach * local.element_size(), path, local))
        forms[form].append((path, t))
    owners: dict[str, str] = {}
    for same in forms.values():
        owner = next((p for p, t in same if isinstance(t, torch.nn.Parameter)), same[0][0])
        owners |= {path: owner for path, _ in same if path != owner}
    overlaps = (pair for found in places.values() if (pair := _overlap(found)) is not None)
    overlap = next(overlaps, None)
    if overlap is not None:  # name the parameter first: the message has the other copied
        parameters = {path for t, path in first.items() if isinstance(t, torch.nn.Parameter)}
        one, two = sorted(overlap, key=lambda path: path not in parameters)
        overlap = one, two
    return SharedMemory(owners, overlap)


def _local_with_memory(t: torch.Tensor) -> torch.Tensor | None:
    """Return the local tensor whose memory counts, or None if it has none."""
    if isinstance(parameter_described(t), TensorKind):
        return None
    local = t._stored if isinstance(t, GlobalTensor) else t
    if local.is_meta or not local.numel() or torch_private.is_fake(local):
        return None
    return local.detach() if local.layout is torch.strided else None


def _overlap(places: Sequence[_Place]) -> tuple[str, str] | None:
    """Return the paths of two tensors in one storage that share an element, or None."""
    active: list[_Place] = []
    for place in sorted(places, key=lambda p: p.begin):
        active = [p for p in active if p.end > place.begin]
        for other in active:
            if _shares_element(other, place):
                return other.path, place.path
        active.append(place)
    return None


def _shares_element(one: _Place, two: _Place) -> bool:
    """Return True if two tensors whose ranges of bytes overlap share an element.

    The columns of a matrix may have ranges that overlap, and yet no element in common. Tensors
    whose elements differ in size count as sharing one.
    """
    size = one.local.element_size()
    if size != two.local.element_size():
        return True
    begin, end = min(one.begin, two.begin), max(one.end, two.end)
    mask = torch.zeros((end - begin) // size, dtype=torch.bool)
    seen = [
        mask.as_strided(p.local.shape, p.local.stride(), (p.begin - begin) // size)
        for p in (one, two)
    ]
    seen[0].fill_(True)
    return bool(seen[1].any())


def overlap_message(module: str, overlap: tuple[str, str]) -> str:
    """Return the error text for two tensors of a module that share only a part of their memory."""
    one, two = overlap
    return (
        f"{one} and {two} of {module} share memory, but are not the same view of it. Each would "
        f"get memory of its own on every rank, so that a write into one would no longer show in "
        f"the other. Register only one of them and compute the other from it in forward(); or give "
        f"{two} memory of its own before this call, a copy such as x.detach().clone()"
    )
