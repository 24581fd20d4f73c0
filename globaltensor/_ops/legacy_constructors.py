"""The old constructors, as ``flow.Tensor(...)``, and results of NumPy functions.

Users call the constructors. NumPy's results on a global tensor are wrapped as global tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .._tensor.convert import to_global
from .._tensor.global_tensor import GlobalTensor
from .._tensor.history import record
from .._tensor.plain_operands import promote_plain_tensor
from ..errors import LocalTensorError
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .creation import as_tensor, check_whole, empty, tensor
from .dispatch import register_handlers
from .rules.notation import OpDescription
from .rules.registry import RULES

__all__ = [
    "BFloat16Tensor", "BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "FloatTensor",
    "HalfTensor", "IntTensor", "LongTensor", "ShortTensor", "Tensor",
]  # fmt: skip


class _TensorMeta(type(torch.Tensor)):  # type: ignore[misc]
    """A metaclass of `Tensor` and the typed constructors.

    Their calls may create global tensors. As classes they equal torch's own (``_of``)."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return (
            _construct(cls, *args, **kwargs)
            if "_of" in vars(cls)
            else super().__call__(*args, **kwargs)
        )

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, cls._of)
            if "_of" in vars(cls)
            else super().__instancecheck__(instance)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return (
            issubclass(subclass, torch.Tensor)
            if cls is Tensor
            else super().__subclasscheck__(subclass)
        )

    def __eq__(cls, other: Any) -> Any:
        return other is cls or ("_of" in vars(cls) and other is cls._of)

    def __hash__(cls) -> int:
        return hash(cls._of) if "_of" in vars(cls) else super().__hash__()


class Tensor(torch.Tensor, metaclass=_TensorMeta):
    """A ``torch.Tensor`` whose call also accepts ``placement`` and ``sbp``.

    An example is ``flow.Tensor(2, 3, placement=p, sbp=s)``. The arguments are sizes, or data that
    every rank has."""

    _of = torch.Tensor


def _typed_constructor(dtype: torch.dtype, name: str) -> Any:
    """Create a typed constructor such as ``flow.FloatTensor``.

    It is torch's own, and also accepts ``placement`` and ``sbp``."""
    # x.type(flow.FloatTensor) recognises the type by this name.
    return _TensorMeta(
        f"torch.{name}",
        (torch.Tensor,),
        {"_of": getattr(torch, name), "dtype": dtype, "__doc__": _typed_constructor.__doc__},
    )


FloatTensor, DoubleTensor, HalfTensor = (
    _typed_constructor(torch.float32, "FloatTensor"),
    _typed_constructor(torch.float64, "DoubleTensor"),
    _typed_constructor(torch.float16, "HalfTensor"),
)
BFloat16Tensor, BoolTensor, ByteTensor = (
    _typed_constructor(torch.bfloat16, "BFloat16Tensor"),
    _typed_constructor(torch.bool, "BoolTensor"),
    _typed_constructor(torch.uint8, "ByteTensor"),
)
CharTensor, ShortTensor = (
    _typed_constructor(torch.int8, "CharTensor"),
    _typed_constructor(torch.int16, "ShortTensor"),
)
IntTensor, LongTensor = (
    _typed_constructor(torch.int32, "IntTensor"),
    _typed_constructor(torch.int64, "LongTensor"),
)


def _construct(cls: Any, *args: Any, placement: Any = None, sbp: Any = None, **kwargs: Any) -> Any:
    name = cls.__name__.removeprefix("torch.")
    if placement is None and sbp is None:
        if args and isinstance(args[0], GlobalTensor):
            raise LocalTensorError(
                f"{name} of a global tensor: use x.to_local() for this rank's local tensor or "
                f"x.detach() for the global tensor, or pass placement= and sbp= as well"
            )
        return cls._of(*args, **kwargs)
    check_whole(name, placement, sbp, kwargs)
    dtype = torch.get_default_dtype() if cls is Tensor else cls.dtype
    if args and not isinstance(args[0], (int, torch.Size)):
        if len(args) > 1:
            raise TypeError(
                f"{name} takes sizes, or data in one argument; got {len(args)} arguments, the "
                f"first a {type(args[0]).__name__}"
            )
        (data,) = args
        if isinstance(data, GlobalTensor):
            return to_global(data.detach().to(dtype), placement, sbp, **kwargs)
        if isinstance(data, torch.Tensor):
            return as_tensor(
                data.detach().clone(), dtype=dtype, placement=placement, sbp=sbp, **kwargs
            )
        return tensor(data, dtype=dtype, placement=placement, sbp=sbp, **kwargs)
    return empty(*(args or (0,)), dtype=dtype, placement=placement, sbp=sbp, **kwargs)


def _wrap_array(x: GlobalTensor, array: Any, *_context: Any) -> GlobalTensor:
    """Wrap a result that NumPy computed from a global tensor: broadcast on its placement.

    Every rank has computed it from the full value."""
    value: torch.Tensor = torch.Tensor.__array_wrap__(torch.empty(0), np.asarray(array))
    placement = x._spec.placement
    spec = Spec.make(value.shape, value.dtype, placement, [broadcast] * placement.axes)
    out = GlobalTensor.wrap(promote_plain_tensor(value, spec, "NumPy"), spec)
    record("NumPy", x, out)
    return out


# NumPy passes more arguments than torch's own method accepts.
GlobalTensor.__array_wrap__ = _wrap_array  # type: ignore[assignment, method-assign]
register_handlers(
    {torch.Tensor.__array_wrap__: lambda func, args, kwargs: _wrap_array(*args, **kwargs)}, "method"
)


def _accept_arrays(operator: Any, compute: Callable[[Any, Any], Any]) -> None:
    """Redefine an operator that accepts a NumPy array in torch: ``compute`` runs for an array.

    PyTorch's own operator fails for an array on the meta device."""
    of_tensors = RULES[operator]

    def describe(op: OpDescription, input: Any, other: Any) -> None:
        if isinstance(other, np.ndarray):
            op.composite = compute
        else:
            of_tensors.describe(op, input, other)

    RULES[operator] = dataclasses.replace(of_tensors, describe=describe)


_accept_arrays(torch.Tensor.__eq__, lambda x, array: x == torch.as_tensor(array))
_accept_arrays(torch.Tensor.__rtruediv__, lambda x, array: x.reciprocal() * array)
