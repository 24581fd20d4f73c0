"""Rules of matrix decompositions and Fourier transforms; `rules` imports them.

The dims that these functions work on are not split. All other dims are parallel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._base import torch_private
from .helpers import canonical, dims_of, reduced, register, skip_when_empty
from .notation import Arg, LocalContext, OpDescription, align
from .registry import RULES, rule

__all__: list[str] = []

_MATRIX_NUMBER = re.compile(r"(?<=\(Batch element )\d+(?=\))")


def _count_in_global_stack(
    op: OpDescription, function: Callable[..., Any] | None, leads: int
) -> Callable[[LocalContext], Callable[..., Any] | None]:
    """Build a ``local`` whose errors number a singular matrix in the global stack of matrices.

    PyTorch numbers it in the stack that it gets, which is this rank's local tensor. ``leads``: the
    number of leading dims, those of the stack.
    """
    before = op.local

    def local(split: LocalContext) -> Callable[..., Any] | None:
        run = before(split) if before is not None else function
        offsets, lengths = (numbers[:leads] for numbers in split.outs[0].box(split.rank))
        shape = split.outs[0].shape[:leads]
        if run is None or lengths == shape:
            return run

        def in_global_stack(number: re.Match[str]) -> str:
            indices = np.unravel_index(int(number[0]), lengths)
            moved = [int(i) + offset for i, offset in zip(indices, offsets, strict=True)]
            return str(np.ravel_multi_index(moved, shape))

        def run_local(*args: Any, **kwargs: Any) -> Any:
            try:
                return run(*args, **kwargs)
            except RuntimeError as error:  # LinAlgError is one
                if (text := _MATRIX_NUMBER.sub(in_global_stack, str(error))) == str(error):
                    raise
                raise type(error)(text) from None

        return run_local

    return local


def _declare_matrix_functions(
    names: str, *ranks: int, outs: Sequence[int], spaces: Sequence[Any] = (torch.linalg,)
) -> None:
    """Declare functions of stacks of matrices.

    ``ranks`` is, for each operand, the number of last dims that must not be split. ``outs`` is the
    same number for each result.
    """

    def describe(op: OpDescription, function: Any, *args: Any, **kwargs: Any) -> None:
        leads = [a.shape[: a.ndim - ranks[min(i, len(ranks) - 1)]] for i, a in enumerate(op.args)]
        named, lead = align(leads)
        for a, dims, shape in zip(op.args, named, leads, strict=True):
            op.set(a, (*dims, *[None] * (a.ndim - len(shape))))
        op.out = [(*lead, *[None] * n) for n in outs]
        op.local = skip_when_empty(op, function)
        op.local = _count_in_global_stack(op, function, len(lead))

    for name in names.split():
        for space in spaces:
            function = getattr(space, name, None)
            if function is not None and function not in RULES:
                register(
                    function,
                    lambda op, *args, function=function, **kwargs: describe(
                        op, function, *args, **kwargs
                    ),
                )


_EVERYWHERE = (torch.linalg, torch, Tensor)
_declare_matrix_functions("inv cholesky pinv matrix_exp matrix_power", 2, outs=[2])
_declare_matrix_functions(
    "inverse cholesky pinverse matrix_exp matrix_power cholesky_inverse",
    2,
    outs=[2],
    spaces=(torch, Tensor),
)
_declare_matrix_functions("det logdet", 2, outs=[0], spaces=_EVERYWHERE)
_declare_matrix_functions("slogdet", 2, outs=[0, 0], spaces=_EVERYWHERE)
_declare_matrix_functions("cond matrix_rank", 2, outs=[0])
_declare_matrix_functions("eig eigh", 2, outs=[1, 2])
_declare_matrix_functions("eigvals eigvalsh svdvals", 2, outs=[1])
_declare_matrix_functions("qr lu_factor", 2, outs=[2, 2])
_declare_matrix_functions("inv_ex cholesky_ex", 2, outs=[2, 0])
_declare_matrix_functions("lu_factor_ex ldl_factor_ex", 2, outs=[2, 1, 0])
_declare_matrix_functions("svd", 2, outs=[2, 1, 2])
_declare_matrix_functions("lu_with_info", 2, outs=[2, 1, 0], spaces=(torch_private,))
_declare_matrix_functions("lu", 2, outs=[2, 2, 2])
_declare_matrix_functions("solve_triangular", 2, outs=[2])
_declare_matrix_functions("cholesky_solve", 2, outs=[2], spaces=(torch, Tensor))
_declare_matrix_functions("householder_product", 2, 1, outs=[2])
# The second result of these functions is a vector of pivots.
for _name in ("lu_factor", "ldl_factor"):
    RULES.pop(getattr(torch.linalg, _name), None)
_declare_matrix_functions("lu_factor ldl_factor", 2, outs=[2, 1])
# The pointwise rule of torch.polar also covered torch.linalg.polar, a different function of the
# same name.
RULES.pop(getattr(torch.linalg, "polar", None), None)
_declare_matrix_functions("polar", 2, outs=[2, 2])
_declare_matrix_functions("lu_solve ldl_solve", 2, 1, 2, outs=[2])
_declare_matrix_functions("lu_solve", 2, 2, 1, outs=[2], spaces=(torch, Tensor))
_declare_matrix_functions("lu_unpack", 2, 1, outs=[2, 2, 2], spaces=(torch,))
_declare_matrix_functions("svd", 2, outs=[2, 1, 2], spaces=(torch, Tensor))
_declare_matrix_functions("qr triangular_solve", 2, outs=[2, 2], spaces=(torch, Tensor))
_declare_matrix_functions("geqrf", 2, outs=[2, 1], spaces=(torch, Tensor))
_declare_matrix_functions("ormqr", 2, 1, 2, outs=[2], spaces=(torch, Tensor))


@rule([torch.lu])
def _lu(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.compose(_lu_by_factor)


def _lu_by_factor(A: Tensor, pivot: bool = True, get_infos: bool = False, out: Any = None) -> Any:
    return (torch.linalg.lu_factor_ex if get_infos else torch.linalg.lu_factor)(A, pivot=pivot)


def whole(names: str, *spaces: Any) -> None:
    """Declare functions that need all of every operand, on every rank.

    The declaration avoids a warning about a missing rule.
    """
    for name in names.split():
        for space in spaces:
            if callable(function := getattr(space, name, None)) and function not in RULES:
                register(function, lambda op, *args, **kwargs: None)


def _describe_random_lowrank(op: OpDescription, A: Arg, *args: Any, **kwargs: Any) -> None:
    # These functions start from random numbers, which must be the same on all ranks that have the
    # same matrices.
    for a in op.args:
        op.set(a, (*range(-a.ndim, -2), None, None))
    lead = tuple(range(-A.ndim, -2))
    op.out, op.random = [(*lead, None, None), (*lead, None), (*lead, None, None)], True


rule([torch.svd_lowrank, torch.pca_lowrank])(_describe_random_lowrank)


whole("lstsq tensorinv tensorsolve", torch.linalg)
whole("orgqr lstsq vander", torch, Tensor)


@rule([torch.lobpcg])
def _lobpcg(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.random = True


@rule([torch.linalg.vander])
def _vander(op: OpDescription, x: Arg, *, N: int | None = None) -> None:
    names = (*range(x.ndim - 1), None)  # without N, as many powers as there are elements
    op.set(x, names)
    op.out = [(*names, None)]


@rule([torch.view_as_real])
def _as_real(op: OpDescription, input: Arg) -> None:
    names = tuple(range(input.ndim))
    op.set(input, names)
    op.out, op.linear, op.view = [(*names, None)], [frozenset([0])], True
    # Its backward refuses an expanded gradient without elements.
    op.local = skip_when_empty(op, torch.view_as_real)


@rule([torch.view_as_complex])
def _as_complex(op: OpDescription, input: Arg) -> None:
    names = tuple(range(input.ndim - 1))
    op.set(input, (*names, None))
    op.out, op.linear, op.view = [names], [frozenset([0])], True
    # torch checks the strides of an empty local tensor, too.
    op.local = lambda split: (
        None
        if 0 not in split.out_shape()
        else lambda input: torch.complex(input[..., 0], input[..., 1])
    )


@rule([torch.linalg.solve, torch.linalg.solve_ex])
def _solve(
    op: OpDescription, A: Arg, B: Arg, *, left: bool = True, check_errors: bool = False
) -> None:
    # Distinguish a stack of vectors from a stack of matrices as torch does.
    vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and A.shape[:-1] == B.shape)
    tail = 1 if vector else 2
    (first, second), lead = align([A.shape[:-2], B.shape[: B.ndim - tail]])
    op.set(A, (*first, None, None))
    op.set(B, (*second, *[None] * tail))
    op.out = [(*lead, *[None] * tail), tuple(lead)]  # solve_ex returns an info code for each
    op.local = _count_in_global_stack(op, op.function, len(lead))
    if not vector and B.ndim == A.ndim - 1:
        op.whole = set(lead)  # a local tensor might look like a stack of vectors


# ------------------------------------------------------------------------------------------ fourier


def _fourier(op: OpDescription, function: Any, x: Arg, dims: tuple[int, ...]) -> None:
    reduced(op, x, dims, True, None)
    op.out, op.linear = [op.dims[x.index]], [frozenset([0])]
    op.local = skip_when_empty(op, function)


def _describe_fft(
    op: OpDescription,
    function: Any,
    input: Arg,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
) -> None:
    _fourier(op, function, input, dims_of(input, dim))


def _describe_fft2(
    op: OpDescription,
    function: Any,
    input: Arg,
    s: Any = None,
    dim: Any = (-2, -1),
    norm: str | None = None,
) -> None:
    _fourier(op, function, input, dims_of(input, dim))


def _describe_fftn(
    op: OpDescription,
    function: Any,
    input: Arg,
    s: Any = None,
    dim: Any = None,
    norm: str | None = None,
) -> None:
    last = tuple(range(-len(s), 0)) if s is not None else None  # as many last dims as sizes
    _fourier(op, function, input, dims_of(input, last if dim is None else dim))


def _describe_fftshift(op: OpDescription, function: Any, input: Arg, dim: Any = None) -> None:
    _fourier(op, function, input, dims_of(input, dim))


def _declare_fft(name: str, describe: Callable[..., None]) -> None:
    function = getattr(torch.fft, name)
    register(
        function, lambda op, *args, **kwargs: describe(op, function, *args, **canonical(kwargs))
    )


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    _declare_fft(_name, _describe_fft)
    _declare_fft(_name + "2", _describe_fft2)
    _declare_fft(_name + "n", _describe_fftn)
for _name in ("fftshift", "ifftshift"):
    _declare_fft(_name, _describe_fftshift)
