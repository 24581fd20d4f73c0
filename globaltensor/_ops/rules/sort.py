"""Rules of sort, argsort, msort, kthvalue and median along a dim; `rules` imports them.

Over a split dim nothing is gathered. Each rank sorts its local tensor. A search (a few bits a
round, with counts summed over ranks) then finds the elements at given positions of the global
order.

kthvalue and median are such an element. A sort is a sample sort with exact splitters: the elements
at the ranks' borders, so the result is evenly split. The splitters determine where to cut each
local tensor. One all-to-all sends every rank the pieces of its result, and the rank merges them.
The sort is stable in every case. With many lanes it is cheaper to split these, and with few
elements to gather them: the price decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ...boxing import log
from ...boxing.halo_exchange import all_gather_small
from ...cluster import current_cluster
from ...distributed.world import world
from ...errors import FormError
from .helpers import canonical, dims_of, reduced, split_in
from .notation import Arg, LocalContext, OpDescription
from .registry import rule
from .scan import SplitPosition
from .spatial.halo import is_spread
from .strategy import SignatureChoice

__all__: list[str] = []

_BITS = 4  # bits of a key that one round of the search determines
_COMPARISON = 1e-9  # seconds of sorting per element and level


_SEARCH: Final = "search in a split dim"
_PLACES: Final = "elements to their places in a split dim"
_BACKWARD: Final = f"backward of {_PLACES}"
_DOUBLE_BACKWARD: Final = f"backward of {_BACKWARD}"

# --------------------------------------------------------------------------------------------- keys


def keys_of(x: Tensor, descending: bool) -> tuple[Tensor, int]:
    """Return integers in the order in which ``x`` is sorted, as int64, and their number of bits.

    A NaN is the largest, and both zeros are equal.
    """
    if x.dtype.is_floating_point:
        x = x.float() if x.dtype.itemsize < 4 else x
        whole, bits = (torch.int64, 64) if x.dtype == torch.float64 else (torch.int32, 32)
        raw = (x + 0.0).view(whole)  # -0.0 + 0.0 is 0.0
        keys = torch.where(raw < 0, raw ^ torch.iinfo(whole).max, raw)
        keys = torch.where(x.isnan(), torch.iinfo(whole).max, keys).long()
    else:
        # an unsigned number needs one more bit
        keys, bits = (
            x.long(),
            8 * x.dtype.itemsize + (x.dtype == torch.uint8) * _BITS,
        )
    return (~keys if descending else keys), bits


def _search_keys(lanes: Tensor, bits: int, targets: Tensor, ranks: tuple[int, ...]) -> Tensor:
    """Return the key at each of ``targets`` [lanes or 1, targets] in the order of all ranks' keys.

    ``lanes`` [lanes, own_length] are the sorted keys of this rank.
    """
    comm = world().comm(ranks)
    log.exchange(
        _SEARCH,
        lanes.shape[0] * targets.shape[1] * bits // _BITS * (1 << _BITS) * 8,
    )
    digits = torch.arange(1 << _BITS, device=lanes.device)
    least = torch.full((), -(1 << (bits - 1)), dtype=torch.int64, device=lanes.device)
    target_keys = least.expand(lanes.shape[0], targets.shape[1]).contiguous()
    goal = targets.unsqueeze(-1)
    for shift in range(bits - _BITS, -1, -_BITS):
        candidates = target_keys.unsqueeze(-1) + (digits << shift)
        counts = torch.searchsorted(lanes, candidates.flatten(1)).view(candidates.shape)
        with log.exchanges(_SEARCH):
            smaller = comm.all_reduce(counts)
        # The first candidate never has too many smaller keys.
        digit = (smaller <= goal).sum(-1) - 1
        target_keys = target_keys + (digit << shift)
    return target_keys


# ------------------------------------------------------------------------------------- the exchange


class _Route(NamedTuple):
    """The routing of elements between ranks.

    ``order``: the local elements (lanes concatenated) in the order in which they are sent.
    ``sends``: the number sent to each rank. ``receives``: the number received from each.
    ``places``: the index among the received elements of each element of the result.
    """

    ranks: tuple[int, ...]
    order: Tensor
    sends: list[int]
    receives: list[int]
    places: Tensor


def _send_along(flat: Tensor, route: _Route, why: str = _PLACES) -> Tensor:
    """Send the elements along a route, and return the received ones in the order of the ranks."""
    pieces = flat[route.order].split(route.sends)
    with log.exchanges(why):
        return torch.cat(world().comm(route.ranks).all_to_all(pieces, route.receives, fresh=False))


class _SendAlong(torch.autograd.Function):
    """The elements in the order of a route; with ``back``, in their original order again.

    ``came``: the elements that the exchange has already delivered. They are passed in a forward
    pass. A double backward passes None, and exchanges the elements.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, route: _Route, back: bool, came: Tensor | None) -> Tensor:
        ctx.route, ctx.back = route, back
        if not back:
            received = _send_along(flat, route, _DOUBLE_BACKWARD) if came is None else came
            return received[route.places]
        received = torch.empty_like(flat)
        received[route.places] = flat
        with log.exchanges(_BACKWARD):
            came = torch.cat(
                world()
                .comm(route.ranks)
                .all_to_all(received.split(route.receives), route.sends, fresh=False)
            )
        out = torch.empty_like(came)
        out[route.order] = came
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (
            _SendAlong.apply(grads[0].contiguous(), ctx.route, not ctx.back, None),  # type: ignore[no-untyped-call]
            None,
            None,
            None,
        )


