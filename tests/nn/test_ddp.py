"""Tests of DistributedDataParallel on real processes, with torch's arguments and OneFlow's. One
process that sees the full batch is the reference."""

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
from globaltensor.errors import GlobalTensorError, WorldError
from globaltensor.nn.parallel import DistributedDataParallel


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
    ).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the full batch and this rank's share."""
    whole = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return whole, whole.chunk(flow.env.get_world_size())[flow.env.get_rank()]


def loss(m: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (m(rows[:, :5]) - rows[:, 5:]).square().mean()


def gradients(m: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in m.parameters() if p.grad is not None]


def of_whole(*steps: int) -> list[torch.Tensor]:
    plain = model()
    for step in steps:
        loss(plain, batch(step)[0]).backward()
    return gradients(plain)


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def trains(**keywords: Any) -> None:
    """Train ranks that begin with different parameters. Rank 0's parameters are used."""
    plain, m = model(), DistributedDataParallel(model(flow.env.get_rank()), **keywords)
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1, momentum=0.9) for x in (plain, m)]
    for step in range(3):
        for optimizer, net, rows in zip(optimizers, (plain, m), batch(step), strict=True):
            optimizer.zero_grad()
            loss(net, rows).backward()
            optimizer.step()
    same([p.detach() for p in m.parameters()], [p.detach() for p in plain.parameters()])


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"bucket_size": 2},
        {"use_bucket": False},
        {"bucket_cap_mb": 1, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False, "broadcast_parameters": True},
    ],
    ids=str,
)
def test_it_trains_as_one_process_does(keywords: dict[str, Any]) -> None:
    run_on(2, call, trains, keywords)


def call(fn: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    return fn(**keywords)


def count_buckets(**keywords: Any) -> list[int]:
    sizes: list[int] = []

    # torch reads the annotations and would not recognize strings
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        sizes.append(len(bucket.parameters()))
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda f: f.value()[0] / flow.env.get_world_size())
        )

    m = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)]), **keywords
    )
    m.register_comm_hook(None, hook)
    for _ in range(2):  # torch rebuilds its buckets after the first pass
        sizes.clear()
        m(torch.ones(1, 8)).sum().backward()
    return sizes


BUCKETS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [6]),
    ({"use_bucket": False}, [1] * 6),
    ({"bucket_size": 1}, [1] * 6),
    ({"bucket_size": 2}, [2] * 3),
]


@pytest.mark.parametrize(("keywords", "sizes"), BUCKETS, ids=str)
def test_buckets_hold_as_many_parameters_as_asked(
    keywords: dict[str, Any], sizes: list[int]
) -> None:
    assert run_on(2, call, count_buckets, keywords) == [sizes] * 2


def accumulates() -> None:
    m = DistributedDataParallel(model())
    with m.no_sync():
        loss(m, batch(0)[1]).backward()
        loss(m, batch(1)[1]).backward()
    local = model()
    for step in (0, 1):
        loss(local, batch(step)[1]).backward()
    same(gradients(m), gradients(local))
    loss(m, batch(2)[1]).backward()
    same(gradients(m), of_whole(0, 1, 2))


def joins() -> None:
    """Train with join(). Rank 0 has two more batches, for which the other ranks' gradients count as
    zero."""
    m = DistributedDataParallel(model())
    with m.join():
        for step in range(4 if flow.env.get_rank() == 0 else 2):
            m.zero_grad()
            loss(m, batch(step)[1]).backward()
            alone = model()
            loss(alone, batch(step)[1]).backward()
            same(
                gradients(m),
                of_whole(step)
                if step < 2
                else [g / flow.env.get_world_size() for g in gradients(alone)],
            )


def keeps_their_own() -> None:
    m = DistributedDataParallel(model(flow.env.get_rank()), broadcast_parameters=False)
    same(
        [p.detach() for p in m.parameters()],
        [p.detach() for p in model(flow.env.get_rank()).parameters()],
    )


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.25
        self.w = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x + self.seen).sum()

    def double(self) -> Any:
        return super().double()

    def named(self) -> str:
        return f"counts {self.lr}"


