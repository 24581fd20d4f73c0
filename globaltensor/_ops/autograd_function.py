"""Custom torch.autograd.Functions on global tensors.

Autograd works on local tensors, but a Function is written for the global tensors. So its forward
and backward run on global tensors, as any other code does. One node in the local autograd graph
represents the Function. The gradients that arrive at this node have the dual layouts of the
outputs. The gradients that it returns have the dual layouts of the inputs. The package calls
`install` on import.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from .._base.overridable import shown
from .._base.patches import patch
from .._base.python_bodies import apply_plainly
from .._base.pytree import replaced, tensors_in
from .._base.refusals import refuse_transforms
from .._base.torch_private import function_mode_on, innermost_transform
from .._tensor.global_tensor import GlobalTensor
from .._tensor.gradients.reducer import reducer
from .._tensor.gradients.watchers import Watcher
from .._tensor.history import GRADIENT, record
from .._tensor.pending_tensor import PendingTensor, local_of
from .._tensor.plain_operands import operand_spec, promote_plain_tensor
from .._tensor.view_tracking import RemoteView, finish_inplace
from ..boxing import box
from ..distributed.world import running
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec

__all__ = ["install"]


class Context:
    """The ``ctx`` of a Function's forward and backward: torch's interface, over global tensors."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self._saved: tuple[Any, ...] = ()
        self._dirty: tuple[Any, ...] = ()
        self._without: tuple[Any, ...] = ()
        self._materialize = True
        # a weak reference, because the node holds this context
        self._node: Callable[[], Any] | None = None

    def save_for_backward(self, *tensors: Any) -> None:
        self._saved = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Accept tensors for forward-mode differentiation, which global tensors do not support."""

    def mark_dirty(self, *tensors: Any) -> None:
        self._dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._without = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._materialize = value

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors as they were saved, with the autograd graph they belong to."""
        if self._node is None:
            return self._saved
        node = self._node()
        if node is None:
            raise RuntimeError(
                "the autograd graph that a custom Function saved these tensors for has been freed"
            )
        kept = zip(self._saved, node.saved_tensors, strict=True)
        return tuple(
            local if known is None else GlobalTensor.wrap(local, *known) for known, local in kept
        )

    def _hand_over(self, node: Any) -> None:
        """Pass the saved tensors on to the local graph's node, which holds them from here on."""
        node.save_for_backward(*[local_of(t) for t in self._saved])
        node.mark_dirty(*[local_of(t) for t in self._dirty])
        node.mark_non_differentiable(*[local_of(t) for t in self._without])
        node.set_materialize_grads(self._materialize)
        # the spec and serial of each
        self._saved = tuple(
            (t._spec, t._serial) if isinstance(t, GlobalTensor) else None for t in self._saved
        )
        self._dirty = self._without = ()
        self._node = weakref.ref(node)


class _FunctionNode(torch.autograd.Function):
    """A node that represents a Function in the local autograd graph.

    It is made after the Function's forward."""

    @staticmethod
    def forward(
        node: Any,
        function: Any,
        context: Context,
        inputs: list[Any],
        outs: list[Any],
        *locals_: torch.Tensor,
    ) -> Any:
        node.function, node.context, node.watcher = function, context, Watcher(reducer().watchers)
        node.input_homes = [_grad_home(x) for x in inputs]
        context._hand_over(node)
        node.duals = [out._spec.dual() if isinstance(out, GlobalTensor) else None for out in outs]
        node.serials = [out._serial if isinstance(out, GlobalTensor) else 0 for out in outs]
        return tuple(local_of(out) for out in outs)

    @staticmethod
    def backward(node: Any, *grads: Any) -> Any:
        whole = [
            g
            if g is None or d is None
            else GlobalTensor.wrap(g, d.replace(dtype=g.dtype), hash((serial, GRADIENT)))
            for g, d, serial in zip(grads, node.duals, node.serials, strict=True)
        ]
        input_grads = node.function.backward(node.context, *whole)
        input_grads = list(input_grads) if isinstance(input_grads, tuple) else [input_grads]
        n = len(node.input_homes)
        if len(input_grads) < n or any(extra is not None for extra in input_grads[n:]):
            raise RuntimeError(
                f"function {node.function.__name__} returned an incorrect number of gradients "
                f"(expected {n}, got {len(input_grads)})"
            )
        parts = [
            _grad_to_home(grad, home, i, node.function.__name__)
            for i, (grad, home) in enumerate(zip(input_grads, node.input_homes, strict=False))
        ]
        return (
            None,
            None,
            None,
            None,
            *[part for part, home in zip(parts, node.input_homes, strict=True) if home is not None],
        )


