"""Tests of replicas that were changed on one rank: `flow.check_replicas`, and guard mode."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.pool import run_on
from support.refused import refused
from support.rows import line, rows, same_on_all, square_on_a_grid
from torch import nn

import globaltensor as flow
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def replicas() -> list[str]:
    rank, where, said = flow.env.get_rank(), line(), []
    model = flow.parallelize(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), where, "data"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    flow.check_replicas(model, optimizer, [rows(), rows(B), torch.ones(2)])
    with torch.no_grad():
        model[2].weight.to_local()[0, 0] += rank  # type: ignore[index, operator]
    said.append(
        refused(
            lambda: flow.check_replicas(model),
            r"of 1 tensor",
            r"2.weight: rank 0: \w+; rank 1: \w+",
            r"x.to_local\(\).to_global",
        )
    )
    with torch.no_grad():
        weight: Any = model[2].weight  # type: ignore[index]
        weight.copy_(weight.to_local().to_global(where, B))
    flow.check_replicas(model)
    optimizer.state[weight]["exp_avg"].to_local()[0, 0] += rank
    said.append(
        refused(lambda: flow.check_replicas(optimizer), "state exp_avg of parameter 4 in group 0")
    )
    said.append(refused(lambda: flow.check_replicas(torch.full((2,), float(rank))), "argument 0"))
    said.append(
        refused(lambda: flow.check_replicas({"a": rows(B), "b": [torch.ones(1 + rank)]}), "b.0")
    )
    split = flow.parallelize(nn.Linear(4, 4), where, "fsdp")
    with torch.no_grad():
        split.weight.to_local().mul_(1.0 + rank)  # type: ignore[union-attr,operator]
    flow.check_replicas(split)  # local tensors of a split parameter may differ by rank
    return said


def test_check_replicas() -> None:
    same_on_all(run_on(2, replicas))


def replicas_on_a_grid() -> list[str]:
    rank, said = flow.env.get_rank(), []
    for layout, bad, pattern in (
        ((B, S(1)), 3, r"w: rank 1: \w+; rank 3: \w+"),
        ((S(0), B), 1, r"w: rank 0: \w+; rank 1: \w+"),
        ((B, B), 2, r"w: ranks 0, 1, 3: \w+; rank 2: \w+"),
    ):
        w = square_on_a_grid(*layout)
        flow.check_replicas({"w": w})
        with flow.check_ranks():
            assert (w * 2).sum().item() == 240.0
        w.to_local().add_(float(rank == bad))
        said.append(refused(lambda w=w: flow.check_replicas({"w": w}), "of 1 tensor", pattern))  # type: ignore[misc]

        def guarded(w: Any = w) -> None:
            with flow.check_ranks():  # the sum joins all ranks, more than those with one replica
                (w * square_on_a_grid(S(0), S(1))).sum().item()

        said.append(refused(guarded, "replicas differ", "operand 0 of mul", f"on rank {bad}"))
    w = square_on_a_grid(S(0), S(1))
    w.to_local().add_(float(rank))
    flow.check_replicas(w)
    model = flow.parallelize(nn.Linear(4, 4), w.placement, ["data", "fsdp"])
    with torch.no_grad():
        model.weight.to_local().add_(float(rank == 2))  # type: ignore[operator, union-attr]
    said.append(refused(lambda: flow.check_replicas(model), "weight: rank 0: .*; rank 2: "))
    return said


def test_check_replicas_on_a_grid() -> None:
    same_on_all(run_on(4, replicas_on_a_grid))


def replicas_of_a_graph() -> list[str]:
    rank, said = flow.env.get_rank(), []
    model = flow.parallelize(nn.Linear(3, 2), line(), "data")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    class Train(flow.nn.Graph):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(x).square().mean()
            loss.backward()
            return loss

    graph = Train()
    for _ in range(2):
        graph(rows())
    flow.check_replicas(model, optimizer)
    state: Any = optimizer.state[model.weight]["exp_avg"]
    state.to_local()[0, 0] += rank
    said.append(refused(lambda: flow.check_replicas(optimizer), "exp_avg of parameter 0"))
    state.to_local()[0, 0] -= rank
    state.copy_(state.to_local().to_global(line(), B))
    with torch.no_grad():
        model.weight.to_local()[0, 0] += rank  # type: ignore[index, operator, union-attr]
    graph(rows())
    said.append(refused(lambda: flow.check_replicas(model), r"weight: rank 0: \w+; rank 1: "))
    return said


def test_check_replicas_of_a_model_in_a_graph() -> None:
    same_on_all(run_on(2, replicas_of_a_graph))


def replicas_in_guard_mode() -> str:
    w = torch.ones(3).to_global(line(), B)  # type: ignore[attr-defined]
    with flow.check_ranks():
        (rows() * w).sum().item()
        if flow.env.get_rank():
            w.to_local()[0] = 5.0
        with pytest.raises(DivergenceError) as found:
            (rows() * w).sum().item()
    world().forget()
    text = str(found.value)
    assert re.search(
        r"replicas differ: ranks 0 and 1 hold .*\n  operand 1 of mul f32\[3\] B \(\w+\) on rank "
        r"0, .* on rank 1  \(test_check_replicas.py:\d+: ",
        text,
    )
    return text


def test_the_guard_compares_replicas() -> None:
    same_on_all(run_on(2, replicas_in_guard_mode))
