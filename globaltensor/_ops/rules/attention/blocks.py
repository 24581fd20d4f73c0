"""Blocks of attention scores on local tensors: some rows with some keys.

Ring attention calls these functions for a block's result and log-sum-exp. From the log-sum-exp over
all keys follow the gradients of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from ...._base import torch_private
from ...._base.user_code import warn_user

__all__ = [
    "HALF",
    "Rows",
    "Stretch",
    "block",
    "block_backward",
    "cut",
    "key_slice",
    "members",
    "merge",
    "sees",
    "shared",
    "tasks",
    "wide",
]

Stretch = tuple[int, int]  # (offset, length) among all rows, or all keys
Rows = tuple[Stretch, ...]  # the stretches that one rank has, in order

# The number of scores that are computed at a time where no kernel avoids holding them.
_SCORES: Final = 1 << 22
HALF: Final = (torch.float16, torch.bfloat16)


def sees(rows: Stretch, keys: Stretch, causal: bool) -> bool:
    """Return True if some of these rows see some of these keys."""
    return any(True for _ in _visible_regions(rows, keys, causal))


def _visible_regions(
    rows: Stretch, keys: Stretch, causal: bool
) -> Iterator[tuple[slice, slice, bool]]:
    """Yield the regions of a block of scores that are not masked -> (rows, keys, square).

    A region is a rectangle. Where ``square`` is True, it is a square in which row i sees keys up to
    i.
    """
    (a, n), (b, m) = rows, keys
    if not causal:
        if n and m:
            yield slice(0, n), slice(0, m), False
        return
    # The first row that sees a key, and the number of leading keys that all these rows see.
    first, before = (
        max(0, b - a),
        min(m, max(0, a - b)),
    )
    if first < n and before:
        yield slice(first, n), slice(0, before), False
    side = min(n - first, m - before)
    if side > 0:
        yield slice(first, first + side), slice(before, before + side), True
        if first + side < n:
            yield slice(first + side, n), slice(before, before + side), False


def _regions_of_stretches(rows: Rows, keys: Rows, causal: bool) -> list[tuple[slice, slice, bool]]:
    """Return the visible regions of a rank's rows and a block of keys.

    Positions count within these rows and this block. The regions are few and large, because kernels
    take more rows at a time.
    """
    total = sum(n for _, n in rows)
    if causal and total and rows == keys and all(a + n <= b for (a, n), (b, _) in pairwise(rows)):
        # In the order of all rows, each row sees the keys up to its own position.
        return [(slice(0, total), slice(0, total), True)]
    regions: list[tuple[slice, slice, bool]] = []
    for row_offset, row in _with_offsets(rows):
        for key_offset, key in _with_offsets(keys):
            for r, c, square in _visible_regions(row, key, causal):
                own_rows, peer_keys = (
                    slice(row_offset + r.start, row_offset + r.stop),
                    slice(key_offset + c.start, key_offset + c.stop),
                )
                before, among, was = regions[-1] if regions else (own_rows, peer_keys, True)
                if not (square or was) and among == peer_keys and before.stop == own_rows.start:
                    regions[-1] = slice(before.start, own_rows.stop), peer_keys, False
                elif not (square or was) and before == own_rows and among.stop == peer_keys.start:
                    regions[-1] = own_rows, slice(among.start, peer_keys.stop), False
                else:
                    regions.append((own_rows, peer_keys, square))
    return regions


def _with_offsets(stretches: Rows) -> Iterator[tuple[int, Stretch]]:
    """Return each stretch with its start in the concatenation of all stretches."""
    return zip(accumulate((n for _, n in stretches), initial=0), stretches, strict=False)


def shared(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]))


def _sum_to_shape(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Sum the gradient of a broadcast tensor to the tensor's shape."""
    return gradient if gradient.shape == shape else gradient.sum_to_size(shape)


