"""Which passes run, and in which order."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ..errors import GraphError
from .dead import remove_dead

__all__ = ["PASSES", "run", "verify"]

Pass = Callable[[fx.Graph], None]
PASSES: tuple[Pass, ...] = (remove_dead,)


def run(graph: fx.Graph) -> None:
    """All passes, in order."""
    for one in PASSES:
        one(graph)
        verify(graph, one.__name__)


def verify(graph: fx.Graph, after: str) -> None:
    """What must hold between passes: every operand is made before it is used, and each boxing takes what lies as it says. Raises GraphError."""
    try:
        graph.lint()
    except RuntimeError as error:
        raise GraphError(f"the pass {after} has left a graph that is not in order: {error}") from error
    for node in graph.nodes:
        if "box" in node.meta and node.op == "call_function":
            src, dst = node.meta["box"]
            given = node.args[0].meta.get("box")
            if given is not None and given[1] is not src:
                raise GraphError(f"after the pass {after}, {node.name} takes {src!r} but is given {given[1]!r}")
