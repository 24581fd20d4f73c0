"""``flow.layers``: ops that create their own variables, named ``<name>-weight`` and so on.

User code calls them inside job functions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import nn, ops
from .blob import Blob, apply, named, recording
from .conv_pool import channels_last, from_channels_first, numbers, to_channels_first
from .distribute import Distribute, assert_is_valid_distribute, broadcast
from .errors import JobError
from .initializers import Constant, Initializer, xavier_uniform_initializer
from .regularizers import Regularizer
from .scope import namespace
from .variables import assign, get_variable

__all__ = [
    "batch_normalization", "batch_normalization_add_relu", "batch_normalization_relu", "conv1d",
    "conv2d", "conv3d", "dense", "layer_norm", "layer_norm_grad",
    "upsample_2d",
]  # fmt: skip

Activation = Callable[..., Blob]


def dense(
    inputs: Blob, units: int, activation: Activation | None = None, use_bias: bool = True,
    kernel_initializer: Initializer | None = None,
    bias_initializer: Initializer | None = None, kernel_regularizer: Regularizer | None = None,
    bias_regularizer: Regularizer | None = None,
    trainable: bool = True, name: str = "Dense", model_distribute: Distribute = broadcast(),  # noqa: B008 - a value
) -> Blob:  # fmt: skip
    """Apply a linear layer, ``inputs @ weight.T + bias``, along the last dim.

    The weight has shape (units, inputs). Without an initializer, it starts at zero.

    ``model_distribute``: ``split(0)`` gives each device some of the units, that is rows of the
    weight and elements of the bias. Every device then gets the full inputs, and the output is split
    along dim 1. This works for 2-D inputs only. Raise JobError for another split, or for inputs of
    less than 2 dims.
    """
    if len(inputs.shape) < 2:
        raise JobError(f"layers.dense: inputs of 2 dims or more are wanted, got {inputs!r}")
    assert_is_valid_distribute(model_distribute)
    sbp = model_distribute.sbp
    divided = sbp is not None and sbp.is_split
    if divided and (sbp.dim != 0 or len(inputs.shape) != 2):  # type: ignore[union-attr]
        raise JobError(
            f"layers.dense: model_distribute is split(0), for 2-D inputs, broadcast() or auto(); "
            f"got {model_distribute!r} for {inputs!r}"
        )
    out = ops.reshape(inputs, (-1, inputs.shape[-1])) if len(inputs.shape) > 2 else inputs
    if divided:
        out = out.with_distribute(broadcast())
    with namespace(name):
        common: dict[str, Any] = {
            "trainable": trainable,
            "distribute": model_distribute,
            "dtype": inputs.dtype,
            "reuse": False,
        }
        shape = (units, inputs.shape[-1])
        weight = get_variable(
            "weight",
            shape,
            initializer=kernel_initializer,
            regularizer=kernel_regularizer,
            model_name="weight",
            **common,
        )
        out = ops.matmul(out, weight, transpose_b=True, name="matmul")
        if use_bias:
            bias = get_variable(
                "bias",
                (units,),
                initializer=bias_initializer,
                regularizer=bias_regularizer,
                model_name="bias",
                **common,
            )
            out = nn.bias_add(out, bias, name="bias_add")
        out = _activate(activation, out)
    return ops.reshape(out, (*inputs.shape[:-1], units)) if len(inputs.shape) > 2 else out


def _activate(activation: Activation | None, blob: Blob) -> Blob:
    """Apply an activation, passing ``name`` only if its signature has that parameter.

    The activations of this interface have it; functions without it are accepted too.
    """
    if activation is None:
        return blob
    try:
        takes = "name" in inspect.signature(activation).parameters
    except (TypeError, ValueError):
        takes = False
    return activation(blob, name="activation") if takes else activation(blob)


def _convolution(dims: int, channels_first: str) -> Callable[..., Blob]:
    what = f"layers.conv{dims}d"
    convolution = {1: nn.conv1d, 2: nn.conv2d, 3: nn.conv3d}[dims]

    def run(
        inputs: Blob, filters: int, kernel_size: Any = 1, strides: Any = 1, padding: Any = "VALID",
        data_format: str = channels_first,
        dilation_rate: Any = None, groups: int = 1, activation: Activation | None = None,
        use_bias: bool = True,
        kernel_initializer: Initializer | None = None, bias_initializer: Initializer | None = None,
        kernel_regularizer: Regularizer | None = None,
        bias_regularizer: Regularizer | None = None, trainable: bool = True,
        name: str = f"Conv{dims}d", weight_name: str | None = None,
        bias_name: str | None = None,
    ) -> Blob:  # fmt: skip
        last = channels_last(what, data_format, dims)
        window = numbers(f"{what}: kernel_size", kernel_size, dims)
        if len(inputs.shape) != dims + 2:
            raise JobError(f"{what}: an input of {dims + 2} dims is wanted, got {inputs!r}")
        channels = inputs.shape[-1 if last else 1]
        if not isinstance(groups, int) or groups < 1 or filters % groups or channels % groups:
            raise JobError(
                f"{what}: {groups!r} groups must divide {filters} filters and {channels} channels"
            )
        shape = (
            (filters, *window, channels // groups)
            if last
            else (filters, channels // groups, *window)
        )

        def variable(
            variable_name: str | None,
            kind: str,
            size: tuple[int, ...],
            start: Any,
            regularizer: Any,
        ) -> Blob:
            options = {
                "initializer": start,
                "regularizer": regularizer,
                "model_name": kind,
                "trainable": trainable,
                "dtype": inputs.dtype,
                "reuse": False,
            }
            if variable_name is not None:
                return get_variable(variable_name, size, **options)
            with namespace(name):
                return get_variable(kind, size, **options)

        weight = variable(
            weight_name,
            "weight",
            shape,
            kernel_initializer or xavier_uniform_initializer(data_format),
            kernel_regularizer,
        )
        out = convolution(
            inputs, weight, strides, padding, data_format, dilation_rate, groups, name=name
        )
        if use_bias:
            bias = variable(bias_name, "bias", (filters,), bias_initializer, bias_regularizer)
            out = nn.bias_add(out, bias, data_format, name=f"{name}-bias_add")
        with namespace(name):
            return _activate(activation, out)

    text = f"""A convolution along {dims} dim{"s" if dims > 1 else ""}, plus a bias: see ``nn.conv{dims}d``. Without a ``kernel_initializer`` the weight starts
    with ``xavier_uniform_initializer``'s values. Variables are named ``weight_name`` and ``bias_name``, by default after the layer. Raises JobError for
    invalid arguments."""  # noqa: E501
    return named(run, f"conv{dims}d", text)


conv1d, conv2d, conv3d = (
    _convolution(dims, layout) for dims, layout in ((1, "NCW"), (2, "NCHW"), (3, "NCDHW"))
)


def _layer_normed(
    x: torch.Tensor, gamma: Any, beta: Any, first: int, epsilon: float
) -> torch.Tensor:
    out = F.layer_norm(x, list(x.shape[first:]), None, None, epsilon)
    out = out if gamma is None else out * gamma
    return out if beta is None else out + beta


def layer_norm(
    inputs: Blob, center: bool = True, scale: bool = True, trainable: bool = True,
    begin_norm_axis: int = 1, begin_params_axis: int = -1,
    epsilon: float = 1e-5, name: str = "LayerNorm", model_distribute: Distribute = broadcast(),  # noqa: B008 - a value
) -> Blob:  # fmt: skip
    """Normalise over the dims from ``begin_norm_axis`` on, then multiply by gamma and add beta.

    Gamma and beta have the dims from ``begin_params_axis`` on. Raise JobError for dims that
    ``inputs`` does not have.
    """
    dims = len(inputs.shape)
    if not -dims <= begin_norm_axis < dims or not -dims <= begin_params_axis < dims:
        raise JobError(
            f"layers.layer_norm: {inputs!r} has no dim {begin_norm_axis} or {begin_params_axis}"
        )
    first, shape = begin_norm_axis % dims, inputs.shape[begin_params_axis % dims :]
    common: dict[str, Any] = {
        "trainable": trainable,
        "distribute": model_distribute,
        "dtype": inputs.dtype,
        "reuse": False,
    }
    with namespace(name):
        beta = (
            get_variable("beta", shape, initializer=Constant(0), model_name="beta", **common)
            if center
            else None
        )
        gamma = (
            get_variable("gamma", shape, initializer=Constant(1), model_name="gamma", **common)
            if scale
            else None
        )
    return apply(_layer_normed, inputs, gamma, beta, first, epsilon, op_name=name)  # type: ignore[no-any-return]


def layer_norm_grad(*args: Any, **kwargs: Any) -> Blob:
    """Raise JobError: this function is gone, because autograd computes the gradients."""
    raise JobError(
        "layers.layer_norm_grad was removed: autograd computes gradients now; use "
        "layers.layer_norm and minimize"
    )


def _batch_normed(
    x: torch.Tensor, gamma: Any, beta: Any, epsilon: float, axis: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normalised batch, the batch's mean and its unbiased variance."""
    moved = x.movedim(axis, 1)
    out = F.batch_norm(moved, None, None, gamma, beta, True, 0.0, epsilon).movedim(1, axis)
    variance, mean = torch.var_mean(
        x.detach(),
        [d for d in range(x.dim()) if d != axis],
        correction=1 if x.numel() > x.shape[axis] else 0,
    )
    return out, mean, variance


