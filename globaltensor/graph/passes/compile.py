"""Compilation: pass the parts of a program that consist of torch calls to ``torch.compile``.

Between these parts are the steps of this package (boxings, draws, gathered parameters, the backward
pass) and changes of states. These steps are not compiled, so the compiler finds no code at which it
would break the graph. Collectives start in the same order as without a compiler. If many layers are
alike, a group of them is compiled once. The compiled function then runs the other groups with their
parameters. `lower` calls `compile_parts`.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..._base.user_code import warn_user
from ..program.nodes import ProgramCall, autocast, backward, set_grad_enabled
from .recompute import Recomputed
from .subgraph import Subgraph, constants_first, mutated_operands, put_back, storages

__all__ = ["Compiled", "compile_parts"]

_EAGER = {backward, autocast, set_grad_enabled, setattr, getattr}
_MIN_CALLS = 2  # with fewer calls there is nothing to fuse
# The boundary of a compiled part stops fusion. A repeated part with fewer calls than this gains
# less than it loses by that.
_LAYER_CALLS = 6
# Each call of a compiled function costs 0.2 ms with its backward, so a function contains several
# layers. The limit on their calls keeps the time of compilation short.
_MAX_FUSED_CALLS = 200
_VIEWS = frozenset(
    (
        "view view_as reshape transpose permute unflatten flatten squeeze unsqueeze expand "
        "expand_as "
        "getitem select narrow t movedim"
    ).split()
)


class Compiler:
    """A backend of torch.compile for one program, which warns once if it fails."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.failed = False

    def __call__(self, body: fx.GraphModule) -> Any:
        return torch.compile(body, backend=self.backend, fullgraph=True, dynamic=False)

    def fail(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            said = str(error).strip().splitlines() or [""]
            warn_user(
                f"enable_compile: {self.backend} cannot compile a part of the program, which "
                f"runs uncompiled: {type(error).__name__}: {said[0]}",
            )


class Compiled(torch.nn.Module):
    """A part of a program that is compiled at its first call.

    If the compilation fails, the part runs uncompiled."""

    def __init__(self, body: fx.GraphModule, compiler: Compiler) -> None:
        super().__init__()
        self.body, self.compiler = body, compiler
        self.run: Any = None

    def forward(self, *args: Any) -> Any:
        return self._first_run(*args) if self.run is None else self.run(*args)

    def _first_run(self, *args: Any) -> Any:
        compiled = self.compiler(self.body)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's own warnings
                out = compiled(*args)
        except Exception as error:
            out = self.body(*args)  # an error of the program itself is raised here
            self.compiler.fail(error)
            compiled = self.body
        self.__dict__["run"] = compiled
        return out

    def __repr__(self) -> str:
        return f"Compiled(by {self.compiler.backend}\n{self.body.code.strip()}\n)"


def compile_parts(graph: fx.Graph, constants: dict[str, Any], backend: Any) -> None:
    """Replace pure parts of the graph by calls of modules ``compiled_<n>``.

    The modules are added to ``constants``. Parts of recomputed regions are replaced too."""
    _compile(graph, constants, Compiler(backend), {})


def _compile(
    graph: fx.Graph, constants: dict[str, Any], compiler: Compiler, known: dict[Any, str]
) -> None:
    for node in [n for n in graph.nodes if n.op == "call_module"]:
        inner = constants[node.target]
        if isinstance(inner, Recomputed):
            body = fx.Graph()  # a new one, as a module's graph accepts only calls of its attributes
            body.output(body.graph_copy(inner.body.graph, {}))
            _compile(body, constants, compiler, known)
            inner.body = fx.GraphModule(constants, body, node.target)
            inner.runs_modules = any(n.op == "call_module" for n in body.nodes)
    for nodes in _layers(list(_pure_runs(graph))):
        part = Subgraph(nodes)
        if sum(map(_computes, nodes)) < _MIN_CALLS or not part.gives:
            continue
        key = _key(part)
        name = known.get(key)
        if name is None:
            name = known[key] = f"compiled_{sum(n.startswith('compiled_') for n in constants)}"
            constants[name] = Compiled(fx.GraphModule(constants, part.graph(), name), compiler)
        put_back(graph, part, name).meta["effect"] = False
    graph.lint()


def _pure_runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield runs of consecutive nodes that are pure functions of tensors.

    A node may also write to memory that the same run has allocated."""
    run: dict[fx.Node, None] = {}
    made: set[int] = set()

    def is_pure(node: fx.Node) -> bool:
        if (
            node.op not in ("call_function", "call_method")
            or isinstance(node.target, ProgramCall)
            or node.target in _EAGER
        ):
            return False
        if node.meta.get("effect") and not node.meta.get("writes"):
            return False  # random numbers are drawn as without a compiler
        if not all(storages(target) <= made for target in mutated_operands(node)):
            return False
        return all(
            n in run or isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes
        )

    constants_first(graph)
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            continue
        if is_pure(node):
            run[node] = None
            made |= storages(node) - {
                key for n in node.all_input_nodes if n not in run for key in storages(n)
            }
        elif run:
            yield list(run)
            run, made = {}, set()


def _layers(runs: Sequence[list[fx.Node]]) -> Iterator[list[fx.Node]]:
    """Yield the runs, cut between layers where this gives several parts that are alike."""
    alike = Counter(_key(Subgraph(run)) for run in runs)
    cut = {i: _pieces(run) for i, run in enumerate(runs) if alike[_key(Subgraph(run))] == 1}
    repeated = Counter(
        _key(Subgraph(piece))
        for pieces in cut.values()
        for piece in pieces
        if sum(map(_computes, piece)) >= _LAYER_CALLS
    )
    for i, run in enumerate(runs):
        rest: list[fx.Node] = []
        for key, streak in itertools.groupby(
            cut.get(i, [run]), lambda piece: _key(Subgraph(piece))
        ):
            pieces = list(streak)
            size = _layers_per_function(len(pieces), sum(map(_computes, pieces[0])))
            if repeated[key] < 2 or repeated[key] == len(pieces) == size:
                rest = rest + [node for piece in pieces for node in piece]
                continue
            if rest:
                yield rest
            rest = []
            for batch in (pieces[k : k + size] for k in range(0, len(pieces), size)):
                yield [node for piece in batch for node in piece]
        if rest:
            yield rest


def _layers_per_function(layers: int, calls: int) -> int:
    """Return the number of layers to compile as one function.

    There are ``layers`` layers that are alike, of ``calls`` calls each. A number that divides
    ``layers`` is preferred to a number less than twice as large that does not.

    >>> [_layers_per_function(layers, 20) for layers in (4, 48, 13)], _layers_per_function(48, 500)
    ([4, 8, 7], 1)
    """
    most = max(1, min(layers, _MAX_FUSED_CALLS // max(1, calls)))
    even = max(n for n in range(1, most + 1) if layers % n == 0)
    return even if 2 * even > most else -(-layers // -(-layers // most))


def _pieces(run: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the pieces of a run, one for each layer. A layer is an entry of a list of modules."""
    return [
        list(nodes)
        for _, nodes in itertools.groupby(run, lambda node: _layer(node.meta.get("module") or ""))
    ]


def _layer(path: str) -> str:
    """Return the layer of a path: ``model.blocks.3.norm`` -> ``model.blocks.3``; else ""."""
    names = path.split(".")
    at = next((i for i, name in enumerate(names) if name.isdecimal()), -1)
    return ".".join(names[: at + 1])


def _computes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name not in _VIEWS


def _key(part: Subgraph) -> Any:
    """Return a key that is equal for parts that can share one compiled function.

    Such parts have the same calls, on tensors with the same shapes, strides, dtypes and devices."""
    number: dict[fx.Node, str] = {node: f"in{i}" for i, node in enumerate(part.needs)}
    number |= {node: f"n{i}" for i, node in enumerate(part.nodes)}
    calls = tuple(
        (
            node.op,
            node.target,
            repr(fx.node.map_arg((node.args, node.kwargs), lambda n: _BareRepr(number[n]))),
        )
        for node in part.nodes
    )
    return (
        calls,
        tuple(_tensor_properties(node) for node in part.needs),
        tuple(number[node] for node in part.gives),
    )


class _BareRepr(str):
    __slots__ = ()
    __repr__ = str.__str__


def _tensor_properties(node: fx.Node) -> Any:
    t = node.meta["val"]
    return tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad
