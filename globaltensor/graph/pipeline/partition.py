"""Partition: split a captured graph with stages into one program for each stage of this rank.

The partition also lists the values that cross between stages. `pipelined_graph` calls `cut`.

The stage of an op follows from the logical graph, so all ranks agree. The module in which the op
runs determines the stage, or else its operands, or else its users. Values that follow from plain
tensors alone (positions, masks) are computed again in each stage that uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ..._tensor.global_tensor import GlobalTensor
from ...distributed.world import world
from ...errors import GraphError
from ...sharding.placement import Placement
from ...sharding.sbp import broadcast
from ...sharding.spec import Spec
from ..capture.capture import CaptureResult
from ..capture.dry_world import GRAPH
from ..passes.alias_analysis import AliasSets
from ..program.nodes import BoxingCall, autocast, backward, set_grad_enabled
from .stage_assignment import stages_of_nodes
from .stage_transfer import Edge

__all__ = ["StagePart", "StagePartition", "cut"]

Key = tuple[Any, ...]


class Need(NamedTuple):
    """An input of a stage: its source, and its specs at the source and in the stage."""

    key: Key  # ("input", number) | ("box", number) | ("value", number)
    source: int  # stage; -1: the call
    src: Spec
    dst: Spec
    differentiable: bool


@dataclass
class StagePart:
    """A stage, on a rank that holds it."""

    number: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    known: dict[fx.Node, fx.Node] = field(default_factory=dict)
    needs: list[Need] = field(default_factory=list)
    inputs: dict[Key, fx.Node] = field(default_factory=dict)
    outputs: list[Key] = field(default_factory=list)
    loss: tuple[int, Spec] | None = None
    entry: fx.Node | None = None  # the last input in the program
    last: fx.Node | None = None  # the last state
    now: tuple[Any, Any] = (None, None)
    wanted: list[Key] = field(default_factory=list)  # for other stages, the call and backward
    leaving: dict[Key, fx.Node] = field(default_factory=dict)


class StagePartition(NamedTuple):
    """The partition of a captured graph into stages."""

    parts: dict[int, StagePart]
    edges: list[Edge]
    fed: dict[tuple[int, int], int]  # (stage, input of the stage) -> input of the call
    results: list[
        tuple[int, int]
    ]  # source of each tensor that build() returns: (stage, output of the stage)


def cut(
    captured: CaptureResult, placements: Sequence[Placement], inputs: Sequence[torch.Tensor]
) -> StagePartition:
    """Split the program into stages. ``placements`` holds the placement of each stage.

    Collective: ranks exchange the inputs that their stages need. Raises GraphError if the graph
    cannot be split, for example if a stage needs a value of a later one."""
    return StagePartitioner(captured, placements, inputs).cut()


class StagePartitioner:
    def __init__(
        self,
        captured: CaptureResult,
        placements: Sequence[Placement],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self.captured, self.placements, self.call_inputs = captured, placements, inputs
        self.rank = world().rank
        self.held = [k for k, p in enumerate(placements) if p.coordinate(self.rank) is not None]
        self.parts: dict[int, StagePart] = {}
        self.nodes = list(captured.program.nodes)
        self.memory = AliasSets(captured.program)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.inputs = {node: i for i, node in enumerate(self.nodes[: captured.inputs])}
        self.boxes = {node: i for i, node in enumerate(n for n in self.nodes if _crosses(n))}
        self.stages = stages_of_nodes(captured, placements, inputs, self.memory, set(self.boxes))
        self.states = self._switches()
        self.by_box = {i: node for node, i in self.boxes.items()}
        self.by_value = {node.meta["value"]: node for node in self.nodes if "value" in node.meta}
        self.writers: dict[Any, list[fx.Node]] = {}  # of memory
        for node in self.nodes:
            for memory in self.memory.writes(node):
                self.writers.setdefault(memory, []).append(node)

    def home(self, placement: Placement) -> int:
        """Return the first stage on this placement."""
        for k, p in enumerate(self.placements):
            if p is placement:
                return k
        raise GraphError(
            f"a tensor of a pipeline is on {placement!r}, but the stages are on "
            f"{', '.join(map(repr, self.placements))}: move the tensor to the placement of the "
            "stage that uses it, before the call or with to_global in build()"
        )

    def source(self, node: fx.Node, spec: Spec) -> int:
        """Return the stage that has the value of a node."""
        own = self.stages[node]
        if own is not None and self.placements[own] is spec.placement:
            return own
        return self.home(spec.placement)

    def _switches(self) -> dict[fx.Node, tuple[Any, Any]]:
        """Return the grad mode and autocast that each node needs."""
        grad: Any = None
        cast: Any = None
        out = {}
        for node in self.nodes:
            if node.target is set_grad_enabled:
                grad = node.args[0]
            elif node.target is autocast:
                cast = node.args
            out[node] = (grad, cast)
        return out

    # Building the stages' programs

    def cut(self) -> StagePartition:
        loss = self._loss()
        results = self._results()
        always: dict[int, list[Key]] = {k: [] for k in range(len(self.placements))}
        values: dict[Key, fx.Node] = {}
        where = []
        for node, spec in results:
            k, key = self.source(node, spec), ("result", *self._name(node))
            values[key] = node
            where.append((k, key))
            _output_index(always[k], key)
        if loss is not None:
            values["loss",] = loss[1]
            _output_index(always[loss[0]], ("loss",))
        # A value that a stage must provide may come from another stage in turn. Repeat until no
        # stage needs more.
        stage_needs: dict[int, list[Need]] = {k: [] for k in always}
        while True:
            outputs = {k: list(keys) for k, keys in always.items()}
            for k in always:
                for need in stage_needs[k]:
                    if need.source >= 0:
                        _output_index(outputs[need.source], need.key)
            before, stage_needs = stage_needs, self._gather_needs(outputs, values)
            if stage_needs == before:
                break
        edges, fed = self._edges(stage_needs, outputs)
        for part in self.parts.values():
            part.outputs = outputs[part.number]
            if loss is not None and loss[0] == part.number:
                part.loss = part.outputs.index(("loss",)), loss[2]
        return StagePartition(
            self.parts, edges, fed, [(k, outputs[k].index(key)) for k, key in where]
        )

    def _emit_stage(self, part: StagePart, values: Mapping[Key, fx.Node]) -> None:
        """Write the stage's program, in the order of the user's code.

        The program has the stage's own nodes, and the nodes without a stage that those or the
        outputs need."""
        roots = [self._output(key, values) for key in part.wanted]
        own_nodes = [
            n
            for n in self.nodes
            if self.stages[n] == part.number and n.op != "output" and not self._is_control_node(n)
        ]
        floating = self._stageless_calls(part, [*own_nodes, *roots])
        leaving: dict[fx.Node, list[Key]] = {}
        for key in part.wanted:
            leaving.setdefault(self._exit_point(key, part), []).append(key)
        own_node_set = set(own_nodes)
        for node in self.nodes:
            for key in leaving.get(node, ()):
                part.leaving[key] = self._sendable_value(part, key, values)
            if node in own_node_set or node in floating:
                self._emit(node, part)
        outs = [part.leaving[key] for key in part.wanted]
        self._switch(part, (True, part.now[1]) if part.now[0] is False else part.now)
        part.graph.output(tuple(outs))

    def _is_control_node(self, node: fx.Node) -> bool:
        return node.target in (set_grad_enabled, autocast, backward) or node in self.boxes

    def _stageless_calls(self, part: StagePart, roots: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the calls without a stage that ``roots`` need.

        Calls that write into the memory of these are included."""
        floating: set[fx.Node] = set()
        todo, seen = list(roots), set[fx.Node]()
        while todo:
            node = todo.pop()
            if node in seen or node in self.boxes or self.stages[node] not in (None, part.number):
                continue
            seen.add(node)
            todo += node.all_input_nodes
            if self.stages[node] is None and node.op.startswith("call_"):
                floating.add(node)
                todo += [
                    w for w in self.writers.get(self.memory.of(node), ()) if self.stages[w] is None
                ]
        return floating

    def _exit_point(self, key: Key, part: StagePart) -> fx.Node:
        """Return the node before which a value leaves the stage.

        Later writes into the value do not count."""
        if key[0] == "box":
            return self.by_box[key[1]]
        if key[0] == "value":
            away = [
                u for u in self.by_value[key[1]].users if self.stages[u] not in (None, part.number)
            ]
            return min(away, key=self.order.__getitem__, default=self.nodes[-1])
        return self.nodes[-1]

    def _output(self, key: Key, values: Mapping[Key, fx.Node]) -> fx.Node:
        return (
            self.by_box[key[1]].args[0]
            if key[0] == "box"
            else self.by_value[key[1]]
            if key[0] == "value"
            else values[key]
        )  # type: ignore[return-value]

    def _loss(self) -> tuple[int, fx.Node, Spec] | None:
        """Return the stage, the node and the spec of the tensor on which backward() is called."""
        backward_calls = [node for node in self.nodes if node.target is backward]
        for node in self.captured.logical.nodes:
            gradient_args = (
                [*node.args[1:2], node.kwargs.get("gradient")] if node.target == "backward" else ()
            )
            if any(v is not None for v in gradient_args):
                raise GraphError(
                    f"backward(gradient) in a pipeline: multiply the loss by it, sum, and call "
                    f"backward()\n  {node.meta.get('where', '')}"
                )
            if node.target is torch.autograd.grad:
                raise GraphError(
                    "torch.autograd.grad in a pipeline: gradients do not come back to build() "
                    "from other stages; call backward() of the loss, and use "
                    f"gradients in a hook of the optimizer (optimizer.register_step_pre_hook)\n  "
                    f"{node.meta.get('where', '')}"
                )
        if not backward_calls:
            return None
        tensors: Any = backward_calls[0].args[0]
        if len(backward_calls) > 1 or len(tensors) != 1:
            raise GraphError(
                "a pipeline has one loss, of which backward() is called once: add the losses and "
                "call backward() of the sum"
            )
        value = tensors[0]
        spec = value.meta.get("spec")
        if spec is None:
            raise GraphError(
                "the loss of a pipeline must be a global tensor: compute it from the outputs of "
                "the stages, without to_local()"
            )
        return self.source(value, spec), value, spec

    def _emit(self, node: fx.Node, part: StagePart) -> fx.Node:
        args = [self.value(a, part) for a in node.all_input_nodes]
        self._switch(part, self.states[node])
        mapped = dict(zip(node.all_input_nodes, args, strict=True))
        made = part.graph.node_copy(node, lambda a: mapped[a])
        made.meta = dict(node.meta)
        part.known[node] = made
        return made

    def _switch(self, part: StagePart, wanted: tuple[Any, Any]) -> None:
        grad, cast = wanted
        if grad is not None and grad != part.now[0] and not (part.now[0] is None and grad is True):
            part.graph.call_function(set_grad_enabled, (grad,)).meta.update(effect=True, val=None)
        if cast is not None and cast != part.now[1]:
            part.graph.call_function(autocast, cast).meta.update(effect=True, val=None)
        part.now = (
            grad if grad is not None else part.now[0],
            cast if cast is not None else part.now[1],
        )

    def value(self, node: fx.Node, part: StagePart) -> fx.Node:
        """Return a node's value inside a stage."""
        found = part.known.get(node)
        if found is not None:
            return found
        if node in self.inputs:
            return self._input(node, part)
        if node.op == "placeholder":
            made = self._placeholder(part, node, str(node.target))
        elif node.op == "get_attr":
            made = part.graph.node_copy(node)
            made.meta = dict(node.meta)
        elif node in self.boxes:
            return self._received_boxing(node, part)
        elif self.stages[node] in (None, part.number):
            raise GraphError(
                f"stage {part.number} of the pipeline uses {node.name} before it is computed"
            )
        else:
            return self._received_value(node, part)
        part.known[node] = made
        return made

    def _placeholder(self, part: StagePart, node: fx.Node | None, name: str) -> fx.Node:
        """Add an input of the stage's program (``node`` None) or a state; inputs come first."""
        graph, after = part.graph, part.entry if node is None or part.last is None else part.last
        with (
            graph.inserting_after(after)
            if after is not None
            else graph.inserting_before(next(iter(graph.nodes), None))
        ):
            made = graph.placeholder(name)
        if node is None:
            part.entry = made
        else:
            part.last, made.meta = made, dict(node.meta)
        return made

    def _input(self, node: fx.Node, part: StagePart) -> fx.Node:
        number, where = self.inputs[node], self.placements[part.number]
        t = self.call_inputs[number]
        if isinstance(t, GlobalTensor):
            spec = t._spec
            if spec.placement is not where:
                raise GraphError(
                    f"stage {part.number} on {where!r} uses an input that is on "
                    f"{spec.placement!r}: move the input to the stage's placement with to_global"
                )
        else:
            spec = Spec.make(t.shape, t.dtype, where, [broadcast] * where.axes)
        return self.need(node, part, Need(("input", number), -1, spec, spec, False))

    def need(self, node: fx.Node, part: StagePart, need: Need) -> fx.Node:
        input_node = part.inputs.get(need.key)
        if input_node is None:
            input_node = part.inputs[need.key] = self._placeholder(
                part, None, f"from_{'_'.join(map(str, need.key))}"
            )
            input_node.meta.update(val=node.meta.get("val"))
            part.needs.append(need)
        part.known[node] = input_node
        if any(
            self.stages[w] in (None, part.number)
            for w in self.writers.get(self.memory.of(node), ())
        ):
            # A received value is a leaf, which may be read again. The program therefore writes into
            # a copy.
            input_node = part.known[node] = part.graph.call_method("clone", (input_node,))
            input_node.meta.update(
                val=node.meta.get("val"),
                effect=False,
                calls=1,
                stage=part.number,
                module="",
                region=None,
            )
        return input_node

    def _received_boxing(self, node: fx.Node, part: StagePart) -> fx.Node:
        """Return the result of a boxing between placements: it is an input of this stage."""
        src, dst = node.meta["box"]
        if dst.placement is not self.placements[part.number]:
            return self._received_value(node, part)
        a, b = _without_partials(src), _without_partials(dst)
        key = ("box", self.boxes[node])
        came = self.need(
            node,
            part,
            Need(key, self.source(node.args[0], src), a, b, bool(node.meta["val"].requires_grad)),
        )
        if b is not dst:
            made = part.graph.call_function(
                BoxingCall(b, dst, None, node.target.why, True), (came,)
            )
            made.meta = {**node.meta, "box": (b, dst)}
            part.known[node] = made
            return made
        return came

    def _received_value(self, node: fx.Node, part: StagePart) -> fx.Node:
        """Return a value of another stage on the same placement."""
        spec = node.meta.get("spec")
        if spec is None or "value" not in node.meta:
            raise GraphError(
                f"stage {part.number} of the pipeline uses {self._describe_node(node)}, a plain "
                f"tensor of stage {self.stages[node]}: only global tensors cross stages; make the "
                "tensor global (to_global) where it is computed, or compute it again in the stage "
                "that uses it"
            )
        whole = _without_partials(spec)
        came = self.need(
            node,
            part,
            Need(
                ("value", node.meta["value"]),
                self.source(node, spec),
                whole,
                whole,
                bool(node.meta["val"].requires_grad),
            ),
        )
        if whole is not spec:
            made = part.graph.call_function(
                BoxingCall(whole, spec, None, "pipeline", True), (came,)
            )
            made.meta = {**node.meta, "box": (whole, spec)}
            part.known[node] = made
            return made
        return came

    # Edges and results

    def _edges(
        self, stage_needs: Mapping[int, list[Need]], outputs: Mapping[int, list[Key]]
    ) -> tuple[list[Edge], dict[tuple[int, int], int]]:
        edges: list[Edge] = []
        fed = {}
        for k in range(len(self.placements)):
            for i, need in enumerate(stage_needs[k]):
                if need.source < 0:
                    fed[k, i] = need.key[1]
                    edges.append(Edge(-1, 0, k, i, need.src, need.dst, False))
                    continue
                if need.source >= k:
                    raise GraphError(
                        f"stage {k} of the pipeline needs "
                        f"{self._describe_node(self._output(need.key, {}))} of stage "
                        f"{need.source}, which does not come before it: compute the value in an "
                        "earlier stage; a weight that both stages use must be in the earlier one"
                    )
                edges.append(
                    Edge(
                        need.source,
                        outputs[need.source].index(need.key),
                        k,
                        i,
                        need.src,
                        need.dst,
                        need.differentiable,
                    )
                )
        return edges, fed

    def _describe_node(self, node: fx.Node) -> str:
        """Return a description of a node in the user's terms."""
        if "state" in node.meta:
            return f"the weight {node.name}"
        where = next(
            (
                n.meta.get("where")
                for n in self.captured.logical.nodes
                if n.meta.get("call") == node.meta.get("call") and n.meta.get("where")
            ),
            "",
        )
        return f"a value ({node.name}" + (f", {where})" if where else ")")

    def _results(self) -> list[tuple[fx.Node, Spec]]:
        out: Any = self.nodes[-1].args[0]
        results = []
        for node, spec in zip(out, _specs(self.captured.structure), strict=True):
            if spec is None:
                raise GraphError(
                    "the results of build() in a pipeline must be global tensors (or no tensors): "
                    "a plain tensor exists on some ranks only"
                )
            results.append((node, spec))
        return results

    def _gather_needs(
        self, outputs: Mapping[int, list[Key]], values: Mapping[Key, fx.Node]
    ) -> dict[int, list[Need]]:
        """Build this rank's parts, with ``outputs``, and return the inputs that each stage needs.

        The inputs of a stage come from a rank that holds it. Raises GraphError on all ranks, or on
        none."""
        own_needs: dict[int, list[Need]] | str = {}
        try:
            self.parts = {k: StagePart(k, wanted=outputs[k]) for k in self.held}
            for part in self.parts.values():
                self._emit_stage(part, values)
            own_needs = {k: part.needs for k, part in self.parts.items()}
        except GraphError as error:
            own_needs = str(error)
        this_world = world()
        everyone = (
            this_world.comm(tuple(range(this_world.size))).all_gather_object(own_needs, GRAPH)
            if this_world.size > 1
            else [own_needs]
        )
        failed = next((r for r, reply in enumerate(everyone) if isinstance(reply, str)), None)
        if failed is not None:
            raise GraphError(everyone[failed])
        return {
            k: [Need(*need) for need in everyone[p.flat[0]][k]]
            for k, p in enumerate(self.placements)
        }

    def _sendable_value(self, part: StagePart, key: Key, values: Mapping[Key, fx.Node]) -> fx.Node:
        """Return a value in the form in which it leaves a stage.

        The value is not partial, and later writes do not change it."""
        node = self._output(key, values)
        made = self.value(node, part)
        if key[0] not in ("box", "value"):
            return made
        spec = self.by_box[key[1]].meta["box"][0] if key[0] == "box" else node.meta["spec"]
        grad = self.by_box[key[1]].target.grad if key[0] == "box" else None  # type: ignore[union-attr]
        whole = _without_partials(spec)
        if whole is not spec or grad is not None:
            made = part.graph.call_function(
                BoxingCall(spec, whole, grad, "pipeline", True), (made,)
            )
            made.meta.update(val=node.meta["val"], effect=False, calls=1, box=(spec, whole))
        elif any(
            self.order[w] > self.order[self._exit_point(key, part)]
            for w in self.writers.get(self.memory.of(node), ())
        ):
            made = part.graph.call_method("clone", (made,))
            made.meta.update(
                val=node.meta["val"],
                effect=False,
                calls=1,
                stage=part.number,
                module="",
                region=None,
            )
        return made

    def _name(self, node: fx.Node) -> tuple[Any, ...]:
        return ("input", self.inputs[node]) if node in self.inputs else ("node", self.order[node])


def _output_index(outputs: list[Key], key: Key) -> int:
    if key not in outputs:
        outputs.append(key)
    return outputs.index(key)


def _crosses(node: fx.Node) -> bool:
    box = node.meta.get("box")
    return box is not None and box[0].placement is not box[1].placement


def _without_partials(spec: Spec) -> Spec:
    return (
        spec.replace(layout=[broadcast if e.is_partial else e for e in spec.layout])
        if any(e.is_partial for e in spec.layout)
        else spec
    )


def _specs(structure: Any) -> Iterator[Spec | None]:
    from ..capture.capture import Result

    if isinstance(structure, Result):
        yield structure.spec
    elif isinstance(structure, (tuple, list)):
        for v in structure:
            yield from _specs(v)
    elif isinstance(structure, dict):
        for v in structure.values():
            yield from _specs(v)
