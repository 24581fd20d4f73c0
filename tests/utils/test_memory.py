"""Tests of flow.memory_summary(): the bytes of each rank, by kind and layout."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.utils.memory import MemorySummary, memory_summary, peak_memory

B, S = flow.sbp.broadcast, flow.sbp.split


def trained(plan: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with 8 x 6 weights, 8 biases and a batch norm, after a step and a backward."""
    torch.manual_seed(0)
    everyone = flow.placement.all("cpu")
    model = flow.parallelize(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), everyone, plan)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 6).to_global(everyone, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    model(x).square().mean().backward()
    optimizer.step()
    return model, optimizer


def summed(summary: MemorySummary) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for row in summary.rows:
        a, b, c = found.get(row.kind, (0, 0, 0))
        found[row.kind] = a + row.tensors, b + row.bytes, c + row.full_bytes
    return found


def of_plan(plan: str) -> tuple[dict[str, tuple[int, int, int]], list[str]]:
    model, optimizer = trained(plan)
    with record_collectives() as sent:
        summary = memory_summary(model, optimizer)
    assert not sent
    return summed(summary), sorted({row.layout for row in summary.rows})


PARAMETERS = (6 * 8 + 3 * 8) * 4  # bytes: weights, biases, and two of the batch norm
STEPS = 4 * 4  # a number of steps for each of four parameters
BUFFERS = 2 * 8 * 4 + 8  # running means and variances, and a count of batches


def test_replicas_hold_everything() -> None:
    for found, layouts in run_on(2, of_plan, "data"):
        assert found == {
            "parameters": (4, PARAMETERS, PARAMETERS),
            "gradients": (4, PARAMETERS, PARAMETERS),
            "optimizer state": (12, 2 * PARAMETERS + STEPS, 2 * PARAMETERS + STEPS),
            "buffers": (3, BUFFERS, BUFFERS),
        }
        assert "B on cpu[0, 1]" in layouts


def test_shards_hold_half() -> None:
    for found, layouts in run_on(2, of_plan, "fsdp"):
        assert found["parameters"] == (4, PARAMETERS // 2, PARAMETERS)
        assert found["gradients"] == (4, PARAMETERS // 2, PARAMETERS)
        assert found["optimizer state"] == (12, PARAMETERS + STEPS, 2 * PARAMETERS + STEPS)
        assert "S(0) on cpu[0, 1]" in layouts


def unsummed() -> list[tuple[str, str, int]]:
    model, optimizer = trained("data")
    optimizer.zero_grad()
    x = torch.randn(4, 6).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    with flow.no_sync():
        model(x).square().mean().backward()
    return [(r.kind, r.layout, r.bytes) for r in memory_summary(model).rows if "grad" in r.kind]


def test_unsummed_gradients_are_shown_without_summing_them() -> None:
    assert run_on(2, unsummed) == [[("gradients", "P on cpu[0, 1]", PARAMETERS)]] * 2


def test_tables_and_data() -> None:
    tied = nn.ModuleList([nn.Linear(4, 4, bias=False)] * 2)
    tied[0].weight.grad = torch.zeros(4, 4)
    summary = memory_summary(tied)
    assert str(summary).splitlines()[:4] == [
        "            layout        tensors  rank 0   full",
        "parameters  plain on cpu        1    64 B   64 B",
        "gradients   plain on cpu        1    64 B   64 B",
        "total                           2   128 B  128 B",
    ]
    data: dict[str, Any] = json.loads(json.dumps(summary.as_dict()))
    assert data["bytes"] == 128
    assert data["rows"][0] == {
        "kind": "parameters",
        "layout": "plain on cpu",
        "tensors": 1,
        "bytes": 64,
        "full_bytes": 64,
    }


def test_an_optimizer_alone_knows_its_parameters() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 5).parameters(), lr=0.1, momentum=0.9)
    assert summed(memory_summary(optimizer=optimizer)) == {"parameters": (2, 80, 80)}


def test_the_memory_of_the_process() -> None:
    gc.collect()
    before = memory_summary()
    assert before.rows == ()
    assert before.resident is not None
    # large enough for pages of its own: the allocator takes up to 32 MiB from memory freed before
    held = torch.ones(256 << 20, dtype=torch.uint8)
    after = memory_summary().resident
    peak = peak_memory()
    assert after is not None
    assert peak is not None
    assert after - before.resident > 0.9 * held.nbytes
    assert peak >= held.nbytes


def test_wrong_arguments() -> None:
    with pytest.raises(flow.errors.GlobalTensorError, match="model is a Tensor"):
        memory_summary(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(flow.errors.GlobalTensorError, match="optimizer is a Linear"):
        memory_summary(None, nn.Linear(1, 1))  # type: ignore[arg-type]


def test_without_tensors_only_the_process_is_shown() -> None:
    assert str(memory_summary()).startswith("process ")
    optimizer = torch.optim.SGD([torch.ones(2)], 0.1)
    assert "total" in str(memory_summary(optimizer=optimizer))
