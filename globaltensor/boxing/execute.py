"""Run a plan on a local tensor. `box` calls `run`.

The executor decides nothing. Each move is compiled once for a rank into a function, with all
offsets computed.

A result may share memory with the input (a slice is a view, a mask returns its input). `box` says
when that matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from .._base.refusals import no_values_message
from .._base.torch_private import is_batched, map_batch, profiling
from .._base.user_code import user_line
from ..distributed.world import world
from ..distributed.world_base import World
from ..errors import PlacementError
from .log import range_name
from .moves import LOCAL, Box, Move, recv_slices, send_slices
from .planner import BoxingPlan

__all__ = ["run"]

Step = Callable[[Tensor, World], Tensor]
Slices = tuple[slice, ...]

#: Dtypes for which some kernels are missing on some devices (cat, narrow copy, zeros). They are
#: moved as these dtypes, bit by bit.
_CARRIERS: Final = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex32: torch.int32,
}


def run(route: BoxingPlan, local: Tensor, why: str = "") -> Tensor:
    """Return the local tensor of ``route.dst`` from that of ``route.src``, without gradient.

    All ranks of both placements must call this function. A rank outside the source passes any
    tensor. A rank outside the destination gets an empty ``(0,)`` tensor. The result may share
    memory with ``local``. ``why``: the operation that needs the move, for errors.
    """
    this_world = world()
    if route.bytes and this_world.compares:
        this_world.history(route.places).record(route.cached_digest or route.digest)
        this_world.purpose = why, route
    key = ~this_world.rank if this_world.dry or route.on_meta else this_world.rank
    program = route.programs.get(key)
    if program is None:
        program = route.programs[key] = _compile(
            route, this_world.rank, _STEPS if key == this_world.rank else _DRY_STEPS
        )
    try:
        local = local.detach()
    except RuntimeError:  # torch's own vmap, over gradients of plain tensors, has no rule for it
        if is_batched(local):
            return map_batch(lambda row: run(route, row, why), local)
        raise
    try:
        if route.bytes and profiling():
            with record_function(range_name(route)):
                return _run_steps(cast("list[Step]", program), local, this_world)
        for step in cast("list[Step]", program):
            local = step(local, this_world)
    except NotImplementedError:
        if not local.is_meta:
            raise
        name = f"{why or 'to_global'} of {route.src!r}"
        raise PlacementError(f"{user_line()}\n{no_values_message(name)}") from None
    finally:
        this_world.purpose = ""
    return local


def _run_steps(program: list[Step], local: Tensor, this_world: World) -> Tensor:
    for step in program:
        local = step(local, this_world)
    return local


def _compile(
    route: BoxingPlan, rank: int, steps: Mapping[str, Callable[[Move, int], Step | None]]
) -> list[Step]:
    program = []
    for move in route.moves:
        if rank in move.src.placement._coordinates or rank in move.dst.placement._coordinates:
            step = steps[move.kind](move, rank)
            if step is not None:
                carrier = _CARRIERS.get(move.src.dtype)
                program.append(
                    step
                    if carrier is None or move.kind in ("all_reduce", "reduce_scatter")
                    else _run_as_carrier(step, carrier, move.dst.dtype)
                )
    return program


def _run_as_carrier(step: Step, carrier: torch.dtype, dtype: torch.dtype) -> Step:
    def carried(t: Tensor, this_world: World) -> Tensor:
        return step(t.resolve_conj().view(carrier), this_world).view(dtype)

    return carried


def _relative_slices(inner: Box, outer: Box) -> Slices:
    """Return the slices of a box inside another one that contains it."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(*inner, outer[0], strict=True))


