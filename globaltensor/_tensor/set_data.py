"""Replace a tensor's data in place: ``.data =``, ``set_``; change ``requires_grad``.

`GlobalTensor` and the conversion of modules call these functions.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from .._base import torch_private
from .._base.overridable import visible
from ..boxing import box
from ..errors import GlobalTensorError, InplaceError, SbpError
from ..sharding.sbp import broadcast, partial_sum
from ..sharding.spec import Spec, fitting
from . import autograd_hooks, compiler_guard
from .global_tensor import GlobalTensor, SlottedGlobalTensor
from .grad import get_grad, set_grad
from .gradients import parameter_gather
from .gradients.leaf import attach, detach
from .history import detached_serial, record
from .plain_operands import operand_spec, promote_plain_tensor
from .strides import copy_noted_strides, forget_note
from .view_tracking import RemoteView, alias_of, link_alias

__all__ = [
    "assign_requires_grad",
    "become_global",
    "become_plain",
    "exchange",
    "laid_out_like",
    "replace_local",
    "set_",
    "set_data",
    "set_requires_grad",
]


def set_requires_grad(self: GlobalTensor, value: bool, maybe_alone: bool = False) -> None:
    """Set whether a tensor is a leaf that requires grad.

    A leaf with a partial maximum, minimum or norm is reduced first: the gradient of a local value
    is not that of the global one. ``maybe_alone``: other ranks may not be making the leaf (a file
    that is read, a copy).
    """
    if value and isinstance(self, RemoteView) and not self._local.requires_grad:
        self.keep_as_leaf()
    layout = [broadcast if e.is_partial and e is not partial_sum else e for e in self._spec.layout]
    if value and self._local.is_leaf and layout != list(self._spec.layout):
        whole = self._spec.replace(layout=layout)
        self._local, self._spec = (
            box(self._local.detach(), self._spec, whole, why="requires_grad", alias=False),
            whole,
        )
    self._local.requires_grad = value
    if not self._local.is_leaf:
        return
    if value:
        attach(self, maybe_alone)
    else:
        detach(self)


def assign_requires_grad(self: GlobalTensor, value: bool) -> None:
    """Set ``requires_grad``, and record the change: all ranks must make it."""
    # One rank alone may make a leaf of its own, a copy, which no other rank uses.
    shared = not value or "_is_param" in self.__dict__
    if shared and self._local.requires_grad != value:
        record(f"requires_grad_({value})", self)
    set_requires_grad(self, value)


def requires_grad_(self: GlobalTensor, requires_grad: bool = True) -> GlobalTensor:
    """Set ``requires_grad``.

    On a non-leaf, ``requires_grad_()`` is accepted and ``requires_grad = True`` raises, as in
    PyTorch.
    """
    if requires_grad and not self._local.is_leaf:
        self._local.requires_grad_()
    else:
        assign_requires_grad(self, requires_grad)
    return self


@functools.partial(visible, alone=lambda x: x.data)
def data(self: GlobalTensor) -> GlobalTensor:
    if isinstance(self, RemoteView):
        return alias_of(self, detached=True)
    # Autograd does not see writes into it.
    out = GlobalTensor.wrap(self._local.data, self._spec, detached_serial(self))
    link_alias(self, out, viewed=False)
    copy_noted_strides(self, out)
    return out


def laid_out_like(like: GlobalTensor, value: torch.Tensor) -> GlobalTensor:
    """Return a plain tensor with the layout of ``like``.

    The plain tensor counts as the global value, the same on every rank. A split of a dim that it
    does not have is dropped. Memory is shared with the plain tensor where ``like`` is broadcast.
    """
    shown = like._spec.shown
    whole = operand_spec(value, shown.placement, "a plain tensor laid out")
    spec = whole.replace(layout=fitting(shown.layout, value.dim()))
    return GlobalTensor.wrap(
        box(
            promote_plain_tensor(value, whole, "a plain tensor laid out"),
            whole,
            spec,
            why="a plain tensor laid out",
            alias=False,
        ),
        spec,
    )


def set_data(self: GlobalTensor, value: Any) -> None:
    """Set ``x.data = y``: this tensor gets y's value, placement and sbp.

    A leaf stays the same leaf to its optimizer and keeps its gradient, which then has y's layout
    and dtype. From a plain y this tensor gets the value alone. Raises SbpError where y is no
    tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise SbpError(
            f"the .data of a global tensor must be a tensor, not {type(value).__name__}: a plain "
            f"tensor counts as the full value, the same on every rank"
        )
    if not isinstance(value, GlobalTensor):
        value = laid_out_like(self, value.detach())
    value = value._materialize()
    if value._spec is not self._spec and value._spec.shown is self._spec.shown:
        value = GlobalTensor.wrap(
            box(value._local.detach(), value._spec, self._spec, why=".data", alias=False),
            self._spec,
        )
    # One rank alone may set what is there already, as module.to("cpu") does on a CPU.
    if not value._serial or value._serial not in (self._serial, detached_serial(self)):
        record("setting .data", self, value)
        parameter_gather.reset_prefetch(self._spec.placement)
        self._serial = value._serial
    if isinstance(self, RemoteView):
        self.detach_from_base()
    forget_note(self)
    copy_noted_strides(value, self)
    if value._local.dtype is self._local.dtype and value._spec is self._spec:
        self._local.data = value._local.detach()
        return
    grad = get_grad(self) if self._local.is_leaf and self._local.requires_grad else None
    replace_local(self, value._local.detach(), value._spec)
    if grad is not None and grad.shape == self.shape:
        set_grad(self, grad.to_global(placement=self.placement, sbp=self.sbp).to(self.dtype))


