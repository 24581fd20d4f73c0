"""Rules of attention, parallel over batch, heads and rows of queries; `rules` imports them.

A split sequence (context parallelism) is computed by one of three methods:

  ring    keys and values are sent round the ranks in blocks; each rank holds its own rows and two
          blocks (_ops/rules/attention/ring.py)
  heads   queries, keys and values are boxed from a split sequence to split heads in all-to-alls;
          the result returns in one (Jacobs et al. 2023, "DeepSpeed Ulysses: system optimizations
          for enabling training of extreme long sequence transformer models")
  gather  every rank holds all keys and values

Where keys are split and queries are replicated on an axis, each rank attends to its keys. The
results are merged by their log-sum-exp.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ....boxing import box, log, plan_boxing
from ....cluster import current_cluster
from ....errors import SbpError
from ....sharding.sbp import Sbp
from ....sharding.spec import Spec
from ..helpers import register, skip_when_empty
from ..notation import Arg, Dims, Factor, LocalContext, OpDescription, Signature, align
from ..registry import rule
from ..strategy import SignatureChoice
from .ring import FORWARD, RingLayout, ring_attention, zigzag_chunks

__all__ = ["context_parallel"]

METHODS: Final = ("auto", "ring", "heads", "gather")
_SMALL: Final = 1 << 18  # bytes of keys and values up to which holding all of them costs little
# A ring's backward sends the blocks and their gradients: twice its forward. The backward of the
# other methods sends as much as their forward. So a ring counts (1 + 2) / (1 + 1).
_THERE_AND_BACK: Final = 1.5
# The rows per rank from which dealing causal rows out in pairs is worth its exchanges.
_BALANCED: Final = 512

_method: ContextVar[str] = ContextVar("globaltensor_attention", default="auto")


@contextmanager
def context_parallel(method: str) -> Iterator[None]:
    """Choose the method of ``scaled_dot_product_attention`` over a split sequence of keys.

    The choice holds within this block. ``method`` is "ring", "heads", "gather", or "auto". "auto"
    chooses the one of the first two that moves the fewest bytes ("heads" only where the heads
    divide by the ranks), and "gather" for short sequences. Dropout needs "heads" or "gather"; with
    "ring" it gathers. All ranks must choose the same method.

    Raises SbpError for another name. Under "heads", an attention without heads or batch to split
    raises SbpError too.

    >>> with context_parallel("ring"):
    ...     pass
    """
    if method not in METHODS:
        raise SbpError(f"context_parallel: no method {method!r}; there are {', '.join(METHODS)}")
    token = _method.set(method)
    try:
        yield
    finally:
        _method.reset(token)


# ----------------------------------------------------------------------------------------- the rule

_L, _S = "l", "s"  # the sequence of queries, and that of keys


def _describe(
    op: OpDescription, query: Arg, key: Arg, value: Arg, attn_mask: Arg | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    """Describe attention as parallel over all dims but the keys.

    Under a causal mask it is not parallel over rows either, as a row's mask depends on its
    position.
    """
    shapes = [a.shape[:-2] for a in (query, key, value)]
    groups = shapes[0][-1] // max(1, shapes[1][-1]) if enable_gqa and query.ndim > 2 else 1
    if groups > 1 and shapes[1][-1] == shapes[2][-1]:
        named, lead = align([s[:-1] for s in shapes])
        if _key_heads_indivisible(query, key, groups):
            # Query heads are the factor. A rank that has some of them has all key heads.
            named, lead = (
                [(*n, name) for n, name in zip(named, ("q", None, None), strict=True)],
                (*lead, "q"),
            )
        else:
            # Key heads are the factor. Each stands for a group of query heads.
            named, lead = [(*n, "h") for n in named], (*lead, "h")
            op.scale = {(query.index, query.ndim - 3): groups, (~0, query.ndim - 3): groups}
    else:
        named, lead = align(shapes)
    op.set(query, (*named[0], _L, None))
    op.set(key, (*named[1], _S, None))
    op.set(value, (*named[2], _S, "v"))
    op.out = [(*lead, _L, "v")]
    op.whole = {_S, _L} if is_causal else {_S}
    if attn_mask is not None:
        _mask(op, attn_mask, query, lead)
    op.random = dropout_p > 0
    if not op.random:
        op.linear = [frozenset([value.index])]
    if lead[-1:] == ("q",):
        op.local = lambda split: _with_own_heads(split, groups, F.scaled_dot_product_attention)
    op.local = skip_when_empty(op, F.scaled_dot_product_attention)


def _key_heads_indivisible(query: Arg, key: Arg, groups: int) -> bool:
    """Return True if the ranks that split the query heads cannot split the key heads as evenly.

    There are fewer key heads. In this case every rank holds all of them.
    """
    by_heads = _split_axes(query.spec, query.ndim - 3)
    ranks = math.prod(
        query.spec.placement.shape[a] for a in by_heads or _split_axes(key.spec, key.ndim - 2)
    )
    whole_groups = by_heads and not any(query.spec.layout[a].unit % groups for a in by_heads)
    return bool(key.shape[-3] % ranks) and not whole_groups


def _with_own_heads(
    split: LocalContext, groups: int, function: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Wrap ``function`` so that it gets the key and value heads of this rank's query heads.

    The wrapper receives all key and value heads.
    """
    if not split.is_split("q"):
        return function
    first, n = split.box("q")
    start, stop = first // groups, -(-(first + n) // groups)
    # If not even, the key heads serve unequal numbers of query heads on this rank.
    even = stop - start <= 1 or not (first % groups or n % groups)
    each = None if even else torch.arange(first, first + n) // groups

    def own(t: Tensor) -> Tensor:
        return (
            t.narrow(-3, start, stop - start)
            if each is None
            else t.index_select(-3, each.to(t.device))
        )

    return lambda query, key, value, *args, **kwargs: function(
        query, own(key), own(value), *args, **kwargs
    )