def _intersection(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes: of length 0 in each dim where they are disjoint."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(o + n, p + m) for o, n, p, m in zip(*a, *b, strict=True))
    return low, tuple(max(0, h - o) for o, h in zip(low, high, strict=True))


def _peers(move: Move, rank: int) -> tuple[int, ...]:
    return move.src.placement.fiber(rank, move.axes)


def _keep(move: Move, rank: int) -> None:
    return None


def _slice(move: Move, rank: int) -> Step:
    type_ = move.dst.placement.type
    other_device = type_ != move.src.placement.type
    if rank not in move.dst.placement._coordinates:
        return _drop_local(type_)
    shape = move.dst.local_shape(rank)
    if 0 in shape:
        # This rank need not hold anything of the source.
        return lambda t, this_world: torch.empty(
            shape, dtype=t.dtype, device=this_world.device(type_)
        )
    where = _relative_slices(move.dst.box(rank), move.src.box(rank))

    def step(t: Tensor, this_world: World) -> Tensor:
        part = t[where] if where else t
        return part.to(this_world.device(type_)) if other_device else part

    return step


def _drop_local(type_: str) -> Step:
    return lambda t, this_world: torch.empty(0, dtype=t.dtype, device=this_world.outside(type_))


def _copy(move: Move, rank: int) -> Step:
    type_ = move.dst.placement.type
    return lambda t, this_world: t.to(this_world.device(type_))


def _mask(move: Move, rank: int) -> Step | None:
    # For a max or min every rank may hold the value. For a sum (or norm) only one rank may.
    where, layout = move.dst.placement._coordinates[rank], move.dst.layout
    if any(where[a] and layout[a].reduce not in ("max", "min") for a in move.axes):
        # The rank whose value stays keeps its strides, and all ranks tell the same strides.
        return lambda t, this_world: torch.zeros_like(t)
    return None


def _pad(move: Move, rank: int) -> Step:
    shape, where = (
        move.dst.local_shape(rank),
        _relative_slices(move.src.box(rank), move.dst.box(rank)),
    )
    around = []  # the rest of the result, so that each element is written once
    for dim, (part, n) in enumerate(zip(where, shape, strict=True)):
        around += [
            (*where[:dim], edge)
            for edge in (slice(0, part.start), slice(part.stop, n))
            if edge.start < edge.stop
        ]

    def step(t: Tensor, this_world: World) -> Tensor:
        out = t.new_empty(shape)
        # A matrix in column-major order, as gradients of weights are: torch is twice as fast where
        # it may transpose the matrix in one copy.
        out[where] = t.contiguous() if t.dim() == 2 else t
        for rest in around:
            out[rest].zero_()
        return out

    return step


def _reduction(move: Move) -> tuple[str, float]:
    """Return (op of the collective, p of a norm or 0)."""
    reduce = move.src.layout[move.axes[0]].reduce
    p = float(reduce.removeprefix("norm")) if reduce.startswith("norm") else 0.0
    return ("max", p) if p == math.inf else ("sum" if p else reduce, p)


def _reduce_powers(collective: Step, p: float) -> Step:
    """Reduce norms as sums of powers, half types in float32."""
    if not p or p == math.inf:
        return collective

    def step(t: Tensor, this_world: World) -> Tensor:
        wide = t.to(torch.float32) if t.dtype in (torch.float16, torch.bfloat16) else t
        return collective(wide.abs().pow(p), this_world).pow(1 / p).to(t.dtype)

    return step


def _all_reduce(move: Move, rank: int) -> Step | None:
    peers, (op, p) = _peers(move, rank), _reduction(move)
    if 0 in move.dst.local_shape(rank):
        return None
    return _reduce_powers(lambda t, this_world: this_world.comm(peers).all_reduce(t, op), p)


def _reduce_scatter(move: Move, rank: int) -> Step:
    peers, (op, p) = _peers(move, rank), _reduction(move)
    own_box = move.src.box(rank)
    chunks = [_relative_slices(move.dst.box(r), own_box) for r in peers]
    return _reduce_powers(
        lambda t, this_world: this_world.comm(peers).reduce_scatter(
            [t[where] for where in chunks], op
        ),
        p,
    )


def _pieces_are_contiguous(shape: Sequence[int], dim: int) -> bool:
    """Return True if pieces along ``dim`` are contiguous in memory, one after the other."""
    return all(n == 1 for n in shape[:dim])


def _join(parts: list[Tensor], shapes: list[tuple[int, ...]], dim: int) -> Tensor:
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


def _all_gather(move: Move, rank: int) -> Step:
    peers, dim, shape = (
        _peers(move, rank),
        move.src.layout[move.axes[0]].dim,
        move.dst.local_shape(rank),
    )
    shapes = [move.src.local_shape(r) for r in peers]
    numels = [math.prod(s) for s in shapes]
    if not _pieces_are_contiguous(shape, dim):
        return lambda t, this_world: _join(
            this_world.comm(peers).all_gather(t, numels, fresh=False), shapes, dim
        )

    def step(t: Tensor, this_world: World) -> Tensor:
        out = torch.empty(shape, dtype=t.dtype, device=t.device)
        this_world.comm(peers).all_gather_into(t, numels, out.view(-1))
        return out

    return step


def _all_to_all(move: Move, rank: int) -> Step:
    peers, dim, shape = (
        _peers(move, rank),
        move.src.layout[move.axes[0]].dim,
        move.dst.local_shape(rank),
    )
    before, after = move.src.box(rank), move.dst.box(rank)
    sends = [_relative_slices(_intersection(before, move.dst.box(r)), before) for r in peers]
    shapes = [_intersection(move.src.box(r), after)[1] for r in peers]
    numels, longest = (
        [math.prod(s) for s in shapes],
        max(move.src.local_numel(), move.dst.local_numel()),
    )
    if not _pieces_are_contiguous(shape, dim):
        return lambda t, this_world: _join(
            this_world.comm(peers).all_to_all(
                [t[where] for where in sends], numels, fresh=False, longest=longest
            ),
            shapes,
            dim,
        )

    def step(t: Tensor, this_world: World) -> Tensor:
        out = torch.empty(shape, dtype=t.dtype, device=t.device)
        this_world.comm(peers).all_to_all_into(
            [t[where] for where in sends], numels, out.view(-1), longest
        )
        return out

    return step


def _exchange(move: Move, rank: int) -> Step:
    src, dst = move.src, move.dst
    members = tuple(sorted({*src.placement.flat, *dst.placement.flat}))
    index = {r: i for i, r in enumerate(members)}
    sends = [(index[r], src_slices) for r, src_slices in send_slices(src, dst, rank)]
    incoming = recv_slices(src, dst, rank)
    receives = rank in dst.placement._coordinates
    shape = dst.local_shape(rank)
    # Messages between device types go through the host, where every rank can communicate.
    wire = src.placement.type if src.placement.type == dst.placement.type else "cpu"
    direct = (
        [
            torch.empty(shape, device="meta")[dst_slices].is_contiguous()
            for _, _, dst_slices in incoming
        ]
        if receives
        else []
    )

    def step(t: Tensor, this_world: World) -> Tensor:
        comm, device = this_world.comm(members), this_world.device(wire)
        outgoing = {i: t[where].to(device) for i, where in sends}
        out = (
            torch.empty(shape, dtype=t.dtype, device=device)
            if receives
            else torch.empty(0, dtype=t.dtype, device=this_world.outside(dst.placement.type))
        )
        buffers: dict[int, Tensor] = {}
        for (who, src_slices, dst_slices), straight in zip(incoming, direct, strict=True):
            if who == rank:
                out[dst_slices] = t[src_slices]
            else:
                numel = math.prod(s.stop - s.start for s in dst_slices)
                buffers[index[who]] = (
                    out[dst_slices].view(-1)
                    if straight
                    else torch.empty(numel, dtype=t.dtype, device=device)
                )
        comm.exchange_into(outgoing, buffers, device)
        for (who, _, dst_slices), straight in zip(incoming, direct, strict=True):
            if who != rank and not straight:
                out[dst_slices] = buffers[index[who]].view([s.stop - s.start for s in dst_slices])
        return out.to(this_world.device(dst.placement.type)) if receives else out

    return step


_STEPS: Final[dict[str, Callable[[Move, int], Step | None]]] = {
    "keep": _keep,
    "slice": _slice,
    "copy": _copy,
    "mask": _mask,
    "pad": _pad,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "exchange": _exchange,
}


def _dry_collective(move: Move, rank: int) -> Step | None:
    """Compile a move that needs other ranks for a dry run: only the result's shape is right."""
    src, dst = move.src, move.dst
    peers = (
        _peers(move, rank)
        if move.axes
        else tuple(sorted({*src.placement.flat, *dst.placement.flat}))
    )
    shape, type_, receives = (
        dst.local_shape(rank),
        dst.placement.type,
        rank in dst.placement._coordinates,
    )
    if move.kind == "all_reduce" and 0 in shape:
        return None

    def step(t: Tensor, this_world: World) -> Tensor:
        if this_world.dry:
            this_world.comm(peers).barrier()
        same = move.axes or t.device.type == "meta"
        return torch.empty(
            shape,
            dtype=t.dtype,
            device=t.device
            if same
            else this_world.device(type_)
            if receives
            else this_world.outside(type_),
        )

    return step


_DRY_STEPS: Final = {
    kind: step if kind in LOCAL else _dry_collective for kind, step in _STEPS.items()
}
