"""Ops on shapes and layouts, and constants: ``flow.reshape``, ``flow.matmul``, ``flow.unpack`` ...

User code calls them inside job functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .blob import Blob, apply, cast_distribute, own_step, recording, scoped
from .distribute import Distribute
from .errors import JobError

__all__ = [
    "acc", "cast", "concat", "constant", "constant_like", "constant_scalar", "expand_dims",
    "flatten", "gather", "identity", "matmul", "one_hot", "ones",
    "ones_like", "pack", "pad", "parallel_cast", "repeat", "reshape", "reshape_like", "slice",
    "split_like", "squeeze", "stack", "transpose", "unpack", "where",
    "zeros", "zeros_like",
]  # fmt: skip


def reshape(x: Blob, shape: Sequence[int], name: str | None = None) -> Blob:
    """Return the same elements in another shape; one size may be -1.

    Raise JobError if the number of elements differs.
    """
    wanted, n = [int(s) for s in shape], math.prod(x.shape)
    if wanted.count(-1) == 1:
        rest = -math.prod(wanted)
        wanted[wanted.index(-1)] = n // rest if rest else 0
    if math.prod(wanted) != n or min(wanted, default=0) < 0:
        raise JobError(f"reshape: {list(x.shape)} has {n} elements, {list(shape)} does not")
    return apply(torch.reshape, x, tuple(wanted), op_name=name)  # type: ignore[no-any-return]


def reshape_like(x: Blob, like: Blob, name: str | None = None) -> Blob:
    """Reshape ``x`` to the shape of another blob."""
    return reshape(x, like.shape, name)


def flatten(input: Blob, start_dim: int = 0, end_dim: int = -1, name: str | None = None) -> Blob:
    """Merge dims ``start_dim`` to ``end_dim`` into one."""
    return apply(torch.flatten, input, start_dim, end_dim, op_name=name)  # type: ignore[no-any-return]


def transpose(
    a: Blob,
    perm: Sequence[int] | None = None,
    conjugate: bool = False,
    batch_axis_non_change: bool = False,
    name: str | None = None,
) -> Blob:
    """Permute the dims; without ``perm``, reverse them."""
    return apply(
        torch.permute,
        a,
        tuple(reversed(range(len(a.shape)))) if perm is None else tuple(perm),
        op_name=name,
    )  # type: ignore[no-any-return]


def expand_dims(input: Blob, axis: int, name: str | None = None) -> Blob:
    """Insert a dim of size 1."""
    return apply(torch.unsqueeze, input, axis, op_name=name)  # type: ignore[no-any-return]


def squeeze(input: Blob, axis: Sequence[int] | None = None, name: str | None = None) -> Blob:
    """Remove dims of size 1: all of them, or those in ``axis``.

    Raise JobError for a dim of another size.
    """
    dims = (
        [i for i, n in enumerate(input.shape) if n == 1]
        if axis is None
        else [a % len(input.shape) for a in axis]
    )
    if any(input.shape[d] != 1 for d in dims):
        raise JobError(f"squeeze: not all of dims {dims} of {input!r} have size 1")
    return apply(
        torch.reshape,
        input,
        tuple(n for i, n in enumerate(input.shape) if i not in dims),
        op_name=name,
    )  # type: ignore[no-any-return]


def _matmul(
    a: torch.Tensor, b: torch.Tensor, transpose_a: bool, transpose_b: bool, alpha: float
) -> torch.Tensor:
    if transpose_b and not transpose_a:
        out = F.linear(a, b) if b.dim() == 2 else torch.matmul(a, b.transpose(-1, -2))
    else:
        out = torch.matmul(
            a.transpose(-1, -2) if transpose_a else a, b.transpose(-1, -2) if transpose_b else b
        )
    return out if alpha == 1.0 else out * alpha


def matmul(
    a: Blob,
    b: Blob,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    name: str | None = None,
) -> Blob:
    """Multiply matrices (the last two dims), times ``alpha``.

    If ``transpose_b`` and each device has a shard of the rows of ``b``, each computes the same
    shard of the result's columns.
    """
    return apply(_matmul, a, b, transpose_a, transpose_b, alpha, op_name=name)  # type: ignore[no-any-return]


def _concat(*xs: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.cat(xs, axis)


def _stack(*xs: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.stack(xs, axis)


def concat(
    inputs: Sequence[Blob], axis: int = 0, max_dim_size: int | None = None, name: str | None = None
) -> Blob:
    """Concatenate blobs along a dim."""
    return apply(_concat, *inputs, axis=axis, op_name=name)  # type: ignore[no-any-return]


def stack(inputs: Sequence[Blob], axis: int = 0, name: str | None = None) -> Blob:
    """Concatenate blobs along a new dim."""
    return apply(_stack, *inputs, axis=axis, op_name=name)  # type: ignore[no-any-return]


def _slice(
    x: torch.Tensor, begin: Sequence[int | None], size: Sequence[int | None]
) -> torch.Tensor:
    for d, (b, n) in enumerate(zip(begin, size, strict=True)):
        start = 0 if b is None else b % x.shape[d] if b < 0 else b
        x = x.narrow(d, start, x.shape[d] - start if n is None or n == -1 else n)
    return x


def slice(
    x: Blob, begin: Sequence[int | None], size: Sequence[int | None], name: str | None = None
) -> Blob:
    """Return ``size[d]`` elements of every dim d, starting at ``begin[d]``.

    None in ``begin`` means from the start. None or -1 in ``size`` means all elements that follow.
    """
    return apply(_slice, x, tuple(begin), tuple(size), op_name=name)  # type: ignore[no-any-return]


def split_like(
    input: Blob, like: Sequence[Blob], axis: int = 0, name: str | None = None
) -> tuple[Blob, ...]:
    """Split a blob along a dim into pieces as long as those of ``like``."""
    pieces: list[Blob] = []
    at = 0
    for i, one in enumerate(like):
        begin: list[int | None] = [None] * len(input.shape)
        size: list[int | None] = [None] * len(input.shape)
        begin[axis], size[axis] = at, one.shape[axis]
        pieces.append(slice(input, begin, size, None if name is None else f"{name}-{i}"))
        at += one.shape[axis]
    return tuple(pieces)


def _gather(x: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    if axis == 0 and x.dim() == 2:
        return F.embedding(indices.long(), x)
    return torch.index_select(x, axis, indices.long().flatten()).reshape(
        *x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]
    )


def gather(
    params: Blob,
    indices: Blob,
    validate_indices: Any = None,
    axis: int | None = None,
    batch_dims: int = 0,
    name: str | None = None,
) -> Blob:
    """Return the entries of a dim (by default the first) at ``indices``, like rows of an embedding.

    Raise JobError if ``batch_dims`` is not 0.
    """
    if batch_dims:
        raise JobError("gather: batch_dims is not supported; use torch.gather on the blobs instead")
    return apply(_gather, params, indices, (axis or 0) % len(params.shape), op_name=name)  # type: ignore[no-any-return]


def _one_hot(
    indices: torch.Tensor, depth: int, on: float, off: float, dtype: torch.dtype
) -> torch.Tensor:
    return F.one_hot(indices.long(), depth).to(dtype) * (on - off) + off


def one_hot(
    indices: Blob,
    depth: int,
    on_value: float = 1,
    off_value: float = 0,
    axis: int = -1,
    dtype: torch.dtype | None = None,
    name: str | None = None,
) -> Blob:
    """Return ``on_value`` at each index and ``off_value`` elsewhere, along a new last dim.

    The new dim has size ``depth``. Raise JobError for another ``axis``.
    """
    if axis not in (-1, len(indices.shape)):
        raise JobError("one_hot: the new dim is the last; transpose it elsewhere")
    return apply(
        _one_hot, indices, depth, on_value, off_value, dtype or torch.float32, op_name=name
    )  # type: ignore[no-any-return]


def _pad(x: torch.Tensor, paddings: Sequence[Sequence[int]], value: float) -> torch.Tensor:
    return F.pad(x, [n for pair in reversed(paddings) for n in pair], value=value)


def pad(
    x: Blob, paddings: Sequence[Sequence[int]], constant_value: float = 0, name: str | None = None
) -> Blob:
    """Pad every dim with (before, after) elements of ``constant_value``.

    Raise JobError unless ``paddings`` has one pair for each dim.
    """
    if len(paddings) != len(x.shape):
        raise JobError(
            f"pad: a pair for each of {len(x.shape)} dims is wanted, got {len(paddings)}"
        )
    return apply(_pad, x, tuple(map(tuple, paddings)), constant_value, op_name=name)  # type: ignore[no-any-return]


def where(condition: Blob, x: Blob, y: Blob, name: str | None = None) -> Blob:
    """Return elements of ``x`` where the condition holds, and of ``y`` elsewhere."""
    return apply(_where, condition, x, y, op_name=name)  # type: ignore[no-any-return]


def _where(condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(condition.bool(), x, y)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def cast(x: Blob, dtype: torch.dtype, name: str | None = None) -> Blob:
    """Convert a blob to another dtype."""
    return x if x.dtype is dtype else apply(_cast, x, dtype, op_name=name)


def identity(x: Blob, name: str | None = None) -> Blob:
    """Return a copy of the blob."""
    return apply(torch.clone, x, op_name=name)  # type: ignore[no-any-return]


def constant(
    value: float,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] = (1,),
    name: str | None = None,
) -> Blob:
    """Return a blob with every element set to ``value``.

    ``dtype`` defaults to the job's ``default_data_type``.
    """
    kind = dtype or recording().dtype
    return own_step(
        "constant",
        value,
        tuple(shape),
        kind,
        shape=shape,
        dtype=kind,
        times=1,
        name=name,
        variable=True,
    )


def constant_scalar(
    value: float, dtype: torch.dtype | None = None, name: str | None = None
) -> Blob:
    """Return a blob of shape (1,) with this value."""
    return constant(value, dtype, (1,), name)


def constant_like(
    like: Blob, value: float, dtype: torch.dtype | None = None, name: str | None = None
) -> Blob:
    """Return a blob of the shape of ``like``, with every element set to ``value``."""
    return apply(torch.full_like, like, value, dtype=dtype or like.dtype, op_name=name)  # type: ignore[no-any-return]


def zeros(shape: Sequence[int], dtype: torch.dtype | None = None, name: str | None = None) -> Blob:
    """Return a blob of zeros."""
    return constant(0, dtype, shape, name)


def ones(shape: Sequence[int], dtype: torch.dtype | None = None, name: str | None = None) -> Blob:
    """Return a blob of ones."""
    return constant(1, dtype, shape, name)


def zeros_like(like: Blob, dtype: torch.dtype | None = None, name: str | None = None) -> Blob:
    """Return a blob of zeros in the shape of another blob."""
    return constant_like(like, 0, dtype, name)


def ones_like(like: Blob, dtype: torch.dtype | None = None, name: str | None = None) -> Blob:
    """Return a blob of ones in the shape of another blob."""
    return constant_like(like, 1, dtype, name)


def parallel_cast(
    input: Blob,
    name: str | None = None,
    distribute: Distribute | None = None,
    gradient_distribute: Distribute | None = None,
) -> Blob:
    """Cast a blob to one sbp on its placement, and its gradient to another.

    None or ``auto()`` leaves the sbp unchanged.
    """
    return cast_distribute(input, distribute, gradient_distribute, name)


def unpack(input: Blob, unpack_num: int, name: str | None = None) -> Blob:
    """Split dim 0 into ``unpack_num`` pieces that are processed one after the other.

    The ops that follow run once for each piece, until `pack` or `acc`. All pieces share the
    variables, and their gradients add up. With ``scope.placement`` this is a pipeline of
    micro-batches. Raise JobError if dim 0 does not divide by ``unpack_num``.
    """
    input = scoped(input)
    if (
        not isinstance(unpack_num, int)
        or unpack_num < 1
        or not input.shape
        or input.shape[0] % unpack_num
    ):
        raise JobError(
            f"unpack: dim 0 of {input!r} must divide by the number of pieces, {unpack_num!r}"
        )
    shape = (input.shape[0] // unpack_num, *input.shape[1:])
    return own_step(
        "unpack",
        input,
        unpack_num,
        shape=shape,
        dtype=input.dtype,
        times=input.times * unpack_num,
        name=name,
        devices=input.devices,
    )


def pack(input: Blob, pack_num: int, name: str | None = None) -> Blob:
    """Concatenate ``pack_num`` pieces along dim 0; the opposite of `unpack`.

    Raise JobError if the blob's number of pieces does not divide by ``pack_num``.
    """
    input = scoped(input)
    _check_divides("pack", input, pack_num)
    if not input.shape:
        raise JobError(f"pack: {input!r} has no dims")
    shape = (input.shape[0] * pack_num, *input.shape[1:])
    return own_step(
        "pack",
        input,
        pack_num,
        shape=shape,
        dtype=input.dtype,
        times=input.times // pack_num,
        name=name,
        devices=input.devices,
    )


def repeat(input: Blob, repeat_num: int, name: str | None = None) -> Blob:
    """Repeat a blob for each of ``repeat_num`` pieces; its gradients add up.

    Raise JobError if ``repeat_num`` is less than 1.
    """
    if not isinstance(repeat_num, int) or repeat_num < 1:
        raise JobError(f"repeat: a number of pieces, at least 1; got {repeat_num!r}")
    input = scoped(input)
    return own_step(
        "repeat",
        input,
        repeat_num,
        shape=input.shape,
        dtype=input.dtype,
        times=input.times * repeat_num,
        name=name,
        devices=input.devices,
    )


def acc(one: Blob, max_acc_num: int, name: str | None = None) -> Blob:
    """Sum ``max_acc_num`` pieces.

    Raise JobError if the blob's number of pieces does not divide by ``max_acc_num``.
    """
    one = scoped(one)
    _check_divides("acc", one, max_acc_num)
    return own_step(
        "acc",
        one,
        max_acc_num,
        shape=one.shape,
        dtype=one.dtype,
        times=one.times // max_acc_num,
        name=name,
        devices=one.devices,
    )


def _check_divides(what: str, blob: Blob, pieces: Any) -> None:
    if not isinstance(pieces, int) or pieces < 1 or blob.times % pieces:
        raise JobError(
            f"{what}: {blob!r} comes in {blob.times} piece{'s' if blob.times > 1 else ''}, which "
            f"{pieces!r} does not divide"
        )
