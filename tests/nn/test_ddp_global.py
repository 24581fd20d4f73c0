"""Tests of DistributedDataParallel over modules of global tensors. Replicas of tensor-parallel and
sharded models are compared with one process that sees the full batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow
import globaltensor.distributed as dist
from globaltensor.distributed.communicator import record_collectives
from globaltensor.errors import GlobalTensorError, PlacementError
from globaltensor.nn.parallel import DistributedDataParallel

S, B = flow.sbp.split, flow.sbp.broadcast
TENSOR = {"0.*": S(0), "3.weight": S(1), "*": B}  # column, then row
SHARDED = {"*": S(0)}


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss(m: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (m(rows[:, :4]) - rows[:, 4:]).square().mean()


def replica() -> tuple[int, flow.Placement]:
    """Return the index of this rank's replica (of two), and the replica's placement."""
    at = flow.env.get_rank() // 2
    return at, flow.placement("cpu", [[0, 1], [2, 3]][at])


def share(step: int, rows_sbp: Any) -> torch.Tensor:
    at, where = replica()
    return batch(step).chunk(2)[at].to_global(where, B).to_global(sbp=rows_sbp)


def wrapped(sbp: Any, seed: int = 0, **options: Any) -> Any:
    return DistributedDataParallel(model(seed).to_global(replica()[1], sbp), **options)


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return the full value of a tensor on this rank's replica."""
    return x.detach().to_global(sbp=B).to_local()


def same(m: nn.Module, plain: nn.Module, gradients: bool = True) -> None:
    for (name, p), q in zip(m.named_parameters(), plain.parameters(), strict=True):
        if gradients:
            assert p.grad is not None, name
            assert q.grad is not None
            assert p.grad.sbp == p.sbp
            torch.testing.assert_close(
                whole(p.grad), q.grad, msg=lambda text, name=name: f"gradient of {name}: {text}"
            )
        else:
            torch.testing.assert_close(
                whole(p), q.detach(), msg=lambda text, name=name: f"{name}: {text}"
            )


def trains(sbp: Any, rows_sbp: Any) -> None:
    """Train replicas that begin with different parameters. The first replica's parameters are
    used."""
    m, plain = wrapped(sbp, seed=replica()[0]), model()
    same(m, plain, gradients=False)
    optimizers = [torch.optim.AdamW(x.parameters(), lr=0.05) for x in (m, plain)]
    for step in range(3):
        for optimizer, net, rows in zip(
            optimizers, (m, plain), (share(step, rows_sbp), batch(step)), strict=True
        ):
            optimizer.zero_grad()
            loss(net, rows).backward()
        same(m, plain)
        for optimizer in optimizers:
            optimizer.step()
    same(m, plain, gradients=False)


def accumulates(sbp: Any, rows_sbp: Any) -> None:
    m, plain = wrapped(sbp), model()
    for step in range(3):
        loss(plain, batch(step)).backward()
    with record_collectives() as log:
        with m.no_sync():
            for step in range(2):
                loss(m, share(step, rows_sbp)).backward()
        assert not [t for t in log if set(t.ranks) - set(replica()[1].flat)], (
            "nothing leaves the replica inside no_sync"
        )
        loss(m, share(2, rows_sbp)).backward()
    same(m, plain)


def read_in_between(sbp: Any, rows_sbp: Any) -> None:
    """Read a gradient inside no_sync. The read sums the gradients so far, and later gradients are
    added."""
    m, plain = wrapped(sbp), model()
    loss(plain, batch(0)).backward()
    with m.no_sync():
        loss(m, share(0, rows_sbp)).backward()
        same(m, plain)
    loss(plain, batch(1)).backward()
    loss(m, share(1, rows_sbp)).backward()
    same(m, plain)


@pytest.mark.parametrize("what", [trains, accumulates, read_in_between], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("sbp", "rows_sbp"),
    [(TENSOR, B), ({"*": B}, S(0)), (SHARDED, S(0)), (TENSOR, S(0))],
    ids=["tensor", "data", "sharded", "mixed"],
)
@pytest.mark.sweep(2)
def test_replicas_train_as_one_process_does(
    what: Callable[..., None], sbp: Any, rows_sbp: Any
) -> None:
    run_on(4, what, sbp, rows_sbp)