def replace_local(leaf: GlobalTensor, local: torch.Tensor, spec: Spec) -> None:
    """Give a tensor another local tensor and layout. A leaf stays a leaf, without gradient."""
    parameter_gather.relearn(leaf._spec.placement)
    kept, old = leaf.requires_grad, leaf._materialize()._local
    _refuse_older_graphs(old)
    leaf._local, leaf._spec, leaf._leaf = local, spec, None
    leaf.__dict__.pop("_kept_grad", None)
    if kept:
        set_requires_grad(leaf, True)
        autograd_hooks.carry(leaf, old)


# ----------------------------------------------------------------- the same object, global or plain

#: The attributes that make a tensor without slots a global one.
_FIELDS = (
    "_local",
    "_spec",
    "_memory",
    "_leaf",
    "_pinned",
    "_reduce_dtype",
    "_shard",
    "_grad_shard",
    "_kept_grad",
    "_spare_grad",
    "_is_param",
    "_strides",
)


def become_global(
    plain: torch.Tensor, value: GlobalTensor, grad: GlobalTensor | None = None
) -> None:
    """Turn a plain tensor into the global tensor ``value``, as the same object.

    A parameter stays one, with its hooks and with ``grad`` as its gradient. So optimizers, averages
    of weights and all other holders of a reference hold the tensor that is trained. A graph that
    was recorded before refuses to go backward: its gradient would reach no leaf.
    """
    trains, parameter = plain.requires_grad and plain.is_leaf, isinstance(plain, torch.nn.Parameter)
    _refuse_older_graphs(plain)
    before, after = plain._backward_hooks, plain._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    shell = torch_private.make_wrapper(
        GlobalTensor, value.shape, dtype=value.dtype, device=value._local.device
    )
    plain.__class__ = GlobalTensor  # type: ignore[assignment]
    torch_private.swap_impl(plain, shell)
    out: Any = plain
    out._local, out._spec, out._memory, out._pinned = (
        value._local.detach(),
        value._spec,
        None,
        not parameter,
    )
    out._serial = value._serial
    if parameter:
        out._is_param = True
    if trains:
        if after:
            out.__dict__["_accumulated"] = after
        set_requires_grad(out, True)
        autograd_hooks.adopt(out, before or {}, bool(after))
        if grad is not None:
            set_grad(out, grad)


