"""Tests of torch's DDP, FSDP2 and DTensor, and of global tensors, over MPI. A training step gives
the numbers of gloo and of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.mpi import needs_mpi, run_by_mpi
from support.pool import run_on
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import globaltensor as flow

pytestmark = needs_mpi


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def _rows() -> Tensor:
    return torch.randn(8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _train(model: nn.Module, rows: Tensor) -> list[Tensor]:
    """Run three steps of Adam and return the full parameters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (model(rows[:, :6]) - rows[:, 6:]).pow(2).mean().backward()
        optimizer.step()
    return [
        p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for p in model.parameters()
    ]


def _mine() -> Tensor:
    return _rows().chunk(flow.env.get_world_size())[flow.env.get_rank()]


def _mesh() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(flow.env.get_world_size())))


def single() -> list[Tensor]:
    return _train(_model(), _rows())


def ddp() -> list[Tensor]:
    return _train(DistributedDataParallel(_model(), bucket_cap_mb=1e-4), _mine())


def ddp_with_unused_parameters() -> list[Tensor]:
    return _train(
        DistributedDataParallel(
            _model(), find_unused_parameters=True, gradient_as_bucket_view=True
        ),
        _mine(),
    )


def fsdp2() -> list[Tensor]:
    model = _model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=_mesh())
    return _train(fully_shard(model, mesh=_mesh()), _mine())


def tensor_parallel() -> list[Tensor]:
    return _train(
        parallelize_module(_model(), _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()}),
        _rows(),
    )


def global_tensors() -> list[Tensor]:
    everyone = flow.placement.all("cpu")
    model = _model()
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().to_global(everyone, flow.sbp.broadcast)))
    _train(model, _rows().to_global(everyone, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0)))
    return [p.detach().to_local().clone() for p in model.parameters()]


def _on_this(want: str, train: Callable[[], list[Tensor]]) -> list[Tensor]:
    flow.env.get_rank()
    assert str(dist.get_backend()) in (want, "cpu:gloo,cuda:nccl")
    return train()


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
@pytest.mark.parametrize(
    "train",
    [ddp, ddp_with_unused_parameters, fsdp2, tensor_parallel, global_tensors],
    ids=lambda f: f.__name__,
)
def test_the_numbers_of_gloo_and_of_one_device(train: Callable[[], list[Tensor]]) -> None:
    over_mpi, over_gloo, alone = (
        run_by_mpi(2, _on_this, "mpi", train),
        run_on(2, _on_this, "gloo", train),
        single(),
    )
    for ours, theirs in zip(over_mpi, over_gloo, strict=True):
        for got, same, plain in zip(ours, theirs, alone, strict=True):
            assert torch.equal(got, same), "not the bits that gloo gives"
            torch.testing.assert_close(got, plain)


def _redistributed() -> None:
    """Check uneven shards, and sub-groups of a mesh."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    whole = torch.arange(35.0).reshape(5, 7)
    for source in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Shard(1)]):
        x = DTensor.from_local(
            whole, mesh, [Replicate(), Replicate()], run_check=True
        ).redistribute(mesh, source)
        for target in ([Replicate(), Replicate()], [Shard(1), Replicate()], [Shard(0), Shard(0)]):
            assert torch.equal(x.redistribute(mesh, target).full_tensor(), whole)
    model = _model().float()
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("b"))
    wrapped(torch.ones(2, 6) * dist.get_rank()).sum().backward()
    grads = [torch.empty_like(model[0].weight.grad) for _ in range(2)]
    dist.all_gather(grads, model[0].weight.grad, group=mesh.get_group("b"))
    assert torch.equal(grads[0], grads[1])


@pytest.mark.extended
def test_meshes_of_four_ranks() -> None:
    run_by_mpi(4, _redistributed)
