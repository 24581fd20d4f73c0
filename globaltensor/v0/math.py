"""``flow.math``: elementwise ops, comparisons and reductions on blobs.

Most functions are generated from tables that map a name of the interface to a torch function. User
code calls them inside job functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .blob import Blob, apply, named, own_step
from .errors import JobError
from .ops import cast

_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs, "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin,
    "asinh": torch.asinh, "atan": torch.atan, "atanh": torch.atanh,
    "ceil": torch.ceil, "cos": torch.cos, "cosh": torch.cosh, "erf": torch.erf, "erfc": torch.erfc,
    "exp": torch.exp, "expm1": torch.expm1,
    "floor": torch.floor, "gelu": F.gelu, "gelu_v2": F.gelu, "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish, "lgamma": torch.lgamma, "log": torch.log,
    "log1p": torch.log1p, "log_sigmoid": F.logsigmoid, "logical_not": torch.logical_not,
    "mish": F.mish, "negative": torch.neg, "reciprocal": torch.reciprocal,
    "relu": torch.relu, "relu6": F.relu6, "rint": torch.round, "round": torch.round,
    "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid,
    "sigmoid_v2": torch.sigmoid, "sign": torch.sign, "sin": torch.sin, "sinh": torch.sinh,
    "softplus": F.softplus, "sqrt": torch.sqrt, "square": torch.square,
    "swish": F.silu, "tan": torch.tan, "tanh": torch.tanh, "tanh_v2": torch.tanh,
}  # fmt: skip


def _squared_difference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.square(x - y)


def _divide_no_nan(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    safe = torch.where(y == 0, torch.ones_like(y), y)
    return torch.where(y == 0, torch.zeros_like(x / safe), x / safe)


def _xdivy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x / y``, and 0 wherever x is 0, even where y is 0."""
    out = x / torch.where(x == 0, torch.ones_like(y), y)
    return torch.where(x == 0, torch.zeros_like(out), out)


def _floordiv(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="floor")


_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "atan2": torch.atan2, "divide": torch.div, "divide_no_nan": _divide_no_nan,
    "equal": torch.eq, "floor_mod": torch.remainder,
    "floordiv": _floordiv, "fmod": torch.fmod, "greater": torch.gt, "greater_equal": torch.ge,
    "less": torch.lt, "less_equal": torch.le,
    "logical_and": torch.logical_and, "maximum": torch.maximum, "minimum": torch.minimum,
    "mod": torch.remainder, "multiply": torch.mul,
    "not_equal": torch.ne, "pow": torch.pow, "scalar_add": torch.add, "scalar_mul": torch.mul,
    "squared_difference": _squared_difference,
    "subtract": torch.sub, "xdivy": _xdivy, "xlogy": torch.xlogy,
}  # fmt: skip


def _dims(x: torch.Tensor, axis: Any) -> list[int]:
    return list(range(x.dim())) if axis is None else [axis] if isinstance(axis, int) else list(axis)


def _product(x: torch.Tensor, axis: list[int], keepdim: bool) -> torch.Tensor:
    for d in sorted((a % x.dim() for a in axis), reverse=True):
        x = x.prod(d, keepdim=keepdim)
    return x


def _all(x: torch.Tensor, axis: list[int], keepdim: bool) -> torch.Tensor:
    return torch.amin(x.bool().to(torch.uint8), axis, keepdim).to(torch.int8)


def _any(x: torch.Tensor, axis: list[int], keepdim: bool) -> torch.Tensor:
    return torch.amax(x.bool().to(torch.uint8), axis, keepdim).to(torch.int8)


def _euclidean(x: torch.Tensor, axis: list[int], keepdim: bool) -> torch.Tensor:
    return x.square().sum(axis, keepdim).sqrt()


def _deviation(x: torch.Tensor, axis: list[int], keepdim: bool) -> torch.Tensor:
    return torch.var(x, axis, correction=0, keepdim=keepdim).sqrt()


def _variance(x: torch.Tensor, axis: list[int], keepdim: bool) -> torch.Tensor:
    return torch.var(x, axis, correction=0, keepdim=keepdim)


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "reduce_all": _all, "reduce_any": _any, "reduce_euclidean_norm": _euclidean,
    "reduce_logsumexp": torch.logsumexp, "reduce_max": torch.amax,
    "reduce_mean": torch.mean, "reduce_min": torch.amin, "reduce_prod": _product,
    "reduce_std": _deviation, "reduce_sum": torch.sum,
    "reduce_variance": _variance,
}  # fmt: skip


def _reduced(
    x: torch.Tensor, function: Callable[..., torch.Tensor], axis: Any, keepdims: bool
) -> torch.Tensor:
    dims = _dims(x, axis)
    return function(x, dims, keepdims) if dims else x


def _unary(op: Callable[..., Any], called: str) -> Callable[..., Any]:
    def run(x: Blob, name: str | None = None) -> Blob:
        return apply(op, x, op_name=name)  # type: ignore[no-any-return]

    return named(run, called, f"``torch.{getattr(op, '__name__', called)}``, element by element.")


