"""Tests of the cost of folding. Every folded plan is also a plan with separately chosen backward,
at the same cost. Plans with a separate backward may be better."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_strategies import Attention, Pictures
from torch import nn

from globaltensor.auto.intra_op.formulate import Formulation, formulate
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.intra_op.separate_backward import Unfolded
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.auto.solver import solve
from globaltensor.cluster import Cluster
from globaltensor.sbp import broadcast as B
from globaltensor.sharding.placement import Placement

MACHINES = {
    "usual": Cluster(),
    "joined": Cluster(launch=0, latency=0, bandwidth=1e15, kernel=0.0, flops={"float32": 1e6}),
    "apart": Cluster(bandwidth=1e3),
}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), x)


class Tied(nn.Module):
    """A model that uses one weight twice, and one value in three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + torch.tanh(x) * x
        return F.cross_entropy((x @ self.words.weight.T).flatten(0, 1), ids.flatten())


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (Mlp, lambda: (torch.randn(6, 8),)),
    "tied": (Tied, lambda: (torch.randint(0, 12, (4, 6)),)),
    "attention": (Attention, lambda: (torch.randint(0, 12, (6, 8)), torch.randint(0, 12, (6, 8)))),
    "pictures": (Pictures, lambda: (torch.randn(5, 4, 8, 8),)),
}


def folded(model: str, machine: str, grid: tuple[int, ...]) -> Formulation:
    make, inputs = MODELS[model]
    return formulate(
        calls_of_model(make(), inputs()),
        MACHINES[machine],
        Placement("cpu", np.arange(np.prod(grid)).reshape(grid)),
        Options(),
    )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("model", "grid"),
    [(m, (2,)) for m in MODELS] + [("mlp", (3,)), ("tied", (4,)), ("mlp", (2, 2))],
)
@pytest.mark.sweep(8)
@pytest.mark.long
def test_a_folded_plan_is_one_of_them_at_the_same_cost(
    model: str, grid: tuple[int, ...], machine: str
) -> None:
    known = folded(model, machine, grid)
    unfolded = Unfolded(known)
    best, free = solve(known.problem), solve(unfolded.problem, seconds=60.0)
    assert best.optimal
    assert best.choice is not None
    assert free.bound <= free.cost <= best.cost * (1 + 1e-9)
    assert unfolded.problem.evaluate(unfolded.lifted(best.choice)) == pytest.approx(
        best.cost, rel=1e-9
    )

    draw, seen = random.Random(1), 0
    for _ in range(2000):
        choice = list(best.choice)
        for node in draw.sample(range(len(choice)), draw.randint(1, 3)):
            choice[node] = draw.randrange(len(known.problem.costs[node]))
        cost = known.problem.evaluate(choice)
        if cost < float("inf"):
            seen += 1
            # The cost may be lower: a gradient may take another path than its value did, or use the
            # cheaper of two strategies with the same layouts.
            assert unfolded.problem.evaluate(unfolded.lifted(choice)) <= cost * (1 + 1e-9)
    assert seen >= 50


@pytest.mark.parametrize("model", ["mlp", "tied"])
def test_where_moving_costs_all_a_free_backward_does_everything_everywhere(model: str) -> None:
    """A free backward runs everything on every rank if moves cost nearly everything. Then the
    gradient of a broadcast tensor need not be partial: nothing moves, and each rank computes what
    one device does."""
    known = folded(model, "apart", (2,))
    free = solve(Unfolded(known).problem)
    whole = [
        next(r for r in range(len(f)) if all(layouts[r] == (B,) for layouts in (*f.ins, *f.outs)))
        for f in known.candidates.values()
    ]
    computing = sum(
        f.forward[r] + f.backward[r] for f, r in zip(known.candidates.values(), whole, strict=True)
    )
    assert free.optimal
    # A call's backward seconds are shared equally among its operands' gradients, even where the
    # gradient of a bias would be cheaper elsewhere.
    assert free.cost == pytest.approx(computing + steps(known), rel=1e-3)
    assert free.cost < solve(known.problem).cost


def steps(known: Formulation) -> float:
    """Return the optimizer's seconds on replicated parameters."""
    found = 0.0
    for value in known.calls.parameters:
        node = known.node_of_value[value.number]
        whole = next(
            i
            for i, (x, y) in enumerate(known.layouts[node])
            if y is None and all(e.is_broadcast for e in x)
        )
        found += float(known.problem.costs[node][whole])
    return found


def test_what_cannot_be_unfolded() -> None:
    known = folded("mlp", "usual", (2,))
    for options in (Options(wait=1.0), Options(memory=1 << 30)):
        with pytest.raises(ValueError, match="without a limit of memory and without a wait"):
            Unfolded(formulate(known.calls, MACHINES["usual"], known.mesh, options))
