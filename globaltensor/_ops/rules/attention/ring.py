"""Exact ring attention of a rank's rows to keys that several ranks hold, on local tensors.

The rule of attention (sdpa.py) calls `ring_attention`, which is differentiable and never holds all
keys.

The queries stay. Blocks of keys and values are sent round a ring of ranks (Liu, Zaharia, Abbeel
2023, "Ring attention with blockwise transformers"). Each block's result is merged by its
log-sum-exp (Milakov, Gimelshein 2018, "Online normalizer calculation for softmax"). The forward
saves only the result and the log-sum-exp of each row. The backward sends the blocks round again,
with their gradients one round later. The last rank that adds to these gradients returns them to the
block's owner. Communication of a block overlaps with computation on the one before. Large blocks
are sent a few heads at a time, so that memory beyond inputs and results is small.

Under a causal mask a block is sent only as far as a rank sees it. Ranks with contiguous rows then
have unequal work, and the last rank has the most. Rows and keys may therefore be dealt out in pairs
first: chunk i with chunk 2p-1-i. (This is the load balance of Brandon et al. 2023, "Striped
attention", by pairs of chunks.) After that every rank does the same work in every round.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ...._base import torch_private
from ....boxing import log
from ....distributed.communicator import Communicator, flatten
from ....distributed.world import world
from ....sharding.balanced_split import balanced_split
from ..helpers import zeros_connected
from .blocks import (
    HALF,
    Rows,
    Stretch,
    block,
    block_backward,
    cut,
    key_slice,
    members,
    merge,
    sees,
    shared,
    tasks,
    wide,
)

__all__ = ["BACKWARD", "FORWARD", "RingLayout", "ring_attention", "zigzag_chunks"]

# The keys and values of a rank: flat in one tensor for sending, or as two tensors.
Block: TypeAlias = Tensor | tuple[Tensor, Tensor]

FORWARD: Final = "scaled_dot_product_attention: keys and values round the ring"
BACKWARD: Final = f"backward of {FORWARD}"

# The bytes of keys and values that are sent round the ring at a time, if they can be cut so.
_BLOCK: Final = 1 << 20
_DEAL: Final = 1 << 24  # The bytes of tensors that are dealt at a time.


@dataclass(frozen=True)
class RingLayout:
    """The layout of the rows and keys of an attention, seen by one rank.

    ``ring``: the ranks round which keys are sent, in the order of their keys. ``merged``: the ranks
    that have the same rows and other keys. ``rows``, ``keys``: what each rank of the ring holds.
    ``dealt``: the same after dealing in pairs, or None where nothing is dealt. ``holders``: (rank,
    keys) of every rank of the ring or merged, in the order of their keys.
    """

    ring: tuple[int, ...]
    merged: tuple[int, ...]
    rows: tuple[Stretch, ...]
    keys: tuple[Stretch, ...]
    holders: tuple[tuple[int, Stretch], ...]
    causal: bool
    scale: float
    dealt: tuple[tuple[Rows, ...], tuple[Rows, ...]] | None = None

    @cached_property
    def turns(self) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        """The (rows, keys) that each rank of the ring works on."""
        return self.dealt or (tuple((r,) for r in self.rows), tuple((k,) for k in self.keys))

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """The number of hops that each rank's block of keys travels along the ring.

        A block ends at the last rank with a row that sees some of it.
        """
        rows, keys = self.turns
        p = len(self.ring)
        seen = [
            [
                any(sees(r, k, self.causal) for r in rows[(j + t) % p] for k in keys[j])
                for t in range(p)
            ]
            for j in range(p)
        ]
        return tuple(max((t for t in range(p) if s[t]), default=0) for s in seen)


def zigzag_chunks(n: int, parts: int) -> tuple[Rows, ...]:
    """Deal out ``n`` rows so that under a causal mask all ranks have equal work.

    Chunk i of 2p is paired with chunk 2p-1-i.

    >>> zigzag_chunks(8, 2)
    (((0, 2), (6, 2)), ((2, 2), (4, 2)))
    """
    chunks = balanced_split(n, 2 * parts)
    return tuple((chunks[i], chunks[2 * parts - 1 - i]) for i in range(parts))


# ------------------------------------------------------------------------------------ communication


def _exchange_rows(
    way: RingLayout, rows: list[Tensor], keys: list[Tensor], back: bool = False
) -> list[Tensor]:
    """Exchange tensors [..., n, e] of rows and keys between holders and ranks that work on them.

    With ``back``, the tensors return to their holders. There is no gradient.

    The tensors are sent in one exchange, large ones one by one. The lists are emptied. A tensor
    without other references is thereby freed, which makes room for what arrives.
    """
    assert way.dealt is not None
    tensors = [*rows, *keys]
    if (
        len(tensors) > 1
        and max(n for _, n in (*way.rows, *way.keys)) * sum(_row_bytes(t) for t in tensors) > _DEAL
    ):
        del tensors
        found = [t for _ in range(len(rows)) for t in _exchange_rows(way, [rows.pop(0)], [], back)]
        return found + [
            t for _ in range(len(keys)) for t in _exchange_rows(way, [], [keys.pop(0)], back)
        ]
    comm = world().comm(way.ring)
    me, p = comm.index, comm.size
    moves = []
    for which, held in enumerate((way.rows, way.keys)):
        own_rows, dealt_rows = tuple((s,) for s in held), way.dealt[which]
        moves += [(dealt_rows, own_rows) if back else (own_rows, dealt_rows)] * len(
            (rows, keys)[which]
        )
    sends: dict[int, Tensor] = {}
    takes: dict[int, list[list[slice]]] = {}
    for i in range(p):
        gives = [[s for s, _ in _common_slices(before[me], after[i])] for before, after in moves]
        if any(gives):
            sends[i] = torch.cat(
                [
                    t[..., s, :].reshape(-1)
                    for t, some in zip(tensors, gives, strict=True)
                    for s in some
                ]
            )
        # The sender goes through its own stretches in order, so the pieces arrive in that order.
        takes[i] = [
            [
                s
                for s, _ in sorted(
                    _common_slices(after[me], before[i]), key=lambda pair: pair[1].start
                )
            ]
            for before, after in moves
        ]
    takes = {i: some for i, some in takes.items() if any(some)}
    like = tensors[0].new_empty(0)
    shapes = [
        (*t.shape[:-2], sum(n for _, n in after[me]), t.shape[-1])
        for t, (_, after) in zip(tensors, moves, strict=True)
    ]
    each = [math.prod(t.shape[:-2]) * t.shape[-1] for t in tensors]
    for some in (tensors, rows, keys):
        some.clear()
    came = comm.exchange(
        sends,
        {
            i: sum(
                n * (s.stop - s.start) for n, some in zip(each, lists, strict=True) for s in some
            )
            for i, lists in takes.items()
        },
        like,
    )
    del sends
    outs = [like.new_empty(shape) for shape in shapes]
    for i, lists in takes.items():
        mine = [out[..., s, :] for out, some in zip(outs, lists, strict=True) for s in some]
        for part, flat in zip(
            mine, came.pop(i).split_with_sizes([part.numel() for part in mine]), strict=True
        ):
            part.copy_(flat.view(part.shape))
    return outs


def _row_bytes(t: Tensor) -> int:
    return math.prod(t.shape[:-2]) * t.shape[-1] * t.element_size()


def _common_slices(own_rows: Rows, peer_rows: Rows) -> list[tuple[slice, slice]]:
    """Return the rows that both have, as pairs of slices of the one and of the other."""
    overlaps, own_offset = [], 0
    for a, n in own_rows:
        peer_offset = 0
        for b, m in peer_rows:
            low, high = max(a, b), min(a + n, b + m)
            if low < high:
                overlaps.append(
                    (
                        slice(own_offset + low - a, own_offset + high - a),
                        slice(peer_offset + low - b, peer_offset + high - b),
                    )
                )
            peer_offset += m
        own_offset += n
    return overlaps


class _RingPass:
    """The rounds of a ring, seen by one of its ranks.

    The object knows which block the rank has, if the rank gets another one, and what the rank sends
    on.
    """

    def __init__(self, way: RingLayout, k: Tensor, v: Tensor) -> None:
        self.comm: Communicator = world().comm(way.ring)
        self.me, self.p, self.hops = self.comm.index, len(way.ring), way.hops
        self.keys = way.turns[1]
        self.shapes = [(*k.shape[:-2], -1, k.shape[-1]), (*v.shape[:-2], -1, v.shape[-1])]
        self.each = [math.prod(k.shape[:-2]) * k.shape[-1], math.prod(v.shape[:-2]) * v.shape[-1]]
        self.count = max(way.hops) + 1

    def block(self, t: int) -> int:
        """Return the index of the rank whose keys this rank has in round ``t``."""
        return (self.me - t) % self.p

    def has_block(self, t: int) -> bool:
        return t <= self.hops[self.block(t)]

    def block_sizes(self, j: int) -> list[int]:
        """Return the number of elements of rank j's keys, and of its values."""
        n = sum(length for _, length in self.keys[j])
        return [each * n for each in self.each]

    def unpack_block(self, flat: Block, j: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of rank j's block."""
        if isinstance(flat, tuple):
            return flat
        n = sum(length for _, length in self.keys[j])
        k, v = flat.split_with_sizes(self.block_sizes(j))
        return k.view(*self.shapes[0][:-2], n, self.shapes[0][-1]), v.view(
            *self.shapes[1][:-2], n, self.shapes[1][-1]
        )

    def pass_on(self, t: int, flat: Block | None, like: Tensor) -> Callable[[], Tensor | None]:
        """Start passing on the block of round ``t``.

        The function returned waits for the block of the next round, and returns None where this
        rank gets none.
        """
        if t + 1 == self.count:
            return lambda: None
        sends = (
            {(self.me + 1) % self.p: flat}
            if isinstance(flat, Tensor) and t + 1 <= self.hops[self.block(t)]
            else {}
        )
        takes = (
            {(self.me - 1) % self.p: sum(self.block_sizes(self.block(t + 1)))}
            if self.has_block(t + 1)
            else {}
        )
        started = self.comm.exchange_async(sends, takes, like)
        return lambda: next(iter(started.wait().values()), None)

    def pass_on_gradients(
        self, t: int, sums: Tensor | None, like: Tensor
    ) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
        """Start passing on the gradients of round ``t``'s block, with this rank's contribution.

        The gradients are sent to the next rank that sees the block, or to the block's owner. The
        function returned waits for the next round's gradients so far, and for the gradients of the
        own block if they return now.
        """
        me, p, j = self.me, self.p, self.block(t)
        if self.count == 1:
            return lambda: (None, sums)
        goes_on, comes, last = (
            t + 1 <= self.hops[j],
            t + 1 < self.count and self.has_block(t + 1),
            self.hops[me],
        )
        sends: dict[int, Tensor] = {}
        takes: dict[int, int] = {}
        if sums is not None and (goes_on or t):
            sends[(me + 1) % p if goes_on else j] = sums
        if comes:
            takes[(me - 1) % p] = sum(self.block_sizes(self.block(t + 1)))
        if t and t == last:
            takes[(me + t) % p] = sum(self.block_sizes(me))
        started = self.comm.exchange_async(sends, takes, like)

        def arrived() -> tuple[Tensor | None, Tensor | None]:
            found = started.wait()
            home = (
                found[(me + t) % p] if t and t == last else sums if not t and not goes_on else None
            )
            return found[(me - 1) % p] if comes else None, home

        return arrived


def _pack_block(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([flatten(k), flatten(v)])


# ----------------------------------------------------------------------------- forward and backward


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, way: RingLayout) -> Tensor:
    """Return softmax(q k^T * scale + mask) v of this rank's rows and every rank's keys.

    Shapes: q [..., l, e], k [..., s, e], v [..., s, f] -> [..., l, f]. Leading dims broadcast.
    ``mask``, bool or added, is [..., l or 1, keys of all ranks or 1].

    Every rank of ``way.ring`` and ``way.merged`` must call this function. A row that sees no key is
    zero, as in torch. The gradients of k and v are those of the own keys, summed over all ranks of
    the ring. The gradients of q and the mask are those of the own rows, from the ring's keys. Along
    ``merged`` these two gradients are partial sums. The function is differentiable any number of
    times (then the keys are gathered).
    """
    if (
        not (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (mask is not None and mask.requires_grad)
        )
        or not torch.is_grad_enabled()
    ):
        with _no_autocast(q):
            return _forward(q, k, v, mask, way)[0]
    return _RingAttention.apply(q, k, v, mask, way)  # type: ignore[no-any-return, no-untyped-call]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, way: RingLayout
) -> tuple[Tensor, Tensor]:
    """Return the (result, log-sum-exp of the rows as they are worked on)."""
    if _is_dry_run(way):
        lead = shared(q, k, v)
        return q.new_empty(*lead, q.shape[-2], v.shape[-1]), q.new_empty(
            *lead, _num_work_rows(way), 1, dtype=_accumulation_dtype(q)
        )
    shares = _head_selectors(q, k, v, way)
    if len(shares) == 1:
        return _forward_heads(q, k, v, mask, way)
    lead = shared(q, k, v)
    out = q.new_empty(*lead, q.shape[-2], v.shape[-1])
    total = q.new_empty(*lead, _num_work_rows(way), 1, dtype=_accumulation_dtype(q))
    for of in shares:
        some, its = _forward_heads(of(q), of(k), of(v), None if mask is None else of(mask), way)
        of(out).copy_(some)
        of(total).copy_(its)
    return out, total