def batch_normalization(
    inputs: Blob, axis: int = -1, momentum: float = 0.99, epsilon: float = 0.001,
    center: bool = True, scale: bool = True,
    beta_initializer: Initializer | None = None, gamma_initializer: Initializer | None = None,
    beta_regularizer: Regularizer | None = None,
    gamma_regularizer: Regularizer | None = None,
    moving_mean_initializer: Initializer | None = None,
    moving_variance_initializer: Initializer | None = None, trainable: bool = True,
    training: bool = True, name: str = "BatchNorm",
) -> Blob:  # fmt: skip
    """Normalise over all dims except ``axis``.

    In a job that trains, with ``trainable`` and ``training``, the batch's mean and variance are
    used. They also update the moving averages: ``momentum`` times the old value plus
    ``1 - momentum`` times the new one. Otherwise the moving averages are used. The batch is that of
    all devices in the consistent view, and each device's own in the mirrored view. Raise JobError
    for a dim that ``inputs`` does not have.
    """
    dims = len(inputs.shape)
    if not -dims <= axis < dims:
        raise JobError(f"layers.batch_normalization: {inputs!r} has no dim {axis}")
    axis %= dims
    learns = training and trainable and recording().record.training
    shape, dtype = (
        (inputs.shape[axis],),
        torch.float32 if inputs.dtype in (torch.float16, torch.bfloat16) else inputs.dtype,
    )
    options: dict[str, Any] = {"dtype": dtype, "reuse": False}
    one, zero = Constant(1), Constant(0)
    with namespace(name):
        beta = gamma = None
        if center:
            beta = get_variable(
                "beta",
                shape,
                initializer=beta_initializer or zero,
                regularizer=beta_regularizer,
                trainable=trainable,
                **options,
            )
        if scale:
            gamma = get_variable(
                "gamma",
                shape,
                initializer=gamma_initializer or one,
                regularizer=gamma_regularizer,
                trainable=trainable,
                **options,
            )
        mean = get_variable(
            "moving_mean",
            shape,
            initializer=moving_mean_initializer or zero,
            trainable=False,
            **options,
        )
        variance = get_variable(
            "moving_variance",
            shape,
            initializer=moving_variance_initializer or one,
            trainable=False,
            **options,
        )
        if not learns:
            return nn.batch_normalization(
                inputs, mean, variance, beta, gamma, epsilon, axis, name="normalized"
            )
        out, new_mean, new_variance = apply(
            _batch_normed, inputs, gamma, beta, epsilon, axis, op_name="normalized"
        )
        for held, new in ((mean, new_mean), (variance, new_variance)):
            assign(held, new, keep=momentum)
    return out  # type: ignore[no-any-return]


