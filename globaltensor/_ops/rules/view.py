"""Rules of views, which show elements of a tensor in another shape or order, and of casts.

`rules` imports this module, and other families use its helpers.

These functions are linear and pass any partial through, as the same elements come out. A view stays
a view: the local tensor is viewed by the same function.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..._base.user_code import without_warnings
from ..._tensor.strides import by_rows, differ
from ..._tensor.view_tracking import RemoteView
from ...errors import FormError
from ...sharding.sbp import broadcast
from .notation import Arg, LocalContext, OpDescription
from .registry import RULES, Rule, rule, torch_functions_named
from .slicing import cut, stays_split, takes

__all__ = ["each_spelling", "groups", "identity", "on_meta", "own", "passes", "regroup"]


def passes(op: OpDescription) -> None:
    """Let partials of any kind pass through, from all operands together.

    The elements of all operands must come out unchanged.
    """
    op.linear, op.carries = [frozenset(range(len(op.args)))], True


def identity(op: OpDescription, x: Arg) -> None:
    """Describe one result with the dims of ``x``."""
    op.set(x, range(x.ndim))
    op.out = [op.dims[x.index]]


def each_spelling(name: str, describe_for: Callable[[str], Callable[..., None]]) -> None:
    """Declare a rule for each spelling of ``name``, for local functions that may write in place.

    ``describe_for`` gets the method's name, which ends in ``_`` for the in-place spelling.
    """
    for f, inplace in torch_functions_named(name):
        RULES[f] = Rule(name, describe_for(name + "_" * inplace), inplace=inplace)


def on_meta(
    x: Arg,
    name: str,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """Return the result of the method ``name`` on a meta tensor like ``x``.

    torch itself thereby resolves -1, negative dims and varargs.
    """
    with without_warnings():
        return getattr(
            torch.empty(x.shape if shape is None else tuple(shape), dtype=x.dtype, device="meta"),
            name,
        )(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------ reshape


def groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Cut two shapes of one tensor into runs of dims of equal product.

    Yield (from, to) in the old shape and (from, to) in the new one.

    >>> list(groups((2, 6, 5), (12, 1, 5)))
    [(0, 2, 0, 1), (2, 3, 2, 3)]
    """
    if 0 in old:
        yield from _groups_of_nothing(old, new)
        return
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and (old[i] == 1) and not (j < len(new) and new[j] == 1):
            i += 1
        elif j < len(new) and new[j] == 1 and not (i < len(old) and old[i] == 1):
            j += 1
        else:
            a, b, p, q = i, j, old[i], new[j]
            i, j = i + 1, j + 1
            while p != q:
                if p < q:
                    p, i = p * old[i], i + 1
                else:
                    q, j = q * new[j], j + 1
            yield a, i, b, j


