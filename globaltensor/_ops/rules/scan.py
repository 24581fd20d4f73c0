"""Cumulative sums, products and extremes. Along a split dim each rank scans its part on from what
the parts before it come to: one total a rank moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...boxing.halo_exchange import all_gather_small
from ...distributed.world import world
from .helpers import canonical, dims_of, reduced
from .notation import Arg, LocalContext, OpDescription
from .spatial.halo import fibers, is_spread
from .view import each_spelling

__all__: list[str] = []


@dataclass(frozen=True)
class Place:
    """Where this rank stands along a split dim: ``ranks`` that hold the dim, the ``lengths`` they
    hold, its own ``index`` among them and ``offset``."""

    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    index: int
    offset: int

    @classmethod
    def of(cls, split: LocalContext, dim: int) -> Place:
        """The place along ``dim`` of operand 0."""
        spec = split.ins[0]
        ranks = fibers(spec, split.rank, dim)
        return cls(
            ranks,
            tuple(spec.box(r)[1][dim] for r in ranks),
            ranks.index(split.rank),
            spec.box(split.rank)[0][dim],
        )

    @property
    def before(self) -> list[int]:
        """The ranks before this one, by index, that hold something."""
        return [q for q in range(self.index) if self.lengths[q]]

    @property
    def present(self) -> list[int]:
        """All ranks, by index, that hold something."""
        return [q for q, n in enumerate(self.lengths) if n]

    @property
    def length(self) -> int:
        return self.lengths[self.index]


def along(op: OpDescription, x: Arg, dim: int, results: int) -> int | None:
    """Describe a function that works along one dim -> the dim where it is split and may stay so;
    else it must be whole."""
    dims = dims_of(x, dim)
    reduced(op, x, dims, True, None, results)
    if not any(map(x.is_split, dims)):
        return None
    op.whole = set()
    op.exchanges = set(dims)
    op.out = [op.dims[x.index]] * results
    return dims[0]


def _bind(input: Any, dim: int, *, dtype: torch.dtype | None = None) -> tuple[Any, int]:
    return input, dim


# ----------------------------------------------------------------------------------- sums, products


@dataclass(frozen=True)
class _Fold:
    """``scan`` of a dim; ``total`` of a part, dim kept, also of an empty one; ``neutral``: the
    total that changes nothing."""

    scan: Callable[[Tensor, int], Tensor]
    total: Callable[[Tensor, int], Tensor]
    neutral: float


_FOLDS = {
    "cumsum": _Fold(lambda x, d: x.cumsum(d), lambda x, d: x.sum(d, keepdim=True), 0.0),
    "cumprod": _Fold(lambda x, d: x.cumprod(d), lambda x, d: x.prod(d, keepdim=True), 1.0),
    "logcumsumexp": _Fold(
        lambda x, d: x.logcumsumexp(d), lambda x, d: x.logsumexp(d, keepdim=True), float("-inf")
    ),
}


def _folding(spelled: str) -> Callable[..., None]:
    name = spelled.rstrip("_")
    fold, inplace = _FOLDS[name], spelled.endswith("_")

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        x, dim = _bind(*args, **canonical(kwargs))
        d = along(op, x, dim, 1)
        if name == "cumsum":
            op.linear = [frozenset([0])]
        if d is None:
            return

        def local(split: LocalContext) -> Callable[..., Tensor]:
            if not is_spread(split, d):
                return getattr(Tensor, spelled)  # type: ignore[no-any-return]
            run = _folded(
                fold,
                Place.of(split, d),
                d,
                split.outs[0].dtype,
                world().device(split.ins[0].placement.type),
            )
            if inplace:  # the gradient needs what was there before
                return lambda x, *args, **kwargs: x.copy_(run(x.clone() if x.requires_grad else x))
            return lambda input, *args, **kwargs: run(input)

        op.local = local

    return describe


def _folded(
    fold: _Fold, place: Place, d: int, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Tensor]:
    first = not place.before
    chosen = torch.zeros(len(place.ranks), dtype=torch.bool, device=device)
    chosen[place.before] = True
    # The first rank passes through the same steps as the others, forward and backward, and uses
    # nothing of it: its total must only be a number.
    neutral = 0.0 if first else fold.neutral

    def run(x: Tensor) -> Tensor:
        x = x.to(dtype)
        totals = all_gather_small(fold.total(x, d), place.ranks)
        before = fold.total(
            torch.where(
                chosen.view(-1, *[1] * x.ndim),
                totals,
                torch.full((), neutral, dtype=dtype, device=device),
            ),
            0,
        )[0]
        if first:
            out = fold.scan(x, d)
            return out + before * 0 if out.requires_grad else out.to(dtype)
        return fold.scan(torch.cat([before, x], d), d).narrow(d, 1, place.length).to(dtype)

    return run


for _name in _FOLDS:
    each_spelling(_name, _folding)


# ----------------------------------------------------------------------------------------- extremes


def _extreme(name: str) -> Callable[..., None]:
    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        x, dim = _bind(*args, **canonical(kwargs))
        d = along(op, x, dim, 2)
        if d is not None:
            op.local = lambda split: (
                _climbed(name, Place.of(split, d), d)
                if is_spread(split, d)
                else getattr(torch, name)
            )

    return describe


def _climbed(name: str, place: Place, d: int) -> Callable[..., Any]:
    """The largest so far and its place; of equals the last, as torch says."""
    scan, kind = getattr(torch, name), getattr(torch.return_types, name)

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        values, places = scan(input, d)
        places = places + place.offset
        if place.length:
            last, where = (
                values.narrow(d, place.length - 1, 1),
                places.narrow(d, place.length - 1, 1),
            )
        else:
            last, where = input.sum(d, keepdim=True).to(input.dtype), places.sum(d, keepdim=True)
        lasts, wheres = all_gather_small(last, place.ranks), all_gather_small(where, place.ranks)
        if not place.before:
            # Nothing is used of the others, but their backward comes through here.
            return kind((values + lasts[:0].sum(0) if values.requires_grad else values, places))
        top, which = (t[-1:] for t in scan(lasts[place.before], 0))
        values, found = scan(torch.cat([top[0], input], d), d)
        here = torch.arange(place.offset, place.offset + place.length, device=input.device).view(
            [-1 if k == d else 1 for k in range(input.ndim)]
        )
        table = torch.cat([wheres[place.before].gather(0, which)[0], here.expand(input.shape)], d)
        return kind(
            (values.narrow(d, 1, place.length), table.gather(d, found).narrow(d, 1, place.length))
        )

    return run


each_spelling("cummax", _extreme)
each_spelling("cummin", _extreme)