def batch_normalization_add_relu(inputs: Blob, addend: Blob | None = None, **options: Any) -> Blob:
    """Apply `batch_normalization`, add ``addend`` (if not None), and apply relu."""
    out = batch_normalization(inputs, **options)
    return nn.relu(out if addend is None else apply(torch.add, out, addend))


def batch_normalization_relu(inputs: Blob, **options: Any) -> Blob:
    """Apply `batch_normalization` and relu."""
    return nn.relu(batch_normalization(inputs, **options))


def _larger(x: torch.Tensor, size: Sequence[int], mode: str, last: bool) -> torch.Tensor:
    x = to_channels_first(x, last)
    options = {} if mode == "nearest" else {"align_corners": False}
    wanted = [math.floor(n * s) for n, s in zip(x.shape[2:], size, strict=True)]
    out = F.interpolate(x, wanted, mode=mode, **options)
    return from_channels_first(out, last)


def upsample_2d(
    x: Blob,
    size: Any = (2, 2),
    data_format: str = "NCHW",
    interpolation: str = "nearest",
    name: str = "Upsample2D",
) -> Blob:
    """Enlarge images ``size`` times in height and width.

    ``interpolation`` is "nearest" or "bilinear". Raise JobError for another.
    """
    if interpolation not in ("nearest", "bilinear"):
        raise JobError(
            f'layers.upsample_2d: interpolation is "nearest" or "bilinear", got {interpolation!r}'
        )
    factors = (size, size) if isinstance(size, (int, float)) else tuple(size)
    return apply(
        _larger,
        x,
        factors,
        interpolation,
        channels_last("layers.upsample_2d", data_format, 2),
        op_name=name,
    )  # type: ignore[no-any-return]