def _groups_of_nothing(
    old: Sequence[int], new: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Pair the dims of two shapes of a tensor without elements.

    Products are all zero, so dims that are equal from either end count as the same dims.
    """
    front = back = 0
    while front < min(len(old), len(new)) and old[front] == new[front]:
        front += 1
    while back < min(len(old), len(new)) - front and old[-1 - back] == new[-1 - back]:
        back += 1
    yield from ((d, d + 1, d, d + 1) for d in range(front))
    yield from (
        (len(old) - d, len(old) - d + 1, len(new) - d, len(new) - d + 1) for d in range(back, 0, -1)
    )


def regroup(op: OpDescription, x: Arg, shape: Sequence[int]) -> None:
    """Describe ``x`` viewed in another shape.

    The leading dim of each group may be split, in units that end at an element of both shapes.
    """
    dims: list[Any] = [None] * x.ndim
    out: list[Any] = [None] * len(shape)
    for a, b, c, d in groups(x.shape, shape):
        inner, outer = math.prod(x.shape[a + 1 : b]), math.prod(shape[c + 1 : d])
        unit = math.lcm(inner, outer) or 1
        dims[a] = out[c] = ("group", a)
        if inner and outer:
            op.scale[x.index, a], op.scale[~0, c] = unit // inner, unit // outer
    op.set(x, dims)
    op.out, op.view = [tuple(out)], True
    passes(op)


def _reshape_to(
    method: Callable[..., torch.Tensor], shape: tuple[int, ...]
) -> Callable[..., torch.Tensor]:
    return lambda input, *args, **kwargs: method(input, shape)


def _reshaped(name: str, by: str = "reshape") -> Callable[..., None]:
    method = getattr(torch.Tensor, by)

    def describe(op: OpDescription, input: Arg, *args: Any, **kwargs: Any) -> None:
        result = on_meta(input, name, args, kwargs)
        if result.dtype != input.dtype:
            _view_as_dtype(op, input, result)
            return
        regroup(op, input, result.shape)
        if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
            # torch cuts a view in a dtype from the graph, also in the dtype that the tensor has
            op.local = lambda split: lambda input, *args, **kwargs: input.detach()
            return
        op.local = lambda split: _reshape_to(method, split.out_shape())

    return describe


def _local_view_as_dtype(
    split: LocalContext, dtype: torch.dtype
) -> Callable[..., torch.Tensor] | None:
    """Return the function that reads a local tensor as another dtype, if it is not torch's own.

    torch checks the strides of an empty local tensor too, and the stride of a dim of size 1. Such
    strides may differ by rank where local shapes do.
    """
    shape = split.out_shape()
    if 0 in shape:
        return lambda input, *args, **kwargs: input.new_empty(shape, dtype=dtype)
    if not differ(split.ins[0].plain):
        return None

    def view(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = by_rows(input.shape)
        if input.is_contiguous() and input.stride() != rows:
            input = input.as_strided(input.shape, rows)
        return input.view(dtype)

    return view


def _view_as_dtype(op: OpDescription, x: Arg, result: torch.Tensor) -> None:
    """Describe the same bytes read as another dtype, which shrinks or grows the last dim."""
    identity(op, x)
    op.view = True
    op.local = lambda split: _local_view_as_dtype(split, result.dtype)
    if x.ndim and x.shape[-1] != result.shape[-1]:
        wide, narrow = (
            max(x.dtype.itemsize, result.dtype.itemsize),
            min(x.dtype.itemsize, result.dtype.itemsize),
        )
        op.scale[0 if x.dtype.itemsize < result.dtype.itemsize else ~0, x.ndim - 1] = wide // narrow


rule("view")(_reshaped("view", by="view"))
for _name in ("reshape", "flatten"):
    rule(_name)(_reshaped(_name))
rule("unflatten")(_reshaped("unflatten", by="view"))
# It also copies what reshape can view but is not contiguous: every other element of a vector.
rule("ravel")(lambda op, input: op.compose(lambda input: input.contiguous().reshape(-1)))


def _declare_like(name: str, function: Callable[[Any, Any], Any]) -> None:
    # Only the other tensor's shape or dtype matters, so its layout must not.
    rule(name)(lambda op, input, other: setattr(op, "composite", function))


_declare_like("view_as", lambda input, other: input.view(other.shape))
_declare_like("reshape_as", lambda input, other: input.reshape(other.shape))
_declare_like("expand_as", lambda input, other: input.expand(other.shape))
_declare_like("type_as", lambda input, other: input.to(other.dtype))


# ------------------------------------------------------------------------------------ permuted dims


def _permuted(name: str) -> Callable[..., None]:
    def describe(op: OpDescription, input: Arg, *args: Any, **kwargs: Any) -> None:
        identity(op, input)
        # Sizes 0, 1, 2, ... show where each dim went.
        order = on_meta(input, name, args, kwargs, shape=range(input.ndim)).shape
        op.out, op.view = [tuple(order)], True
        passes(op)

    return describe


for _name in [
    "transpose",
    "swapaxes",
    "swapdims",
    "t",
    "permute",
    "movedim",
    "moveaxis",
    "adjoint",
]:
    rule(_name)(_permuted(_name))


def _getter(name: str) -> None:
    function = getattr(torch.Tensor, name).__get__

    def describe(op: OpDescription, x: Arg) -> None:
        identity(op, x)
        dims = list(range(x.ndim))
        if name in ("mT", "mH"):
            dims[-2:] = dims[:-3:-1]
        else:
            dims.reverse()
        op.out, op.view = [tuple(dims)], True
        passes(op)

    RULES[function] = Rule(name, describe)


for _name in ("T", "mT", "H", "mH"):
    _getter(_name)


def _squeeze(op: OpDescription, input: Arg, dim: Any, more: tuple[int, ...], name: str) -> None:
    named = (
        range(input.ndim)
        if dim is None
        else dim
        if isinstance(dim, (tuple, list))
        else (dim, *more)
    )
    gone = {input.dim(d) for d in named} & {d for d, n in enumerate(input.shape) if n == 1}
    op.set(input, [None if d in gone else d for d in range(input.ndim)])
    op.out, op.view = [tuple(d for d in range(input.ndim) if d not in gone)], True
    passes(op)
    # A local tensor may have size 1 in dims where the global tensor has more.
    op.local = lambda split: lambda input, *args, **kwargs: getattr(input, name)(tuple(gone))


each_spelling(
    "squeeze", lambda name: lambda op, input, dim=None, *more: _squeeze(op, input, dim, more, name)
)


@rule("unsqueeze")
def _unsqueeze(op: OpDescription, input: Arg, dim: int) -> None:
    identity(op, input)
    d = dim % (input.ndim + 1)
    op.out, op.view = [(*range(d), None, *range(d, input.ndim))], True
    passes(op)


@rule(["expand", "broadcast_to"])
def _expand(op: OpDescription, input: Arg, *args: Any, **kwargs: Any) -> None:
    shape = on_meta(input, "expand", args or (kwargs["size"],)).shape
    lead = len(shape) - input.ndim
    op.set(input, [d if n == shape[lead + d] else None for d, n in enumerate(input.shape)])
    op.out, op.view = [((None,) * lead + op.dims[input.index])], True
    passes(op)
    op.local = lambda split: lambda input, *args, **kwargs: input.expand(split.out_shape())


@rule(["contiguous", "clone"])
def _describe_unchanged(op: OpDescription, input: Arg, *args: Any, **kwargs: Any) -> None:
    identity(op, input)
    passes(op)


@rule([torch.Tensor.detach, torch.detach])
def _detach(op: OpDescription, input: Arg) -> None:
    _describe_unchanged(op, input)
    op.view = True


# ---------------------------------------------------------------------------------- split and chunk


def _split_rule(name: str, dim_of: Callable[..., int]) -> Callable[..., None]:
    """Return the rule of a function that cuts ``x`` along one dim into several results.

    The dim is not split, or each result is split along it in its own size.
    """

    def describe(op: OpDescription, input: Arg, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(a, Arg) for a in (*args, *kwargs.values())):  # the cut positions are data
            op.composite = lambda input, *args, **kwargs: getattr(input, name)(
                *map(_to_number, args), **{k: _to_number(a) for k, a in kwargs.items()}
            )
            return
        results = on_meta(input, name, args, kwargs)
        d = dim_of(input, *args, **kwargs)
        runs = _consecutive_runs([r.shape[d] for r in results]) if name != "unbind" else []
        over = bool(runs) and stays_split(input, d, runs)
        op.set(input, [None if k == d and not over else k for k in range(input.ndim)])
        one = op.dims[input.index]
        op.out = [tuple(one[k] for k in range(input.ndim) if name != "unbind" or k != d)] * len(
            results
        )
        op.view = True
        passes(op)
        if over:
            op.exchanges = {d}
            takes(op, {d: (d, runs)})
            op.local = lambda split: _all_of(cut(split, d, d, runs))

    return describe


def _consecutive_runs(sizes: Sequence[int]) -> list[range]:
    """Return consecutive runs of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _first_of(parts: Callable[[torch.Tensor], Any] | None) -> Callable[..., Any] | None:
    return None if parts is None else lambda input, *args, **kwargs: parts(input)[0]


def _all_of(parts: Callable[[torch.Tensor], Any] | None) -> Callable[..., Any] | None:
    return None if parts is None else lambda input, *args, **kwargs: parts(input)


def _to_number(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _dim_after(x: Arg, sizes: Any = None, dim: int = 0, **kwargs: Any) -> int:
    return x.dim(dim)


for _name in ["split", "split_with_sizes", "chunk", "tensor_split"]:
    rule(_name)(_split_rule(_name, _dim_after))
rule("unbind")(_split_rule("unbind", lambda x, dim=0: x.dim(dim)))
rule("hsplit")(_split_rule("hsplit", lambda x, *a, **k: 0 if x.ndim == 1 else 1))
rule("vsplit")(_split_rule("vsplit", lambda x, *a, **k: 0))
rule("dsplit")(_split_rule("dsplit", lambda x, *a, **k: 2))


@rule("narrow")
def _narrow(op: OpDescription, input: Arg, dim: int, start: int, length: int) -> None:
    if isinstance(start, Arg):
        raise FormError("the start is data")
    d = input.dim(dim)
    whole_dim, runs = (
        input.shape[d] == length,
        [range(start % max(input.shape[d], 1), start % max(input.shape[d], 1) + length)],
    )
    over = not whole_dim and stays_split(input, d, runs)
    op.set(input, [None if k == d and not whole_dim and not over else k for k in range(input.ndim)])
    op.out, op.view = [op.dims[input.index]], True
    passes(op)
    if whole_dim:
        op.local = lambda split: lambda input, *args, **kwargs: input.view(input.shape)
    elif over:
        op.exchanges = {d}
        takes(op, {d: (d, runs)})
        op.local = lambda split: _first_of(cut(split, d, d, runs))


#: The dtypes of which torch computes no sum.
_NOT_SUMMED = frozenset((
    torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
))  # fmt: skip


def own(x: torch.Tensor, d: int, at: int) -> torch.Tensor:
    """Return element ``at`` of dim ``d``, with the dim kept, or zeros where ``at`` is outside.

    The result always depends on ``x`` in the autograd graph, as its backward may communicate.
    """
    here = 0 <= at < x.shape[d]
    element = x.narrow(d, at if here else 0, int(here))
    if x.dtype not in _NOT_SUMMED:
        return element.sum(d, keepdim=True, dtype=x.dtype)
    missing = [int(not here) if k == d else n for k, n in enumerate(x.shape)]
    return torch.cat([element, x.new_zeros(missing)], d)


def reduction_of_picks(dtype: torch.dtype) -> str:
    """Return the reduction that joins the element of one rank with the zeros of the others.

    The zero of float8_e8m0fnu is its smallest number, which a sum would add.
    """
    return "max" if dtype in (torch.bool, torch.float8_e8m0fnu) else "sum"


@rule("select")
def _select(op: OpDescription, input: Arg, dim: int, index: int) -> None:
    if isinstance(index, Arg):
        raise FormError("the index is data")
    d = input.dim(dim)
    identity(op, input)
    op.out, op.view = [tuple(k for k in range(input.ndim) if k != d)], True
    # The rank that has the element contributes it, and the other ranks contribute zeros.
    op.reduce = {d: reduction_of_picks(input.dtype)}
    passes(op)
    at = index % max(input.shape[d], 1)

    def local(split: LocalContext) -> Callable[..., torch.Tensor]:
        if not split.is_split(d):
            return lambda input, *args, **kwargs: input.select(d, at)
        offset, _ = split.box(d)
        return lambda input, *args, **kwargs: own(input, d, at - offset).squeeze(d)

    op.local = local


def _diagonals(op: OpDescription, input: Arg, offset: int, first: int, second: int) -> None:
    rows, columns = input.dim(first), input.dim(second)
    n, m = input.shape[rows], input.shape[columns]
    # A dim that the diagonal runs through from end to end becomes the diagonal's dim. The diagonal
    # is split as that dim is.
    along = [
        d for d, whole in ((rows, 0 <= offset <= m - n), (columns, m - n <= offset <= 0)) if whole
    ]
    along = [d for d in along if input.is_split(d)] or along
    gone = {rows, columns} - set(along[:1])
    op.set(input, [None if k in gone else k for k in range(input.ndim)])
    op.out, op.view = (
        [
            (
                *[k for k in range(input.ndim) if k not in (rows, columns)],
                along[0] if along else None,
            )
        ],
        True,
    )
    passes(op)

    def local(split: LocalContext) -> Callable[..., torch.Tensor]:
        shifted = offset + (
            split.box(rows)[0] if along[:1] == [rows] else -split.box(columns)[0] if along else 0
        )
        return lambda input, *args, **kwargs: input.diagonal(shifted, rows, columns)

    op.local = local


rule("diagonal")(
    lambda op, input, offset=0, dim1=0, dim2=1: _diagonals(op, input, offset, dim1, dim2)
)
RULES[torch.linalg.diagonal] = Rule(
    "linalg.diagonal",
    lambda op, A, *, offset=0, dim1=-2, dim2=-1: _diagonals(op, A, offset, dim1, dim2),
)


@rule(["as_strided", "as_strided_copy"])
def _as_strided(
    op: OpDescription, input: Arg, size: Sequence[int], *args: Any, **kwargs: Any
) -> None:
    op.out, op.view = [(None,) * len(size)], op.function is not torch.as_strided_copy
    passes(op)
    if any(e.is_split for e in input.spec.layout):
        op.composite = _strided(op.function, op.view)


@rule("as_strided_scatter")
def _as_strided_scatter(op: OpDescription, input: Arg, src: Arg, *args: Any, **kwargs: Any) -> None:
    op.out = [(None,) * input.ndim]
    passes(op)
    if any(e.is_split for e in input.spec.layout):
        op.composite = _strided(op.function, False)


def _strided(function: Callable[..., Any], view: bool) -> Callable[..., Any]:
    """Wrap a function that addresses positions in memory.

    The wrapper replicates the tensor and arranges it in the memory order that ``stride()`` reports.
    """

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        strides = input.stride()
        order = sorted(range(input.dim()), key=lambda d: (-strides[d], d))

        def taken(source: Any) -> Any:
            whole = (
                source.to_global(sbp=[broadcast] * source.placement.axes)
                if source.is_global
                else source
            )
            for d in order:
                if not strides[d]:  # expanded
                    whole = whole.narrow(d, 0, 1)
            laid = (
                whole.permute(order)
                .contiguous()
                .permute([order.index(d) for d in range(source.dim())])
                .expand(source.shape)
            )
            return function(laid, *args, **kwargs)

        out = taken(input)
        return RemoteView.of(out._local, out._spec, input, taken) if view else out

    return run


# ---------------------------------------------------------------------------------- copies of views


def _declare_copy(name: str, view: Callable[..., Any], *, copies: bool = True) -> None:
    """Declare ``name`` as a view whose elements are copied into new tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        seen = view(*args, **kwargs)
        if not copies:
            return seen
        return seen.clone() if isinstance(seen, torch.Tensor) else tuple(t.clone() for t in seen)

    rule(name)(lambda op, *args, **kwargs: op.compose(run))


def _sliced(
    input: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return input[(*[slice(None)] * (dim % input.ndim), slice(start, end, step))]


def _expanded(input: Any, size: Sequence[int], *, implicit: bool = False) -> Any:
    return input.expand(size)


for _name in (
    "diagonal", "narrow", "permute", "select", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view", "detach",
):  # fmt: skip
    _declare_copy(_name + "_copy", getattr(torch.Tensor, _name))
_declare_copy("alias_copy", lambda input: input)
_declare_copy("expand_copy", _expanded)
_declare_copy("slice_copy", _sliced)
for _name in ("view_as_real", "view_as_complex"):
    _declare_copy(_name + "_copy", getattr(torch, _name))
# By torch's contract, callers do not write into the results of these functions.
for _name in (
    "chunk",
    "split",
    "split_with_sizes",
):
    _declare_copy("unsafe_" + _name, getattr(torch.Tensor, _name), copies=False)
rule([torch.ops.aten.slice.Tensor])(lambda op, *args, **kwargs: op.compose(_sliced))


# -------------------------------------------------------------------------------------------- casts

CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16,
    "bfloat16": torch.bfloat16, "int": torch.int32, "long": torch.int64,
    "short": torch.int16, "char": torch.int8, "byte": torch.uint8, "bool": torch.bool,
    "cfloat": torch.complex64, "cdouble": torch.complex128,
    "chalf": torch.complex32,
}  # fmt: skip


def _cast(op: OpDescription, x: Arg, to: torch.dtype) -> None:
    identity(op, x)
    if x.dtype == to:
        passes(op)
    elif (
        (x.dtype.is_floating_point or x.dtype.is_complex)
        and (to.is_floating_point or to.is_complex)
        and (to.is_complex or not x.dtype.is_complex)
    ):
        op.linear = [frozenset([0])]


for _name, _to in CASTS.items():
    rule([getattr(torch.Tensor, _name)])(lambda op, input, to=_to, **kwargs: _cast(op, input, to))


@rule([torch.Tensor.to, torch.Tensor.type])
def _to(op: OpDescription, input: Arg, *args: Any, **kwargs: Any) -> None:
    if len(op.args) > 1:
        op.composite = _to_other
        return
    wanted = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    named = [a.rpartition(".")[2] for a in args if isinstance(a, str) and a.endswith("Tensor")]
    if named:
        wanted = [CASTS[named[0].removesuffix("Tensor").lower()]]
    _cast(op, input, wanted[0] if wanted else input.dtype)


def _to_other(input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
    return input.to(other.dtype, *args, **kwargs)
