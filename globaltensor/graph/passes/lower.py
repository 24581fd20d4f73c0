"""The lowering of a program's graph, once the passes have run.

Recomputed parts are folded and pure parts are compiled. Each becomes a call of a module of its own.
`Graph` and `PipelinedGraph` call `lower`."""

from __future__ import annotations

from typing import Any

from torch import fx

from . import recompute
from .compile import compile_parts

__all__ = ["lower"]


def lower(graph: fx.Graph, constants: dict[str, Any], backend: str | None) -> None:
    """Fold the regions to recompute, and compile with ``backend``, if any.

    New modules go into ``constants``. Raises GraphError if a part cannot be recomputed."""
    recompute.fold(graph, constants)
    if backend is not None:
        compile_parts(graph, constants, backend)
