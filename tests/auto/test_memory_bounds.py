"""Tests of bounds for plans under a memory limit, by a price on memory, and of the bytes that GPU
kernels save for backward."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_search import DGX, gpt, only
from torch import Tensor

from globaltensor.auto.cost.batch_scaling import Batches
from globaltensor.auto.inter_op import search as module
from globaltensor.auto.inter_op.lagrangian_bound import Dual
from globaltensor.auto.inter_op.search import PipelineSearch, SearchSpace, search_pipelines
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.auto.search_limits import LIMITS
from globaltensor.errors import PlanError


def all_looks(dual: Dual) -> float:
    looks = 0
    while dual.look():
        looks += 1
        assert looks < 100
    return dual.value


@pytest.mark.long
@pytest.mark.parametrize(
    ("layers", "share", "tied"),
    [
        (2, 0.25, False),
        *(
            pytest.param(4, share, tied, marks=pytest.mark.extended)
            for tied in (False, True)
            for share in (0.25, 0.45, 0.7)
        ),
    ],
)
def test_no_plan_of_a_schedule_takes_less_than_its_bound(
    layers: int, share: float, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = dataclasses.replace(LIMITS, prices_before_division=-1)
    monkeypatch.setattr(module, "LIMITS", limits)  # skip no setting because of its bound
    of = gpt(layers, width=512, length=128, tied=tied)
    free = search_pipelines(
        of, 32, DGX, 4, Options(memory=10**12), SearchSpace(stages=[1], micro_batches=[1])
    )
    options = Options(memory=int(free.memory * share))
    search = PipelineSearch(Batches(of, 32), DGX, 4, options, SearchSpace(micro_batches=[1, 2, 8]))
    search.run(math.inf)
    compared = raised = 0
    for c in search.candidates:
        dual = search._dual(
            search._mesh_context(c.setting.mesh, c.setting.micros), c.setting, c.schedule, c.lanes
        )
        evenly = dual.evenly + dual.bubble
        assert evenly <= all_looks(dual) <= c.cost * (1 + 1e-9), (c.setting, c.schedule)
        compared, raised = compared + 1, raised + (dual.value > evenly * (1 + 1e-6))
        prices = sorted(dual.known)
        for a, b, d in zip(
            prices, prices[1:], prices[2:], strict=False
        ):  # a minimum of lines is concave
            on = ((d - b) * dual.known[a] + (b - a) * dual.known[d]) / (d - a)
            assert dual.known[b] >= on - 1e-9 * abs(on)
    assert compared >= 2
    assert raised or share == 0.7, "where memory is short it costs time"
    best, _ = search.best()
    assert 0 < search.bound <= best.cost


@pytest.mark.long
@pytest.mark.parametrize("layers", [6, pytest.param(12, marks=pytest.mark.extended)])
def test_the_bound_is_near_where_recomputing_is_what_memory_costs(layers: int) -> None:
    """The bound is close where recomputation is the price of memory. In a column of equal layers on
    one device, the fewest layers that make the plan fit are recomputed. The bound is a little below
    the cost."""
    of, space = gpt(layers, width=512, length=256), only((1,))
    free = search_pipelines(of, 16, DGX, 1, Options(memory=10**13), space)
    kept = search_pipelines(of, 16, DGX, 1, Options(memory=10**13), only((1,), recompute=False))
    assert free.cost == pytest.approx(kept.cost)
    limit = int(free.memory * 0.6)
    tight = search_pipelines(of, 16, DGX, 1, Options(memory=limit), space)
    again = len(tight.choices["recompute"])
    assert 0 < again < layers
    assert free.cost < tight.bound <= tight.cost
    a_layer = (tight.cost - free.cost) / again
    assert tight.cost - tight.bound < 3 * a_layer, (
        "a layer, and what calls need only while they run, which the bound leaves out"
    )
    with pytest.raises(PlanError, match="the minimum that was found"):
        search_pipelines(of, 16, DGX, 1, Options(memory=limit // 20), space)


@pytest.mark.long
@pytest.mark.parametrize("layers", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_a_bound_without_a_limit_is_the_even_part(layers: int) -> None:
    search = PipelineSearch(Batches(gpt(layers), 16), DGX, 4, Options(), SearchSpace())
    settings = list(search._settings())
    search.bounds = {s[1:]: s.bound for s in settings}
    for setting in settings[:6]:
        for lanes, schedule in search._lanes(setting.stages):
            dual = search._dual(
                search._mesh_context(setting.mesh, setting.micros), setting, schedule, lanes
            )
            assert not dual.look()
            assert dual.value == dual.evenly + dual.bubble


# ----------------------------------------------------------------------------- bytes saved on a GPU


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(64, 192), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, None, self.dropout, is_causal=True).sum()


def kept(model: nn.Module, dtype: torch.dtype, device: str, name: str) -> tuple[int, int]:
    """Return (bytes in addition to values, number of values) that the calls of this name save for
    backward."""
    calls = calls_of_model(
        model.to(dtype), (torch.empty(2, 128, 64, dtype=dtype),), None, device
    ).calls
    found = [c for c in calls if getattr(c.func, "__name__", "") == name]
    assert found
    return sum(c.extra for c in found), sum(len(c.keeps) for c in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.sweep(3)
def test_attention_of_a_gpu_keeps_no_scores_with_dropout_either(dtype: torch.dtype) -> None:
    rows = 2 * 4 * 128 * 4  # the logarithm of each query's sum, in single precision
    name = "scaled_dot_product_attention"
    assert (
        kept(Attention(0.0), dtype, "cuda", name)
        == kept(Attention(0.0), dtype, "cpu", name)
        == (rows, 2)
    )
    assert kept(Attention(0.1), dtype, "cuda", name) == (rows, 2)
    assert kept(Attention(0.1), dtype, "cpu", name)[0] > 2 * 4 * 128 * 128 * dtype.itemsize, (
        "the scores at least"
    )
    assert kept(Attention(0.1), torch.float64, "cuda", name) == kept(
        Attention(0.1), torch.float64, "cpu", name
    ), "no fused kernel has it"


class Dropping(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first, self.how = nn.Linear(64, 64), how

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.first(x), **self.how).sum()


@pytest.mark.parametrize(
    ("how", "here", "there"),
    [({}, 4, 1), ({"p": 0.1}, 4, 1), ({"p": 0.0}, None, None), ({"training": False}, 0, 0)],
)
def test_dropout_of_a_gpu_keeps_a_byte_for_each_element(
    how: dict[str, Any], here: int | None, there: int | None
) -> None:
    elements = 2 * 128 * 64
    on = {
        device: kept(Dropping(**how), torch.float32, device, "dropout")[0]
        for device in ("cpu", "cuda")
    }
    assert (
        on["cpu"] == on["cuda"]
        if here is None or there is None
        else on == {"cpu": here * elements, "cuda": there * elements}
    )


def test_plans_of_gpus_need_less_memory_where_much_is_dropped() -> None:
    model = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    bytes_of = {
        d: sum(c.extra for c in calls_of_model(model, (torch.empty(2, 128, 64),), None, d).calls)
        for d in ("cpu", "cuda")
    }
    assert bytes_of["cuda"] < bytes_of["cpu"] / 3, "attention within a composition too"
