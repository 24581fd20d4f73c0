"""What the rules of several families share: reading arguments as torch does, describing reductions,
and parts that hold no element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .notation import Arg, Dims, Factor, LocalContext, OpDescription
from .registry import RULES, Rule

__all__ = [
    "canonical",
    "connected_zeros",
    "dims_of",
    "dummy_like",
    "kept",
    "operands",
    "reduced",
    "register",
    "skip_when_empty",
    "split_in",
    "zeros_connected",
]  # fmt: skip


def canonical(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords as torch names them: it takes NumPy's ``axis`` and ``keepdims`` as well."""
    return {
        {"axis": "dim", "keepdims": "keepdim", "x": "input", "A": "input"}.get(k, k): v
        for k, v in kwargs.items()
        if k != "out"
    }


def dims_of(x: Any, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The dims that ``dim`` names, from the front; None and an empty list name all of them."""
    n = max(x.ndim, 1)
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(x.ndim))
    return tuple(sorted({_dim(d, n) for d in ([dim] if isinstance(dim, int) else dim)}))


def _dim(d: int, n: int) -> int:
    if not -n <= d < n:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {d})"
        )
    return d % n


def kept(names: Sequence[Factor | None], dims: Sequence[int], keepdim: bool) -> Dims:
    """The dims that a reduction over ``dims`` leaves of ``names``."""
    return tuple(None if d in dims else f for d, f in enumerate(names) if keepdim or d not in dims)


def reduced(
    op: OpDescription,
    x: Arg,
    dims: Sequence[int],
    keepdim: bool,
    kind: str | None,
    results: int = 1,
) -> None:
    """Describe a reduction of ``x`` over ``dims``: partial results of this kind, or, where it is
    None, dims that must be whole."""
    names = tuple(range(x.ndim))
    op.set(x, names)
    op.out = [kept(names, dims, keepdim)] * results
    if kind is None:
        op.whole = {d for d in dims if d < x.ndim}
    else:
        op.reduce = {d: kind for d in dims if d < x.ndim}


def operands(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors of a call, in the order in which a rule sees them."""
    found: list[Tensor] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (tuple, list)):
            found += operands(a, {})
    return found


def split_in(x: Any, dims: Sequence[int]) -> bool:
    """Whether some axis of more than one rank splits one of these dims of an operand."""
    return any(x.spec.placement.shape[a] > 1 for d in dims if d < x.ndim for a in x.spec.axes_of(d))


def register(function: Any, describe: Callable[..., None]) -> None:
    """Declare the rule of one function object, where names would mean several functions of
    different arguments."""
    RULES[function] = Rule(getattr(function, "__name__", str(function)), describe)


def zeros_connected(shape: tuple[int, ...], dtype: torch.dtype, inputs: list[Tensor]) -> Tensor:
    """Zeros that depend on ``inputs`` in the graph, as do their gradients, which are zero."""
    out = torch.zeros(shape, dtype=dtype, device=inputs[0].device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return out
    # Sums of nothing: no value, not even a NaN, gets through; squared, so that a gradient of the
    # gradient finds its way as well.
    nothing = sum(t.reshape(-1)[:0].sum() for t in inputs if _smooth(t))
    if not isinstance(nothing, Tensor):
        return out
    nothing = nothing.real if nothing.is_complex() and not dtype.is_complex else nothing
    return out + (nothing * nothing).to(dtype)


def dummy_like(t: Tensor, *shape: int) -> Tensor:
    """Ones of this shape that hang on ``t`` in the graph and take no value from it."""
    return F.pad(t.reshape(-1)[:0], (0, math.prod(shape)), value=1.0).view(shape)


def connected_zeros(shape: tuple[int, ...], made: Tensor) -> Tensor:
    """Zeros that depend in the graph on ``made`` and on what it was made of, just as a result with
    elements does.

    Which gradients depend on which operands is decided by torch's function for gradients, and all
    ranks must see the same: one that finds no way back where others do leaves them waiting in the
    second backward pass. So a rank without elements runs that function too, on stand-ins of one
    element.
    """
    return F.pad(made.reshape(-1)[:0], (0, math.prod(shape))).view(shape)


def skip_when_empty(
    op: OpDescription,
    function: Callable[..., Any] | None = None,
    alike: Callable[..., Tensor] | None = None,
) -> Callable[[LocalContext], Callable[..., Any]]:
    """A ``local`` for kernels that refuse empty operands: where this rank got no element of some
    operand, zeros that stay in the graph.

    ``alike``: of a function of several operands, the same function on stand-ins for them. What
    torch says of an operand that is empty everywhere (the determinant of nothing is 1) is left to
    torch.
    """
    before = op.local

    def local(split: LocalContext) -> Callable[..., Any]:
        run = before(split) if before is not None else function
        assert run is not None
        nothing = not any(spec.numel for spec in split.outs)
        if not any(
            0 in spec.local_shape(split.rank) and (spec.numel or nothing) for spec in split.ins
        ):
            return run
        shapes = [(split.out_shape(i), spec.dtype) for i, spec in enumerate(split.outs)]

        def empty(*args: Any, **kwargs: Any) -> Any:
            if alike is not None:
                return connected_zeros(shapes[0][0], alike(*args, **kwargs))
            inputs = operands(args, kwargs)
            found = (
                _on_stand_ins(function or op.function, split, args, kwargs)
                if len(inputs) == 1 and _smooth(inputs[0])
                else []
            )
            if len(found) == len(shapes):
                made = [
                    connected_zeros(shape, t) for (shape, _), t in zip(shapes, found, strict=True)
                ]
            else:
                made = [zeros_connected(shape, dtype, inputs) for shape, dtype in shapes]
            if len(made) == 1:
                return made[0]
            smooth = _differentiable(op.function, split, args, kwargs)
            return tuple(
                t if keep else t.detach()
                for t, keep in zip(made, smooth or [True] * len(made), strict=True)
            )

        return empty

    return local


def _smooth(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _on_stand_ins(
    function: Callable[..., Any], split: LocalContext, args: Any, kwargs: Any
) -> list[Tensor]:
    """Results of the same call on stand-ins, with an element where this rank has none; nothing
    where torch cannot run it so."""
    places = iter(enumerate(split.ins))

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            i, spec = next(places)
            return dummy_like(
                value,
                *[
                    n or split.op.scale.get((i, d), 1)
                    for d, n in enumerate(spec.local_shape(split.rank))
                ],
            )
        return type(value)(map(of, value)) if type(value) in (tuple, list) else value

    try:
        return operands([function(*of(args), **{k: of(v) for k, v in kwargs.items()})], {})
    except (RuntimeError, TypeError, ValueError, IndexError):
        return []


def _differentiable(function: Any, split: LocalContext, args: Any, kwargs: Any) -> list[bool]:
    """Which results have a gradient, as a run without memory on the whole shapes tells; nothing
    where torch cannot run it so."""
    specs = iter(split.ins)

    def whole(value: Any) -> Any:
        if isinstance(value, Tensor):
            spec = next(specs)
            return torch.empty(
                spec.shape, dtype=spec.dtype, device="meta", requires_grad=value.requires_grad
            )
        return type(value)(map(whole, value)) if type(value) in (tuple, list) else value

    try:
        out = function(*whole(args), **{k: whole(v) for k, v in kwargs.items()})
    except (RuntimeError, TypeError):
        return []
    return [t.requires_grad for t in operands(out, {})]
