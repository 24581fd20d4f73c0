"""Rules of indexing: x[...] and x[...] = value; `rules` imports them.

A dim that an index picks from may be split. The rank that owns an element contributes it, and the
others contribute zeros, so the result is a partial sum. No element moves before it is picked.
Writing picks nothing: each rank writes the values that belong to its local tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..._base.torch_private import is_fake
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.view_tracking import RemoteView
from ...errors import FormError
from .gather_scatter import (
    check_number,
    extended,
    filled,
    first_outside,
    first_share,
    is_range_error,
    only,
    picked,
    picks,
)
from .notation import Arg, LocalContext, OpDescription, align
from .registry import DATA_FREE_VARIANTS, RULES, Rule, rule
from .slicing import cut, stays_split, takes
from .view import own

__all__ = ["IndexComponent", "parts_of"]

Local = Callable[..., Any]


@dataclass(frozen=True)
class IndexComponent:
    """One component of an index.

    ``dim`` is the dim of the indexed tensor to which the component applies. A new dim is inserted
    before ``dim``.
    """

    kind: str  # "new" | "all" | "slice" | "int" | "tensor" | "mask"
    dim: int
    value: Any = None  # int: counted from the front; slice: range; tensors: their Arg
    size: int = 1  # elements of the region along it


def parts_of(x: Arg, index: Any) -> list[IndexComponent]:
    """Read an index as torch does, with every dim accounted for.

    Raises FormError for the forms that only torch itself knows.
    """
    items = list(_index_items(index))
    used = sum(_num_indexed_dims(i) for i in items)
    dots = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        raise FormError("an index with more than one ellipsis")
    fill = [slice(None)] * (x.ndim - used)
    items = [*items[: dots[0]], *fill, *items[dots[0] + 1 :]] if dots else items + fill
    found, d = [], 0
    for item in items:
        found.append(_index_component(x, item, d))
        d += _num_indexed_dims(item)
    return found


def _num_indexed_dims(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, (Arg, torch.Tensor)) and item.dtype in (torch.bool, torch.uint8)


def _index_component(x: Arg, item: Any, d: int) -> IndexComponent:
    if item is None:
        return IndexComponent("new", d)
    if isinstance(item, slice):
        r = range(*item.indices(x.shape[d]))
        return (
            IndexComponent("all", d, size=x.shape[d])
            if len(r) == x.shape[d]
            else IndexComponent("slice", d, r, len(r))
        )
    if isinstance(item, Arg):
        if _is_mask(item):
            return IndexComponent("mask", d, item)
        return IndexComponent("tensor", d, item)
    at = operator.index(item)
    return IndexComponent("int", d, at % max(x.shape[d], 1))


def _index_items(index: Any) -> tuple[Any, ...]:
    """Return the components of an index.

    As in torch, a short list that holds more than numbers is a list of components.
    """
    more = (slice, Arg, torch.Tensor, type(None), type(Ellipsis))
    if (
        isinstance(index, list)
        and len(index) < 32
        and any(isinstance(i, more) or _is_list(i) for i in index)
    ):
        return tuple(index)
    return index if isinstance(index, tuple) else (index,)


def _is_list(item: Any) -> bool:
    """Return True if a component is a list or an array, which stands for a tensor."""
    return isinstance(item, (list, tuple, range, np.ndarray))


def _simplify_index(x: Any, index: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return (x, index) that mean the same, without lists, arrays and masks in the index.

    Lists and arrays become tensors. Masks become the positions where they are true. A bool is a
    mask of a new dim of size 1.
    """
    items, plain_items, d = (
        [
            _as_tensor(i) if _is_list(i) or isinstance(i, (bool, np.bool_)) else i
            for i in _index_items(index)
        ],
        [],
        0,
    )
    for k, i in enumerate(items):
        if _is_mask(i):
            x, i = (x, i) if i.ndim else (x.unsqueeze(d), i.reshape(1))
            if (over := tuple(x.shape[d : d + i.ndim])) != tuple(i.shape):
                raise IndexError(
                    f"a mask of shape {list(i.shape)} cannot index dims of sizes {list(over)}, "
                    f"dims {d} to {d + i.ndim - 1} of shape {list(x.shape)}"
                )
            plain_items += i.nonzero(as_tuple=True)
        else:
            plain_items.append(i)
        d = (
            x.ndim - sum(_num_indexed_dims(j) for j in items[k + 1 :])
            if i is Ellipsis
            else d + _num_indexed_dims(i)
        )
    return x, tuple(plain_items)


