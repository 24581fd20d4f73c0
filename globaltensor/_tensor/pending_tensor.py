"""The base class of global tensors whose local tensor may have to be fetched or computed first.

`RemoteView` and `DeferredMean` derive from it. `PendingTensor` is the border to the rest of the
library: it materializes such tensors where a function of torch or a method receives them. All code
behind that border reads ``_local``, which never communicates. Code that receives tensors on another
way, such as the parameters of a module or the results of a user's function, calls ``_materialize``
or `local_of` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._base.pytree import tensors_in
from .global_tensor import GlobalTensor, SlottedGlobalTensor

__all__ = [
    "PendingTensor",
    "local_of",
    "materialize_all",
    "materialized_first",
    "register_lazy_functions",
]

_SLOT: Any = SlottedGlobalTensor.__dict__["_local"]

#: Functions of torch that use no values of their operands, or that materialize these themselves.
_lazy_functions: set[Any] = set()


def register_lazy_functions(functions: Iterable[Any]) -> None:
    """Let these functions of torch receive pending tensors as they are."""
    _lazy_functions.update(functions)


class PendingTensor(SlottedGlobalTensor):
    """A global tensor whose local tensor may have to be fetched or computed first.

    ``_materialize`` does so. Until then, reading ``_local`` raises AssertionError.
    """

    __slots__ = ()

    def _is_pending(self) -> bool:
        """Return True if the local tensor is out of date, or does not exist yet."""
        raise AssertionError("each kind of pending tensor has its own _is_pending")

    def _materialize(self) -> GlobalTensor:
        """Fetch or compute the local tensor if it is pending, and return this tensor."""
        raise AssertionError("each kind of pending tensor has its own _materialize")

    @property
    def _local(self) -> torch.Tensor:
        if self._is_pending():
            raise AssertionError(
                f"the local tensor of this {type(self).__qualname__} is not up to date, because "
                f"reading _local must not communicate: call _materialize() before"
            )
        return _SLOT.__get__(self)  # type: ignore[no-any-return]

    @_local.setter
    def _local(self, value: torch.Tensor) -> None:
        _SLOT.__set__(self, value)

    @property
    def _stored(self) -> torch.Tensor:
        return _SLOT.__get__(self)  # type: ignore[no-any-return]

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._materialize()._local.retains_grad

    @property
    def output_nr(self) -> int:  # type: ignore[override]
        return self._materialize()._local.output_nr

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self._materialize()._local._version

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _lazy_functions:
            materialize_all(args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def local_of(x: Any) -> Any:
    """Return the local tensor of a global tensor, up to date. Return anything else unchanged.

    It is collective where the tensor is pending.
    """
    return x._materialize()._local if isinstance(x, GlobalTensor) else x


def materialize_all(*values: Any) -> None:
    """Materialize the pending tensors in pytrees, for example in the arguments of a call."""
    for x in tensors_in(values, []):
        if isinstance(x, PendingTensor):
            x._materialize()


def materialized_first(member: Any) -> Any:
    """Return a method or property that materializes its tensor, then does what ``member`` does."""
    if isinstance(member, property):
        get, assign, delete = map(_materialized_first, (member.fget, member.fset, member.fdel))
        return property(get, assign, delete)
    return _materialized_first(member)


def _materialized_first(method: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if method is None:
        return None

    @functools.wraps(method)
    def run(self: GlobalTensor, *args: Any, **kwargs: Any) -> Any:
        return method(self._materialize(), *args, **kwargs)

    return run
