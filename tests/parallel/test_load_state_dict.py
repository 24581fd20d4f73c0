"""Tests of ``load_state_dict`` where the ranks load different values or names."""

from __future__ import annotations

import re

import pytest
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError


def model() -> nn.Module:
    return flow.parallelize(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        flow.placement.all("cpu"),
        "data",
    )


def full(m: nn.Module, value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(t.shape, value, dtype=t.dtype) for name, t in m.state_dict().items()}


def other_values() -> str:
    m = model()
    m.load_state_dict(full(m, 2.0))
    assert m[0].weight.sum().item() == 18.0  # type: ignore[index, operator, union-attr]
    with pytest.raises(DivergenceError) as found:
        m.load_state_dict(full(m, float(flow.env.get_rank())))
    world().forget()
    world().comm((0, 1)).barrier()
    return str(found.value)


def other_names(strict: bool) -> str:
    m = model()
    state = full(m, 1.0)
    if flow.env.get_rank() == 0:
        del state["0.weight"]
    with pytest.raises(DivergenceError) as found:
        m.load_state_dict(state, strict=strict)
    return str(found.value)


def missing_everywhere() -> None:
    m = model()
    state = full(m, 1.0)
    del state["0.weight"]
    assert m.load_state_dict(state, strict=False).missing_keys == ["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0.weight"):
        m.load_state_dict(state)
    state = full(m, 1.0) | {"0.weight": torch.ones(7, 7)}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        m.load_state_dict(state)


def test_values_that_differ_raise_one_error() -> None:
    said = run_on(2, other_values)
    assert said[0] == said[1]
    assert re.match(r"test_load_state_dict.py:\d+: m.load_state_dict", said[0])
    assert said[0].count("rank 0: float32[3, 3] of [0, 0, 0, ...]") == 1
    assert said[0].count("hold different values") == 1


@pytest.mark.parametrize("strict", [True, False])
def test_names_that_differ_raise_one_error(strict: bool) -> None:
    said = run_on(2, other_names, strict)
    assert said[0] == said[1]
    assert re.match(
        r"test_load_state_dict.py:\d+: .*\nload_state_dict of Sequential: the ranks pass state "
        r"dicts with different names:\n  only rank 1 has 0.weight\n",
        said[0],
    )


def test_other_errors_are_pytorchs() -> None:
    run_on(2, missing_everywhere)
