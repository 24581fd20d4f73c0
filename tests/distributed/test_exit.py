"""Tests of how ranks end. A process group that outlives its world would keep threads that need
Python's lock after the interpreter has gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    command = [
        sys.executable,
        "-m",
        "globaltensor.distributed.launch",
        "--nproc_per_node",
        "2",
        str(folder / "script.py"),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.extended
def test_no_process_group_outlives_the_world(tmp_path: Path) -> None:
    done = launched(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("still there: 0 of") == 2, done.stderr


def test_a_group_that_the_program_still_holds_does_no_harm(tmp_path: Path) -> None:
    done = launched(tmp_path, HELD)
    assert done.returncode == 0, done.stderr
