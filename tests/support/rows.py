"""A small split tensor on all ranks, and a check of what the ranks were told."""

from __future__ import annotations

from typing import Any

import torch

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split


def line() -> Any:
    return flow.placement.all("cpu")


def rows(sbp: Any = None) -> Any:
    return (
        torch.arange(12.0)
        .view(4, 3)
        .to_global(line(), B)
        .to_global(sbp=S(0) if sbp is None else sbp)
    )  # type: ignore[attr-defined]


def square_on_a_grid(*sbp: Any) -> Any:
    grid = flow.placement("cpu", [[0, 1], [2, 3]])
    return torch.arange(16.0).view(4, 4).to_global(grid, [B, B]).to_global(sbp=list(sbp))  # type: ignore[attr-defined]


def same_on_all(said: list[Any]) -> None:
    assert all(each == said[0] for each in said), said
