"""Rules of index tensors along one dim, masks, and look-up tables (embedding).

`rules` imports this module. As in indexing, the owner of an element of a split dim contributes it,
and the other ranks contribute zeros. Values written for other ranks go into a spare row that is
dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..._base.torch_private import is_fake, outside_all_modes, take_along_wraps
from ..._tensor.global_tensor import GlobalTensor
from ...errors import FormError
from .helpers import dummy_like, skip_when_empty
from .notation import Arg, LocalContext, OpDescription, Range, align
from .registry import RULES, Rule, rule
from .view import each_spelling, identity, reduction_of_picks

__all__ = [
    "check_elements",
    "check_number",
    "extended",
    "filled",
    "first_outside",
    "first_share",
    "is_range_error",
    "only",
    "picked",
    "picks",
]

Local = Callable[..., Any]


# --------------------------------------------------------------------------- look-up in a split dim


def picks(x: Arg) -> str:
    return reduction_of_picks(x.dtype)


def picked(
    index: torch.Tensor, n: int, offset: int, length: int, miss: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert indices into a dim of ``n`` elements to indices into the local tensor at ``offset``.

    Return (local indices, with ``miss`` where the element is not local; True where it is local). An
    index outside the global dim stays out of range, so that torch raises its own error.
    """
    local_index = index - offset
    is_local = (local_index >= 0) & (local_index < length)
    return torch.where(
        is_local, local_index, torch.where((index >= 0) & (index < n), miss, n + 1)
    ), is_local


def indices_of(x: Arg, d: int) -> Range:
    """Return the range of valid indices into dim ``d``."""
    return Range(
        x.shape[d] if x.ndim else 1,
        RuntimeError,
        f"index {{}} is out of bounds for dimension {d} with size {x.shape[d] if x.ndim else 1}",
    )


def extended(x: torch.Tensor, d: int) -> torch.Tensor:
    """Return ``x`` with one more row of zeros on dim ``d``."""
    return F.pad(x, [0, 0] * (x.ndim - 1 - d) + [0, 1])


def filled(x: torch.Tensor, d: int) -> torch.Tensor:
    """Return ``x`` with at least one row on dim ``d``, so that an index into it is valid."""
    return x if x.shape[d] else extended(x, d)


