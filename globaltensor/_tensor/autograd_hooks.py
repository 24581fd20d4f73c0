"""Hooks on gradients of tensors and leaves, and torch's full backward hooks of modules.

The methods of `GlobalTensor` call these functions. The inputs that checkpoints save are handled
here too.

Autograd works on the local tensors. A hook sees global tensors: the gradient of a tensor has the
dual of the tensor's sbp, so that its values are those of one device. A hook sees gradients before
they are complete. So no factor may be pending on them (_ops/rules/deferred_mean.py) at that time:
see _tensor/gradients/watchers.py.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._base import torch_private
from ..boxing import box
from ..errors import SbpError, ShapeError
from ..sharding.spec import Spec
from .global_tensor import GlobalTensor
from .gradients.reducer import call_accumulated_hooks, observe_gradients, reducer
from .gradients.watchers import Watcher
from .history import GRADIENT, record
from .pending_tensor import local_of
from .plain_operands import replicated_grad
from .view_tracking import link_alias

__all__ = [
    "adopt",
    "carry",
    "grad_fn",
    "install",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
]


def _unwrap_hook_result(grad: Any, dual: Spec | None) -> Any:
    """Return this rank's local tensor of what a hook returned in place of a gradient."""
    if grad is None or dual is None:
        return grad
    if not isinstance(grad, torch.Tensor):
        raise SbpError(
            f"a hook on a global tensor must return a tensor or None, not {type(grad).__name__}"
        )
    if grad.shape != dual.shape:
        raise ShapeError(
            f"a hook on a tensor of shape {list(dual.shape)} returned a gradient of shape "
            f"{list(grad.shape)}: return one of the tensor's shape, or None"
            + ". A plain tensor counts as the full gradient, the same on every rank"
            * (not isinstance(grad, GlobalTensor))
        )
    if not isinstance(grad, GlobalTensor):
        grad = replicated_grad(grad, dual.placement, "the gradient that a hook returned")
    record("gradient from a hook", grad)
    grad = grad._materialize()
    return box(grad._local, grad._spec, dual.replace(dtype=grad.dtype), why="gradient from a hook")


def register_hook(self: GlobalTensor, hook: Callable[[GlobalTensor], Any]) -> Any:
    """Call ``hook(grad)`` when the gradient of this tensor is computed.

    ``grad`` is global, in the dual of the tensor's sbp. The hook may return another gradient.
    Collective: every rank registers the same hooks in the same order. Returns a handle with
    ``remove()``. A plain tensor that a hook returns counts as the same on every rank. Raises
    SbpError where a hook returns no tensor, ShapeError where it returns a gradient of another
    shape, and DivergenceError where the ranks return plain tensors that differ.
    """
    # This rank observes gradients early, which changes how all ranks sum them.
    record("register_hook", self)
    watcher = Watcher(reducer().watchers)
    return _Handle(self._local.register_hook(_Hook(self, hook, watcher)), watcher)  # type: ignore[no-untyped-call]


class _Hook:
    """A user's hook, as autograd calls it. It holds its watcher."""

    __slots__ = ("_hook", "_owner", "_serial", "_spec", "_watcher")

    def __init__(
        self, hooked: GlobalTensor, hook: Callable[[GlobalTensor], Any], watcher: Watcher
    ) -> None:
        self._hook, self._spec, self._watcher = hook, hooked._spec, watcher
        self._serial = hash((hooked._serial, GRADIENT))
        self._owner = weakref.ref(hooked) if hooked._local.is_leaf else None

    def __call__(self, local: Any) -> Any:
        # A leaf may have got other data since.
        leaf = self._owner() if self._owner is not None else None
        dual = (self._spec if leaf is None else leaf._spec).dual()
        return _unwrap_hook_result(self._hook(GlobalTensor.wrap(local, dual, self._serial)), dual)


class _Handle(RemovableHandle):
    """A handle of a torch hook that also ends the hook's watcher when it is removed."""

    def __init__(self, handle: RemovableHandle, watcher: Watcher) -> None:
        self.__dict__.update(handle.__dict__)
        self._end = watcher.end

    def remove(self) -> None:
        super().remove()
        self._end()


def register_post_accumulate_grad_hook(
    self: GlobalTensor, hook: Callable[[GlobalTensor], None]
) -> Any:
    """Call ``hook(tensor)`` once ``tensor.grad`` holds the sum over all ranks.

    Under ``no_sync()`` that is only after the pass that sums. Returns a handle with ``remove()``.
    Raises RuntimeError where the tensor is no leaf. The pass raises GlobalTensorError where a hook
    returns a value.
    """
    if not self._local.is_leaf:
        raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    # torch's handles refer to it weakly.
    hooks = self.__dict__.setdefault("_accumulated", OrderedDict())
    if "_watched" not in self.__dict__:
        self.__dict__["_watched"] = True
        _arm_leaf_hooks(self)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _arm_leaf_hooks(leaf: GlobalTensor) -> None:
    """Call the hooks of a leaf when its gradient has arrived.

    Where other ranks add to the gradient, the reducer calls the hooks. Elsewhere torch does.
    """
    owner = weakref.ref(leaf)

    def run(local: Any) -> None:
        x = owner()
        if x is not None and x._leaf is None and x._local is local:
            call_accumulated_hooks(x, x.__dict__["_accumulated"])

    leaf._local.register_post_accumulate_grad_hook(run)


def carry(leaf: GlobalTensor, old: Any) -> None:
    """Move the hooks of a leaf's old local tensor ``old`` to its new one."""
    if "_watched" in leaf.__dict__:
        _arm_leaf_hooks(leaf)
    if old._backward_hooks:
        leaf._local._backward_hooks = old._backward_hooks