def handles_buffers_and_unused_parameters() -> Any:
    rank, told = flow.env.get_rank(), []
    for shared in (True, False):
        m = DistributedDataParallel(Counts(), broadcast_buffers=shared, find_unused_parameters=True)
        for step in range(2):
            m.seen.fill_(10.0 * step + rank)
            m(torch.ones(1)).backward()
            told.append(m.seen.item())
        assert m.unused.grad is None or not m.unused.grad.any()
        assert m.w.grad is not None
        assert m.w.grad.item() == 2
    assert (m.lr, m.named(), m.module.lr) == (0.25, "counts 0.25", 0.25)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        m.nothing  # noqa: B018
    return told


def works_in_a_group() -> Any:
    """Train each rank alone in its group, so that nothing is averaged."""
    groups = [dist.new_group([r]) for r in range(2)]
    rank = flow.env.get_rank()
    m = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=groups[rank])
    m(torch.full((1, 1), 1.0 + rank)).sum().backward()
    return m.module.weight.grad.item()


@pytest.mark.parametrize("what", [accumulates, joins, keeps_their_own], ids=lambda f: f.__name__)
def test_it(what: Callable[[], None]) -> None:
    run_on(2, what)


def test_buffers_and_unused_parameters() -> None:
    assert run_on(2, handles_buffers_and_unused_parameters) == [[0, 10, 0, 10], [0, 10, 1, 11]]


def test_a_process_group() -> None:
    assert run_on(2, works_in_a_group) == [1.0, 2.0]


def test_a_world_of_one() -> None:
    """DistributedDataParallel works in a world of one. The test is the last that makes a group in
    this process, and it destroys the group."""
    try:
        trains()
    finally:
        dist.destroy_process_group()


def states() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    m = DistributedDataParallel(copy.deepcopy(plain))
    keys = list(plain.state_dict())
    assert list(m.state_dict()) == keys, "the module's own keys"
    assert m.state_dict()._metadata == plain.state_dict()._metadata
    other = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for state in (
        m.state_dict(),
        {f"module.{k}": v for k, v in m.state_dict().items()},
    ):  # (the second is torch's spelling)
        nn.init.zeros_(other.module[0].weight)
        given = dict(state)
        other.load_state_dict(state)
        assert state == given, "what was given stays as it was"
        assert torch.equal(other.module[0].weight, m.module[0].weight)
    inside = nn.ModuleDict({"m": m})
    assert list(inside.state_dict()) == [f"m.{k}" for k in keys]
    inside.load_state_dict(inside.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*module\.0\.weight"):
        m.load_state_dict({})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "extra"'):
        m.load_state_dict(m.state_dict() | {"extra": torch.ones(1)})
    twin = copy.deepcopy(m)
    assert list(twin.state_dict()) == keys
    twin(torch.randn(4, 2)).sum().backward()


def test_state_dicts() -> None:
    run_on(2, states)


def wrong_models() -> None:
    rank = flow.env.get_rank()
    with pytest.raises(
        WorldError,
        match=r"rank 0 has weight, float32\[2, 2\], where rank 1 has weight, float32\[3, 2\]",
    ):
        DistributedDataParallel(nn.Linear(2, 2 + rank))
    with pytest.raises(
        WorldError, match=r"rank 0 has bias, float32\[2\], where rank 1 has no more parameters"
    ):
        DistributedDataParallel(nn.Linear(2, 2, bias=rank == 0))
    with pytest.raises(GlobalTensorError, match="bucket_cap_mb and bucket_size"):
        DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=1, bucket_size=3)
    with pytest.raises(GlobalTensorError, match="at least 1, not 0"):
        DistributedDataParallel(nn.Linear(2, 2), bucket_size=0)


def test_mistakes_are_told() -> None:
    run_on(2, wrong_models)


def test_a_module_on_cuda_moves_to_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module on CUDA moves to the local rank's device. Without GPUs, the test checks the calls to
    the module and to torch."""
    from globaltensor.nn.parallel import distributed

    class Fake(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.moved = index, []

        def parameters(self, recurse: bool = True) -> Any:
            return iter([type("P", (), {"device": torch.device("cuda", self.index)})()])

        def to(self, *args: Any, **kwargs: Any) -> Any:
            self.moved.append(args)

    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for local, index, moves in (
        (2, 0, [(torch.device("cuda", 2),)]),
        (0, 0, []),
        (2, 3, []),
        (5, 0, []),
    ):
        monkeypatch.setattr(
            distributed, "start", lambda local=local: type("W", (), {"local_rank": local})()
        )
        fake = Fake(index)
        distributed._to_own_device(fake)
        assert fake.moved == moves
    assert chosen == [2]
