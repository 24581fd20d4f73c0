"""Measure the loss of the search from choosing a call's forward and backward layouts together.

The best plan of the search is compared with the best plan whose gradients have layouts of their
own. Both are solved exactly (globaltensor/auto/intra_op/separate_backward.py). The machines are
presets, so only the solver runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import Size, keep, options, table
from torch import Tensor, nn
from train_gpt import loss_of

from globaltensor.auto.intra_op.formulate import formulate
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.intra_op.separate_backward import Unfolded
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.auto.solver import solve
from globaltensor.cluster import Cluster
from globaltensor.sharding.placement import Placement

GRIDS = ((2,), (4,), (2, 2))
_SECONDS = 120.0  # for each problem


class Mlp(nn.Module):
    """A model of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), x)


class Words(nn.Module):
    """The example's GPT with its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gpt = size.model()

    def forward(self, rows: Tensor) -> Tensor:
        return loss_of(self.gpt, rows)


class Translation(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(512, width)
        self.both = nn.Transformer(width, 4, 1, 1, 4 * width, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        out = self.both(self.words(source), self.words(target[:, :-1]))
        return F.cross_entropy((out @ self.words.weight.T).flatten(0, 1), target[:, 1:].flatten())


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(512, (rows, length))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp 256": (lambda: Mlp(256), lambda: (torch.randn(64, 256),)),
    "mlp 2048": (lambda: Mlp(2048), lambda: (torch.randn(512, 2048),)),
    "gpt 1 x 128": (
        lambda: Words(Size(1, 128, 4, 32, 8)),
        lambda: (Size(1, 128, 4, 32, 8).rows(),),
    ),
    "gpt 2 x 1024": (
        lambda: Words(Size(2, 1024, 16, 256, 16)),
        lambda: (Size(2, 1024, 16, 256, 16).rows(),),
    ),
    "encoder, decoder 256": (lambda: Translation(256), lambda: (ids(16, 32), ids(16, 33))),
}
MACHINES: dict[str, Cluster] = {
    "dgx-h100": Cluster.preset("dgx-h100"),
    "pcie-a100": Cluster.preset("pcie-a100"),
    "cpu, gloo": Cluster.preset("cpu"),
}


def compare(name: str, machine: str, grid: tuple[int, ...]) -> dict[str, Any]:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    calls = calls_of_model(make(), inputs())
    folded = formulate(
        calls,
        MACHINES[machine],
        Placement("cpu", np.arange(np.prod(grid)).reshape(grid)),
        Options(),
    )
    unfolded = Unfolded(folded)
    ours, free = solve(folded.problem, seconds=_SECONDS), solve(unfolded.problem, seconds=_SECONDS)
    return {
        "case": f"{name}, {machine}, {' x '.join(map(str, grid))}", "unit": "us",
        "ours": float(ours.cost * 1e6), "free": float(free.cost * 1e6),
        "bound of free": float(free.bound * 1e6), "loss": f"{ours.cost / free.cost - 1:.2%}",
        "at most": f"{ours.cost / free.bound - 1:.2%}",
        "nodes": len(folded.problem.costs), "nodes of free": len(unfolded.problem.costs),
        "proven": str(ours.optimal and free.optimal),
    }  # fmt: skip


def main() -> None:
    more = {"--save": {"action": "store_true", "help": "write the rows into results/"}}
    chosen = options(__doc__.splitlines()[0], steps=0, more=more)
    rows = []
    for name in list(MODELS)[:: 4 if chosen.quick else 1]:
        for machine in MACHINES:
            for grid in GRIDS[: 1 if chosen.quick else None]:
                if chosen.only in f"{name}, {machine}":
                    rows.append(compare(name, machine, grid))
                    if chosen.json:
                        print(json.dumps(rows[-1]), flush=True)
    if not chosen.json:
        print(table(rows))
    if chosen.save:
        keep(rows, "auto_unfolded")


if __name__ == "__main__":
    main()
