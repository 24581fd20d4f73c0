"""The runtime of pipelines: run one rank's part of a schedule.

`pipelined_graph` makes a `Pipeline` for a graph; users may make their own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..._tensor.gradients.reducer import no_sync
from ...boxing import box
from ...distributed.world import world
from ...errors import ScheduleError, WorldError
from ...sharding.placement import Placement
from .schedule import Action, Schedule, Span
from .stage import Stage
from .stage_transfer import Edge, Route, Transfer, lane_of

__all__ = ["Pipeline"]

Inputs = Mapping[int, Sequence[Mapping[int, Tensor]]]


class Pipeline:
    """A pipeline: the stages of this rank, driven by a schedule.

    Every rank makes the same pipeline, except for ``stages``: those that the rank holds, by number.

    ``placements`` holds the placement of each stage; ranks may hold several stages, all on one
    lane. ``edges`` are the values that cross from stage to stage; each input of a stage has one
    edge. ``outputs`` names the outputs of a stage that a run returns, by stage. By default these
    are its loss and the outputs that no edge uses. ``credits`` is the number of receives of an edge
    that are posted ahead. ``trace``: record in `spans` when this rank ran which action, in seconds
    since 1970.

    The schedule is not checked (`check` does that). Raises ScheduleError if stages, edges and
    schedule do not fit together.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        placements: Sequence[Placement],
        edges: Sequence[Edge],
        schedule: Schedule,
        *,
        outputs: Mapping[int, Iterable[int]] | None = None,
        credits: int = 2,
        trace: bool = False,
    ) -> None:
        this_world = world()
        _check(stages, placements, edges, schedule, credits, this_world.rank)
        self.stages, self.schedule, self.trace = dict(stages), schedule, trace
        self.spans: list[Span] = []
        self._world = this_world
        self.lanes = lanes = lane_of([p.flat for p in placements], schedule)
        #: Pairs of stages (source, target) between which values cross; start and end of the
        #: optimizer steps after a run.
        self.crossing = {(e.source, e.target) for e in edges if e.source >= 0}
        self.stepped: tuple[float, float] | None = None
        self._lane = lanes.get(this_world.rank, -1)
        self._row = (
            [action for action in schedule.rows[self._lane] if action.stage in self.stages]
            if self.stages
            else []
        )
        self._split = {action.stage for action in self._row if action.kind == "I"}
        self._transfer = Transfer(this_world, edges, schedule, lanes, credits)
        values = {r.number: r for r in self._transfer.routes if not r.back}
        #: The route of each input of a stage; None: the call.
        self._into = {
            k: [
                values.get(n)
                for n, e in sorted(enumerate(edges), key=lambda ne: ne[1].input)
                if e.target == k
            ]
            for k in self.stages
        }
        self._back = {
            k: [r for r in self._transfer.routes if r.back and r.stages[1] == k]
            for k in self.stages
        }
        self._wanted = {
            k: None if outputs is None else frozenset(outputs.get(k, ())) for k in self.stages
        }
        self._taken = {k: frozenset(e.output for e in edges if e.source == k) for k in self.stages}
        self._devices = {placements[k].type for k in self.stages} - {"cpu", "meta"}
        self._failed, self._mark = "", 0.0

    def run(
        self, inputs: Inputs | None = None, loss_scale: float = 1.0
    ) -> dict[int, list[tuple[Tensor | None, ...]]]:
        """Run all micro-batches once, and return the outputs by stage of this rank and micro-batch.

        Outputs are detached, and None if they were not asked for. ``inputs`` holds the local inputs
        that come from the call, by stage, micro-batch and number. ``loss_scale`` multiplies every
        loss where backward starts; it is 1 / micro-batches for their mean. Gradients of weights are
        added to their ``.grad`` and are not summed over the ranks. All ranks of the placements must
        call this method; others may. Raises WorldError if a rank does not answer in time. The
        pipeline cannot run again then.
        """
        if not self._row:
            return {}
        if self._failed:
            raise WorldError(
                f"rank {self._world.rank}: this pipeline has failed ({self._failed}); messages of "
                "the failed run may still be in transit: create a new world"
            )
        _check_inputs(inputs or {}, self._into, self.schedule.micros)
        outputs: dict[int, list[tuple[Tensor | None, ...]]] = {
            k: [()] * self.schedule.micros for k in self.stages
        }
        self.spans, self.stepped = [], None
        try:
            with no_sync() if self.schedule.trains else contextlib.nullcontext():
                self._transfer.begin()
                self._mark = self._clock() if self.trace else 0.0
                for action in self._row:
                    if action.kind == "F":
                        outputs[action.stage][action.micro] = self._forward(action, inputs or {})
                    else:
                        self._backward(action, loss_scale)
                self._transfer.finish()
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            self._transfer.forget()
            for stage in self.stages.values():
                stage.forget()
            raise
        return outputs

    def _forward(self, action: Action, inputs: Inputs) -> tuple[Tensor | None, ...]:
        _, stage, micro = action
        routes = self._into[stage]
        stage_inputs = [
            inputs[stage][micro][i] if route is None else self._transfer.receive(route, micro)
            for i, route in enumerate(routes)
        ]
        start = self._start()
        self._transfer.go_on()
        outputs = self.stages[stage].forward(
            micro, stage_inputs, self.schedule.trains, stage in self._split
        )
        del stage_inputs
        if len(outputs) <= max(self._taken[stage], default=-1):
            raise ScheduleError(
                f"stage {stage} returns {len(outputs)} outputs; an edge uses output number "
                f"{max(self._taken[stage])}"
            )
        leaving = self._transfer.leaving("F", stage)
        self._hand_over(action, start, [(route, outputs[route.edge.output]) for route in leaving])
        return tuple(t if self._keeps(stage, i) else None for i, t in enumerate(outputs))

    def _keeps(self, stage: int, output: int) -> bool:
        wanted, loss = self._wanted[stage], self.stages[stage].loss
        if wanted is not None:
            return output in wanted
        return output not in self._taken[stage] or (loss is not None and loss[0] == output)

    def _backward(self, action: Action, loss_scale: float) -> None:
        kind, number, micro = action
        stage = self.stages[number]
        if kind == "W":
            start = self._start()
            stage.backward_weight(micro)
            self._transfer.collect()
            self._record_span(action, start)
            return
        grads: dict[int, Tensor] = {}
        for route in self._back[number]:
            grad = self._transfer.receive(route, micro)
            output = route.edge.output
            grads[output] = grads[output].add_(grad) if output in grads else grad
        start = self._start()
        self._transfer.go_on()
        input_grads = (stage.backward if kind == "B" else stage.backward_input)(
            micro, grads, loss_scale
        )
        grads.clear()
        leaving = self._transfer.leaving(kind, number)
        # The duals of broadcast inputs are summed within the stage, by all its ranks in the same
        # order.
        self._hand_over(
            action,
            start,
            [
                (route, self._box_gradient(route, input_grads.pop(route.edge.input)))
                for route in leaving
            ],
        )

    def _hand_over(self, action: Action, start: float, values: list[tuple[Route, Tensor]]) -> None:
        """Send the values that an action leaves.

        On the host, sending is part of the action's time. On a device it is queued, and a trace
        that waited for it would wait for other ranks."""
        if self._devices:
            self._record_span(action, start)
        while values:
            self._transfer.send(values[0][0], action.micro, values.pop(0)[1])
        if not self._devices:
            self._record_span(action, start)

    def _box_gradient(self, route: Route, grad: Tensor) -> Tensor:
        spec = route.edge.dst
        return box(
            grad,
            spec.dual(),
            spec,
            why=f"gradient of input {route.edge.input} of stage {route.edge.target}",
        )

    def _start(self) -> float:
        """Return when an action began, for a trace: as soon as its inputs had arrived.

        On the host, this is the end of the action before it, plus the time waited since. A device
        waits on its own."""
        waited, self._transfer.waited = self._transfer.waited, 0.0
        if not self.trace:
            return 0.0
        return self._clock() if self._devices else self._mark + waited

    def _clock(self) -> float:
        # Work queued on a device has no time of its own, so a trace waits for it.
        for kind in self._devices:
            torch.accelerator.synchronize(self._world.device(kind))
        return time.time()

    def _record_span(self, action: Action, start: float) -> None:
        if self.trace:
            self._mark = self._clock()
            self.spans.append(Span(self._lane, action, start, self._mark))


