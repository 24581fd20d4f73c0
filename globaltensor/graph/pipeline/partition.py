"""Partition: a captured graph with stages, cut into one program for each stage of this rank, and what crosses between stages.

Which stage an op belongs to follows from the logical graph, so all ranks agree: the module it runs in says so, or what it works on, or who uses it. What
plain tensors need (positions, masks) is computed again in each stage that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ...distributed.world import world
from ...placement import Placement
from ...plans import tensors_in
from ...sbp import broadcast
from ...spec import Spec
from ...wrapper import GlobalTensor
from ..capture import Captured
from ..errors import GraphError
from ..steps import Boxing, autocast, backward, set_grad_enabled
from .transfer import Edge

__all__ = ["Cut", "Part", "cut"]

Key = tuple[Any, ...]


class Need(NamedTuple):
    """An input of a stage: where it comes from, how it lies there and here."""

    key: Key  # ("input", number) | ("box", number) | ("value", number)
    source: int  # stage; -1: the call
    src: Spec
    dst: Spec
    differentiable: bool


@dataclass
class Part:
    """One stage, on a rank that holds it."""

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


class Cut(NamedTuple):
    """All that a pipeline needs to know."""

    parts: dict[int, Part]
    edges: list[Edge]
    fed: dict[tuple[int, int], int]  # (stage, input of the stage) -> input of the call
    results: list[tuple[int, int]]  # where each tensor that build() returns comes from: (stage, output of the stage)


def cut(captured: Captured, placements: Sequence[Placement], inputs: Sequence[torch.Tensor]) -> Cut:
    """Cut the program. ``placements``: of each stage. Collective: ranks tell each other what their stages need. Raises GraphError."""
    return _Cutter(captured, placements, inputs).cut()


class _Cutter:
    def __init__(self, captured: Captured, placements: Sequence[Placement], inputs: Sequence[torch.Tensor]) -> None:
        self.captured, self.placements, self.given = captured, placements, inputs
        self.rank = world().rank
        self.parts = {k: Part(k) for k, p in enumerate(placements) if p.coordinate(self.rank) is not None}
        self.nodes = list(captured.program.nodes)
        self.stage_of_call = _stages(captured.logical, placements)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.inputs = {node: i for i, node in enumerate(self.nodes[: captured.inputs])}
        self.boxes = {node: i for i, node in enumerate(n for n in self.nodes if _crosses(n))}
        self.stages = self._assign()
        self.states = self._switches()

    # Which stage

    def _assign(self) -> dict[fx.Node, int | None]:
        """The stage of each node; None: of none, computed wherever it is used."""
        found: dict[fx.Node, int | None] = {}
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                found[node] = None
                continue
            own = self.stage_of_call.get(node.meta.get("call", -1), node.meta.get("stage"))
            if own is None:
                own = max((s for a in node.all_input_nodes if (s := found[a]) is not None), default=None)
            found[node] = own
        return found

    def home(self, placement: Placement) -> int:
        """The first stage that lies on this placement."""
        for k, p in enumerate(self.placements):
            if p is placement:
                return k
        raise GraphError(
            f"a tensor of a pipeline lies on {placement!r}, where no stage is (they are on {', '.join(map(repr, self.placements))}): bring it to the placement of "
            "the stage that uses it before the call, or with to_global in build()"
        )

    def source(self, node: fx.Node, spec: Spec) -> int:
        """The stage that has the value of a node."""
        own = self.stages[node]
        if own is not None and self.placements[own] is spec.placement:
            return own
        return self.home(spec.placement)

    def _switches(self) -> dict[fx.Node, tuple[Any, Any]]:
        """Gradients on or off and autocast, as each node wants them."""
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

    # Emitting

    def cut(self) -> Cut:
        loss = None
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr", "output") or node.target in (set_grad_enabled, autocast) or node in self.boxes:
                continue
            if node.target is backward:
                loss = self._loss(node, loss)
                continue
            stage = self.stages[node]
            part = self.parts.get(stage) if stage is not None else None
            if part is not None:
                self._emit(node, part)
        return self._joined(loss)

    def _loss(self, node: fx.Node, before: Any) -> tuple[int, fx.Node, Spec]:
        tensors: Any = node.args[0]
        if before is not None or len(tensors) != 1:
            raise GraphError("a pipeline has one loss, of which backward() is called once: add the losses")
        value = tensors[0]
        spec = value.meta.get("spec")
        if spec is None:
            raise GraphError("the loss of a pipeline must be a global tensor")
        return self.source(value, spec), value, spec

    def _emit(self, node: fx.Node, part: Part) -> fx.Node:
        args = [self.value(a, part) for a in node.all_input_nodes]
        self._switch(part, self.states[node])
        mapped = dict(zip(node.all_input_nodes, args, strict=True))
        made = part.graph.node_copy(node, lambda a: mapped[a])
        made.meta = dict(node.meta)
        part.known[node] = made
        return made

    def _switch(self, part: Part, wanted: tuple[Any, Any]) -> None:
        grad, cast = wanted
        if grad is not None and grad != part.now[0] and not (part.now[0] is None and grad is True):
            part.graph.call_function(set_grad_enabled, (grad,)).meta.update(effect=True, val=None)
        if cast is not None and cast != part.now[1]:
            part.graph.call_function(autocast, cast).meta.update(effect=True, val=None)
        part.now = (grad if grad is not None else part.now[0], cast if cast is not None else part.now[1])

    def value(self, node: fx.Node, part: Part) -> fx.Node:
        """A node's value inside a stage."""
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
            return self._crossing(node, part)
        elif self.stages[node] is None:
            return self._emit(node, part)
        elif self.stages[node] == part.number:
            raise GraphError(f"stage {part.number} of the pipeline uses {node.name} before it is made")
        else:
            return self._from_other(node, part)
        part.known[node] = made
        return made

    def _placeholder(self, part: Part, node: fx.Node | None, name: str) -> fx.Node:
        """An input of the stage's program (``node`` None), or a state; inputs come first."""
        graph, after = part.graph, part.entry if node is None or part.last is None else part.last
        with graph.inserting_after(after) if after is not None else graph.inserting_before(next(iter(graph.nodes), None)):
            made = graph.placeholder(name)
        if node is None:
            part.entry = made
        else:
            part.last, made.meta = made, dict(node.meta)
        return made

    def _input(self, node: fx.Node, part: Part) -> fx.Node:
        number, where = self.inputs[node], self.placements[part.number]
        t = self.given[number]
        if isinstance(t, GlobalTensor):
            spec = t._spec
            if spec.placement is not where:
                raise GraphError(f"stage {part.number} on {where!r} uses an input that lies on {spec.placement!r}: bring it there with to_global")
        else:
            spec = Spec.make(t.shape, t.dtype, where, [broadcast] * where.axes)
        return self.need(node, part, Need(("input", number), -1, spec, spec, False))

    def need(self, node: fx.Node, part: Part, need: Need) -> fx.Node:
        found = part.inputs.get(need.key)
        if found is None:
            found = part.inputs[need.key] = self._placeholder(part, None, f"from_{'_'.join(map(str, need.key))}")
            found.meta.update(val=node.meta.get("val"))
            part.needs.append(need)
        part.known[node] = found
        return found

    def _crossing(self, node: fx.Node, part: Part) -> fx.Node:
        """A boxing between placements: an input of this stage."""
        src, dst = node.meta["box"]
        if dst.placement is not self.placements[part.number]:
            return self._from_other(node, part)
        a, b = _whole(src), _whole(dst)
        key = ("box", self.boxes[node])
        came = self.need(node, part, Need(key, self.source(node.args[0], src), a, b, bool(node.meta["val"].requires_grad)))
        if b is not dst:
            made = part.graph.call_function(Boxing(b, dst, None, node.target.why, True), (came,))
            made.meta = {**node.meta, "box": (b, dst)}
            part.known[node] = made
            return made
        return came

    def _from_other(self, node: fx.Node, part: Part) -> fx.Node:
        """A value of another stage on the same placement."""
        spec = node.meta.get("spec")
        if spec is None or "value" not in node.meta:
            raise GraphError(f"stage {part.number} of the pipeline uses {node.name}, a local tensor of stage {self.stages[node]}: only global tensors cross stages")
        whole = _whole(spec)
        came = self.need(node, part, Need(("value", node.meta["value"]), self.source(node, spec), whole, whole, bool(node.meta["val"].requires_grad)))
        if whole is not spec:
            made = part.graph.call_function(Boxing(whole, spec, None, "pipeline", True), (came,))
            made.meta = {**node.meta, "box": (whole, spec)}
            part.known[node] = made
            return made
        return came

    # Putting together

    def _joined(self, loss: Any) -> Cut:
        results = self._results()
        told = self._told({k: part.needs for k, part in self.parts.items()})
        edges: list[Edge] = []
        fed = {}
        outputs: dict[int, list[Key]] = {k: [] for k in range(len(self.placements))}
        for k in range(len(self.placements)):
            for i, need in enumerate(told[k]):
                if need.source < 0:
                    fed[k, i] = need.key[1]
                    edges.append(Edge(-1, 0, k, i, need.src, need.dst, False))
                    continue
                if need.source >= k:
                    raise GraphError(
                        f"stage {k} of the pipeline needs a value of stage {need.source}, which comes after it (a weight that both use must lie in the earlier one)"
                    )
                edges.append(Edge(need.source, _place(outputs[need.source], need.key), k, i, need.src, need.dst, need.differentiable))
        where = []
        for node, spec in results:
            k = self.source(node, spec)
            where.append((k, _place(outputs[k], ("result", *_name(node, self)))))
        if loss is not None:
            _place(outputs[loss[0]], ("loss",))
        values = {("loss",): loss[1:]} if loss is not None else {}
        values.update({("result", *_name(node, self)): (node, spec) for node, spec in results})
        for k, part in self.parts.items():
            self._finish(part, outputs[k], values, loss if loss is not None and loss[0] == k else None)
        return Cut(self.parts, edges, fed, where)

    def _results(self) -> list[tuple[fx.Node, Spec]]:
        out: Any = self.nodes[-1].args[0]
        results = []
        for node, spec in zip(out, _specs(self.captured.structure), strict=True):
            if spec is None:
                raise GraphError("what build() of a pipeline returns must be global tensors (or no tensors): a plain one is known on some ranks only")
            results.append((node, spec))
        return results

    def _told(self, mine: Mapping[int, list[Need]]) -> dict[int, list[Need]]:
        """What each stage needs, from a rank that holds it."""
        here = world()
        everyone = here.comm(tuple(range(here.size))).all_gather_object(dict(mine)) if here.size > 1 else [dict(mine)]
        return {k: [Need(*need) for need in everyone[p.flat[0]][k]] for k, p in enumerate(self.placements)}

    def _finish(self, part: Part, wanted: list[Key], values: Mapping[Key, tuple[fx.Node, Spec]], loss: Any) -> None:
        by_box = {i: node for node, i in self.boxes.items()}
        by_value = {node.meta["value"]: node for node in self.nodes if "value" in node.meta}
        outs = []
        for key in wanted:
            if key[0] == "box":
                node = by_box[key[1]]
                outs.append(self._leaving(part, node.args[0], node.meta["box"][0], node.target.grad))
            elif key[0] == "value":
                node = by_value[key[1]]
                outs.append(self._leaving(part, node, node.meta["spec"], None))
            else:
                outs.append(self.value(values[key][0], part))
        self._switch(part, (True, part.now[1]) if part.now[0] is False else part.now)
        part.graph.output(tuple(outs))
        part.outputs = wanted
        if loss is not None:
            part.loss = wanted.index(("loss",)), loss[2]

    def _leaving(self, part: Part, node: fx.Node, spec: Spec, grad: Spec | None) -> fx.Node:
        """A value as it crosses: not partial."""
        made, whole = self.value(node, part), _whole(spec)
        if whole is spec and grad is None:
            return made
        out = part.graph.call_function(Boxing(spec, whole, grad, "pipeline", True), (made,))
        out.meta.update(val=node.meta["val"], effect=False, calls=1, box=(spec, whole))
        return out