def _is_dry_run(way: RingLayout) -> bool:
    """Return True in a dry run, where only shapes matter. The ranks still meet, once."""
    this_world = world()
    if this_world.dry:
        for ranks in (way.ring, way.merged):
            this_world.comm(ranks).barrier()
    return this_world.dry


def _forward_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, way: RingLayout
) -> tuple[Tensor, Tensor]:
    dtype, lead = q.dtype, shared(q, k, v)
    rows, keys = way.turns
    if way.dealt:
        q, k, v = _exchange_rows(way, [q], [k, v])
    ring = _RingPass(way, k, v)
    out = q.new_zeros(*lead, q.shape[-2], v.shape[-1], dtype=_accumulation_dtype(q))
    total = q.new_full((*lead, q.shape[-2], 1), -math.inf, dtype=_accumulation_dtype(q))
    held: Block | None = _pack_block(k, v) if ring.count > 1 else (k, v)
    del k, v  # while the next block arrives, no more than one other block is held
    for t in range(ring.count):
        passing, j = ring.pass_on(t, held, q), ring.block(t)
        if held is not None:
            _attend_block(
                out, total, q, *ring.unpack_block(held, j), mask, rows[ring.me], keys[j], way
            )
        held = passing()
        del passing
    if len(way.merged) > 1:
        out, total = _merge_over_ranks(out, total, way.merged)
    out = out.to(dtype)
    return (_exchange_rows(way, [out], [], back=True)[0] if way.dealt else out), total


