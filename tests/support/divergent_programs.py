"""Programs whose ranks diverge, for tests that every such program raises a DivergenceError."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import globaltensor as flow
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError

B, S = flow.sbp.broadcast, flow.sbp.split

Program = Callable[[], object]


def line() -> Any:
    return flow.placement.all("cpu")


def rows(add: float = 0.0) -> Any:
    value = torch.arange(12.0, dtype=torch.float64).view(4, 3) + add
    return value.to_global(line(), B).to_global(sbp=S(0))  # type: ignore[attr-defined]


def chosen(some: Any, other: Any) -> Any:
    """Return the first argument on rank 0 and the second one elsewhere."""
    return other if flow.env.get_rank() else some


def silent(programs: Mapping[str, Program]) -> list[str]:
    """Return the names of the programs that raise no DivergenceError on this rank."""
    names = []
    for name, program in programs.items():
        try:
            program()
        except DivergenceError:
            pass
        else:
            names.append(name)
        world().forget()
        world().comm(tuple(range(world().size))).barrier()
    return names
