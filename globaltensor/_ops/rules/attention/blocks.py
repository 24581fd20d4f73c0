"""Blocks of attention scores: some rows with some keys, their result and log-sum-exp, and gradients
from the log-sum-exp of all keys. On local tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from ...._base import torch_private

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
Rows = tuple[Stretch, ...]  # the stretches that one rank has, one after the other

_SCORES: Final = 1 << 22  # scores computed at a time where no kernel does without holding them
HALF: Final = (torch.float16, torch.bfloat16)


def sees(rows: Stretch, keys: Stretch, causal: bool) -> bool:
    """Whether some of these rows sees some of these keys."""
    return any(True for _ in _visible(rows, keys, causal))


def _visible(rows: Stretch, keys: Stretch, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """What of a block of scores is not masked, as rectangles and squares -> (rows, keys, whether it
    is a square of which row i sees keys up to i)."""
    (a, n), (b, m) = rows, keys
    if not causal:
        if n and m:
            yield slice(0, n), slice(0, m), False
        return
    first, before = (
        max(0, b - a),
        min(m, max(0, a - b)),
    )  # the first row that sees a key; keys before it, which all these rows see
    if first < n and before:
        yield slice(first, n), slice(0, before), False
    side = min(n - first, m - before)
    if side > 0:
        yield slice(first, first + side), slice(before, before + side), True
        if first + side < n:
            yield slice(first + side, n), slice(before, before + side), False


def _together(rows: Rows, keys: Rows, causal: bool) -> list[tuple[slice, slice, bool]]:
    """What is visible of a rank's rows and a block of keys, by where they lie there, in few large
    rectangles and squares: kernels take more rows at a time."""
    total = sum(n for _, n in rows)
    if causal and total and rows == keys and all(a + n <= b for (a, n), (b, _) in pairwise(rows)):
        return [
            (slice(0, total), slice(0, total), True)
        ]  # in the order of the whole, each row sees the keys up to itself
    found: list[tuple[slice, slice, bool]] = []
    for at, row in _placed(rows):
        for here, key in _placed(keys):
            for r, c, square in _visible(row, key, causal):
                mine, theirs = (
                    slice(at + r.start, at + r.stop),
                    slice(here + c.start, here + c.stop),
                )
                before, among, was = found[-1] if found else (mine, theirs, True)
                if not (square or was) and among == theirs and before.stop == mine.start:
                    found[-1] = slice(before.start, mine.stop), theirs, False
                elif not (square or was) and before == mine and among.stop == theirs.start:
                    found[-1] = mine, slice(among.start, theirs.stop), False
                else:
                    found.append((mine, theirs, square))
    return found


def _placed(stretches: Rows) -> Iterator[tuple[int, Stretch]]:
    """Each stretch and where it lies among them."""
    return zip(accumulate((n for _, n in stretches), initial=0), stretches, strict=False)


def shared(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]))


def _fitted(gradient: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of a tensor that was broadcast."""
    return gradient if gradient.shape == shape else gradient.sum_to_size(shape)


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's kernel, which holds no scores, can do it."""
    return (
        mask is None
        and torch_private.has_flash_attention(q, k, v)
        and (q.device.type == "cpu" or _trusted(q.device, q.dtype, q.shape[-1]))
    )