def _get_at_positions(x: Any, index: Any) -> Any:
    """Return ``x[index]``, with masks read as the positions where they are true.

    Where a mask follows from the code alone, these positions do too.
    """
    x, found = _simplify_index(x, index)
    return x[found]


def _select_by_mask(input: torch.Tensor, mask: torch.Tensor) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    # The two are expanded separately, so that the expanded mask depends on the mask alone.
    return _get_at_positions(input.expand(shape), mask.expand(shape))


DATA_FREE_VARIANTS[torch.Tensor.__getitem__] = _get_at_positions
DATA_FREE_VARIANTS[torch.masked_select] = DATA_FREE_VARIANTS[torch.Tensor.masked_select] = (
    _select_by_mask
)


def _as_tensor(item: Any) -> torch.Tensor:
    found = torch.as_tensor(item)
    # An empty list picks nothing.
    return found if found.numel() or isinstance(item, np.ndarray) else found.long()


def _index_tensors(index: Any) -> Iterable[torch.Tensor]:
    return (i for i in _index_items(index) if isinstance(i, torch.Tensor))


def _indexed_region(
    parts: Sequence[IndexComponent],
    index_dims: Sequence[Any],
    name: Callable[[IndexComponent], Any],
) -> tuple[list[Any], int, int]:
    """Return the named dims of the region that an index selects.

    The result is (names, the position at which the index tensors' dims start, their number).
    """
    rest = [p for p in parts if p.kind != "int"]
    places = [k for k, p in enumerate(rest) if p.kind == "tensor"]
    if not places:
        return [name(p) for p in rest], 0, 0
    # The dims of adjacent index tensors stay at their position. Otherwise they come first.
    begin = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    others = [name(p) for p in rest if p.kind != "tensor"]
    return [*others[:begin], *index_dims, *others[begin:]], begin, len(index_dims)


# ------------------------------------------------------------------------------------------- x[...]


@rule([torch.Tensor.__getitem__])
def _getitem(op: OpDescription, x: Arg, index: Any) -> None:
    if any(
        _is_list(i) or _is_mask(i) or isinstance(i, (bool, np.bool_)) for i in _index_items(index)
    ):
        op.composite = _get_simplified
        return
    if any(_is_number(i) for i in _index_items(index)):
        op.composite = _get_by_number
        return
    parts = parts_of(x, index)
    tensors = [p for p in parts if p.kind == "tensor"]
    every, index_dims = align([p.value.shape for p in tensors], "index")
    for p, dims in zip(tensors, every, strict=True):
        op.set(p.value, dims)
    over = {p.dim for p in parts if p.kind == "slice" and stays_split(x, p.dim, [p.value])}
    op.set(
        x,
        [
            None if p.kind == "slice" and p.dim not in over else ("x", p.dim)
            for p in parts
            if p.kind != "new"
        ],
    )
    region, begin, count = _indexed_region(
        parts,
        index_dims,
        lambda p: (
            ("x", p.dim) if p.kind == "all" or (p.kind == "slice" and p.dim in over) else None
        ),
    )
    op.out, op.view, op.exchanges = [tuple(region)], not tensors, {("x", d) for d in over}
    if over:
        takes(
            op,
            {
                p.dim: (region.index(("x", p.dim)), [p.value])
                for p in parts
                if p.kind == "slice" and p.dim in over
            },
        )
    op.reduce = {("x", p.dim): picks(x) for p in parts if p.kind in ("int", "tensor")}
    op.linear, op.carries = [frozenset([0])], True
    op.local = lambda split: _get_local(split, x.shape, parts, len(region) - begin - count)


def _get_simplified(x: Any, index: Any) -> Any:
    x, index = _simplify_index(x, index)
    return x[index]


