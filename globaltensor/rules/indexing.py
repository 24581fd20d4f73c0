"""Indexing, gathering and scattering.

A dim that an index picks from may be split: the rank that owns an element contributes it and the others zeros, so the result is a partial sum. No element moves
before it is picked. Writing picks nothing: each rank writes what falls into its part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .notation import Arg, Op, Split, align
from .registry import RULES, Rule, rule
from .views import identity, own

__all__ = ["Part", "parts_of", "picked"]

Local = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """One component of an index. ``dim``: the dim of the indexed tensor it stands on (for a new dim: before which it stands)."""

    kind: str  # "new" | "all" | "slice" | "int" | "item" (a 0-dim tensor) | "tensor" | "mask"
    dim: int
    value: Any = None  # int: from the front; slice: range; tensors: their Arg
    size: int = 1  # elements of the region along it


def parts_of(x: Arg, index: Any) -> list[Part]:
    """Read an index as torch does, every dim accounted for. Raises TypeError for the forms that only torch itself knows."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_span(i) for i in items)
    dots = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        raise TypeError("an index with more than one ellipsis")
    fill = [slice(None)] * (x.ndim - used)
    items = [*items[: dots[0]], *fill, *items[dots[0] + 1 :]] if dots else items + fill
    found, d = [], 0
    for item in items:
        found.append(_part(x, item, d))
        d += _span(item)
    return found


def _span(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, (Arg, torch.Tensor)) and item.dtype in (torch.bool, torch.uint8)


def _part(x: Arg, item: Any, d: int) -> Part:
    if item is None:
        return Part("new", d)
    if isinstance(item, bool):
        raise TypeError("a bool as an index adds a dim")
    if isinstance(item, slice):
        r = range(*item.indices(x.shape[d]))
        return Part("all", d, size=x.shape[d]) if len(r) == x.shape[d] else Part("slice", d, r, len(r))
    if isinstance(item, Arg):
        if _is_mask(item):
            if not item.ndim:
                raise TypeError("a 0-dim mask adds a dim")
            return Part("mask", d, item)
        return Part("tensor" if item.ndim else "item", d, item)
    at = operator.index(item)
    return Part("int", d, at % max(x.shape[d], 1))


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_list(item: Any) -> bool:
    """Whether a component is a list or an array, which stands for a tensor."""
    return isinstance(item, (list, tuple, range, np.ndarray))


def _plainer(index: Any) -> tuple[Any, ...]:
    """The same index with lists and arrays as tensors, and masks as the places where they are true."""
    found: list[Any] = []
    for i in _items(index):
        i = torch.as_tensor(i) if _is_list(i) else i
        found += i.nonzero(as_tuple=True) if _is_mask(i) else [i]
    return tuple(found)


def _tensors(index: Any) -> Iterable[torch.Tensor]:
    return (i for i in _items(index) if isinstance(i, torch.Tensor))


def _region(parts: Sequence[Part], index_dims: Sequence[Any], name: Callable[[Part], Any]) -> tuple[list[Any], int, int]:
    """Dims of what an index selects, each named -> (names, where the index tensors' dims begin, how many they are)."""
    rest = [p for p in parts if p.kind not in ("int", "item")]
    places = [k for k, p in enumerate(rest) if p.kind == "tensor"]
    if not places:
        return [name(p) for p in rest], 0, 0
    # The dims of index tensors that stand side by side stay there; else they come first.
    begin = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    others = [name(p) for p in rest if p.kind != "tensor"]
    return [*others[:begin], *index_dims, *others[begin:]], begin, len(index_dims)


# ---------------------------------------------------------------------------------------------------------------- looking up in a split dim


def _picks(x: Arg) -> str:
    return "max" if x.dtype == torch.bool else "sum"


