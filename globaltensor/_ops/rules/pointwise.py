"""Rules of functions that work element by element; `rules` imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .notation import Arg, OpDescription
from .registry import RULES, Rule, pointwise, torch_functions_named

__all__: list[str] = []

# Sums: partial operands stay partial when all operands are.
pointwise("add sub subtract rsub", linear="joint")
# Products: partial in one operand, the others broadcast.
pointwise("mul multiply", linear="each")
# Quotients: linear in the first operand.
pointwise("div divide true_divide ldexp", linear="first")
pointwise(
    "neg negative conj conj_physical resolve_conj resolve_neg real imag positive deg2rad rad2deg",
    linear="each",
)
# A choice by a mask. It is linear in the things chosen: `gather_scatter` says which these are.
pointwise("where")

pointwise(
    "abs absolute acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh "
    "angle bitwise_not ceil cos cosh digamma erf erfc "
    "erfinv exp exp2 expm1 fix floor frac i0 isfinite isinf isnan isneginf isposinf isreal lgamma "
    "log log10 log1p log2 logical_not logit mvlgamma "
    "multigammaln nan_to_num polygamma psi reciprocal round rsqrt sgn sigmoid sign signbit sin "
    "sinc sinh sqrt square tan tanh trunc airy_ai bessel_j0 "
    "bessel_j1 bessel_y0 bessel_y1 entr erfcx expit gammaln i0e i1 i1e log_ndtr "
    "modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 "
    "modified_bessel_k1 ndtr ndtri scaled_modified_bessel_k0 scaled_modified_bessel_k1 "
    "spherical_bessel_j0"
)
pointwise(
    "atan2 arctan2 bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
    "clamp clip clamp_min clamp_max copysign eq equal_to "
    "float_power floor_divide fmax fmin fmod gcd ge greater greater_equal gt heaviside hypot "
    "igamma igammac gammainc gammaincc isclose lcm le less "
    "less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum ne "
    "not_equal nextafter pow remainder xlog1py xlogy zeta "
    "rdiv rpow rfloordiv rmod rlshift rrshift chebyshev_polynomial_t chebyshev_polynomial_u "
    "chebyshev_polynomial_v chebyshev_polynomial_w "
    "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p "
    "shifted_chebyshev_polynomial_t "
    "shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w "
    "complex polar"
)
# A sum of the first operand and a term linear in the second.
pointwise("addcmul addcdiv lerp", linear="two")
# Activations.
pointwise(
    "relu relu6 gelu silu mish elu selu celu leaky_relu softplus hardtanh hardswish hardsigmoid "
    "hardshrink softshrink tanhshrink threshold logsigmoid "
    "softsign sigmoid tanh"
)
pointwise("frexp", outs=2)


def _shifts_bools(operands: Iterable[Any]) -> bool:
    """Return True if bools are shifted by integers, or integers by bools."""
    dtypes = {_integral_dtype(a) for a in operands}
    return torch.bool in dtypes and len(dtypes) > 1 and None not in dtypes


def _integral_dtype(operand: Any) -> torch.dtype | None:
    if isinstance(operand, (bool, int)):
        return torch.bool if isinstance(operand, bool) else torch.int64
    dtype = operand.dtype
    return None if dtype.is_floating_point or dtype.is_complex else dtype


def _shift(name: str) -> None:
    """Let the operator ``<<`` or ``>>`` accept bools.

    torch's meta kernels of these operators refuse bools, which its other kernels cast.
    """
    shift: Callable[..., torch.Tensor] = getattr(torch, name)

    def run(*operands: Any) -> torch.Tensor:
        dtype = torch.result_type(*operands)
        return shift(*[a.to(dtype) if isinstance(a, torch.Tensor) else int(a) for a in operands])

    _compose_where(name, _shifts_bools, run)


def _compose_where(
    name: str, applies: Callable[[tuple[Any, ...]], bool], run: Callable[..., torch.Tensor]
) -> None:
    """Let ``run(*operands)`` compute the calls of a function for whose operands ``applies`` holds.

    torch's meta kernel of the function is wrong for these operands. In place, the result is written
    into the first operand."""

    def run_in_place(target: torch.Tensor, *rest: Any) -> torch.Tensor:
        result = run(target, *rest)
        if not torch.can_cast(result.dtype, target.dtype):  # torch's own error for these dtypes
            torch.empty(0, dtype=target.dtype).add_(torch.empty(0, dtype=result.dtype))
        return target.copy_(result)

    for function, inplace in torch_functions_named(name):
        before, compute = RULES[function], run_in_place if inplace else run

        def describe(
            op: OpDescription,
            *args: Any,
            before: Rule = before,
            compute: Callable[..., torch.Tensor] = compute,
            **kwargs: Any,
        ) -> None:
            if applies((*args, *kwargs.values())):
                op.composite = lambda *args, **kwargs: compute(*args, *kwargs.values())
            else:
                before.describe(op, *args, **kwargs)

        RULES[function] = Rule(before.name, describe, before.scalars, inplace)


_shift("bitwise_left_shift")
_shift("bitwise_right_shift")


def _bool_powers() -> None:
    """Let the power of a bool tensor and a bool be a bool tensor.

    torch's meta kernel says int64, its other kernels return bool.
    """

    def applies(operands: tuple[Any, ...]) -> bool:
        base, exponent = operands[:2]
        return isinstance(base, Arg) and base.dtype is torch.bool and isinstance(exponent, bool)

    _compose_where("pow", applies, lambda base, exponent: base | (not exponent))


_bool_powers()