def _plan_route(
    lanes: Tensor, descending: bool, place: SplitPosition, ends: list[int]
) -> tuple[_Route, Tensor]:
    """Return the route of ``lanes``, and the elements that this rank receives by it.

    ``lanes`` [lanes, own_length] are the elements of this rank. ``ends`` are the ends of the ranks'
    local results.
    """
    keys, bits = keys_of(lanes, descending)
    count, own_length = keys.shape
    local, order = keys.sort(dim=1, stable=True)
    total = sum(place.lengths)
    # the element at each of these positions is the first of another rank
    inner = [e for e in ends[:-1] if e < total]
    cuts = torch.full((count, len(ends) - 1), own_length, device=keys.device)
    if inner:
        borders = torch.tensor([inner], device=keys.device)
        first = _search_keys(local, bits, borders, place.ranks)
        less, upto = torch.searchsorted(local, first), torch.searchsorted(local, first, right=True)
        every = all_gather_small(torch.stack([less, upto - less]), place.ranks)
        # Of the keys equal to the border, take as many as still fit before it, rank by rank.
        short = borders - every[:, 0].sum(0)
        own_share = (short - every[: place.index, 1].sum(0)).clamp(min=0).minimum(upto - less)
        cuts[:, : len(inner)] = less + own_share
    counts = torch.cat([cuts, torch.full((count, 1), own_length, device=keys.device)], 1).diff(
        dim=1, prepend=cuts.new_zeros(count, 1)
    )
    every = all_gather_small(counts, place.ranks)  # [from, lanes, to]
    sending = order.flatten()
    if count > 1:  # a single lane is already in the order of the ranks
        steps = torch.arange(own_length, device=keys.device).expand(count, own_length).contiguous()
        towards = torch.searchsorted(cuts, steps, right=True)
        sending = (
            order + torch.arange(count, device=keys.device).unsqueeze(1) * own_length
        ).flatten()[towards.flatten().sort(stable=True).indices]
    sizes = every.sum(1).tolist()
    route = _Route(
        place.ranks, sending, sizes[place.index], [row[place.index] for row in sizes], sending
    )
    came = _send_along(lanes.flatten(), route)
    # Sort by key, and among equals in the order in which they arrive: by rank, and on each rank by
    # position. Then sort by lane.
    places = keys_of(came, descending)[0].sort(stable=True).indices
    if count > 1:
        lane = torch.cat(
            [
                torch.arange(count, device=keys.device).repeat_interleave(c)
                for c in every[:, :, place.index].unbind(0)
            ]
        )
        places = places[lane[places].sort(stable=True).indices]
    return route._replace(places=places), came


