"""A graph with stages, ready to run: its stages' programs, their edges, and a schedule.

`Graph` makes a `PipelinedGraph` when modules have stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..._ops import random_streams as draws
from ...distributed.world import placeholder
from ...sharding.placement import Placement
from ...sharding.spec import Spec
from .. import passes
from ..capture.capture import CaptureResult
from ..passes.lower import lower
from ..program.nodes import RandomCall
from ..program.program import Program, State
from .partition import cut
from .runtime import Pipeline
from .schedule import Schedule
from .split_backward import DEFERRED, LIGHTER
from .stage import Stage
from .validate_schedule import resolve_schedule

__all__ = ["PipelinedGraph", "lanes"]


def lanes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the lane of each stage: stages that share ranks share a lane."""
    groups: list[set[int]] = []
    for p in placements:
        ranks = set(p.flat)
        near = [g for g in groups if g & ranks]
        groups = [g for g in groups if not g & ranks] + [ranks.union(*near)]
    lane_groups: list[set[int]] = []
    for p in placements:
        group = next(g for g in groups if p.flat[0] in g)
        if group not in lane_groups:
            lane_groups.append(group)
    return tuple(lane_groups.index(next(g for g in groups if p.flat[0] in g)) for p in placements)


class _MicrobatchState:
    """The current micro-batch of a rank, and the keys of the step's random numbers.

    The keys are those that the micro-batches would draw one after another."""

    def __init__(self) -> None:
        self.draws, self.first, self.micro = 0, 0, 0


class _MicrobatchRandomCall(RandomCall):
    """A random op of a stage, whose numbers depend on the micro-batch, not on the schedule.

    When it is recomputed, it draws the same numbers again."""

    __module__ = "steps"
    repeats = True

    def __init__(self, draw: RandomCall, number: int, turn: _MicrobatchState) -> None:
        super().__init__(draw.function, draw.coordinate)
        self.__name__, self.number, self.turn = draw.__name__, number, turn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        turn = self.turn
        return draws.run_with_key(
            self.function,
            args,
            kwargs,
            self.coordinate,
            turn.first,
            turn.micro * turn.draws + self.number,
        )


class _Stage(Stage):
    """A stage that records which micro-batch runs, in forward or (recomputed) in backward."""

    def __init__(
        self,
        function: Callable[..., Sequence[torch.Tensor]],
        differentiable: Any,
        loss: Any,
        turn: _MicrobatchState,
    ) -> None:
        super().__init__(function, differentiable, loss)
        self.turn = turn

    def forward(self, micro: int, *args: Any, **kwargs: Any) -> Any:
        self.turn.micro = micro
        return super().forward(micro, *args, **kwargs)

    def backward(self, micro: int, *args: Any, **kwargs: Any) -> Any:
        self.turn.micro = micro
        return super().backward(micro, *args, **kwargs)

    def backward_input(self, micro: int, *args: Any, **kwargs: Any) -> Any:
        self.turn.micro = micro
        return super().backward_input(micro, *args, **kwargs)


