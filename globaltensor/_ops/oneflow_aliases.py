"""Functions of OneFlow, and two of torch's in NumPy's form.

OneFlow's functions call ``x.to_global`` and raise unless ``x`` is local, or global. Libraries call
the other two through the module of a tensor's class (opt_einsum)."""

from __future__ import annotations

from typing import Any

import torch

from .._tensor.convert import to_global
from .._tensor.global_tensor import GlobalTensor
from ..errors import SbpError
from ..sharding.placement import Placement

__all__ = ["global_to_global", "local_to_global", "tensordot", "transpose"]


def local_to_global(
    x: torch.Tensor, placement: Placement, sbp: Any, *, check_meta: bool = True, copy: bool = False
) -> GlobalTensor:
    """Return ``x.to_global(placement, sbp)`` of a local tensor.

    Raises SbpError if ``x`` is global."""
    if isinstance(x, GlobalTensor):
        raise SbpError(
            "local_to_global of a tensor that is global already: global_to_global changes its "
            "placement or sbp"
        )
    return to_global(x, placement, sbp, check_meta=check_meta, copy=copy)  # type: ignore[no-any-return]


def global_to_global(
    x: torch.Tensor, placement: Placement | None = None, sbp: Any = None, **options: Any
) -> GlobalTensor:
    """Return ``x.to_global(placement, sbp, ...)`` of a global tensor.

    A placement or sbp that is not passed stays the same. Raises SbpError if ``x`` is local."""
    if not isinstance(x, GlobalTensor):
        raise SbpError(
            "global_to_global of a local tensor: local_to_global makes it global, with placement "
            "and sbp"
        )
    return to_global(x, placement, sbp, **options)  # type: ignore[no-any-return]


def tensordot(
    a: torch.Tensor, b: torch.Tensor, dims: Any = 2, out: Any = None, *, axes: Any = None
) -> torch.Tensor:
    """Call ``torch.tensordot``. ``axes`` is NumPy's name for ``dims``."""
    return torch.tensordot(a, b, dims=dims if axes is None else axes, out=out)


def transpose(input: torch.Tensor, *dims: Any, **named: Any) -> torch.Tensor:
    """Call ``torch.transpose(input, dim0, dim1)``, or transpose as NumPy does.

    As in NumPy, one tuple is the new order of all dims. Without dims, their order is reversed."""
    if named or len(dims) == 2:
        return torch.transpose(input, *dims, **named)
    order = dims[0] if dims and dims[0] is not None else range(input.dim())[::-1]
    return input.permute(*order)