def _check(
    stages: Mapping[int, Stage],
    placements: Sequence[Placement],
    edges: Sequence[Edge],
    schedule: Schedule,
    credits: int,
    rank: int,
) -> None:
    if len(placements) != schedule.stages:
        raise ScheduleError(
            f"the schedule {schedule.name} is for {schedule.stages} stages, but there are "
            f"{len(placements)} placements"
        )
    own_stages = [k for k, p in enumerate(placements) if p.coordinate(rank) is not None]
    if sorted(stages) != own_stages:
        raise ScheduleError(
            f"rank {rank} is in the placements of stages {own_stages}, but was passed stages "
            f"{sorted(stages)}"
        )
    if credits < 1:
        raise ScheduleError(f"credits must be at least 1, not {credits}")
    lies: dict[tuple[int, int], Edge] = {}
    for edge in edges:
        _check_edge(edge, placements)
        other = lies.setdefault((edge.source, edge.output), edge)
        if edge.source >= 0 and other.src is not edge.src:
            raise ScheduleError(
                f"output {edge.output} of stage {edge.source} has the layout {other.src} for one "
                f"edge and {edge.src} for another"
            )
    for k in range(schedule.stages):
        into = sorted(e.input for e in edges if e.target == k)
        if into != list(range(len(into))):
            raise ScheduleError(
                f"stage {k} gets inputs {into}: each input, counted from 0, needs one edge"
            )
    for k, stage in stages.items():
        wanted = {e.input for e in edges if e.target == k and e.differentiable}
        if not wanted <= stage.differentiable:
            raise ScheduleError(
                f"edges into stage {k} need gradients of its inputs {sorted(wanted)}; the stage "
                f"computes those of {sorted(stage.differentiable)}"
            )