def _attend_block(
    out: Tensor,
    total: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rows: Rows,
    keys: Rows,
    way: RingLayout,
) -> None:
    """Merge the result of a block of keys into ``out`` and ``total``."""
    for r, c, part, square in tasks(q, k, v, mask, rows, keys, way.causal):
        for of in members(q, k, v, part):
            merge(
                of(out)[..., r, :],
                of(total)[..., r, :],
                *block(
                    of(q)[..., r, :], of(k)[..., c, :], of(v)[..., c, :], part, square, way.scale
                ),
            )


def _accumulation_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype in which results are merged and gradients are summed."""
    return torch.float32 if t.dtype in HALF else t.dtype


def _head_selectors(
    q: Tensor, k: Tensor, v: Tensor, way: RingLayout
) -> list[Callable[[Tensor], Tensor]]:
    """Return functions that each select the heads (or samples) that go round the ring at one time.

    The selections are the same on every rank. Where rows are dealt, the bytes of rows count as
    those of keys do, as the rows are then held twice. Query heads that share their keys may also be
    separated. The keys are then sent once for each group of rows, and each such group has at least
    as many bytes as the keys.
    """
    if len(way.ring) == 1:
        return [lambda t: t]
    keys = max(n for _, (_, n) in way.holders) * (_row_bytes(k) + _row_bytes(v))
    rows = max(n for _, n in way.rows) * _row_bytes(q) if way.dealt else 0
    dims = [
        d
        for d in range(-3, -1 - min(q.ndim, k.ndim, v.ndim), -1)
        if q.shape[d] > 1 and k.shape[d] == v.shape[d]
    ]
    parts = _slice_selectors(
        q, [d for d in dims if k.shape[d] == q.shape[d]], max(keys, rows) // _BLOCK
    )
    again = _slice_selectors(
        q, [d for d in dims if k.shape[d] == 1], rows // max(keys, len(parts) * _BLOCK)
    )
    return [lambda t, some=some, more=more: more(some(t)) for some in parts for more in again]  # type: ignore[misc]


def _slice_selectors(q: Tensor, dims: list[int], wanted: int) -> list[Callable[[Tensor], Tensor]]:
    """Cut the longest of these dims into ``wanted`` slices, or into as many as it has elements."""
    if not dims or wanted < 2:
        return [lambda t: t]
    dim = max(dims, key=lambda d: q.shape[d])
    return [
        partial(_select_slice, dim, *piece)
        for piece in balanced_split(q.shape[dim], min(q.shape[dim], wanted))
    ]


def _select_slice(dim: int, start: int, length: int, t: Tensor) -> Tensor:
    return t if t.ndim < -dim or t.shape[dim] == 1 else t.narrow(dim, start, length)


def _num_work_rows(way: RingLayout) -> int:
    """Return the number of rows that this rank works on."""
    return sum(n for _, n in way.turns[0][way.ring.index(world().rank)])


def _merge_over_ranks(out: Tensor, total: Tensor, ranks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return, on each of ``ranks``, the result over the keys of all of them."""
    comm = world().comm(ranks)
    top = comm.all_reduce(total, "max")
    top = top.masked_fill(top == -math.inf, 0.0)
    weight = (total - top).exp()
    sums = comm.all_reduce(torch.cat([out * weight, weight], -1))
    weight = sums[..., -1:]
    return sums[..., :-1] / weight.masked_fill(weight == 0, 1.0), weight.log() + top


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, way: RingLayout
    ) -> Tensor:
        with _no_autocast(q):
            out, total = _forward(q, k, v, mask, way)
        ctx.way = way
        ctx.save_for_backward(q, k, v, mask, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, mask, out, total = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        with log.exchanges(BACKWARD), _no_autocast(q):
            if torch.is_grad_enabled():
                return (*_differentiable_backward(grads[0], q, k, v, mask, ctx.way, needed), None)
            return (*_backward(grads[0], q, k, v, mask, out, total, ctx.way, needed), None)


def _no_autocast(q: Tensor) -> Any:
    return contextlib.nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    total: Tensor,
    way: RingLayout,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    grad = grad.clone() if torch_private.is_zero_tensor(grad) else grad
    slopes = torch.zeros_like(mask, dtype=total.dtype) if needed[3] and mask is not None else None
    shares = _head_selectors(q, k, v, way)
    if _is_dry_run(way):
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    elif len(shares) == 1:
        gradients = _backward_heads(grad, q, k, v, mask, out, total, slopes, way)
    else:
        # Keys that several groups of rows share get the sum of the gradients.
        gradients = [
            torch.zeros_like(t, dtype=kind, memory_format=torch.contiguous_format)
            for t, kind in ((q, q.dtype), (k, total.dtype), (v, total.dtype))
        ]
        for of in shares:
            masked = (
                (None, None) if mask is None else (of(mask), None if slopes is None else of(slopes))
            )
            some = _backward_heads(
                of(grad), of(q), of(k), of(v), masked[0], of(out), of(total), masked[1], way
            )
            for gradient in gradients:
                of(gradient).add_(some.pop(0))
        gradients = [gradient.to(q.dtype) for gradient in gradients]
    of_mask = None if slopes is None or mask is None else slopes.to(mask.dtype)
    return tuple(
        g if wanted else None for g, wanted in zip((*gradients, of_mask), needed, strict=True)
    )


def _backward_heads(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    total: Tensor,
    slopes: Tensor | None,
    way: RingLayout,
) -> list[Tensor]:
    """Return the gradients of q, k and v, and add that of the mask to ``slopes``."""
    if len(way.merged) > 1:  # each of these ranks has a partial gradient of the same rows
        grad = world().comm(way.merged).all_reduce(grad)
    if way.dealt:
        grad, q, out, k, v = _exchange_rows(way, [grad, q, out], [k, v])
    (rows, keys), dtype, grad = way.turns, q.dtype, grad.contiguous()
    ring, dq = _RingPass(way, k, v), torch.zeros_like(q, dtype=total.dtype)
    held: Block | None = _pack_block(k, v) if ring.count > 1 else (k, v)
    del k, v
    own: Tensor | None = None  # the gradient of the own keys and values, once it returns
    handing = _no_gradients
    for turn in range(ring.count):
        passing, j, sums = ring.pass_on(turn, held, q), ring.block(turn), None
        if held is not None:
            sums = total.new_zeros(sum(ring.block_sizes(j)))
            its = grad, q, *ring.unpack_block(held, j), mask, out, total
            _attend_block_backward(
                (dq, *ring.unpack_block(sums, j)), slopes, its, rows[ring.me], keys[j], way
            )
            del its
        held = passing()
        before, home = handing()
        del passing, handing  # frees the tensors that they sent
        if sums is not None and before is not None:
            sums.add_(before)
        own = own if home is None else home
        handing = ring.pass_on_gradients(turn, sums, total)
    home = handing()[1]
    own = own if home is None else home
    assert own is not None
    found = [dq.to(dtype), *(t.to(dtype) for t in ring.unpack_block(own, ring.me))]
    if not way.dealt:
        return found
    few = found[:1], found[1:]
    del found, grad, q, out, dq, sums, before, home, own, handing
    return _exchange_rows(way, *few, back=True)


def _no_gradients() -> tuple[Tensor | None, Tensor | None]:
    return None, None


def _attend_block_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    slopes: Tensor | None,
    its: tuple[Any, ...],
    rows: Rows,
    keys: Rows,
    way: RingLayout,
) -> None:
    """Add the gradients from a block of keys to those of (q, k, v) and the mask.

    ``its``: the arguments of `block_backward` for all rows and the block.
    """
    grad, q, k, v, mask, out, total = its
    for r, c, part, square in tasks(q, k, v, mask, rows, keys, way.causal):
        for of in members(q, k, v, part):
            some = (
                of(grad)[..., r, :],
                of(q)[..., r, :],
                of(k)[..., c, :],
                of(v)[..., c, :],
                part,
                of(out)[..., r, :],
                of(total)[..., r, :],
            )
            *found, of_mask = block_backward(*some, square, way.scale, slopes is not None)
            for gradient, where in zip(gradients, (r, c, c), strict=True):
                of(gradient)[..., where, :].add_(found.pop(0))
            if slopes is not None and of_mask is not None:
                cut(slopes, r, key_slice(keys, c)).add_(of_mask)


