"""Micro-batches: how a batch is cut along dim 0, and how what comes out is joined again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..wrapper import GlobalTensor
from .errors import GraphError
from .nest import replaced, tensors_in

__all__ = ["join", "split"]


def split(args: tuple[Any, ...], kwargs: dict[str, Any], n: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The call's inputs cut into ``n`` micro-batches. Tensors without dims go to each. Raises GraphError where a batch cannot be cut."""
    if n == 1:
        return [(args, kwargs)]
    tensors = tensors_in(kwargs, tensors_in(args, []))
    for t in tensors:
        if t.dim() and t.shape[0] % n:
            raise GraphError(
                f"a batch of {t.shape[0]} (dim 0 of an input of shape {list(t.shape)}) cannot be cut into {n} micro-batches of one size: "
                "set_gradient_accumulation_steps must divide it"
            )
    columns = [_parts(t, n) for t in tensors]
    out = []
    for i in range(n):
        these = iter([column[i] for column in columns])
        out.append((replaced(args, these), replaced(kwargs, these)))
    return out


def _parts(t: torch.Tensor, n: int) -> list[torch.Tensor]:
    if not t.dim():
        return [t] * n
    if not isinstance(t, GlobalTensor):
        return list(t.tensor_split(n))
    spec = t._spec
    part = spec.replace(shape=(spec.shape[0] // n, *spec.shape[1:]))
    ranks = spec.placement.flat
    # Each rank cuts what it has: a micro-batch is then some rows of every rank's, and nothing moves.
    if all(spec.local_shape(r)[0] == n * part.local_shape(r)[0] for r in ranks):
        if not t._local.numel() and t._local.dim() != len(spec.shape):
            return [GlobalTensor.wrap(t._local, part) for _ in range(n)]
        return [GlobalTensor.wrap(local, part) for local in t._local.tensor_split(n)]
    return list(t.tensor_split(n))


def join(outs: Sequence[Any]) -> Any:
    """The results of the micro-batches as one: joined along dim 0, scalars averaged; what is no tensor is the first's."""
    first = outs[0]
    if len(outs) == 1:
        return first
    columns = list(zip(*[tensors_in(out, []) for out in outs], strict=True))
    return replaced(first, iter([_joined(list(column)) for column in columns]))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    if not first.dim():
        return torch.stack(parts).mean(0) if first.is_floating_point() or first.is_complex() else torch.stack(parts)
    if isinstance(first, GlobalTensor):
        spec = first._spec
        whole = spec.replace(shape=(spec.shape[0] * len(parts), *spec.shape[1:]))
        if all(whole.local_shape(r)[0] == len(parts) * spec.local_shape(r)[0] for r in spec.placement.flat):
            locals_ = [p._local for p in parts]
            if locals_[0].dim() == len(spec.shape):
                return GlobalTensor.wrap(torch.cat(locals_), whole)
            return GlobalTensor.wrap(locals_[0], whole)
    return torch.cat(parts)