def _kernel_applies(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Return True if torch's kernel, which holds no scores, can compute the block."""
    return (
        mask is None
        and torch_private.has_flash_attention(q, k, v)
        and (q.device.type == "cpu" or _kernel_is_accurate(q.device, q.dtype, q.shape[-1]))
    )


@lru_cache(maxsize=64)
def _kernel_is_accurate(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return True if the kernel's results on this device match those of ordinary functions.

    The kernel is private and differs between devices, so it is tried once on few rows.
    """
    source, scale = torch.Generator().manual_seed(0), width**-0.5
    try:
        with torch.no_grad(), torch_private.without_function_modes(), torch_private.real_tensors():
            q, k, v, grad = (
                torch.randn(1, 1, h, 16, width, generator=source).to(device, dtype)
                for h in (2, 1, 1, 2)
            )
            # A mask that hides nothing selects the path without the kernel.
            every = torch.ones(16, 16, dtype=torch.bool, device=device)
            good = True
            for square in (False, True):
                out, total = block(q, k, v, every, square, scale)
                *block_grads, _ = block_backward(
                    grad, q, k, v, every, out, total, square, scale, False
                )
                kernel_results = (
                    _kernel(q, k, v, square, scale),
                    _kernel_backward(grad, q, k, v, out.to(dtype), total, square, scale),
                )
                good &= all(
                    _nearly_equal(a, b)
                    for a, b in zip(
                        (*kernel_results[0], *kernel_results[1]),
                        (out, total, *block_grads),
                        strict=True,
                    )
                )
    except (RuntimeError, TypeError, AttributeError, ValueError):
        good = False
    if not good:
        consequence = (
            "ring attention computes tables of scores instead, which takes more memory and time"
        )
        warn_user(
            f"torch's flash attention for {dtype} on {device} does not give the expected results; "
            f"{consequence}",
        )
    return good


def _nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding in half precision."""
    return a.shape == b.shape and bool(
        (a.float() - b.float()).abs().max() <= 0.05 * (1.0 + b.float().abs().max())
    )


def _heads_share_keys(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if the query heads in a group share their keys.

    Groups are dim -4, and the several heads of a group are dim -3.
    """
    return (
        min(q.ndim, k.ndim, v.ndim) > 4
        and k.shape[-3] == v.shape[-3] == 1 < q.shape[-3]
        and k.shape[:-3] == v.shape[:-3] == q.shape[:-3]
    )


def _as_heads(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[Tensor]:
    """Reshape [..., n, e] to [b, h, n, e], as kernels require.

    ``others`` have the shape of the queries. On a GPU keys may have fewer heads. On other devices
    they are copied for each query head.
    """
    lead = shared(q, k, v)
    if q.device.type != "cpu" and _heads_share_keys(q, k, v):
        return [t.flatten(-4, -3).flatten(0, -4) for t in map(_dense, (q, k, v, *others))]
    shape = math.prod(lead[:-1]), lead[-1] if lead else 1
    return [
        t.expand(*lead, *t.shape[-2:]).reshape(*shape, *t.shape[-2:])
        for t in map(_dense, (q, k, v, *others))
    ]


def _dense(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, square: bool, scale: float) -> Tensor:
    scores = (q * scale) @ k.transpose(-1, -2)
    if square:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril().logical_not(),
            -math.inf,
        )
    if mask is not None:
        scores = (
            scores.masked_fill(mask.logical_not(), -math.inf)
            if mask.dtype is torch.bool
            else scores + mask
        )
    return scores


def _kernel(q: Tensor, k: Tensor, v: Tensor, square: bool, scale: float) -> tuple[Tensor, Tensor]:
    lead = shared(q, k, v)
    out, total = torch_private.flash_attention(*_as_heads(q, k, v), square, scale)
    return out.reshape(*lead, *out.shape[-2:]), total.reshape(*lead, q.shape[-2], 1)


def _kernel_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    square: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lead = tuple(out.shape[:-2])
    qh, kh, vh, g, o, t = _as_heads(q, k, v, grad, out, total)
    found = torch_private.flash_attention_backward(g, qh, kh, vh, o, t.squeeze(-1), square, scale)
    fewer = kh.shape[1] != qh.shape[1]
    shaped = [
        g.reshape(*(t.shape[:-2] if fewer else lead), *g.shape[-2:])
        for g, t in zip(found, (q, k, v), strict=True)
    ]
    return (
        _sum_to_shape(shaped[0], q.shape),
        _sum_to_shape(shaped[1], k.shape),
        _sum_to_shape(shaped[2], v.shape),
    )


def block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, square: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the (result, log-sum-exp [..., n, 1]) of some rows and some keys.

    The log-sum-exp is -inf where a row sees no key.
    """
    if _kernel_applies(q, k, v, mask):
        return _kernel(q, k, v, square, scale)
    q, k, v = (wide(t) for t in (q, k, v))
    scores = _scores(q, k, mask, square, scale)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    powers = (scores - top).exp()
    total = powers.sum(-1, keepdim=True)
    return powers @ v / total.masked_fill(total == 0, 1.0), total.log() + top


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    total: Tensor,
    square: bool,
    scale: float,
    of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the mask.

    ``out`` and ``total`` are the result and the log-sum-exp over all keys.
    """
    if _kernel_applies(q, k, v, mask):
        return (*_kernel_backward(grad, q, k, v, out, total, square, scale), None)
    shapes = q.shape, k.shape, v.shape
    grad, q, k, v, out = (wide(t) for t in (grad, q, k, v, out))
    # A row that sees no key contributes nothing.
    share = (
        _scores(q, k, mask, square, scale) - total.masked_fill(total == -math.inf, math.inf)
    ).exp()
    dv = share.transpose(-1, -2) @ grad
    slope = share * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    dq, dk = slope @ k * scale, slope.transpose(-1, -2) @ q * scale
    return (
        _sum_to_shape(dq, shapes[0]),
        _sum_to_shape(dk, shapes[1]),
        _sum_to_shape(dv, shapes[2]),
        _sum_to_shape(slope, mask.shape) if of_mask and mask is not None else None,
    )


def members(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> list[Callable[[Tensor], Tensor]]:
    """Return the selections for which a kernel is called, as functions from a tensor to its slice.

    There is one selection of everything, or one for each query head (dim -3). The latter serves
    where heads share their keys and the other dims provide work for each core. A single call would
    copy the keys for each head.
    """
    common = (
        _kernel_applies(q, k, v, mask)
        and q.device.type == "cpu"
        and min(q.ndim, k.ndim, v.ndim) > 3
        and k.shape[-3] == v.shape[-3] == 1 < q.shape[-3]
    )
    return (
        [partial(_select_head, i) for i in range(q.shape[-3])]
        if common and torch.get_num_threads() <= math.prod(k.shape[:-3])
        else [lambda t: t]
    )


def _select_head(i: int, t: Tensor) -> Tensor:
    return t.select(-3, i if t.shape[-3] > 1 else 0)


def wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in HALF else t


def tasks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Rows, keys: Rows, causal: bool
) -> Iterator[tuple[slice, slice, Tensor | None, bool]]:
    """Yield the work of a rank's rows with a block of keys -> (rows, keys, their mask, square).

    A kernel gets as few pieces as possible. Without a kernel, the scores of each piece are few
    enough to be held.
    """
    if _kernel_applies(q, k, v, mask):
        yield from (
            (r, c, None, square) for r, c, square in _regions_of_stretches(rows, keys, causal)
        )
        return
    row_offset = 0
    for start, length in rows:
        key_offset = 0
        for key_start, key_length in keys:
            lead = math.prod(
                shared(q, k, v)
                if mask is None
                else torch.broadcast_shapes(shared(q, k, v), mask.shape[:-2])
            )
            size = max(16, _SCORES // max(1, lead * key_length))
            for row in range(0, length, max(1, size)):
                some = (start + row, min(size, length - row))
                for r, c, square in _visible_regions(some, (key_start, key_length), causal):
                    own_rows = slice(row_offset + row + r.start, row_offset + row + r.stop)
                    part = (
                        None
                        if mask is None
                        else cut(mask, own_rows, slice(key_start + c.start, key_start + c.stop))
                    )
                    yield own_rows, slice(key_offset + c.start, key_offset + c.stop), part, square
            key_offset += key_length
        row_offset += length


def cut(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    return mask[
        ...,
        rows if mask.shape[-2] != 1 else slice(None),
        keys if mask.shape[-1] != 1 else slice(None),
    ]


def merge(out: Tensor, total: Tensor, more: Tensor, its: Tensor) -> None:
    """Merge the result of further keys into ``out`` and ``total``, in place.

    ``more`` is overwritten.
    """
    both = torch.logaddexp(total, its)
    base = both.masked_fill(both == -math.inf, 0.0)
    out.mul_((total - base).exp()).add_(more.mul_((its - base).exp()))
    total.copy_(both)


def key_slice(keys: Rows, part: slice) -> slice:
    """Return a slice of a block of keys as the same slice among all keys.

    The slice must be within one stretch.
    """
    at = 0
    for start, length in keys:
        if part.start < at + length:
            return slice(start + part.start - at, start + part.stop - at)
        at += length
    raise AssertionError(f"keys {part} of {keys}")
