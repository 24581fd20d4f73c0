"""Tests that torch.jit refuses global tensors, and still takes plain ones."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, aot_module, nop
from support.pool import run_on
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

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


def doubled(t: torch.Tensor) -> torch.Tensor:
    return t + t


def refusals(linear: Any, scripted: Any) -> None:
    """Call torch.jit with global tensors. ``linear``, ``scripted``: programs of it, which cannot be
    made in several threads at once."""
    where = flow.placement.all("cpu")
    model = flow.parallelize(nn.Linear(3, 2), where, "data")
    x = torch.ones(4, 3).to_global(where, flow.sbp.broadcast)  # type: ignore[attr-defined]
    calls = {
        r"a program of torch.jit \(forward\) runs on plain tensors": lambda: linear(x),
        r"a program of torch.jit \(doubled\) runs on plain": lambda: scripted(x),
        r"torch.jit.trace cannot hold global tensors, and a tensor that the traced function uses": (
            lambda: torch.jit.trace(lambda t: t * x, (torch.ones(4, 3),))
        ),
        r"make_fx cannot hold global tensors, and an argument is one": (
            lambda: make_fx(lambda t: t * 2)(x)
        ),
        r"AOTAutograd \(functorch.compile\) cannot hold global tensors, and an input is one": (
            lambda: aot_function(doubled, fw_compiler=nop)(x)
        ),
        r"AOTAutograd .* and an input": lambda: aot_module(model, fw_compiler=nop)(x),
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
        assert ("use flow.nn.Graph" in str(found.value)) != ("a program of" in str(found.value))
    local = flow.local_map(linear, out_sbp=flow.sbp.broadcast, in_sbp=[flow.sbp.broadcast])(x)
    assert torch.equal(local.to_local(), linear(torch.ones(4, 3)))


def test_global_tensors_are_refused() -> None:
    simulate(2, refusals, torch.jit.script(nn.Linear(3, 2)), torch.jit.script(doubled))


def onnx_refused() -> None:
    warnings.simplefilter("ignore")
    model = flow.parallelize(nn.Linear(3, 2), flow.placement.all("cpu"), "fsdp")
    with pytest.raises(CompileError, match=r"torch.onnx.export\(dynamo=False\) cannot hold"):
        torch.onnx.export(model, (torch.ones(4, 3),), io.BytesIO(), dynamo=False)


def test_export_by_tracing_is_refused() -> None:
    run_on(2, onnx_refused)


def test_plain_tensors_work() -> None:
    x = torch.ones(4, 3)
    linear = nn.Linear(3, 2)
    assert torch.equal(torch.jit.trace(linear, (x,))(x), linear(x))
    assert torch.jit.script(Scaled())(-x).sum() == -12.0
    assert torch.jit.script(Scaled())(x).sum() == 24.0

    assert torch.jit.script(doubled)(x).sum() == 24.0
    assert torch.jit.trace(doubled, (x,))(-x).sum() == -24.0
    assert make_fx(doubled)(x)(-x).sum() == -24.0
    assert aot_function(doubled, fw_compiler=nop)(x).sum() == 24.0
