"""Initializers, which compute the starting values of variables.

An initializer is a value: equal initializers and seeds produce the same numbers on every device.
User code passes them to `get_variable` and to layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import JobError

__all__ = [
    "Constant", "Initializer", "Normal", "TruncatedNormal", "Uniform", "VarianceScaling",
    "constant_initializer", "glorot_normal_initializer",
    "glorot_uniform_initializer", "kaiming_initializer", "ones_initializer",
    "random_normal_initializer", "random_uniform_initializer", "truncated_normal",
    "truncated_normal_initializer", "variance_scaling_initializer", "xavier_normal_initializer",
    "xavier_uniform_initializer", "zeros_initializer",
]  # fmt: skip

# Standard deviation of a standard normal distribution truncated at -2 and 2.
_CUT_DEVIATION = 0.87962566103423978
_MODES = ("fan_in", "fan_out", "fan_avg")
_DISTRIBUTIONS = ("truncated_normal", "random_normal", "random_uniform")


class Initializer:
    """An initializer: it fills a new tensor with numbers from a generator."""

    seed: int | None = None

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        raise JobError(f"{type(self).__name__} is no initializer: take one of flow.*_initializer")


@dataclass(frozen=True)
class Constant(Initializer):
    value: float

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return out.fill_(self.value)


@dataclass(frozen=True)
class Uniform(Initializer):
    low: float
    high: float

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if not out.is_floating_point():
            return out.random_(math.ceil(self.low), math.ceil(self.high), generator=generator)
        return out.uniform_(self.low, self.high, generator=generator)


@dataclass(frozen=True)
class Normal(Initializer):
    mean: float
    deviation: float
    seed: int | None = None

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return out.normal_(self.mean, self.deviation, generator=generator)


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """A normal distribution that redraws values more than two deviations from the mean."""

    mean: float
    deviation: float

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        low, high = self.mean - 2 * self.deviation, self.mean + 2 * self.deviation
        return torch.nn.init.trunc_normal_(
            out, self.mean, self.deviation, low, high, generator=generator
        )


@dataclass(frozen=True)
class VarianceScaling(Initializer):
    """An initializer with variance ``scale / n`` (He et al. 2015, Glorot and Bengio 2010).

    n is the number of inputs of a unit, of its outputs, or the mean of both.
    """

    scale: float
    mode: str
    distribution: str
    data_format: str

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        deviation = math.sqrt(self.scale / fan(out.shape, self.mode, self.data_format))
        if self.distribution == "random_uniform":
            return Uniform(-math.sqrt(3.0) * deviation, math.sqrt(3.0) * deviation).fill(
                out, generator
            )
        kind = (
            Normal(0.0, deviation)
            if self.distribution == "random_normal"
            else TruncatedNormal(0.0, deviation / _CUT_DEVIATION)
        )
        return kind.fill(out, generator)


def fan(shape: Sequence[int], mode: str, data_format: str) -> float:
    """Return the number of inputs or outputs of a unit whose weight has this shape, or their mean.

    The weight is (outputs, inputs). For convolutions, the window's dims follow the inputs, or
    precede them if ``data_format`` ends in "C". Raise JobError for a weight of less than 2 dims.

    >>> fan((8, 3, 5, 5), "fan_in", "NCHW"), fan((8, 3, 5, 5), "fan_out", "NCHW")
    (75.0, 200.0)
    """
    if len(shape) < 2:
        raise JobError(
            f"this initializer is for weights of 2 dims or more, got shape {list(shape)}"
        )
    window = shape[1:-1] if data_format.endswith("C") else shape[2:]
    into, out = float(math.prod(shape[1:])), float(shape[0] * math.prod(window))
    return {"fan_in": into, "fan_out": out, "fan_avg": (into + out) / 2}[mode]


def constant_initializer(value: float = 0, dtype: torch.dtype = torch.float32) -> Initializer:
    """Return an initializer that sets every element to ``value``."""
    return Constant(value)


def zeros_initializer(dtype: torch.dtype = torch.float32) -> Initializer:
    """Return an initializer that sets every element to 0."""
    return Constant(0)


def ones_initializer(dtype: torch.dtype = torch.float32) -> Initializer:
    """Return an initializer that sets every element to 1."""
    return Constant(1)


def random_uniform_initializer(
    minval: float = 0, maxval: float = 1, dtype: torch.dtype = torch.float32
) -> Initializer:
    """Return an initializer that draws uniformly from ``minval`` to ``maxval``."""
    return Uniform(minval, maxval)


def random_normal_initializer(
    mean: float = 0.0,
    stddev: float = 1.0,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> Initializer:
    """Return an initializer that draws from a normal distribution."""
    return Normal(mean, stddev, seed)


def truncated_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Return an initializer for a normal distribution truncated at two deviations from the mean."""
    return TruncatedNormal(mean, stddev)


