"""Kinds of tensors that cannot become global, each with an error that says what to do.

A global tensor is made of ordinary tensors, dense and with values in memory of their own.
Conversion and parallelization call these functions.

Ranks send each other the kinds of their tensors with the shapes, before any data moves, so all
raise the same error (`gather_specs`, `SameModel`, `local_map`). A plain tensor among global ones is
compared in any case (`check_replicated`): its kind is part of the comparison. Sparse tensors, and
those of classes that run torch's functions themselves, may be such operands if all ranks have the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._base import torch_private
from ..errors import GlobalTensorError, KindError, PlacementError
from .placement import Placement

__all__ = [
    "BARE",
    "Described",
    "TensorKind",
    "arrived",
    "described",
    "kind_of",
    "parameter_described",
    "refusal",
    "refuse",
]


class TensorKind(NamedTuple):
    """A kind of tensor that cannot become global: its name, and what to do instead."""

    text: str
    mend: str
    # True if torch's functions may accept it together with local tensors of global ones
    operand: bool = False
    error: type[GlobalTensorError] = KindError


_ORDINARY: Final = frozenset((torch.Tensor, torch.nn.Parameter))
# torch's functional collectives return it: an ordinary tensor that may still be in transit
_AWAITED: Final = "AsyncCollectiveTensor"
_NO_OPERANDS: Final = frozenset(("DTensor", "FakeTensor", "FunctionalTensor", "MaskedTensor"))
_HARMLESS: Final = frozenset(("__new__", "__init__", "__repr__", "__str__"))
_LOCAL: Final = "flow.local_map runs code on each rank's own tensors, of any kind"
_SPARSE: Final = f"A global tensor is dense: pass x.to_dense(); {_LOCAL}"
_UNINITIALIZED: Final = (
    "Run the lazy module once on an example first, on every rank (a dry run: "
    "with torch.no_grad(): model(torch.zeros(...))): this run gives parameters "
    "their shapes"
)
_QUANTIZED: Final = f"Pass x.dequantize(); {_LOCAL}"
_NESTED: Final = f"Pad the rows to one length: x.to_padded_tensor(0.0), and a mask; {_LOCAL}"

#: Advice for a tensor of a class, by the name of the class: torch's own classes, and those of
#: libraries with many users.
_CLASSES: Final = {
    "DTensor": (
        "Use x.full_tensor().to_global(placement, flow.sbp.broadcast), or x.to_local() "
        "with the sbp that corresponds to its placements"
    ),
    "FakeTensor": (
        "A fake tensor has no values: leave the FakeTensorMode that made it, or work inside it"
    ),
    "FunctionalTensor": (
        "It represents another tensor during tracing: move this call out of the traced code"
    ),
    "MaskedTensor": (
        "Pass x.to_tensor(value), with a value for masked elements, or make x.get_data() and "
        "x.get_mask() global"
    ),
}
_OF_CLASS: Final = (
    "Its class defines its values, and a global tensor has another class. Convert it to an "
    "ordinary tensor first (x.dequantize(), x.to_dense() or what its class offers); "
    "flow.local_map runs code on each rank's own tensors, of any kind"
)
_OF_PARAMETER: Final = (
    "A global parameter has another class, and would lose these methods. Make the module global "
    "before its parameters get that class, or give the module ordinary parameters "
    "(torch.nn.Parameter), or leave the module plain and run it by flow.local_map"
)


def _is_global(t: torch.Tensor) -> bool:
    return bool(t.is_global)  # type: ignore[attr-defined]


def kind_of(t: torch.Tensor) -> TensorKind | None:
    """Return the kind of a tensor that cannot become global, else None."""
    if type(t) not in _ORDINARY and (_is_global(t) or (found := _kind_of_class(t)) is not None):
        return None if _is_global(t) else found
    if t.layout is not torch.strided:
        name = str(t.layout)
        return TensorKind(
            "an MKL-DNN tensor" if "mkldnn" in name else f"a sparse tensor ({name})",
            _SPARSE,
            operand=True,
        )
    if t.is_nested:
        return TensorKind("a nested tensor (torch.strided)", _NESTED)
    if t.is_quantized:
        return TensorKind(f"a quantized tensor ({t.dtype})", _QUANTIZED)
    if torch_private.is_functional(t):
        return TensorKind("a functional tensor", _CLASSES["FunctionalTensor"])
    return None


def _kind_of_class(t: torch.Tensor) -> TensorKind | None:
    """Return the kind that a tensor's class gives it, else None."""
    cls = type(t)
    if issubclass(cls, (UninitializedParameter, UninitializedBuffer)):
        return TensorKind(f"an {cls.__name__}, which has no shape yet", _UNINITIALIZED)
    if t.layout is torch.jagged:
        return TensorKind("a nested tensor (torch.jagged)", _NESTED)
    if cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or cls.__name__ == _AWAITED:
        return None
    if torch_private.is_fake(t) and (
        torch_private.recording.on
        or (torch_private.fakes_are_on() and not torch_private.processes_are_on())
    ):
        return None
    return TensorKind(
        f"a {cls.__name__}",
        _CLASSES.get(cls.__name__, _OF_CLASS),
        operand=cls.__name__ not in _NO_OPERANDS,
    )


