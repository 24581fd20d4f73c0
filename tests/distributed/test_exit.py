"""Tests of how ranks end. A process group that outlives its world would keep threads that need
Python's lock after the interpreter has gone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.forked import forked
from support.warm_python import warm_python

import globaltensor as flow

SCRIPT = """
import atexit, sys, weakref
groups = []
def look():  # registered before the world registers its own end, so called after it
    alive = [group() for group in groups if group() is not None]
    print("still there:", len(alive), "of", len(groups), file=sys.stderr, flush=True)
atexit.register(look)

import torch
import globaltensor as flow
from globaltensor.distributed.world import world

everyone = flow.placement.all("cpu")
model = torch.nn.Linear(4, 4).to_global(everyone, flow.sbp.broadcast)
optimizer = torch.optim.AdamW(model.parameters())
model(flow.randn(6, 4, placement=everyone, sbp=flow.sbp.split(0))).square().mean().backward()
optimizer.step()
flow.randn(6, 4, placement=everyone, sbp=flow.sbp.split(0)).to_global(sbp=flow.sbp.split(1))
assert "torch._dynamo" in sys.modules, "torch's compiler, which made the group last, is not loaded: this test shows nothing"
groups += [weakref.ref(torch.distributed.group.WORLD), *(weakref.ref(group) for group in world()._groups.values())]
"""  # noqa: E501


HELD = """
import sys
import torch, torch.distributed as dist
import globaltensor as flow
flow.env.get_rank()
held = dist.group.WORLD  # as a module-level DistributedDataParallel holds it
mine, all_ = torch.ones(4), [torch.empty(4), torch.empty(4)]
dist.barrier()
sys.setswitchinterval(100)  # nobody takes the GIL from this thread any more: gloo's must wait until it is given
for _ in range(20):
    dist.all_gather(all_, mine)
"""  # noqa: E501


def launched(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    # The ranks are started and torn down as Python does. The launcher need not be.
    launcher = [warm_python(), "-m", "globaltensor.distributed.launch", "--nproc_per_node", "2"]
    command = [*launcher, "--no_python", sys.executable, str(folder / "script.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.extended
def test_no_process_group_outlives_the_world(tmp_path: Path) -> None:
    done = launched(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("still there: 0 of") == 2, done.stderr


def test_a_group_that_the_program_still_holds_does_no_harm(tmp_path: Path) -> None:
    done = launched(tmp_path, HELD)
    assert done.returncode == 0, done.stderr


def end_after(seconds: float) -> None:
    """Run an operation on two ranks, and end on rank 1 so much later."""
    world_module = importlib.import_module("globaltensor.distributed.world")
    world_module._LINGER_SECONDS = 600.0  # type: ignore[attr-defined]
    x = flow.ones(4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    x.to_global(sbp=flow.sbp.broadcast)
    time.sleep(seconds * int(os.environ["RANK"]))


@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_rank_does_not_wait_for_one_that_has_ended(shared: str) -> None:
    """Rank 0 waits for the record of rank 1, which ends shortly after it: not all of 600 s."""
    codes, said = forked(2, end_after, 0.2, variables={"GLOBALTENSOR_SHARED_MEMORY": shared})
    assert codes == [0, 0], said