def _grad_home(x: Any) -> Spec | torch.Size | None:
    """Return the destination of an argument's gradient.

    It is the dual spec of a global tensor, the shape of a plain tensor, and None for anything
    else."""
    return (
        x._spec.dual()
        if isinstance(x, GlobalTensor)
        else x.shape
        if isinstance(x, torch.Tensor)
        else None
    )


def _grad_to_home(grad: Any, home: Spec | torch.Size | None, i: int, name: str) -> Any:
    """Return the gradient of argument ``i`` of the Function ``name`` in its destination's layout.

    Raises torch's error if its shape does not fit."""
    if grad is None or home is None:
        return None
    shape = home.shape if isinstance(home, Spec) else home
    if grad.shape != shape:
        try:
            grad = grad.sum_to_size(shape)
        except RuntimeError:
            raise RuntimeError(
                f"Function {name}Backward returned an invalid gradient at index {i} - got "
                f"{list(grad.shape)} but expected shape compatible with {list(shape)}"
            ) from None
    if not isinstance(home, Spec):
        return (
            local_of(grad.to_global(sbp=[broadcast] * grad._spec.placement.axes))
            if isinstance(grad, GlobalTensor)
            else grad
        )
    if isinstance(grad, GlobalTensor):
        record("gradient from a custom Function", grad)
        return box(
            local_of(grad),
            grad._spec,
            home.replace(dtype=grad.dtype),
            why="gradient from a custom Function",
        )
    whole = Spec.make(grad.shape, grad.dtype, home.placement, [broadcast] * home.placement.axes)
    return box(
        promote_plain_tensor(grad, whole, f"the gradient of argument {i} that {name} returned"),
        whole,
        home.replace(dtype=grad.dtype),
        why="gradient from a custom Function",
    )


def _apply_on_global_args(function: Any, args: Sequence[Any]) -> Any:
    """Run ``function.apply(*args)`` where some of ``args`` are global, or its forward makes some.

    Without a global argument the plain ones stay plain, and so do their gradients."""
    refuse_transforms()
    placement = next((a._spec.placement for a in args if isinstance(a, GlobalTensor)), None)
    grad = torch.is_grad_enabled()
    needs = tuple(isinstance(a, torch.Tensor) and grad and a.requires_grad for a in args)
    args = [
        _promoted(a, placement)
        if need and placement is not None and not isinstance(a, GlobalTensor)
        else a
        for a, need in zip(args, needs, strict=True)
    ]
    for a in args:
        if isinstance(a, PendingTensor):
            a._materialize()
    context = Context(needs)
    with torch.no_grad():
        if function.setup_context is torch.autograd.Function.setup_context:
            result = function.forward(context, *args)
        else:
            result = function.forward(*args)
            function.setup_context(context, tuple(args), result)
    outs = list(result) if isinstance(result, tuple) else [result]
    at = [i for i, out in enumerate(outs) if isinstance(out, torch.Tensor)]
    dirty = context._dirty
    if not any(needs) or not at:
        for i in at:
            if any(outs[i] is a for a in args) and not any(outs[i] is d for d in dirty):
                outs[i] = outs[i].detach()  # as in torch, an alias of the argument
        return tuple(outs) if isinstance(result, tuple) else outs[0] if at else result
    parts = _FunctionNode.apply(
        function,
        context,
        list(args),
        [outs[i] for i in at],
        *[local_of(a) for a in args if isinstance(a, torch.Tensor)],
    )
    for i, part in zip(at, parts, strict=True):
        out = outs[i]
        if isinstance(out, GlobalTensor) and any(out is d for d in dirty):
            out._local = part
            if isinstance(out, RemoteView):  # its base has the gradient of the Function, too
                finish_inplace(out)
        else:
            outs[i] = (
                GlobalTensor.wrap(part, out._spec, out._serial)
                if isinstance(out, GlobalTensor)
                else part
            )
    return tuple(outs) if isinstance(result, tuple) else outs[0]


