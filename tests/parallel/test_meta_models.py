"""Tests of a model on the meta device that is laid out by every plan on real processes and then
filled: by reset_parameters, a state dict, a checkpoint, or a safetensors file."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.auto.inter_op.search import SearchSpace, search_pipelines
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import PlacementError

B, S = flow.sbp.broadcast, flow.sbp.split


class Experts(nn.Module):
    """A module of two experts, chosen by position."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 6, 6))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(self.weight.shape[0]):
            chosen = (top_k_index == e).to(hidden_states.dtype) * top_k_weights
            out = out + chosen.sum(-1, keepdim=True) * (hidden_states @ self.weight[e])
        return out


class Model(nn.Module):
    """A model of linear pairs, a norm with buffers, experts, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.experts = (
            nn.Linear(6, 8),
            nn.Linear(8, 6),
            nn.BatchNorm1d(6),
            Experts(),
        )
        self.out = nn.Linear(6, 8, bias=False)
        self.out.weight = (
            nn.Parameter(torch.empty(8, 6)) if self.up.weight.shape != (8, 6) else self.up.weight
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x + self.down(torch.tanh(self.up(x))))
        index = (torch.arange(x.shape[0]) % 2).unsqueeze(1)
        return self.out(
            hidden + self.experts(hidden, index, torch.ones(x.shape[0], 1, dtype=x.dtype))
        )


def whole() -> Model:
    torch.manual_seed(5)
    return Model().double()


def on_meta() -> Model:
    with torch.device("meta"):
        return Model().double()


def rows() -> Tensor:
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def full(t: Tensor) -> Tensor:
    return torch.from_numpy(t.detach().numpy())


def places(axes: int) -> Any:
    return flow.placement("cpu", [0, 1] if axes == 1 else [[0, 1], [2, 3]])


def searched(model: nn.Module, where: Any) -> None:
    """Lay out by "auto". The plan of such a small model is data parallel."""
    flow.parallelize(model, where, "auto", inputs=(rows(),))


@functools.cache
def edited_plan() -> Any:
    """Return a plan of the search with the weight of `up` and `out` split by hand, as in a file."""
    plan = flow.auto.plan(on_meta(), rows(), "dgx-h100", mesh=(2,))
    return dataclasses.replace(
        plan,
        placed=tuple(
            dataclasses.replace(t, layout=("S(0)",)) if t.name == "up.weight" else t
            for t in plan.placed
        ),
    )


def searched_and_edited(model: nn.Module, where: Any) -> None:
    flow.parallelize(model, where, edited_plan())
    assert model.up.weight.sbp == (S(0),)  # type: ignore[union-attr]


@functools.cache
def plan_in_stages() -> Any:
    def calls(n: int) -> Any:
        return calls_of_model(on_meta(), (torch.empty(n, 6, dtype=torch.float64, device="meta"),))

    space = SearchSpace(stages=[2], micro_batches=[2], meshes=[(1,)], schedules=("1f1b",))
    cluster = flow.Cluster.preset("dgx-h100").with_size(2)
    return search_pipelines(calls, 4, cluster, 2, Options(), space)


def searched_in_stages(model: nn.Module, where: Any) -> None:
    """Lay out by a plan of two stages, of one rank each."""
    flow.parallelize(model, where, plan_in_stages())
    assert len({p.placement for p in model.parameters()}) == 2  # type: ignore[attr-defined]


def cut(model: nn.Module, where: Any) -> None:
    flow.pipeline.cut(model, [flow.placement("cpu", [r]) for r in (0, 1)], at=["norm"])
    assert len({p.placement for p in model.parameters()}) == 2  # type: ignore[attr-defined]


MAKERS = {
    "auto, edited": searched_and_edited,
    "auto": searched,
    "auto in stages": searched_in_stages,
    "cut": cut,
}


def laid_out(plan: Any, axes: int) -> Model:
    model = on_meta()
    held = list(model.parameters())
    optimizer_made_before = torch.optim.SGD(model.parameters(), lr=0.1)
    if isinstance(plan, str) and plan in MAKERS:
        MAKERS[plan](model, places(axes))
    else:
        flow.parallelize(model, places(axes), plan)
    assert all(p.is_meta for p in model.parameters())
    assert model.to_empty(device="cpu") is model
    rank = flow.env.get_rank()
    for p in model.parameters():
        assert p.to_local().shape == p.spec.local_shape(rank)  # type: ignore[attr-defined]
        assert p.to_local().device.type == "cpu"  # type: ignore[attr-defined]
    assert model.out.weight is model.up.weight
    assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
    assert all(
        p is q for p, q in zip(optimizer_made_before.param_groups[0]["params"], held, strict=True)
    )
    return model


def trains(model: Model, axes: int) -> None:
    """Check that training equals one device with the same numbers."""
    want = whole()
    want.load_state_dict({k: full(v) for k, v in model.state_dict().items()})
    x = rows().to_global(places(axes), [B] * axes)  # type: ignore[attr-defined]
    for m, given in ((want, rows()), (model, x)):
        optimizer = torch.optim.SGD(
            m.parameters(), lr=0.1, momentum=0.9
        )  # AdamW would turn rounding errors in the gradient of a bias before the norm into steps
        for _ in range(2):
            optimizer.zero_grad()
            m(given).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(
            full(p),
            q.detach(),
            rtol=1e-9,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


PLANS: list[tuple[Any, int]] = [
    (name, 1) for name in ("fsdp", "data", "tensor", "expert", "sequence")
] + [({"up.*": S(0), "*": B}, 1)]
PLANS_OF_SEARCHES: list[tuple[Any, int]] = [(name, 1) for name in MAKERS]
PLANS_ON_FOUR: list[tuple[Any, int]] = [
    (["fsdp", "tensor"], 2),
    ("hybrid", 2),
    (["data", "expert"], 2),
]


def filled(plan: Any, axes: int, folder: str) -> None:
    from torch.distributed import checkpoint as dcp

    safetensors = pytest.importorskip("safetensors.torch")
    source = whole()
    name = "_".join(str(plan).split())
    model = laid_out(plan, axes)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            torch.manual_seed(3)
            module.reset_parameters()
    assert all(torch.isfinite(full(p)).all() for p in model.parameters())
    trains(model, axes)

    model.load_state_dict(source.state_dict())
    for k, v in model.state_dict().items():
        assert torch.equal(full(v), source.state_dict()[k]), (plan, k)
    trains(model, axes)

    model = laid_out(plan, axes)
    model.load_state_dict(
        {k: v.to_global(places(axes), [B] * axes) for k, v in source.state_dict().items()}
    )  # type: ignore[attr-defined]
    dcp.save(model.state_dict(), checkpoint_id=str(Path(folder) / f"{name}.dcp"))
    again = laid_out(plan, axes)
    states = again.state_dict()
    dcp.load(states, checkpoint_id=str(Path(folder) / f"{name}.dcp"))
    again.load_state_dict(states)
    for k, v in again.state_dict().items():
        assert torch.equal(full(v), source.state_dict()[k]), (plan, k)

    path = Path(folder) / f"{flow.env.get_rank()}.safetensors"
    safetensors.save_file(
        {k: v.contiguous() for k, v in source.state_dict().items() if k != "out.weight"}, path
    )
    last = laid_out(plan, axes)
    last.load_state_dict(safetensors.load_file(path), strict=False)
    for k, v in last.state_dict().items():
        assert torch.equal(full(v), source.state_dict()[k]), (plan, k)
    trains(last, axes)


@pytest.mark.parametrize(("plan", "axes"), PLANS, ids=str)
@pytest.mark.sweep(3)
def test_every_plan_on_two_processes(plan: Any, axes: int, tmp_path: Path) -> None:
    run_on(2, filled, plan, axes, str(tmp_path), timeout=120.0)


@pytest.mark.parametrize(("plan", "axes"), PLANS_OF_SEARCHES, ids=str)
@pytest.mark.sweep(2)
def test_plans_of_the_search_and_of_stages(plan: Any, axes: int, tmp_path: Path) -> None:
    run_on(2, filled, plan, axes, str(tmp_path), timeout=120.0)


@pytest.mark.parametrize(("plan", "axes"), PLANS_ON_FOUR, ids=str)
@pytest.mark.sweep(3)
def test_plans_of_two_axes_on_four_processes(plan: Any, axes: int, tmp_path: Path) -> None:
    run_on(4, filled, plan, axes, str(tmp_path), timeout=180.0)


def without_values() -> list[str]:
    said = []
    x = torch.empty(4, 2, device="meta")
    g = x.to_global(flow.placement("meta", [0, 1]), S(0), check_meta=False)  # type: ignore[attr-defined]
    moved = g.to_global(sbp=B)  # boxing works on shapes alone
    assert moved.to_local().shape == moved.shape == (8, 2)
    assert (moved @ torch.empty(2, 3, device="meta")).shape == (8, 3)
    cpu: Any = places(1)
    for refused in (
        lambda: x.to_global(cpu, B),
        lambda: g.to_global(placement=cpu),
        g.numpy,
        lambda: g.sum().item(),
        g.cpu,
    ):  # type: ignore[attr-defined]
        with pytest.raises((PlacementError, RuntimeError, NotImplementedError)) as found:
            refused()
        said.append(f"{type(found.value).__name__}: {found.value}")
    assert "meta" in repr(g)
    return said


def unfilled() -> str:
    with torch.device("meta"):
        norm, last = nn.LayerNorm(6), nn.Linear(24, 6)
        model = nn.Sequential(nn.Embedding(10, 6), norm, nn.Linear(6, 24), nn.GELU(), last)
    flow.parallelize(model, places(1), "fsdp")
    with pytest.raises(PlacementError) as found:
        model(torch.arange(12).view(3, 4) % 10)
    return str(found.value)


def saved_unfilled(folder: str) -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(6)
    flow.parallelize(model, places(1), "data")
    flow.save(model.state_dict(), str(Path(folder, "model.pt")), global_dst_rank=0)


def test_a_model_without_values_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(PlacementError) as found:
        simulate(2, saved_unfilled, str(tmp_path))
    for text in (*run_on(2, unfilled), str(found.value)):
        assert text.startswith("test_meta_models.py:")
        assert "needs the values of a tensor on the meta device, which has none" in text
        assert "model.to_empty(device=...), then load_state_dict or reset_parameters" in text


def test_what_has_no_values_says_so_on_every_rank() -> None:
    first, second = run_on(2, without_values)
    assert first == second
    assert all("meta" in text for text in first), first
