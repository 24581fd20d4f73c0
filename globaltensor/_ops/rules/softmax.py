"""Rules of the softmax family; `rules` imports them.

Over a split dim, softmax is composed of global ops: the maximum, the sum of exponentials, the
quotient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .helpers import canonical, dims_of, reduced, register, split_in
from .notation import Arg, OpDescription
from .partial_extrema import extremum, reduce_partials
from .registry import composite, rule

__all__: list[str] = []


def _default_dim(ndim: int) -> int:
    # The dim that torch uses for dim=None, with a warning of its own.
    return 0 if ndim in (0, 1, 3) else 1


def _bind(name: str) -> Any:
    """Return a function that reads the arguments of one spelling as (x, dim, dtype)."""
    if name == "F":
        return lambda input, dim=None, _stacklevel=3, dtype=None: (
            input,
            _default_dim(input.ndim) if dim is None else dim,
            dtype,
        )
    return lambda input, dim, dtype=None: (input, dim, dtype)


def _declare_softmax(kind: str) -> None:
    for function, spelling in [
        (getattr(torch, kind, None), "torch"), (getattr(Tensor, kind, None), "torch"),
        (getattr(torch.special, kind, None), "torch"), (getattr(F, kind), "F"),
    ]:  # fmt: skip
        if function is not None:
            bind = _bind(spelling)

            def describe(op: OpDescription, *args: Any, bind: Any = bind, **kwargs: Any) -> None:
                x, dim, _ = bind(*args, **canonical(kwargs))
                dims = dims_of(x, dim)
                if split_in(x, dims) and x.shape[dims[0]]:
                    op.compose(lambda *a, **k: _over_split(kind, *bind(*a, **canonical(k))))
                reduced(op, x, dims, True, None)
                op.out = [op.dims[x.index]]

            register(function, describe)


def _over_split(kind: str, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    result = dtype or x.dtype
    # torch computes in single precision where the dtype is narrower.
    x = reduce_partials(
        x.to(torch.float32) if result in (torch.float16, torch.bfloat16) else x.to(result)
    )
    dims = dims_of(x, dim)
    if kind == "softmin":
        x = -x
    shifted = x - reduce_partials(extremum(x, dims, True, True))
    powers = shifted.exp()
    total = reduce_partials(powers.sum(dims, keepdim=True))
    out = shifted - total.log() if kind == "log_softmax" else powers / total
    return out.to(result)


for _kind in ("softmax", "log_softmax", "softmin"):
    _declare_softmax(_kind)


@rule("logsumexp")
def _logsumexp(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    def describe(input: Arg, dim: Any, keepdim: bool = False) -> None:
        reduced(op, input, dims_of(input, dim), keepdim, None)

    describe(*args, **canonical(kwargs))


def _reduces_split_dims(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    dims = dims_of(input, canonical(kwargs).get("dim", dim))
    return split_in(input, dims) and all(input.shape[d] for d in dims)


@composite("logsumexp", _reduces_split_dims)
def _split_logsumexp(*args: Any, **kwargs: Any) -> Tensor:
    def run(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
        x, dims = reduce_partials(input), dims_of(input, dim)
        if not (x.is_floating_point() or x.is_complex()):
            x = x.to(torch.get_default_dtype())
        # Of complex numbers torch subtracts the largest real part.
        top = reduce_partials(extremum(x.real if x.is_complex() else x, dims, True, True))
        # Infinite maxima would give inf - inf.
        top = torch.where(top.isinf(), 0.0, top)
        sums = reduce_partials((x - top).exp().sum(dims, keepdim=True))
        total = sums.log() + top
        return total if keepdim else total.sum(dims)

    return run(*args, **canonical(kwargs))
