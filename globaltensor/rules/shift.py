"""Functions that move elements along a dim, or pad it: flip, roll, rot90, pad. A split dim stays split: ranks hand each other what changes places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .halo import moved, split_room
from .notation import Arg, Op, Split
from .parts import stand_in, zeros_of
from .registry import rule
from .views import passes

__all__: list[str] = []

#: Positions in the operand of the elements a to b of the result
_Positions = Callable[[int, int], np.ndarray]


def _moves(op: Op, x: Arg, places: dict[int, _Positions], rest: Callable[[Tensor, list[int]], Tensor], value: float = 0.0) -> None:
    """Elements change places along the dims of ``places``. ``rest(part, dims)`` moves them along those of the dims that this rank has whole."""
    op.exchanges = {d for d in places if x.is_split(d)}
    op.set(x, [None if d in places and d not in op.exchanges else d for d in range(x.ndim)])
    op.out = [op.dims[x.index]]

    def local(split: Split) -> Callable[..., Tensor]:
        over = split_room(split)
        steps = [moved(split, d, places[d], value) for d in over]
        whole = [d for d in places if d not in over]

        def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            for step in steps:
                input = step(input)
            return rest(input, whole)

        return run

    op.local = local


def _as_tuple(dims: Any, more: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(dims) if isinstance(dims, (tuple, list)) else (dims, *more)


def _flip(op: Op, input: Arg, dims: Any, *more: int) -> None:
    def backwards(n: int) -> _Positions:
        return lambda a, b: np.arange(n - 1 - a, n - 1 - b, -1)

    _moves(op, input, {(k := input.dim(d)): backwards(input.shape[k]) for d in _as_tuple(dims, more) if input.ndim}, lambda part, whole: part.flip(whole))
    passes(op)


rule("flip")(_flip)
rule("fliplr")(lambda op, input: _flip(op, input, (1,)))
rule("flipud")(lambda op, input: _flip(op, input, (0,)))


@rule("rot90")
def _rot90(op: Op, input: Arg, k: int = 1, dims: Sequence[int] = (0, 1)) -> None:
    turned = [input.dim(d) for d in dims]
    op.set(input, [None if d in turned and k % 4 else d for d in range(input.ndim)])
    op.out = [op.dims[0]]
    passes(op)
    if k % 4 and any(map(input.is_split, turned)):
        op.compose(_turned)


def _turned(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    if k % 4 == 2:
        return input.flip(dims)
    return input.flip(dims[1 if k % 4 == 1 else 0]).transpose(*dims)


@rule("roll")
def _roll(op: Op, input: Arg, shifts: Any = None, dims: Any = None, *more: int) -> None:
    passes(op)
    if dims in (None, (), []) and input.ndim != 1:
        op.out = [op.dims[0]]  # along the elements in one row
        return
    along = [0] if dims in (None, (), []) else [input.dim(d) for d in _as_tuple(dims, more)]
    total = dict.fromkeys(along, 0)
    for d, n in zip(along, _as_tuple(shifts), strict=True):
        total[d] += n

    def rolled(n: int, shift: int) -> _Positions:
        return lambda a, b: (np.arange(a, b) - shift) % n

    def rest(part: Tensor, whole: list[int]) -> Tensor:
        return part.roll([total[d] for d in whole], whole) if whole else part

    _moves(op, input, {d: rolled(input.shape[d], n) for d, n in total.items()}, rest)


def _padded(n: int, left: int, mode: str) -> _Positions:
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
def _pad(op: Op, input: Arg, pad: Sequence[int], mode: Any = "constant", value: float | None = None) -> None:
    if not isinstance(mode, str):  # constant_pad_nd(input, pad, value)
        mode, value = "constant", mode
    sides = {input.ndim - 1 - k: (pad[2 * k], pad[2 * k + 1]) for k in range(len(pad) // 2) if any(pad[2 * k : 2 * k + 2])}

    def rest(part: Tensor, whole: list[int]) -> Tensor:
        here = [n for k in range(len(pad) // 2) for n in (pad[2 * k : 2 * k + 2] if input.ndim - 1 - k in whole else (0, 0))]
        if not whole or part.numel():
            return F.pad(part, here, mode, value) if whole else part
        # The other modes refuse empty parts, which have nothing to reflect.
        return zeros_of(F.pad(part, here).shape, F.pad(stand_in(part, *[n or 1 for n in part.shape]), here, mode, value))

    _moves(op, input, {d: _padded(input.shape[d], left, mode) for d, (left, _) in sides.items()}, rest, value or 0.0)
    if mode != "constant" or not value:
        passes(op)
