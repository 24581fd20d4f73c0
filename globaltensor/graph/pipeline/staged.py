"""A graph with stages, ready to run: its stages' programs, what crosses between them, and a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...placement import Placement
from ...spec import Spec
from ...wrapper import placeholder
from .. import passes
from ..capture import Captured
from ..lower import lower
from ..program import Program, State
from .check import fitted
from .deferred import DEFERRED
from .partition import cut
from .runtime import Pipeline
from .schedule import Schedule
from .stage import Stage

__all__ = ["Staged", "lanes"]


def lanes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """The lane of each stage: stages that share ranks share a lane."""
    groups: list[set[int]] = []
    for p in placements:
        mine = set(p.flat)
        near = [g for g in groups if g & mine]
        groups = [g for g in groups if not g & mine] + [mine.union(*near)]
    found: list[set[int]] = []
    for p in placements:
        group = next(g for g in groups if p.flat[0] in g)
        if group not in found:
            found.append(group)
    return tuple(found.index(next(g for g in groups if p.flat[0] in g)) for p in placements)


class Staged:
    """Runs the micro-batches of a call through the stages."""

    def __init__(
        self,
        captured: Captured,
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
        made = cut(captured, placements, inputs)
        crossing = {(e.source, e.target) for e in made.edges if e.source >= 0}
        if not captured.scaled:
            wanted = "forward"
        self.schedule: Schedule = fitted(wanted, lanes(placements), micros, crossing)
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
            program = self.programs[k] = Program(part.graph, captured.constants, states, len(part.needs), f"{name}_stage_{k}")
            differentiable = {i for i, need in enumerate(part.needs) if need.differentiable}
            stages[k] = Stage(_runner(program), differentiable, part.loss)
        wanted_outputs: dict[int, list[int]] = {}
        for stage, number in made.results:
            wanted_outputs.setdefault(stage, []).append(number)
        self.results, self.fed = made.results, made.fed
        self.specs = list(_specs_of(captured))
        outputs = {k: wanted_outputs.get(k, ()) for k in range(len(placements))}
        self.pipeline = Pipeline(stages, placements, made.edges, self.schedule, outputs=outputs, credits=credits)

    def __call__(self, micros: Sequence[Sequence[torch.Tensor]], scale: float) -> list[list[torch.Tensor]]:
        """The local inputs of each micro-batch -> the local results of each; empty ones on ranks that do not hold them."""
        inputs: dict[int, list[dict[int, torch.Tensor]]] = {k: [{} for _ in micros] for k in self.pipeline.stages}
        for (stage, number), source in self.fed.items():
            if stage in inputs:
                for i, given in enumerate(micros):
                    inputs[stage][i][number] = given[source]
        found = self.pipeline.run(inputs, scale)
        out = []
        for i in range(len(micros)):
            row = []
            for (stage, number), spec in zip(self.results, self.specs, strict=True):
                value = found[stage][i][number] if stage in found else None
                row.append(placeholder(spec) if value is None else value)
            out.append(row)
        return out

    @property
    def module(self) -> fx.GraphModule:
        """The stages' programs on this rank: an fx module whose children they are."""
        root, graph = torch.nn.Module(), fx.Graph()
        for k, program in self.programs.items():
            root.add_module(f"stage_{k}", program.module)
            graph.call_module(f"stage_{k}", tuple(graph.placeholder(f"stage_{k}_{n.name}") for n in program.module.graph.nodes if n.op == "placeholder"))
        graph.output(None)
        return fx.GraphModule(root, graph, "Pipeline")


def _runner(program: Program) -> Callable[..., Sequence[torch.Tensor]]:
    return lambda *inputs: program(inputs)


def _specs_of(captured: Captured) -> list[Spec]:
    from .partition import _specs

    return [spec for spec in _specs(captured.structure) if spec is not None]


def defer(graph: fx.Graph) -> None:
    """Let products and convolutions with a parameter leave its gradient for later (zero-bubble schedules)."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or len(node.args) < 2 or not isinstance(node.args[1], fx.Node) or "state" not in node.args[1].meta:
            continue  # what came from another stage must have its gradient before it goes back
        other = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target), None)
        if other in DEFERRED:
            node.op, node.target = "call_function", DEFERRED[other]