def exchange(swap: Any, t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Run ``swap(t1, t2)``, torch.utils.swap_tensors, of two global tensors or two plain ones.

    It refuses tensors with weak references. The gradient of a leaf has one: it is made anew, to the
    tensor that the gradient belongs to afterwards. A graph that was recorded before refuses to go
    backward.
    """
    tensors = [t._materialize() for t in (t1, t2) if isinstance(t, GlobalTensor)]
    for t in tensors:
        _refuse_older_graphs(t._local)
        if t._leaf is not None:
            del t._leaf.owner
    slotted = {isinstance(t, SlottedGlobalTensor) for t in tensors}
    try:
        (_exchange_fields if len(slotted) > 1 else swap)(t1, t2)
    finally:
        for t in tensors:
            if t._leaf is not None:
                t._leaf.owner = weakref.ref(t)


def _exchange_fields(t1: Any, t2: Any) -> None:
    """Exchange all that two global parameters have, of which one has slots and the other none.

    torch refuses such a pair: a parameter that has become global, and one of an op's result.
    """
    for name, t in (("t1", t1), ("t2", t2)):
        if weakref.getweakrefs(t):
            raise RuntimeError(f"Cannot swap {name} because it has weakref associated with it")
    fields = [{name: getattr(t, name) for name in SlottedGlobalTensor.__slots__} for t in (t1, t2)]
    others = [{k: v for k, v in vars(t).items() if k not in fields[0]} for t in (t1, t2)]
    torch_private.swap_impl(t1, t2)
    for t, own_fields, own_others in zip((t2, t1), fields, others, strict=True):
        vars(t).clear()
        vars(t).update(own_others)
        for name, value in own_fields.items():
            setattr(t, name, value)


def become_plain(tensor: GlobalTensor, value: torch.Tensor) -> torch.Tensor:
    """Turn a global tensor into the plain tensor ``value``, as the same object.

    A parameter stays one. A tensor that an op or a constructor of this library has made cannot stay
    the same object: then return another one.
    """
    trains, parameter = tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)
    kind: Any = torch.nn.Parameter if parameter else torch.Tensor
    if type(tensor) is not GlobalTensor:
        return torch.nn.Parameter(value, trains) if parameter else value
    _refuse_older_graphs(tensor._local)
    parameter_gather.relearn(tensor._spec.placement)
    compiler_guard.forget()
    for name in _FIELDS:
        tensor.__dict__.pop(name, None)
    shell = value.detach().view_as(value)
    tensor.__class__ = kind
    torch_private.swap_impl(tensor, shell)
    return tensor.requires_grad_(trains)


def _refuse_older_graphs(leaf: torch.Tensor) -> None:
    """Raise an error in the backward pass of any graph that was recorded with this leaf."""
    if leaf.is_leaf and leaf.requires_grad:
        # The node lives as long as a graph that has it. Where there is none, it is freed with what
        # this line makes.
        torch.autograd.graph.get_gradient_edge(leaf).node.register_prehook(_refuse_to_go_back)


def _refuse_to_go_back(grads: Any) -> None:
    raise GlobalTensorError(
        "this backward pass reaches a parameter whose layout has been changed by to_global, "
        "parallelize or to_local, or that swap_tensors has exchanged, since the forward pass: run "
        "the forward pass again"
    )


def resize_(self: GlobalTensor, *shape: Any, **kwargs: Any) -> GlobalTensor:
    """Resize a tensor to the shape that it has. Raises InplaceError for another shape."""
    wanted = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if wanted != self.shape:
        raise InplaceError(
            f"resize_ of a global tensor from {list(self.shape)} to {list(wanted)}: it would use "
            f"one storage for another shape, but each rank has only the "
            "storage of its local tensor. Use x.reshape(...) if the number of elements stays the "
            "same, x.new_empty(...) otherwise"
        )
    return self


def set_(self: GlobalTensor, source: Any = None, *where: Any, **options: Any) -> GlobalTensor:
    """Set this tensor to ``source``, another tensor.

    Its own sbp and placement stay if its shape does. Memory is shared if both have the same layout.
    A storage belongs to one rank: raises InplaceError for it.
    """
    if not isinstance(source, torch.Tensor) or where or options:
        raise InplaceError(
            "set_ of a global tensor takes another tensor: a storage is the memory of one rank's "
            "local tensor. To change that memory, use x.to_local()"
        )
    if source.dtype is not self.dtype:
        raise RuntimeError(
            f"Could not set tensor of type {self.dtype} to a tensor of type {source.dtype}"
        )
    if self.is_leaf and self.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation (set_)"
        )
    value = (
        source.detach()
        if isinstance(source, GlobalTensor)
        else laid_out_like(self, source.detach())
    )
    if value.shape == self.shape and value._spec is not self._spec:
        value = GlobalTensor.wrap(
            box(value._local, value._spec, self._spec, why="set_", alias=False), self._spec
        )
    set_data(self, value)
    return self