def picked(index: torch.Tensor, n: int, offset: int, length: int, miss: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into a dim of ``n`` elements -> (indices into the part at ``offset``, ``miss`` where it is not there; where it is there).

    An index that is nowhere stays out of range, so that torch complains as it would.
    """
    here = index - offset
    mine = (here >= 0) & (here < length)
    return torch.where(mine, here, torch.where((index >= 0) & (index < n), miss, n + 1)), mine


def _extended(x: torch.Tensor, d: int) -> torch.Tensor:
    """``x`` with one more row of zeros on dim ``d``."""
    return F.pad(x, [0, 0] * (x.ndim - 1 - d) + [0, 1])


def _filled(x: torch.Tensor, d: int) -> torch.Tensor:
    """``x`` with at least one row on dim ``d``, so that there is something to point at."""
    return x if x.shape[d] else _extended(x, d)


def _only(mine: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(mine, y, y.new_zeros(()))


# ---------------------------------------------------------------------------------------------------------------- x[...]


@rule([torch.Tensor.__getitem__])
def _getitem(op: Op, x: Arg, index: Any) -> None:
    if any(_is_list(i) or (_is_mask(i) and i.ndim) for i in _items(index)):
        op.composite = lambda x, index: x[_plainer(index)]
        return
    parts = parts_of(x, index)
    tensors = [p for p in parts if p.kind == "tensor"]
    every, index_dims = align([p.value.shape for p in tensors], "index")
    for p, dims in zip(tensors, every, strict=True):
        op.set(p.value, dims)
    op.set(x, [None if p.kind == "slice" else ("x", p.dim) for p in parts if p.kind != "new"])
    region, begin, count = _region(parts, index_dims, lambda p: ("x", p.dim) if p.kind == "all" else None)
    op.out, op.view = [tuple(region)], not tensors
    op.reduce = {("x", p.dim): _picks(x) for p in parts if p.kind in ("int", "item", "tensor")}
    op.linear, op.carries = [frozenset([0])], True
    op.local = lambda split: _get_local(split, x.shape, parts, len(region) - begin - count)


def _get_local(split: Split, shape: Sequence[int], parts: Sequence[Part], after: int) -> Local:
    boxes = {p.dim: split.box(("x", p.dim)) for p in parts if p.kind in ("int", "item", "tensor") and split.is_split(("x", p.dim))}

    def run(x: torch.Tensor, index: Any) -> torch.Tensor:
        these, key, owned = iter(_tensors(index)), [], None
        for p in parts:
            at: Any = next(these) if p.kind in ("item", "tensor") else p.value
            if p.kind == "item":
                at = _item(at, shape[p.dim])
            if p.kind == "tensor" and p.dim in boxes:
                n = shape[p.dim]
                x = _filled(x, p.dim)
                at, mine = picked(torch.where(at < 0, at + n, at), n, *boxes[p.dim])
                owned = mine if owned is None else owned & mine
            elif p.dim in boxes and p.kind in ("int", "item"):
                x, at = own(x, p.dim, at - boxes[p.dim][0]), 0
            key.append(_plain_key(p, at))
        y = x[tuple(key)]
        return y if owned is None else _only(owned.reshape(*owned.shape, *[1] * after), y)

    return run


def _item(t: torch.Tensor, n: int) -> int:
    at = int(t)
    if not -n <= at < n:
        raise IndexError(f"index {at} is out of bounds for a dim of size {n}")
    return at % n


def _plain_key(p: Part, at: Any) -> Any:
    if p.kind == "slice":
        return slice(p.value.start, p.value.stop, p.value.step)
    return {"new": None, "all": slice(None)}.get(p.kind, at)


# ---------------------------------------------------------------------------------------------------------------- x[...] = value


def _setitem(op: Op, x: Arg, index: Any, value: Any) -> None:
    items = _items(index)
    if any(_is_list(i) for i in items) or (any(_is_mask(i) for i in items) and not _fills_by_mask(x, index, value)):
        op.composite = _set_plainer
        return
    parts = parts_of(x, index)
    tensors = [p for p in parts if p.kind == "tensor"]
    _, index_dims = align([p.value.shape for p in tensors], "index")
    op.set(x, [("x", d) for d in range(x.ndim)])
    for p in parts:
        if p.kind == "mask":
            op.set(p.value, [("x", p.dim + k) for k in range(p.value.ndim)])
    region, begin, count = _region(parts, [None] * len(index_dims), lambda p: p)
    after = len(region) - begin - count
    if isinstance(value, Arg):
        op.set(value, _value_dims(value.shape, region))
        op.linear = [frozenset([x.index, value.index])]
    elif value == 0:
        op.linear = [frozenset([x.index])]
    op.out = [op.dims[x.index]]
    op.local = lambda split: _set_local(split, x.shape, parts, region, after, count)


RULES[torch.Tensor.__setitem__] = Rule("__setitem__", _setitem, inplace=True)


def _set_plainer(x: Any, index: Any, value: Any) -> None:
    x[_plainer(index)] = value


def _fills_by_mask(x: Arg, index: Any, value: Any) -> bool:
    """Whether one mask says where, and the value does not depend on how often it is true."""
    parts = parts_of(x, index)
    if sum(p.kind == "mask" for p in parts) != 1 or any(p.kind in ("slice", "tensor", "int", "item", "new") for p in parts):
        return False
    mask = next(p for p in parts if p.kind == "mask")
    end = mask.dim + mask.value.ndim
    return mask.value.shape == x.shape[mask.dim : end] and (not isinstance(value, Arg) or value.ndim <= x.ndim - end)


def _value_dims(shape: Sequence[int], region: Sequence[Any]) -> list[Any]:
    """A value is aligned from the right with what it is written to; a dim of size 1 broadcasts, and so do more leading ones."""
    dims: list[Any] = []
    for k in range(len(shape), 0, -1):
        p = region[len(region) - k] if k <= len(region) else None
        whole = isinstance(p, Part) and p.kind == "all" and p.size == shape[len(shape) - k]
        dims.append(("x", p.dim) if whole else None)  # type: ignore[union-attr]
    return dims


def _set_local(split: Split, shape: Sequence[int], parts: Sequence[Part], region: Sequence[Any], after: int, count: int) -> Local:
    """What a rank writes: ``after`` dims of the region follow the ``count`` dims of the index tensors."""
    boxes = {d: split.box(("x", d)) for d in range(len(shape)) if split.is_split(("x", d))}

    def run(x: torch.Tensor, index: Any, value: Any) -> None:
        tensor = isinstance(value, torch.Tensor)
        if tensor and value.ndim > len(region):
            value = value.reshape(value.shape[value.ndim - len(region) :])
        these, key, reach = iter(_tensors(index)), [], {}
        for p in parts:
            at: Any = next(these) if p.kind in ("item", "tensor", "mask") else p.value
            if p.kind == "item":
                at = _item(at, shape[p.dim])
            if p.dim in boxes and p.kind in ("int", "item"):
                at -= boxes[p.dim][0]
                if not 0 <= at < boxes[p.dim][1]:
                    return _touch(x, p.dim, value)
            if p.dim in boxes and p.kind == "slice":
                at, first, n = _overlap(p.value, *boxes[p.dim])
                value = _narrowed(value, len(region) - region.index(p), first, n, p.size) if tensor else value
                key.append(at)
                continue
            if p.kind == "tensor":
                reach[len(key)] = p
            key.append(_plain_key(p, at))
        if any(p.dim in boxes for p in reach.values()):
            value = _only_mine(key, reach, boxes, shape, value, after, count)
        x[tuple(key)] = value

    return run


def _touch(x: torch.Tensor, d: int, value: Any) -> None:
    """Write nothing, but let the value take part in the backward pass, where other ranks may wait for this one."""
    if isinstance(value, torch.Tensor) and value.requires_grad:
        x.narrow(d, 0, 0).add_(value.reshape(-1)[:0].sum().to(x.dtype))


def _overlap(r: range, offset: int, length: int) -> tuple[slice, int, int]:
    """The part of a range that falls into [offset, offset + length) -> (local slice, first of the range in it, how many)."""
    first = max(0, -((r.start - offset) // r.step))
    end = min(len(r), max(0, -((r.start - offset - length) // r.step)))
    if end <= first:
        return slice(0, 0), 0, 0
    start = r.start + first * r.step - offset
    return slice(start, start + (end - first - 1) * r.step + 1, r.step), first, end - first


def _narrowed(value: torch.Tensor, from_right: int, first: int, n: int, size: int) -> torch.Tensor:
    d = value.ndim - from_right
    return value.narrow(d, first, n) if d >= 0 and value.shape[d] == size else value


def _only_mine(key: list[Any], reach: dict[int, Part], boxes: dict[int, tuple[int, int]], shape: Sequence[int], value: Any, after: int, count: int) -> Any:
    """Keep of index tensors (in ``key``, changed) and the value what falls into this rank's part."""
    spread = torch.broadcast_tensors(*[key[k] for k in reach])
    owned, flat = None, {}
    for (k, p), t in zip(reach.items(), spread, strict=True):
        t = torch.where(t < 0, t + shape[p.dim], t).reshape(-1)
        if p.dim in boxes:
            t, mine = picked(t, shape[p.dim], *boxes[p.dim])
            if bool((t > shape[p.dim]).any()):
                raise IndexError(f"an index is out of bounds for dim {p.dim} of size {shape[p.dim]}")
            owned = mine if owned is None else owned & mine
        flat[k] = t
    keep = owned.nonzero().squeeze(1)  # type: ignore[union-attr]
    for k, t in flat.items():
        key[k] = t[keep]
    if not isinstance(value, torch.Tensor) or value.ndim <= after:
        return value
    value = value.reshape(*[1] * (after + count - value.ndim), *value.shape)
    begin = value.ndim - after - count
    value = value.expand(*value.shape[:begin], *spread[0].shape, *value.shape[begin + count :]).flatten(begin, begin + count - 1)
    return value.index_select(begin, keep)


def _index_put(function: Callable[..., Any]) -> Callable[..., None]:
    def describe(op: Op, input: Arg, indices: Sequence[Any], values: Any, accumulate: bool = False) -> None:
        if accumulate:
            raise TypeError("accumulate=True")
        op.composite = function

    return describe


def _index_put_into(input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    input[tuple(slice(None) if i is None else i for i in indices)] = values
    return input


def _index_put_as_setitem(input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    return _index_put_into(input.clone(), indices, values)


rule([torch.index_put, torch.Tensor.index_put])(_index_put(_index_put_as_setitem))
for _f in (torch.Tensor.index_put_, torch.index_put_):
    RULES[_f] = Rule("index_put", _index_put(_index_put_into), inplace=True)


# ---------------------------------------------------------------------------------------------------------------- gather and scatter


@rule("gather")
def _gather(op: Op, input: Arg, dim: int, index: Arg, *, sparse_grad: bool = False) -> None:
    d = input.dim(dim)
    same = [k != d and input.shape[k] == index.shape[k] for k in range(input.ndim)] if input.ndim == index.ndim else []
    op.set(input, [("x", k) if k == d or s else None for k, s in enumerate(same)] or [None] * input.ndim)
    op.set(index, ["k" if k == d else ("x", k) if s else None for k, s in enumerate(same)] or [None] * index.ndim)
    op.out, op.reduce = [op.dims[index.index]], {("x", d): _picks(input)}
    op.linear, op.carries = [frozenset([input.index])], True
    op.local = _looked_up(d, input.shape, lambda x, i: x.gather(d, i, sparse_grad=sparse_grad))


@rule("index_select")
def _index_select(op: Op, input: Arg, dim: int, index: Arg) -> None:
    d = input.dim(dim)
    op.set(input, [("x", k) for k in range(input.ndim)])
    op.set(index, ["k"] * index.ndim)
    op.out = [tuple((("k" if index.ndim else None) if k == d else ("x", k)) for k in range(input.ndim))]
    op.reduce = {("x", d): _picks(input)} if input.ndim else {}
    op.linear, op.carries = [frozenset([input.index])], True
    after = input.ndim - d - 1

    def select(x: torch.Tensor, i: torch.Tensor, mine: torch.Tensor | None = None) -> Any:
        return x.index_select(d, i) if mine is None else (x.index_select(d, i), mine.reshape(-1, *[1] * after))

    op.local = _looked_up(d, input.shape, select, aligned=True)


def _looked_up(d: int, shape: Sequence[int], pick: Callable[..., Any], *, aligned: bool = False) -> Callable[[Split], Local]:
    """Local form of picking along dim ``d``; ``aligned``: ``pick`` also shapes the mask to its result."""

    def local(split: Split) -> Local:
        if not split.is_split(("x", d)):
            return lambda input, dim, index, **kwargs: pick(input, index)
        box = split.box(("x", d))

        def run(input: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            here, mine = picked(index, shape[d], *box)
            y, mine = pick(_filled(input, d), here, mine) if aligned else (pick(_filled(input, d), here), mine)
            return _only(mine, y)

        return run

    return local


@rule("take")
def _take(op: Op, input: Arg, index: Arg) -> None:
    op.composite = lambda input, index: input.flatten()[index]


@rule("take_along_dim")
def _take_along_dim(op: Op, input: Arg, indices: Arg, dim: int | None = None) -> None:
    op.composite = _take_along


def _take_along(input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    d = dim % input.ndim
    shape = [max(a, b) if min(a, b) else 0 for a, b in zip(input.shape, indices.shape, strict=True)]
    x = input.expand([input.shape[k] if k == d else n for k, n in enumerate(shape)])
    return x.gather(d, indices.expand([indices.shape[k] if k == d else n for k, n in enumerate(shape)]))


def _into(op: Op, input: Arg, d: int, index: Arg, src: Any, same: Sequence[bool], write: Callable[..., torch.Tensor], *, sums: bool) -> None:
    """Write ``src`` to places of dim ``d``. ``same``: dims in which all agree. ``sums``: many sources to one place add up, so they may be split."""
    op.set(input, [("x", k) if k == d or same[k] else None for k in range(input.ndim)])
    matched = not isinstance(src, Arg) or (src.ndim == input.ndim and (index.ndim == 1 or src.shape[d] == index.shape[d]))
    row = ["k" if k == d and matched else ("x", k) if k != d and same[k] else None for k in range(input.ndim)]
    if index.ndim == input.ndim:
        op.set(index, row)
    elif index.ndim == 1:
        op.set(index, [row[d]])
    if isinstance(src, Arg) and src.ndim == input.ndim:
        op.set(src, row)
    op.out = [op.dims[input.index]]
    if sums:
        op.reduce, op.addends = {"k": "sum"}, frozenset([input.index])
    else:
        op.whole.add("k")
    op.local = _written(d, input.shape, write)


def _written(d: int, shape: Sequence[int], write: Callable[..., torch.Tensor]) -> Callable[[Split], Local]:
    def local(split: Split) -> Local:
        if not split.is_split(("x", d)):
            return lambda input, dim, index, *rest, **kwargs: write(input, index, *rest, **kwargs)
        offset, length = split.box(("x", d))

        def run(input: torch.Tensor, dim: int, index: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
            # What falls elsewhere goes to one more row, which is dropped.
            here, _ = picked(index, shape[d], offset, length, miss=length)
            return write(_extended(input, d), here, *rest, **kwargs).narrow(d, 0, length)

        return run

    return local


def _scatter_rule(name: str) -> None:
    @rule(name)
    def describe(op: Op, input: Arg, dim: int, index: Arg, src: Any = None, reduce: str | None = None, *, value: Any = None, include_self: bool = True) -> None:
        d = input.dim(dim)
        operands = [index, src] if isinstance(src, Arg) and src.ndim == input.ndim else [index]
        if index.ndim != input.ndim:
            raise TypeError("an index with fewer dims")
        same = [all(a.shape[k] == input.shape[k] for a in operands) for k in range(input.ndim)]
        sums = name == "scatter_add" or (reduce == "sum" and include_self)
        _into(op, input, d, index, src, same, lambda x, i, *rest, **kwargs: getattr(torch, name)(x, d, i, *rest, **kwargs), sums=sums)
        if isinstance(src, Arg) and (sums or (name == "scatter" and reduce is None)):
            op.linear = [frozenset([input.index, src.index])]


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    _scatter_rule(_name)


def _index_rule(name: str) -> None:
    @rule(name)
    def describe(op: Op, input: Arg, dim: int, index: Arg, source: Any = None, *args: Any, value: Any = None, **kwargs: Any) -> None:
        if not input.ndim or not index.ndim:
            raise TypeError("0-dim operands")
        d = input.dim(dim)
        same = [True] * input.ndim
        _into(op, input, d, index, source, same, lambda x, i, *rest, **kw: getattr(torch.Tensor, name)(x, d, i, *rest, **kw), sums=name == "index_add")
        if isinstance(source, Arg) and name in ("index_add", "index_copy"):
            op.linear = [frozenset([input.index, source.index])]


for _name in ("index_add", "index_copy", "index_fill", "index_reduce"):
    _index_rule(_name)


def _scatter_view(name: str, dims_of: Callable[..., set[int]]) -> None:
    """``select_scatter`` and its like: a copy of ``input`` with ``src`` in the place of a view."""

    @rule(name)
    def describe(op: Op, input: Arg, src: Arg, *args: Any, **kwargs: Any) -> None:
        cut = dims_of(input, *args, **kwargs)
        op.set(input, [None if k in cut else k for k in range(input.ndim)])
        kept = [k for k in range(input.ndim) if k not in cut]
        op.set(src, op.dims[input.index] if src.ndim == input.ndim else [*kept, *[None] * (src.ndim - len(kept))])
        op.out, op.linear, op.carries = [op.dims[input.index]], [frozenset([input.index, src.index])], True


_scatter_view("select_scatter", lambda x, dim, index: {x.dim(dim)})
_scatter_view("slice_scatter", lambda x, dim=0, *args, **kwargs: {x.dim(dim)})
_scatter_view("diagonal_scatter", lambda x, offset=0, dim1=0, dim2=1: {x.dim(dim1), x.dim(dim2)})


# ---------------------------------------------------------------------------------------------------------------- masks


@rule("masked_fill")
def _masked_fill(op: Op, input: Arg, mask: Arg, value: Any) -> None:
    every, result = align([input.shape, mask.shape])
    op.set(input, every[0])
    op.set(mask, every[1])
    op.out = [result]
    if isinstance(value, Arg):
        op.linear = [frozenset([input.index, value.index])]
    elif value == 0:
        op.linear = [frozenset([input.index])]


@rule("masked_scatter")
def _masked_scatter(op: Op, input: Arg, mask: Arg, source: Arg) -> None:
    op.out = [(None,) * max(input.ndim, mask.ndim)]  # the k-th true place takes the k-th element: nothing can be split


# ---------------------------------------------------------------------------------------------------------------- tables


@rule([F.embedding])
def _embedding(
    op: Op,
    input: Arg,
    weight: Arg,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> None:
    ids = [("ids", k) for k in range(input.ndim)]
    op.out = [(*ids, "width")]
    if max_norm is not None or scale_grad_by_freq:  # the first changes rows by their norm, the second counts all ids
        op.out = [(None,) * (input.ndim + 1)]
        return
    op.set(input, ids)
    op.set(weight, ("rows", "width"))
    op.reduce, op.linear = {"rows": "sum"}, [frozenset([weight.index])]
    n = weight.shape[0]
    padding = None if padding_idx is None else padding_idx % max(n, 1)

    def local(split: Split) -> Local:
        if not split.is_split("rows"):
            return lambda input, weight, *args, **kwargs: F.embedding(input, weight, padding, sparse=sparse)
        offset, length = split.box("rows")

        def run(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            here, mine = picked(input, n, offset, length)
            own_padding = padding - offset if padding is not None and offset <= padding < offset + length else None
            return _only(mine.unsqueeze(-1), F.embedding(here, _filled(weight, 0), own_padding, sparse=sparse))

        return run

    op.local = local


@rule([torch.embedding])
def _torch_embedding(op: Op, weight: Arg, indices: Arg, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> None:
    op.composite = _embedding_by_name


def _embedding_by_name(weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Any:
    return F.embedding(indices, weight, None if padding_idx < 0 else padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


@rule([F.embedding_bag])
def _embedding_bag(op: Op, input: Arg, weight: Arg, offsets: Any = None, max_norm: float | None = None, *args: Any, **kwargs: Any) -> None:
    op.out = [(None, None)]
    if input.ndim != 2 or offsets is not None or max_norm is not None or True in args or kwargs.get("scale_grad_by_freq"):
        return
    op.out = [("bags", "width")]
    op.set(input, ("bags", None))
    op.set(weight, (None, "width"))
    for a in op.args[2:]:
        op.set(a, ("bags", None))
    op.linear = [frozenset([weight.index])] if "max" not in (*args, kwargs.get("mode")) else []


@rule([F.one_hot])
def _one_hot(op: Op, tensor: Arg, num_classes: int = -1) -> None:
    if num_classes < 0:
        op.composite = lambda tensor, num_classes=-1: F.one_hot(tensor, int(tensor.max()) + 1)
        return
    identity(op, tensor)
    op.out = [(*range(tensor.ndim), None)]


@rule("bucketize")
def _bucketize(op: Op, input: Arg, boundaries: Arg, **kwargs: Any) -> None:
    identity(op, input)


@rule("searchsorted")
def _searchsorted(op: Op, sorted_sequence: Arg, input: Arg, **kwargs: Any) -> None:
    if not isinstance(input, Arg):
        raise TypeError("one number to look for")
    lead = [("lead", k) for k in range(sorted_sequence.ndim - 1)]
    op.set(input, [("lead", k) for k in range(input.ndim)] if sorted_sequence.ndim == 1 else [*lead, "values"])
    for a in op.args:
        if a is not input:
            op.set(a, [*lead, None])
    op.out = [op.dims[input.index]]