class PipelinedGraph:
    """A graph with stages that runs the micro-batches of a call."""

    def __init__(
        self,
        captured: CaptureResult,
        placements: Sequence[Placement],
        inputs: Sequence[torch.Tensor],
        states: Sequence[State],
        micros: int,
        wanted: Any,
        credits: int,
        name: str,
        backend: str | None = None,
    ) -> None:
        self.captured, self.micros = captured, micros
        self.turn = _MicrobatchState()
        drawn = [
            n
            for n in captured.program.nodes
            if isinstance(n.target, RandomCall) and n.kwargs.get("generator") is None
        ]
        for i, node in enumerate(drawn):  # numbers agree on every rank; outside ranks skip draws
            node.target = _MicrobatchRandomCall(node.target, i, self.turn)  # type: ignore[arg-type]
        self.turn.draws = len(drawn)
        made = cut(captured, placements, inputs)
        crossing = {(e.source, e.target) for e in made.edges if e.source >= 0}
        if not captured.scaled:
            wanted = "forward"
        self.schedule: Schedule = resolve_schedule(wanted, lanes(placements), micros, crossing)
        split = any(action.kind == "I" for row in self.schedule.rows for action in row)
        self.programs: dict[int, Program] = {}
        stages = {}
        if split:
            for part in made.parts.values():
                defer(part.graph)
        ready = passes.agreed({k: part.graph for k, part in made.parts.items()})
        for k, part in made.parts.items():
            part.graph = ready[k]
            lower(part.graph, captured.constants, backend)
            if split and backend is None:
                lighten(part.graph)
            program = self.programs[k] = Program(
                part.graph, captured.constants, states, len(part.needs), f"{name}_stage_{k}"
            )
            differentiable = {i for i, need in enumerate(part.needs) if need.differentiable}
            stages[k] = _Stage(_runner(program), differentiable, part.loss, self.turn)
        wanted_outputs: dict[int, list[int]] = {}
        for stage, number in made.results:
            wanted_outputs.setdefault(stage, []).append(number)
        self.results, self.fed = made.results, made.fed
        self.specs = list(_specs_of(captured))
        outputs = {k: wanted_outputs.get(k, ()) for k in range(len(placements))}
        self.pipeline = Pipeline(
            stages, placements, made.edges, self.schedule, outputs=outputs, credits=credits
        )

    def __call__(
        self, micros: Sequence[Sequence[torch.Tensor]], scale: float
    ) -> list[list[torch.Tensor]]:
        """Run the micro-batches from their local inputs, and return the local results of each.

        Results are empty on ranks that do not hold them."""
        inputs: dict[int, list[dict[int, torch.Tensor]]] = {
            k: [{} for _ in micros] for k in self.pipeline.stages
        }
        for (stage, number), source in self.fed.items():
            if stage in inputs:
                for i, micro_inputs in enumerate(micros):
                    inputs[stage][i][number] = micro_inputs[source]
        if self.turn.draws:
            self.turn.first = draws.reserve_keys(self.turn.draws * len(micros))
        stage_outputs = self.pipeline.run(inputs, scale)
        out = []
        for i in range(len(micros)):
            row = []
            for (stage, number), spec in zip(self.results, self.specs, strict=True):
                value = stage_outputs[stage][i][number] if stage in stage_outputs else None
                row.append(placeholder(spec) if value is None else value)
            out.append(row)
        return out

    @property
    def module(self) -> fx.GraphModule:
        """The stages' programs on this rank, as children of one fx module."""
        root, graph = torch.nn.Module(), fx.Graph()
        for k, program in self.programs.items():
            root.add_module(f"stage_{k}", program.module)
            graph.call_module(
                f"stage_{k}",
                tuple(
                    graph.placeholder(f"stage_{k}_{n.name}")
                    for n in program.module.graph.nodes
                    if n.op == "placeholder"
                ),
            )
        graph.output(None)
        return fx.GraphModule(root, graph, "Pipeline")


def _runner(program: Program) -> Callable[..., Sequence[torch.Tensor]]:
    return lambda *inputs: program(inputs)


def _specs_of(captured: CaptureResult) -> list[Spec]:
    from .partition import _specs

    return [spec for spec in _specs(captured.structure) if spec is not None]


def defer(graph: fx.Graph) -> None:
    """Replace products and convolutions with a parameter by functions that defer its gradient.

    Zero-bubble schedules need this."""
    for node in graph.nodes:
        if (
            node.op not in ("call_function", "call_method")
            or len(node.args) < 2
            or not isinstance(node.args[1], fx.Node)
            or "state" not in node.args[1].meta
        ):
            continue  # a value of another stage must have its gradient before that is sent back
        other = (
            node.target
            if node.op == "call_function"
            else getattr(torch.Tensor, str(node.target), None)
        )
        if other in DEFERRED:
            node.op, node.target = "call_function", DEFERRED[other]


def lighten(graph: fx.Graph) -> None:
    """Replace deferring products by lighter ones, where a program runs uncompiled.

    Recomputed parts are separate modules by now, and stay as they are."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in LIGHTER:
            node.target = LIGHTER[node.target]
