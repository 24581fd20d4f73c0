"""Rules of vector and matrix norms, distances and similarities; `rules` imports them.

The p-norm of a split dim is the p-norm of the local tensors' p-norms, and a kind of partial.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._base import torch_private
from ...sharding.sbp import partial_norm
from .helpers import canonical, dims_of, kept, reduced, register, split_in
from .notation import Arg, OpDescription, align
from .registry import composite, rule

__all__: list[str] = []


def _vector(
    op: OpDescription, x: Arg, p: float, dims: tuple[int, ...], keepdim: bool, function: Any
) -> None:
    """Describe a vector norm.

    ``function(x)`` computes the norm from other global functions, where no kind of partial
    represents it.
    """
    if p == 0:
        reduced(op, x, dims, keepdim, "sum")
    elif math.isinf(p) and split_in(x, dims) and all(x.shape[d] for d in dims):
        op.compose(function)
    elif math.isinf(p) or p < 1 or math.isnan(p):
        reduced(op, x, dims, keepdim, None)
    else:
        reduced(op, x, dims, keepdim, f"norm{float(p)}")
        partials = [e for e in x.spec.layout if e.is_partial]
        if partials and all(e is partial_norm(p) for e in partials):
            op.linear, op.carries = [frozenset([0])], True


def _inf_norm(p: float, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None) -> Any:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else canonical(kwargs)["input"]
        x = (x if dtype is None else x.to(dtype)).abs()
        return x.amax(dims, keepdim) if p > 0 else x.amin(dims, keepdim)

    return run


@rule([torch.linalg.vector_norm])
def _vector_norm(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    def describe(
        input: Arg,
        ord: float = 2,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        dims = dims_of(input, dim)
        _vector(op, input, float(ord), dims, keepdim, _inf_norm(float(ord), dims, keepdim, dtype))

    describe(*args, **canonical(kwargs))


def _matrix(op: OpDescription, x: Arg, ord: Any, dims: tuple[int, ...], keepdim: bool) -> None:
    reduced(op, x, dims, keepdim, "norm2.0" if ord == "fro" else None)


@rule([torch.linalg.matrix_norm])
def _matrix_norm(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    def describe(
        input: Arg,
        ord: Any = "fro",
        dim: Any = (-2, -1),
        keepdim: bool = False,
        *,
        dtype: Any = None,
    ) -> None:
        _matrix(op, input, ord, dims_of(input, dim), keepdim)

    describe(*args, **canonical(kwargs))


@rule([torch.linalg.norm])
def _linalg_norm(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    def describe(
        input: Arg,
        ord: Any = None,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        dims = dims_of(input, dim)
        if ord is None or len(dims) == 1:
            p = 2.0 if ord is None else float(ord)
            _vector(op, input, p, dims, keepdim, _inf_norm(p, dims, keepdim, dtype))
        else:
            _matrix(op, input, ord, dims, keepdim)

    describe(*args, **canonical(kwargs))


@rule([torch.norm, torch.Tensor.norm])
def _norm(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    def describe(
        input: Arg,
        p: Any = "fro",
        dim: Any = None,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        dims = dims_of(input, dim)
        if p == "nuc":
            reduced(op, input, dims, keepdim, None)
        else:
            order = 2.0 if p is None or p == "fro" else float(p)
            _vector(op, input, order, dims, keepdim, _inf_norm(order, dims, keepdim, dtype))

    describe(*args, **canonical(kwargs))


@rule([torch.norm_except_dim])
def _norm_except(op: OpDescription, v: Arg, pow: float = 2, dim: int = 0) -> None:
    op.compose(
        lambda v, pow=2, dim=0: torch.linalg.vector_norm(
            v,
            pow,
            None if dim == -1 else [d for d in range(v.ndim) if d != dim % v.ndim],
            dim != -1,
        )
    )


@rule([torch_private.weight_norm])
def _weight_norm(op: OpDescription, v: Arg, g: Arg, dim: int = 0) -> None:
    """Describe a weight as a direction and its lengths (Salimans and Kingma 2016).

    torch's kernel divides by the number of rows, and some rank may have none.
    """
    op.compose(lambda v, g, dim=0: v * (g / torch.norm_except_dim(v, 2, dim)))


# ---------------------------------------------------------------------------------------- distances


def _align_two(op: OpDescription, a: Arg, b: Arg) -> tuple[Any, ...]:
    """Align two operands that broadcast, and return the names of the result's dims."""
    (first, second), result = align([a.shape, b.shape])
    op.set(a, first)
    op.set(b, second)
    return result


def _any_split(a: Any, b: Any, dim: int | None) -> bool:
    return any(
        x.is_split(d) for x in (a, b) for d in range(x.ndim) if dim is None or d - x.ndim == dim
    )


@rule("dist")
def _dist(op: OpDescription, input: Arg, other: Arg, p: float = 2) -> None:
    op.whole = set(_align_two(op, input, other))
    op.out = [()]


@composite("dist", lambda input, other, p=2: _any_split(input, other, None))
def _split_dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(input - other, p)


def _negative_dim(a: Any, b: Any, dim: int) -> int:
    n = max(a.ndim, b.ndim)
    return dim if dim < 0 else dim - n


def _cosine_split(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> bool:
    return _any_split(x1, x2, _negative_dim(x1, x2, dim))


@rule("cosine_similarity")
def _cosine(op: OpDescription, x1: Arg, x2: Arg, dim: int = 1, eps: float = 1e-8) -> None:
    names = _align_two(op, x1, x2)
    if not names:  # two numbers
        op.out = [()]
        return
    at = _negative_dim(x1, x2, dim) % len(names)
    op.whole = {names[at]}
    op.out = [kept(names, (at,), False)]


@composite("cosine_similarity", _cosine_split)
def _split_cosine(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    x1, x2 = torch.broadcast_tensors(x1, x2)
    first, second = (torch.linalg.vector_norm(x, 2, dim).clamp_min(eps) for x in (x1, x2))
    return (x1 * x2).sum(dim) / (first * second)


def _pairwise(
    op: OpDescription, x1: Arg, x2: Arg, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> None:
    names = _align_two(op, x1, x2)
    if _any_split(x1, x2, -1):
        op.compose(_split_pairwise)
    op.whole = {names[-1]}
    op.out = [kept(names, (len(names) - 1,), keepdim)]


def _split_pairwise(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


register(torch.pairwise_distance, _pairwise)
register(F.pairwise_distance, _pairwise)
register(torch.cdist, lambda op, *args, **kwargs: _cdist(op, *args, **kwargs))


def _cdist(
    op: OpDescription, x1: Arg, x2: Arg, p: float = 2.0, compute_mode: str | None = None
) -> None:
    (first, second), lead = align([x1.shape[:-2], x2.shape[:-2]])
    op.set(x1, (*first, "p", "k"))
    op.set(x2, (*second, "r", "k"))
    op.out, op.whole = [(*lead, "p", "r")], {"k"}
