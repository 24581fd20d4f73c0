"""Rules of torch's lower-level functions, which its layers and losses call, and of signals.

`rules` imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..._base import torch_private
from ..._base.python_bodies import python_body
from ...errors import FormError
from .gather_scatter import check_elements, is_range_error
from .helpers import dims_of, reduced, skip_when_empty
from .notation import Arg, Dims, LocalContext, OpDescription, align
from .registry import DATA_FREE_VARIANTS, rule

__all__: list[str] = []

# ------------------------------------------------------------------------------------------ signals


@rule([torch_private.stft])
def _stft(
    op: OpDescription,
    input: Arg,
    n_fft: int,
    hop: Any = None,
    length: Any = None,
    window: Arg | None = None,
    *rest: Any,
    **kwargs: Any,
) -> None:
    lead: Dims = ("b",) if input.ndim == 2 else ()
    op.set(input, (*lead, None))
    op.out = [
        (
            *lead,
            *[None]
            * (3 if kwargs.get("return_complex", (*rest, None, None, None)[2]) is False else 2),
        )
    ]
    op.linear = [frozenset([input.index])]
    op.local = skip_when_empty(op, torch_private.stft)


def inverse_stft(
    input: Tensor,
    n_fft: int,
    hop: int,
    length: int,
    window: Tensor | None,
    more: tuple[Any, ...],
    size: int,
) -> Tensor:
    """Compute ``torch.istft`` with a result of known length, for a batch."""
    if has_torch_function((input, window)):
        return handle_torch_function(
            inverse_stft, (input, window), input, n_fft, hop, length, window, more, size
        )
    # torch checks that the windows overlap, which meta and fake tensors cannot answer.
    if input.is_meta or torch_private.is_fake(input):
        whole = input.sum((1, 2)).unsqueeze(1).repeat(1, size)
        return whole if more[-1] else whole.real
    return torch.istft(input, n_fft, hop, length, window, *more[:-2], size, more[-1])  # type: ignore[no-any-return]


@rule([inverse_stft])
def _inverse_stft(
    op: OpDescription, input: Arg, n_fft: int, hop: int, length: int, window: Arg | None, *rest: Any
) -> None:
    op.set(input, ("b", None, None))
    op.out, op.linear = [("b", None)], [frozenset([input.index])]
    op.local = skip_when_empty(op, inverse_stft)


@rule([torch.istft])
def _istft(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.composite = _istft_of_batch


def _istft_of_batch(
    input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, center: bool = True,
    normalized: bool = False, onesided: bool | None = None, length: int | None = None,
    return_complex: bool = False,
) -> Tensor:  # fmt: skip
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    full = n_fft + hop * (input.shape[-1] - 1)
    size = length if length is not None else full - 2 * (n_fft // 2) * center
    batch = input if input.ndim == 3 else input.unsqueeze(0)
    out = inverse_stft(
        batch,
        n_fft,
        hop,
        width,
        window,
        (center, normalized, onesided, length, return_complex),
        size,
    )
    return out if input.ndim == 3 else out.squeeze(0)


DATA_FREE_VARIANTS[torch.istft] = _istft_of_batch

# ------------------------------------------------------------ connectionist temporal classification


def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the loss of each sequence."""
    operands = (
        log_probs,
        targets,
        *(a for a in (input_lengths, target_lengths) if isinstance(a, Tensor)),
    )
    if has_torch_function(operands):
        return handle_torch_function(
            ctc_losses,
            operands,
            log_probs,
            targets,
            input_lengths,
            target_lengths,
            blank,
            zero_infinity,
        )
    # torch reads the lengths, which meta and fake tensors do not hold.
    if log_probs.is_meta or torch_private.is_fake(log_probs):
        return log_probs.sum((0, -1))
    return torch.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity
    )


@rule([ctc_losses])
def _ctc_losses(
    op: OpDescription,
    log_probs: Arg,
    targets: Arg,
    input_lengths: Any,
    target_lengths: Any,
    *rest: Any,
) -> None:
    op.out = [("n",)]
    # The call has one sequence, or the targets of all sequences joined together.
    if log_probs.ndim != 3 or targets.ndim != 2:
        op.out = [(None,) * (log_probs.ndim - 2)]
        return
    op.set(log_probs, (None, "n", None))
    op.set(targets, ("n", None))
    for a in (input_lengths, target_lengths):
        if isinstance(a, Arg):
            op.set(a, ("n",))

    def local(split: LocalContext) -> Callable[..., Tensor]:
        offset, n = split.box("n")

        def run(
            log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *rest: Any
        ) -> Tensor:
            mine = [
                a if isinstance(a, Tensor) else tuple(a)[offset : offset + n]
                for a in (input_lengths, target_lengths)
            ]
            return ctc_losses(log_probs, targets, *mine, *rest)

        return run

    op.local = local
    op.local = skip_when_empty(op)


