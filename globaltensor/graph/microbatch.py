"""Micro-batches: how a batch is cut along dim 0, and how what comes out is joined again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._base.pytree import object_tensors, replaced_in_objects
from .._tensor.global_tensor import GlobalTensor
from ..sharding.spec import Spec
from .errors import GraphError

__all__ = ["MicrobatchSplit"]


class MicrobatchSplit:
    """How the batch of one call is cut into ``n`` micro-batches.

    Where all inputs are split over the ranks into the same blocks of rows, each rank cuts what it
    has: a micro-batch is some rows of every block, and nothing moves. Else a micro-batch is ``1 /
    n`` of the rows in a run, and inputs that are split otherwise are boxed. Raises GraphError where
    a batch cannot be cut.
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
        #: Blocks of rows that ranks hold, if a micro-batch takes rows of each; 1: it is a run of
        #: rows.
        self.blocks = (
            blocks.pop() if len(blocks) == 1 and all(_even(t, n) for t in self.tensors) else 1
        )

    def split(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """(args, kwargs) of each micro-batch. Tensors without dims go to each."""
        if self.n == 1:
            return [(self.args, self.kwargs)]
        columns = [self._parts(t) for t in self.tensors]
        out = []
        for i in range(self.n):
            these = iter([column[i] for column in columns])
            out.append(
                (replaced_in_objects(self.args, these), replaced_in_objects(self.kwargs, these))
            )
        return out

    def _parts(self, t: torch.Tensor) -> list[torch.Tensor]:
        if not t.dim():
            return [t] * self.n
        if not isinstance(t, GlobalTensor) or _blocks(t) != self.blocks:
            return list(t.tensor_split(self.n))
        spec = t._spec
        part = spec.replace(shape=(spec.shape[0] // self.n, *spec.shape[1:]))
        if _absent(t._local, spec):
            return [GlobalTensor.wrap(t._local, part) for _ in range(self.n)]
        return [GlobalTensor.wrap(local, part) for local in t._local.tensor_split(self.n)]

    def join(self, outs: Sequence[Any]) -> Any:
        """The results of the micro-batches as one: joined along dim 0 in the batch's order, scalars
        averaged; what is no tensor is the first's."""
        first = outs[0]
        if len(outs) == 1:
            return first
        columns = list(zip(*[object_tensors(out, []) for out in outs], strict=True))
        return replaced_in_objects(first, iter([self._joined(list(column)) for column in columns]))

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
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
                locals_ = [p._local for p in parts]  # type: ignore[attr-defined]
                return GlobalTensor.wrap(
                    locals_[0] if _absent(locals_[0], spec) else torch.cat(locals_), whole
                )
        joined = torch.cat(parts)
        rows = next((t.shape[0] // self.n for t in self.tensors if t.dim()), 0)
        if self.blocks == 1 or first.shape[0] != rows:
            return joined
        # Micro-batch by micro-batch, of each the rows of every block: back to block by block.
        shape = joined.shape
        return (
            joined.reshape(self.n, self.blocks, rows // self.blocks, *shape[1:])
            .transpose(0, 1)
            .reshape(shape)
        )


def _blocks(t: GlobalTensor) -> int:
    """Into how many blocks of rows a tensor is split."""
    count = 1
    for a, e in enumerate(t._spec.layout):
        if e.is_split and e.dim == 0:
            count *= t._spec.placement.shape[a]
    return count


def _even(t: torch.Tensor, n: int) -> bool:
    """Whether every rank's rows can be cut into ``n``, and its parts are those of a micro-batch."""
    if not t.dim() or not isinstance(t, GlobalTensor):
        return True
    spec = t._spec
    part = spec.replace(shape=(spec.shape[0] // n, *spec.shape[1:]))
    count = _blocks(t)
    return spec.shape[0] % (n * count) == 0 and all(
        spec.local_shape(r)[0] == n * part.local_shape(r)[0] for r in spec.placement.flat
    )


def _absent(local: torch.Tensor, spec: Spec) -> bool:
    """A rank outside the placement holds a placeholder."""
    return not local.numel() and local.dim() != len(spec.shape)