def traffic() -> list[tuple[str, tuple[int, ...]]]:
    m = wrapped(TENSOR)
    for step in range(2):
        m.zero_grad()
        rows = share(step, B)
        with record_collectives() as log:
            loss(m, rows).backward()
    return sorted({(t.kind, t.ranks) for t in log})


def test_gradients_cross_once_in_buckets() -> None:
    """Gradients cross once, in buckets. Gradients that a replica replicates are summed over all
    ranks at once. Gradients that it splits are summed between corresponding ranks."""
    for rank, told in enumerate(run_on(4, traffic)):
        mates, peers = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert told == sorted(
            [("all_reduce", mates), ("all_reduce", peers), ("all_reduce", (0, 1, 2, 3))]
        )


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x + self.seen).sum()


def buffers_and_states() -> Any:
    at, where = replica()
    told = []
    for shared in (True, False):
        m = DistributedDataParallel(Counts().to_global(where, B), broadcast_buffers=shared)
        for _ in range(2):
            m.seen.fill_(float(at))
            m(flow.ones(2, placement=where, sbp=B)).backward()
            told.append(whole(m.seen).tolist()[0])
    assert list(m.state_dict()) == ["w", "seen"]
    m.load_state_dict(copy.copy(m.state_dict()))
    own = wrapped(TENSOR, seed=at, broadcast_parameters=False)
    same(own, model(at), gradients=False)
    return told


def test_buffers_and_state_dicts() -> None:
    assert run_on(4, buffers_and_states) == [[0, 0, 0, 0]] * 2 + [[0, 0, 1, 1]] * 2


def a_group_says_who_corresponds() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    m, plain = wrapped(TENSOR, process_group=groups[flow.env.get_rank() % 2]), model()
    loss(m, share(0, B)).backward()
    loss(plain, batch(0)).backward()
    same(m, plain)


def test_a_process_group() -> None:
    run_on(4, a_group_says_who_corresponds)


def one_replica() -> None:
    """Train with one replica on all ranks, so that nothing is averaged."""
    everyone = flow.placement.all("cpu")
    m, plain = DistributedDataParallel(model().to_global(everyone, TENSOR)), model()
    loss(m, batch(0).to_global(everyone, B)).backward()
    loss(plain, batch(0)).backward()
    same(m, plain)


def mistakes() -> None:
    at, where = replica()
    half = model().to_global(where, B)
    half[3].weight = nn.Parameter(torch.ones(2, 6).double())
    with pytest.raises(GlobalTensorError, match=r"3\.weight is local, other parameters are global"):
        DistributedDataParallel(half)
    with pytest.raises(GlobalTensorError, match="by name, not find_unused_parameters"):
        wrapped(B, find_unused_parameters=True)
    other = where if at == 0 else flow.placement("cpu", [[2, 3]])
    unlike = model().to_global(other, B if at == 0 else [B, B])
    with pytest.raises(PlacementError, match="replicas must be alike"):
        DistributedDataParallel(unlike)


def test_what_goes_by_torchs_reducer_is_refused() -> None:
    model = DistributedDataParallel(
        nn.Linear(2, 2).to_global(flow.placement("cpu", [0]), flow.sbp.broadcast)
    )
    with (
        pytest.raises(
            GlobalTensorError,
            match=r"DistributedDataParallel.join is for modules of local parameters: .* drop_last",
        ),
        model.join(),
    ):
        pass
    with pytest.raises(
        GlobalTensorError,
        match=(
            r"register_comm_hook is for modules of local parameters: .* "
            r"flow.set_grad_reduce_dtype"
        ),
    ):
        model.register_comm_hook(None, lambda state, bucket: bucket)


def test_one_replica_and_mistakes() -> None:
    run_on(4, one_replica)
    run_on(4, mistakes)