def truncated_normal(stddev: float = 1.0) -> Initializer:
    """Return `truncated_normal_initializer` with mean 0."""
    return TruncatedNormal(0.0, stddev)


def variance_scaling_initializer(
    scale: float = 1.0,
    mode: str = "fan_in",
    distribution: str = "truncated_normal",
    data_format: str = "",
) -> Initializer:
    """Return an initializer with variance ``scale / n``.

    ``mode`` sets n: "fan_in", "fan_out" or "fan_avg". ``distribution`` is "truncated_normal",
    "random_normal" or "random_uniform". Raise JobError for others.
    """
    _check_choice("mode", mode.lower(), _MODES)
    _check_choice("distribution", distribution.lower(), _DISTRIBUTIONS)
    return VarianceScaling(float(scale), mode.lower(), distribution.lower(), data_format)


def glorot_uniform_initializer(data_format: str = "") -> Initializer:
    """Return a uniform initializer of variance 2 / (inputs + outputs) (Glorot and Bengio 2010)."""
    return variance_scaling_initializer(1.0, "fan_avg", "random_uniform", data_format)


def glorot_normal_initializer(data_format: str = "") -> Initializer:
    """Return a normal initializer of variance 2 / (inputs + outputs) (Glorot and Bengio 2010)."""
    return variance_scaling_initializer(1.0, "fan_avg", "random_normal", data_format)


xavier_uniform_initializer, xavier_normal_initializer = (
    glorot_uniform_initializer,
    glorot_normal_initializer,
)


def kaiming_initializer(
    shape: Sequence[int], distribution: str = "random_normal", mode: str = "fan_in",
    nonlinearity: str | None = "leaky_relu",
    negative_slope: float = 0.0, data_format: str = "NCHW",
) -> Initializer:  # fmt: skip
    """Return an initializer for weights of this shape before a nonlinearity (He et al. 2015).

    ``nonlinearity`` is "leaky_relu", "relu", "tanh", "sigmoid" or None. ``distribution`` is
    "random_normal" or "random_uniform". Raise JobError for others.
    """
    _check_choice("mode", mode, _MODES)
    _check_choice("distribution", distribution, _DISTRIBUTIONS[1:])
    gains: dict[Any, float] = {
        None: 1.0,
        "sigmoid": 1.0,
        "tanh": 5.0 / 3,
        "relu": math.sqrt(2.0),
        "leaky_relu": math.sqrt(2.0 / (1 + negative_slope**2)),
    }
    _check_choice("nonlinearity", nonlinearity, tuple(gains))
    deviation = gains[nonlinearity] / math.sqrt(fan(shape, mode, data_format))
    if distribution == "random_normal":
        return Normal(0.0, deviation)
    return Uniform(-math.sqrt(3.0) * deviation, math.sqrt(3.0) * deviation)


def _check_choice(what: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise JobError(
            f"initializer: {what} is one of {', '.join(map(repr, allowed))}; got {value!r}"
        )
