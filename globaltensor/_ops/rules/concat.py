"""Rules of functions that put elements into a new tensor: repeat, join, mask by triangle.

`rules` imports this module. All these functions are linear (padding with a value is the exception).
Most pass any partial through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..._base.torch_private import at_least, meshgrid_of_list
from .notation import Arg, LocalContext, OpDescription
from .registry import rule
from .slicing import joins
from .view import each_spelling, identity, passes

# ------------------------------------------------------------------------------------------- repeat


@rule(["linspace", "logspace"])
def _linspace(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.out = [(None,)]  # the ends may be tensors


@rule("repeat_interleave")
def _repeat_interleave(
    op: OpDescription,
    input: Arg,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> None:
    if repeats is None:  # repeat_interleave(repeats): the size of the result is data
        op.whole_call = True
        return
    if not isinstance(repeats, int):
        op.composite = _repeat_each
        return
    if dim is None and input.ndim != 1:
        op.composite = lambda input, repeats, dim=None, **kwargs: input.flatten().repeat_interleave(
            repeats, 0
        )
        return
    d = 0 if dim is None else input.dim(dim)
    identity(op, input)
    op.scale[~0, d] = repeats or 1
    if not repeats:
        op.whole.add(d)
    op.local = lambda split: lambda input, *args, **kwargs: input.repeat_interleave(repeats, d)
    passes(op)


def _repeat_each(
    input: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Repeat each element as often as ``repeats`` states for it.

    Elements are picked by position, so only the counts are replicated.
    """
    x, d = (input.flatten(), 0) if dim is None else (input, dim)
    counts = repeats.expand(x.shape[d]) if repeats.numel() == 1 else repeats
    if counts.shape[0] != x.shape[d]:
        raise RuntimeError(
            f"repeats must have the same size as input along dim, but got repeats.size(0) = "
            f"{counts.shape[0]} and {x.shape[d]}"
        )
    return x.index_select(d, torch.repeat_interleave(counts))


# ------------------------------------------------------------------------------------ concatenation


@rule(["cat", "concat", "concatenate"])
def _cat(
    op: OpDescription, tensors: Sequence[Arg], dim: Any = 0, *, axis: int | None = None
) -> None:
    n = max(t.ndim for t in tensors)
    d = (dim if axis is None else axis) % n
    for t in tensors:
        # torch accepts an empty 1-dim tensor among tensors of more dims.
        op.set(t, [None if k == d else k for k in range(n)] if t.ndim == n else [None])
    op.out = [tuple(None if k == d else k for k in range(n))]
    passes(op)
    operands = [t for t in tensors if t.ndim == n]
    if any(t.is_split(d) for t in operands) and len({t.dtype for t in operands}) == 1:
        joins(op, operands, d, d)


@rule("stack")
def _stack(op: OpDescription, tensors: Sequence[Arg], dim: int = 0) -> None:
    for t in tensors:
        op.set(t, range(t.ndim))
    n = tensors[0].ndim
    d = dim % (n + 1)
    op.out = [(*range(d), None, *range(d, n))]
    passes(op)


def _declare_stack(name: str, lift: Callable[[Any], Any], dim: Callable[[Any], int]) -> None:
    def run(tensors: Sequence[Any]) -> Any:
        lifted = [lift(t) for t in tensors]
        return torch.cat(lifted, dim(lifted[0]))

    def describe(op: OpDescription, tensors: Sequence[Arg]) -> None:
        op.composite = run

    rule(name)(describe)


def _at_least(x: Any, n: int) -> Any:
    """Return ``x`` with at least ``n`` dims, as ``atleast_1d/2d/3d`` do, by reshape."""
    shape = tuple(x.shape)
    if len(shape) >= n:
        return x
    if n == 3:
        return x.reshape(*shape, 1) if len(shape) == 2 else x.reshape(1, -1 if shape else 1, 1)
    return x.reshape((1,) * (n - len(shape)) + shape)


_declare_stack("hstack", lambda t: _at_least(t, 1), lambda t: 0 if t.ndim == 1 else 1)
for _name in ("vstack", "row_stack"):
    _declare_stack(_name, lambda t: _at_least(t, 2), lambda t: 0)
_declare_stack("dstack", lambda t: _at_least(t, 3), lambda t: 2)
_declare_stack("column_stack", lambda t: t.reshape(-1, 1) if t.ndim < 2 else t, lambda t: 1)


