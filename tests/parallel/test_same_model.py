"""Tests of modules that differ between ranks in the order or the ties of their tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.errors import DivergenceError

B = flow.sbp.broadcast


class Ordered(nn.Module):
    """A model whose layers are registered in a given order."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            layer = nn.Linear(3, 3)
            nn.init.constant_(layer.weight, float(ord(name)))
            setattr(self, name, layer)


def other_models() -> list[str]:
    rank, where, said = flow.env.get_rank(), flow.placement.all("cpu"), []
    swapped = "ab" if rank == 0 else "ba"

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        if rank == 1:
            model[1].weight = model[0].weight
        return model

    calls: list[tuple[str, Any]] = [
        ("parallelize", lambda m: flow.parallelize(m, where, "fsdp")),
        ("module.to_global", lambda m: m.to_global(where, B)),
    ]
    for purpose, call in calls:
        for model, pattern in (
            (
                Ordered(swapped),
                (
                    "the ranks have registered the tensors of Ordered in different orders: number "
                    "0 is a.weight on rank 0 and b.weight on rank 1"
                ),
            ),
            (
                tied(),
                (
                    "the ranks have tied 1.weight of Sequential differently: on rank 0 it is a "
                    "tensor of its own, on rank 1 it is tied to 0.weight"
                ),
            ),
        ):
            with pytest.raises(DivergenceError) as found:
                call(model)
            text = str(found.value)
            assert re.match(rf"test_same_model.py:\d+: .*\n{purpose}: {re.escape(pattern)}", text)
            assert not any(p.is_global for p in model.parameters())  # type: ignore[attr-defined]
            said.append(text)
    model = Ordered("ab")
    model.a.weight = model.b.weight
    flow.parallelize(model, where, "fsdp")
    assert model.a.weight is model.b.weight
    assert model.a.weight.sum().item() == 9 * 98.0
    return said


def test_models_in_another_order_or_tied_otherwise_are_told() -> None:
    said = run_on(2, other_models)
    assert said[0] == said[1]