def arrived(t: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor for one that may still be in transit, and any other unchanged.

    torch's functional collectives return such tensors.
    """
    return t.wait() if type(t).__name__ == _AWAITED else t  # type: ignore[attr-defined, no-any-return]


def _parameter_kind(t: torch.Tensor) -> TensorKind | None:
    """Return the kind of a parameter or buffer that cannot become global, else None.

    A parameter has to stay the same object when it becomes global.
    """
    cls = type(t)
    if (kind := kind_of(t)) is not None or cls in _ORDINARY or _is_global(t):
        return kind
    if cls.__basicsize__ != torch.Tensor.__basicsize__:
        return TensorKind(
            f"a {cls.__name__}, whose class has slots of its own",
            "It could not stay the same object, which optimizers and other references hold. "
            "Replace it by an ordinary torch.nn.Parameter or tensor first",
        )
    if own := _own_methods(cls):
        return TensorKind(
            f"a {cls.__name__}, whose class has methods of its own ({', '.join(own[:3])})",
            _OF_PARAMETER,
        )
    return None


def _own_methods(cls: type) -> list[str]:
    """Return the names of the methods that a class overrides in torch's class."""
    theirs = {
        name: value
        for c in reversed(cls.__mro__[: cls.__mro__.index(torch.Tensor)])
        if c is not torch.nn.Parameter
        for name, value in vars(c).items()
    }
    methods = {
        name
        for name, v in theirs.items()
        if callable(v) or isinstance(v, (classmethod, staticmethod, property))
    }
    changed = {
        name
        for name in methods & {*dir(torch.nn.Parameter)}
        if theirs[name] is not getattr(torch.nn.Parameter, name)
    }
    return sorted(changed - _HARMLESS)


#: The description of a tensor that a rank sends: shape and dtype, or why it cannot become global.
Described = tuple[tuple[int, ...], torch.dtype] | TensorKind
#: The kind of a tensor on the meta device where values are needed.
BARE: Final = TensorKind(
    "a tensor on the meta device, which has no values",
    "Allocate memory and set values first: torch.empty_like(x, device=...)",
    error=PlacementError,
)


def described(t: torch.Tensor, placement: Placement | None = None) -> Described:
    """Return the description of this rank's local tensor, which the ranks exchange.

    ``placement``: the placement on which the global tensor is to have values.
    """
    if (kind := kind_of(t)) is not None:
        return kind
    if t.is_meta and placement is not None and placement.type != "meta":
        return BARE._replace(
            text=f"a tensor on the meta device, which has no values to put on {placement!r}",
            mend="Make it global on flow.placement('meta', ranks), then allocate memory with "
            f"torch.empty_like(x, device={placement.type!r}). For a model, flow.parallelize does "
            "the first step and model.to_empty(device=...) the second",
        )
    return tuple(t.shape), t.dtype


def parameter_described(t: torch.Tensor) -> Any:
    """Return the description of a parameter or buffer, which stays the same object.

    It includes the description of the gradient, if there is one.
    """
    if (kind := _parameter_kind(t)) is not None:
        return kind
    grad = None if _is_global(t) or not t.is_leaf or t.grad is None else described(t.grad)
    if isinstance(grad, TensorKind):
        return grad._replace(text=f"a parameter whose gradient is {grad.text}")
    return tuple(t.shape), t.dtype, grad


def refusal(what: str, held: Mapping[int, Any]) -> GlobalTensorError:
    """Return the error for ranks of which one holds a tensor that cannot be global.

    ``held``: the ranks' descriptions (`described`), the same on every rank.
    """
    odd = {rank: kind for rank, kind in held.items() if isinstance(kind, TensorKind)}
    first = next(iter(odd.values()))
    ranks = [rank for rank, kind in odd.items() if kind == first]
    who = (
        ""
        if len(ranks) == len(held)
        else (
            f", on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))} of "
            f"{len(held)}"
        )
    )
    return first.error(f"{what} is {first.text}{who}: that cannot be global. {first.mend}")


def refuse(what: str, held: Mapping[int, Any]) -> None:
    """Raise the error of `refusal` if a rank holds a tensor that cannot be global."""
    if any(isinstance(kind, TensorKind) for kind in held.values()):
        raise refusal(what, held)
