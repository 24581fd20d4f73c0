"""Rules of functions that move elements along a dim, pad or repeat it, or read neighbours.

The functions are flip, roll, rot90, pad, repeat, diff and unfold; `rules` imports their rules. A
split dim stays split: ranks exchange the elements that change ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...._base import torch_private
from ....boxing.halo_exchange import fetch_halo
from ..helpers import connected_zeros, dummy_like
from ..notation import Arg, LocalContext, OpDescription
from ..registry import rule
from ..view import passes
from .halo import Window, interval, is_spread, moved, reach_of, split_room

__all__: list[str] = []

#: Returns the positions in the operand of the elements a to b of the result.
_Positions = Callable[[int, int], np.ndarray]


def _describe_moves(
    op: OpDescription,
    x: Arg,
    places: dict[int, _Positions],
    rest: Callable[[Tensor, list[int]], Tensor],
    value: float = 0.0,
) -> None:
    """Describe elements that change positions along the dims of ``places``.

    ``rest(part, dims)`` moves elements along those of the dims that this rank has in full.
    """
    op.exchanges = {d for d in places if x.is_split(d)}
    op.set(x, [None if d in places and d not in op.exchanges else d for d in range(x.ndim)])
    op.out = [op.dims[x.index]]

    def local(split: LocalContext) -> Callable[..., Tensor]:
        over = split_room(split)
        steps = [moved(split, d, places[d], value) for d in over]
        whole = [d for d in places if d not in over]

        def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = input
            for step in steps:
                out = step(out)
            out = rest(out, whole)
            # torch returns a copy even where nothing moves
            return out.clone() if torch_private.shares_memory(out, input) else out

        return run

    op.local = local


def _as_tuple(dims: Any, more: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(dims) if isinstance(dims, (tuple, list)) else (dims, *more)


def _flip(op: OpDescription, input: Arg, dims: Any, *more: int) -> None:
    def backwards(n: int) -> _Positions:
        return lambda a, b: np.arange(n - 1 - a, n - 1 - b, -1)

    _describe_moves(
        op,
        input,
        {
            (k := input.dim(d)): backwards(input.shape[k])
            for d in _as_tuple(dims, more)
            if input.ndim
        },
        lambda part, whole: part.flip(whole),
    )
    passes(op)


rule("flip")(_flip)
rule("fliplr")(lambda op, input: _flip(op, input, (1,)))
rule("flipud")(lambda op, input: _flip(op, input, (0,)))


@rule("rot90")
def _rot90(op: OpDescription, input: Arg, k: int = 1, dims: Sequence[int] = (0, 1)) -> None:
    turned = [input.dim(d) for d in dims]
    op.set(input, [None if d in turned and k % 4 else d for d in range(input.ndim)])
    op.out = [op.dims[0]]
    passes(op)
    if k % 4 and any(map(input.is_split, turned)):
        op.compose(_rotate90)


def _rotate90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    if k % 4 == 2:
        return input.flip(dims)
    return input.flip(dims[1 if k % 4 == 1 else 0]).transpose(*dims)


@rule("roll")
def _roll(op: OpDescription, input: Arg, shifts: Any = None, dims: Any = None, *more: int) -> None:
    passes(op)
    if dims in (None, (), []) and input.ndim != 1:
        op.out = [op.dims[0]]  # rolls the flattened elements
        return
    along = [0] if dims in (None, (), []) else [input.dim(d) for d in _as_tuple(dims, more)]
    total = dict.fromkeys(along, 0)
    for d, n in zip(along, _as_tuple(shifts), strict=True):
        total[d] += n

    def rolled(n: int, shift: int) -> _Positions:
        return lambda a, b: (np.arange(a, b) - shift) % n

    def rest(part: Tensor, whole: list[int]) -> Tensor:
        return part.roll([total[d] for d in whole], whole) if whole else part

    _describe_moves(op, input, {d: rolled(input.shape[d], n) for d, n in total.items()}, rest)


def _padded_positions(n: int, left: int, mode: str) -> _Positions:
    def positions(a: int, b: int) -> np.ndarray:
        at = np.arange(a, b) - left
        if mode == "circular":
            return at % n
        if mode == "replicate":
            return at.clip(0, n - 1)
        if mode == "reflect":
            at = abs(at)
            return np.where(at >= n, 2 * (n - 1) - at, at)
        return np.where(at < n, at, -1).clip(-1)

    return positions


@rule([F.pad, torch.constant_pad_nd])
def _pad(
    op: OpDescription,
    input: Arg,
    pad: Sequence[int],
    mode: Any = "constant",
    value: float | None = None,
) -> None:
    if not isinstance(mode, str):  # constant_pad_nd(input, pad, value)
        mode, value = "constant", mode
    sides = {
        input.ndim - 1 - k: (pad[2 * k], pad[2 * k + 1])
        for k in range(len(pad) // 2)
        if any(pad[2 * k : 2 * k + 2])
    }

    def rest(part: Tensor, whole: list[int]) -> Tensor:
        local_pad = [
            n
            for k in range(len(pad) // 2)
            for n in (pad[2 * k : 2 * k + 2] if input.ndim - 1 - k in whole else (0, 0))
        ]
        if not whole or part.numel():
            return F.pad(part, local_pad, mode, value) if whole else part
        # The other modes refuse empty local tensors, which have nothing to reflect.
        return connected_zeros(
            F.pad(part, local_pad).shape,
            F.pad(dummy_like(part, *[n or 1 for n in part.shape]), local_pad, mode, value),
        )

    _describe_moves(
        op,
        input,
        {d: _padded_positions(input.shape[d], left, mode) for d, (left, _) in sides.items()},
        rest,
        value or 0.0,
    )
    if mode != "constant" or not value:
        passes(op)


@rule(["repeat", "tile"])
def _repeat(op: OpDescription, input: Arg, *args: Any, **kwargs: Any) -> None:
    given = args or next(iter(kwargs.values()))
    given = given[0] if isinstance(given[0], (tuple, list)) else given
    times = (1,) * (input.ndim - len(given)) + tuple(given)
    lead = len(times) - input.ndim
    passes(op)
    if lead:
        op.set(input, [d if times[lead + d] == 1 else None for d in range(input.ndim)])
        op.out = [((None,) * lead + op.dims[input.index])]
        return

    def again(n: int) -> _Positions:
        return lambda a, b: np.arange(a, b) % n

    def rest(part: Tensor, whole: list[int]) -> Tensor:
        return part.repeat([n if d in whole else 1 for d, n in enumerate(times)])

    _describe_moves(
        op, input, {d: again(input.shape[d]) for d, n in enumerate(times) if n != 1}, rest
    )


# --------------------------------------------------------------------------------------- neighbours


def _describe_windows(
    op: OpDescription,
    x: Arg,
    d: int,
    windows: Window,
    function: Callable[[Tensor], Tensor],
    nothing: Callable[[Tensor], Tensor],
) -> None:
    """Describe a result whose elements along ``d`` each come from a window of the operand.

    ``nothing(part)`` makes the result on a rank without elements of it, from the rank's local
    operand.
    """
    op.exchanges = {d}

    def local(split: LocalContext) -> Callable[..., Tensor] | None:
        if not is_spread(split, d):
            return None
        reach = reach_of(split, d, d, lambda a, b: [windows.span(a, b)])
        a, b = interval(split.outs[0], split.rank, d)

        def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            part = fetch_halo(input, d, reach)
            return function(part) if a < b else nothing(part)

        return run

    op.local = local


@rule("diff")
def _diff(
    op: OpDescription,
    input: Arg,
    n: int = 1,
    dim: int = -1,
    prepend: Arg | None = None,
    append: Arg | None = None,
) -> None:
    d = input.dim(dim)
    alone = prepend is None and append is None and input.is_split(d) and 0 < n < input.shape[d]
    op.set(input, [None if k == d and not alone else k for k in range(input.ndim)])
    for other in (prepend, append):
        if other is not None:
            op.set(other, op.dims[input.index])
    op.linear, op.out = [frozenset(range(len(op.args)))], [op.dims[input.index]]
    if alone:
        _describe_windows(
            op,
            input,
            d,
            Window(input.shape[d], n + 1, 1, 0),
            lambda part: part.diff(n, d),
            lambda part: part,
        )


@rule([torch.Tensor.unfold])
def _unfold(op: OpDescription, input: Arg, dimension: int, size: int, step: int) -> None:
    d = input.dim(dimension)
    near = input.is_split(d) and 0 < size <= input.shape[d] and step > 0
    op.set(input, [None if k == d and not near else k for k in range(input.ndim)])
    op.out, op.view = [(*op.dims[input.index], None)], True
    passes(op)
    if near:
        windows = Window(input.shape[d], size, step, 0)
        _describe_windows(
            op,
            input,
            d,
            windows,
            lambda part: part.unfold(d, size, step),
            lambda part: part.unsqueeze(-1).expand(*part.shape, size),
        )
