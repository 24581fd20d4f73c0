"""Copies of global tensors: ``copy.copy`` and ``copy.deepcopy``.

As in torch, a copy has the attributes that users set on the tensor. Tensors that share memory, and
are copied by one ``deepcopy``, have copies that share memory.
"""

from __future__ import annotations

import copy as copying
from typing import Any

import torch

from .._base import torch_private
from .._base.hidden_attributes import HIDDEN_ATTRIBUTES
from .global_tensor import ORDINARY, AliasGroup, GlobalTensor
from .grad import place_grad
from .history import identify_copy
from .serialization import remade
from .strides import copy_noted_strides
from .view_tracking import RemoteView, alias_of, link_alias

__all__ = ["deepcopy", "shallow_copy"]

_FIELDS = frozenset(GlobalTensor.__annotations__) | HIDDEN_ATTRIBUTES.keys()


def _user_attributes(x: GlobalTensor) -> dict[str, Any]:
    """Return the attributes that users have set on a tensor."""
    return {name: value for name, value in x.__dict__.items() if name not in _FIELDS}


def _wrap_copy(x: GlobalTensor, local: torch.Tensor) -> GlobalTensor:
    is_parameter = getattr(x, "_is_param", False)
    return remade(local, x._spec, x.requires_grad, is_parameter, x._reduce_dtype)


def shallow_copy(self: GlobalTensor) -> GlobalTensor:
    """Return a leaf that shares the memory of a tensor: ``copy.copy``."""
    if isinstance(self, RemoteView) and not self.requires_grad:
        out = alias_of(self, detached=True)
    else:
        out = _wrap_copy(self, self._local.detach())
        out._serial = self._serial
        if type(self) in ORDINARY:
            link_alias(self, out, viewed=False)
            copy_noted_strides(self, out)
    out.__dict__.update(_user_attributes(self))
    return out


def deepcopy(self: GlobalTensor, memo: dict[int, Any]) -> GlobalTensor:
    """Return a copy with memory of its own: ``copy.deepcopy``.

    Raises RuntimeError for a tensor that is no leaf.
    """
    if id(self) in memo:
        return memo[id(self)]  # type: ignore[no-any-return]
    if not self._local.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment"
        )
    if isinstance(self, RemoteView) and not self.requires_grad:
        out = _copy_remote_view(self, memo)
    elif type(self) in ORDINARY:
        out = _wrap_copy(self, _copy_local(self, memo))
        _link_copy(self._memory, out, memo)
        copy_noted_strides(self, out)
    else:
        out = _wrap_copy(self, self._local.detach().clone())
    memo[id(self)] = identify_copy(out, self)
    # torch copies the gradient of a tensor, but none of a parameter
    grad = None if getattr(self, "_is_param", False) else self.grad
    if grad is not None:
        copied: Any = copying.deepcopy(grad, memo)
        if torch_private.recording.on:  # the recorder sees it
            out.grad = copied
        else:  # one rank may copy alone
            place_grad(out, copied)
    out.__dict__.update(copying.deepcopy(_user_attributes(self), memo))
    return out


def _copy_local(x: GlobalTensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a copy of the local tensor, in the copy of its storage if others may share that."""
    local = x._local.detach()
    if local.is_meta or torch_private.is_fake(local):
        return local.clone()
    size = local.numel() * local.element_size()
    # A gradient may be a slice of a bucket, which is not copied as a whole.
    if x._memory is None and local.untyped_storage().nbytes() != size:
        return local.clone()
    return copying.deepcopy(local, memo)


def _link_copy(memory: AliasGroup | None, out: GlobalTensor, memo: dict[int, Any]) -> None:
    """Make the copies of aliases aliases of each other, from the second copy on."""
    if memory is None:
        return
    first = memo.setdefault(id(memory), out)
    if first is not out:
        link_alias(first, out, viewed=memory.viewed)


def _copy_remote_view(view: RemoteView, memo: dict[int, Any]) -> GlobalTensor:
    """Return the view of a copy of its base, which a base in the same ``deepcopy`` shares."""
    local = view._local.detach().clone()
    source, taken, index, _ = view.__dict__["_origin"]
    base = copying.deepcopy(source.detach(), memo)
    return RemoteView.of(local, view._spec, base, taken, index)
