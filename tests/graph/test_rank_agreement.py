"""Tests that a rank with another graph, settings, seed or stages is named by every rank before the
first step. No rank waits forever."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GraphError

B, S = flow.sbp.broadcast, flow.sbp.split
ODD = 1  # the rank that differs


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.second = (
            nn.Linear(4, 4).double(),
            nn.Dropout(dropout),
            nn.Linear(4, 4).double(),
        )
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(0.1)

    def forward(self, x: Any) -> Any:
        return self.second(self.drop(self.first(x)))


class Training(flow.nn.Graph):
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        more: bool = False,
        lr_sch: Any = None,
    ) -> None:
        super().__init__()
        self.model, self.more = model, more
        self.add_optimizer(optimizer, lr_sch=lr_sch)

    def build(self, x: Any) -> Any:
        out = self.model(x)
        loss = (out * 2 if self.more else out).square().mean()
        loss.backward()
        return loss


def _setting(name: str, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
    return lambda graph: getattr(graph.config, name)(*args, **kwargs)


SETTINGS = {
    "accumulation": _setting("set_gradient_accumulation_steps", 2),
    "amp": _setting("enable_amp", True, dtype=torch.bfloat16),
    "zero": _setting("enable_zero", True, stage=3, shard_min_size=1),
    "schedule": _setting("set_schedule", "gpipe"),
    "memory": _setting("set_memory_limit", 1 << 20),
}
#: The difference, and the error that every rank raises for it.
CASES = {
    "code": r"captured another graph.*the graphs differ from op \d+ on.*mul",
    "model": r"captured another graph",
    "accumulation": r"config.accumulation = 2",
    "amp": r"config.amp = torch.bfloat16",
    "zero": r"config.zero = \(3, 1, 1\)",
    "schedule": r"config.schedule = 'gpipe'",
    "memory": r"config.memory = 1048576",
    "optimizer": r"optimizer 0 \(Adam\)",
    "rate": r"lr=0.5",
    "decay": r"lr=0.1, .*weight_decay=0.25",
    "parameters": r"2 parameters",
    "scheduler": r"initial_lr=0.1|learning rate: StepLR",
    "placement": r"rank 1 could not capture the graph: .*different placements.*ranks=\[0\]",
    "order": r"stage 1 is on globaltensor.placement\(type=\"cpu\", ranks=\[1, 0\]\)",
    "stages": r"stage 0 is on globaltensor.placement\(type=\"cpu\", ranks=\[0, 1\]\)",
    "error": r"rank 1 could not capture the graph: .*ValueError: of its own",
}


def said(case: str, odd: int) -> str:
    """Return this rank's error if rank ``odd`` differs."""
    rank, size = flow.env.get_rank(), flow.env.get_world_size()
    differs = rank == odd
    where = flow.placement("cpu", list(range(size)))
    if case == "seed":
        torch.manual_seed(7 + differs)
    model = Model(0.5 if case == "seed" else 0.0)
    if case == "model" and differs:
        model.drop = nn.Tanh()
    model.to_global(where, B)  # type: ignore[operator]
    parameters = list(model.parameters())
    if case == "parameters" and differs:
        parameters = parameters[2:]
    optimizer: Any = torch.optim.SGD(
        parameters,
        lr=0.5 if case == "rate" and differs else 0.1,
        weight_decay=0.25 if case == "decay" and differs else 0.0,
    )
    if case == "optimizer" and differs:
        optimizer = torch.optim.Adam(parameters, lr=0.1)
    lr_sch = (
        torch.optim.lr_scheduler.StepLR(optimizer, 1) if case == "scheduler" and differs else None
    )
    graph = Training(model, optimizer, case == "code" and differs, lr_sch)
    if case in SETTINGS and differs:
        SETTINGS[case](graph)
    if case in ("placement", "order") or (case == "stages" and differs):
        other = {"placement": [0], "order": [1, 0], "stages": [0, 1]}[case]
        graph.model.first.to(flow.nn.graph.GraphModule).set_stage(0, where)
        graph.model.drop.to(flow.nn.graph.GraphModule).set_stage(
            1, flow.placement("cpu", other) if differs else where
        )
        if case == "order":
            graph.model.second.to(flow.nn.graph.GraphModule).set_stage(2, where)
    if case == "error" and differs:
        graph.__dict__["build"] = _fails
    x = torch.ones(4, 4, dtype=torch.float64).to_global(where, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    try:
        graph(x)
    except Exception as error:
        assert not graph.is_compiled
        return f"{type(error).__name__}: {error}"
    return "trained"


def _fails(x: Any) -> Any:
    raise ValueError("of its own")


def _check(case: str, texts: list[str], odd: int) -> None:
    for rank, text in enumerate(texts):
        if case in ("error", "placement") and rank == odd:
            assert text.startswith(
                "ValueError: of its own" if case == "error" else "PlacementError: "
            )
            continue
        assert text.startswith("GraphError"), f"rank {rank}: {text}"
        assert f"rank {odd} " in text, text
        assert re.search(CASES[case], text, re.DOTALL), f"rank {rank}: {text}"


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_name_the_odd_one(case: str) -> None:
    texts: dict[int, str] = {}

    def run() -> None:
        texts[flow.env.get_rank()] = said(case, ODD)

    simulate(2, run, timeout=20.0)
    _check(case, [texts[r] for r in range(2)], ODD)


def test_of_three_ranks_the_one_that_stands_alone_is_named() -> None:
    texts: dict[int, str] = {}

    def run() -> None:
        texts[flow.env.get_rank()] = said("rate", 0)

    simulate(3, run, timeout=20.0)
    assert all("rank 0 has other settings than rank 1" in text for text in texts.values()), texts


def test_the_same_on_all_ranks_trains() -> None:
    def run() -> None:
        assert said("none", ODD) == "trained"

    simulate(2, run, timeout=20.0)


@pytest.mark.parametrize("case", ["code", "zero", "rate", "placement", "error"])
def test_on_processes(case: str) -> None:
    _check(case, run_on(2, said, case, ODD), ODD)


def test_another_seed_on_processes() -> None:
    """A rank with another seed is named, since ranks that drop out by different seeds would train
    different models. Data that each rank has drawn before on its own does no harm."""
    for text in run_on(2, said, "seed", ODD):
        assert "GraphError" in text
        assert (
            "rank 1 draws random numbers from another seed than rank 0 (8, 7): call "
            "torch.manual_seed" in text
        )
    assert run_on(2, said, "seed", -1) == ["trained", "trained"]


def test_a_rank_that_has_failed_while_programs_are_made() -> None:
    """A rank that fails after build(), while programs are made, is reported to the others too."""

    def run() -> None:
        where = flow.placement("cpu", [0, 1])
        model = Model().to_global(where, B)  # type: ignore[operator]
        graph = Training(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if flow.env.get_rank() == ODD:
            made = graph._programs
            graph.__dict__["_programs"] = lambda *args: made(*args) and _fails(None)
        with pytest.raises(
            ValueError if flow.env.get_rank() == ODD else GraphError, match="of its own"
        ):
            graph(torch.ones(4, 4, dtype=torch.float64).to_global(where, B))  # type: ignore[attr-defined]

    simulate(2, run, timeout=20.0)
