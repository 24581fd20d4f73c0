"""Tests of states of models and graphs that go through files and other placements."""

from __future__ import annotations

import io
from typing import Any

import torch
from support.bodies import values
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

LINE, ONE = flow.placement("cpu", [0, 1]), flow.placement("cpu", [0])
B, S = flow.sbp.broadcast, flow.sbp.split


def model_of() -> Any:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(values(*p.shape, seed=i))
    return model.to_global(LINE, S(0))  # type: ignore[operator]


def loss_of(model: nn.Module, step: int) -> Tensor:
    x: Any = values(6, 4, seed=step)
    return model(x.to_global(LINE, B).to_global(sbp=S(0))).square().mean()  # type: ignore[no-any-return]


class Training(flow.nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def step(self, number: int) -> Tensor:
        x: Any = values(6, 4, seed=number)
        return torch.from_numpy(self(x.to_global(LINE, B).to_global(sbp=S(0))).numpy())


def test_files_are_read_as_torch_reads_them_by_default() -> None:
    def on_ranks() -> None:
        graph, file = Training(model_of()), io.BytesIO()
        graph.step(0)
        torch.save(graph.state_dict(), file)
        want = graph.step(1)
        file.seek(0)
        other = Training(model_of())
        other.load_state_dict(torch.load(file))  # torch.load defaults to weights_only
        torch.testing.assert_close(other.step(1), want)

    simulate(2, on_ranks)


def test_a_graph_takes_back_a_state_that_lies_on_one_rank() -> None:
    def on_ranks() -> None:
        graph = Training(model_of())
        graph.step(0)
        saved = flow.to_global(graph.state_dict(), placement=ONE, sbp=B, copy=True)
        want = graph.step(1)
        other = Training(model_of())
        other.load_state_dict(saved)
        torch.testing.assert_close(other.step(1), want)

    simulate(2, on_ranks)


def test_an_optimizer_takes_back_a_state_that_lies_on_one_rank() -> None:
    def on_ranks() -> None:
        losses: list[float] = []
        saved: Any = None
        for _ in range(2):
            model = model_of()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            for step in range(2 if saved is None else 1):
                optimizer.zero_grad()
                loss = loss_of(model, step if saved is None else 1)
                loss.backward()
                optimizer.step()
                if step == 0 and saved is None:
                    saved = flow.to_global(
                        (model.state_dict(), optimizer.state_dict()),
                        placement=ONE,
                        sbp=B,
                        copy=True,
                    )
            losses.append(loss_of(model, 2).item())
        assert abs(losses[0] - losses[1]) < 1e-12

    simulate(2, on_ranks)


def bare(device: str) -> Any:
    with torch.device(device):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()


def test_loaded_state_lies_on_the_device_of_the_parameter_on_ranks_without_a_part_too() -> None:
    """A fused optimizer passes empty local tensors to the kernel, too, and on GPUs they must not be
    on the host. A placement on "meta" shows the device without a GPU."""

    def on_ranks() -> None:
        p = nn.Parameter(torch.empty(4, 3, device="meta").to_global(flow.placement("meta", [0]), B))  # type: ignore[attr-defined]
        optimizer = torch.optim.Adam([p])
        state = {
            0: {name: torch.ones(4, 3) for name in ("exp_avg", "exp_avg_sq")}
            | {"step": torch.tensor(1.0)}
        }
        optimizer.load_state_dict(
            {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
        )
        assert {
            optimizer.state[p][name].to_local().device.type for name in ("exp_avg", "exp_avg_sq")
        } == {"meta"}

    simulate(2, on_ranks)


def test_a_model_on_the_meta_device_gets_memory_for_its_parts() -> None:
    def body() -> None:
        wanted, x = model_of(), values(6, 4)
        want = wanted(x.to_global(LINE, B))  # type: ignore[attr-defined]
        for plan in ("fsdp", "data", {"0.*": S(0), "*": B}):
            model = flow.parallelize(bare("meta"), LINE, plan)
            layout = {name: t.sbp for name, t in model.state_dict().items()}  # type: ignore[attr-defined]
            assert all(t.is_meta for t in model.state_dict().values())
            model.to_empty(device="cpu")
            assert {name: (t.sbp, t.placement) for name, t in model.state_dict().items()} == {
                n: (sbp, LINE) for n, sbp in layout.items()
            }  # type: ignore[attr-defined]
            assert isinstance(model[0].weight, nn.Parameter)
            model.load_state_dict(wanted.state_dict())
            assert torch.allclose(model(x.to_global(LINE, B)), want)  # type: ignore[attr-defined]
            model.to("meta")
            assert model[0].weight.is_meta

    simulate(2, body)


def test_parameters_that_get_memory_stay_tied_and_known_to_their_optimizer() -> None:
    def body() -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
            model[1].weight = model[0].weight
        flow.parallelize(model, LINE, "fsdp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model.to_empty(device="cpu")
        assert model[0].weight is model[1].weight
        nn.init.ones_(model[0].weight)
        model(torch.tensor([1, 1, 2, 4]).to_global(LINE, B)).sum().backward()  # type: ignore[attr-defined]
        optimizer.step()
        want = torch.ones(6, 4) - 0.5 * (
            torch.full((6, 4), 4.0) + 6 * torch.tensor([0.0, 2, 1, 0, 1, 0])[:, None]
        )
        torch.testing.assert_close(torch.from_numpy(model[1].weight.detach().numpy()), want)

    simulate(2, body)


def test_the_first_rank_alone_has_the_model() -> None:
    def body() -> None:
        first = flow.env.get_rank() == 0
        model = bare("cpu" if first else "meta")
        if first:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(values(*p.shape, seed=p.numel()))
        model.to_global(LINE, S(0))
        for p in model.parameters():
            assert torch.equal(
                torch.from_numpy(p.detach().numpy()), values(*p.shape, seed=p.numel())
            )
        other = bare("meta" if first else "cpu").to_global(LINE, S(0))
        assert all(p.placement.type == "meta" for p in other.parameters())

    simulate(2, body)