def _to_lanes(x: Tensor, d: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the lanes along ``d`` as ([lanes, here], the shape of the other dims)."""
    rows = x.movedim(d, -1)
    rest = tuple(rows.shape[:-1])
    return rows.reshape(math.prod(rest), rows.shape[-1]).contiguous(), rest


def _local_sort(
    split: LocalContext, d: int, descending: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    place, out = SplitPosition.of(split, d), split.outs[0]
    ends = [offsets[d] + lengths[d] for offsets, lengths in map(out.box, place.ranks)]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        lanes, rest = _to_lanes(x, d)
        shape = (*rest, split.out_shape()[d])
        if not len(lanes):
            return x.narrow(d, 0, 0).reshape(split.out_shape()), x.new_zeros(
                split.out_shape(), dtype=torch.int64
            )
        route, came = _plan_route(lanes.detach(), descending, place, ends)
        at = torch.arange(place.offset, place.offset + place.length, device=x.device).expand(
            lanes.shape
        )
        values = _SendAlong.apply(lanes.flatten(), route, False, came)  # type: ignore[no-untyped-call]
        places = _send_along(at.flatten(), route)[route.places]
        return values.view(shape).movedim(-1, d), places.view(shape).movedim(-1, d)

    return run


# ------------------------------------------------------------------------- selection of one element


def _local_select(
    split: LocalContext,
    d: int,
    keepdim: bool,
    goal: Callable[[Tensor, tuple[int, ...], int], Tensor],
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the local function that selects one element of each lane, and its position.

    The element is at the position ``goal(lanes, ranks, n)`` [lanes or 1, 1] of the lane's order. Of
    equal elements the first is taken.
    """
    place, n = SplitPosition.of(split, d), split.ins[0].shape[d]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        lanes, rest = _to_lanes(x, d)
        keys, bits = keys_of(lanes.detach(), False)
        ordered, order = keys.sort(dim=1, stable=True)
        found = _search_keys(ordered, bits, goal(lanes.detach(), place.ranks, n), place.ranks)
        at = torch.searchsorted(ordered, found)
        if place.length:
            mine = torch.searchsorted(ordered, found, right=True) > at
            local = order.gather(1, at.clamp(max=place.length - 1))
            value, where = lanes.gather(1, local), torch.where(mine, local + place.offset, n)
        else:
            value, where = lanes.sum(1, keepdim=True).to(x.dtype), torch.full_like(at, n)
        first, owner = all_gather_small(where, place.ranks).min(0)
        value = all_gather_small(value, place.ranks).gather(0, owner.unsqueeze(0))[0]
        value, first = (t.view((*rest, 1)).movedim(-1, d) for t in (value, first))
        return (value, first) if keepdim else (value.squeeze(d), first.squeeze(d))

    return run


def _median_position(lanes: Tensor, ranks: tuple[int, ...], n: int) -> Tensor:
    """Return the position of the lower median, or of the NaN in a lane that holds one."""
    lacking = _count_nans(lanes, ranks)
    return torch.where(lacking > 0, n - 1, (n - 1) // 2)


def _middle_of_numbers(lanes: Tensor, ranks: tuple[int, ...], n: int) -> Tensor:
    """Return the position of the lower median of the elements that are no NaN."""
    return (n - 1 - _count_nans(lanes, ranks)).clamp(min=0) // 2


def _count_nans(lanes: Tensor, ranks: tuple[int, ...]) -> Tensor:
    if not lanes.dtype.is_floating_point:
        return torch.zeros(len(lanes), 1, dtype=torch.int64, device=lanes.device)
    with log.exchanges(_SEARCH):
        return world().comm(ranks).all_reduce(lanes.isnan().sum(1, keepdim=True))


# -------------------------------------------------------------------------------------------- rules


_NO_ORDER = (torch.uint16, torch.uint32, torch.uint64)


def _declare_sort(
    name: str, results: int, default: int, make: Callable[[tuple[Tensor, Tensor]], Any]
) -> None:
    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        x, dim, descending = _bind(*args, **canonical(kwargs))
        dims = dims_of(x, default if dim is None else dim)
        reduced(op, x, dims, True, None, results)
        if not any(map(x.is_split, dims)) or x.dtype.is_complex or x.dtype in _NO_ORDER:
            return
        d = dims[0]
        op.whole, op.exchanges = set(), {d}
        op.out = [op.dims[x.index]] * results
        if split_in(x, dims):
            op.traffic = lambda choice: _sort_seconds(choice, d, True)

        def local(split: LocalContext) -> Callable[..., Any]:
            if not is_spread(split, d):
                return getattr(torch, name)  # type: ignore[no-any-return]
            run = _local_sort(split, d, descending)
            return lambda input, *args, **kwargs: make(run(input))

        op.local = local

    rule(name)(describe)


def _bind(
    input: Arg, dim: Any = None, descending: bool = False, stable: bool = False
) -> tuple[Arg, int | None, bool]:
    # the form that starts with `stable` has no other positional arguments
    if isinstance(dim, bool):
        raise FormError("a flag in the place of dim")
    return input, dim, descending


def _sort_seconds(choice: SignatureChoice, d: int, moving: bool) -> float:
    """Return the seconds for sorting a rank's elements.

    Where the dim is split, the search is included, and for a sort also the exchange.
    """
    spec, cluster = choice.ins[0], current_cluster()
    local_numel, n = max(1, spec.local_numel()), spec.shape[d]
    seconds = _COMPARISON * local_numel * math.log2(n + 1)
    if d not in choice.factors:
        return seconds
    ranks = spec.placement.fiber(spec.placement.flat[0], choice.factors[d])
    lanes = local_numel // max(1, spec.local_shape(spec.placement.flat[0])[d])
    rounds = math.ceil(8 * spec.dtype.itemsize / _BITS)
    counted = cluster.seconds("all_reduce", lanes * (len(ranks) - 1) * 8 << _BITS, ranks)
    # Values and their positions are exchanged.
    return (
        (1 + moving) * seconds
        + rounds * counted
        + 2 * moving * cluster.seconds("all_to_all", local_numel * 8, ranks)
    )


_declare_sort("sort", 2, -1, lambda found: torch.return_types.sort(found))
_declare_sort("argsort", 1, -1, lambda found: found[1])
_declare_sort("msort", 1, 0, lambda found: found[0])


def _declare_select(name: str, bind: Callable[..., tuple[Arg, int | None, bool, Any]]) -> None:
    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        x, dim, keepdim, goal = bind(*args, **canonical(kwargs))
        dims = dims_of(x, dim)
        reduced(op, x, dims, keepdim, None, 1 if dim is None else 2)
        if dim is None or not split_in(x, dims) or x.dtype.is_complex or x.dtype in _NO_ORDER:
            return
        d, kind = dims[0], getattr(torch.return_types, name)
        op.whole, op.exchanges = set(), {d}
        op.traffic = lambda choice: _sort_seconds(choice, d, False)

        def local(split: LocalContext) -> Callable[..., Any]:
            if not split.is_split(d):
                return getattr(torch, name)  # type: ignore[no-any-return]
            run = _local_select(split, d, keepdim, goal)
            return lambda input, *args, **kwargs: kind(run(input))

        op.local = local

    rule(name)(describe)


def _bind_kthvalue(
    input: Arg, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Arg, int | None, bool, Any]:
    return (
        input,
        dim,
        keepdim,
        lambda lanes, ranks, n: torch.full((1, 1), k - 1, device=lanes.device),
    )


_declare_select("kthvalue", _bind_kthvalue)
_declare_select(
    "median", lambda input, dim=None, keepdim=False: (input, dim, keepdim, _median_position)
)
_declare_select(
    "nanmedian", lambda input, dim=None, keepdim=False: (input, dim, keepdim, _middle_of_numbers)
)