def _name(node: fx.Node, cutter: _Cutter) -> tuple[Any, ...]:
    return ("input", cutter.inputs[node]) if node in cutter.inputs else ("value", node.meta.get("value", node.meta.get("state")))


def _place(outputs: list[Key], key: Key) -> int:
    if key not in outputs:
        outputs.append(key)
    return outputs.index(key)


def _crosses(node: fx.Node) -> bool:
    box = node.meta.get("box")
    return box is not None and box[0].placement is not box[1].placement


def _whole(spec: Spec) -> Spec:
    return spec.replace(layout=[broadcast if e.is_partial else e for e in spec.layout]) if any(e.is_partial for e in spec.layout) else spec


def _specs(structure: Any) -> Iterator[Spec | None]:
    from ..capture import Result

    if isinstance(structure, Result):
        yield structure.spec
    elif isinstance(structure, (tuple, list)):
        for v in structure:
            yield from _specs(v)
    elif isinstance(structure, dict):
        for v in structure.values():
            yield from _specs(v)


def _stages(logical: fx.Graph, placements: Sequence[Placement]) -> dict[int, int | None]:
    """The stage of each of the user's calls, by its number."""
    found: dict[fx.Node, int | None] = {}
    floating: list[fx.Node] = []
    for node in logical.nodes:
        if node.op not in ("call_function", "call_method"):
            found[node] = None
            continue
        where = next((t._spec.placement for t in tensors_in(node.meta.get("val"), []) if isinstance(t, GlobalTensor)), None)
        stage = node.meta.get("stage")
        if stage is None:
            stage = max((s for a in node.all_input_nodes if (s := found[a]) is not None), default=None)
            if stage is not None and where is not None and placements[stage] is not where:
                later = [k for k, p in enumerate(placements) if p is where]
                if not later:
                    raise GraphError(f"{node.name} puts a tensor on {where!r}, where no stage of the pipeline lies")
                stage = next((k for k in later if k >= stage), later[0])
        found[node] = stage
        if stage is None and where is not None:
            floating.append(node)
    for node in reversed(floating):
        where = next(t._spec.placement for t in tensors_in(node.meta.get("val"), []) if isinstance(t, GlobalTensor))
        users = [s for u in node.users if (s := found.get(u)) is not None and placements[s] is where]
        found[node] = min(users, default=next((k for k, p in enumerate(placements) if p is where), None))
    return {node.meta["call"]: stage for node, stage in found.items() if "call" in node.meta}