def _check_edge(edge: Edge, placements: Sequence[Placement]) -> None:
    name = (
        f"the edge from output {edge.output} of stage {edge.source} to input {edge.input} of "
        f"stage {edge.target}"
    )
    if not -1 <= edge.source < edge.target < len(placements):
        raise ScheduleError(
            f"{name} does not go forward: its source must come before its target, which must be "
            f"one of {len(placements)} stages"
        )
    if edge.dst.placement is not placements[edge.target] or (
        edge.source >= 0 and edge.src.placement is not placements[edge.source]
    ):
        raise ScheduleError(
            f"{name} goes from {edge.src.placement} to {edge.dst.placement}, which are not the "
            f"placements of its stages"
        )
    if edge.source < 0:
        if edge.differentiable:
            raise ScheduleError(
                f"{name} comes from the call, which accepts no gradient: the edge must not be "
                "differentiable"
            )
        return
    if edge.src.shape != edge.dst.shape or edge.src.dtype is not edge.dst.dtype:
        raise ScheduleError(
            f"{name} changes the shape or dtype of its value: {edge.src} to {edge.dst}"
        )
    if any(e.is_partial for e in (*edge.src.layout, *edge.dst.layout)):
        raise ScheduleError(
            f"{name} is partial ({edge.src} to {edge.dst}): values cross stages as broadcast or "
            "split"
        )


def _check_inputs(inputs: Inputs, into: Mapping[int, Sequence[Route | None]], micros: int) -> None:
    for stage, routes in into.items():
        wanted = {i for i, route in enumerate(routes) if route is None}
        rows = inputs.get(stage, ())
        if wanted and (len(rows) != micros or any(not wanted <= set(row) for row in rows)):
            passed_numbers = [sorted(row) for row in rows]
            raise ScheduleError(
                f"stage {stage} needs its inputs {sorted(wanted)} from the call for each of "
                f"{micros} micro-batches; the call passes {passed_numbers}"
            )