def only(mine: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(mine, y, y.new_zeros(()))


# ------------------------------------------------------------------------------- gather and scatter


@rule("gather")
def _gather(
    op: OpDescription, input: Arg, dim: int, index: Arg, *, sparse_grad: bool = False
) -> None:
    d = input.dim(dim)
    same = (
        [k != d and input.shape[k] == index.shape[k] for k in range(input.ndim)]
        if input.ndim == index.ndim
        else []
    )
    op.set(
        input,
        [("x", k) if k == d or s else None for k, s in enumerate(same)] or [None] * input.ndim,
    )
    op.set(
        index,
        ["k" if k == d else ("x", k) if s else None for k, s in enumerate(same)]
        or [None] * index.ndim,
    )
    op.out, op.reduce = [op.dims[index.index]], {("x", d): picks(input)}
    op.linear, op.carries = [frozenset([input.index])], True
    op.ranges[index.index] = indices_of(input, d)
    # Gradients of global tensors are dense, so `sparse_grad` is ignored.
    op.local = _local_lookup(d, input.shape, lambda x, i: x.gather(d, i))


@rule("index_select")
def _index_select(op: OpDescription, input: Arg, dim: int, index: Arg) -> None:
    d = input.dim(dim)
    op.set(input, [("x", k) for k in range(input.ndim)])
    op.set(index, ["k" if input.ndim else None] * index.ndim)
    op.out = [
        tuple((("k" if index.ndim else None) if k == d else ("x", k)) for k in range(input.ndim))
    ]
    op.reduce = {("x", d): picks(input)} if input.ndim else {}
    op.linear, op.carries = [frozenset([input.index])], True
    after = input.ndim - d - 1

    def select(x: torch.Tensor, i: torch.Tensor, mine: torch.Tensor | None = None) -> Any:
        return (
            x.index_select(d, i)
            if mine is None
            else (x.index_select(d, i), mine.reshape(-1, *[1] * after))
        )

    op.local = _local_lookup(d, input.shape, select, aligned=True)


def _local_lookup(
    d: int, shape: Sequence[int], pick: Callable[..., Any], *, aligned: bool = False
) -> Callable[[LocalContext], Local]:
    """Build the ``local`` of picking along dim ``d``.

    ``aligned``: ``pick`` also reshapes the mask to fit its result.
    """

    def local(split: LocalContext) -> Local:
        if not split.is_split(("x", d)):
            return lambda input, dim, index, **kwargs: pick(input, index)
        box = split.box(("x", d))

        def run(input: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            local_index, is_local = picked(index, shape[d], *box)
            y, is_local = (
                pick(filled(input, d), local_index, is_local)
                if aligned
                else (pick(filled(input, d), local_index), is_local)
            )
            return only(is_local, y)

        return run

    return local


@rule("take")
def _take(op: OpDescription, input: Arg, index: Arg) -> None:
    op.composite = _take_flat


def _take_flat(input: Any, index: Any) -> Any:
    # The index is flattened, since a single number as an index would give a view.
    try:
        return input.flatten()[index.reshape(-1)].reshape(index.shape)
    except IndexError:
        check_elements(index, input.numel())
        raise


def check_elements(index: torch.Tensor, n: int) -> None:
    """Raise torch's error for an index into the ``n`` elements of a tensor that is out of range.

    Of a split index each rank checks its local tensor."""
    if (wrong := first_outside(index, n)) is not None:
        raise IndexError(
            f"out of range: tried to access index {wrong} on a tensor of {n} elements."
        ) from None


def first_outside(index: torch.Tensor, n: int) -> int | None:
    """Return the first index, of this rank's local tensor, that is outside [-n, n)."""
    if isinstance(index, GlobalTensor):
        index = index._local
    if is_fake(index):
        return None
    wrong = index[(index < -n) | (index >= n)]
    return int(wrong.reshape(-1)[0]) if wrong.numel() else None


def is_range_error(error: Exception) -> bool:
    """Return True if a kernel has raised ``error`` because an index is out of range."""
    return "out of bounds" in str(error) or "out of range" in str(error)


@rule("take_along_dim")
def _take_along_dim(op: OpDescription, input: Arg, indices: Arg, dim: int | None = None) -> None:
    op.composite = _take_along


def _take_along(input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    d = dim % input.ndim
    if take_along_wraps() and input.shape[d]:
        indices = indices.remainder(input.shape[d])
    shape = [max(a, b) if min(a, b) else 0 for a, b in zip(input.shape, indices.shape, strict=True)]
    x = input.expand([input.shape[k] if k == d else n for k, n in enumerate(shape)])
    return x.gather(
        d, indices.expand([indices.shape[k] if k == d else n for k, n in enumerate(shape)])
    )


def _describe_write(
    op: OpDescription,
    input: Arg,
    d: int,
    index: Arg,
    src: Any,
    same: Sequence[bool],
    name: str,
    *,
    sums: bool,
) -> None:
    """Describe writing ``src`` to positions of dim ``d``.

    ``same``: dims in which all operands have the same size. ``sums``: several sources for one
    position add up, so they may be split.
    """
    op.set(input, [("x", k) if k == d or same[k] else None for k in range(input.ndim)])
    matched = not isinstance(src, Arg) or (
        src.ndim == input.ndim and (index.ndim == 1 or src.shape[d] == index.shape[d])
    )
    row = [
        "k" if k == d and matched else ("x", k) if k != d and same[k] else None
        for k in range(input.ndim)
    ]
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
    op.ranges[index.index] = indices_of(input, d)
    op.local = _local_write(d, input.shape, name)


def _local_write(d: int, shape: Sequence[int], name: str) -> Callable[[LocalContext], Local]:
    def local(split: LocalContext) -> Local:
        if not split.is_split(("x", d)):
            return lambda input, dim, index, *rest, **kwargs: getattr(input, name)(
                d, index, *rest, **kwargs
            )
        offset, length = split.box(("x", d))
        # Of these functions torch's index_fill alone counts negative indices from the end.
        from_end = name.startswith("index_fill")

        def run(
            input: torch.Tensor, dim: int, index: torch.Tensor, *rest: Any, **kwargs: Any
        ) -> torch.Tensor:
            if from_end:
                index = torch.where(index < 0, index + shape[d], index)
            # Values for other ranks go to one more row, which is dropped.
            here, _ = picked(index, shape[d], offset, length, miss=length)
            out = getattr(extended(input, d), name)(d, here, *rest, **kwargs).narrow(d, 0, length)
            return input.copy_(out) if name.endswith("_") else out.contiguous()

        return run

    return local


def _scatter_rule(name: str) -> Callable[..., None]:
    plain = name.rstrip("_")

    def describe(
        op: OpDescription,
        input: Arg,
        dim: int,
        index: Arg,
        src: Any = None,
        reduce: str | None = None,
        *,
        value: Any = None,
        include_self: bool = True,
    ) -> None:
        if not input.ndim:
            raise FormError("0-dim operands")
        d = input.dim(dim)
        operands = [index, src] if isinstance(src, Arg) and src.ndim == input.ndim else [index]
        if index.ndim != input.ndim:
            raise FormError("an index with fewer dims")
        same = [all(a.shape[k] == input.shape[k] for a in operands) for k in range(input.ndim)]
        sums = plain == "scatter_add" or (reduce == "sum" and include_self)
        _describe_write(op, input, d, index, src, same, name, sums=sums)
        if isinstance(src, Arg) and (sums or (plain == "scatter" and reduce is None)):
            op.linear = [frozenset([input.index, src.index])]

    return describe


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    each_spelling(_name, _scatter_rule)


def _index_rule(name: str) -> Callable[..., None]:
    plain = name.rstrip("_")

    def describe(
        op: OpDescription,
        input: Arg,
        dim: int,
        index: Arg,
        source: Any = None,
        *args: Any,
        value: Any = None,
        **kwargs: Any,
    ) -> None:
        if not input.ndim or not index.ndim:
            raise FormError("0-dim operands")
        d = input.dim(dim)
        same = [True] * input.ndim
        _describe_write(op, input, d, index, source, same, name, sums=plain == "index_add")
        if isinstance(source, Arg) and plain in ("index_add", "index_copy"):
            op.linear = [frozenset([input.index, source.index])]

    return describe


for _name in ("index_add", "index_copy", "index_fill", "index_reduce"):
    each_spelling(_name, _index_rule)


def _scatter_view(name: str, dims_of: Callable[..., set[int]]) -> None:
    """Declare ``select_scatter`` or one of its like.

    The result is a copy of ``input`` in which ``src`` replaces a view.
    """

    @rule(name)
    def describe(op: OpDescription, input: Arg, src: Arg, *args: Any, **kwargs: Any) -> None:
        cut = dims_of(input, *args, **kwargs)
        op.set(input, [None if k in cut else k for k in range(input.ndim)])
        remaining_dims = [k for k in range(input.ndim) if k not in cut]
        op.set(
            src,
            op.dims[input.index]
            if src.ndim == input.ndim
            else [*remaining_dims, *[None] * (src.ndim - len(remaining_dims))],
        )
        op.out, op.linear, op.carries = (
            [op.dims[input.index]],
            [frozenset([input.index, src.index])],
            True,
        )


_scatter_view("select_scatter", lambda x, dim, index: {x.dim(dim)})
_scatter_view("slice_scatter", lambda x, dim=0, *args, **kwargs: {x.dim(dim)})
_scatter_view("diagonal_scatter", lambda x, offset=0, dim1=0, dim2=1: {x.dim(dim1), x.dim(dim2)})


# -------------------------------------------------------------------------------------------- masks


def _masked_fill(op: OpDescription, input: Arg, mask: Arg, value: Any, name: str) -> None:
    every, result = align([input.shape, mask.shape])
    op.set(input, every[0])
    op.set(mask, every[1])
    op.out = [result]
    if isinstance(value, Arg):
        op.linear = [frozenset([input.index, value.index])]
    else:
        op.linear = [frozenset([input.index])]
        check_number(value, input.dtype)
        op.local = lambda split: _masked_fill_local(first_share(split), name)


def _masked_fill_local(first: bool, name: str) -> Local:
    return lambda input, mask, value: getattr(input, name)(mask, value if first else 0)


def first_share(split: LocalContext) -> bool:
    """Return True if this rank's share of a partial sum carries a number that is written.

    The number is written into one share only. The other shares get zero.
    """
    target = split.ins[0]
    where = target.placement.coordinate(split.rank) or ()
    return not any(c and e.is_partial for c, e in zip(where, target.layout, strict=False))


def check_number(number: Any, dtype: torch.dtype) -> None:
    """Raise PyTorch's error for a number that a tensor of ``dtype`` cannot hold.

    Only the rank that writes the number would raise that error, and a captured graph would raise it
    when it runs. So all ranks check a number before they write it.
    """
    if isinstance(number, (int, float, complex)):
        with outside_all_modes():
            torch.empty((), dtype=dtype, device="cpu").fill_(number)


each_spelling(
    "masked_fill",
    lambda name: lambda op, input, mask, value: _masked_fill(op, input, mask, value, name),
)


@rule("masked_scatter")
def _masked_scatter(op: OpDescription, input: Arg, mask: Arg, source: Arg) -> None:
    # The k-th true position takes the k-th element, so nothing can be split.
    op.out = [(None,) * max(input.ndim, mask.ndim)]


@rule("fill_diagonal")
def _fill_diagonal(op: OpDescription, input: Arg, fill_value: Any, wrap: bool = False) -> None:
    if isinstance(fill_value, Arg):
        raise FormError("a tensor as the value")
    check_number(fill_value, input.dtype)
    identity(op, input)
    op.linear = [frozenset([input.index])]

    def local(split: LocalContext) -> Local:
        boxes = [split.box(d) for d in range(input.ndim)]
        first, last = (
            max(offset for offset, _ in boxes),
            min(offset + length for offset, length in boxes),
        )
        rows, columns = input.shape[:2]
        # With `wrap` the diagonal restarts below each square.
        starts = range(0, rows, columns + 1) if wrap and input.ndim == 2 else range(1)

        def run(input: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
            value = fill_value if first_share(split) else 0
            if input.ndim == 2:
                for start in starts:
                    input.diagonal(boxes[0][0] - boxes[1][0] - start).fill_(value)
            elif first < last:
                input[
                    tuple(
                        torch.arange(first - offset, last - offset, device=input.device)
                        for offset, _ in boxes
                    )
                ] = value
            return input

        return run

    op.local = local


# ----------------------------------------------------------------------------------- look-up tables


@rule([F.embedding])
def _embedding(
    op: OpDescription,
    input: Arg,
    weight: Arg,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> None:
    """Describe a look-up in a table.

    Its gradient is dense, also where a sparse one is requested. The values are the same.
    """
    if max_norm is not None:
        op.compose(_embedding_of_bounded_rows)
        return
    ids = [("ids", k) for k in range(input.ndim)]
    op.out = [(*ids, "width")]
    if scale_grad_by_freq:  # all ids must be counted
        op.out = [(None,) * (input.ndim + 1)]
        op.local = lambda split: (
            lambda input, weight, *args, **kwargs: F.embedding(
                input, weight, padding_idx, scale_grad_by_freq=True
            )
        )
        return
    op.set(input, ids)
    op.set(weight, ("rows", "width"))
    op.reduce, op.linear = {"rows": "sum"}, [frozenset([weight.index])]
    n = weight.shape[0]
    padding = None if padding_idx is None else padding_idx % max(n, 1)

    def local(split: LocalContext) -> Local:
        if not split.is_split("rows"):
            return lambda input, weight, *args, **kwargs: F.embedding(input, weight, padding)
        offset, length = split.box("rows")

        def run(
            input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            local_index, is_local = picked(input, n, offset, length)
            own_padding = (
                padding - offset
                if padding is not None and offset <= padding < offset + length
                else None
            )
            return only(
                is_local.unsqueeze(-1), F.embedding(local_index, filled(weight, 0), own_padding)
            )

        return run

    op.local = local
    # On a GPU the kernel's backward writes out of bounds if the rows have no elements.
    op.local = skip_when_empty(
        op,
        alike=lambda input, weight, *args, **kwargs: F.embedding(
            input.new_zeros(1), dummy_like(weight, 1, 1)
        ),
    )


@rule([torch.embedding])
def _torch_embedding(
    op: OpDescription,
    weight: Arg,
    indices: Arg,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> None:
    op.composite = _embedding_by_name


def _embedding_by_name(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    return F.embedding(
        indices,
        weight,
        None if padding_idx < 0 else padding_idx,
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
    )


@rule([F.embedding_bag])
def _embedding_bag(
    op: OpDescription, input: Arg, weight: Arg, offsets: Any = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False,
    mode: str = "mean", *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    if max_norm is not None:
        op.compose(_embedding_bag_of_bounded_rows)
        return
    op.out = [(None, "width")]
    op.set(weight, (None, "width"))
    if input.ndim == 2 and offsets is None and not scale_grad_by_freq:
        op.out = [("bags", "width")]
        op.set(input, ("bags", None))
        for a in op.args[2:]:
            op.set(a, ("bags", None))
    op.linear = [frozenset([weight.index])] if mode != "max" else []
    op.local = skip_when_empty(op, _dense_bags)
    if input.ndim == 2 and "bags" in op.dims[input.index]:
        op.local = _bags_numbered_as_whole(op.local, input.shape[1])


def _bags_numbered_as_whole(
    of_rank: Callable[[LocalContext], Local], per_bag: int
) -> Callable[[LocalContext], Local]:
    """Name an id that is out of range by its position among all ids, of ``per_bag`` to a bag."""

    def local(split: LocalContext) -> Local:
        run = of_rank(split)
        if not split.is_split("bags"):
            return run
        offset = split.box("bags")[0] * per_bag

        def numbered(*args: Any, **kwargs: Any) -> torch.Tensor:
            try:
                return run(*args, **kwargs)  # type: ignore[no-any-return]
            except RuntimeError as error:
                text = _AT_POSITION.sub(
                    lambda m: f"Index {int(m[1]) + offset} of input", str(error)
                )
                if text == str(error):
                    raise
                raise RuntimeError(text) from None

        return numbered

    return local


#: How the kernel of F.embedding_bag names the place of an id that is out of range.
_AT_POSITION = re.compile(r"^Index (\d+) of input")


def _dense_bags(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Call F.embedding_bag for a dense gradient.

    Its argument 7 asks for a sparse gradient, and is set to False.
    """
    return F.embedding_bag(
        *args[:7],
        *([False] if len(args) > 7 else []),
        *args[8:],
        **{k: v for k, v in kwargs.items() if k != "sparse"},
    )


def _embedding_of_bounded_rows(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    with torch.no_grad():
        torch.embedding_renorm_(weight, input, max_norm, norm_type)
    return F.embedding(input, weight, padding_idx, None, norm_type, *args, **kwargs)


def _embedding_bag_of_bounded_rows(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    with torch.no_grad():
        torch.embedding_renorm_(weight, input, max_norm, norm_type)
    return F.embedding_bag(input, weight, offsets, None, norm_type, *args, **kwargs)


def _bound_rows(weight: Any, indices: Any, max_norm: float, norm_type: float) -> Any:
    """Scale the requested rows of a table, in place, to a norm of ``max_norm`` at most.

    Each rank scales the rows that it holds.
    """
    norms = torch.linalg.vector_norm(weight.detach(), norm_type, 1, keepdim=True)
    asked = torch.zeros_like(norms, dtype=torch.bool).index_fill(
        0, indices.reshape(-1).long(), True
    )
    return weight.mul_(torch.where(asked & (norms > max_norm), max_norm / (norms + 1e-7), 1.0))


def _embedding_renorm(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.composite = _bound_rows


RULES[torch.embedding_renorm_] = Rule("embedding_renorm", _embedding_renorm, inplace=True)


@rule([F.one_hot])
def _one_hot(op: OpDescription, tensor: Arg, num_classes: int = -1) -> None:
    if num_classes < 0:
        op.composite = lambda tensor, num_classes=-1: F.one_hot(tensor, int(tensor.max()) + 1)
        return
    identity(op, tensor)
    op.out = [(*range(tensor.ndim), None)]


@rule("bucketize")
def _bucketize(op: OpDescription, input: Arg, boundaries: Arg, **kwargs: Any) -> None:
    identity(op, input)


@rule("searchsorted")
def _searchsorted(op: OpDescription, sorted_sequence: Arg, input: Arg, **kwargs: Any) -> None:
    if not isinstance(input, Arg):
        raise FormError("one number to look for")
    lead = [("lead", k) for k in range(sorted_sequence.ndim - 1)]
    op.set(
        input,
        [("lead", k) for k in range(input.ndim)]
        if sorted_sequence.ndim == 1
        else [*lead, "values"],
    )
    for a in op.args:
        if a is not input:
            op.set(a, [*lead, None])
    op.out = [op.dims[input.index]]


# ----------------------------------------------------------------------- shapes that depend on data


@rule(
    [
        "nonzero",
        "argwhere",
        "masked_select",
        "nonzero_static",
        torch.unique,
        torch.Tensor.unique,
        torch.unique_consecutive,
        torch.Tensor.unique_consecutive,
    ]
)
def _depends_on_data(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.whole_call = True


_choice_by_mask = RULES[torch.where].describe


@rule("where", scalars=True)
def _where(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    place = 1 if op.function is torch.Tensor.where else 0  # x.where(condition, y)
    condition = args[place] if len(args) > place else kwargs.get("condition")
    # torch's kernels accept bytes, those for meta tensors do not.
    bytes_given = isinstance(condition, Arg) and condition.dtype == torch.uint8
    if len(args) + len(kwargs) == 1:  # where(condition): the indices of true elements
        op.composite = lambda condition: condition.nonzero(as_tuple=True)
    elif bytes_given and place:
        op.composite = lambda input, condition, *args, **kwargs: input.where(
            condition.bool(), *args, **kwargs
        )
    elif bytes_given:
        op.composite = lambda condition, *args, **kwargs: torch.where(
            condition.bool(), *args, **kwargs
        )
    else:
        _choice_by_mask(op, *args, **kwargs)
        choices = [a for a in (*args, *kwargs.values()) if a is not condition]
        if all(isinstance(a, Arg) for a in choices):  # a number would be added by every rank
            op.linear = [frozenset(a.index for a in choices)]
