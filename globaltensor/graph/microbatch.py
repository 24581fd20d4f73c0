"""Micro-batches: split a batch along dim 0, and join the results again.

`Graph` calls `MicrobatchSplit` at each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._base.pytree import object_tensors, replaced_in_objects
from .._tensor.global_tensor import GlobalTensor
from .._tensor.pending_tensor import local_of
from ..errors import GraphError
from ..sharding.spec import Spec

__all__ = ["MicrobatchSplit"]


class MicrobatchSplit:
    """The batch of one call, split into ``n`` micro-batches.

    If all inputs are split over the ranks into the same blocks of rows, each rank splits its local
    rows. A micro-batch is then some rows of every block, and nothing is communicated. Otherwise a
    micro-batch is ``1 / n`` of the rows in a run, and inputs with another layout are boxed. Raises
    GraphError if a batch cannot be split.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], n: int) -> None:
        self.args, self.kwargs, self.n = args, kwargs, n
        self.tensors = object_tensors(kwargs, object_tensors(args, [])) if n > 1 else []
        for t in self.tensors:
            if t.dim() and t.shape[0] % n:
                raise GraphError(
                    f"a batch of {t.shape[0]} (dim 0 of an input of shape {list(t.shape)}) cannot "
                    f"be cut into {n} micro-batches of one size: "
                    "set_gradient_accumulation_steps must divide it"
                )
        blocks = {_blocks(t) if isinstance(t, GlobalTensor) else 1 for t in self.tensors if t.dim()}
        #: Number of blocks of rows if a micro-batch takes rows of each block; 1 if it is a run of
        #: rows.
        self.blocks = (
            blocks.pop()
            if len(blocks) == 1 and all(_splits_locally(t, n) for t in self.tensors)
            else 1
        )

    def split(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return (args, kwargs) of each micro-batch. Tensors without dims go to each."""
        if self.n == 1:
            return [(self.args, self.kwargs)]
        columns = [self._split_rows(t) for t in self.tensors]
        out = []
        for i in range(self.n):
            these = iter([column[i] for column in columns])
            out.append(
                (replaced_in_objects(self.args, these), replaced_in_objects(self.kwargs, these))
            )
        return out

    def _split_rows(self, t: torch.Tensor) -> list[torch.Tensor]:
        if not t.dim():
            return [t] * self.n
        if not isinstance(t, GlobalTensor) or _blocks(t) != self.blocks:
            return list(t.tensor_split(self.n))
        t = t._materialize()
        spec = t._spec
        part = spec.replace(shape=(spec.shape[0] // self.n, *spec.shape[1:]))
        if _is_placeholder(t._local, spec):
            return [GlobalTensor.wrap(t._local, part) for _ in range(self.n)]
        return [GlobalTensor.wrap(local, part) for local in t._local.tensor_split(self.n)]

    def join(self, outs: Sequence[Any]) -> Any:
        """Join the results of the micro-batches into one.

        Tensors are concatenated along dim 0 in the batch's order, and scalars are averaged. A value
        that is not a tensor is taken from the first micro-batch."""
        first = outs[0]
        if len(outs) == 1:
            return first
        columns = list(zip(*[object_tensors(out, []) for out in outs], strict=True))
        return replaced_in_objects(
            first, iter([self._join_rows(list(column)) for column in columns])
        )

    def _join_rows(self, parts: list[torch.Tensor]) -> torch.Tensor:
        first = parts[0]
        if not first.dim():
            return (
                torch.stack(parts).mean(0)
                if first.is_floating_point() or first.is_complex()
                else torch.stack(parts)
            )
        if isinstance(first, GlobalTensor) and _blocks(first) == self.blocks:
            spec = first._spec
            whole = spec.replace(shape=(spec.shape[0] * self.n, *spec.shape[1:]))
            if all(
                whole.local_shape(r)[0] == self.n * spec.local_shape(r)[0]
                for r in spec.placement.flat
            ):
                locals_ = list(map(local_of, parts))
                return GlobalTensor.wrap(
                    locals_[0] if _is_placeholder(locals_[0], spec) else torch.cat(locals_), whole
                )
        joined = torch.cat(parts)
        rows = next((t.shape[0] // self.n for t in self.tensors if t.dim()), 0)
        if self.blocks == 1 or first.shape[0] != rows:
            return joined
        # The rows are ordered by micro-batch, then by block. Reorder them by block.
        shape = joined.shape
        return (
            joined.reshape(self.n, self.blocks, rows // self.blocks, *shape[1:])
            .transpose(0, 1)
            .reshape(shape)
        )


def _blocks(t: GlobalTensor) -> int:
    """Return the number of blocks of rows into which a tensor is split."""
    count = 1
    for a, e in enumerate(t._spec.layout):
        if e.is_split and e.dim == 0:
            count *= t._spec.placement.shape[a]
    return count


def _splits_locally(t: torch.Tensor, n: int) -> bool:
    """Return True if every rank's rows can be split into ``n`` micro-batches without communication.

    Each rank's local rows must then be those that it holds of the micro-batches."""
    if not t.dim() or not isinstance(t, GlobalTensor):
        return True
    spec = t._spec
    part = spec.replace(shape=(spec.shape[0] // n, *spec.shape[1:]))
    count = _blocks(t)
    return spec.shape[0] % (n * count) == 0 and all(
        spec.local_shape(r)[0] == n * part.local_shape(r)[0] for r in spec.placement.flat
    )


def _is_placeholder(local: torch.Tensor, spec: Spec) -> bool:
    """Return True if ``local`` is the placeholder of a rank outside the placement."""
    return not local.numel() and local.dim() != len(spec.shape)
