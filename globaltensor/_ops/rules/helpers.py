"""Helpers shared by the rules of several families.

The helpers read arguments as torch does, describe reductions, and handle local tensors without
elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._base.torch_private import is_fake
from .notation import Arg, Dims, Factor, LocalContext, OpDescription, Range
from .registry import RULES, Rule

__all__ = [
    "canonical",
    "check_range",
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
    """Return the keywords under torch's names.

    torch also accepts NumPy's ``axis`` and ``keepdims``.
    """
    return {
        {"axis": "dim", "keepdims": "keepdim", "x": "input", "A": "input"}.get(k, k): v
        for k, v in kwargs.items()
        if k != "out"
    }


def dims_of(x: Any, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the dims that ``dim`` names, counted from the front.

    None and an empty list name all dims. Raises IndexError as torch does.
    """
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
    """Return the entries of ``names`` that remain after a reduction over ``dims``."""
    return tuple(None if d in dims else f for d, f in enumerate(names) if keepdim or d not in dims)


def reduced(
    op: OpDescription,
    x: Arg,
    dims: Sequence[int],
    keepdim: bool,
    kind: str | None,
    results: int = 1,
) -> None:
    """Describe a reduction of ``x`` over ``dims``.

    With a ``kind``, the results are partial of this kind. Where ``kind`` is None, the dims must not
    be split.
    """
    names = tuple(range(x.ndim))
    op.set(x, names)
    op.out = [kept(names, dims, keepdim)] * results
    if kind is None:
        op.whole = {d for d in dims if d < x.ndim}
    else:
        op.reduce = {d: kind for d in dims if d < x.ndim}


def operands(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors of a call, in the order in which a rule sees them."""
    tensors: list[Tensor] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            tensors.append(a)
        elif isinstance(a, (tuple, list)):
            tensors += operands(a, {})
    return tensors


def split_in(x: Any, dims: Sequence[int]) -> bool:
    """Return True if an axis of more than one rank splits one of these dims of an operand."""
    return any(x.spec.placement.shape[a] > 1 for d in dims if d < x.ndim for a in x.spec.axes_of(d))


def register(function: Any, describe: Callable[..., None]) -> None:
    """Declare the rule of one function object.

    This serves where a name would stand for several functions with different arguments.
    """
    RULES[function] = Rule(getattr(function, "__name__", str(function)), describe)


def zeros_connected(shape: tuple[int, ...], dtype: torch.dtype, inputs: list[Tensor]) -> Tensor:
    """Return zeros that depend on ``inputs`` in the autograd graph.

    Their gradients are zero and also depend on ``inputs``.
    """
    out = torch.zeros(shape, dtype=dtype, device=inputs[0].device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return out
    # Sums of empty slices let no value through, not even a NaN. The square makes second-order
    # gradients depend on the inputs as well.
    nothing = sum(t.reshape(-1)[:0].sum() for t in inputs if _is_inexact(t))
    if not isinstance(nothing, Tensor):
        return out
    nothing = nothing.real if nothing.is_complex() and not dtype.is_complex else nothing
    return out + (nothing * nothing).to(dtype)


def dummy_like(t: Tensor, *shape: int) -> Tensor:
    """Return ones of this shape that depend on ``t`` in the autograd graph.

    No value of ``t`` enters them.
    """
    return F.pad(t.reshape(-1)[:0], (0, math.prod(shape)), value=1.0).view(shape)


def connected_zeros(shape: tuple[int, ...], made: Tensor) -> Tensor:
    """Return zeros that depend on ``made`` and its inputs in the autograd graph.

    The dependence is the same as that of a result with elements. torch's function for gradients
    decides which gradients depend on which operands, and all ranks must see the same. If one rank
    finds no path back where others do, these wait for it in the second backward pass. So a rank
    without elements runs that function too, on dummy tensors of one element.
    """
    return F.pad(made.reshape(-1)[:0], (0, math.prod(shape))).view(shape)


def skip_when_empty(
    op: OpDescription,
    function: Callable[..., Any] | None = None,
    alike: Callable[..., Tensor] | None = None,
) -> Callable[[LocalContext], Callable[..., Any]]:
    """Build a ``local`` for kernels that refuse empty operands.

    Where this rank holds no element of some operand, it returns zeros that stay in the autograd
    graph.

    ``alike``: for a function of several operands, the same function applied to dummies for them.
    torch itself handles an operand that is empty on every rank (the determinant of an empty matrix
    is 1).
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
            stand_in_outs = (
                _run_on_dummies(function or op.function, split, args, kwargs)
                if len(inputs) == 1 and _is_inexact(inputs[0])
                else []
            )
            if len(stand_in_outs) == len(shapes):
                made = [
                    connected_zeros(shape, t)
                    for (shape, _), t in zip(shapes, stand_in_outs, strict=True)
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


def _is_inexact(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _run_on_dummies(
    function: Callable[..., Any], split: LocalContext, args: Any, kwargs: Any
) -> list[Tensor]:
    """Run the same call on dummy tensors that have an element where this rank has none.

    Return its results, or an empty list where torch cannot run the call so.
    """
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
    """Return for each result whether it has a gradient.

    A run on meta tensors of the global shapes decides. Return an empty list where torch cannot run
    the call so.
    """
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


def check_range(index: torch.Tensor, allowed: Range) -> None:
    """Raise PyTorch's error for an index that is out of range.

    On an accelerator the check is skipped, because reading the indices would synchronize with the
    device. PyTorch's kernels do not synchronize for it either."""
    if index.device.type != "cpu" or not index.numel() or is_fake(index):
        return
    lowest, highest = torch.aminmax(index)
    if lowest >= 0 and highest < allowed.n:
        return
    wrong = (index < 0) | (index >= allowed.n)
    if allowed.also is not None:
        wrong = wrong & (index != allowed.also)
    if wrong.any():
        raise allowed.error(allowed.text.format(int(index[wrong].reshape(-1)[0])))
