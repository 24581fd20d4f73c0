"""The memory of a global tensor, for code below torch's functions: ``data_ptr``, storages, DLPack.

`GlobalTensor` gets these methods, and the dispatcher these handlers.

Where a rank holds the full value, its local tensor answers. Where the value is sharded, no rank has
memory that holds it. The identity of the memory can still be queried (two tied tensors share it).
Access to its contents is refused, with the ways to get the values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from .._base import torch_private
from ..distributed.world import world
from ..errors import InterfaceError, KindError, StorageError
from ..sharding.spec import Spec
from .global_tensor import GlobalTensor, SlottedGlobalTensor, refuse_kernel
from .pending_tensor import local_of
from .set_data import exchange
from .view_tracking import RemoteView

__all__ = ["HANDLERS", "METHODS", "Address", "StorageHandle", "install", "is_whole", "refuse_parts"]


def is_whole(spec: Spec, rank: int) -> bool:
    """Return True if the local tensor of ``rank`` is the full value."""
    shape = spec.placement.shape
    return rank in spec.placement._coordinates and all(
        e.is_broadcast or n == 1 for e, n in zip(spec.layout, shape, strict=True)
    )


def refusal(what: str, spec: Spec) -> str:
    """Return the error text for memory that no rank has, with the ways to get the value.

    The text is the same on every rank.
    """
    whole = (
        "flow.sbp.broadcast"
        if spec.placement.axes == 1
        else f"[flow.sbp.broadcast] * {spec.placement.axes}"
    )
    return (
        f"{what} needs the memory of the full tensor, but this tensor ({spec!r} on "
        f"{spec.placement!r}) is distributed, and no rank has memory that holds its value. "
        f"Use x.to_local() for this rank's local tensor, and x.numpy() or "
        f"x.to_global(sbp={whole}).to_local() for the full value: call these on every rank. "
        "To write a file, call flow.save(obj, path, global_dst_rank=0) on every rank, or use "
        "torch.distributed.checkpoint. "
        f"For safetensors and save_pretrained, make plain tensors on every rank, state = {{k: "
        f"v.to_global(sbp={whole}).to_local() for k, v in "
        "model.state_dict().items()} (or torch's get_model_state_dict with full_state_dict=True), "
        "and write them on one rank: "
        "safetensors.torch.save_file(state, path), model.save_pretrained(path, state_dict=state)"
    )


def refuse(what: str, x: GlobalTensor) -> NoReturn:
    raise StorageError(refusal(what, x._spec))


def held(x: GlobalTensor, what: str) -> torch.Tensor:
    """Return the local tensor if it is the full value. Raises StorageError otherwise."""
    if not is_whole(x._spec, world().rank):
        refuse(what, x)
    return x._materialize()._local


# ------------------------------------------------------------------------------- identity of memory


@functools.total_ordering
class Address:
    """The address of a sharded tensor, which only identifies its memory.

    It can be compared, sorted and used as a key, but never read from.
    """

    __slots__ = ("_spec", "_where")

    def __init__(self, where: int, spec: Spec) -> None:
        self._where, self._spec = where, spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._where == other._where

    def __lt__(self, other: object) -> bool:
        if isinstance(other, (Address, int)):
            return self._where < (other._where if isinstance(other, Address) else other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((Address, self._where))

    def __add__(self, nbytes: int) -> Address:
        return Address(self._where + nbytes, self._spec)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return (
            self._where - other._where
            if isinstance(other, Address)
            else Address(self._where - other, self._spec)
        )

    def __mod__(self, nbytes: int) -> int:
        return self._where % nbytes

    def __index__(self) -> int:
        raise StorageError(refusal("data_ptr()", self._spec))

    __int__ = __index__

    def __format__(self, form: str) -> str:
        return format(int(self), form) if form else repr(self)

    @property
    # ctypes accepts an object with this attribute as a pointer
    def _as_parameter_(self) -> NoReturn:
        raise StorageError(refusal("data_ptr()", self._spec))

    def __repr__(self) -> str:
        return f"<the address of {self._spec!r}, which is distributed: not a number>"


class StorageHandle:
    """The storage of a sharded tensor, which only has identity and size.

    Reading from it and writing to it is refused.
    """

    def __init__(self, x: GlobalTensor, itemsize: int = 1) -> None:
        base = _view_base(x)
        self._storage, self._spec, self._itemsize, self.device = (
            base._materialize()._local.untyped_storage(),
            x._spec,
            itemsize,
            base.device,
        )

    @property
    def _cdata(self) -> int:
        return self._storage._cdata

    def _weak_ref(self) -> Any:
        return self._storage._weak_ref()  # type: ignore[no-untyped-call]

    def nbytes(self) -> int:
        return self._spec.nbytes

    def size(self) -> int:
        return self._spec.nbytes // self._itemsize

    def element_size(self) -> int:
        return self._itemsize

    def __len__(self) -> int:
        return self.size()

    def data_ptr(self) -> Address:
        return Address(self._cdata, self._spec)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageHandle) and self._cdata == other._cdata

    def __hash__(self) -> int:
        return hash(self._cdata)

    def __repr__(self) -> str:
        return f"<the storage of {self._spec!r}, which is distributed>"

    def _read(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StorageError(refusal("reading or copying a storage", self._spec))

    __getitem__ = __setitem__ = __iter__ = __contains__ = __bytes__ = __array__ = __reduce_ex__ = (
        __copy__
    ) = __deepcopy__ = _read

    def __getattr__(self, name: str) -> NoReturn:
        if name == "_new_shared":  # torch's collate function, in a worker of a DataLoader
            raise InterfaceError(
                "a worker of a DataLoader, which is no rank, puts global tensors together: let the "
                "dataset hold the values, x.numpy() (on every rank, before the loop), or take "
                "num_workers=0"
            )
        raise InterfaceError(refusal(f"{name} of a storage", self._spec))


def _view_base(x: GlobalTensor) -> GlobalTensor:
    """Return the base of a view that needs communication, and any other tensor itself.

    The view's own local tensor may be one that it would have to fetch from other ranks.
    """
    while isinstance(x, RemoteView):
        x = x.__dict__["_origin"][0]
    return x


def _local_may_answer(x: GlobalTensor) -> bool:
    """Return True if the local tensor may answer: it is the full value, or there are no values."""
    return is_whole(x._spec, world().rank) or not x._spec.numel


def data_ptr(self: GlobalTensor) -> Any:
    """Return the address of the full value where this rank has it, else an `Address`.

    An `Address` identifies the memory and cannot be read from.
    """
    if _local_may_answer(self):
        local = self._materialize()._local
        return (
            torch_private.storage_key(local) if torch_private.is_fake(local) else local.data_ptr()
        )
    local = _view_base(self)._materialize()._local
    if local.is_meta:
        return 0  # as for every tensor on that device
    offset = 0 if isinstance(self, RemoteView) else local.storage_offset() * local.element_size()
    return Address(torch_private.storage_key(local) + offset, self._spec)


def untyped_storage(self: GlobalTensor) -> Any:
    return local_of(self).untyped_storage() if _local_may_answer(self) else StorageHandle(self)


def storage(self: GlobalTensor) -> Any:
    return (
        local_of(self).storage()
        if _local_may_answer(self)
        else StorageHandle(self, self._spec.dtype.itemsize)
    )


def typed_storage(self: GlobalTensor) -> Any:
    if not _local_may_answer(self):
        return StorageHandle(self, self._spec.dtype.itemsize)
    return torch.TypedStorage(
        wrap_storage=local_of(self).untyped_storage(), dtype=self._spec.dtype, _internal=True
    )


def storage_offset(self: GlobalTensor) -> int:
    """Return the offset of the value in its storage, 0 for a sharded tensor.

    Raises StorageError for a view of a sharded tensor: its offset is another number on each rank.
    A view that needed communication is a copy, which has no offset in its base.
    """
    if isinstance(self, RemoteView) and not _local_may_answer(_view_base(self)):
        refuse("storage_offset() of a view", self)
    if _local_may_answer(self) or not any(e.is_split for e in self._spec.layout):
        return self._materialize()._local.storage_offset()
    if self._memory is not None and self._memory.viewed:
        refuse("storage_offset() of a view", self)
    return 0


def is_set_to(self: GlobalTensor, other: Any) -> bool:
    return (
        isinstance(other, GlobalTensor)
        and self._spec is other._spec
        and bool(local_of(self).is_set_to(local_of(other)))
    )


# ------------------------------------------------------------------------------- contents of memory


def refuse_parts(what: str, values: Iterable[Any]) -> None:
    """Raise StorageError if one of the values is a sharded tensor."""
    for x in values:
        if isinstance(x, GlobalTensor) and not _local_may_answer(x):
            refuse(what, x)


def share_memory_(self: GlobalTensor) -> GlobalTensor:
    held(self, "share_memory_()").share_memory_()
    return self


def dlpack(self: GlobalTensor, **options: Any) -> Any:
    return held(self, "DLPack").__dlpack__(**options)


def dlpack_device(self: GlobalTensor) -> Any:
    return held(self, "DLPack").__dlpack_device__()


def cuda_array_interface(self: GlobalTensor) -> Any:
    if self._spec.placement.type == "cuda" and not is_whole(self._spec, world().rank):
        raise InterfaceError(refusal("__cuda_array_interface__", self._spec))
    return local_of(self).__cuda_array_interface__


class _AbsentAttribute:
    """An attribute that a class lacks although its base has it.

    Code that looks for the attribute then takes another path.
    """

    def __get__(self, x: Any, owner: Any) -> NoReturn:
        raise AttributeError("a global tensor has no such attribute")


def _dlpack_source(x: Any) -> Any:
    return held(x, "DLPack") if isinstance(x, GlobalTensor) else x


def _check_data(tensor: Any, value: Any) -> None:
    if isinstance(value, GlobalTensor) and not isinstance(tensor, GlobalTensor):
        _refuse_to_take(".data = x", value)


def _refuse_to_take(how: str, value: GlobalTensor) -> NoReturn:
    raise StorageError(
        f"plain{how} with a global tensor x ({value._spec!r}): the plain tensor would share the "
        f"memory of x, but a global tensor has no memory of its "
        "own. Make the plain tensor global (for a module's parameters: "
        "module.to_global(placement, sbp)): then its .data may be set to x. "
        f"Or use memory that is on this rank: plain{how.replace('x', 'x.to_local()')}, this "
        f"rank's local tensor"
    )


def _refuse_set(args: Any) -> None:
    if isinstance(args[1], GlobalTensor):
        _refuse_to_take(".set_(x)", args[1])


#: Methods and attributes of GlobalTensor.
METHODS: dict[str, Any] = {
    "data_ptr": data_ptr, "untyped_storage": untyped_storage, "storage": storage,
    "_typed_storage": typed_storage, "storage_offset": storage_offset,
    "is_set_to": is_set_to, "share_memory_": share_memory_, "__dlpack__": dlpack,
    "__dlpack_device__": dlpack_device,
    "__cuda_array_interface__": property(cuda_array_interface),
    "__dlpack_c_exchange_api__": _AbsentAttribute(),
}  # fmt: skip
if hasattr(torch.Tensor, "const_data_ptr"):
    METHODS["const_data_ptr"] = data_ptr


def _method(name: str) -> Any:
    return lambda func, args, kwargs: METHODS[name](*args, **kwargs)


def _method_handler(name: str) -> Any:
    """Return a handler that calls a method of GlobalTensor, or answers False for a plain tensor.

    It is for functions that may be called on a plain tensor, with a global one among their other
    arguments.
    """
    return lambda func, args, kwargs: (
        METHODS[name](*args, **kwargs) if isinstance(args[0], GlobalTensor) else False
    )


def _swap(swap: Any, t1: torch.Tensor, t2: torch.Tensor) -> None:
    _check_swap(t1, t2)
    exchange(swap, t1, t2)


def _check_swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Raise KindError before torch.utils.swap_tensors refuses the slots of a global tensor."""
    if isinstance(t1, SlottedGlobalTensor) == isinstance(t2, SlottedGlobalTensor) or all(
        isinstance(t, GlobalTensor) and isinstance(t, torch.nn.Parameter) for t in (t1, t2)
    ):
        return
    t1_kind, t2_kind = (
        "a plain tensor"
        if not isinstance(t, GlobalTensor)
        else "a global tensor"
        if isinstance(t, SlottedGlobalTensor)
        else "a global parameter"
        for t in (t1, t2)
    )
    raise KindError(
        f"torch.utils.swap_tensors cannot exchange {t1_kind} with {t2_kind}: a global tensor has "
        "its local tensor and its layout in fields that the class of the other lacks. Copy the "
        "values (x.copy_(y) under torch.no_grad()), or make the plain tensor global first: "
        "x.to_global(placement, sbp). flow.parallelize and module.to_global(placement, sbp) make "
        "parameters global that stay the same objects"
    )


#: Functions of torch that need no plan: torch function -> handler(func, args, kwargs).
HANDLERS: dict[Any, Any] = {
    getattr(torch.Tensor, name): _method(name)
    for name, method in METHODS.items()
    if callable(method) and name not in ("_typed_storage", "is_set_to")
}
HANDLERS[torch.Tensor.is_set_to] = _method_handler("is_set_to")
HANDLERS[torch.Tensor.__cuda_array_interface__.__get__] = lambda func, args, kwargs: (
    cuda_array_interface(*args)
)  # type: ignore[attr-defined]
refuse_kernel(torch_private.TAKING_MEMORY, _refuse_set)


def install() -> None:
    """Make torch functions that cannot be overridden refuse tensors without memory."""
    torch_private.guard_data(_check_data)
    torch_private.guard_swap(_swap)
    torch_private.wrap_dlpack(_dlpack_source)