def _binary(op: Callable[..., Any], called: str) -> Callable[..., Any]:
    def run(x: Any, y: Any, name: str | None = None) -> Blob:
        x, y = (
            v if isinstance(v, Blob) else _constant_like(v, x if isinstance(x, Blob) else y)
            for v in (x, y)
        )
        return apply(op, x, y, op_name=name)  # type: ignore[no-any-return]

    return named(
        run,
        called,
        f"``torch.{getattr(op, '__name__', called).lstrip('_')}`` of two blobs, or a blob and a "
        f"number, element by element.",
    )


def _reduction(op: Callable[..., Any], called: str) -> Callable[..., Any]:
    def run(
        input_tensor: Blob,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Blob:
        return apply(_reduced, input_tensor, op, axis, keepdims, op_name=name or called)  # type: ignore[no-any-return]

    return named(run, called, f"``{called.removeprefix('reduce_')}`` over dims, by default all.")


def _constant_like(value: Any, blob: Any) -> Any:
    """Record a number as a 0-dim constant blob, because torch's binary functions want two tensors.

    ``blob`` is the other operand and sets the dtype: its own if it is floating-point or ``value``
    is an int, otherwise float32. Raise JobError unless ``blob`` is a blob and ``value`` a number.
    """
    if not isinstance(blob, Blob) or not isinstance(value, (int, float)):
        raise JobError(f"flow.math: blobs and numbers are wanted, got {value!r}")
    whole = isinstance(value, int) or not blob.dtype.is_floating_point
    dtype = (
        blob.dtype
        if blob.dtype.is_floating_point or (whole and isinstance(value, int))
        else torch.float32
    )
    return own_step("constant", value, (), dtype, shape=(), dtype=dtype, times=1, variable=True)


for _name, _op in _UNARY.items():
    globals()[_name] = _unary(_op, _name)
for _name, _op in _BINARY.items():
    globals()[_name] = _binary(_op, _name)
for _name, _op in _REDUCTIONS.items():
    globals()[_name] = _reduction(_op, _name)


def _total(*xs: torch.Tensor) -> torch.Tensor:
    out = xs[0]
    for x in xs[1:]:
        out = out + x
    return out


def add_n(inputs: Sequence[Blob], name: str | None = None) -> Blob:
    """Add blobs elementwise, from left to right."""
    return apply(_total, *inputs, op_name=name)  # type: ignore[no-any-return]


def clip_by_value(
    values: Blob,
    min_value: float | None = None,
    max_value: float | None = None,
    name: str | None = None,
) -> Blob:
    """Clamp elements to ``min_value`` and ``max_value``; None leaves that side open."""
    return apply(torch.clamp, values, min_value, max_value, op_name=name)  # type: ignore[no-any-return]


def _top(x: torch.Tensor, k: int, sort: bool) -> torch.Tensor:
    return torch.topk(x, k, sorted=sort).indices.to(torch.int32)


def top_k(
    input: Blob, axis: int = -1, k: int = 1, sorted: bool = True, name: str | None = None
) -> Blob:
    """Return the int32 indices of the ``k`` largest elements along the last dim.

    Raise JobError for another ``axis``.
    """
    if axis % len(input.shape) != len(input.shape) - 1:
        raise JobError("top_k: only the last dim is searched; transpose another dim to the end")
    return apply(_top, input, k, sorted, op_name=name)  # type: ignore[no-any-return]


def _largest(x: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.argmax(x, axis).to(torch.int32)


def argmax(
    input: Blob, axis: int = -1, output_type: torch.dtype | None = None, name: str | None = None
) -> Blob:
    """Return the index of the largest element along a dim, as int32 or ``output_type``."""
    out = apply(_largest, input, axis, op_name=name)
    return out if output_type is None else cast(out, output_type)


def l2_normalize(
    input: Blob, axis: int | None = None, epsilon: float = 1e-12, name: str | None = None
) -> Blob:
    """Divide by the Euclidean norm along a dim (None: the first dim).

    ``epsilon`` is added to the squared norm.
    """
    return apply(_l2, input, 0 if axis is None else axis, epsilon, op_name=name)  # type: ignore[no-any-return]


def _l2(x: torch.Tensor, axis: int, epsilon: float) -> torch.Tensor:
    return x * (x.square().sum(axis, keepdim=True) + epsilon).rsqrt()


def polyval(coeffs: Sequence[float], x: Blob, name: str | None = None) -> Blob:
    """Evaluate a polynomial at ``x``; ``coeffs`` starts with the highest power's coefficient."""
    out: Any = x * 0 + coeffs[0]
    for c in coeffs[1:]:
        out = out * x + c
    return out  # type: ignore[no-any-return]


__all__ = [
    *_UNARY,
    *_BINARY,
    *_REDUCTIONS,
    "add_n",
    "argmax",
    "clip_by_value",
    "l2_normalize",
    "polyval",
    "top_k",
]
