"""Rules of products; `rules` imports them.

A contracted dim that is split gives a partial sum. Products are linear in each operand separately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import FormError
from .helpers import canonical, connected_zeros, dims_of, dummy_like, operands, register
from .notation import Arg, Dims, Factor, LocalContext, OpDescription, align
from .registry import rule

__all__ = ["product"]


def product(
    op: OpDescription,
    names: Sequence[Sequence[Factor | None]],
    factors: Sequence[Arg],
    out: Sequence[Factor | None],
    addend: Arg | None = None,
) -> None:
    """Describe a product of ``factors`` with these dims, to which ``addend`` may be added.

    Dims that the result lacks are summed.
    """
    for a, dims in zip(factors, names, strict=True):
        op.set(a, dims)
    op.out = [tuple(out)]
    op.reduce = {f: "sum" for dims in names for f in dims if f is not None and f not in out}
    groups = [{a.index} for a in factors]
    if addend is not None:
        op.set(addend, _addend_dims(addend, factors, names, out))
        op.addends = frozenset([addend.index])
        groups = [g | {addend.index} for g in groups]
    op.linear = [frozenset(g) for g in groups]


def _addend_dims(
    addend: Arg,
    factors: Sequence[Arg],
    names: Sequence[Sequence[Factor | None]],
    out: Sequence[Factor | None],
) -> Dims:
    """Return the dims of an addend that broadcasts to the result."""
    sizes: dict[Factor | None, int] = {}
    for a, dims in zip(factors, names, strict=True):
        for f, n in zip(dims, a.shape, strict=True):
            sizes[f] = max(n, sizes.get(f, 0)) if n else 0
    named = out[len(out) - addend.ndim :]
    return tuple(
        f if n == sizes.get(f, 1) else None for f, n in zip(named, addend.shape, strict=True)
    )


def _matmul(op: OpDescription, a: Arg, b: Arg) -> None:
    lead_a, lead_b = a.shape[:-2], b.shape[:-2]
    (first, second), lead = align([lead_a, lead_b])
    rows: Dims = () if a.ndim == 1 else ("m",)
    columns: Dims = () if b.ndim == 1 else ("n",)
    product(op, [(*first, *rows, "k"), (*second, "k", *columns)], [a, b], (*lead, *rows, *columns))


rule(["matmul", "mm", "bmm", "mv", "dot", "vdot"])(
    lambda op, *args, **kwargs: _matmul(op, *_two_operands(args, kwargs))
)
rule("rmatmul")(lambda op, a, b: _matmul(op, b, a))


def _two_operands(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Arg]:
    found = [a for a in (*args, *kwargs.values()) if isinstance(a, Arg)]
    if len(found) != 2:
        raise FormError("two operands are needed")
    return found


@rule("inner")
def _inner(op: OpDescription, input: Arg, other: Arg) -> None:
    if not input.ndim or not other.ndim:
        (first, second), out = align([input.shape, other.shape])
        product(op, [first, second], [input, other], out)
        return
    first, second = (
        tuple(("a", d) for d in range(input.ndim - 1)),
        tuple(("b", d) for d in range(other.ndim - 1)),
    )
    product(op, [(*first, "k"), (*second, "k")], [input, other], (*first, *second))


rule(["outer", "ger"])(
    lambda op, *args, **kwargs: product(op, ["m", "n"], _two_operands(args, kwargs), ("m", "n"))
)


def _declare_addmm(name: str, names: Sequence[str], out: str) -> None:
    """Declare ``addmm`` or one of its like: ``beta * input + alpha * product``."""

    def describe(op: OpDescription, input: Arg, first: Arg, second: Arg, **kwargs: Any) -> None:
        product(op, [tuple(n) for n in names], [first, second], tuple(out), input)
        if kwargs.get("beta", 1) == 0:  # then PyTorch does not read it: torch.empty is passed
            op.unread = frozenset([input.index])

    second_names = {
        "mat1": "first",
        "batch1": "first",
        "vec1": "first",
        "mat2": "second",
        "batch2": "second",
        "vec2": "second",
        "vec": "second",
    }
    if name == "addmv":
        second_names["mat"] = "first"
    rule(name)(
        lambda op, *args, **kwargs: describe(
            op, *args, **{second_names.get(k, k): v for k, v in canonical(kwargs).items()}
        )
    )


_declare_addmm("addmm", ["mk", "kn"], "mn")
_declare_addmm("addmv", ["mk", "k"], "m")
_declare_addmm("addr", ["m", "n"], "mn")
_declare_addmm("baddbmm", ["bmk", "bkn"], "bmn")
_declare_addmm("addbmm", ["bmk", "bkn"], "mn")


@rule("linear")
def _linear(op: OpDescription, input: Arg, weight: Arg, bias: Arg | None = None) -> None:
    lead = tuple(range(input.ndim - 1))
    columns: Dims = ("o",) if weight.ndim == 2 else ()
    product(op, [(*lead, "i"), (*columns, "i")], [input, weight], (*lead, *columns), bias)


@rule("bilinear")
def _bilinear(
    op: OpDescription, input1: Arg, input2: Arg, weight: Arg, bias: Arg | None = None
) -> None:
    lead = tuple(range(input1.ndim - 1))
    product(
        op,
        [(*lead, "i"), (*lead, "j"), ("o", "i", "j")],
        [input1, input2, weight],
        (*lead, "o"),
        bias,
    )
    op.local = _bilinear_part


def _bilinear_part(split: LocalContext) -> Callable[..., Tensor]:
    if all(0 not in spec.local_shape(split.rank) for spec in split.ins):
        return F.bilinear
    shape = split.out_shape()

    def empty(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        one = None if bias is None else dummy_like(bias, 1)
        out = connected_zeros(
            shape,
            F.bilinear(
                dummy_like(input1, 1, 1), dummy_like(input2, 1, 1), dummy_like(weight, 1, 1, 1), one
            ),
        )
        return out if bias is None else out + bias

    return empty


@rule([torch.tensordot])
def _tensordot(op: OpDescription, a: Arg, b: Arg, dims: Any = 2, **kwargs: Any) -> None:
    if isinstance(dims, Arg):
        raise FormError("dims given as a tensor")
    if isinstance(dims, int):
        over_a, over_b = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    else:
        over_a, over_b = ([d] if isinstance(d, int) else list(d) for d in dims)
    over_a, over_b = [a.dim(d) for d in over_a], [b.dim(d) for d in over_b]
    first: list[Factor | None] = [("a", d) for d in range(a.ndim)]
    second: list[Factor | None] = [("b", d) for d in range(b.ndim)]
    out = [f for d, f in enumerate(first) if d not in over_a] + [
        f for d, f in enumerate(second) if d not in over_b
    ]
    for i, (x, y) in enumerate(zip(over_a, over_b, strict=True)):
        same = a.shape[x] == b.shape[y]  # otherwise one of them is 1 and is expanded
        first[x], second[y] = (("k", i), ("k", i)) if same else (None, None)
    product(op, [first, second], [a, b], out)


@rule([torch.chain_matmul, torch.linalg.multi_dot])
def _chain(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    mats = op.args
    names: list[Dims] = []
    for i, m in enumerate(mats):
        names.append((i, i + 1) if m.ndim == 2 else (i + 1,) if i == 0 else (i,))
    out = (*((0,) if mats[0].ndim == 2 else ()), *((len(mats),) if mats[-1].ndim == 2 else ()))
    product(op, names, mats, out)


@rule("kron")
def _kron(op: OpDescription, input: Arg, other: Arg) -> None:
    n = max(input.ndim, other.ndim)
    # Rows of the result form groups, one for each row of the first operand. A split within a group
    # cannot be kept.
    op.set(input, tuple(range(n - input.ndim, n)))
    missing = range(n - input.ndim)
    op.out = [tuple(None if d in missing else d for d in range(n))]
    for d in range(n):
        op.scale[~0, d] = other.shape[d - n + other.ndim] if d >= n - other.ndim else 1
    if 0 in other.shape:
        op.whole = set(range(n))
    op.linear = [frozenset([input.index]), frozenset([other.index])]
    # The kernel refuses some transposed tensors, not all of those whose part has size 1.
    op.local = lambda split: lambda a, b: torch.kron(_by_rows(a), _by_rows(b))


def _by_rows(x: Tensor) -> Tensor:
    return x.flatten().view(x.shape)


# ------------------------------------------------------------------------------------------- einsum


@rule([torch.einsum])
def _einsum(op: OpDescription, equation: str, *operands: Any) -> None:
    terms, result = _equation(equation, op.args)
    sizes: dict[str, int] = {}
    for a, term in zip(op.args, terms, strict=True):
        for letter, n in zip(term, a.shape, strict=True):
            sizes[letter] = max(n, sizes.get(letter, 1)) if n != 0 else 0
    names = [
        tuple(f if n == sizes[f] else None for f, n in zip(term, a.shape, strict=True))
        for a, term in zip(op.args, terms, strict=True)
    ]
    product(op, names, op.args, result)
    # A letter that a term repeats selects a diagonal. Both dims would have to be split alike.
    op.whole = {f for term in terms for f in term if term.count(f) > 1}
    for f in op.whole:
        op.reduce.pop(f, None)
    diagonal = len(terms) == 1 and all(
        n == sizes[f] for f, n in zip(terms[0], op.args[0].shape, strict=True)
    )
    if op.whole and diagonal and sorted({*terms[0]}) == sorted(result):
        op.composite = functools.partial(_diagonals, terms[0], result)


def _diagonals(term: list[str], result: list[str], equation: str, *operands: Any) -> Any:
    """Return diagonals of a tensor as a view, as torch's einsum does where nothing is summed."""
    (x,) = operands[0] if isinstance(operands[0], (tuple, list)) else operands
    letters = list(term)
    while repeated := next((f for f in letters if letters.count(f) > 1), None):
        first = letters.index(repeated)
        second = letters.index(repeated, first + 1)
        x = x.diagonal(0, first, second)
        letters = [f for d, f in enumerate(letters) if d not in (first, second)] + [repeated]
    return x.permute([letters.index(f) for f in result])


