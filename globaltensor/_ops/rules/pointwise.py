"""Rules of functions that work element by element; `rules` imports them."""

from .registry import pointwise

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
# A choice by a mask is linear in the things chosen.
pointwise("where", linear="rest")

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
