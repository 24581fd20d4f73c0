"""Hooks on gradients: of tensors, of leaves whose gradient is complete, torch's full backward hooks
of modules. And what checkpoints keep.

Autograd works on the local parts. A hook sees global tensors: the gradient of a tensor lies as the
dual of its sbp says, so that its values read as on one device. Whoever hooks in looks at gradients
on their way, so none may be owed anything (_ops/rules/deferred_mean.py) meanwhile:
_tensor/gradients/watchers.py.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from .._base import torch_private
from ..boxing import box
from ..distributed.world import world
from ..errors import SbpError
from ..sharding.spec import Spec
from .global_tensor import GlobalTensor
from .gradients.reducer import observe_gradients, reducer
from .gradients.watchers import Watcher
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


def _given_back(grad: Any, dual: Spec | None) -> Any:
    """What a hook returned in place of a gradient -> this rank's part of it."""
    if grad is None or dual is None:
        return grad
    if not isinstance(grad, GlobalTensor):
        raise SbpError("a hook on a global tensor must return a global tensor or None")
    return box(grad._local, grad._spec, dual.replace(dtype=grad.dtype), why="gradient from a hook")


def register_hook(self: GlobalTensor, hook: Callable[[GlobalTensor], Any]) -> Any:
    """``hook(grad)`` when the gradient of this tensor is computed; ``grad`` is global, in the dual
    of the tensor's sbp. It may return another. Collective: every rank registers the same hooks in
    the same order. Returns a handle with ``remove()``. Raises SbpError where a hook returns a local
    tensor."""
    _record("register_hook", self)
    watcher = Watcher(reducer().watchers)
    return _Handle(self._local.register_hook(_Hook(self, hook, watcher)), watcher)  # type: ignore[no-untyped-call]


def _record(what: str, x: GlobalTensor) -> None:
    """Note that this rank looks at gradients on their way, which changes how all ranks sum them."""
    world().history((x._spec.shown.placement,)).record(what.encode() + x._spec.text)


class _Hook:
    """A user's hook, as autograd calls it. It holds its watcher."""

    __slots__ = ("_hook", "_owner", "_spec", "_watcher")

    def __init__(
        self, hooked: GlobalTensor, hook: Callable[[GlobalTensor], Any], watcher: Watcher
    ) -> None:
        self._hook, self._spec, self._watcher = hook, hooked._spec, watcher
        self._owner = weakref.ref(hooked) if hooked._local.is_leaf else None

    def __call__(self, local: Any) -> Any:
        leaf = (
            self._owner() if self._owner is not None else None
        )  # a leaf may have been given other data since
        dual = (self._spec if leaf is None else leaf._spec).dual()
        return _given_back(self._hook(GlobalTensor.wrap(local, dual)), dual)


class _Handle(RemovableHandle):
    """Torch's handle of a hook: once removed, the hook watches no longer."""

    def __init__(self, handle: RemovableHandle, watcher: Watcher) -> None:
        self.__dict__.update(handle.__dict__)
        self._end = watcher.end

    def remove(self) -> None:
        super().remove()
        self._end()


def register_post_accumulate_grad_hook(
    self: GlobalTensor, hook: Callable[[GlobalTensor], None]
) -> Any:
    """``hook(tensor)`` once ``tensor.grad`` holds the whole gradient, summed over the ranks: under
    ``no_sync()`` that is not before the pass that sums. Returns a handle with ``remove()``."""
    if not self._local.is_leaf:
        raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    hooks = self.__dict__.setdefault(
        "_accumulated", OrderedDict()
    )  # torch's handles refer to it weakly
    if "_watched" not in self.__dict__:
        self.__dict__["_watched"] = True
        _arm(self)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _arm(leaf: GlobalTensor) -> None:
    """Call the hooks of a leaf when its gradient is there: where other ranks add to it the reducer
    does, else torch."""
    owner = weakref.ref(leaf)

    def run(local: Any) -> None:
        x = owner()
        if x is not None and x._leaf is None and x._local is local:
            for hook in list(x.__dict__["_accumulated"].values()):
                hook(x)

    leaf._local.register_post_accumulate_grad_hook(run)


def carry(leaf: GlobalTensor, old: Any) -> None:
    """A leaf has a new local tensor: the hooks of the old one go with it."""
    if "_watched" in leaf.__dict__:
        _arm(leaf)
    if old._backward_hooks:
        leaf._local._backward_hooks = old._backward_hooks