def _equation(equation: str, args: Sequence[Arg]) -> tuple[list[list[str]], list[str]]:
    """Return the letters of each operand and of the result.

    The dims of ``...`` are named ``.1``, ``.2``, ... from the right.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    written = left.split(",")
    if len(written) != len(args):
        raise FormError(f"einsum of {len(args)} operands with {len(written)} terms: {equation!r}")
    terms = []
    dots: list[str] = []
    for term, a in zip(written, args, strict=True):
        before, ellipsis, after = term.partition("...")
        count = a.ndim - len(before) - len(after) if ellipsis else 0
        lead = [f".{k}" for k in range(count, 0, -1)]
        dots = max(dots, lead, key=len)
        terms.append([*before, *lead, *after])
    if arrow:
        before, ellipsis, after = right.partition("...")
        return terms, [*before, *(dots if ellipsis else []), *after]
    letters = sorted(
        f
        for f in {f for t in terms for f in t if not f.startswith(".")}
        if sum(t.count(f) for t in terms) == 1
    )
    return terms, [*dots, *letters]


# ------------------------------------------------------------------------------------------ vectors


def _vecdot(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    x, y = _two_operands(args, kwargs)
    dim = canonical(kwargs).get("dim", args[2] if len(args) > 2 else -1)
    (first, second), out = align([x.shape, y.shape])
    at = dims_of(_MatmulShape(len(out)), dim)[0]
    product(op, [first, second], [x, y], [f for d, f in enumerate(out) if d != at])
    if out[at] in op.reduce and not all(
        len(d) >= len(out) - at and d[at - len(out)] is not None for d in (first, second)
    ):
        op.reduce.pop(out[at])
        op.whole = {out[at]}


class _MatmulShape:
    def __init__(self, ndim: int) -> None:
        self.ndim = ndim


register(torch.linalg.vecdot, _vecdot)


def _cross(op: OpDescription, x: Arg, y: Arg, dim: int | None) -> None:
    (first, second), out = align([x.shape, y.shape])
    op.set(x, first)
    op.set(y, second)
    at = next(d for d in range(len(out)) if x.shape[d] == 3) if dim is None else dim % len(out)
    op.out, op.whole = [out], {out[at]}
    op.linear = [frozenset([0]), frozenset([1])]
    # Where no dim is given, torch takes the first dim of size 3 of the global tensor, not of the
    # local one.
    op.local = lambda split: (
        lambda *args, **kwargs: torch.linalg.cross(*operands(args, kwargs), dim=at - len(out))
    )


register(torch.linalg.cross, lambda op, input, other, *, dim=-1: _cross(op, input, other, dim))
rule([torch.cross, Tensor.cross])(lambda op, input, other, dim=None: _cross(op, input, other, dim))
