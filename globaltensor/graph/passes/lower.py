"""What becomes of a program's graph once the passes have run: recomputed parts are folded, pure
parts compiled. Each becomes a call of a module of its own."""

from __future__ import annotations

from typing import Any

from torch import fx

from . import recompute
from .compile import compile_parts

__all__ = ["lower"]


def lower(graph: fx.Graph, constants: dict[str, Any], backend: str | None) -> None:
    """Recompute what is marked so; compile with ``backend``, if any. New modules go into
    ``constants``. Raises GraphError where a part cannot be recomputed."""
    recompute.fold(graph, constants)
    if backend is not None:
        compile_parts(graph, constants, backend)