def adopt(leaf: GlobalTensor, hooks: Mapping[int, Callable[[Any], Any]], accumulated: bool) -> None:
    """Run, on a leaf that has just become global, the hooks that it had as a plain tensor; they see
    global gradients.

    ``hooks`` holds those whose handles are not removed. ``accumulated``: the leaf has hooks that
    wait for the whole gradient, too.
    """
    if accumulated:
        leaf.__dict__["_watched"] = True
        _arm(leaf)
    if not hooks:
        return
    owner, spec, watcher = weakref.ref(leaf), leaf._spec, Watcher(reducer().watchers)

    def run(local: Any) -> Any:
        if not hooks:  # all have been removed
            watcher.end()
            return local
        found = owner()
        dual = (spec if found is None else found._spec).dual()
        grad = GlobalTensor.wrap(local, dual)
        for hook in list(hooks.values()):
            given = hook(grad)
            if given is not None:
                grad = GlobalTensor.wrap(_given_back(given, dual), dual)
        return grad._local

    leaf._local.register_hook(run)  # type: ignore[no-untyped-call]


def retain_grad(self: GlobalTensor) -> None:
    """Keep the gradient of a tensor that is no leaf: ``.grad`` shows it in the tensor's own sbp."""
    self._local.retain_grad()
    if not self._local.is_leaf:
        _record("retain_grad", self)
        observe_gradients(self._local)


def grad_fn(self: GlobalTensor) -> Any:
    """The node of autograd's graph that made this rank's part. Its hooks see parts, except where it
    belongs to a module's full backward hook."""
    found = self._local.grad_fn
    if found is None:
        return None  # a module asks each tensor that becomes its parameter
    _record("grad_fn", self)
    reducer().watchers.of_graph(found)
    node = self.__dict__.get("_node")
    return node if node is not None and node.node is found else found


# ------------------------------------------------------------------- full backward hooks of modules


class _Node:
    """The node of the identity that torch puts around a hooked module, as torch's hooks use it:
    what they are given, and give back, is global."""

    __slots__ = ("duals", "node")

    def __init__(self, node: Any, duals: Sequence[Spec | None]) -> None:
        self.node, self.duals = node, duals

    def name(self) -> str:
        return str(self.node.name())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        duals = (
            self.duals
        )  # not ``self``, whose node would hold itself by its hook: no collector sees that

        def run(inputs: Any, outputs: Any) -> Any:
            given = hook(_global(inputs, duals), _global(outputs, duals))
            return (
                None
                if given is None
                else tuple(_given_back(g, d) for g, d in zip(given, duals, strict=True))
            )

        return self.node.register_hook(run)


def _global(grads: Sequence[Any], duals: Sequence[Spec | None]) -> tuple[Any, ...]:
    pairs = zip(grads, duals, strict=True)
    return tuple(
        g if g is None or d is None else GlobalTensor.wrap(g, d.replace(dtype=g.dtype))
        for g, d in pairs
    )


def _around_module(identity: Callable[..., Any], *tensors: Any) -> Any:
    """The identity through which torch sees the gradients of a module's inputs or outputs: on the
    local parts, with nodes whose hooks see global tensors."""
    if not any(isinstance(t, GlobalTensor) for t in tensors):
        return identity(*tensors)
    parts = identity(*[t._local if isinstance(t, GlobalTensor) else t for t in tensors])
    computed = next((part for part in parts if part.grad_fn is not None), None)  # all by one node
    if computed is not None:
        observe_gradients(computed)
    duals = [t._spec.dual() if isinstance(t, GlobalTensor) else None for t in tensors]
    outs = []
    for t, part in zip(tensors, parts, strict=True):
        if isinstance(t, GlobalTensor):
            out = GlobalTensor.wrap(part, t._spec)
            out._pinned = t._pinned
            link_alias(t, out)
            if part.grad_fn is not None:
                out.__dict__["_node"] = _Node(part.grad_fn, duals)
            outs.append(out)
        else:
            outs.append(part)
    return tuple(outs)


# ---------------------------------------------------------------------------- inputs of checkpoints

Note = list[tuple[Spec, Callable[[], Any]] | None]


def _taken(inputs: Sequence[Any]) -> tuple[list[Any], Note]:
    """The inputs of a checkpoint, the parts of global ones in their place, and what these were."""
    note: Note = [
        (t._spec, weakref.ref(t)) if isinstance(t, GlobalTensor) else None for t in inputs
    ]
    return [t._local if isinstance(t, GlobalTensor) else t for t in inputs], note


def _given(parts: Sequence[Any], note: Note) -> list[Any]:
    """The inputs again. One that is still there is itself: a parameter stays a parameter."""
    inputs = []
    for part, was in zip(parts, note, strict=True):
        known = was[1]() if was is not None else None
        inputs.append(
            part
            if was is None
            else known
            if known is not None and known._local is part
            else GlobalTensor.wrap(part, was[0])
        )
    return inputs


def install() -> None:
    torch_private.wrap_module_identity(_around_module)
    torch_private.wrap_checkpoint_inputs(_taken, _given)
