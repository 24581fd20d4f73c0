"""Elementwise reductions of any dtype by torch's own kernels, for the collectives over MPI.

They work in the order of ranks, so every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ....errors import WorldError

__all__ = ["Reduction", "reduction"]

_FOLD: Final[dict[str, Callable[..., Tensor]]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_FOLD_BOOL: Final[dict[str, Callable[..., Tensor]]] = {
    "SUM": torch.logical_or,
    "PRODUCT": torch.logical_and,
    "MIN": torch.logical_and,
    "MAX": torch.logical_or,
    "BAND": torch.logical_and,
    "BOR": torch.logical_or,
    "BXOR": torch.logical_xor,
}
#: Dtypes that torch cannot add or compare -> a dtype that can hold their values for the reduction.
#: Unsigned 64-bit numbers are converted to signed ones of the same order.
_WIDER: Final = {
    torch.complex32: torch.complex64,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    **{
        dtype: torch.float32
        for name, dtype in vars(torch).items()
        if name.startswith("float8_") and isinstance(dtype, torch.dtype)
    },
}
_HALVES: Final = (torch.float16, torch.bfloat16)
_TOP_BIT: Final = -(1 << 63)


class Reduction:
    """One of torch's reductions, for tensors of one dtype, over ``size`` ranks."""

    __slots__ = ("_divide", "_fold", "_simple", "_unsigned", "_wider", "factor", "name")

    def __init__(self, op: Any, dtype: torch.dtype, size: int) -> None:
        name = self.name = getattr(op, "op", op).name
        self.factor: float | Tensor | None = op.__getstate__()[1] if name == "PREMUL_SUM" else None
        folds = _FOLD_BOOL if dtype is torch.bool else _FOLD
        self._refuse(name, dtype, folds)
        self._fold = folds[name]
        self._divide = size if name == "AVG" else None
        self._wider = _WIDER.get(dtype)
        if dtype in _HALVES and (size > 2 or name in ("AVG", "PRODUCT")):
            self._wider = torch.float32
        self._unsigned: int | None = None
        if dtype is torch.uint64:
            self._unsigned = _TOP_BIT if name in ("MIN", "MAX") else 0
        self._simple = self._divide is None and self._wider is None and self._unsigned is None

    @staticmethod
    def _refuse(name: str, dtype: torch.dtype, folds: dict[str, Callable[..., Tensor]]) -> None:
        inexact = dtype.is_floating_point or dtype.is_complex
        if name not in folds:
            raise WorldError(
                f"ReduceOp.{name} is not defined for {dtype}; there are {', '.join(folds)}"
            )
        if name in ("AVG", "PREMUL_SUM") and not inexact:
            raise WorldError(
                f"ReduceOp.{name} is not defined for {dtype}: use SUM and divide, or convert to "
                f"float"
            )
        if name in ("MIN", "MAX") and dtype.is_complex:
            raise WorldError(
                f"ReduceOp.{name} is not defined for {dtype}: complex numbers have no order"
            )
        if name in ("BAND", "BOR", "BXOR") and inexact:
            raise WorldError(
                f"ReduceOp.{name} is not defined for {dtype}: it combines the bits of integers or "
                f"bool"
            )

    def prepare(self, own: Tensor) -> Tensor:
        """Return this rank's operand of the sum, scaled if the reduction has a factor."""
        return own if self.factor is None else own * self.factor

    def __call__(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduce ``parts``, in their order, into ``out``, which may be one of them."""
        if len(parts) == 2 and self._simple:
            self._fold(parts[0], parts[1], out=out)
            return None
        if self._unsigned is not None:
            return self._unsigned_numbers(parts, out)
        if self._wider is not None:
            parts = [part.to(self._wider) for part in parts]
        if self._wider is None and self._divide is None:
            return self._fold_parts(parts, out)
        total = torch.empty_like(parts[0]) if self._wider is None else parts[0]
        self._fold_parts(parts, total)
        out.copy_(total if self._divide is None else total.div_(self._divide))
        return None

    def _fold_parts(self, parts: Sequence[Tensor], out: Tensor) -> None:
        fold = self._fold
        if len(parts) == 1:
            if out is not parts[0]:
                out.copy_(parts[0])
            return
        total = parts[0]
        for part in parts[1:-1]:
            # Do not write to `out` before the last part: `out` may be a part that is still to be
            # read.
            total = fold(total, part) if total is parts[0] else fold(total, part, out=total)
        fold(total, parts[-1], out=out)

    def _unsigned_numbers(self, parts: Sequence[Tensor], out: Tensor) -> None:
        turn = self._unsigned or 0
        signed = [part.view(torch.int64) ^ turn for part in parts]
        self._fold_parts(signed, signed[0])
        out.copy_((signed[0] ^ turn).view(torch.uint64))


_known: dict[tuple[int, torch.dtype, int], Reduction] = {}


def reduction(op: Any, dtype: torch.dtype, size: int) -> Reduction:
    """Return the reduction that torch calls ``op``.

    Raise WorldError if it makes no sense for the dtype.
    """
    key = (int(getattr(op, "op", op)), dtype, size)
    fold = _known.get(key)
    if fold is None:
        fold = Reduction(op, dtype, size)
        if fold.factor is None:  # a factor belongs to the caller's op
            _known[key] = fold
    return fold
