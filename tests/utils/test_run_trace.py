"""Tests of flow.utils.trace(): one file with the events of all ranks."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.pool import run_on
from support.warm_python import warm_python

import globaltensor as flow
from globaltensor.__main__ import main
from globaltensor.distributed.simulate import simulate
from globaltensor.utils.run_trace import _compact, merged

B, S = flow.sbp.broadcast, flow.sbp.split


class Doubled(flow.nn.Graph):
    def build(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).to_global(sbp=B)  # type: ignore[attr-defined, no-any-return]


def write(path: str) -> list[str]:
    """Trace an eager boxing, a backward pass and a graph, and return the names seen here."""
    everyone = flow.placement.all("cpu")
    x = torch.randn(512, 8).to_global(everyone, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    model = nn.Linear(8, 8).to_global(everyone, B)  # type: ignore[operator]
    graph = Doubled()
    graph(x)
    with flow.utils.trace(path) as profiler:
        x.to_global(sbp=B)
        model(x).sum().backward()
        graph(x)
    return [event.name for event in profiler.events()]


def test_one_file_has_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    names = run_on(2, write, str(path))
    trace: dict[str, Any] = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        boxings = [e["name"] for e in mine if e["name"].startswith("box ")]
        assert boxings == ["box S(0)->B 8.0 KiB ranks 0-1"] * 2, "eager, and in the graph"
        assert "exchange gradients: 2 summed in one bucket" in {e["name"] for e in mine}
        assert {e["name"] for e in mine if e["name"] == "aten::mm"}
        assert set(boxings) <= set(names[rank])
        threads = {e["tid"] for e in events if e["pid"] == rank and e["name"] == "thread_name"}
        assert {e["tid"] for e in mine} <= threads
    both = [
        next(e["ts"] for e in events if e["pid"] == r and e["name"].startswith("box "))
        for r in (0, 1)
    ]
    assert abs(both[0] - both[1]) < 1e6, "the ranks' clocks are aligned to a second"


def test_clocks_with_another_base_are_aligned() -> None:
    event = {"name": "a", "ph": "X", "tid": 0, "ts": 10.0, "dur": 1.0}
    ranks = [
        {"rank": r, "base": base, "names": {0: "main"}, "events": [{**event, "pid": r}]}
        for r, base in ((0, 5_000), (1, 8_000))
    ]
    found = [e["ts"] for e in merged(ranks)["traceEvents"] if e["ph"] == "X"]
    assert found == [10.0, 13.0]


def test_streams_of_a_gpu_are_threads_of_their_rank() -> None:
    """The device of a kernel has the process number 0, and streams have small numbers too."""
    found = {
        "baseTimeNanoseconds": 7,
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}},
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "launch", "pid": 4321, "tid": 7, "ts": 10.0, "dur": 2.0},
            {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 11.0, "dur": 5.0},
            {"ph": "s", "name": "ac2g", "id": 3, "pid": 4321, "tid": 7, "ts": 10.0},
            {"ph": "f", "name": "ac2g", "id": 3, "pid": 0, "tid": 7, "ts": 11.0},
            {"ph": "X", "name": "whole", "pid": "Spans", "tid": "x", "ts": 0.0, "dur": 20.0},
        ],
    }
    compact = _compact(found, rank=2, offset=1.0)
    events = {e["name"] + e["ph"]: e for e in compact["events"]}
    assert set(events) == {"launchX", "kernelX", "ac2gs", "ac2gf"}
    assert {e["pid"] for e in events.values()} == {2}
    assert [events[k]["ts"] for k in ("launchX", "kernelX")] == [9.0, 10.0]
    assert events["launchX"]["tid"] == events["ac2gs"]["tid"] != events["kernelX"]["tid"]
    assert events["ac2gs"]["id"] == events["ac2gf"]["id"] == "2.3"
    assert compact["names"][events["kernelX"]["tid"]] == "stream 7"
    assert compact["base"] == 7


def cannot(path: str) -> str:
    with pytest.raises(flow.errors.WorldError) as error, flow.utils.trace(path):
        raise AssertionError("the block must not run")
    return str(error.value)


def test_all_ranks_refuse_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    first, second = run_on(2, cannot, str(tmp_path / "no" / "trace.json"))
    assert first == second
    assert "rank 0 cannot write" in first
    assert "FileNotFoundError" in first


def failing(path: str) -> None:
    with pytest.raises(ValueError, match="mine"), flow.utils.trace(path):
        raise ValueError("mine")


def test_a_block_that_fails_writes_nothing(tmp_path: Path) -> None:
    run_on(2, failing, str(tmp_path / "trace.json"))
    assert not list(tmp_path.iterdir())


def test_simulated_ranks_are_refused(tmp_path: Path) -> None:
    assert "threads of one process" in simulate(2, cannot, str(tmp_path / "trace.json"))[0]


TRACED = """
import sys
import globaltensor as flow
from globaltensor.__main__ import main
from beside import SIZE
x = flow.randn(SIZE, 4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
x.to_global(sbp=flow.sbp.broadcast)
if flow.env.get_rank() == 0:
    print(__name__, sys.argv)
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.long
@pytest.mark.parametrize(("as_module", "n"), [(False, 2), (True, 1)])
def test_the_command_traces_a_script_on_all_ranks(
    as_module: bool,
    n: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    (tmp_path / "beside.py").write_text("SIZE = 8\n")
    script, path = tmp_path / "traced_program.py", tmp_path / "traced.json"
    script.write_text(TRACED)
    if as_module:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    name = ["-m", "traced_program"] if as_module else [str(script)]
    assert main(["trace", "-n", str(n), "--out", str(path), *name, "--steps", "0"]) == 0
    out, err = capfd.readouterr()
    assert out == f"__main__ {[str(script), '--steps', '0']}\n"
    assert err == f"globaltensor trace: wrote {path}; ui.perfetto.dev opens it\n"
    events = json.loads(path.read_text())["traceEvents"]
    boxings = {(e["pid"], e["name"]) for e in events if e["name"].startswith("box ")}
    assert {e["pid"] for e in events} == set(range(n))
    expected = {(rank, "box S(0)->B 64 B ranks 0-1") for rank in (0, 1)} if n == 2 else set()
    assert boxings == expected


@pytest.mark.long
def test_the_command_ends_as_the_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    (tmp_path / "beside.py").write_text("SIZE = 8\n")
    script, path = tmp_path / "traced_program.py", tmp_path / "traced.json"
    script.write_text(TRACED)
    assert main(["trace", "--out", str(path), str(script), "7"]) == 7
    assert not path.exists(), "a run that failed"
    assert main(["trace", "--no_python", "ls"]) == 2
    assert main(["trace", str(tmp_path / "nonesuch.py")]) == 2
    assert re.search(
        r"only a Python script .*nonesuch.py does not exist", capfd.readouterr().err, re.S
    )
