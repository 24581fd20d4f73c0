"""Several boxings of one kind as one collective.

The collective may start now and be awaited later. It is differentiable, and the gradients' boxings
are one collective too. The passes `coalesce_collectives` and `overlap` write these calls into
programs.

Forward and backward (DESIGN §3): all_reduce <-> all_reduce, all_gather <-> reduce_scatter. Each is
one move among the same ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from ..._base import torch_private
from ...boxing import Move, log, plan_boxing
from ...distributed.communicator import Handle, flatten
from ...distributed.world import world
from ...distributed.world_base import World
from ...sharding.spec import Spec
from .nodes import ProgramCall

__all__ = ["CoalescedCollective", "StartCollective", "WaitCollective", "move_of"]

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter")
_DTYPES: Final = frozenset(
    (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    )
)

Finish = Callable[[], list[Tensor]]


def move_of(src: Spec, dst: Spec) -> Move | None:
    """Return the single move of a boxing, or None if the boxing is not a single move.

    The gradient of the move must be a single move among the same ranks too."""
    found = _single_move(src, dst)
    back = None if found is None else _single_move(dst.dual(), src.dual())
    return found if back is not None and found is not None and back.axes == found.axes else None


def _single_move(src: Spec, dst: Spec) -> Move | None:
    if (
        src.placement is not dst.placement
        or src.shown is not src
        or dst.shown is not dst
        or src.dtype not in _DTYPES
    ):
        return None
    moves = [m for m in plan_boxing(src, dst).moves if m.kind != "keep"]
    if (
        len(moves) != 1
        or moves[0].kind not in KINDS
        or any(e.kind == "partial" and e.reduce != "sum" for e in (*src.layout, *dst.layout))
    ):
        return None
    return moves[0]


class CoalescedCollective(ProgramCall):
    """A collective that performs several boxings and returns their results.

    Each boxing is one move; all have one kind, the same ranks and one dtype. ``routes`` holds (src,
    dst, why) of each."""

    __module__ = "boxing"

    def __init__(self, routes: Sequence[tuple[Spec, Spec, str]]) -> None:
        self.routes = tuple(routes)
        found = [move_of(src, dst) for src, dst, _ in routes]
        assert all(m is not None for m in found), "only single moves can be joined"
        self.moves: tuple[Move, ...] = tuple(m for m in found if m is not None)
        self.kind = self.moves[0].kind
        self.__name__ = self.kind if len(routes) == 1 else f"{self.kind}_of_{len(routes)}"

    @cached_property
    def back(self) -> CoalescedCollective:
        """The same call for the gradients."""
        return CoalescedCollective(
            [
                (dst.dual(), src.dual(), f"backward of {why or log.EXPLICIT}")
                for src, dst, why in self.routes
            ]
        )

    def __call__(self, *locals_: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and any(t.requires_grad for t in locals_):
            return _CoalescedFunction.apply(self, *locals_)  # type: ignore[no-any-return, no-untyped-call]
        return tuple(self.begin(locals_)())

    def begin(self, locals_: Sequence[Tensor]) -> Finish:
        """Start the collective, and return a function that waits and returns the results.

        ``locals_`` may be written to meanwhile."""
        this_world, placement = world(), self.moves[0].src.placement
        if this_world.dry:  # nothing is sent, so no communicator reports it
            for src, dst, why in self.routes:
                log.record_boxing(plan_boxing(src, dst), why)
        elif log.forbidden():
            for src, dst, why in self.routes:
                log.check(plan_boxing(src, dst), why)
        if this_world.rank not in placement._coordinates:
            kept = [t.detach() for t in locals_]
            return lambda: kept
        peers = placement.fiber(this_world.rank, self.moves[0].axes)
        flats = [
            t.detach().clone() if torch_private.is_zero_tensor(t) else t.detach() for t in locals_
        ]
        with self._boxing_log(this_world):
            return _BEGIN[self.kind](self, flats, this_world.comm(peers), peers, this_world.rank)

    @cached_property
    def reasons(self) -> str:
        """The reasons of the boxings, each once."""
        return ", ".join(dict.fromkeys(why or log.EXPLICIT for _, _, why in self.routes))

    def _boxing_log(self, this_world: World) -> AbstractContextManager[Any]:
        """Return the block that logs the collective: one boxing, or several together."""
        if len(self.routes) == 1 and not this_world.dry:
            src, dst, why = self.routes[0]
            return log.boxing_sent_here(plan_boxing(src, dst), why)
        return log.exchanges("{} boxings: {}", len(self.routes), self.reasons)


def _flat_copy(flats: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors in a new buffer."""
    return torch.cat([flatten(t) for t in flats]) if len(flats) > 1 else flatten(flats[0]).clone()


def _all_reduce(
    joint: CoalescedCollective, locals_: list[Tensor], comm: Any, peers: Sequence[int], rank: int
) -> Finish:
    buffer = _flat_copy(locals_)
    handle: Handle = comm.all_reduce_async(buffer, "sum")
    shapes = [t.shape for t in locals_]

    def finish() -> list[Tensor]:
        handle.wait()
        return [
            part.view(shape)
            for part, shape in zip(
                buffer.split_with_sizes([math.prod(s) for s in shapes]), shapes, strict=True
            )
        ]

    return finish