@lru_cache(maxsize=64)
def _trusted(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernel gives on this device what ordinary functions give, tried once on few rows:
    it is a private one, which each device has its own of."""
    source, scale = torch.Generator().manual_seed(0), width**-0.5
    try:
        with torch.no_grad(), torch_private.without_function_modes(), torch_private.real_tensors():
            q, k, v, grad = (
                torch.randn(1, 1, h, 16, width, generator=source).to(device, dtype)
                for h in (2, 1, 1, 2)
            )
            every = torch.ones(
                16, 16, dtype=torch.bool, device=device
            )  # a mask that hides nothing: the other way
            good = True
            for square in (False, True):
                out, total = block(q, k, v, every, square, scale)
                *found, _ = block_backward(grad, q, k, v, every, out, total, square, scale, False)
                given = (
                    _kernel(q, k, v, square, scale),
                    _kernel_backward(grad, q, k, v, out.to(dtype), total, square, scale),
                )
                good &= all(
                    _near(a, b)
                    for a, b in zip((*given[0], *given[1]), (out, total, *found), strict=True)
                )
    except (RuntimeError, TypeError, AttributeError, ValueError):
        good = False
    if not good:
        told = "ring attention computes scores in tables there, which takes more memory and time"
        warnings.warn(
            f"torch's flash attention for {dtype} on {device} does not give what is known of it; "
            f"{told}",
            stacklevel=2,
        )
    return good


def _near(a: Tensor, b: Tensor) -> bool:
    """Alike but for rounding in half precision."""
    return a.shape == b.shape and bool(
        (a.float() - b.float()).abs().max() <= 0.05 * (1.0 + b.float().abs().max())
    )


def _in_common(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether heads of queries (dim -3), several in each group of dim -4, have their keys in
    common."""
    return (
        min(q.ndim, k.ndim, v.ndim) > 4
        and k.shape[-3] == v.shape[-3] == 1 < q.shape[-3]
        and k.shape[:-3] == v.shape[:-3] == q.shape[:-3]
    )


def _as_heads(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[Tensor]:
    """[..., n, e] -> [b, h, n, e], as a kernel takes them; ``others`` are like the queries. On a
    GPU keys may have fewer heads, elsewhere they are copied."""
    lead = shared(q, k, v)
    if q.device.type != "cpu" and _in_common(q, k, v):
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
    return _fitted(shaped[0], q.shape), _fitted(shaped[1], k.shape), _fitted(shaped[2], v.shape)


def block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, square: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp [..., n, 1]) of some rows and some keys; -inf where a row sees no
    key."""
    if _by_kernel(q, k, v, mask):
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
    """Gradients of q, k, v and the mask; ``out`` and ``total`` are those of all keys."""
    if _by_kernel(q, k, v, mask):
        return (*_kernel_backward(grad, q, k, v, out, total, square, scale), None)
    shapes = q.shape, k.shape, v.shape
    grad, q, k, v, out = (wide(t) for t in (grad, q, k, v, out))
    # A row that sees no key has no share in anything.
    share = (
        _scores(q, k, mask, square, scale) - total.masked_fill(total == -math.inf, math.inf)
    ).exp()
    dv = share.transpose(-1, -2) @ grad
    slope = share * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    dq, dk = slope @ k * scale, slope.transpose(-1, -2) @ q * scale
    return (
        _fitted(dq, shapes[0]),
        _fitted(dk, shapes[1]),
        _fitted(dv, shapes[2]),
        _fitted(slope, mask.shape) if of_mask and mask is not None else None,
    )


def members(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> list[Callable[[Tensor], Tensor]]:
    """What a kernel is called for -> functions from a tensor to its part: all at once, or one by
    one the heads (dim -3) that have their keys in common, where there are others for each core: a
    kernel would be given the keys once for each of them."""
    common = (
        _by_kernel(q, k, v, mask)
        and q.device.type == "cpu"
        and min(q.ndim, k.ndim, v.ndim) > 3
        and k.shape[-3] == v.shape[-3] == 1 < q.shape[-3]
    )
    return (
        [partial(_member, i) for i in range(q.shape[-3])]
        if common and torch.get_num_threads() <= math.prod(k.shape[:-3])
        else [lambda t: t]
    )


def _member(i: int, t: Tensor) -> Tensor:
    return t.select(-3, i if t.shape[-3] > 1 else 0)


def wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in HALF else t


def tasks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Rows, keys: Rows, causal: bool
) -> Iterator[tuple[slice, slice, Tensor | None, bool]]:
    """The work of a rank's rows with a block of keys -> (rows, keys, their mask, square): as few
    pieces as can be for a kernel, else such whose scores may be held."""
    if _by_kernel(q, k, v, mask):
        yield from ((r, c, None, square) for r, c, square in _together(rows, keys, causal))
        return
    at = 0
    for start, length in rows:
        here = 0
        for key_start, key_length in keys:
            lead = math.prod(
                shared(q, k, v)
                if mask is None
                else torch.broadcast_shapes(shared(q, k, v), mask.shape[:-2])
            )
            size = max(16, _SCORES // max(1, lead * key_length))
            for row in range(0, length, max(1, size)):
                some = (start + row, min(size, length - row))
                for r, c, square in _visible(some, (key_start, key_length), causal):
                    mine = slice(at + row + r.start, at + row + r.stop)
                    part = (
                        None
                        if mask is None
                        else cut(mask, mine, slice(key_start + c.start, key_start + c.stop))
                    )
                    yield mine, slice(here + c.start, here + c.stop), part, square
            here += key_length
        at += length


def cut(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    return mask[
        ...,
        rows if mask.shape[-2] != 1 else slice(None),
        keys if mask.shape[-1] != 1 else slice(None),
    ]


def merge(out: Tensor, total: Tensor, more: Tensor, its: Tensor) -> None:
    """Take the result of further keys into account, in place; ``more`` is used up."""
    both = torch.logaddexp(total, its)
    base = both.masked_fill(both == -math.inf, 0.0)
    out.mul_((total - base).exp()).add_(more.mul_((its - base).exp()))
    total.copy_(both)


def key_slice(keys: Rows, part: slice) -> slice:
    """A slice of a block of keys, which lies in one stretch -> the same among all keys."""
    at = 0
    for start, length in keys:
        if part.start < at + length:
            return slice(start + part.start - at, start + part.stop - at)
        at += length
    raise AssertionError(f"keys {part} of {keys}")