def _promoted(x: torch.Tensor, placement: Any) -> GlobalTensor:
    """Promote a plain tensor whose gradient is wanted to a broadcast global tensor."""
    spec = operand_spec(x, placement, "argument of a custom Function")
    return GlobalTensor.wrap(promote_plain_tensor(x, spec, "argument of a custom Function"), spec)


def applied(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``function.apply``, in the form that a graph recorder sees."""
    return function.apply(*args, **kwargs)


def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``function.apply``, whether or not a graph recorder is active."""
    if any(isinstance(a, GlobalTensor) for a in (*args, *kwargs.values())):
        return (
            _apply_on_global_args(function, args)
            if not kwargs
            else _apply_on_global_args(function, _positional_args(function, args, kwargs))
        )
    return apply_plainly(_ORIGINAL, function, args, kwargs)


class LocalFunction:
    """A ``function.apply`` on arguments some of which are global, as a function of local tensors.

    A captured program saves this object. Forward, backward and the tensors that they save belong to
    one run each."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = tensors_in(kwargs, tensors_in(args, []))
        self.function, self.specs = (
            function,
            [t._spec if isinstance(t, GlobalTensor) else None for t in inputs],
        )
        self.args, self.kwargs = replaced((args, kwargs), iter([_EMPTY] * len(inputs)))
        # The result: a pytree with a placeholder for each tensor. `outs` has for each tensor its
        # spec, or the index of the argument that it is.
        self.result: Any = None
        self.outs: list[Spec | int | None] = []
        # indices of arguments that have other local tensors afterwards
        self.written: list[int] = []

    def __call__(self, *parts: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return (local tensors of the result, local tensors of the written arguments)."""
        inputs = [
            part if spec is None else GlobalTensor.wrap(part, spec)
            for part, spec in zip(parts, self.specs, strict=True)
        ]
        args, kwargs = replaced((self.args, self.kwargs), iter(inputs))
        result = self.function.apply(*args, **kwargs)
        result_tensors = tensors_in(result, [])
        self.result = replaced(result, iter([_EMPTY] * len(result_tensors)))
        self.outs = [
            next(
                (i for i, g in enumerate(inputs) if g is t),
                t._spec if isinstance(t, GlobalTensor) else None,
            )
            for t in result_tensors
        ]
        self.written = [
            i
            for i, (g, part) in enumerate(zip(inputs, parts, strict=True))
            if local_of(g) is not part
        ]
        return [local_of(t) for t in result_tensors], [local_of(inputs[i]) for i in self.written]


_EMPTY = torch.empty(0)
# Since torch 2.14 `apply` is not a Python method: the descriptor itself is called with the class.
_ORIGINAL = getattr(
    torch.autograd.Function.apply, "__func__", vars(torch.autograd.Function)["apply"]
)


def install() -> None:
    """Make ``apply`` of every torch.autograd.Function accept global tensors."""
    original = _ORIGINAL

    @functools.wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if function_mode_on():
            return shown(applied, cls, args, kwargs)
        for a in args:
            if isinstance(a, GlobalTensor):
                return (
                    _apply_on_global_args(cls, args)
                    if not kwargs
                    else _apply_on_global_args(cls, _positional_args(cls, args, kwargs))
                )
        if kwargs and any(isinstance(a, GlobalTensor) for a in kwargs.values()):
            return _apply_on_global_args(cls, _positional_args(cls, args, kwargs))
        # The arguments of a checkpoint may be plain where its module is global.
        if cls is CheckpointFunction and running() is not None and innermost_transform() is None:
            return _apply_on_global_args(cls, args)
        return apply_plainly(original, cls, args, kwargs)

    patch("torch.autograd:Function.apply", lambda before: classmethod(apply))


def _positional_args(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    first = () if cls.setup_context is not torch.autograd.Function.setup_context else (None,)  # ctx
    bound = inspect.signature(cls.forward).bind(*first, *args, **kwargs)
    bound.apply_defaults()
    return bound.args[len(first) :]