def _get_local(
    split: LocalContext, shape: Sequence[int], parts: Sequence[IndexComponent], after: int
) -> Local | None:
    boxes = {
        p.dim: split.box(("x", p.dim))
        for p in parts
        if p.kind in ("int", "tensor") and split.is_split(("x", p.dim))
    }
    cuts = {
        p.dim: found
        for p in parts
        if ("x", p.dim) in split.op.exchanges and (found := _exchanged_slice(split, p)) is not None
    }
    if not boxes and not cuts:
        return None  # torch's own function, with the index unchanged

    def run(x: torch.Tensor, index: Any) -> torch.Tensor:
        index_tensors, key, owned = iter(_index_tensors(index)), [], None
        for taken in cuts.values():
            x = taken(x)[0]
        for p in parts:
            if p.kind == "slice" and p.dim in cuts:
                key.append(slice(None))
                continue
            at: Any = next(index_tensors) if p.kind == "tensor" else p.value
            if p.kind == "tensor" and p.dim in boxes:
                n = shape[p.dim]
                x = filled(x, p.dim)
                at, is_local = picked(torch.where(at < 0, at + n, at), n, *boxes[p.dim])
                owned = is_local if owned is None else owned & is_local
            elif p.dim in boxes and p.kind == "int":
                x, at = own(x, p.dim, at - boxes[p.dim][0]), 0
            key.append(_plain_key(p, at))
        try:
            y = x[tuple(key)]
        except IndexError as error:  # its text describes this rank's local tensor
            raise _out_of_bounds(shape, parts, index) or error from None
        return y if owned is None else only(owned.reshape(*owned.shape, *[1] * after), y)

    return run


def _out_of_bounds(
    shape: Sequence[int], parts: Sequence[IndexComponent], index: Any
) -> IndexError | None:
    for p, at in zip((p for p in parts if p.kind == "tensor"), _index_tensors(index), strict=True):
        n = shape[p.dim]
        if (bad := at[(at < -n) | (at >= n)]).numel():
            return IndexError(
                f"index {int(bad[0])} is out of bounds for dimension {p.dim} with size {n}"
            )
    return None


def _exchanged_slice(
    split: LocalContext, p: IndexComponent
) -> Callable[[torch.Tensor], Sequence[torch.Tensor]] | None:
    factor = ("x", p.dim)
    return (
        cut(split, p.dim, split.op.out[0].index(factor), [p.value])
        if p.kind == "slice" and split.is_split(factor)
        else None
    )


def _is_number(item: Any) -> bool:
    """Return True if a component is an integer in a 0-dim tensor, which stands for its value."""
    return isinstance(item, (Arg, torch.Tensor)) and not item.ndim and not _is_mask(item)


def _get_by_number(x: Any, index: Any) -> Any:
    out = _select_by_number(x, index)
    if any(isinstance(i, torch.Tensor) and i.ndim for i in _index_items(index)) or not isinstance(
        x, GlobalTensor
    ):
        return out
    # As in torch, numbers alone make a view and no copy.
    return RemoteView.of(
        out._local, out._spec, x, lambda source: _select_by_number(source, index), index
    )


def _select_by_number(x: Any, index: Any) -> Any:
    # Pick by an index of one element. The number is never read, so no rank waits for it.
    items, d, key = _index_items(index), 0, []
    for k, i in enumerate(items):
        if _is_number(i):
            x = x[(*[slice(None)] * d, i.reshape(1))]
            i = 0
        key.append(i)
        d = (
            x.ndim - sum(_num_indexed_dims(j) for j in items[k + 1 :])
            if i is Ellipsis
            else d + _num_indexed_dims(i)
        )
    return x[tuple(key)]


def _set_by_number(x: Any, index: Sequence[Any], value: Any) -> None:
    """Write ``value`` where the index holds a 0-dim integer tensor.

    The row of the first such number is read, written into by the rest of the index, and put back.
    """
    items, d = _index_items(index), 0
    for k, i in enumerate(items):
        if _is_number(i):
            place = (*[slice(None)] * d, i.reshape(1))
            row = x[place]
            row[(*items[:k], 0, *items[k + 1 :])] = value
            x[place] = row
            return
        d = (
            x.ndim - sum(_num_indexed_dims(j) for j in items[k + 1 :])
            if i is Ellipsis
            else d + _num_indexed_dims(i)
        )
    x[tuple(items)] = value