def _mask(op: OpDescription, mask: Arg, query: Arg, lead: Dims) -> None:
    full = (*lead, _L, None)
    sizes = (*op.args[query.index].shape[:-1], 0)
    dims = []
    for k in range(mask.ndim, 0, -1):
        name = full[len(full) - k] if k <= len(full) else None
        fits = k <= len(sizes) and mask.shape[mask.ndim - k] == sizes[len(sizes) - k]
        if name == "h" and op.scale.get((query.index, query.ndim - 3), 1) > 1 and fits:
            op.scale[mask.index, mask.ndim - k] = op.scale[query.index, query.ndim - 3]
        dims.append(name if fits else None)
    op.set(mask, dims)


@rule("scaled_dot_product_attention")
def _attention(
    op: OpDescription,
    query: Arg,
    key: Arg,
    value: Arg,
    attn_mask: Arg | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **how: Any,
) -> None:
    sequence = [
        a for a in (key, value) if min(a.ndim, query.ndim) >= 2 and _split_axes(a.spec, a.ndim - 2)
    ]
    if sequence or (is_causal and query.ndim >= 2 and _split_axes(query.spec, query.ndim - 2)):
        op.compose(_run_chosen_method)
    _describe(op, query, key, value, attn_mask, dropout_p, is_causal, **how)


def _split_axes(spec: Spec, dim: int) -> list[int]:
    """Return the axes of more than one rank that split a dim."""
    return [a for a in spec.axes_of(dim) if spec.placement.shape[a] > 1]


def _run_chosen_method(*args: Any, **kwargs: Any) -> Tensor:
    return _BY[_method.get()](*args, **kwargs)


# ---------------------------------------------------------------------------- over a split sequence