def _all_gather(
    joint: CoalescedCollective, locals_: list[Tensor], comm: Any, peers: Sequence[int], rank: int
) -> Finish:
    shapes = [
        [m.src.local_shape(r) for r in peers] for m in joint.moves
    ]  # for each tensor, the shape of its local tensor on each rank
    numels = [[math.prod(s[i]) for s in shapes] for i in range(len(peers))]
    own_shard = _flat_copy(locals_)
    buffer = own_shard.new_empty(sum(map(sum, numels)))
    handle: Handle = comm.all_gather_into_async(own_shard, [sum(n) for n in numels], buffer)

    def finish() -> list[Tensor]:
        handle.wait()
        parts = [
            iter(theirs.split_with_sizes(n))
            for theirs, n in zip(
                buffer.split_with_sizes([sum(n) for n in numels]), numels, strict=True
            )
        ]
        out = []
        for move, shape in zip(joint.moves, shapes, strict=True):
            pieces = [next(part).view(s) for part, s in zip(parts, shape, strict=True)]
            out.append(torch.cat(pieces, move.src.layout[move.axes[0]].dim))
        return out

    return finish


def _reduce_scatter(
    joint: CoalescedCollective, locals_: list[Tensor], comm: Any, peers: Sequence[int], rank: int
) -> Finish:
    chunks = []
    for r in peers:
        chunks.append(
            _flat_copy(
                [t[_slices_within(m, r, rank)] for t, m in zip(locals_, joint.moves, strict=True)]
            )
        )
    shapes = [m.dst.local_shape(rank) for m in joint.moves]
    handle = comm.reduce_scatter_async(chunks, "sum")

    def finish() -> list[Tensor]:
        handle.wait()
        return [
            part.view(shape)
            for part, shape in zip(
                handle.value.split_with_sizes([math.prod(s) for s in shapes]), shapes, strict=True
            )
        ]

    return finish


def _slices_within(move: Move, holder: int, rank: int) -> tuple[slice, ...]:
    """Return the slices of ``holder``'s local tensor in the local tensor of ``rank``."""
    (offsets, lengths), origin = move.dst.box(holder), move.src.box(rank)[0]
    return tuple(
        slice(o - at, o - at + n) for o, n, at in zip(offsets, lengths, origin, strict=True)
    )


_BEGIN: Final[dict[str, Callable[..., Finish]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def _start_gradient_collective(joint: CoalescedCollective, grads: tuple[Tensor, ...]) -> Finish:
    """Start the collective of the gradients.

    If the gradients are differentiated in turn, run it to its end."""
    if torch.is_grad_enabled() and any(g.requires_grad for g in grads):
        gone = list(joint.back(*grads))
        return lambda: gone
    return joint.back.begin(grads)


class _CoalescedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: CoalescedCollective, *locals_: Tensor) -> tuple[Tensor, ...]:
        ctx.joint = joint
        return tuple(joint.begin(locals_)())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_start_gradient_collective(ctx.joint, grads)()


class PendingCollective:
    """A collective that has started.

    ``tokens`` are placeholders of its results, without memory, that carry the autograd graph."""

    def __init__(self, joint: CoalescedCollective) -> None:
        self.joint = joint
        self.tokens: tuple[Tensor, ...] = ()
        self.finish: Finish | None = None  # of the forward pass
        self.back: Finish | None = None  # of the backward pass


class StartCollective(ProgramCall):
    """A call that starts a `CoalescedCollective`. Its result is for `WaitCollective`."""

    __module__ = "boxing"

    def __init__(self, joint: CoalescedCollective) -> None:
        self.joint = joint
        self.__name__ = f"begin_{joint.__name__}"

    def __call__(self, *locals_: Tensor) -> PendingCollective:
        under_way = PendingCollective(self.joint)
        if torch.is_grad_enabled() and any(t.requires_grad for t in locals_):
            under_way.tokens = _BeginCollective.apply(under_way, *locals_)  # type: ignore[no-untyped-call]
        else:
            under_way.finish = self.joint.begin(locals_)
        return under_way


class WaitCollective(ProgramCall):
    """A call that waits for a started collective and returns the results.

    If the collective is one boxing, the call returns that boxing's result."""

    __module__ = "boxing"

    def __init__(self, joint: CoalescedCollective) -> None:
        self.joint = joint
        self.__name__ = f"end_{joint.__name__}"

    def __call__(self, under_way: PendingCollective) -> Any:
        if under_way.tokens:
            out = _EndCollective.apply(under_way, *under_way.tokens)  # type: ignore[no-untyped-call]
            under_way.tokens = ()
        else:
            out = _finish_once(under_way)
        return out if len(self.joint.routes) > 1 else out[0]


def _finish_once(under_way: PendingCollective) -> tuple[Tensor, ...]:
    finish, under_way.finish = under_way.finish, None
    assert finish is not None, "what was begun is awaited once"
    return tuple(finish())


class _BeginCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, under_way: PendingCollective, *locals_: Tensor) -> tuple[Tensor, ...]:
        ctx.under_way = under_way
        under_way.finish = under_way.joint.begin(locals_)
        return tuple(
            locals_[0].new_zeros(()).expand(dst.local_shape(world().rank))
            for _, dst, _ in under_way.joint.routes
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        finish, ctx.under_way.back = ctx.under_way.back, None
        return None, *finish()


class _EndCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, under_way: PendingCollective, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.under_way = under_way
        return _finish_once(under_way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The collective starts here. It is awaited where the gradient of the operand is needed, and
        # the backward pass in between runs meanwhile.
        ctx.under_way.back = _start_gradient_collective(ctx.under_way.joint, grads)
        return None, *[g.new_zeros(()).expand(g.shape) for g in grads]
