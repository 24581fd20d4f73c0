"""The replay of a recorded job in the ``build()`` of a graph.

The session's engine creates one `JobGraph` for each job. In the consistent view, ops run on global
tensors; in the mirrored view, on this device's local tensors. Boxing changes placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..._base.pytree import object_tensors, replaced_in_objects
from ..._ops.creation import full
from ..._tensor.global_tensor import GlobalTensor
from ...distributed.world import world
from ...graph.graph import Graph
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp, broadcast, partial_sum, split
from ..session.device_layout import Layout
from .record import BlobRef, Given, Record, RecordedOp

__all__ = ["HOME", "JobGraph", "Variables"]

HOME = Placement("cpu", [0])  # arrays enter and leave through the master's process

# the tensors of a value: one, or one for each piece of an unpacked blob, in order
Pieces = list[Any]


class Variables(torch.nn.Module):
    """The variables of a job by name. Several jobs share the same parameters."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__()
        # Names of variables may contain characters that torch forbids.
        self.numbers = {name: str(i) for i, name in enumerate(named)}
        self.held = torch.nn.ParameterDict(
            dict(zip(self.numbers.values(), named.values(), strict=True))
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.held[self.numbers[name]]
        return found


class JobGraph(Graph):
    """A job as a graph.

    Inputs are global tensors at `HOME`. Results are there too, as one list of pieces for each value
    that the job returns.
    """

    def __init__(self, record: Record, layout: Layout, variables: Variables) -> None:
        super().__init__()
        self.variables = variables
        self.__dict__["_job"] = record, layout

    def build(self, *inputs: torch.Tensor) -> list[Pieces]:
        record, layout = self._job
        replay = _Replay(record, layout, self.variables)
        for given, value in zip(record.inputs, inputs, strict=True):
            replay.take(given, value)
        for step in record.steps:
            replay.run(step)
        if record.training:
            replay.loss().backward()
        return [
            [replay.gather_on_master(ref, value) for value in replay.values[ref.index]]
            for ref in record.returned
        ]


class _Replay:
    def __init__(self, record: Record, layout: Layout, variables: Variables) -> None:
        self.record, self.layout, self.variables = record, layout, variables
        self.everyone = layout.placement(layout.all)
        self.values: dict[int, Pieces] = {}
        self._brought: dict[tuple[int, int, Placement], torch.Tensor] = {}

    def take(self, job_input: Given, value: torch.Tensor) -> None:
        """Box an input to the job's devices, split along its batch dim if it has one.

        In the mirrored view, ``value`` holds the devices' arrays along a new first dim.
        """
        where = self.layout.placement(job_input.devices)
        if job_input.mirrored:
            value = value.to_global(where, split(0)).to_local()[0]  # type: ignore[attr-defined]
        else:
            sbp = broadcast if job_input.split is None else split(job_input.split)
            value = value.to_global(where, sbp)  # type: ignore[attr-defined]
        self.values[job_input.index] = [value]

    def run(self, step: RecordedOp) -> None:
        own = getattr(self, f"_{step.op}") if isinstance(step.op, str) else None
        where = self.layout.placement(step.devices)
        if own is not None:
            self.values[step.outs[0]] = own(step, where, *step.args)
            return
        pieces: list[Pieces] = [[] for _ in step.outs]
        refs = object_tensors((step.args, step.kwargs), [], BlobRef)
        for i in range(step.times):
            given = [self._box_piece(ref, i, where, step.mirrored) for ref in refs]
            args, kwargs = replaced_in_objects((step.args, step.kwargs), iter(given), BlobRef)
            for kept, made in zip(
                pieces, object_tensors(step.op(*args, **kwargs), []), strict=True
            ):  # type: ignore[operator]
                kept.append(made)
        self.values.update(zip(step.outs, pieces, strict=True))

    def loss(self) -> torch.Tensor:
        """Return the training objective: the sum of the losses' means over their elements."""
        total: Any = None
        for ref in self.record.losses:
            pieces = self.values[ref.index]
            for piece in pieces:
                mean = piece.mean() / len(pieces)
                if self.record.mirrored_of[ref.index]:
                    mean = (mean / self.layout.size).to_global(self.everyone, partial_sum)
                if total is not None and total.placement is not mean.placement:
                    mean = mean.to_global(total.placement, broadcast)
                total = mean if total is None else total + mean
        return total  # type: ignore[no-any-return]

    def gather_on_master(self, ref: BlobRef, value: Any) -> torch.Tensor:
        """Gather a result on the master.

        In the mirrored view, the result has one entry for each device along a new first dim.
        """
        if self.record.mirrored_of[ref.index]:
            value = value.detach().unsqueeze(0).to_global(self.everyone, split(0))
        found: torch.Tensor = value.to_global(HOME, broadcast)
        return found

    def _box_piece(self, ref: BlobRef, i: int, where: Placement, mirrored: bool) -> Any:
        pieces = self.values[ref.index]
        i = i if len(pieces) > 1 else 0
        value = pieces[i]
        if mirrored or not isinstance(value, GlobalTensor) or value.placement is where:
            return value
        key = ref.index, i, where
        boxed = self._brought.get(key)
        if boxed is None:
            boxed = self._brought[key] = moved(value, where)
        return boxed

    # The replay's own steps: methods that turn (step, placement, arguments) into pieces

    def _variable(self, step: RecordedOp, where: Placement, name: str, trainable: bool) -> Pieces:
        value = self.variables[name]
        if not trainable:
            value = value.detach()
        if value.placement is not where:  # type: ignore[attr-defined]
            value = moved(value, where)
        if step.mirrored:
            value = value.to_global(sbp=broadcast).to_local()  # type: ignore[attr-defined]
        return [value]

    def _cast(
        self, step: RecordedOp, where: Placement, ref: BlobRef, sbp: Sbp | None, grad: Sbp | None
    ) -> Pieces:
        return [
            x.to_global(sbp=x.sbp if sbp is None else sbp, grad_sbp=grad)
            for x in self._boxed_pieces(ref, step, where)
        ]

    def _constant(
        self,
        step: RecordedOp,
        where: Placement,
        value: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Pieces:
        if step.mirrored:
            return [torch.full(tuple(shape), value, dtype=dtype, device=world().device(where.type))]
        return [full(tuple(shape), value, dtype=dtype, placement=where, sbp=broadcast)]

    def _assign(
        self, step: RecordedOp, where: Placement, name: str, ref: BlobRef, keep: float
    ) -> Pieces:
        """Write a value into a variable; several pieces are written one after the other.

        In the mirrored view, the mean of the devices' values is written.
        """
        held = self.variables[name]
        with torch.no_grad():
            for value in self._boxed_pieces(ref, step, where):
                if step.mirrored:
                    value = (value / self.layout.size).to_global(self.everyone, partial_sum)
                value = value.detach().to_global(held.placement, held.sbp)  # type: ignore[attr-defined]
                held.copy_(held * keep + value * (1.0 - keep) if keep else value)
        return self._variable(step, where, name, False)

    def _random(
        self, step: RecordedOp, where: Placement, op: Any, ref: BlobRef, *args: Any
    ) -> Pieces:
        """Run an op that draws random numbers.

        Each shard of a split batch gets its own numbers. In the mirrored view, each device does.
        """
        out = []
        for x in self._boxed_pieces(ref, step, where):
            if step.mirrored:
                out.append(
                    op(x.unsqueeze(0).to_global(self.everyone, split(0)), *args).to_local()[0]
                )
            else:
                out.append(op(x, *args))
        return out

    def _unpack(self, step: RecordedOp, where: Placement, ref: BlobRef, pieces: int) -> Pieces:
        out = []
        for x in self._boxed_pieces(ref, step, where):
            rows = x.shape[0] // pieces
            out += [_with_layout_of(x, x[i * rows : (i + 1) * rows]) for i in range(pieces)]
        return out

    def _pack(self, step: RecordedOp, where: Placement, ref: BlobRef, pieces: int) -> Pieces:
        parts = self._boxed_pieces(ref, step, where)
        return [
            _with_layout_of(parts[i], torch.cat(parts[i : i + pieces]))
            for i in range(0, len(parts), pieces)
        ]

    def _repeat(self, step: RecordedOp, where: Placement, ref: BlobRef, times: int) -> Pieces:
        return [x for x in self._boxed_pieces(ref, step, where) for _ in range(times)]

    def _acc(self, step: RecordedOp, where: Placement, ref: BlobRef, times: int) -> Pieces:
        parts = self._boxed_pieces(ref, step, where)
        return [sum(parts[i + 1 : i + times], parts[i]) for i in range(0, len(parts), times)]

    def _own(self, step: RecordedOp, where: Placement, ref: BlobRef, variable: bool) -> Pieces:
        return [
            x.to_global(self.everyone, broadcast if variable else split(0)).to_local()
            for x in self.values[ref.index]
        ]

    def _joined(self, step: RecordedOp, where: Placement, ref: BlobRef, variable: bool) -> Pieces:
        out = []
        for x in self.values[ref.index]:
            if variable:  # replicated: use the first device's copy
                x = x.unsqueeze(0).to_global(self.everyone, split(0))[0]
            else:
                x = (x if x.dim() else x.unsqueeze(0)).to_global(self.everyone, split(0))
            out.append(moved(x, where))
        return out

    def _boxed_pieces(self, ref: BlobRef, step: RecordedOp, where: Placement) -> Pieces:
        return [
            self._box_piece(ref, i, where, step.mirrored)
            for i in range(len(self.values[ref.index]))
        ]


def moved(x: Any, where: Placement) -> Any:
    """Box a global tensor to another placement, keeping its sbp; partial becomes broadcast."""
    return x.to_global(where, [broadcast if e.is_partial else e for e in x.sbp])


def _with_layout_of(like: Any, x: Any) -> Any:
    return (
        x.to_global(sbp=[broadcast if e.is_partial else e for e in like.sbp])
        if isinstance(x, GlobalTensor) and x.sbp != like.sbp
        else x
    )
