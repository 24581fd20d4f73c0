"""Measured calls: the key of a measurement, and the local call to time.

A cluster saves under this key the seconds of a call on one rank's local tensors. `strategies.py`
and `auto/calibrate/op_accuracy.py` use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..._base.pytree import replaced, tensors_in
from ...boxing.moves import Layout
from ..ir.op_graph import Call, Value
from .reshard_cost import ReshardCosts

__all__ = ["local_call", "op_key", "parts"]

Shape = tuple[int, ...]


def parts(operands: Sequence[Value], come: Sequence[Layout], prices: ReshardCosts) -> list[Shape]:
    """Return the shapes of the largest local tensors of operands in these layouts."""
    return [prices.local_shape(v.shape, layout) for v, layout in zip(operands, come, strict=True)]


def op_key(call: Call, operands: Sequence[Value], shapes: Sequence[Shape]) -> str | None:
    """Return the key in ``Cluster.ops`` of a call on local tensors of these shapes.

    The key has the function, the shape and dtype of each operand, a mark where a gradient flows to
    it, and all other arguments. It is the same in every process. The result is None for calls that
    cannot be named so: properties, and calls with arguments that print as an address.

    >>> x = Value(0, (4, 8), torch.float32, True, -1, "x")
    >>> op_key(Call(0, "relu", torch.relu, (torch.empty(0),), {}, (0,), (1,), "", "", False), [x], [(2, 8)])
    'relu(float32[2, 8]~)'
    """  # noqa: E501
    name = getattr(call.func, "__qualname__", "") or getattr(call.func, "__name__", "")
    if (
        not operands
        or not name
        or name.endswith("__get__")
        or len(tensors_in((call.args, call.kwargs), [])) != len(operands)
    ):
        return None
    marks = iter(
        [
            _KeyText(f"{str(v.dtype).removeprefix('torch.')}{list(s)}{'~' if v.grad else ''}")
            for v, s in zip(operands, shapes, strict=True)
        ]
    )
    args, kwargs = replaced((call.args, call.kwargs), marks)
    told = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
    return None if " at 0x" in told else f"{name.rpartition('.')[2]}({told})"


class _KeyText:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


Local = tuple[Callable[..., Any], tuple[Any, ...]]


def local_call(
    call: Call, operands: Sequence[Value], shapes: Sequence[Shape], device: torch.device
) -> Local | None:
    """Return the call and its arguments on one rank: random local tensors of these shapes.

    The result is None where the call is not possible on local tensors. For example another argument
    may name a global size, or the call may write into a tensor to which a gradient flows. The
    answer is the same on every rank and does not depend on free memory, because the call is tried
    on meta tensors.
    """
    args = (list(map(_empty, operands, shapes)), call)
    try:
        with torch.enable_grad():
            outs = tensors_in(_run(*args), [])
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    if any(v.grad for v in operands) and not any(t.requires_grad for t in outs):
        return None
    # Indices must be in range for any dim they index: they stay below the smallest size of the
    # other operands.
    real = [
        n
        for v, s in zip(operands, shapes, strict=True)
        if v.dtype.is_floating_point
        for n in s
        if n > 1
    ]
    return _run, (
        [
            _random(v, s, min(real, default=2), device)
            for v, s in zip(operands, shapes, strict=True)
        ],
        call,
    )


def _run(operands: Sequence[torch.Tensor], call: Call) -> Any:
    these: Iterator[torch.Tensor] = iter(operands)
    args = replaced(call.args, these)
    return call.func(*args, **replaced(call.kwargs, these))


def _empty(value: Value, shape: Shape) -> torch.Tensor:
    return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.grad)


def _random(value: Value, shape: Shape, most: int, device: torch.device) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        drawn = torch.randn(
            shape,
            generator=source,
            dtype=torch.complex64 if value.dtype.is_complex else torch.float32,
        )
        return drawn.to(device, value.dtype).requires_grad_(value.grad)
    return torch.randint(2 if value.dtype is torch.bool else most, shape, generator=source).to(
        device, value.dtype
    )