def _make_attention(method: str) -> Callable[..., Tensor]:
    """Return attention by one method, as a function that has a rule of its own.

    Plans are cached by function, so each method has its own plans.
    """

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if has_torch_function(tensors):
            return handle_torch_function(
                scaled_dot_product_attention,
                tensors,
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                **how,
            )
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **how
        )

    def describe(
        op: OpDescription, query: Arg, key: Arg, value: Arg, attn_mask: Arg | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        _describe(
            op,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        op.whole = {_S}
        call = _SequenceAttention(
            op, method, query, key, value, attn_mask, dropout_p, is_causal, scale
        )
        op.menu, op.traffic, op.local = call.menu, call.traffic, call.local

    register(scaled_dot_product_attention, describe)
    return scaled_dot_product_attention


@dataclasses.dataclass
class _SequenceAttention:
    """One attention over a split sequence, as planned.

    Its methods list the admissible signatures of each axis, price a choice, and build what a rank
    runs.
    """

    op: OpDescription
    method: str
    query: Arg
    key: Arg
    value: Arg
    mask: Arg | None
    dropout: float
    causal: bool
    scale: float | None

    @property
    def heads(self) -> Factor | None:
        """The factor that is split where the sequence no longer is: heads, else the batch."""
        lead = self.op.out[0][:-2]
        return lead[-1] if lead else None

    def split_keys(self, entry: Sbp, arg: Arg) -> bool:
        return entry.is_split and entry.dim == arg.ndim - 2

    # admissible signatures

    def menu(self, axis: int) -> list[Signature]:
        derived = list(self.op.derived(axis))
        q, k, v = (a.spec.layout[axis] for a in (self.query, self.key, self.value))
        ranks = self.query.spec.placement.shape[axis]
        if ranks == 1 or not (self.split_keys(k, self.key) or self.split_keys(v, self.value)):
            return derived
        unit = k.unit if self.split_keys(k, self.key) else v.unit
        rows = [s for s in derived if s.factor == _L]
        ways = {
            "ring": []
            if self.dropout
            else [
                *(self._also_split_keys(s, unit) for s in rows),
                *self._key_split_signatures(q, unit),
            ],
            "heads": self._head_signatures(derived, q),
            "gather": rows,
        }
        if self.method == "heads" and self.heads is None:
            shape = list(self.query.shape)
            raise SbpError(
                f"context_parallel('heads'): a query of shape {shape} has no dim of heads, or "
                f"batch, to split; use context_parallel('ring') or context_parallel('gather')"
            )
        if self.method != "auto":
            return ways[self.method] or rows
        signatures = ways["ring"]
        if self._heads_divide(axis):
            signatures += ways["heads"]
        if self._local_key_value_bytes(axis) <= _SMALL or not signatures:
            signatures += rows
        # Where the queries are already split over batch or heads, keys and values may be boxed to
        # match.
        own = self.op.dims[self.query.index][q.dim] if q.is_split else None
        return signatures + [
            s for s in derived if own is not None and own != _L and s.factor == own
        ]

    def _also_split_keys(self, rows: Signature, unit: int) -> Signature:
        """Return the signature that splits the rows and also the keys."""
        ins = [
            Sbp("split", a.ndim - 2, unit) if a is self.key or a is self.value else e
            for a, e in zip(self.op.args, rows.ins, strict=True)
        ]
        return Signature(tuple(ins), rows.outs, _L)

    def _key_split_signatures(self, q: Sbp, unit: int) -> list[Signature]:
        """Return the signatures that split the keys and keep the rows replicated."""
        none = next(
            s
            for s in self.op.derived(0)
            if s.factor is None and not any(e.is_partial for e in s.ins)
        )
        return (
            []
            if q.is_split
            else [dataclasses.replace(self._also_split_keys(none, unit), factor=_S)]
        )

    def _head_signatures(self, derived: list[Signature], q: Sbp) -> list[Signature]:
        found = [s for s in derived if self.heads is not None and s.factor == self.heads]
        if self.dropout or not (q.is_split and q.dim == self.query.ndim - 2):
            return found
        back = Sbp("split", len(self.op.out[0]) - 2, q.unit)
        return [Signature(s.ins, (back,), s.factor) for s in found]

    def _ranks_of_other_axes(self, arg: Arg, axis: int, dim: int | None = None) -> int:
        """Return the number of ranks over which other axes split an operand, or one dim of it."""
        entries = enumerate(arg.spec.layout)
        return math.prod(
            arg.spec.placement.shape[a]
            for a, e in entries
            if a != axis and e.is_split and dim in (None, e.dim)
        )

    def _heads_divide(self, axis: int) -> bool:
        if min(self.key.ndim, self.query.ndim) < 3 or self.heads is None:
            return False
        arg = self.query if self.op.dims[self.key.index][-3] is None else self.key
        if self.op.dims[arg.index][-3] != self.heads:
            return False
        return (
            arg.shape[-3]
            % (self._ranks_of_other_axes(arg, axis, arg.ndim - 3) * arg.spec.placement.shape[axis])
            == 0
        )

    def _local_key_value_bytes(self, axis: int) -> int:
        return (self.key.spec.nbytes + self.value.spec.nbytes) // self._ranks_of_other_axes(
            self.key, axis
        )

    # costs

    def _ring_and_merged_axes(
        self, ins: tuple[Spec, ...], factors: dict[Factor, tuple[int, ...]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the axes along which keys go round, and those along which results merge."""
        keys = ins[self.key.index]
        return tuple(
            a for a in factors.get(_L, ()) if self.split_keys(keys.layout[a], self.key)
        ), factors.get(_S, ())

    def _computed_spec(
        self, ins: tuple[Spec, ...], out: Spec, factors: dict[Factor, tuple[int, ...]]
    ) -> Spec:
        """Return the spec of the result as it is computed: split as the heads are, if they are."""
        layout = list(out.layout)
        for axis in factors.get(self.heads, ()):
            # Take the unit from an operand with one element per element of the factor. A spec drops
            # units that make no difference, but multiples of them on other operands need them.
            having = [
                (i, dims.index(self.heads))
                for i, dims in enumerate(self.op.dims)
                if self.heads in dims
            ]
            i = next(i for i, d in having if self.op.scale.get((i, d), 1) == 1)
            at = self.op.out[0].index(self.heads)
            layout[axis] = Sbp(
                "split", at, ins[i].layout[axis].unit * self.op.scale.get((~0, at), 1)
            )
        return out.replace(layout=layout)

    def traffic(self, choice: SignatureChoice) -> float:
        """Return the seconds for which the local functions communicate.

        Included are rounds of a ring, the merging of results, and the boxing back from split heads.
        """
        placement, cluster, out = self.query.spec.placement, current_cluster(), choice.outs[0]
        ring, merged = self._ring_and_merged_axes(choice.ins, choice.factors)
        seconds = 0.0
        if ring:
            ranks = placement.fiber(placement.flat[0], ring)
            query, key, value = (
                choice.ins[a.index].local_numel() * a.dtype.itemsize
                for a in (self.query, self.key, self.value)
            )
            seconds += (
                _THERE_AND_BACK
                * (len(ranks) - 1)
                * cluster.seconds("exchange", key + value, ranks[:2])
            )
            # Queries, keys and values are dealt out. As many rows of results as of queries return.
            if self._uses_zigzag(len(ranks)):
                seconds += cluster.seconds("all_to_all", 2 * query + key + value, ranks)
        if merged:
            seconds += cluster.seconds(
                "all_reduce",
                out.local_numel() * out.dtype.itemsize,
                placement.fiber(placement.flat[0], merged),
            )
        natural = self._computed_spec(choice.ins, out, choice.factors)
        return seconds if natural is out else seconds + plan_boxing(natural, out).seconds

    # local functions

    def local(self, split: LocalContext) -> Callable[..., Any]:
        natural = self._computed_spec(split.ins, split.outs[0], split.factors)
        within = dataclasses.replace(split, outs=(natural,))
        run = self._local_function(within)
        if self.heads == "q":
            run = _with_own_heads(within, self.query.shape[-3] // self.key.shape[-3], run)
        if natural is split.outs[0]:
            return run
        out, why = split.outs[0], "scaled_dot_product_attention: its result"
        return lambda *args, **kwargs: box(run(*args, **kwargs), natural, out, why=why)

    def _local_function(self, split: LocalContext) -> Callable[..., Any]:
        ring, merged = self._ring_and_merged_axes(split.ins, split.factors)
        rows = self._row_range(split.ins, self.query, split.rank)
        if not ring and not merged:
            if not self.causal or not split.is_split(_L):
                return _local_attention(self.op, split)
            if self.dropout:
                return _local_attention(self.op, split, rows)
        way = self._ring_layout(split, ring, merged)
        rounds = (len(way.ring) - 1) * sum(
            split.ins[a.index].local_numel() * a.dtype.itemsize for a in (self.key, self.value)
        )
        asked = _method.get() == "ring"  # each method has its own plans
        kind = split.outs[0].dtype
        why = FORWARD if rounds else "scaled_dot_product_attention"

        def run(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            if rounds or merged:
                log.exchange(why, rounds, asked)
            # Autocast casts the arguments of torch's function, so the same is done here.
            query, key, value = query.to(kind), key.to(kind), value.to(kind)
            if attn_mask is not None:
                attn_mask = attn_mask if attn_mask.dtype is torch.bool else attn_mask.to(kind)
                attn_mask = attn_mask if attn_mask.ndim > 1 else attn_mask.unsqueeze(0)
            groups = (
                query.shape[-3] // key.shape[-3]
                if min(query.ndim, key.ndim) > 2 and key.shape[-3] > 1
                else 1
            )
            if groups <= 1:  # as many key heads, or one that all query heads share
                with log.exchanges(why):
                    return ring_attention(query, key, value, attn_mask, way)
            query, key, value = (
                query.unflatten(-3, (key.shape[-3], groups)),
                key.unsqueeze(-3),
                value.unsqueeze(-3),
            )
            if attn_mask is not None and attn_mask.ndim > 2:
                attn_mask = (
                    attn_mask.unsqueeze(-3)
                    if attn_mask.shape[-3] == 1
                    else attn_mask.unflatten(-3, (key.shape[-4], groups))
                )
            with log.exchanges(why):
                return ring_attention(query, key, value, attn_mask, way).flatten(-4, -3)

        return run

    def _uses_zigzag(self, ranks: int) -> bool:
        """Return True if rows are dealt out in pairs, given that the ring's ranks have all rows."""
        n = self.query.shape[-2]
        return self.causal and ranks > 1 and n == self.key.shape[-2] and n // ranks >= _BALANCED

    def _row_range(self, ins: tuple[Spec, ...], arg: Arg, rank: int) -> tuple[int, int]:
        offsets, lengths = ins[arg.index].box(rank)
        return offsets[arg.ndim - 2], lengths[arg.ndim - 2]

    def _ring_layout(
        self, split: LocalContext, ring: tuple[int, ...], merged: tuple[int, ...]
    ) -> RingLayout:
        placement, rank, ins = self.query.spec.placement, split.rank, split.ins
        members = placement.fiber(rank, ring) if ring else (rank,)
        rows = tuple(self._row_range(ins, self.query, r) for r in members)
        keys = tuple(self._row_range(ins, self.key, r) for r in members)
        all_ranks = placement.fiber(rank, (*ring, *merged)) if ring or merged else (rank,)
        holders = sorted(
            ((r, self._row_range(ins, self.key, r)) for r in all_ranks),
            key=lambda held: (held[1], held[0]),
        )
        scale = 1 / math.sqrt(max(1, self.query.shape[-1])) if self.scale is None else self.scale
        n, p = self.query.shape[-2], len(members)
        whole = sum(length for _, length in rows) == n == sum(length for _, length in keys)
        dealt = (
            (zigzag_chunks(n, p), zigzag_chunks(n, p)) if whole and self._uses_zigzag(p) else None
        )
        return RingLayout(
            members,
            placement.fiber(rank, merged) if merged else (rank,),
            rows,
            keys,
            tuple(holders),
            self.causal,
            scale,
            dealt,
        )


def _local_attention(
    op: OpDescription, split: LocalContext, rows: tuple[int, int] | None = None
) -> Callable[..., Any]:
    """Return torch's own function, applied to the keys that this rank has.

    For ``rows`` that do not start at the first one, the causal mask is written out.
    """

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,
    ) -> Tensor:
        if rows is not None:
            at = torch.arange(rows[0], rows[0] + rows[1], device=query.device)
            attn_mask, is_causal = (
                torch.arange(key.shape[-2], device=query.device) <= at[:, None],
                False,
            )
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **how
        )

    op = dataclasses.replace(op, local=lambda split: run)
    return skip_when_empty(op)(split)


_BY: Final = {method: _make_attention(method) for method in METHODS}