def adopt(leaf: GlobalTensor, hooks: Mapping[int, Callable[[Any], Any]], accumulated: bool) -> None:
    """Run the hooks that a leaf had as a plain tensor, now that it is global.

    These hooks see global gradients. ``hooks`` holds those whose handles are not removed.
    ``accumulated``: the leaf also has hooks that wait for the complete gradient.
    """
    if accumulated:
        leaf.__dict__["_watched"] = True
        _arm_leaf_hooks(leaf)
    if not hooks:
        return
    owner, spec, watcher = weakref.ref(leaf), leaf._spec, Watcher(reducer().watchers)
    serial = hash((leaf._serial, GRADIENT))

    def run(local: Any) -> Any:
        if not hooks:  # all have been removed
            watcher.end()
            return local
        found = owner()
        dual = (spec if found is None else found._spec).dual()
        grad = GlobalTensor.wrap(local, dual, serial)
        for hook in list(hooks.values()):
            given = hook(grad)
            if given is not None:
                grad = GlobalTensor.wrap(_unwrap_hook_result(given, dual), dual, given._serial)
        return grad._local

    leaf._local.register_hook(run)  # type: ignore[no-untyped-call]


def retain_grad(self: GlobalTensor) -> None:
    """Keep the gradient of a tensor that is no leaf: ``.grad`` has it in the tensor's own sbp."""
    self._local.retain_grad()
    if not self._local.is_leaf:
        record("retain_grad", self)
        observe_gradients(self._local)


def grad_fn(self: GlobalTensor) -> Any:
    """Return the autograd node that made this rank's local tensor, or None.

    Its hooks see local tensors, except where it belongs to a module's full backward hook.
    """
    local_grad_fn = self._local.grad_fn
    if local_grad_fn is None:
        # A module asks this of each tensor that becomes its parameter.
        return None
    record("reading grad_fn", self)
    reducer().watchers.of_graph(local_grad_fn)
    node = self.__dict__.get("_node")
    return node if node is not None and node.node is local_grad_fn else local_grad_fn


# ------------------------------------------------------------------- full backward hooks of modules


class _IdentityNode:
    """The node of the identity that torch puts around a hooked module.

    torch's hooks use it. The gradients that they get and return are global.
    """

    __slots__ = ("duals", "node", "serials")

    def __init__(
        self, node: Any, duals: Sequence[Spec | None], serials: Sequence[int | None]
    ) -> None:
        self.node, self.duals, self.serials = node, duals, serials

    def name(self) -> str:
        return str(self.node.name())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        # Not ``self``: its node would hold itself by its hook, and no garbage collector sees that.
        duals, serials = self.duals, self.serials

        def run(inputs: Any, outputs: Any) -> Any:
            given = hook(
                _wrap_gradients(inputs, duals, serials), _wrap_gradients(outputs, duals, serials)
            )
            return (
                None
                if given is None
                else tuple(_unwrap_hook_result(g, d) for g, d in zip(given, duals, strict=True))
            )

        return self.node.register_hook(run)


def _wrap_gradients(
    grads: Sequence[Any], duals: Sequence[Spec | None], serials: Sequence[int | None]
) -> tuple[Any, ...]:
    return tuple(
        g if g is None or d is None else GlobalTensor.wrap(g, d.replace(dtype=g.dtype), serial or 0)
        for g, d, serial in zip(grads, duals, serials, strict=True)
    )


def _around_module(identity: Callable[..., Any], *tensors: Any) -> Any:
    """Apply the identity through which torch sees the gradients of a module's inputs or outputs.

    It runs on the local tensors. The hooks of its nodes see global tensors.
    """
    if not any(isinstance(t, GlobalTensor) for t in tensors):
        return identity(*tensors)
    parts = identity(*map(local_of, tensors))
    # one node computes all of them
    computed = next((part for part in parts if part.grad_fn is not None), None)
    if computed is not None:
        observe_gradients(computed)
    duals = [t._spec.dual() if isinstance(t, GlobalTensor) else None for t in tensors]
    serials = [
        hash((t._serial, GRADIENT)) if isinstance(t, GlobalTensor) else None for t in tensors
    ]
    outs = []
    for t, part in zip(tensors, parts, strict=True):
        if isinstance(t, GlobalTensor):
            out = GlobalTensor.wrap(part, t._spec, t._serial)
            out._pinned = t._pinned
            link_alias(t, out)
            if part.grad_fn is not None:
                out.__dict__["_node"] = _IdentityNode(part.grad_fn, duals, serials)
            outs.append(out)
        else:
            outs.append(part)
    return tuple(outs)


# ---------------------------------------------------------------------------- inputs of checkpoints

Note = list[tuple[Spec, Callable[[], Any], int] | None]  # spec, reference, serial


def _unwrap_checkpoint_inputs(inputs: Sequence[Any]) -> tuple[list[Any], Note]:
    """Return a checkpoint's inputs, with local tensors for global ones, and a note of these."""
    note: Note = [
        (t._spec, weakref.ref(t), t._serial) if isinstance(t, GlobalTensor) else None
        for t in inputs
    ]
    return list(map(local_of, inputs)), note


def _rewrap_checkpoint_inputs(parts: Sequence[Any], note: Note) -> list[Any]:
    """Return the inputs again. A tensor that still exists is returned itself, parameters too."""
    inputs = []
    for part, was in zip(parts, note, strict=True):
        known = was[1]() if was is not None else None
        inputs.append(
            part
            if was is None
            else known
            if known is not None and local_of(known) is part
            else GlobalTensor.wrap(part, was[0], was[2])
        )
    return inputs


def install() -> None:
    torch_private.wrap_module_identity(_around_module)
    torch_private.wrap_checkpoint_inputs(_unwrap_checkpoint_inputs, _rewrap_checkpoint_inputs)
