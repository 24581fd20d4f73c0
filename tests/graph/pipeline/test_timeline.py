"""Tests of the timeline of a graph's run: spans of all ranks, optimizer steps after them, and a
trace next to the simulated one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import GraphError
from globaltensor.graph.pipeline import timeline

B = flow.sbp.broadcast


class Training(flow.nn.Graph):
    def __init__(self, model: Any, name: str, train: bool = True) -> None:
        super().__init__()
        self.model = model
        if train:
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            self.config.set_gradient_accumulation_steps(4)
        self.config.set_schedule(name)

    def build(self, x: Any) -> Any:
        loss = self.model(x).square().mean()
        if self.training:
            loss.backward()
        return loss


def net() -> Any:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def _run(directory: str, groups: list[list[int]], name: str) -> Any:
    places = [flow.placement("cpu", ranks) for ranks in groups]
    graph = Training(flow.pipeline.cut(net(), places, at=["2"]), name)
    x = torch.ones(8, 3, dtype=torch.float64).to_global(places[0], B)  # type: ignore[attr-defined]
    graph(x)
    with pytest.raises(GraphError, match="enable_timeline"):
        graph.timeline()
    graph.config.enable_timeline()
    graph(x)
    graph(x)
    path = Path(directory) / "trace.json"
    line = graph.timeline(path)
    rows = graph._last.staged.schedule.rows
    world().comm(tuple(range(world().size))).barrier()
    written = json.loads(path.read_text())["traceEvents"]
    graph.config.enable_timeline(False)
    graph(x)
    return (
        line.names,
        [[str(s.action) for s in line.spans if s.lane == i] for i in range(line.lanes)],
        [str(a) for row in rows for a in row],
        line,
        written,
    )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_spans_of_all_ranks_and_their_steps(name: str, tmp_path: Path) -> None:
    groups = [[0], [1, 2]]
    for names, each, actions, line, written in simulate(3, _run, str(tmp_path), groups, name):
        assert names == ("rank 0", "rank 1", "rank 2")
        assert sorted(each[0] + each[1]) == sorted(actions), (
            "the last run's actions, once for each rank"
        )
        assert each[1] == each[2]
        for lane, start, end in line.steps:
            assert max(s.end for s in line.spans if s.lane == lane) <= start <= end
        assert [lane for lane, _, _ in line.steps] == [0, 1, 2]
        threads = [(e["pid"], e["args"]["name"]) for e in written if e["name"] == "thread_name"]
        assert threads == [
            (0, "rank 0"),
            (0, "rank 1"),
            (0, "rank 2"),
            (1, "lane 0"),
            (1, "lane 1"),
        ]
        assert sorted(
            e["name"] for e in written if e["pid"] == 1 and e["ph"] == "X" and e["name"] != "step"
        ) == sorted(actions)
        assert sum(e["name"] == "step" for e in written) == 3 + 2


def test_on_processes(tmp_path: Path) -> None:
    for names, each, _, _, _ in run_on(2, _run, str(tmp_path), [[0], [1]], "1f1b"):
        assert names == ("rank 0", "rank 1")
        assert each[1] == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3".split()


def test_what_has_no_timeline() -> None:
    place = flow.placement("cpu", [0])
    graph = Training(net().to_global(place, B), "1f1b")
    graph.config.enable_timeline()
    for _ in range(2):
        with pytest.raises(GraphError, match="several stages"):
            graph.timeline()
        graph(torch.ones(8, 3, dtype=torch.float64).to_global(place, B))  # type: ignore[attr-defined]


def test_names_of_lanes() -> None:
    line = timeline([(0, "0F0", 0.0, 1.0), (2, "1F0", 1.0, 2.0)], names=["a", "rank 5", "rank 10"])
    assert [row.split()[0] for row in line.draw().splitlines()] == ["a", "rank", "rank"]
    assert "rank 10" in str(line)
