"""Torch's private names about tensors and their memory."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

from ..patches import patch

__all__ = [
    "READING_A_NUMBER",
    "TAKING_MEMORY",
    "StorageWeakRef",
    "copy_all",
    "guard_data",
    "guard_swap",
    "is_functional",
    "is_zero_tensor",
    "make_wrapper",
    "may_take_data",
    "memory_users",
    "parts_of",
    "share_storage",
    "shares_memory",
    "storage_key",
    "swap_impl",
    "wrap_dlpack",
]

#: An instance of a tensor subclass with shape, dtype and device but no storage: nothing below the
#: function level can read wrong values from it (1 us).
make_wrapper = torch.Tensor._make_wrapper_subclass

#: The kernel by which torch reads a number out of a tensor that stands in a number's place among a
#: function's arguments: ``torch.arange(lengths.max())``.
READING_A_NUMBER = torch.ops.aten._local_scalar_dense.default

#: The kernel of ``tensor.set_(source)``: only ``tensor``, not ``source``, can override that.
TAKING_MEMORY = torch.ops.aten.set_.source_Tensor

#: Copies a list of tensors into another one of the same shapes: one call instead of one for each.
copy_all = torch._foreach_copy_

#: (flat, tensors) -> views of a 1-D tensor, one of each tensor's shape. It is one call instead of
#: two for each tensor. torch's own reducers use it.
parts_of = torch._C._nn.unflatten_dense_tensors

#: True if two tensors have one storage: fake and meta tensors, which have no address, too.
shares_memory: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of

#: True if a tensor is autograd's own zero tensor without memory: it must be cloned before its
#: memory is accessed.
is_zero_tensor = torch.Tensor._is_zerotensor


def memory_users(t: torch.Tensor) -> int:
    """Return the number of tensors that share the memory of ``t``, itself included.

    torch counts them, and has no public function for it. The query's own reference is subtracted.
    Only tests call this function: nothing here decides by it.
    """
    return int(torch._C._storage_Use_Count(t.untyped_storage()._cdata)) - 1  # type: ignore[attr-defined]


#: A weak reference to a tensor's memory, which shows when the memory has been freed. torch uses it
#: to share memory between processes.
StorageWeakRef = reductions.StorageWeakRef


def storage_key(t: torch.Tensor) -> int:
    """Return the same key for all tensors that share one memory: `StorageWeakRef.cdata` of it.

    While such a reference lives, no other memory has that key.
    """
    return t.untyped_storage()._cdata


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors share one memory."""
    return storage_key(a) == storage_key(b)


#: Exchanges the C++ objects of two tensors. With an assignment to ``__class__`` a plain parameter
#: becomes a global one and stays the same object. The public torch.utils.swap_tensors does both.
#: But it refuses where anybody has a weak reference to either tensor, as optimizers, averages of
#: weights and recurrent layers do.
swap_impl = torch._C._swap_tensor_impl


def is_functional(t: torch.Tensor) -> bool:
    """Return True if a tensor wraps another one in torch.func.functionalize.

    That transform removes writes from a program. The tensor's class does not show it.
    """
    return torch._is_functional_tensor(t)


#: True if a parameter may adopt another tensor's data as its ``.data``. Modules that are cast or
#: moved check it (torch 1.3).
may_take_data = torch._has_compatible_shallow_copy_type


class _Data(property):
    """The attribute ``data`` of torch.Tensor with a check before it is set.

    Recorders read its name (properties have one since Python 3.13).
    """

    __name__ = "data"


def guard_data(check: Any) -> None:
    """Run ``check(tensor, value)`` before ``tensor.data = value``.

    For that assignment torch lets only ``tensor`` override, never ``value``. It adopts the value's
    memory, which a tensor without storage doesn't have. The attribute is still read in C, under the
    name that its descriptor gets here.
    """
    descriptor = torch._C.TensorBase.data
    take = descriptor.__set__

    def set_data(tensor: torch.Tensor, value: Any) -> None:
        check(tensor, value)
        take(tensor, value)

    in_c = operator.attrgetter("_data_in_c")
    checked = _Data(in_c, set_data, descriptor.__delete__, doc=descriptor.__doc__)
    patch("torch:Tensor._data_in_c", lambda before: descriptor, missing=True)
    patch("torch:Tensor.data", lambda before: checked)


def guard_swap(around: Any) -> None:
    """Run ``around(swap, t1, t2)`` in place of ``swap(t1, t2)``, torch.utils.swap_tensors.

    That function checks no override. It refuses tensors whose classes have different slots, and
    tensors with weak references.
    """

    def checking(swap: Any) -> Any:
        @functools.wraps(swap)
        def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
            around(swap, t1, t2)

        return swap_tensors

    patch("torch.utils:swap_tensors", checking)


def wrap_dlpack(held: Any) -> None:
    """Export ``held(tensor)`` in place of the tensor passed to torch's exporters to DLPack.

    These exporters read the tensor's memory, and no tensor can override them.
    """

    def exporting(export: Any) -> Any:
        @functools.wraps(export)
        def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return export(held(tensor), *args, **kwargs)

        return run

    for target in (
        "torch._C:_to_dlpack",
        "torch._C:_to_dlpack_versioned",
        "torch:to_dlpack",
        "torch.utils.dlpack:to_dlpack",
    ):
        patch(target, exporting)