def _plain_key(p: IndexComponent, at: Any) -> Any:
    if p.kind == "slice":
        return slice(p.value.start, p.value.stop, p.value.step)
    return {"new": None, "all": slice(None)}.get(p.kind, at)


# ----------------------------------------------------------------------------------- x[...] = value


def _setitem(op: OpDescription, x: Arg, index: Any, value: Any) -> None:
    items = _index_items(index)
    plainer = any(_is_list(i) or _is_number(i) or isinstance(i, (bool, np.bool_)) for i in items)
    if plainer or (any(_is_mask(i) for i in items) and not _fills_by_mask(x, index, value)):
        op.composite = _set_simplified
        return
    parts = parts_of(x, index)
    tensors = [p for p in parts if p.kind == "tensor"]
    _, index_dims = align([p.value.shape for p in tensors], "index")
    op.set(x, [("x", d) for d in range(x.ndim)])
    for p in parts:
        if p.kind == "mask":
            op.set(p.value, [("x", p.dim + k) for k in range(p.value.ndim)])
    region, begin, count = _indexed_region(parts, [None] * len(index_dims), lambda p: p)
    after = len(region) - begin - count
    if isinstance(value, Arg):
        op.set(value, _value_dims(value.shape, region))
        op.linear = [frozenset([x.index, value.index])]
    else:
        check_number(value, x.dtype)
        op.linear = [frozenset([x.index])]
    op.out = [op.dims[x.index]]
    op.local = lambda split: _set_local(split, x.shape, parts, region, after, count)


RULES[torch.Tensor.__setitem__] = Rule("__setitem__", _setitem, inplace=True)


def _set_simplified(x: Any, index: Any, value: Any) -> None:
    if isinstance(index, (bool, np.bool_)):  # all or nothing
        if index:
            x[...] = value
        return
    x, index = _simplify_index(x, index)
    _set_by_number(
        x,
        tuple(
            int(i) if _is_number(i) and type(i) is torch.Tensor and not is_fake(i) else i
            for i in index
        ),
        value,
    )


def _fills_by_mask(x: Arg, index: Any, value: Any) -> bool:
    """Return True if one mask selects where to write.

    The value must not depend on the number of elements where the mask is true.
    """
    parts = parts_of(x, index)
    if sum(p.kind == "mask" for p in parts) != 1 or any(
        p.kind in ("slice", "tensor", "int", "new") for p in parts
    ):
        return False
    mask = next(p for p in parts if p.kind == "mask")
    end = mask.dim + mask.value.ndim
    return (
        mask.value.ndim > 0
        and mask.value.shape == x.shape[mask.dim : end]
        and (not isinstance(value, Arg) or value.ndim <= x.ndim - end)
    )


def _value_dims(shape: Sequence[int], region: Sequence[Any]) -> list[Any]:
    """Return the dims of a value, aligned from the right with the region that it is written to.

    A dim of size 1 broadcasts, and so do additional leading dims.
    """
    dims: list[Any] = []
    for k in range(len(shape), 0, -1):
        p = region[len(region) - k] if k <= len(region) else None
        whole = (
            isinstance(p, IndexComponent) and p.kind == "all" and p.size == shape[len(shape) - k]
        )
        dims.append(("x", p.dim) if whole else None)  # type: ignore[union-attr]
    return dims


def _set_local(
    split: LocalContext,
    shape: Sequence[int],
    parts: Sequence[IndexComponent],
    region: Sequence[Any],
    after: int,
    count: int,
) -> Local:
    """Return the function by which a rank writes.

    ``after`` dims of the region follow the ``count`` dims of the index tensors.
    """
    boxes = {d: split.box(("x", d)) for d in range(len(shape)) if split.is_split(("x", d))}
    lead = first_share(split)

    def run(x: torch.Tensor, index: Any, value: Any) -> None:
        tensor = isinstance(value, torch.Tensor)
        if not tensor and not lead:
            value = 0
        if tensor and value.ndim > len(region):
            value = value.reshape(value.shape[value.ndim - len(region) :])
        these, key, reach = iter(_index_tensors(index)), [], {}
        for p in parts:
            at: Any = next(these) if p.kind in ("tensor", "mask") else p.value
            if p.dim in boxes and p.kind == "int":
                at -= boxes[p.dim][0]
                if not 0 <= at < boxes[p.dim][1]:
                    return _write_nothing(x, p.dim, value)
            if p.dim in boxes and p.kind == "slice":
                at, first, n = _overlap(p.value, *boxes[p.dim])
                if n == boxes[p.dim][1]:  # autograd sees a write into a view, as on other ranks
                    x = x.narrow(p.dim, 0, n)
                value = (
                    _narrowed(value, len(region) - region.index(p), first, n, p.size)
                    if tensor
                    else value
                )
                key.append(at)
                continue
            if p.kind == "tensor":
                reach[len(key)] = p
            key.append(_plain_key(p, at))
        if any(p.dim in boxes for p in reach.values()):
            # In a captured graph it is not known yet which of the indices are this rank's.
            if is_fake(x):
                return _write_with_spare_row(x, key, reach, boxes, shape, value)
            value = _restrict_to_local(key, reach, boxes, shape, value, after, count)
        x[tuple(key)] = value

    return run


