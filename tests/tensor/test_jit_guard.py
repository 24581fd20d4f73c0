"""Tests that torch.jit refuses global tensors, and still takes plain ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import CompileError


@pytest.fixture(autouse=True)
def deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and the tracer warns
        yield


class Scaled(nn.Module):
    """A module with a control flow that only a script keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def refusals() -> None:
    where = flow.placement.all("cpu")
    model = flow.parallelize(nn.Linear(3, 2), where, "data")
    x = torch.ones(4, 3).to_global(where, flow.sbp.broadcast)  # type: ignore[attr-defined]
    calls = {
        r"torch.jit.trace cannot hold global tensors, and its tensor weight is one": (
            lambda: torch.jit.trace(model, (torch.ones(4, 3),))
        ),
        r"torch.jit.trace cannot hold global tensors, and an argument is one": (
            lambda: torch.jit.trace(torch.sin, (x,))
        ),
        r"torch.jit.trace_module cannot": lambda: torch.jit.trace_module(model, {"forward": x}),
        r"torch.jit.script cannot": lambda: torch.jit.script(nn.Sequential(model)),
    }
    for pattern, call in calls.items():
        with pytest.raises(CompileError, match=pattern) as found:
            call()
        assert str(found.value).startswith("test_jit_guard.py:")
        assert "use flow.nn.Graph" in str(found.value)


def test_global_tensors_are_refused() -> None:
    simulate(2, refusals)


def test_plain_tensors_work() -> None:
    x = torch.ones(4, 3)
    linear = nn.Linear(3, 2)
    assert torch.equal(torch.jit.trace(linear, (x,))(x), linear(x))
    assert torch.jit.script(Scaled())(-x).sum() == -12.0
    assert torch.jit.script(Scaled())(x).sum() == 24.0

    @torch.jit.script
    def doubled(t: torch.Tensor) -> torch.Tensor:
        return t + t

    assert doubled(x).sum() == 24.0
