"""Backward in two parts: the gradients of inputs now, those of weights later.

The method is that of "Zero Bubble Pipeline Parallelism", Qi et al., ICLR 2024. `stage` uses it, and
`pipelined_graph` puts the functions into programs.

`linear`, `matmul` and the convolutions compute as torch's do. While a stage of a zero-bubble
schedule runs, these functions defer the gradients of weights that are leaves to the stage's
`DeferredWeightGrads`. `DeferredWeightGrads` saves only their input and the gradient of their
result. Some weight gradients are computed with the gradients of inputs: those of other functions
(norms, embeddings). The same holds for weights that are no leaves (gathered ones) or have a hook on
their gradient. Torch calls a hook that runs after accumulation
(`register_post_accumulate_grad_hook`) for a deferred weight too, before anything is added, and
again after that.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._base.torch_private import any_autocast, call_after_accumulation, computed_by

__all__ = [
    "DEFERRED",
    "LIGHTER",
    "DeferredWeightGrads",
    "checkpointing",
    "conv1d",
    "conv2d",
    "conv3d",
    "lighter_linear",
    "lighter_matmul",
    "linear",
    "matmul",
]


class DeferredWeightGrads:
    """The deferred weight gradients of one forward pass.

    `holding` defers the gradients, and `run` computes them.

    >>> w, x, later = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2), DeferredWeightGrads()
    >>> with later.recording():
    ...     y = linear(x, w).sum()
    >>> with later.holding():
    ...     y.backward()
    >>> w.grad is None, later.waiting
    (True, 1)
    >>> later.run()
    >>> w.grad
    tensor([[3., 3.]])
    """

    def __init__(self) -> None:
        self.held = False
        self._work: list[Callable[[], None]] = []

    @property
    def waiting(self) -> int:
        """The number of ops whose weights wait."""
        return len(self._work)

    def recording(self) -> AbstractContextManager[None]:
        """Return a context for the forward pass.

        Weight gradients of ops in the context can be deferred. The context can be entered again."""
        return _WeightGradRecording(self)

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Defer weight gradients in a backward pass of inputs. A backward outside defers none."""
        # Not a ContextVar: autograd runs the backward of accelerators in threads of its own.
        self.held = True
        try:
            yield
        finally:
            self.held = False

    def put(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def run(self) -> None:
        """Compute the deferred gradients and add them to the leaves' ``.grad``.

        Hooks run as in a backward pass. Each saved input is freed once its gradient is computed."""
        work, self._work = self._work, []
        work.reverse()
        while work:
            work.pop()()


_current: ContextVar[DeferredWeightGrads | None] = ContextVar(
    "globaltensor_deferred_weights", default=None
)


class _WeightGradRecording:
    def __init__(self, later: DeferredWeightGrads) -> None:
        self._later, self._tokens = later, list[Token[DeferredWeightGrads | None]]()

    def __enter__(self) -> None:
        self._tokens.append(_current.set(self._later))

    def __exit__(self, *error: object) -> None:
        _current.reset(self._tokens.pop())


def checkpointing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpoint, so that its second forward pass acts as its first.

    Use it as ``torch.utils.checkpoint(..., context_fn=checkpointing)``. The passes then agree in
    whichever thread the second one runs. Without it, they agree on the cpu only. On other devices
    autograd's own threads run the second pass, and torch finds that the two differ.
    """
    later = _current.get()
    return (
        contextlib.nullcontext(),
        contextlib.nullcontext() if later is None else later.recording(),
    )


def _deferral_for(*leaves: Tensor | None) -> DeferredWeightGrads | None:
    """Return the receiver of the gradients of the given weights, or None if none is deferred."""
    later = _current.get()
    if (
        later is None
        or not torch.is_grad_enabled()
        or not any(_is_deferrable(leaf) for leaf in leaves)
    ):
        return None
    return later


def _is_deferrable(leaf: Tensor | None) -> bool:
    # Autograd would call a hook on the gradient of a weight that waits, and with None.
    return leaf is not None and leaf.is_leaf and leaf.requires_grad and not leaf._backward_hooks


def _defers_weight_grads(ctx: Any) -> bool:
    """Return True if weight gradients are to be deferred.

    A forward pass inside a backward pass defers none: that backward pass determines which gradients
    it needs."""
    return ctx.first and ctx.later.held and not torch.is_grad_enabled()


def _accumulate_grad(leaf: Tensor, grad: Tensor) -> None:
    """Add a gradient to a leaf as a backward pass does, hooks included.

    A separate run of the autograd engine takes ten times as long."""
    grad = grad.to(leaf.dtype)
    if leaf.grad is None:
        leaf.grad = grad
    else:
        leaf.grad += grad
    call_after_accumulation(leaf)


def _cast(x: Tensor) -> Tensor:
    """Return ``x`` as autocast would pass it to a matrix product."""
    kind = x.device.type
    if (
        any_autocast()
        and torch.is_autocast_enabled(kind)
        and x.is_floating_point()
        and x.dtype is not torch.float64
    ):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, enabled=False) if any_autocast() else contextlib.nullcontext()


def _cast_like(t: Tensor | None, like: Tensor) -> Tensor | None:
    return None if t is None else t.to(like.dtype)


# ---------------------------------------------------------------------------------- matrix products
# A write to a view of a product, such as an in-place activation, replaces the view's node in the
# autograd graph. So the hook that records gradients is on the product itself.


def _is_real_matrix_product(input: Tensor, weight: Tensor) -> bool:
    """Return whether ``weight`` is a matrix, ``input`` has a dim, and both are real."""
    return weight.ndim == 2 and input.ndim > 0 and not (weight.is_complex() or input.is_complex())


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute torch.nn.functional.linear: ``[..., k], [n, k], [n] -> [..., n]``."""
    later = _deferral_for(weight)
    if later is None or not _is_real_matrix_product(input, weight):
        return F.linear(input, weight, bias)
    return _product(_cast(input), weight, bias, False, later)


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Compute torch.matmul. A second factor ``[k, n]`` that is a leaf counts as the weight."""
    later = _deferral_for(other)
    if later is None or not _is_real_matrix_product(input, other):
        return torch.matmul(input, other)
    return _product(_cast(input), other, None, True, later)


def lighter_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` with a weight that is a constant for autograd.

    This is for a program in which no code asks autograd for gradients of weights, and nothing is
    recomputed. The weight's gradient comes from `DeferredWeightGrads.run` alone, also after a
    backward pass that defers nothing."""
    later = _current.get()
    # Among products that fill the caches, each step of Python takes several times as long as in a
    # loop of its own. So there are no more steps than these.
    if (
        later is None
        or any_autocast()
        or not (
            input.requires_grad
            and _real_matrix(weight)
            and _is_deferrable(weight)
            and (bias is None or _is_deferrable(bias))
        )
    ):
        return linear(input, weight, bias)
    return _record_output_grad(
        F.linear(input, weight.detach(), None if bias is None else bias.detach()),
        input,
        weight,
        bias,
        False,
        later,
    )


def lighter_matmul(input: Tensor, other: Tensor) -> Tensor:
    """Compute `matmul` with a constant second factor, as `lighter_linear` does."""
    later = _current.get()
    if (
        later is None
        or any_autocast()
        or not (input.requires_grad and _real_matrix(other) and _is_deferrable(other))
    ):
        return matmul(input, other)
    return _record_output_grad(torch.matmul(input, other.detach()), input, other, None, True, later)


def _real_matrix(t: Tensor) -> bool:
    return t.ndim == 2 and not t.is_complex()


def _record_output_grad(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    across: bool,
    later: DeferredWeightGrads,
) -> Tensor:
    """Return ``out``, and record its gradient for the gradients of weight and bias."""
    product = computed_by(out)
    if product is not None:
        grads: list[Sequence[Tensor]] = []
        product.register_prehook(grads.append)  # list.append runs no Python code
        later.put(
            partial(_accumulate_recorded, grads, x.detach(), x._version, across, weight, bias)
        )
    return out


def _accumulate_recorded(
    grads: list[Sequence[Tensor]], x: Tensor, version: int, *more: Any
) -> None:
    for (grad,) in grads:
        if x._version != version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: the input {list(x.shape)} of a linear "
                f"layer is at version {x._version}, expected version {version}; write out of "
                f"place (x + y instead of x += y), or clone it before"
            )
        if grad is not None:
            _accumulate_products(x, grad.detach(), *more)


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` as a matrix."""
    if x.ndim == 2:
        return x
    return x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)


def _factors(x: Tensor, grad: Tensor, across: bool) -> tuple[Tensor, Tensor]:
    """Return two matrices whose product is the gradient of the weight."""
    x, grad = _rows(x), _rows(grad)
    return (x.t(), grad) if across else (grad.t(), x)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, across: bool, later: DeferredWeightGrads
) -> Tensor:
    """Apply `_Product` to an input with any number of dims before its last."""
    out: Tensor = _Product.apply(_rows(x), weight, bias, across, later)  # type: ignore[no-untyped-call]
    return out if x.ndim == 2 else out.view(*x.shape[:-1], out.shape[-1])


class _Product(torch.autograd.Function):
    """A product ``x @ weight.t() + bias`` of matrices; ``across``: ``x @ weight``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        across: bool,
        later: DeferredWeightGrads,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.across, ctx.later, ctx.weight, ctx.bias = across, later, weight, bias
        ctx.first = not later.held
        with _without_autocast(x.device.type):
            there = weight.to(x.dtype)
            return F.linear(x, there.t() if across else there, _cast_like(bias, x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight), later, across, bias = (
            grads,
            ctx.saved_tensors,
            ctx.later,
            ctx.across,
            ctx.bias,
        )
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_x = of_weight = of_bias = None
        if wants_x:
            there = weight.to(grad.dtype)
            of_x = grad @ (there.t() if across else there)
        if wants_weight or wants_bias:
            held = _defers_weight_grads(ctx)
            put_off = [
                leaf if held and wanted and _is_deferrable(leaf) else None
                for leaf, wanted in ((ctx.weight, wants_weight), (bias, wants_bias))
            ]
            if any(leaf is not None for leaf in put_off):
                later.put(
                    partial(_accumulate_products, x.detach(), grad.detach(), across, *put_off)
                )
            if wants_weight and put_off[0] is None:
                of_weight = torch.mm(*_factors(x, grad, across)).to(weight.dtype)
            if wants_bias and put_off[1] is None:
                of_bias = grad.sum(0).to(bias.dtype)
        return of_x, of_weight, of_bias, None, None


def _accumulate_products(
    x: Tensor, grad: Tensor, across: bool, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Add the gradients of weight and bias to the leaves, as `_accumulate_grad` does.

    The product accumulates directly into the weight's gradient."""
    if weight is not None:
        a, b = _factors(x, grad, across)
        into = weight.grad
        if into is None or into.dtype is not a.dtype:
            _accumulate_grad(weight, a @ b)
        else:
            into.addmm_(a, b)
            call_after_accumulation(weight)
    if bias is not None:
        _accumulate_grad(bias, _rows(grad).sum(0))


# ------------------------------------------------------------------------------------- convolutions


def _convolution(plain: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def convolve(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        later = _deferral_for(weight)
        if later is None or isinstance(padding, str) or input.ndim != dims + 2:
            return plain(input, weight, bias, stride, padding, dilation, groups)
        how = (*(_per_dim(n, dims) for n in (stride, padding, dilation)), False, [0] * dims, groups)
        return _Convolution.apply(_cast(input), weight, bias, how, later)  # type: ignore[no-any-return, no-untyped-call]

    convolve.__name__ = convolve.__qualname__ = plain.__name__
    convolve.__doc__ = f"torch.nn.functional.{plain.__name__}."
    return convolve


def _per_dim(n: int | Sequence[int], dims: int) -> list[int]:
    numbers = [n] if isinstance(n, int) else list(n)
    return numbers * dims if len(numbers) == 1 else numbers


conv1d, conv2d, conv3d = (
    _convolution(F.conv1d, 1),
    _convolution(F.conv2d, 2),
    _convolution(F.conv3d, 3),
)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        how: tuple[Any, ...],
        later: DeferredWeightGrads,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.later, ctx.weight, ctx.bias = how, later, weight, bias
        ctx.first = not later.held
        with _without_autocast(x.device.type):
            return torch.convolution(x, weight.to(x.dtype), _cast_like(bias, x), *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight), later, bias = grads, ctx.saved_tensors, ctx.later, ctx.bias
        wanted = list(ctx.needs_input_grad[:3])
        held = _defers_weight_grads(ctx)
        put_off = [
            held and wants and _is_deferrable(leaf)
            for wants, leaf in zip(wanted[1:], (ctx.weight, bias), strict=True)
        ]
        if any(put_off):
            later.put(
                _deferred_convolution_grads(
                    x,
                    grad,
                    ctx.how,
                    ctx.weight if put_off[0] else None,
                    bias if put_off[1] else None,
                    weight.shape,
                )
            )
        now = [wanted[0], wanted[1] and not put_off[0], wanted[2] and not put_off[1]]
        computed_grads = (
            _convolution_grads(grad, x, weight, ctx.how, now) if any(now) else (None, None, None)
        )
        like = (x, weight, bias)
        return (
            *(
                g.to(t.dtype) if wants else None
                for g, t, wants in zip(computed_grads, like, now, strict=True)
            ),
            None,
            None,
        )


def _convolution_grads(
    grad: Tensor, x: Tensor, weight: Tensor, how: tuple[Any, ...], mask: list[bool]
) -> tuple[Any, ...]:
    stride, padding, dilation, transposed, more, groups = how
    bias = [weight.shape[0]] if mask[2] else None
    weight = weight.to(grad.dtype)
    grads: tuple[Any, ...] = torch.ops.aten.convolution_backward(
        grad, x, weight, bias, stride, padding, dilation, transposed, more, groups, mask
    )
    return grads


def _deferred_convolution_grads(
    x: Tensor,
    grad: Tensor,
    how: tuple[Any, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    shape: Sequence[int],
) -> Callable[[], None]:
    x, grad = x.detach(), grad.detach()

    def work() -> None:
        # Only shape and dtype of the weight matter here.
        stand_in = grad.new_empty(1).expand(shape) if weight is None else weight.detach()
        grads = _convolution_grads(
            grad, x, stand_in, how, [False, weight is not None, bias is not None]
        )
        for leaf, g in ((weight, grads[1]), (bias, grads[2])):
            if leaf is not None:
                _accumulate_grad(leaf, g)

    return work


#: Deferring functions by the torch function that they replace.
DEFERRED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    operator.matmul: matmul,
    F.conv1d: conv1d,
    F.conv2d: conv2d,
    F.conv3d: conv3d,
}
#: Lighter functions by the deferring one, for programs that run uncompiled.
LIGHTER: dict[Callable[..., Any], Callable[..., Any]] = {
    linear: lighter_linear,
    matmul: lighter_matmul,
}
