"""``flow.nn``: ops of neural networks, which user code calls inside job functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .blob import Blob, apply, named, own_step, recording, scoped
from .conv_pool import channels_last, convolved, numbers, padding_of, pooled
from .errors import JobError

__all__ = [
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "batch_normalization", "bias_add", "conv1d", "conv2d",
    "conv3d", "dropout", "elu", "leaky_relu", "logsoftmax",
    "max_pool1d", "max_pool2d", "max_pool3d", "moments", "relu",
    "sigmoid_cross_entropy_with_logits", "softmax", "softmax_cross_entropy_with_logits",
    "sparse_cross_entropy", "sparse_softmax_cross_entropy_with_logits",
]  # fmt: skip


def relu(x: Blob, name: str | None = None) -> Blob:
    """Return ``max(x, 0)``."""
    return apply(torch.relu, x, op_name=name)  # type: ignore[no-any-return]


def leaky_relu(x: Blob, alpha: float = 0.2, name: str | None = None) -> Blob:
    """Return x where it is positive, and ``alpha * x`` elsewhere."""
    return apply(F.leaky_relu, x, alpha, op_name=name)  # type: ignore[no-any-return]


def elu(x: Blob, alpha: float = 1.0, name: str | None = None) -> Blob:
    """Return x where it is positive, and ``alpha * (exp(x) - 1)`` elsewhere."""
    return apply(F.elu, x, alpha, op_name=name)  # type: ignore[no-any-return]


def softmax(logits: Blob, axis: int | None = None, name: str | None = None) -> Blob:
    """Apply softmax over a dim, by default the last."""
    return apply(torch.softmax, logits, -1 if axis is None else axis, op_name=name)  # type: ignore[no-any-return]


def logsoftmax(logits: Blob, axis: int | None = None, name: str | None = None) -> Blob:
    """Return the logarithm of `softmax`."""
    return apply(torch.log_softmax, logits, -1 if axis is None else axis, op_name=name)  # type: ignore[no-any-return]


def _bias_add(value: torch.Tensor, bias: torch.Tensor, axis: int) -> torch.Tensor:
    return value + bias.reshape([-1] + [1] * (value.dim() - 1 - axis))


def bias_add(
    value: Blob, bias: Blob, data_format: str | None = None, name: str | None = None
) -> Blob:
    """Add a vector along the channels: dim 1, or the last dim with ``data_format`` "N..C".

    Raise JobError if the sizes differ.
    """
    axis = (
        len(value.shape) - 1
        if data_format is not None and data_format.upper().endswith("C") and len(data_format) > 2
        else 1
    )
    if len(bias.shape) != 1 or len(value.shape) <= axis or value.shape[axis] != bias.shape[0]:
        raise JobError(
            f"bias_add: dim {axis} of {value!r} and the bias {bias!r} must have one size"
        )
    return apply(_bias_add, value, bias, axis, op_name=name)  # type: ignore[no-any-return]


def _batch_normalization(
    x: torch.Tensor, mean: Any, variance: Any, offset: Any, scale: Any, epsilon: float, axis: int
) -> torch.Tensor:
    shape = [-1] + [1] * (x.dim() - 1 - axis)
    factor = (variance + epsilon).rsqrt()
    factor = factor if scale is None else factor * scale
    out = (x - mean.reshape(shape)) * factor.reshape(shape)
    return out if offset is None else out + offset.reshape(shape)


def batch_normalization(
    x: Blob, mean: Blob, variance: Blob, offset: Blob | None = None, scale: Blob | None = None,
    variance_epsilon: float = 1e-5, axis: int = 1,
    name: str | None = None,
) -> Blob:  # fmt: skip
    """Return ``(x - mean) / sqrt(variance + variance_epsilon) * scale + offset``.

    The other blobs are vectors along ``axis``.
    """
    return apply(
        _batch_normalization,
        x,
        mean,
        variance,
        offset,
        scale,
        variance_epsilon,
        axis % len(x.shape),
        op_name=name,
    )  # type: ignore[no-any-return]


def _moments(
    x: torch.Tensor, axes: Sequence[int], keepdims: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    variance, mean = torch.var_mean(x, list(axes), correction=0, keepdim=keepdims)
    return mean, variance


def moments(
    x: Blob, axes: Sequence[int], keepdims: bool = False, name: str | None = None
) -> tuple[Blob, Blob]:
    """Return the mean and the population variance over dims."""
    return apply(_moments, x, tuple(axes), keepdims, op_name=name)  # type: ignore[no-any-return]


def dropout(
    x: Blob, rate: float, noise_shape: Any = None, seed: int | None = None, name: str = "Dropout"
) -> Blob:
    """Set random elements to 0 and scale the others by ``1 / (1 - rate)``, in jobs that train.

    Other jobs get ``x`` unchanged. ``rate`` is the share of elements set to 0; they are drawn anew
    at each call. Every device draws numbers for its shard of the batch. The numbers follow from
    ``torch.manual_seed``, not from ``seed``. Raise JobError for a rate outside [0, 1), or a
    ``noise_shape``.
    """
    if not 0.0 <= rate < 1.0:
        raise JobError(f"dropout: the rate is at least 0 and below 1, got {rate!r}")
    if noise_shape is not None:
        raise JobError(
            "dropout: noise_shape was never supported; multiply by a mask of your own instead"
        )
    if rate == 0.0 or not recording().record.training:
        return x
    x = scoped(x)
    return own_step("random", F.dropout, x, float(rate), shape=x.shape, dtype=x.dtype, name=name)


def _sparse_softmax_cross_entropy_with_logits(
    logits: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    rows = F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="none")
    return rows.reshape(labels.shape)


def sparse_softmax_cross_entropy_with_logits(
    labels: Blob, logits: Blob, name: str | None = None
) -> Blob:
    """Return the cross entropy of each sample, from class indices as ``labels``.

    The last dim of ``logits`` is the classes. Raise JobError if the shapes differ.
    """
    if labels.dtype.is_floating_point or len(logits.shape) < 2:
        raise JobError(
            f"sparse_softmax_cross_entropy_with_logits: integer labels, then logits of 2 dims or "
            f"more, are wanted; got {labels!r} and {logits!r}"
        )
    if labels.shape not in (logits.shape[:-1], (*logits.shape[:-1], 1)):
        raise JobError(
            f"sparse_softmax_cross_entropy_with_logits: {labels!r} has not one label for each row "
            f"of {logits!r}; labels come first"
        )
    return apply(_sparse_softmax_cross_entropy_with_logits, logits, labels, op_name=name)  # type: ignore[no-any-return]


def _sparse_cross_entropy(prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (
        -prediction.gather(-1, labels.reshape(prediction.shape[:-1]).long().unsqueeze(-1))
        .squeeze(-1)
        .log()
    )


def sparse_cross_entropy(labels: Blob, prediction: Blob, name: str | None = None) -> Blob:
    """Return the cross entropy of each sample, from class indices and predicted probabilities."""
    return apply(_sparse_cross_entropy, prediction, labels, op_name=name)  # type: ignore[no-any-return]


def softmax_cross_entropy_with_logits(labels: Blob, logits: Blob, name: str | None = None) -> Blob:
    """Return the cross entropy of each sample, from class probabilities as ``labels``.

    ``labels`` has the shape of ``logits``.
    """

    return apply(_softmax_cross_entropy_with_logits, logits, labels, op_name=name)  # type: ignore[no-any-return]


def _softmax_cross_entropy_with_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -(labels * torch.log_softmax(logits, -1)).sum(-1)


def _sigmoid_cross_entropy_with_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def sigmoid_cross_entropy_with_logits(labels: Blob, logits: Blob, name: str | None = None) -> Blob:
    """Return the logistic loss of each element."""
    return apply(_sigmoid_cross_entropy_with_logits, logits, labels, op_name=name)  # type: ignore[no-any-return]


def _convolution(dims: int, channels_first: str) -> Callable[..., Blob]:
    what = f"conv{dims}d"

    def run(
        input: Blob, filters: Blob, strides: Any, padding: Any, data_format: str = channels_first,
        dilations: Any = None, groups: int = 1,
        name: str | None = None,
    ) -> Blob:  # fmt: skip
        last = channels_last(what, data_format, dims)
        if len(input.shape) != dims + 2 or len(filters.shape) != dims + 2:
            raise JobError(
                f"{what}: input and filters of {dims + 2} dims are wanted, got {input!r} and "
                f"{filters!r}"
            )
        space, window = (s.shape[1:-1] if last else s.shape[2:] for s in (input, filters))
        steps, wide = (
            numbers(f"{what}: strides", strides, dims),
            numbers(f"{what}: dilations", dilations or 1, dims),
        )
        pads = padding_of(what, padding, last, space, window, steps, wide)
        return apply(convolved, input, filters, None, steps, pads, wide, groups, last, op_name=name)  # type: ignore[no-any-return]

    shape = "(filters, channels / groups, window...)"
    text = f"""A convolution along {dims} dim{"s" if dims > 1 else ""}; ``filters`` is {shape}, with channels last (filters, window..., channels / groups).
    ``padding``: "SAME", "SAME_LOWER", "SAME_UPPER", "VALID", or (before, after) for each dim. Raises JobError for invalid arguments."""  # noqa: E501
    return named(run, what, text)


def _pooling(kind: str, dims: int, channels_first: str) -> Callable[..., Blob]:
    what = f"{kind}_pool{dims}d"

    def run(
        input: Blob,
        ksize: Any,
        strides: Any,
        padding: Any,
        data_format: str = channels_first,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> Blob:
        last = channels_last(what, data_format, dims)
        if len(input.shape) != dims + 2:
            raise JobError(f"{what}: an input of {dims + 2} dims is wanted, got {input!r}")
        windows = numbers(f"{what}: ksize", ksize, dims)
        steps = windows if strides is None else numbers(f"{what}: strides", strides, dims)
        pads = padding_of(
            what,
            padding,
            last,
            input.shape[1:-1] if last else input.shape[2:],
            windows,
            steps,
            (1,) * dims,
        )
        return apply(pooled, input, kind, windows, steps, pads, ceil_mode, last, op_name=name)  # type: ignore[no-any-return]

    told = "The largest value" if kind == "max" else "The mean, in which padding does not count,"
    text = f"""{told} of each window of {dims} dim{"s" if dims > 1 else ""}. ``padding`` as for convolutions. Raises JobError for invalid arguments."""  # noqa: E501
    return named(run, what, text)


conv1d, conv2d, conv3d = (
    _convolution(dims, layout) for dims, layout in ((1, "NCW"), (2, "NCHW"), (3, "NCDHW"))
)
max_pool1d, max_pool2d, max_pool3d = (
    _pooling("max", dims, layout) for dims, layout in ((1, "NCW"), (2, "NCHW"), (3, "NCDHW"))
)
avg_pool1d, avg_pool2d, avg_pool3d = (
    _pooling("avg", dims, layout) for dims, layout in ((1, "NCW"), (2, "NCHW"), (3, "NCDHW"))
)