# ------------------------------------------------------------------------------- higher derivatives


def _differentiable_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    way: RingLayout,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients, computed by ordinary operations on all keys.

    The gradients have gradients themselves (create_graph). The keys are gathered for this.
    """
    ranks, held = zip(*way.holders, strict=True)
    lengths = tuple(n for _, n in held)
    with torch.enable_grad():
        keys, values = (
            _AllGatherRows.apply(t, ranks, lengths) if len(ranks) > 1 else t for t in (k, v)
        )  # type: ignore[no-untyped-call]
        start = way.rows[way.ring.index(world().rank)][0]
        rows_, keys, values = (wide(t) for t in (q, keys, values))
        scores = rows_ * way.scale @ keys.transpose(-1, -2)
        if way.causal:
            rows = torch.arange(start, start + q.shape[-2], device=q.device)
            hidden = torch.arange(scores.shape[-1], device=q.device) > rows[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        if mask is not None:
            scores = (
                scores.masked_fill(mask.logical_not(), -math.inf)
                if mask.dtype is torch.bool
                else scores + mask
            )
        blind = (scores == -math.inf).all(-1, keepdim=True)
        out = (scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ values).to(
            q.dtype
        )
        wanted = [
            t for t, need in zip((q, k, v, mask), needed, strict=True) if need and t is not None
        ]
        # Perhaps no element of this rank is in the graph. Its gradients must be, since the backward
        # collectives of other ranks pass through here.
        out = out + zeros_connected((), out.dtype, [q, k, v] if mask is None else [q, k, v, mask])
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needed]


class _AllGatherRows(torch.autograd.Function):
    """The rows [..., n, e] of every rank, concatenated.

    Its backward is `_ReduceScatterRows`, and the backward of `_ReduceScatterRows` is this.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, ranks: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.lengths = ranks, lengths
        lead, e = t.shape[:-2], t.shape[-1]
        parts = world().comm(ranks).all_gather(t, [math.prod(lead) * n * e for n in lengths])
        return torch.cat(
            [part.view(*lead, n, e) for part, n in zip(parts, lengths, strict=True)], -2
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with log.exchanges("backward of {}", BACKWARD):
            return _ReduceScatterRows.apply(grads[0], ctx.ranks, ctx.lengths), None, None  # type: ignore[no-untyped-call]


class _ReduceScatterRows(torch.autograd.Function):
    """The sum over the ranks of each rank's own rows."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, ranks: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.lengths = ranks, lengths
        return world().comm(ranks).reduce_scatter(t.split_with_sizes(list(lengths), -2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with log.exchanges("backward of {}", BACKWARD):
            return _AllGatherRows.apply(grads[0], ctx.ranks, ctx.lengths), None, None  # type: ignore[no-untyped-call]