def _write_nothing(x: torch.Tensor, d: int, value: Any) -> None:
    """Write no element, but count as a write as on the rank that owns the element.

    Autograd then refuses the write, or a backward pass after it, on every rank or on none. A value
    that has a gradient, or is captured, joins the graph: other ranks may wait for this one there.
    """
    empty = x.narrow(d, 0, 0)
    if isinstance(value, torch.Tensor) and (value.requires_grad or is_fake(x)):
        empty.add_(value.reshape(-1)[:0].sum().to(x.dtype))
    else:
        empty.zero_()


def _overlap(r: range, offset: int, length: int) -> tuple[slice, int, int]:
    """Return the intersection of a range with [offset, offset + length).

    The result is (local slice, position in the range of its first element, number of elements).
    """
    first = max(0, -((r.start - offset) // r.step))
    end = min(len(r), max(0, -((r.start - offset - length) // r.step)))
    if end <= first:
        return slice(0, 0), 0, 0
    start = r.start + first * r.step - offset
    return slice(start, start + (end - first - 1) * r.step + 1, r.step), first, end - first


def _narrowed(value: torch.Tensor, from_right: int, first: int, n: int, size: int) -> torch.Tensor:
    d = value.ndim - from_right
    return value.narrow(d, first, n) if d >= 0 and value.shape[d] == size else value


def _restrict_to_local(
    key: list[Any],
    reach: dict[int, IndexComponent],
    boxes: dict[int, tuple[int, int]],
    shape: Sequence[int],
    value: Any,
    after: int,
    count: int,
) -> Any:
    """Reduce index tensors and the value to the elements of this rank's local tensor.

    The index tensors in ``key`` are replaced, and the value is returned.
    """
    spread = torch.broadcast_tensors(*[key[k] for k in reach])
    owned, flat = None, {}
    for (k, p), t in zip(reach.items(), spread, strict=True):
        t = torch.where(t < 0, t + shape[p.dim], t).reshape(-1)
        if p.dim in boxes:
            t, is_local = picked(t, shape[p.dim], *boxes[p.dim])
            if bool((t > shape[p.dim]).any()):
                raise IndexError(
                    f"an index is out of bounds for dim {p.dim} of size {shape[p.dim]}"
                )
            owned = is_local if owned is None else owned & is_local
        flat[k] = t
    keep = owned.nonzero().squeeze(1)  # type: ignore[union-attr]
    for k, t in flat.items():
        key[k] = t[keep]
    if not isinstance(value, torch.Tensor) or value.ndim <= after:
        return value
    value = value.reshape(*[1] * (after + count - value.ndim), *value.shape)
    begin = value.ndim - after - count
    value = value.expand(
        *value.shape[:begin], *spread[0].shape, *value.shape[begin + count :]
    ).flatten(begin, begin + count - 1)
    return value.index_select(begin, keep)


def _write_with_spare_row(
    x: torch.Tensor,
    key: list[Any],
    reach: dict[int, IndexComponent],
    boxes: dict[int, tuple[int, int]],
    shape: Sequence[int],
    value: Any,
) -> None:
    """Write all of the value, for any indices.

    Elements that belong to other ranks go into a spare row after this rank's rows, which is
    dropped.
    """
    split = [p.dim for p in reach.values() if p.dim in boxes]
    if not all(boxes[d][1] for d in split):
        return _write_nothing(x, split[0], value)
    owned, indices = None, {}
    for (k, p), t in zip(
        reach.items(), torch.broadcast_tensors(*[key[k] for k in reach]), strict=True
    ):
        t = torch.where(t < 0, t + shape[p.dim], t)
        if p.dim in boxes:
            t, is_local = picked(t, shape[p.dim], *boxes[p.dim])
            owned = is_local if owned is None else owned & is_local
        indices[k] = t
    for k, t in indices.items():
        d = reach[k].dim
        key[k] = torch.where(owned | (t > shape[d]), t, x.shape[d] if d == split[0] else 0)  # type: ignore[operator]
    wide = extended(x, split[0])
    wide[tuple(key)] = value
    x.copy_(wide.narrow(split[0], 0, x.shape[split[0]]))


def _index_put(function: Callable[..., Any]) -> Callable[..., None]:
    def describe(
        op: OpDescription, input: Arg, indices: Sequence[Any], values: Any, accumulate: bool = False
    ) -> None:
        if accumulate and any(i is None for i in indices):
            raise FormError("accumulate=True with a dim that no index is for")
        given = [i for i in indices if i is not None]
        dims = (
            input.ndim
            - sum(i.ndim if _is_mask(i) else 1 for i in given)
            + max((1 if _is_mask(i) else i.ndim for i in given), default=0)
        )
        # Assignment to x[...] drops leading dims of size 1.
        if isinstance(values, Arg) and values.ndim > dims:
            raise RuntimeError(
                f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast "
                f"to {_result_of_indexing(input, given, dims)}"
            )
        op.compose(function)

    return describe


def _result_of_indexing(input: Arg, indices: Sequence[Any], dims: int) -> str:
    """Name what tensors as ``indices`` select, as torch does. How much a mask selects is in its
    values, so then only the number of dims is known."""
    if any(map(_is_mask, indices)):
        return f"an indexing result of {dims} dims"
    selected = torch.broadcast_shapes(*(i.shape for i in indices))
    return f"indexing result of shape {[*selected, *input.shape[len(indices) :]]}"


def _add_at_indices(input: Any, indices: Sequence[Any], values: Any) -> Any:
    """Add values at positions that may repeat.

    The indexed dims are flattened to one, and the values are added to its rows.
    """
    x, found = _simplify_index(input, tuple(indices))
    places = torch.broadcast_tensors(*found)
    sizes, rest = x.shape[: len(places)], tuple(x.shape[len(places) :])
    row: Any = 0
    for i, n in zip(places, sizes, strict=True):
        row = row * n + torch.where(i < 0, i + n, i)
    # An index out of range in one dim must not fall into another row.
    for i, n in zip(places, sizes, strict=True):
        row = torch.where((i < -n) | (i >= n), math.prod(sizes), row)
    values = values.expand(*places[0].shape, *rest).reshape(-1, *rest)
    try:
        return input.reshape(-1, *rest).index_add(0, row.reshape(-1), values).reshape(input.shape)
    except (IndexError, RuntimeError) as error:
        if is_range_error(error):
            raise IndexError(_outside(places, sizes)) from None
        raise


def _outside(places: Sequence[torch.Tensor], sizes: Sequence[int]) -> str:
    """Say which index is out of range: torch's sentence on a rank that holds it."""
    for d, (i, n) in enumerate(zip(places, sizes, strict=True)):
        if (wrong := first_outside(i, n)) is not None:
            return f"index {wrong} is out of bounds for dimension {d} with size {n}"
    return (
        f"an index that another rank holds is out of bounds for dimensions of sizes {list(sizes)}"
    )


def _index_put_into(
    input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    if accumulate:
        return input.copy_(_add_at_indices(input, indices, values))
    input[tuple(slice(None) if i is None else i for i in indices)] = values
    return input


def _index_put_as_setitem(
    input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    return (
        _add_at_indices(input, indices, values)
        if accumulate
        else _index_put_into(input.clone(), indices, values)
    )


rule([torch.index_put, torch.Tensor.index_put])(_index_put(_index_put_as_setitem))
for _f in (torch.Tensor.index_put_, torch.index_put_):
    RULES[_f] = Rule("index_put", _index_put(_index_put_into), inplace=True)
