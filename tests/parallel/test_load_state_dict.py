"""Tests of ``load_state_dict`` where the ranks load different values or names."""

from __future__ import annotations

import re

import pytest
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
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


class Tied(nn.Module):
    """A model with a tied weight, a buffer, and rows that no two ranks share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 5), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.table(words)))
        return nn.functional.cross_entropy(logits, words)


def trained(m: nn.Module, words: torch.Tensor) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.SGD(m.parameters(), lr=0.5), []
    for _ in range(3):
        loss = m(words)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(t.detach() for t in m.state_dict().values())]


def assigned(plan: str, meta: bool, keep_vars: bool) -> None:
    """Load plain tensors with assign=True: the model trains as the plain one, in its layout."""
    placement = flow.placement.all("cpu")
    plain = Tied().double()
    with torch.no_grad():
        for i, p in enumerate(plain.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) + i)
    with torch.device("meta" if meta else "cpu"):
        m = flow.parallelize(Tied(), placement, plan)
    layouts = {name: (t.shape, t.sbp) for name, t in m.state_dict().items()}
    twin = Tied().double()
    for receiver in (m, twin):
        state = {
            name: t if keep_vars else t.clone() if t.dim() else t
            for name, t in plain.state_dict(keep_vars=keep_vars).items()
        }
        state["head.weight"] = state["table.weight"]  # as torch.load returns tied tensors
        if keep_vars:
            state = {name: t.detach().clone() for name, t in state.items()}
            shared = nn.Parameter(state["table.weight"])
            state |= {"table.weight": shared, "head.weight": shared}
        receiver.load_state_dict(state, assign=True)
    assert all(t.is_global for t in (*m.parameters(), *m.buffers()))
    assert {name: (t.shape, t.sbp) for name, t in m.state_dict().items()} == layouts
    assert len(list(m.parameters())) == len(list(twin.parameters()))
    words = torch.arange(6)
    batch = words.to_global(placement, flow.sbp.broadcast)
    if plan != "tensor":
        batch = batch.to_global(sbp=flow.sbp.split(0))
    for got, want in zip(trained(m, batch), trained(twin, words), strict=True):
        torch.testing.assert_close(torch.from_numpy(got.numpy()), want)


@pytest.mark.parametrize("plan", ["data", "fsdp", "tensor"])
@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.sweep(4)
def test_plain_tensors_that_are_assigned_become_global(plan: str, meta: bool) -> None:
    for keep_vars in (False, True):
        simulate(2, assigned, plan, meta, keep_vars)


def assigned_unlike() -> str:
    m = model()
    with pytest.raises(DivergenceError) as found:
        m.load_state_dict(full(m, float(flow.env.get_rank())), assign=True)
    return str(found.value)


def test_assigned_values_that_differ_raise_one_error() -> None:
    said = run_on(2, assigned_unlike)
    assert said[0] == said[1]
    assert re.match(r"test_load_state_dict.py:\d+: m.load_state_dict", said[0])
    assert "hold different values" in said[0]