def _at_least_rule(n: int) -> None:
    def run(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
            tensors = tuple(tensors[0])
        found = tuple(_at_least(t, n) for t in tensors)
        return found[0] if len(found) == 1 else found

    rule([getattr(torch, f"atleast_{n}d"), *at_least[n]])(
        lambda op, *tensors: setattr(op, "composite", run)
    )


for _n in (1, 2, 3):
    _at_least_rule(_n)


@rule("block_diag")
def _block_diag(op: OpDescription, *tensors: Arg) -> None:
    op.out = [(None, None)]
    passes(op)


@rule(torch.broadcast_tensors)
def _broadcast_tensors(op: OpDescription, *tensors: Arg) -> None:
    def run(*tensors: Any) -> Any:
        these = (
            tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
        )
        shape = torch.broadcast_shapes(*[t.shape for t in these])
        return tuple(t if t.shape == shape else t.expand(shape) for t in these)

    op.composite = run


@rule("dequantize")
def _dequantize(op: OpDescription, input: Any) -> None:
    """Describe a conversion to float32. Global tensors hold no quantized numbers."""
    op.composite = lambda input: input.float()


@rule("cartesian_prod")
def _cartesian_prod(op: OpDescription, *tensors: Any) -> None:
    op.compose(_product_tuples)


def _product_tuples(*tensors: Any) -> Any:
    if len(tensors) == 1 and not isinstance(tensors[0], (tuple, list)):
        return tensors[0].clone()
    grids = torch.meshgrid(*tensors, indexing="ij")
    return torch.stack([g.flatten() for g in grids], 1) if len(grids) > 1 else grids[0].flatten()


@rule("combinations")
def _combinations(
    op: OpDescription, input: Arg, r: int = 2, with_replacement: bool = False
) -> None:
    places = torch.combinations(torch.arange(input.shape[0]), r, with_replacement)
    op.compose(lambda input, *args, **kwargs: input[places])


@rule([torch.meshgrid, meshgrid_of_list])
def _meshgrid(op: OpDescription, *tensors: Arg, indexing: str | None = None) -> None:
    def run(*tensors: Any, indexing: str | None = None) -> Any:
        vectors = list(
            tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
        )
        swap = indexing == "xy" and len(vectors) > 1
        if swap:
            vectors[:2] = vectors[1::-1]
        for t in vectors:
            if t.dim() > 1:  # torch's kernel raises this, but its kernel for meta tensors does not
                raise RuntimeError(
                    f"torch.meshgrid: Expected 0D or 1D tensor in the tensor list but got shape "
                    f"{list(t.shape)}"
                )
        sizes = [t.numel() for t in vectors]
        grids = [
            t.reshape([n if k == i else 1 for k in range(len(sizes))]).expand(sizes)
            for i, (t, n) in enumerate(zip(vectors, sizes, strict=True))
        ]
        if swap:
            grids[:2] = grids[1::-1]
        return tuple(grids)

    op.compose(run)


# ---------------------------------------------------------------------------------------- diagonals


@rule("diag")
def _diag(op: OpDescription, input: Arg, diagonal: int = 0) -> None:
    if input.ndim == 2:
        op.compose(lambda input, diagonal=0: input.diagonal(diagonal).clone())
        return
    passes(op)
    if diagonal:
        op.out = [(None, None)]
        return
    op.set(input, ("i",))
    op.out = [("i", None)]

    def local(split: LocalContext) -> Callable[..., torch.Tensor]:
        offset, length = split.box("i")
        return lambda input, *args, **kwargs: F.pad(
            torch.diag(input), (offset, op.args[0].shape[0] - offset - length)
        )

    op.local = local


rule("diagflat")(
    lambda op, *args, **kwargs: op.compose(lambda input, offset=0: input.flatten().diag(offset))
)


@rule("diag_embed")
def _diag_embed(
    op: OpDescription, input: Arg, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> None:
    n = input.ndim + 1
    new = {dim1 % n, dim2 % n}
    op.set(input, [*range(input.ndim - 1), None])
    rest = iter(range(input.ndim - 1))
    op.out = [tuple(None if k in new else next(rest) for k in range(n))]
    passes(op)


# --------------------------------------------------------------------------- triangles and shuffles


def _triangle(name: str) -> Callable[..., None]:
    def describe(op: OpDescription, input: Arg, diagonal: int = 0) -> None:
        identity(op, input)
        passes(op)
        rows, columns = input.ndim - 2, input.ndim - 1

        def local(split: LocalContext) -> Callable[..., torch.Tensor]:
            shifted = diagonal + split.box(rows)[0] - split.box(columns)[0]
            return lambda input, *args, **kwargs: getattr(input, name)(shifted)

        op.local = local

    return describe


each_spelling("tril", _triangle)
each_spelling("triu", _triangle)


@rule([F.pixel_shuffle])
def _pixel_shuffle(op: OpDescription, input: Arg, upscale_factor: int) -> None:
    identity(op, input)
    n, r = input.ndim, upscale_factor
    op.scale = {(0, n - 3): r * r, (~0, n - 2): r, (~0, n - 1): r}
    passes(op)
    op.local = _unless_empty(lambda input: F.pixel_shuffle(input, r))


@rule([F.pixel_unshuffle])
def _pixel_unshuffle(op: OpDescription, input: Arg, downscale_factor: int) -> None:
    identity(op, input)
    n, r = input.ndim, downscale_factor
    op.scale = {(~0, n - 3): r * r, (0, n - 2): r, (0, n - 1): r}
    passes(op)
    op.local = _unless_empty(lambda input: F.pixel_unshuffle(input, r))


def _unless_empty(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[LocalContext], Callable[..., torch.Tensor]]:
    """Build a ``local`` for functions that torch computes wrongly on empty tensors.

    The backward of pixel_shuffle is one.
    """
    return lambda split: (
        lambda input, *args, **kwargs: (
            function(input) if input.numel() else input.reshape(split.out_shape())
        )
    )


@rule([F.channel_shuffle])
def _channel_shuffle(op: OpDescription, input: Arg, groups: int) -> None:
    op.set(input, [None if k == 1 else k for k in range(input.ndim)])
    op.out = [op.dims[0]]
    passes(op)
