"""Rules of cumulative sums, products and extremes; `rules` imports them.

Along a split dim each rank continues the scan from the total of the ranks before it. Only one total
per rank is communicated.
"""

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
class SplitPosition:
    """The position of this rank along a split dim.

    ``ranks`` hold the dim, and ``lengths`` are their sizes. This rank has ``index`` among them and
    starts at ``offset``.
    """

    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    index: int
    offset: int

    @classmethod
    def of(cls, split: LocalContext, dim: int) -> SplitPosition:
        """Return the place along ``dim`` of operand 0."""
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
        """The ranks before this one, by index, that hold some elements."""
        return [q for q in range(self.index) if self.lengths[q]]

    @property
    def present(self) -> list[int]:
        """All ranks, by index, that hold some elements."""
        return [q for q, n in enumerate(self.lengths) if n]

    @property
    def length(self) -> int:
        return self.lengths[self.index]


def along(op: OpDescription, x: Arg, dim: int, results: int) -> int | None:
    """Describe a function that works along one dim.

    Return the dim if it is split and may stay so. Otherwise return None; the dim must not be split.
    """
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


# -------------------------------------------------------------------------------- sums and products


@dataclass(frozen=True)
class _ScanKind:
    """The three functions of one kind of scan.

    ``scan`` scans a dim. ``total`` reduces a local tensor, with the dim kept, also where it is
    empty. ``neutral`` is the total that changes nothing.
    """

    scan: Callable[[Tensor, int], Tensor]
    total: Callable[[Tensor, int], Tensor]
    neutral: float


_FOLDS = {
    "cumsum": _ScanKind(lambda x, d: x.cumsum(d), lambda x, d: x.sum(d, keepdim=True), 0.0),
    "cumprod": _ScanKind(lambda x, d: x.cumprod(d), lambda x, d: x.prod(d, keepdim=True), 1.0),
    "logcumsumexp": _ScanKind(
        lambda x, d: x.logcumsumexp(d), lambda x, d: x.logsumexp(d, keepdim=True), float("-inf")
    ),
}


def _scan_rule(spelled: str) -> Callable[..., None]:
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
            run = _local_scan(
                fold,
                SplitPosition.of(split, d),
                d,
                split.outs[0].dtype,
                world().device(split.ins[0].placement.type),
            )
            if inplace:  # the gradient needs the previous values
                return lambda x, *args, **kwargs: x.copy_(run(x.clone() if x.requires_grad else x))
            return lambda input, *args, **kwargs: run(input)

        op.local = local

    return describe


def _local_scan(
    fold: _ScanKind, place: SplitPosition, d: int, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Tensor]:
    first = not place.before
    chosen = torch.zeros(len(place.ranks), dtype=torch.bool, device=device)
    chosen[place.before] = True
    # The first rank runs the same steps as the others, forward and backward, but uses no result of
    # them. Its total can be any number.
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
        own = fold.scan(torch.cat([before, x], d), d).narrow(d, 1, place.length)
        return own.to(dtype).contiguous()

    return run


for _name in _FOLDS:
    each_spelling(_name, _scan_rule)


# ----------------------------------------------------------------------------------------- extremes


def _extremum_rule(name: str) -> Callable[..., None]:
    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        x, dim = _bind(*args, **canonical(kwargs))
        d = along(op, x, dim, 2)
        if d is not None:
            op.local = lambda split: (
                _local_extremum(name, SplitPosition.of(split, d), d)
                if is_spread(split, d)
                else getattr(torch, name)
            )

    return describe


def _local_extremum(name: str, place: SplitPosition, d: int) -> Callable[..., Any]:
    """Return the local function for the running maximum (minimum) and its position.

    Of equal elements the last counts, as in torch.
    """
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
            # No value of other ranks is used, but their backward collectives pass through here.
            return kind((values + lasts[:0].sum(0) if values.requires_grad else values, places))
        top, which = (t[-1:] for t in scan(lasts[place.before], 0))
        values, table_index = scan(torch.cat([top[0], input], d), d)
        own_places = torch.arange(
            place.offset, place.offset + place.length, device=input.device
        ).view([-1 if k == d else 1 for k in range(input.ndim)])
        table = torch.cat(
            [wheres[place.before].gather(0, which)[0], own_places.expand(input.shape)], d
        )
        return kind(
            (
                values.narrow(d, 1, place.length).contiguous(),
                table.gather(d, table_index).narrow(d, 1, place.length).contiguous(),
            )
        )

    return run


each_spelling("cummax", _extremum_rule)
each_spelling("cummin", _extremum_rule)
