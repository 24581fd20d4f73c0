"""Torch's associative scan for global tensors and in graphs.

The user passes the operation of the scan. State-space models call it where a compiler traces them.
PyTorch's own scan transforms tensors below its functions (vmap), or needs a compiler. Here an
elementwise operation is applied to the whole sequence in log2(length) doubling steps (Hillis &
Steele 1986). Any other operation is applied to one position after the other. The package calls
`install` on import.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._base import torch_private
from .._base.pytree import replaced, tensors_in
from .._tensor.global_tensor import GlobalTensor

__all__ = ["install"]


def _scan_global_tensors(
    original: Callable[..., Any],
    combine_fn: Callable[..., Any],
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    leaves = tensors_in(xs, [])
    if not torch_private.function_mode_on() and not any(
        isinstance(t, GlobalTensor) for t in leaves
    ):
        return original(combine_fn, xs, dim, reverse=reverse, combine_mode=combine_mode)
    lengths = {t.shape[dim] for t in leaves}
    if len(lengths) != 1:
        raise ValueError(
            f"associative_scan: the tensors must have one length along dim {dim}, got "
            f"{sorted(lengths)}"
        )

    def combine(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors_in(combine_fn(replaced(xs, iter(a)), replaced(xs, iter(b))), [])

    if reverse:
        leaves = [t.flip(dim) for t in leaves]
    outs = (_scan_by_doubling if combine_mode == "pointwise" else _scan_by_steps)(
        combine, leaves, dim, lengths.pop()
    )
    return replaced(xs, iter([t.flip(dim) for t in outs] if reverse else outs))


Combine = Callable[[list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]]


def _scan_by_doubling(
    combine: Combine, leaves: list[torch.Tensor], dim: int, length: int
) -> list[torch.Tensor]:
    for reach in itertools.takewhile(lambda n: n < length, (2**k for k in itertools.count())):
        later = combine(
            [t.narrow(dim, 0, length - reach) for t in leaves],
            [t.narrow(dim, reach, length - reach) for t in leaves],
        )
        leaves = [
            torch.cat([t.narrow(dim, 0, reach), new], dim)
            for t, new in zip(leaves, later, strict=True)
        ]
    return leaves


def _scan_by_steps(
    combine: Combine, leaves: list[torch.Tensor], dim: int, length: int
) -> list[torch.Tensor]:
    places: Iterator[list[torch.Tensor]] = map(
        list, zip(*[t.unbind(dim) for t in leaves], strict=True)
    )
    return [
        torch.stack(parts, dim)
        for parts in zip(*itertools.accumulate(places, combine), strict=True)
    ]


def install() -> None:
    """Make torch's associative scan accept global tensors."""
    torch_private.wrap_associative_scan(_scan_global_tensors)