@rule([torch.ctc_loss])
def _ctc(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.composite = _reduced_ctc


def _reduced_ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False
) -> Tensor:  # fmt: skip
    losses = ctc_losses(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    if reduction != 1:
        return losses.sum() if reduction else losses
    lengths = target_lengths if isinstance(target_lengths, Tensor) else torch.tensor(target_lengths)
    return (losses / lengths.clamp(min=1).to(losses.dtype).reshape(losses.shape)).mean()


DATA_FREE_VARIANTS[torch.ctc_loss] = _reduced_ctc

# ------------------------------------------------------------------------------------ grid sampling


@rule(["grid_sampler", "grid_sampler_2d", "grid_sampler_3d"])
def _grid_sampler(op: OpDescription, input: Arg, grid: Arg, *args: Any, **kwargs: Any) -> None:
    places = tuple(range(input.ndim - 2))
    op.set(input, ("n", "c", *[None] * len(places)))
    op.set(grid, ("n", *places, None))
    op.out, op.linear = [("n", "c", *places)], [frozenset([input.index])]
    op.local = skip_when_empty(op, op.function)


@rule("affine_grid_generator")
def _affine_grid(op: OpDescription, theta: Arg, size: Sequence[int], align_corners: bool) -> None:
    op.set(theta, ("n", None, None))
    op.out, op.linear = [("n", *[None] * (len(size) - 1))], [frozenset([0])]
    op.local = lambda split: (
        lambda theta, *args, **kwargs: torch.affine_grid_generator(
            theta, [theta.shape[0], *size[1:]], align_corners
        )
    )
    op.local = skip_when_empty(op)


# -------------------------------------------------------------------------------- kernels of layers


@rule([torch.batch_norm])
def _batch_norm(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.composite = lambda input, weight, bias, mean, var, *rest: F.batch_norm(
        input, mean, var, weight, bias, *rest[:3]
    )


@rule([torch.instance_norm])
def _instance_norm(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.composite = lambda input, weight, bias, mean, var, *rest: F.instance_norm(
        input, mean, var, weight, bias, *rest[:3]
    )


@rule("native_batch_norm")
def _native_batch_norm(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.composite = _normed_batch


@rule([torch_private.batch_norm_kernel])
def _batch_norm_kernel(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.composite = lambda input, weight, bias, *rest: _normed_batch(
        input, weight, bias, *(rest if len(rest) == 5 else (None, None, *rest))
    )


def _normed_batch(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (result, mean, 1 / standard deviation).

    The last two are empty where the running statistics are used.
    """
    out = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        return out, input.new_empty(0), input.new_empty(0)
    variance, mean = torch.var_mean(
        input.detach(), [d for d in range(input.ndim) if d != 1], correction=0
    )
    return out, mean, (variance + eps).rsqrt()


@rule("native_layer_norm")
def _native_layer_norm(
    op: OpDescription,
    input: Arg,
    normalized_shape: Any,
    weight: Arg | None,
    bias: Arg | None,
    eps: float,
) -> None:
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    reduced(op, input, dims, True, None)
    names = op.dims[input.index]
    statistics = tuple(None if d in dims else f for d, f in enumerate(names))
    op.out = [names, statistics, statistics]
    for p in (weight, bias):
        if p is not None:
            op.set(p, dims)
    op.local = skip_when_empty(op, torch.native_layer_norm)


@rule("native_group_norm")
def _native_group_norm(
    op: OpDescription,
    input: Arg,
    weight: Arg | None,
    bias: Arg | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> None:
    op.set(input, ("n", *[None] * (input.ndim - 1)))
    op.out = [op.dims[input.index], ("n", None), ("n", None)]
    op.local = lambda split: (
        lambda input, weight, bias, *args, **kwargs: torch.native_group_norm(
            input, weight, bias, input.shape[0], C, HxW, group, eps
        )
    )
    op.local = skip_when_empty(op)


def _softmax_like(op: OpDescription, x: Arg, dims: tuple[int, ...], *others: Arg) -> None:
    reduced(op, x, dims, True, None)
    op.out = [op.dims[x.index]]
    for a in others:
        op.set(a, op.dims[x.index])


@rule(torch_private.softmax_without_rows)
def _safe_softmax(
    op: OpDescription, input: Arg, dim: int, dtype: torch.dtype | None = None
) -> None:
    _softmax_like(op, input, dims_of(input, dim))


@rule(torch_private.softmax_backward)
def _softmax_backward(
    op: OpDescription, grad: Arg, output: Arg, dim: int, dtype: torch.dtype
) -> None:
    _softmax_like(op, grad, dims_of(grad, dim), output)


@rule([torch.ops.aten.native_dropout_backward, torch.ops.aten.native_dropout_backward.default])
def _dropout_backward(op: OpDescription, grad: Arg, mask: Arg, scale: float) -> None:
    op.dims, names = align([grad.shape, mask.shape])
    op.out, op.linear = [names], [frozenset([grad.index])]


# ------------------------------------------------------------------------------------- put and fill


@rule("put")
def _put(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    if op.function not in (torch.Tensor.put_,):
        op.composite = _put_into_copy
    else:
        raise FormError("in place")


def _put_into_copy(
    input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False
) -> Tensor:
    flat, given, source = input.flatten(), index.flatten(), source.flatten()
    index = torch.where(given < 0, given + flat.shape[0], given)
    try:
        out = flat.index_add(0, index, source) if accumulate else flat.index_copy(0, index, source)
    except (IndexError, RuntimeError) as error:
        if is_range_error(error):
            check_elements(given, flat.shape[0])
            raise IndexError(
                f"out of range: an index that another rank holds is outside a tensor of "
                f"{flat.shape[0]} elements."
            ) from None
        raise
    return out.reshape(input.shape)


@rule([torch.fill])
def _fill(op: OpDescription, input: Arg, value: Any) -> None:
    op.compose(_filled)


def _filled(input: Tensor, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full_like(input, value)
    return value.to(input.dtype).expand(input.shape).clone()


rule([torch.Tensor.item])(lambda op, input: setattr(op, "composite", lambda input: input.item()))


# ----------------------------------------------------------------------------- linear cross-entropy

#: linear_cross_entropy is newer than the oldest supported torch. Without it these lists are empty.
_heads = [f for f in (vars(F).get("linear_cross_entropy"),) if f is not None]
_bodies = [python_body(f) for f in _heads]


@rule(_heads)
def _linear_cross_entropy(
    op: OpDescription, input: Arg, linear_weight: Arg, target: Arg, *,
    linear_bias: Arg | None = None, weight: Arg | None = None, reduction: str = "mean",
    ignore_index: int | None = None, label_smoothing: float = 0.0, options: Any = None,
) -> None:  # fmt: skip
    simple = (
        input.ndim == linear_weight.ndim == 2
        and target.dtype == torch.int64
        and not label_smoothing
    )
    if options is None or not simple or linear_weight.is_split(0):
        # Compute without chunks. Where the logits are split, no rank makes all of them at once.
        op.composite = lambda *args, options=None, **kwargs: _bodies[0](*args, **kwargs)  # type: ignore[misc]
    elif reduction != "none":
        op.composite = _reduced_linear_cross_entropy
    else:
        op.set(input, ("n", None))
        op.set(target, ("n",))
        op.out = [("n",)]
        op.local = skip_when_empty(op, _heads[0])


def _reduced_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, weight: Tensor | None = None,
    reduction: str = "mean", ignore_index: int | None = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    losses = _heads[0](
        input,
        linear_weight,
        target,
        weight=weight,
        reduction="none",
        ignore_index=ignore_index,
        **kwargs,
    )
    if reduction == "sum":
        return losses.sum()
    counts = target != (-100 if ignore_index is None else ignore_index)
    if weight is None:
        return losses.sum() / counts.sum()
    return losses.sum() / torch.where(counts, weight[torch.where(counts, target, 0)], 0).sum()


# --------------------------------------------------------------------------------- grouped products


@rule(torch_private.grouped_mm)
def _grouped_mm(
    op: OpDescription,
    mat_a: Arg,
    mat_b: Arg,
    offs: Arg | None = None,
    bias: Arg | None = None,
    out_dtype: Any = None,
) -> None:
    """Describe products of groups (mixtures of experts).

    Rows are in groups that end at ``offs``, each with a matrix of its own. Or both operands are
    stacks of as many matrices.
    """
    if mat_a.ndim == mat_b.ndim == 3 and bias is None:
        op.set(mat_a, ("g", None, None))
        op.set(mat_b, ("g", None, None))
        op.out = [("g", None, None)]
        op.local = skip_when_empty(op, op.function)
    elif mat_a.ndim == 2 and mat_b.ndim == 3 and offs is not None and bias is None:
        op.set(mat_a, ("t", None))
        op.out = [("t", None)]
        op.local = lambda split: _own_rows(op.function, *split.box("t"))
        op.local = skip_when_empty(op)


def _own_rows(function: Callable[..., Tensor], first: int, length: int) -> Callable[..., Tensor]:
    def run(mat_a: Tensor, mat_b: Tensor, offs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return function(mat_a, mat_b, *args, offs=(offs - first).clamp(0, length), **kwargs)

    return run
